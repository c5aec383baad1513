"""Checks that the tests give to the doctor: one that is good, and some that are not."""

from __future__ import annotations

import os
import time

from jaxpipe.cli.checks import Findings, Line, Verdict, at


def good(scope, mesh):
    (axis,) = mesh.axis_names
    text = f"{mesh.shape[axis]} devices, {scope.steps} steps"
    return Findings((Line("good", Verdict.OK, text),), {"hop": 2e-5, "sent": 0.0})


def hangs(scope, mesh):
    at("the permute 0 -> 1")
    time.sleep(600)


def fails(scope, mesh):
    at("the third step")
    raise RuntimeError("the device is gone")


def dies(scope, mesh):
    os._exit(7)
