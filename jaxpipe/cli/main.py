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
from .arguments import InvalidScheduleError
from .parser import make_parser
from .terminal import Terminal, make_terminal

SUCCESS, INVALID, USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; `argv` is sys.argv[1:] where it is None."""
    arguments = make_parser().parse_args(argv)
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
        is_valid = arguments.run(arguments, terminal)
    except InvalidScheduleError as error:
        terminal.complain(str(error))
        return INVALID
    except BrokenPipeError:
        raise
    except (JaxpipeError, OSError, UnicodeEncodeError) as error:
        terminal.complain(f"jaxpipe {arguments.command}: {_text(error)}")
        return USAGE
    sys.stdout.flush()
    return SUCCESS if is_valid else INVALID


def _text(error: Exception) -> str:
    """An error as the command line shows it."""
    if isinstance(error, OSError):
        return f"{error.filename or 'output'}: {error.strerror or error}"
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object[error.start]!a} cannot be written as {error.encoding}"
    return str(error)
