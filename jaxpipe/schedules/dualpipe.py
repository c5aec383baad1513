"""DualPipe and DualPipeV: microbatches enter at both ends, and forwards overlap backwards."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from ..table.kinds import Action, Cell, Kind, Overlap
from ..table.placement import Placement
from ..table.schedule import Schedule
from ._rows import actions, alternate, schedule_of

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741
# None: a microbatch beyond M, where a table is built for a round number
Slot: TypeAlias = Action | None


def dualpipe(*, devices: int, microbatches: int, chunks: int) -> Schedule:
    """Two pipelines in opposite directions, forwards overlapping backwards (DualPipe, DeepSeek-V3
    2024, section 3.2.1, figure 5).

    Even P and any M; stage s is on devices s and P - 1 - s.  The first ceil(M / 2) microbatches
    enter at device 0, the others at device P - 1.  With X the cost of an overlapped pair, and B = I
    + W, each device is idle for (P / 2 - 1)(X + B - 3 W) of a step with an even M >= 2 P, where F,
    I and W cost the same.  Every device holds at most P + 1 activations, and two stages'
    parameters.
    """
    near = (microbatches + 1) // 2
    rows = []
    for device in range(devices):
        # The lane that enters at this device's own end comes first.
        lanes = [(device, range(near)), (devices - 1 - device, range(near, microbatches))]
        own, other = lanes if device < devices // 2 else lanes[::-1]
        rank = min(device, devices - 1 - device)
        rows.append(_row(own, other, rank, devices // 2, max(near, devices)))
    placement = Placement.bidirectional(devices=devices)
    return schedule_of(rows, placement, microbatches)


def dualpipev(*, devices: int, microbatches: int, chunks: int) -> Schedule:
    """DualPipe folded at its middle into a V ("cut in half", Sea AI Lab 2025; torch's
    ScheduleDualPipeV).

    Any P and M, two chunks, each stage on one device.  With X the cost of an overlapped pair, and B
    = I + W, each device is idle for (P - 1)(X + B - 3 W) in costs of a chunk of a step with M >= 2
    P, where F, I and W cost the same.  Every device holds at most 2 P + 1 activations (of half a
    device's layers each).
    """
    every = range(microbatches)
    padded = max(microbatches, 2 * devices)
    rows = [
        _row((d, every), (2 * devices - 1 - d, every), d, devices, padded) for d in range(devices)
    ]
    return schedule_of(rows, Placement.vee(devices=devices), microbatches)


class _Lane(NamedTuple):
    """The actions of one stage, one slot per microbatch of its pipeline."""

    f: list[Slot]
    b: list[Slot]
    i: list[Slot]
    w: list[Slot]

    @classmethod
    def of(cls, stage: int, microbatches: range, total: int, *, late: bool) -> _Lane:
        phantoms: list[Slot] = [None] * (total - len(microbatches))
        before, after = (phantoms, []) if late else ([], phantoms)
        return cls(
            *([*before, *actions(stage, kind, microbatches), *after] for kind in (F, B, I, W))
        )


def _row(
    own: tuple[int, range], other: tuple[int, range], rank: int, half: int, total: int
) -> list[Cell]:
    """One device's row: `rank` counts devices from the end where `own` enters, `half` is how many
    there are up to the turn.

    Both lanes have `total` >= 2 `half` slots.  The steps are numbered as in the published code.
    """
    # A small number of microbatches takes the last places, whose backwards are split; a larger one
    # the first places.
    late = max(len(own[1]), len(other[1])) <= half
    near, far = _Lane.of(*own, total, late=late), _Lane.of(*other, total, late=late)
    inner = half - rank - 1
    row: list[Cell] = []
    # Warmup.  Steps 1 and 2: forwards, first of the own lane, then of both.
    row += near.f[: 2 * inner]
    row += alternate(near.f[2 * inner : 2 * inner + rank + 1], far.f[: rank + 1])
    # Step 3: the other lane's first backwards, split, with a forward each.
    row += alternate(far.i[:inner], far.w[:inner], far.f[rank + 1 : half])
    # Steady.  Step 4: pairs of one lane's forward and the other's backward.
    turns = total - 2 * half + rank + 1
    down = _pairs(
        near.f[2 * inner + rank + 1 :], far.b[inner : inner + turns], skip_first=inner == 0
    )
    up = _pairs(far.f[half:], near.b[: turns + inner], skip_first=False)
    for pair, back in zip(down, up, strict=False):
        row += [*pair, *back]
    # Cooldown.  Step 5: the own lane has no forwards left.
    for b, pair in zip(far.b[inner + turns : 2 * inner + turns], up[turns:], strict=True):
        row += [b, *pair]
    # Steps 6 to 8: backwards of both lanes, split from the middle on; each W fills a wait at the
    # end.
    whole = rank + 1
    ends = alternate(far.b[2 * inner + turns :], near.b[turns + inner :][:whole])
    split = alternate(far.i[2 * inner + turns :], near.i[turns + inner :][:whole])
    weights = (
        alternate(far.w[2 * inner + turns :], near.w[turns + inner :][:whole])[whole:]
        + near.w[total - inner :]
    )
    row += [*ends[:whole], *split[whole:]]
    row += alternate(weights[:inner], near.i[total - inner :])
    row += weights[inner:]
    return [cell for cell in row if cell is not None]


def _pairs(forward: list[Slot], backward: list[Slot], *, skip_first: bool) -> list[list[Cell]]:
    """Overlapped pairs; where a half is a phantom, the other half alone; the first may stay two
    actions.
    """
    out: list[list[Cell]] = []
    for f, b in zip(forward, backward, strict=True):
        separate = skip_first and not out
        out.append([f, b] if separate or f is None or b is None else [Overlap(f, b)])
    return out
