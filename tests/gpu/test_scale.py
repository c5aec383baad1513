"""Pipe x tensor meshes of described GPUs: the memory of a device is what the plan predicts, and
grows with the schedule's slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from benchmarks.llama import Shape
from benchmarks.scale import Case
from tests.gpu.programs import gpu_marks

pytestmark = gpu_marks()

# A layer's input is large against the other arrays of a block, so that what the slots hold is most
# of the temporary memory.
SHAPE = Shape(
    width=512, heads=4, kv_heads=2, head_dim=16, hidden=64, vocab=128, layers=8, rows=8, time=128
)
GPIPE = Case(SHAPE, pipe=2, tensor=2, schedule="gpipe", chunks=1, microbatches=16, remat=True)


@dataclass(frozen=True)
class Memory:
    """Bytes on one device: predicted, by what they are for, and as XLA has them."""

    predicted: dict[str, int]
    arguments: int
    outputs: int
    temp: int

    @classmethod
    def of(cls, report: dict[str, Any]) -> Memory:
        """From a report of `Case.report`."""
        sizes = (report[f"{name}_bytes"] for name in ("argument", "output", "temp"))
        return cls(report["predicted"], *sizes)

    @property
    def ratio(self) -> float:
        """Predicted over what XLA needs."""
        return self.predicted["total"] / (self.arguments + self.outputs + self.temp)


def check(found: Memory) -> None:
    # Arguments are the parameters and the batch, outputs the gradients and the loss, but for what
    # XLA aligns: some bytes an array.
    assert 0 <= found.arguments - found.predicted["parameters"] - found.predicted["batch"] < 2**14
    assert 0 <= found.outputs - found.predicted["gradients"] < 2**14
    # What is predicted leaves out how XLA packs temporary arrays of a block beside those of the
    # loop.
    assert abs(found.ratio - 1) <= 0.05


@pytest.mark.slow
def test_memory_is_what_the_report_predicts() -> None:
    check(Memory.of(replace(GPIPE, schedule="zb_h1").report()))


@pytest.mark.exhaustive
def test_programs_differ_by_what_their_slots_hold() -> None:
    gpipe, one = Memory.of(GPIPE.report()), Memory.of(replace(GPIPE, schedule="1f1b").report())
    check(gpipe)
    check(one)
    assert gpipe.predicted["pools"] > 4 * one.predicted["pools"]
    # The work space of a block is the same, but for a permute's buffers.
    activation = 2 * SHAPE.rows * SHAPE.time * SHAPE.width
    assert (
        abs((gpipe.temp - one.temp) - (gpipe.predicted["pools"] - one.predicted["pools"]))
        <= 2 * activation
    )


@pytest.mark.exhaustive
def test_an_uneven_layout_of_real_size_is_predicted_too() -> None:
    """61 layers on the 32 stages of 16 devices, the last without any.  In a tiny model XLA packs
    unlike stages up to 8 % tighter.
    """
    size = replace(GPIPE, shape=Shape(layers=61), pipe=16, tensor=8, microbatches=32)
    check(
        Memory.of(
            replace(
                size, schedule="interleaved_1f1b", chunks=2, layout="Et|" + "tt|" * 30 + "L"
            ).report()
        )
    )
