"""Every reading and writing of a pool's slots by a program, with what is written and what a reader
needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..table.kinds import Kind, Value, makers
from .code_rules import Running, half_of, ticks_of
from .ir import Program
from .liveness import LastUse
from .pools import POOL_OF, PoolName
from .records import NOBODY, IntTable, pairs_of
from .segments import Segment
from .templates import Payload, Presence

Ints = NDArray[np.int64]
# The kinds whose result is sent to another stage.
FORWARD_MAKERS, BACKWARD_MAKERS = makers(Value.OUTPUT), makers(Value.INPUT_GRAD)
# What is in a slot that nobody wrote, or that a permute without a message for the device wrote.
NOTHING = -1
# Order within a block: what `first` writes, then all reads, then all writes.
_BEFORE, _READ, _WRITE = range(3)


class Accesses(NamedTuple):
    """One entry an access, in no order.  A value is the number stage * M + microbatch of what the
    pool holds.
    """

    device: Ints
    slot: Ints
    tick: Ints
    # within the tick: 2 n before block n, one more in it; after all blocks the numbers of more
    # blocks than there are
    place: Ints
    order: Ints  # within the block
    value: Ints
    is_read: NDArray[np.bool_]


def accesses(program: Program, pool: PoolName, blocks: Sequence[Running]) -> Accesses:
    """Those of one pool."""
    nothing = np.zeros(0, np.int64)
    none = Accesses(nothing, nothing, nothing, nothing, nothing, nothing, nothing.astype(bool))
    parts = [none, *_of_blocks(program, pool, blocks)]
    if pool in POOL_OF.values():
        parts += [
            part
            for segment in program.segments
            for part in _of_exchanges(program, segment, pool, blocks)
        ]
    parts += _of_moves(program, pool)
    return Accesses(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _of_blocks(program: Program, pool: PoolName, blocks: Sequence[Running]) -> Iterator[Accesses]:
    # A pair runs as one: the backward may read until the forward has written.
    paired = pairs_of(program.ticks.forward, program.ticks.backward)
    for block in blocks:
        if block.use.block.is_share:
            yield from _of_shares(program, pool, block)
            continue
        # of the template's blocks
        end = 2 + _during(max(other.place for other in blocks if other.ticks[0] == block.ticks[0]))
        touches = _of_forward if block.use.block.runs_forward else _of_backward
        for of, slots, order, where, shift in touches(program, block.use.block.kind):
            if of is not pool:
                continue
            half = half_of(program, block.use.block)
            k, device = np.nonzero(
                block.runs if where is None else block.runs & (where[block.ticks] != 0)
            )
            tick = block.ticks[k]
            at = (tick, device)
            value = (
                half.stage[at].astype(np.int64) + shift
            ) * program.schedule.num_microbatches + half.microbatch[at]
            count = np.ones(len(tick), np.int64)
            slot = slots[at].astype(np.int64)
            late = paired[at] & (order == _READ) & (not block.use.block.runs_forward)
            place = np.where(late, end, _during(block.place) * count)
            yield Accesses(
                device, slot, tick, place, order * count, value, np.full(len(tick), order == _READ)
            )


def _of_shares(program: Program, pool: PoolName, block: Running) -> Iterator[Accesses]:
    """What the device of its stage does in a share: it reads what all devices need, and writes what
    they make.
    """
    (share,) = program.ticks.shares
    stage = 0
    match block.use.block.kind:
        case Kind.E:
            touches = [(PoolName.X, share.out, _WRITE)]
        case Kind.G:
            touches = [(PoolName.FIRST, share.y, _READ)]
        case _:
            stage = program.schedule.num_stages - 1
            touches = [(PoolName.LAST, share.y, _READ)]
            touches += (
                [] if program.schedule.forward_only else [(PoolName.COTANGENT, share.out, _WRITE)]
            )
    for of, slots, order in touches:
        if of is not pool:
            continue
        k, device = np.nonzero(block.runs & (share.is_source[block.ticks] != 0))
        at = (block.ticks[k], device)
        value = stage * program.schedule.num_microbatches + share.microbatch[at].astype(np.int64)
        count = np.ones(len(k), np.int64)
        slot = slots[at].astype(np.int64)
        yield Accesses(
            device,
            slot,
            at[0],
            _during(block.place) * count,
            order * count,
            value,
            np.full(len(k), order == _READ),
        )
    if pool is PoolName.SHARE and block.use.block.kind is Kind.L:
        k, device = np.nonzero(block.runs)
        at = (block.ticks[k], device)
        value = device * program.schedule.num_microbatches + share.microbatch[at].astype(np.int64)
        count = np.ones(len(k), np.int64)
        yield Accesses(
            device,
            share.stash[at].astype(np.int64),
            at[0],
            _during(block.place) * count,
            _WRITE * count,
            value,
            np.zeros(len(k), bool),
        )


# (pool, slots, order, flag that must be set or None, how far from the block's stage the value's is)
_Touch = tuple[PoolName, IntTable, int, IntTable | None, int]


def _of_forward(program: Program, kind: Kind) -> Iterator[_Touch]:
    """What a forward does, from the meaning of its record."""
    f, table = program.ticks.forward, program.schedule.encoded
    if not table.spreads_first:
        yield PoolName.X, f.x, _BEFORE, f.is_first, 0
    yield PoolName.X, f.x, _READ, None, 0
    yield PoolName.RESIDUAL_INPUT, f.residual_input, _WRITE, f.keeps, 0
    yield PoolName.RESIDUAL_WEIGHT, f.residual_weight, _WRITE, f.keeps, 0
    yield PoolName.X, f.out, _WRITE, f.is_local, 1
    if table.spreads_last:
        yield PoolName.LAST, f.out, _WRITE, f.is_last, 0
    if not program.schedule.forward_only:
        if not table.spreads_first:
            yield PoolName.FIRST, f.first, _BEFORE, f.is_first, 0
        if not table.spreads_last:
            yield PoolName.COTANGENT, f.out, _WRITE, f.is_last, 0


def _of_backward(program: Program, kind: Kind) -> Iterator[_Touch]:
    """What a backward does, from the meaning of its record and from what the stage's code reads."""
    b, liveness, weight = program.ticks.backward, program.liveness, kind is Kind.W
    if kind is Kind.H:
        yield PoolName.SHARE, b.stash, _READ, None, 0
        return
    if liveness.x is LastUse.WEIGHT_GRAD or (liveness.x is LastUse.INPUT_GRAD and not weight):
        yield PoolName.X, b.x, _READ, None, 0
    if not weight or liveness.cotangent is LastUse.WEIGHT_GRAD:
        yield PoolName.COTANGENT, b.cotangent, _READ, None, 0
    yield PoolName.RESIDUAL_WEIGHT, b.residual_weight, _READ, None, 0
    if weight:
        yield PoolName.STASH, b.stash, _READ, None, 0
        return
    yield PoolName.RESIDUAL_INPUT, b.residual_input, _READ, None, 0
    yield (
        PoolName.FIRST,
        b.first,
        _WRITE if program.schedule.encoded.spreads_first else _READ,
        b.is_first,
        0,
    )
    yield PoolName.COTANGENT, b.out, _WRITE, b.is_local, -1
    if kind is Kind.I:
        yield PoolName.STASH, b.stash, _WRITE, None, 0


def _of_exchanges(
    program: Program, segment: Segment, pool: PoolName, blocks: Sequence[Running]
) -> Iterator[Accesses]:
    """What permutes write; a device that is no target gets nothing, and writes that."""
    devices = program.schedule.num_devices
    for j, template in enumerate(segment.templates):
        ticks = ticks_of(segment, j)
        here = [block for block in blocks if block.ticks[0] == ticks[0]]
        for lane, permute in enumerate(template.permutes):
            if POOL_OF[permute.payload] is not pool:
                continue
            value = np.full((len(ticks), devices), NOTHING, np.int64)
            made = _made(program, ticks, here, permute.payload)
            for source, target in permute.pairs:
                value[:, target] = made[:, source]
            arrival = program.ticks.arrivals[lane]
            k, device = np.nonzero(arrival.takes[ticks] != 0)
            count = np.ones(len(k), np.int64)
            slot = arrival.slot[ticks][k, device].astype(np.int64)
            (transit,) = (t for t in segment.transits if (t.tick, t.lane) == (j, lane))
            tick, block = segment.written(transit)
            place = np.where(block < segment.num_blocks(tick), 2 * block, _after(program))
            yield Accesses(
                device,
                slot,
                tick[k],
                place[k],
                _WRITE * count + lane,
                value[k, device],
                np.zeros(len(k), bool),
            )


def _during(block: int) -> int:
    """The place of what a block of this number does; what is written before it has the number
    before.
    """
    return 2 * block + 1


def _after(program: Program) -> int:
    """The place of what is done when a tick is over, after all that its blocks do."""
    return 2 + _during(
        max(len(template.blocks) for segment in program.segments for template in segment.templates)
    )


def _of_moves(program: Program, pool: PoolName) -> Iterator[Accesses]:
    """What goes between the memories of devices and hosts: on the device at the ends of ticks, on
    the host between them.
    """
    after = _after(program)
    for move in program.ticks.moves:
        touches = {
            PoolName.RESIDUAL_INPUT: (
                (move.from_input, move.stores, _READ),
                (move.to_input, move.fetches, _WRITE),
            ),
            PoolName.RESIDUAL_WEIGHT: (
                (move.from_weight, move.stores, _READ),
                (move.to_weight, move.fetches, _WRITE),
            ),
            PoolName.HOST: (
                (move.to_host, move.stores, _WRITE),
                (move.from_host, move.fetches, _READ),
            ),
        }
        for slots, value, order in touches.get(pool, ()):
            tick, device = np.nonzero(value != NOBODY)
            count = np.ones(len(tick), np.int64)
            # A device's slot is read when the tick before is over.
            at = tick - 1 if pool is not PoolName.HOST and order == _READ else tick
            place = 0 * count if pool is PoolName.HOST else after * count
            slot, moved = (column[tick, device].astype(np.int64) for column in (slots, value))
            yield Accesses(device, slot, at, place, order * count, moved, count * order == _READ)


def _made(program: Program, ticks: Ints, blocks: Sequence[Running], payload: Payload) -> Ints:
    """`[k, device]`: the value that a device has to send at the end of a template's k-th tick, made
    in that very tick.
    """
    found = np.full((len(ticks), program.schedule.num_devices), NOTHING, np.int64)
    for block in blocks:
        use, kind = block.use, block.use.block.kind
        if kind not in (FORWARD_MAKERS if payload is Payload.ACTIVATION else BACKWARD_MAKERS):
            continue
        # Code whose output always stays on the device, or goes to `first` or `last`, puts nothing
        # where what is sent lies.
        if Presence.ALWAYS in ((use.last, use.local) if kind is Kind.F else (use.first, use.local)):
            continue
        half = half_of(program, use.block)
        stage = half.stage[ticks].astype(np.int64) + (1 if kind is Kind.F else -1)
        found = np.where(
            block.runs, stage * program.schedule.num_microbatches + half.microbatch[ticks], found
        )
    return found
