"""Write docs/api.md: every public name with the first sentence of its docstring.  Run: python
docs/make_api.py.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import jaxpipe as jp

HERE = Path(__file__).parent
# imported by name, each for what it needs
MODULES = tuple(
    f"jaxpipe.{name}"
    for name in (
        *("table", "engine", "transforms", "layouts", "planner", "measuring", "inspect", "render"),
        *("megatron", "errors", "checkpoint", "debug", "distributed", "eager", "flax"),
    )
)


def first_sentence(value: Any) -> str:
    """The first paragraph of a docstring on one line."""
    text = inspect.getdoc(value) or ""
    return " ".join(text.split("\n\n")[0].split())


def signature(name: str, value: Any) -> str:
    """A function's name with its parameters."""
    if inspect.isclass(value) or not callable(value):
        return name
    return f"{name}({', '.join(inspect.signature(value).parameters)})"


def members(value: type) -> list[str]:
    """The public methods and properties that a class defines itself, or that those of flax have in
    common.
    """
    lines = []
    hidden = [
        base
        for base in reversed(value.__mro__)
        if base is not value and base.__module__.startswith("jaxpipe.flax.")
    ]
    own = {name: member for base in (*hidden, value) for name, member in vars(base).items()}
    for name, member in own.items():
        target = (
            member.fget
            if isinstance(member, property)
            else getattr(member, "__func__", getattr(member, "func", member))
        )
        if name.startswith("_") or not (inspect.isfunction(target)):
            continue
        lines.append(f"  - `{name}`: {first_sentence(target)}")
    return lines


def page() -> str:
    """The whole page."""
    lines = ["# Public names", "", "Written by `docs/make_api.py` from the docstrings.", ""]
    for name in jp.__all__:
        value = getattr(jp, name)
        if name in ("Cell",):
            lines.append(
                f"- `jp.{name}`: a cell of a row: an `Action`, an `Overlap`, or None where the "
                "device idles."
            )
            continue
        lines.append(f"- `jp.{signature(name, value)}`: {first_sentence(value)}")
        if inspect.isclass(value):
            lines += members(value)
        if inspect.ismodule(value):
            for inner in getattr(
                value, "__all__", [n for n in vars(value) if not n.startswith("_")]
            ):
                target = getattr(value, inner)
                if inspect.isfunction(target) and target.__module__.startswith("jaxpipe"):
                    lines.append(f"  - `{signature(inner, target)}`: {first_sentence(target)}")
    for module in map(import_module, MODULES):
        lines += ["", f"## {module.__name__}", "", first_sentence(module), ""]
        for name, value in vars(module).items():
            home = getattr(value, "__module__", "")
            own = callable(value) and (
                home.startswith(module.__name__) or name in getattr(module, "__all__", ())
            )
            if own and not name.startswith("_"):
                lines.append(f"- `{signature(name, value)}`: {first_sentence(value)}")
                lines += members(value) if inspect.isclass(value) else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (HERE / "api.md").write_text(page())
