"""The pools of what passes between slices: exact, verified, and of a size that does not depend on
the number of slices.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.lowering.plan import plan_of
from jaxpipe.program.verify import faults, verify
from jaxpipe.table.effects import LastUse, Liveness

LIVENESS = {
    "longest": Liveness.of_slices(),
    "carry": Liveness(carry=LastUse.INPUT_GRAD, carry_gradient=LastUse.INPUT_GRAD),
    "rows": Liveness(buffer=LastUse.INPUT_GRAD, buffer_gradient=LastUse.INPUT_GRAD),
}
FIELDS = [
    *(("forward", name) for name in ("carry", "carry_next", "buffer")),
    *(("backward", name) for name in ("carry", "carry_gradient", "carry_gradient_next")),
    *(("backward", name) for name in ("buffer", "buffer_gradient")),
    *((half, flag) for half in ("forward", "backward") for flag in ("continues", "is_followed")),
]


@cache
def program():
    schedule = jp.schedules.build("zb_h1", devices=2, microbatches=16, slices=4)
    return verify(plan_of(schedule).program(Liveness.of_slices()))


@pytest.mark.parametrize(("half", "field"), FIELDS, ids=lambda name: name)
def test_a_wrong_entry_is_found(half, field):
    """Every entry that an action uses is changed, one at a time."""
    sound = program()
    record = getattr(sound.ticks, half)
    flag = "is_followed" if field in ("carry_next", "carry_gradient_next") else "continues"
    used = record.kind >= 0
    if field not in ("continues", "is_followed"):
        used &= getattr(record, flag) != 0
        used &= record.kind != int(jp.Kind.W)
    cells = np.argwhere(used)[::7]
    assert len(cells) > 2
    for tick, device in cells.tolist():
        table = getattr(record, field).copy()
        table[tick, device] = 1 - table[tick, device] if table[tick, device] < 2 else 0
        changed = record.changed(**{field: table})
        wrong = replace(sound, ticks=replace(sound.ticks, **{half: changed}))
        assert faults(wrong), (tick, device)


@pytest.mark.parametrize("liveness", LIVENESS.values(), ids=LIVENESS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev"])
def test_programs_are_sound(name, liveness):
    for devices, slices in ((1, 2), (2, 4), (4, 8)):
        shape = {"devices": devices, "microbatches": 3 * slices, "slices": slices}
        schedule = jp.schedules.build(name, **shape)
        verify(plan_of(schedule).program(liveness))
        verify(plan_of(jp.add_recompute(schedule)).program(liveness))
        verify(plan_of(jp.schedules.build(name, forward_only=True, **shape)).program(liveness))


def test_buffers_are_as_many_as_sequences_in_flight_and_code_does_not_grow():
    found = []
    for slices in (4, 8, 16):
        schedule = jp.schedules.build("1f1b", devices=4, microbatches=8 * slices, slices=slices)
        made = plan_of(schedule).program(LIVENESS["rows"])
        found.append(
            (made.slots.buffer, made.slots.buffer_gradient, sum(s.size for s in made.segments))
        )
    assert [each[:2] for each in found] == [(3, 1)] * 3
    assert len({size for *_, size in found}) == 1
