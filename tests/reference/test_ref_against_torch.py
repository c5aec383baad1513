"""Never worse than torch's own generator of the same schedule, in makespan or in any device's peak
activations.
"""

from __future__ import annotations

import pytest

import jaxpipe as jp
from jaxpipe.table.kinds import Release

pytest.importorskip("torch.distributed.pipelining.schedules")
from benchmarks.torch_tables import CLASSES, torch_table

COSTS = (
    jp.Costs(),
    jp.Costs(forward=2),
    jp.Costs(input_grad=2),
    jp.Costs(weight_grad=2),
    jp.Costs(forward=10, input_grad=13, weight_grad=9),
    jp.Costs(forward=4, input_grad=7, weight_grad=3),
)


def settings():
    for name in CLASSES:
        for devices in (1, 2, 3, 4, 6):
            chunk_counts = (
                (1,) if name == "gpipe" else (2,) if name in ("zbv", "dualpipev") else (1, 2, 3)
            )
            for chunks in chunk_counts:
                for microbatches in (*range(1, 2 * devices + 3), 4 * devices):
                    yield name, devices, chunks, microbatches


@pytest.mark.parametrize("name", CLASSES)
def test_never_worse_than_torch(name):
    compared = 0
    for _, devices, chunks, microbatches in (s for s in settings() if s[0] == name):
        theirs = torch_table(name, devices=devices, chunks=chunks, microbatches=microbatches)
        if theirs is None:
            continue
        ours = jp.schedules.build(name, devices=devices, chunks=chunks, microbatches=microbatches)
        where = f"P={devices} V={chunks} M={microbatches}"
        for costs in COSTS:
            assert jp.simulate(ours, costs).makespan <= jp.simulate(theirs, costs).makespan, (
                where,
                costs,
            )
        for release in Release:
            costs = jp.Costs(release=release)
            pairs = zip(
                jp.simulate(ours, costs).peak_activations,
                jp.simulate(theirs, costs).peak_activations,
                strict=True,
            )
            assert all(mine <= peer for mine, peer in pairs), (where, release)
        compared += 1
    assert compared >= 20


def test_a_short_zbv_is_much_shorter_than_torchs():
    """torch drops microbatches from the table of 2 P - 1; with P = M = 8 that leaves twice the
    waiting that is needed.
    """
    theirs = torch_table("zbv", devices=8, chunks=2, microbatches=8)
    assert theirs is not None
    ours = jp.schedules.build("zbv", devices=8, microbatches=8)
    assert (jp.simulate(theirs).makespan, jp.simulate(ours).makespan) == (62, 55)


def test_where_torch_refuses_we_build():
    assert torch_table("interleaved_1f1b", devices=4, chunks=2, microbatches=9) is None
    assert torch_table("dualpipev", devices=4, chunks=2, microbatches=3) is None
    for name, microbatches in (("interleaved_1f1b", 9), ("dualpipev", 3)):
        jp.check(jp.schedules.build(name, devices=4, chunks=2, microbatches=microbatches))
