"""The commands and their arguments, as data: a line of text for each argument."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from enum import Enum
from inspect import getdoc
from typing import Any, TypeAlias

from ..planner.plan import SCHEDULES
from ..render import Theme
from ..table.activations import Release
from ..table.run_order import Transfers
from ..version import __version__
from .arguments import number, size, whole
from .commands import check_command, compare_command, list_command, show_command, simulate_command
from .doctor import doctor_command
from .plan import plan_command
from .terminal import Terminal

Run: TypeAlias = Callable[[argparse.Namespace, Terminal], bool]


def remat(text: str) -> str | None:
    """`none`, or a name that `plan` takes, for argparse."""
    return None if text == "none" else text


def _values(choices: Iterable[Enum]) -> dict[str, Any]:
    """One of the values of an enum."""
    return {"choices": [each.value for each in choices]}


# By the name of a value in the lines below: what argparse accepts.
_WHOLE = ("P", "M", "V", "K", "N", "I")
_NUMBER = ("COUNT", "WIDTH", "SHARE", "TOKENS", "RATE", "PIXELS", "SECONDS", "MINUTES")
_KINDS: dict[str, dict[str, Any]] = {
    **{name: {"type": whole, "metavar": name} for name in _WHOLE},
    **{name: {"type": number, "metavar": name} for name in _NUMBER},
    "SIZE": {"type": size, "metavar": "SIZE"},
    "POLICY": {"type": remat, "metavar": "POLICY"},
    "KEY=VALUE": {"action": "append", "default": [], "metavar": "KEY=VALUE"},
    "FORMAT": {"choices": ("grid", "csv", "svg", "html", "trace", "json")},
    "THEME": _values(Theme),
    "WHO": _values(Transfers),
    "WHEN": _values(Release),
}
# Groups of arguments that the help lists together: a title, then a line for each.  A line has the
# flags, the name of the value, "..." for several values and "=" before a default; then a bar and
# the help.  A flag without a value is a switch; a positional argument has its name first.  The name
# of the value says what is accepted.
_SOURCE = """
source NAME|FILE | a name of `jaxpipe list`, a .csv or .json table, or - for CSV from standard input
"""
_SOURCES = """
sources NAME|FILE ... | default: every schedule that can be built
"""
_SHAPE = """shape (of a named schedule)
-P --devices P
-M --microbatches M
-V --chunks V | stages per device (default: the schedule's own)
-K --slices K | slices of a sequence (default: 1, or what a .json table says)
--option KEY=VALUE | an option of the schedule; see jaxpipe list NAME
--forward-only | leave out all backwards, for evaluation
"""
_COSTS = """costs
--costs F,I,W,T | times of forward, input gradient, weight gradient and transfer (default 1,1,1,0);
    numbers joined by : are one per stage
--backward B | time of a full backward (default: I + W)
--overlap FB | time of an overlapped pair (default: the sum of its halves)
--recompute R | time of a recomputation (default: as a forward)
--last L | time of what one device does of a spread `last` (default 1)
--last-weight-grad H | of that, the time of the weight gradient that H does (default L / 3)
--first E | the same of a spread `first` (default 1)
--first-grad G | the same of its gradient (default 1)
--activation A | memory of a stage's activations of one microbatch (default 1)
--buffer S | memory of the rows that a stage's slices append for one sequence (default 0)
--slice-factors F:F | by slice, joined by :, what its times are multiplied with (default 1)
--checkpoint C | memory of the stage input kept where a table has an R (default 0)
--release WHEN =weight_grad | when activations are freed where the backward is split
"""
_DRAWING = """svg and html
--title TITLE
--width PIXELS | of the picture (default: as wide as the microbatch numbers need)
--theme THEME =auto | of the svg
--memory | draw the activations held over time (html always has them)
--critical-path | outline a longest chain of actions (html has a switch for it)
"""
_TRANSFERS = """
--transfers WHO ={} | who waits in a table with SEND and RECV: the consumer (async), the RECV
    (buffered), or SEND and RECV for each other (rendezvous)
"""
_JSON = """
--json | print JSON
"""
_WRITE = """
--transfers | add SEND and RECV
--format FORMAT | default: by the suffix of FILE (.trace.json is a trace), else grid
-o --output FILE | write to a file; - is standard output
"""
_CHECK = """
file FILE | a .csv table (torch's form) or a .json one; - is CSV from standard input
--max-activations N | most activations that a device may hold at once
-K --slices K | slices of a sequence (default: 1, or what a .json table says)
"""
_PLAN = """
-P --devices P | devices along the pipeline
-M --microbatches M | microbatches of a step
--memory SIZE | of a device, e.g. 80GB (default: no limit)
-o --output FILE | draw the best plan: a file that ends in .html or .svg
"""
_VARY = f"""what may vary
--schedules NAME ... | default: {" ".join(SCHEDULES)}
-V --chunks V ... | default: 1 2 4
-K --slices K ... | slices of a sequence; a microbatch is a sequence then (default: 1)
--remat POLICY ... | none, full, stages, or a policy (default: all; stages with --memory)
--no-offload | keep residuals in the device's memory
--within SECONDS | try no further choice after this time
--search SECONDS =0 | search for a shorter table (needs jaxpipe[solver])
"""
_SIZES = """model by its sizes
--layers N
--width WIDTH
--vocab COUNT
--context TOKENS | of a sequence (default: 4096)
--rows COUNT | sequences of a microbatch (default: 1)
--ffn WIDTH | width of the MLP, or of one expert (default: 4 times the width)
--gated | the MLP has three matrices (SwiGLU), as experts always have
--experts COUNT | of a layer (default: none)
--chosen COUNT | experts of a token (default: 1)
--shared WIDTH | width of the experts that every token has (default: 0)
--capacity RATE | times the tokens of an even load that an expert takes (default: all tokens)
--expert-devices COUNT | devices that share the experts (default: 1)
--normed | queries and keys of a head are normed (Qwen3)
--post-norms | results of attention and MLP are normed too (Gemma 2)
--tied | embedding and head have one table
--kv-share SHARE | heads of keys / heads (default: 1)
--q-share SHARE | width of the queries / width (default: 1)
--loss-tokens TOKENS | tokens of a row whose logits are there at a time (default: all)
--head COUNT | features of a head (default: 128)
--tensor COUNT | devices that share a layer (default: 1)
--sequence | they share what is between layers too
--shards COUNT | devices that share the optimizer's state (default: 1)
--flops RATE | a second that matmuls reach (default: 4e14)
--bandwidth RATE | bytes a second of a hop (default: 5e10; within a host of 8 as the next)
--tensor-bandwidth RATE | of sums over the devices of a layer (default: 3e11)
"""
_PUBLISHED = """published model, with its mesh chosen
--model NAME | as examples/llama.py names it, llama3-70b
--gpus N | devices in all; hosts have eight
--batch N | rows of a step
"""
_FILE = """model by a file of costs
--costs FILE | JSON: {"layers": "Et*80,L", "costs": {"t": {"forward": 0.01, ...}, ...},
    "transfer": 0}
"""
_DOCTOR = """
--devices N | along the pipeline (default: all that there are, one CPU device without accelerators)
--minutes MINUTES =3 | the most for all checks
--steps N =200 | runs of each program whose numbers are compared
--only TEXT | checks whose title holds the text
-o --output FILE | write an HTML report
--no-prices | do not write the measured times into the file of prices
"""
_PROCESSES = """one of several processes, each of which runs the command
--coordinator HOST:PORT | of process 0
--processes N =1
--process I =0 | the number of this one
"""
# Each command, the line of help, and its groups of arguments.
COMMANDS: tuple[tuple[Run, str, tuple[str, ...]], ...] = (
    (list_command, "the schedules that can be built", ("\nnames NAME ...", _JSON)),
    (
        show_command,
        "print or draw a schedule",
        (_SOURCE, _SHAPE, _COSTS, _WRITE, _JSON, _DRAWING),
    ),
    (
        simulate_command,
        "makespan, bubble, memory and times of a schedule",
        (_SOURCE, _SHAPE, _COSTS, _TRANSFERS.format("async"), _JSON),
    ),
    (
        check_command,
        "check a table and list everything that is invalid in it",
        (_CHECK, _TRANSFERS.format("rendezvous"), _JSON),
    ),
    (
        compare_command,
        "simulate several schedules of one model side by side",
        (_SOURCES, _SHAPE, _COSTS, _JSON),
    ),
    (
        plan_command,
        "the fastest pipelines of a model that fit into memory",
        (_PLAN, _VARY, _SIZES, _PUBLISHED, _FILE, _JSON),
    ),
    (
        doctor_command,
        "check versions, times, numbers and memory of this machine",
        (_DOCTOR, _PROCESSES, _JSON),
    ),
)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; `run` of what it returns runs the command.

    The docstring of a command's function is its description.
    """
    parser = argparse.ArgumentParser(
        prog="jaxpipe",
        description="Design, check, compare and draw pipeline-parallel schedules.",
        epilog="Exit status: 0 success, 1 the schedule is invalid, 2 bad usage.",
    )
    parser.add_argument("--version", action="version", version=f"jaxpipe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for run, text, groups in COMMANDS:
        name = run.__name__.removesuffix("_command")
        own = commands.add_parser(name, help=text, description=getdoc(run))
        own.set_defaults(run=run)
        for group in groups:
            title, _, lines = group.replace("\n    ", " ").partition("\n")
            to = own.add_argument_group(title) if title else own
            for line in lines.splitlines():
                _add(to, line)
    return parser


def _add(parser: argparse._ActionsContainer, line: str) -> None:
    """Add the argument of a line."""
    left, _, text = line.partition(" | ")
    words = left.split()
    names = [word for word in words if word.startswith("-")] or words[:1]
    default = words.pop()[1:] if words[-1].startswith("=") else None
    several = words[-1] == "..." and words.pop()
    text += "" if default is None else f" (default: {default})"
    options: dict[str, Any] = {"help": text.strip().replace("%", "%%"), "default": default}
    if words == names:
        options = {"help": options["help"], "action": "store_true"}
    else:
        options |= _KINDS.get(words[-1], {"metavar": words[-1]})
    if several:
        options["nargs"] = "+" if line.startswith("-") else "*"
    parser.add_argument(*names, **options)
