"""The jaxpipe command: list, show, simulate, check and compare schedules, and plan pipelines.

Exit status 0: success.  1: the schedule is invalid (every violation is printed, with the grid and
the cells marked).  2: bad usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..errors import JaxpipeError
from ..render import Theme
from ..table.activations import Release
from ..table.run_order import Transfers
from ..version import __version__
from .arguments import InvalidScheduleError, UsageError, real_number, whole_number
from .commands import check_command, compare_command, list_command, show_command, simulate_command
from .plan import add_plan, plan_command
from .terminal import Terminal, make_terminal

SUCCESS, INVALID, USAGE = 0, 1, 2
FORMATS = ("grid", "csv", "svg", "html", "trace", "json")
_COMMANDS = {
    "list": list_command,
    "show": show_command,
    "simulate": simulate_command,
    "check": check_command,
    "compare": compare_command,
    "plan": plan_command,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; `argv` is sys.argv[1:] where it is None."""
    arguments = _parser().parse_args(argv)
    terminal = make_terminal()
    try:
        return _run(arguments, terminal)
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe.  Python would report it once more when it
        # flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SUCCESS
    except KeyboardInterrupt:
        return 130


def _run(arguments: argparse.Namespace, terminal: Terminal) -> int:
    """Run one command; errors go to stderr."""
    try:
        is_valid = _COMMANDS[arguments.command](arguments, terminal)
    except InvalidScheduleError as error:
        terminal.complain(str(error))
        return INVALID
    except (UsageError, JaxpipeError) as error:
        terminal.complain(f"jaxpipe {arguments.command}: {error}")
        return USAGE
    except BrokenPipeError:
        raise
    except OSError as error:
        terminal.complain(
            f"jaxpipe {arguments.command}: {error.filename or 'output'}: {error.strerror or error}"
        )
        return USAGE
    except UnicodeEncodeError as error:
        terminal.complain(
            f"jaxpipe {arguments.command}: {error.object[error.start]!a} cannot be written as "
            f"{error.encoding}"
        )
        return USAGE
    sys.stdout.flush()
    return SUCCESS if is_valid else INVALID


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxpipe",
        description="Design, check, compare and draw pipeline-parallel schedules.",
        epilog="Exit status: 0 success, 1 the schedule is invalid, 2 bad usage.",
    )
    parser.add_argument("--version", action="version", version=f"jaxpipe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_list(commands.add_parser("list", help="the schedules that can be built"))
    _add_show(commands.add_parser("show", help="print or draw a schedule"))
    _add_simulate(
        commands.add_parser("simulate", help="makespan, bubble, memory and times of a schedule")
    )
    _add_check(
        commands.add_parser("check", help="check a table and list everything that is invalid in it")
    )
    _add_compare(
        commands.add_parser("compare", help="simulate several schedules of one model side by side")
    )
    add_plan(
        commands.add_parser("plan", help="the fastest pipelines of a model that fit into memory")
    )
    return parser


def _add_list(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the schedules that can be built, or describe those that are named."
    parser.add_argument("names", nargs="*", metavar="NAME")
    _add_json(parser)


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print or draw a schedule."
    _add_source(parser)
    _add_shape(parser)
    _add_costs(parser)
    parser.add_argument("--transfers", action="store_true", help="add SEND and RECV")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="default: by the suffix of FILE (.trace.json is a trace), else grid",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write to a file; - is standard output"
    )
    drawing = parser.add_argument_group("svg and html")
    drawing.add_argument("--title")
    drawing.add_argument(
        "--width",
        type=real_number,
        metavar="PIXELS",
        help="of the picture (default: as wide as the microbatch numbers need)",
    )
    drawing.add_argument(
        "--theme",
        choices=[theme.value for theme in Theme],
        default=Theme.AUTO.value,
        help="of the svg (default: auto)",
    )
    drawing.add_argument(
        "--memory",
        action="store_true",
        help="draw the activations held over time (html always has them)",
    )
    drawing.add_argument(
        "--critical-path",
        action="store_true",
        help="outline a longest chain of actions (html has a switch for it)",
    )


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.description = "Simulate a schedule with given costs."
    _add_source(parser)
    _add_shape(parser)
    _add_costs(parser)
    _add_transfers(parser, Transfers.ASYNC)
    _add_json(parser)


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check a table: completeness, order, placement, deadlock, and a cap on activations."
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a .csv table (torch's form) or a .json one; - is CSV from standard input",
    )
    _add_transfers(parser, Transfers.RENDEZVOUS)
    parser.add_argument(
        "--max-activations",
        type=whole_number,
        metavar="N",
        help="most activations that a device may hold at once",
    )
    _add_json(parser)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Simulate several schedules of one model.  Costs are those of 1/P of the model: a stage "
        "of a schedule with S stages "
        "costs P/S of them, and its activations count P/S too, so that schedules with different "
        "chunks can be compared.  "
        "Each schedule uses the nearest number of --chunks that it allows, and ignores each "
        "--option that it does not take."
    )
    parser.add_argument(
        "sources", nargs="*", metavar="NAME|FILE", help="default: every schedule that can be built"
    )
    _add_shape(parser)
    _add_costs(parser)
    _add_json(parser)


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="NAME|FILE",
        help="a name of `jaxpipe list`, a .csv or .json table, or - for CSV from standard input",
    )


def _add_shape(parser: argparse.ArgumentParser) -> None:
    shape = parser.add_argument_group("shape (of a named schedule)")
    shape.add_argument("-P", "--devices", type=whole_number, metavar="P")
    shape.add_argument("-M", "--microbatches", type=whole_number, metavar="M")
    shape.add_argument(
        "-V",
        "--chunks",
        type=whole_number,
        metavar="V",
        help="stages per device (default: the schedule's own)",
    )
    shape.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the schedule; see jaxpipe list NAME",
    )
    shape.add_argument(
        "--forward-only", action="store_true", help="leave out all backwards, for evaluation"
    )


def _add_costs(parser: argparse.ArgumentParser) -> None:
    costs = parser.add_argument_group("costs")
    costs.add_argument(
        "--costs",
        metavar="F,I,W,T",
        help="times of forward, input gradient, weight gradient and transfer (default 1,1,1,0); "
        "numbers joined by : are one per stage",
    )
    costs.add_argument("--backward", metavar="B", help="time of a full backward (default: I + W)")
    costs.add_argument(
        "--overlap",
        metavar="FB",
        help="time of an overlapped pair (default: the sum of its halves)",
    )
    costs.add_argument(
        "--recompute", metavar="R", help="time of a recomputation (default: as a forward)"
    )
    costs.add_argument(
        "--last", metavar="L", help="time of what one device does of a spread `last` (default 1)"
    )
    costs.add_argument(
        "--last-weight-grad",
        metavar="H",
        help="of that, the time of the weight gradient that H does (default L / 3)",
    )
    costs.add_argument("--first", metavar="E", help="the same of a spread `first` (default 1)")
    costs.add_argument("--first-grad", metavar="G", help="the same of its gradient (default 1)")
    costs.add_argument(
        "--activation",
        metavar="A",
        help="memory of a stage's activations of one microbatch (default 1)",
    )
    costs.add_argument(
        "--checkpoint",
        metavar="C",
        help="memory of the stage input kept where a table has an R (default 0)",
    )
    costs.add_argument(
        "--release",
        choices=[release.value for release in Release],
        default=Release.WEIGHT_GRAD.value,
        help="when activations are freed where the backward is split (default: weight_grad)",
    )


def _add_transfers(parser: argparse.ArgumentParser, default: Transfers) -> None:
    parser.add_argument(
        "--transfers",
        choices=[transfers.value for transfers in Transfers],
        default=default.value,
        help="who waits in a table with SEND and RECV: the consumer (async), the RECV "
        "(buffered), or SEND and RECV for each other "
        f"(rendezvous); default: {default.value}",
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
