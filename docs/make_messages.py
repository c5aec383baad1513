"""Write docs/messages.md: what users get wrong, and what jaxpipe says.  Run: JAX_PLATFORMS=cpu python docs/make_messages.py (two minutes).

`python docs/make_messages.py --keep FILE` writes what the jaxpipe on PYTHONPATH says as JSON: so docs/messages_before.json
was made, of commit 2139148.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import re
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
import message_cases as cases

HERE = Path(__file__).parent
PAGE, BEFORE = HERE / "messages.md", HERE / "messages_before.json"
LIMIT, MOST = 60, 700  # seconds of a case, characters of a message
HEAD = """# What errors say

What somebody writes, what an early jaxpipe (2139148) made of it, and what comes of it now. Written by
`python docs/make_messages.py`; the tests compare the page with what is said today. What the processes of a
pod say is in [several hosts](several_hosts.md).

All cases begin with this:

```py
{helpers}


PARAMS = {{"stages": {{"w": ones(2, 4, 4) / 4}}, "last": {{}}}}
BATCH = {{"x": ones(4, 4), "y": ones(4, 4)}}
```
"""


def found() -> Iterator[tuple[type, str, Callable[[], Any]]]:
    """Section, title and function of each case."""
    for section in cases.SECTIONS:
        for name, function in vars(section).items():
            if inspect.isfunction(function):
                yield section, name.replace("_", " "), function


def said(function: Callable[[], Any]) -> str:
    """What comes out of a case: warnings, and a value or an error with its notes."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        try:
            value = function()
            text = "no error" if value is None else value if isinstance(value, str) else shown(value)
        except Exception as error:
            text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return readable("\n".join([*(f"{each.category.__name__}: {each.message}" for each in warned), text]))


def shown(value: Any) -> str:
    """Numbers to four digits."""
    return str(jax.tree.map(lambda leaf: float(f"{float(leaf):.4g}") if hasattr(leaf, "dtype") else leaf, value))


def readable(text: str) -> str:
    """Without what differs from run to run; the first of a long text."""
    text = re.sub(r"/\S*/tmp\w+|/tmp/tmp\w+", "FOLDER", text)
    text = re.sub(r"(?:/[\w.\-]+)+/([\w\-]+\.py)", r"\1", text)
    text = re.sub(r"message_cases\.py:\d+", "message_cases.py", text)
    text = re.sub(r" at 0x[0-9a-f]+", "", text).strip()
    lines = [line.rstrip() for line in text.splitlines() if set(line.strip()) - {"-"} and "JAX has removed its internal" not in line]
    whole = "\n".join(line if len(line) <= MOST else f"{line[:MOST]}... ({len(line):,} characters)" for line in lines[:12])
    more = f"\n... ({len(lines) - 12:,} more lines)" if len(lines) > 12 else ""
    return whole[: 3 * MOST] + more


def body(function: Callable[[], Any]) -> str:
    """The lines of a function."""
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    return textwrap.dedent("\n".join(lines[1:]))


def _child(function: Callable[[], Any], pipe: Any) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))
    jax.config.update("jax_num_cpu_devices", 4)
    try:
        pipe.send(said(function))
    except BaseException:
        pipe.send(readable(traceback.format_exc().splitlines()[-1]))


def said_apart(function: Callable[[], Any]) -> str:
    """The same in a process of its own, which may hang, die or fill the memory."""
    here, there = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=_child, args=(function, there))
    process.start()
    there.close()
    try:
        text = here.recv() if here.poll(LIMIT) else f"nothing: it hangs (ended after {LIMIT} s)"
    except EOFError:
        text = "nothing: the process dies"
    process.kill()
    process.join()
    return str(text)


def page() -> str:
    """The page's text."""
    before = json.loads(BEFORE.read_text())
    parts = [HEAD.format(helpers="\n\n\n".join(inspect.getsource(helper).strip() for helper in cases.HELPERS))]
    section = None
    for own, title, function in found():
        if own is not section:
            section = own
            parts.append(f"## {own.__doc__}\n")
        parts.append(entry(title, function, said_apart(function), before["says"]))
    return "\n".join(parts)


def entry(title: str, function: Callable[[], Any], now: str, before: Mapping[str, str] | None = None) -> str:
    """One case on the page."""
    says = json.loads(BEFORE.read_text())["says"] if before is None else before
    texts = [f"{when}:\n\n```\n{text}\n```" for when, text in (("Before", says[title]), ("Now", now))]
    return "\n\n".join([f"### {title[0].upper()}{title[1:]}", f"```py\n{body(function)}\n```", *texts]) + "\n"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--keep"]:
        says = {title: said_apart(function) for _, title, function in found()}
        Path(sys.argv[2]).write_text(json.dumps({"says": says}, indent=1) + "\n")
    else:
        PAGE.write_text(page())
