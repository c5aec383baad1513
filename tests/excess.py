"""Texts and numbers that are far too long, and tables of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable

import pytest
from frugal import quick, small

import jaxpipe as jp
from jaxpipe import Schedule
from jaxpipe.errors import MAX_DEVICES

DIGITS = "9" * 5000
HUGE = 10**5000  # Python refuses to write it out
FULL_WIDTH = "\uff10F\uff10"  # looks like 0F0


def refused(call: Callable[[], object]) -> str:
    """The message of the error that a call raises, having taken little."""
    message = ""

    def attempt() -> None:
        nonlocal message
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(jp.JaxpipeError) as caught:
                call()
        message = str(caught.value)

    assert quick(attempt)
    assert small(attempt)
    assert len(message) < 20_000, "a message is for reading"
    return message


def table(**changes: object) -> str:
    """A JSON table of one action, with changes."""
    return json.dumps(json.loads(Schedule.from_csv("0F0").to_json()) | changes)


SENT = {"num_devices": 2, "stage_to_device": [0, 1], "rows": [["0SEND_F0"], ["1RECV_F0"]]}
CSV = {
    "a microbatch of 5,000 digits": (f"0F{DIGITS}", "the microbatch number has 5,000 digits"),
    "a stage of 5,000 digits": (f"{DIGITS}F0", "the stage number has 5,000 digits"),
    "a microbatch over 2^63": (
        f"0F0,0F{2**64}",
        "line 1, column 2: '0F18446744073709551616' is not an action",
    ),
    "a stage over 2^63": (f"0F0,{2**64}F0", "the stage number has 20 digits"),
    "full-width digits": (FULL_WIDTH, "character 1 must start the stage number"),
    "Arabic digits": ("0F\u0660", "character 3 must start the microbatch number"),
    "a lone carriage return": ("0F0\r0B0", "line 1: a carriage return without a line feed"),
    "a cell of 200 kB": (
        "0F0\n1F0," + "x" * 200_000,
        "line 2: a cell has more than 131,072 characters",
    ),
    "a cell of 100 kB": ("0F0," + "x" * 100_000, "'... (100,000 characters) is not an action"),
    "5,000 bad cells": (",".join(["x"] * 5_000), "read no further after 1,000 faults"),
    "20 bad cells of 100 kB": (",".join(["x" * 100_000] * 20), "line 1, column 20"),
    "100,000 brackets": ("(" * 100_000, "is not an overlapped pair"),
    "a million lines": ("0F0\n" + "\n" * 1_000_000, f"more than {MAX_DEVICES:,} lines"),
    "an open quote": ('0F0,"0B0\n' * 1000, "follows at character 4, where the action ends"),
}
JSON = {
    "a number of 5,000 digits": (
        table().replace('"num_microbatches": 1', f'"num_microbatches": {DIGITS}'),
        "thousands of digits",
    ),
    "a cell of 5,000 digits": (
        table(rows=[[f"0F{DIGITS}"]]),
        "the microbatch number has 5,000 digits",
    ),
    "100,000 brackets": ("[" * 100_000, "nested too deeply"),
    "100,000 braces": ('{"a":' * 100_000, "nested too deeply"),
    "5,000 bad cells": (table(rows=[["x"] * 5_000]), "read no further after 1,000 faults"),
    "a long version": (
        table(version="x" * 1_000_000),
        "(1,000,000 characters); this jaxpipe reads version 1",
    ),
    "a microbatch number over 2^63": (
        table(num_microbatches=2**64),
        "num_microbatches must be 0 to 10,000,000,000",
    ),
    "a device over 2^63": (table(stage_to_device=[2**64]), "a table has at most 4,096 devices"),
    "a device beyond all": (table(stage_to_device=[10**6]), "a table has at most 4,096 devices"),
    "100,000 stages": (table(stage_to_device=[0] * 100_000), "4,096 devices and 65,536 stages"),
    "no microbatches, but transfers": (
        table(**SENT, num_microbatches=0),
        "microbatches from 0 to -1",
    ),
    "no stages, but transfers": (
        table(stage_to_device=[], rows=[["0SEND_F0"]]),
        "stages go from 0 to -1",
    ),
    "no stages": (table(stage_to_device=[]), "stages go from 0 to -1"),
}
