"""The grid of slices: models, schedules, devices, chunks and slices.  jaxpipe and torch_ref run the
same table, and both agree with plain JAX on whole sequences.
"""

from functools import cache
from itertools import product

import pytest
import torch

import jaxpipe as jp
import torch_ref
from tests.parity.cases import covering
from tests.slices.models import MODELS, data
from tests.slices.test_parity import BOUND, build, check, truth
from tests.slices.torch_twins import Twin, flat
from tests.tiers import exhaustive, slow
from tests.tolerance import relative

torch.set_num_threads(1)
# Interleaved 1F1B has SlimPipe's order where a sequence has at least as many slices as there are
# devices, and groups of microbatches otherwise.
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zb", "zbv", "auto")
VALUES = (tuple(MODELS), SCHEDULES, (1, 2, 4), (1, 2), (1, 2, 4, 8))


@cache
def table_of(schedule: str, devices: int, chunks: int, slices: int) -> jp.Schedule | None:
    """The table, of the fewest sequences with which there is one."""
    for sequences in (2, 4):
        try:
            return build(
                schedule, devices=devices, chunks=chunks, slices=slices, sequences=sequences
            )
        except jp.ScheduleError:
            pass
    return None


# `auto` has a table for all numbers, and makes it by a search.
ALL = [v for v in product(*VALUES) if v[1] == "auto" or table_of(*v[1:]) is not None]
COVER = covering(ALL)
QUICK = [("attention", "interleaved_1f1b", 2, 2, 2)]


def torch_error(name, table):
    """The largest error of torch_ref's loss and gradients."""
    sequences = table.num_microbatches // table.slices
    model, params, batch = data(name, table.num_stages, sequences)
    found = torch_ref.run(
        table.to_csv(),
        Twin(name, table.num_stages),
        batch,
        weights=flat(params),
        slices=table.slices,
        time=model.time,
    )
    loss, grads = truth(name, table.num_stages, sequences)
    return relative((found.loss, found.grads), (loss, flat(grads)))


@pytest.mark.parametrize(
    ("name", "schedule", "devices", "chunks", "slices"),
    [
        *QUICK,
        *(slow(*values) for values in COVER if values not in QUICK),
        *(exhaustive(*values) for values in ALL if values not in {*COVER, *QUICK}),
    ],
)
def test_a_table_of_slices_agrees_in_both_engines(name, schedule, devices, chunks, slices):
    table = table_of(schedule, devices, chunks, slices)
    check(name, table)
    assert torch_error(name, table) < BOUND


def test_no_pair_of_values_is_left_out():
    for i in range(len(VALUES)):
        for j in range(i):
            assert {(v[i], v[j]) for v in ALL} == {(v[i], v[j]) for v in COVER}
    assert len(COVER) < 50
