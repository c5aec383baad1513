"""The command line in this process."""

from __future__ import annotations

import pytest

from jaxpipe.cli.main import main


class Result:
    """Exit status and what was printed."""

    def __init__(self, status, out, err):
        self.status, self.out, self.err = status, out, err


@pytest.fixture
def run(capsys):
    """Run the command in this process."""

    def call(*arguments):
        try:
            status = main([str(a) for a in arguments])
        except SystemExit as stop:  # argparse's own exit
            status = stop.code
        out, err = capsys.readouterr()
        return Result(status, out, err)

    return call
