"""The jaxpipe command: its commands, and their arguments as data, a line of text for each.

Exit status 0: success.  1: the schedule is invalid (every violation is printed, with the grid and
the cells marked).  2: bad usage.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from inspect import getdoc
from typing import Any

from ..engine.costs import Costs
from ..errors import JaxpipeError, quoted
from ..planner.request import IN_TURN, SCHEDULES
from ..planner.transformer import Transformer
from ..render import Theme
from ..table.encoded import Transfers
from ..table.kinds import Release
from ..version import __version__
from . import commands, terminal

SUCCESS, INVALID, USAGE = 0, 1, 2

# The keywords of argparse by the name of a value in the lines below.
_WHOLE = ("P", "M", "V", "K", "N", "I")
_NUMBER = ("NUMBER", "PIXELS", "SECONDS", "MINUTES")
_KINDS: dict[str, dict[str, Any]] = {
    **{name: {"type": terminal.whole, "metavar": name} for name in _WHOLE},
    **{name: {"type": terminal.number, "metavar": name} for name in _NUMBER},
    "SIZE": {"type": terminal.size, "metavar": "SIZE"},
    "COST": {"type": terminal.cost, "metavar": "COST"},
    "F,I,W,T": {"type": terminal.costs, "metavar": "F,I,W,T"},
    "KEY=VALUE": {"action": "append", "default": [], "metavar": "KEY=VALUE"},
    "FORMAT": {"choices": ("grid", "csv", "svg", "html", "trace", "json")},
    "THEME": {"choices": [each.value for each in Theme]},
    "WHO": {"choices": [each.value for each in Transfers]},
    "WHEN": {"choices": [each.value for each in Release]},
}


def _fields(record: type, names: Iterable[str], value: str) -> str:
    """A line for each of these fields of a dataclass, with the text of its docstring."""
    section = (getdoc(record) or "").partition("Args:\n")[2].partition("\n\n")[0]
    texts = dict(re.findall(r"(?ms)^    (\w+): (.+?)(?=\n    \w|\Z)", section))
    lines = []
    for name in names:
        text = " ".join(texts[name].split()).rstrip(".")
        text = text.replace("where it is None", "by default")
        default = getattr(record, name, None)
        metavar = "" if isinstance(default, bool) else value
        text += f" (default: {default:g})" if default else ""
        lines.append(f"{terminal.flag(name)} {metavar} | {text}")
    return "\n".join(lines)


# Groups of arguments that the help lists together: after a star a name, and a title where there is
# one, then a line for each argument.  A line has flags, the name of the value, "..." for several
# values and "=" before a default; then a bar and the help.  A flag without a value is a switch; a
# positional argument has its name first.  The name of the value decides which texts are accepted.
_ARGUMENTS = f"""* names
names NAME ...
* source
source NAME|FILE | a name of `jaxpipe list`, a .csv or .json table, or - for CSV from standard input
* sources
sources NAME|FILE ... | default: every schedule that can be built
* shape: shape (of a named schedule)
-P --devices P
-M --microbatches M
-V --chunks V | stages per device (default: the schedule's own)
-K --slices K | slices of a sequence (default: 1, or what a .json table says)
--option KEY=VALUE | an option of the schedule; see jaxpipe list NAME
--forward-only | leave out all backwards, for evaluation
* costs: costs (numbers joined by : are one per stage, or one per slice)
--costs F,I,W,T | times of forward, input gradient, weight gradient and transfer (default 1,1,1,0)
--release WHEN =weight_grad | when activations are freed where the backward is split
{_fields(Costs, terminal.OTHER_COSTS, "COST")}
* write
--transfers | add SEND and RECV
--format FORMAT | default: by the suffix of FILE (.trace.json is a trace), else grid
-o --output FILE | write to a file; - is standard output
* drawing: svg and html
--title TITLE
--width PIXELS | of the picture (default: as wide as the microbatch numbers need)
--theme THEME =auto | of the svg
--memory | draw the activations held over time (html always has them)
--critical-path | outline a longest chain of actions (html has a switch for it)
* transfers
--transfers WHO =? | who waits in a table with SEND and RECV: the consumer (async), the RECV
    (buffered), or SEND and RECV for each other (rendezvous)
* file
file FILE | a .csv table (torch's form) or a .json one; - is CSV from standard input
--max-activations N | most activations that a device may hold at once
-K --slices K | slices of a sequence (default: 1, or what a .json table says)
* plan
-P --devices P | devices along the pipeline
-M --microbatches M | microbatches of a step
--memory SIZE | of a device, e.g. 80GB (default: no limit)
--fsdp N | replicas that split parameters, gradients and optimizer state; a file of costs has those
    of one of them
--fsdp-bandwidth NUMBER | bytes a second of a device in each direction among them (default: 5e10)
-o --output FILE | draw the best plan: a file that ends in .html or .svg
* choices: what may vary
--schedules NAME ... | default: {" ".join(SCHEDULES)}, and with --fsdp {IN_TURN}
-V --chunks V ... | default: 1 2 4
-K --slices K ... | slices of a sequence; a microbatch is a sequence then (default: 1)
--remat POLICY ... | none, full, stages, or a policy (default: all; stages with --memory)
--no-offload | keep residuals in the device's memory
--within SECONDS | try no further choice after this time
--search SECONDS =0 | search for a shorter table (needs jaxpipe[solver])
* sizes: model by its sizes
--layers N
{_fields(Transformer, (field.name for field in fields(Transformer)), "NUMBER")}
* published: published model, with its mesh chosen
--model NAME | as examples/llama.py names it, llama3-70b
--gpus N | devices in all; hosts have eight
--batch N | rows of a step
* layers: model by a file of costs
--costs FILE | JSON: {{"layers": "Et*80,L", "costs": {{"t": {{"forward": 0.01, ...}}, ...}},
    "transfer": 0}}
* doctor
--devices N | along the pipeline (default: all that there are, one CPU device without accelerators)
--minutes MINUTES =3 | the most for all checks
--steps N =200 | runs of each program whose numbers are compared
--only TEXT | checks whose title holds the text
-o --output FILE | write an HTML report
--no-prices | do not write the measured times into the file of prices
* processes: one of several processes, each of which runs the command
--coordinator HOST:PORT | of process 0
--processes N =1
--process I =0 | the number of this one
"""
# Each command and its groups of arguments, with the default that one of them leaves open.
COMMANDS: dict[Callable[[argparse.Namespace], bool | None], str] = {
    commands.list_command: "names",
    commands.show_command: "source shape costs write drawing",
    commands.simulate_command: "source shape costs transfers=async",
    commands.check_command: "file transfers=rendezvous",
    commands.compare_command: "sources shape costs",
    commands.plan_command: "plan choices sizes published layers",
    commands.doctor_command: "doctor processes",
}


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; `run` of the parsed arguments runs the command.

    The docstring of a command's function is its help.
    """
    parser = argparse.ArgumentParser(
        prog="jaxpipe",
        description="Design, check, compare and draw pipeline-parallel schedules.",
        epilog="Exit status: 0 success, 1 the schedule is invalid, 2 bad usage.",
    )
    parser.add_argument("--version", action="version", version=f"jaxpipe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    groups = {}
    for text in _ARGUMENTS.replace("\n    ", " ").split("* ")[1:]:
        head, *lines = text.splitlines()
        name, _, title = head.partition(": ")
        groups[name] = title, lines
    for run, keys in COMMANDS.items():
        name, text = run.__name__.removesuffix("_command"), getdoc(run) or ""
        own = commands.add_parser(name, help=text.partition(".")[0], description=text)
        own.set_defaults(run=run)
        for key in keys.split():
            name, _, default = key.partition("=")
            title, lines = groups[name]
            to = own.add_argument_group(title) if title else own
            for line in lines:
                _add(to, line.replace("=?", f"={default}"))
        _add(own, "--json | print JSON")
    return parser


def _add(parser: argparse._ActionsContainer, line: str) -> None:
    """Add the argument of a line."""
    left, _, text = line.partition(" | ")
    terms = left.split()
    names = [word for word in terms if word.startswith("-")] or terms[:1]
    default = terms.pop()[1:] if terms[-1].startswith("=") else None
    several = terms[-1] == "..." and terms.pop()
    text += "" if default is None else f" (default: {default})"
    shown = text.strip().replace("%", "%%")
    options: dict[str, Any] = {"help": shown, "default": default}
    if terms == names:
        options = {"help": shown, "action": "store_true"}
    else:
        options |= _KINDS.get(terms[-1], {"metavar": terms[-1]})
    if several:
        options["nargs"] = "+" if line.startswith("-") else "*"
    parser.add_argument(*names, **options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; `argv` is sys.argv[1:] where it is None."""
    arguments = make_parser().parse_args(argv)
    try:
        if odd := [text for text in argv or () if "\0" in text]:
            raise terminal.UsageError(
                f"{quoted(odd[0])} is not a file name: it holds a null character"
            )
        is_good = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe.  Python would report it once more when it
        # flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SUCCESS
    except KeyboardInterrupt:
        return 130
    except terminal.InvalidScheduleError as error:
        terminal.complain(str(error))
        return INVALID
    except (JaxpipeError, OSError, UnicodeEncodeError) as error:
        terminal.complain(f"jaxpipe {arguments.command}: {_text(error)}")
        return USAGE
    return INVALID if is_good is False else SUCCESS


def _text(error: Exception) -> str:
    """An error as the command line shows it."""
    if isinstance(error, OSError):
        return f"{error.filename or 'output'}: {error.strerror or error}"
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object[error.start]!a} cannot be written as {error.encoding}"
    return str(error)
