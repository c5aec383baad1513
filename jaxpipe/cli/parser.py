"""The commands and their arguments, as data: a line of text for each argument."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from ..errors import quoted
from ..planner.request import SCHEDULES
from ..render import Theme
from ..table.activations import Release
from ..table.run_order import Transfers
from ..version import __version__
from .arguments import MOST_DIGITS, REAL, WHOLE
from .commands import check_command, compare_command, list_command, show_command, simulate_command
from .doctor import doctor_command
from .plan import plan_command
from .terminal import Terminal


class Command(NamedTuple):
    """A command; `run` returns False where a table is invalid.

    `groups` are arguments that the help lists together: a title, then a line for each.  A line has
    the flags and the name of the value, a bar, and the help ("-P --devices P | help").  A flag
    without a value is a switch; a positional argument has its name first.  The name of the value
    says what is accepted (`_KINDS`).  `more` holds further keywords of argparse by the argument's
    name.
    """

    name: str
    run: Callable[[argparse.Namespace, Terminal], bool]
    help: str
    description: str
    groups: tuple[str, ...]
    more: Mapping[str, Mapping[str, Any]]


def whole(text: str) -> int:
    """An argument that is a whole number, for argparse."""
    if WHOLE.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} is not a whole number (of at most {MOST_DIGITS} digits)"
        )
    return int(text)


def real(text: str) -> float:
    """An argument that is a number, for argparse."""
    if REAL.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a number")
    return float(text)


def size(text: str) -> float:
    """An argument that is a number of bytes, `80GB` or `74.5GiB`, for argparse."""
    match = re.fullmatch(
        r"([0-9]+\.?[0-9]*(?:[eE][0-9]+)?)\s*(?:([KMGT])(I?)B)?", text.strip(), re.IGNORECASE
    )
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} is not a size; write 80GB, 74.5GiB or a number of bytes"
        )
    power = "KMGT".index(match[2].upper()) + 1 if match[2] else 0
    return float(match[1]) * (2.0**10 if match[3] else 1e3) ** power


def remat(text: str) -> str | None:
    """`none`, or a name that `plan` takes, for argparse."""
    return None if text == "none" else text


def _values(choices: Iterable[Enum]) -> dict[str, Any]:
    """One of the values of an enum."""
    return {"choices": [each.value for each in choices]}


# By the name of a value in the lines below: what argparse accepts.
_WHOLE = ("P", "M", "V", "K", "N", "I")
_REAL = ("COUNT", "WIDTH", "SHARE", "TOKENS", "RATE", "PIXELS", "SECONDS", "MINUTES")
_KINDS: Mapping[str, dict[str, Any]] = {
    **{name: {"type": whole} for name in _WHOLE},
    **{name: {"type": real} for name in _REAL},
    "SIZE": {"type": size},
    "POLICY": {"type": remat},
    "FORMAT": {"choices": ("grid", "csv", "svg", "html", "trace", "json")},
    "THEME": _values(Theme),
    "WHO": _values(Transfers),
    "WHEN": _values(Release),
}
_SOURCE = """
source NAME|FILE | a name of `jaxpipe list`, a .csv or .json table, or - for CSV from standard input
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
--release WHEN | when activations are freed where the backward is split (default: weight_grad)
"""
_DRAWING = """svg and html
--title TITLE
--width PIXELS | of the picture (default: as wide as the microbatch numbers need)
--theme THEME | of the svg (default: auto)
--memory | draw the activations held over time (html always has them)
--critical-path | outline a longest chain of actions (html has a switch for it)
"""
_TRANSFERS = """
--transfers WHO | who waits in a table with SEND and RECV: the consumer (async), the RECV
    (buffered), or SEND and RECV for each other (rendezvous); default: {}
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
--schedules NAME | default: {" ".join(SCHEDULES)}
-V --chunks V | default: 1 2 4
-K --slices K | slices of a sequence; a microbatch is a sequence then (default: 1)
--remat POLICY | none, full, stages, or a policy (default: all; stages with --memory)
--no-offload | keep residuals in the device's memory
--within SECONDS | try no further choice after this time
--search SECONDS | search for a shorter table (needs jaxpipe[solver])
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
--minutes MINUTES | the most for all checks (default: 3)
--steps N | runs of each program whose numbers are compared (default: 200)
--only TEXT | checks whose title holds the text
-o --output FILE | write an HTML report
--no-prices | do not write the measured times into the file of prices
"""
_PROCESSES = """one of several processes, each of which runs the command
--coordinator HOST:PORT | of process 0
--processes N
--process I | the number of this one
"""
_SHARED: dict[str, dict[str, Any]] = {
    "option": {"action": "append", "default": []},
    "release": {"default": Release.WEIGHT_GRAD.value},
}
COMMANDS = (
    Command(
        "list",
        list_command,
        "the schedules that can be built",
        "List the schedules that can be built, or describe those that are named.",
        ("\nnames NAME", _JSON),
        {"names": {"nargs": "*"}},
    ),
    Command(
        "show",
        show_command,
        "print or draw a schedule",
        "Print or draw a schedule.",
        (_SOURCE, _SHAPE, _COSTS, _WRITE, _JSON, _DRAWING),
        _SHARED | {"theme": {"default": Theme.AUTO.value}},
    ),
    Command(
        "simulate",
        simulate_command,
        "makespan, bubble, memory and times of a schedule",
        "Simulate a schedule with given costs.",
        (_SOURCE, _SHAPE, _COSTS, _TRANSFERS.format("async"), _JSON),
        _SHARED | {"transfers": {"default": "async"}},
    ),
    Command(
        "check",
        check_command,
        "check a table and list everything that is invalid in it",
        "Check a table: completeness, order, placement, deadlock, and a cap on activations.",
        (_CHECK, _TRANSFERS.format("rendezvous"), _JSON),
        {"transfers": {"default": "rendezvous"}},
    ),
    Command(
        "compare",
        compare_command,
        "simulate several schedules of one model side by side",
        "Simulate several schedules of one model.  Costs are those of 1/P of the model: a stage of "
        "a schedule with S stages costs P/S of them, and its activations count P/S too, so that "
        "schedules with different chunks can be compared.  Each schedule uses the nearest number "
        "of --chunks that it allows, and ignores each --option that it does not take.",
        ("\nsources NAME|FILE | default: every schedule that can be built", _SHAPE, _COSTS, _JSON),
        _SHARED | {"sources": {"nargs": "*"}},
    ),
    Command(
        "plan",
        plan_command,
        "the fastest pipelines of a model that fit into memory",
        "The fastest pipelines of a model that fit: layers to stages, schedule, chunks, remat; a "
        "step's seconds and a device's memory.  The model is given by its sizes (a decoder-only "
        "transformer; times are then estimates) or by a file of costs.",
        (_PLAN, _VARY, _SIZES, _PUBLISHED, _FILE, _JSON),
        {
            "schedules": {"nargs": "+"},
            "chunks": {"nargs": "+", "default": [1, 2, 4]},
            "slices": {"nargs": "+"},
            "remat": {"nargs": "+"},
            "search": {"default": 0.0},
        },
    ),
    Command(
        "doctor",
        doctor_command,
        "check versions, times, numbers and memory of this machine",
        "Check this machine before a long run: versions with known faults, options of XLA, numbers "
        "of six schedules against the plain function, times of predicates, hops and copies, memory "
        "and speed.  Each check has a limit of time; a hang is ended and named.  Measured times go "
        "into a file that Pipeline and plan read (JAXPIPE_PRICES, or the user's folder of "
        "settings).  Exit status 1 where a line is wrong.",
        (_DOCTOR, _PROCESSES, _JSON),
        {
            "minutes": {"default": 3.0},
            "steps": {"default": 200},
            "processes": {"default": 1},
            "process": {"default": 0},
        },
    ),
)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; `run` of what it returns runs the command."""
    parser = argparse.ArgumentParser(
        prog="jaxpipe",
        description="Design, check, compare and draw pipeline-parallel schedules.",
        epilog="Exit status: 0 success, 1 the schedule is invalid, 2 bad usage.",
    )
    parser.add_argument("--version", action="version", version=f"jaxpipe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        own = commands.add_parser(command.name, help=command.help, description=command.description)
        own.set_defaults(run=command.run)
        for group in command.groups:
            title, _, lines = group.replace("\n    ", " ").partition("\n")
            to = own.add_argument_group(title) if title else own
            for line in lines.splitlines():
                _add(to, line, command.more)
    return parser


def _add(
    parser: argparse._ActionsContainer, line: str, more: Mapping[str, Mapping[str, Any]]
) -> None:
    left, _, text = line.partition(" | ")
    words = left.split()
    flags = [word for word in words if word.startswith("-")]
    name = flags[-1].strip("-").replace("-", "_") if flags else words[0]
    options = {"help": text.replace("%", "%%"), **more.get(name, {})}
    if len(words) == len(flags):
        options["action"] = "store_true"
    else:
        options |= _KINDS.get(words[-1], {})
        options |= {} if "choices" in options else {"metavar": words[-1]}
    parser.add_argument(*(flags or words[:1]), **options)
