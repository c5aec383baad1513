"""Zero-bubble schedules on a loop: the backward is cut into I and W, and W fills what would be bubble."""

from __future__ import annotations

from ..action import Action, Cell, Kind
from ..listing import alternate, even_groups, in_groups
from ..placement import Placement
from ..schedule import Schedule


def zb_h1(*, devices: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B's memory, a third of its bubble (Zero Bubble Pipeline Parallelism, Qi et al. 2024, section 2.2, figure 2 top).

    Any P and M, one chunk.  Makespan M (F + I + W) + (P - 1)(F + I - W) for M >= P where F, I and W cost about the same
    (2 W >= F + I - W is not needed; a W longer than F + I delays the I behind it).  Every device holds min(P, M)
    activations at its peak, if they are released at W.
    """
    placement = Placement.loop(devices=devices, chunks=chunks)
    ahead = [devices - 1 - d for d in range(devices)]
    return _split("zb_h1", placement, microbatches, (microbatches,), ahead=ahead, delay=list(range(devices)))


def zb_h2(*, devices: int, microbatches: int, chunks: int) -> Schedule:
    """Twice 1F1B's memory, and no bubble but the start (Qi et al. 2024, section 2.3, figure 2 bottom).

    Any P and M, one chunk.  For M >= 2 P - 1 each device is busy for M (F + I + W) + (P - 1)(F + I - 2 W) from its first
    action to its last (the timeline's span), the last device starting (P - 1) F after the first.  Every device holds
    min(2 P - 1, M) activations at its peak, if they are released at W.
    """
    placement = Placement.loop(devices=devices, chunks=chunks)
    ahead = [2 * (devices - 1 - d) for d in range(devices)]
    return _split("zb_h2", placement, microbatches, (microbatches,), ahead=ahead, delay=[2 * d for d in range(devices)])


def interleaved_zb(*, devices: int, microbatches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B with zb_h1's order of W (torch's ScheduleInterleavedZeroBubble; Qi et al. 2024, section 2.2).

    Any P, V and M.  Microbatches go through the chunks in groups of at least P, as equal as M allows.  Makespan
    V M (F + I + W) + (P - 1)(F + I - W) in costs of a chunk for M >= P.  With G the longest group, every device holds
    min(V M, (V - 1) G + P) activations at its peak, if they are released at W.
    """
    placement = Placement.loop(devices=devices, chunks=chunks)
    groups = even_groups(devices, microbatches)
    ahead = [(chunks - 1) * max(groups) + devices - 1 - d for d in range(devices)]
    return _split("interleaved_zb", placement, microbatches, groups, ahead=ahead, delay=list(range(devices)))


def _split(name: str, placement: Placement, microbatches: int, groups: tuple[int, ...], *, ahead: list[int], delay: list[int]) -> Schedule:
    """Device d runs `ahead[d]` forwards, then F and I in turn, each W `delay[d]` turns behind its I."""
    rows = []
    for stages, forwards_ahead, turns in zip(placement.stages_of, ahead, delay, strict=True):
        forward, grad = in_groups(stages, Kind.F, groups), in_groups(stages[::-1], Kind.I, groups)
        weight = in_groups(stages[::-1], Kind.W, groups)
        rows.append(_row(forward, grad, weight, min(forwards_ahead, len(forward)), min(turns, len(forward))))
    return Schedule.from_rows(rows, placement=placement, num_microbatches=microbatches, name=name)


def _row(forward: list[Action], grad: list[Action], weight: list[Action], ahead: int, delay: int) -> list[Cell]:
    total = len(forward)
    paired = total - ahead  # turns that still have a forward
    late = min(delay, paired)
    warmup = forward[:ahead]
    filling = alternate(forward[ahead : ahead + late], grad[:late])
    steady = alternate(forward[ahead + late :], grad[late:paired], weight[: paired - late])
    # Cool-down: the forwards are done; first the turns still without a W (a short job), then I and W in turn.
    draining = grad[paired : max(paired, delay)]
    done = max(paired, delay)
    cooldown = alternate(grad[done:], weight[done - delay : total - delay])
    return [*warmup, *filling, *steady, *draining, *cooldown, *weight[total - delay :]]
