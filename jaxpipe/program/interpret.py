"""A plain interpreter of programs: one process, devices in a loop, slots in lists.  Slow, and made
to be read.

It is the meaning of a `Program`: what the SPMD executor compiles does the same, with arrays of
slots and permutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from ..table.kinds import Kind
from .ir import Program
from .pools import POOL_OF, PoolName
from .records import NOBODY, Backward, Forward, TickRecord, map_fields
from .segments import Segment
from .templates import BlockUse, Payload


class Model(Protocol):
    """What the blocks compute.  Values (inputs, residuals, cotangents) are opaque to the
    interpreter; gradients are the model's own.
    """

    def first(self, microbatch: int) -> tuple[Any, Any]:
        """The first stage's input, and what the gradient of `first` needs."""

    def forward(self, stage: int, microbatch: int, x: Any) -> tuple[Any, Any, Any]:
        """The stage's output, the residuals that only I (or B) needs, and those that W needs."""

    def recompute(self, stage: int, microbatch: int, x: Any) -> tuple[Any, Any]:
        """R: the residuals of a forward that kept none; its results are the model's already."""

    def last(self, microbatch: int, y: Any) -> Any:
        """The cotangent of the last stage's output (None in an evaluation), by all devices where it
        is spread; the model keeps the loss.
        """

    def last_input_grad(self, microbatch: int, y: Any) -> tuple[Any, list[Any]]:
        """The same of an L that leaves the rest to H, and a stash for the H of each device."""

    def last_weight_grad(self, device: int, microbatch: int, stash: Any) -> None:
        """H: the model adds the gradient of a device's part of the parameters of `last`."""

    def backward(
        self, stage: int, microbatch: int, x: Any, residuals: tuple[Any, Any], dy: Any
    ) -> Any:
        """B: the cotangent of the stage's input; the model adds the gradient of its parameters."""

    def input_grad(
        self, stage: int, microbatch: int, x: Any, residuals: tuple[Any, Any], dy: Any
    ) -> tuple[Any, Any]:
        """I: the cotangent of the stage's input, and a stash for W."""

    def weight_grad(
        self, stage: int, microbatch: int, x: Any, residuals: Any, dy: Any, stash: Any
    ) -> None:
        """W: the model adds the gradient of the stage's parameters."""

    def first_gradient(self, microbatch: int, kept: Any, dx: Any) -> None:
        """The model adds the gradient of the parameters of `first`."""


@dataclass
class _Device:
    """The pools of a device, and what it has to send."""

    pools: Mapping[PoolName, list[Any]]
    sent: dict[Payload, Any] = field(default_factory=lambda: dict.fromkeys(Payload))


def interpret(program: Program, model: Model) -> None:
    """Run every tick: each device its blocks in the template's order, then the exchange; the model
    collects the results.
    """
    devices = [
        _Device({pool.name: [None] * pool.slots for pool in program.pools})
        for _ in program.schedule.rows
    ]
    for segment in program.segments:
        _run_segment(program, model, devices, segment)


def _run_segment(program: Program, model: Model, devices: list[_Device], segment: Segment) -> None:
    """The ticks of a segment.  What a transfer brings is written where the program awaits it:
    before a block, or when a tick is over.
    """
    awaited: dict[tuple[int, int], list[tuple[PoolName, int, list[Any]]]] = {}
    written = {(t.tick, t.lane): segment.written(t) for t in segment.transits}

    def arrive(tick: int, block: int) -> None:
        for pool, lane, arrived in awaited.pop((tick, block), ()):
            for number, (value, sent_in) in enumerate(arrived):
                arrival = _record(program, sent_in, number).arrivals[lane]
                if arrival.takes:
                    devices[number].pools[pool][arrival.slot] = value

    for tick in range(segment.start, segment.stop):
        template = segment.template(tick)
        fetched = [
            _move(device, _record(program, tick, number)) for number, device in enumerate(devices)
        ]
        for place, use in enumerate(template.blocks):
            arrive(tick, place)
            if use.block.is_share:
                _run_share(use, model, program, devices, tick)
                continue
            for number, device in enumerate(devices):
                _run_block(use, model, device, _record(program, tick, number), program)
        for lane, permute in enumerate(template.permutes):
            brought = [None] * len(devices)
            for source, target in permute.pairs:
                brought[target] = devices[source].sent[permute.payload]
            pool = POOL_OF[permute.payload]
            trip, j = divmod(tick - segment.start, segment.period)
            at, block = written[j, lane]
            awaited.setdefault((int(at[trip]), int(block[trip])), []).append(
                (pool, lane, [(value, tick) for value in brought])
            )
        arrive(tick, len(template.blocks))
        for device, values in zip(devices, fetched, strict=True):
            for name, slot, value in values:
                device.pools[name][slot] = value


def _move(device: _Device, row: TickRecord[int]) -> list[tuple[PoolName, int, Any]]:
    """Store on the host what has to wait there; (pool, slot, value) of what is back on the device
    when the tick is over.
    """
    found = []
    pools = device.pools
    for move in row.moves:
        if move.stores != NOBODY:
            both = (
                pools[PoolName.RESIDUAL_INPUT][move.from_input],
                pools[PoolName.RESIDUAL_WEIGHT][move.from_weight],
            )
            pools[PoolName.HOST][move.to_host] = both
        if move.fetches != NOBODY:
            by_input, by_weight = pools[PoolName.HOST][move.from_host]
            found += [
                (PoolName.RESIDUAL_INPUT, move.to_input, by_input),
                (PoolName.RESIDUAL_WEIGHT, move.to_weight, by_weight),
            ]
    return found


def _record(program: Program, tick: int, device: int) -> TickRecord[int]:
    """What one device does in one tick, as numbers."""
    record: Any = program.ticks
    return cast(TickRecord[int], map_fields(lambda table: int(table[tick, device]), record))


def _run_share(
    use: BlockUse, model: Model, program: Program, devices: list[_Device], tick: int
) -> None:
    """L, E, G: all devices take part, each with its share of the parameters; one has what they read
    and takes what they make.
    """
    shares = [_record(program, tick, number).shares[0] for number in range(len(devices))]
    for share, device in zip(shares, devices, strict=True):
        if share.kind != use.block.kind or not share.is_source:
            continue
        if use.block.kind is Kind.E:
            device.pools[PoolName.X][share.out], _ = model.first(share.microbatch)
        elif use.block.kind is Kind.G:
            _, kept = model.first(share.microbatch)
            model.first_gradient(share.microbatch, kept, device.pools[PoolName.FIRST][share.y])
        elif PoolName.SHARE in device.pools:
            y = device.pools[PoolName.LAST][share.y]
            device.pools[PoolName.COTANGENT][share.out], left = model.last_input_grad(
                share.microbatch, y
            )
            for mine, other, stash in zip(shares, devices, left, strict=True):
                other.pools[PoolName.SHARE][mine.stash] = stash
        else:
            dy = model.last(share.microbatch, device.pools[PoolName.LAST][share.y])
            if not program.schedule.forward_only:
                device.pools[PoolName.COTANGENT][share.out] = dy


def _run_block(
    use: BlockUse, model: Model, device: _Device, row: TickRecord[int], program: Program
) -> None:
    """A block, where the record asks for it."""
    kind, chunk = use.block.kind, use.block.chunk
    training, spread = not program.schedule.forward_only, program.schedule.encoded.spreads_first
    half = row.forward if use.block.runs_forward else row.backward
    if half.chunk == NOBODY or (half.chunk, half.kind) != (chunk, kind):
        return
    if isinstance(half, Forward):
        if kind is Kind.F and training and bool(half.keeps) is not use.block.keeps:
            return
        _forward(model, device, half, spread=spread) if kind is Kind.F else _recompute(
            model, device, half
        )
        return
    if kind is Kind.H:
        model.last_weight_grad(
            half.stage, half.microbatch, device.pools[PoolName.SHARE][half.stash]
        )
        return
    _weight_grad(model, device, half) if kind is Kind.W else _backward(
        model, device, half, split=kind is Kind.I, spread=spread
    )


def _forward(model: Model, device: _Device, f: Forward[int], *, spread: bool) -> None:
    """[first,] stage[, last]; no `first` where it is spread."""
    pools = device.pools
    if f.is_first and not spread:
        pools[PoolName.X][f.x], pools[PoolName.FIRST][f.first] = model.first(f.microbatch)
    y, by_input, by_weight = model.forward(f.stage, f.microbatch, pools[PoolName.X][f.x])
    if f.keeps:
        pools[PoolName.RESIDUAL_INPUT][f.residual_input] = by_input
        pools[PoolName.RESIDUAL_WEIGHT][f.residual_weight] = by_weight
    device.sent[Payload.ACTIVATION] = y
    if f.is_local:
        pools[PoolName.X][f.out] = y
    if f.is_last and PoolName.LAST in pools:
        pools[PoolName.LAST][f.out] = y
    elif f.is_last:
        pools[PoolName.COTANGENT][f.out] = model.last(f.microbatch, y)


def _recompute(model: Model, device: _Device, f: Forward[int]) -> None:
    """R: the residuals once more."""
    by_input, by_weight = model.recompute(f.stage, f.microbatch, device.pools[PoolName.X][f.x])
    device.pools[PoolName.RESIDUAL_INPUT][f.residual_input] = by_input
    device.pools[PoolName.RESIDUAL_WEIGHT][f.residual_weight] = by_weight


def _backward(
    model: Model, device: _Device, b: Backward[int], *, split: bool, spread: bool
) -> None:
    """B, or I; where `first` is spread, its gradient comes later."""
    pools = device.pools
    x, dy = pools[PoolName.X][b.x], pools[PoolName.COTANGENT][b.cotangent]
    residuals = (
        pools[PoolName.RESIDUAL_INPUT][b.residual_input],
        pools[PoolName.RESIDUAL_WEIGHT][b.residual_weight],
    )
    if split:
        dx, pools[PoolName.STASH][b.stash] = model.input_grad(
            b.stage, b.microbatch, x, residuals, dy
        )
    else:
        dx = model.backward(b.stage, b.microbatch, x, residuals, dy)
    device.sent[Payload.COTANGENT] = dx
    if b.is_local:
        pools[PoolName.COTANGENT][b.out] = dx
    if b.is_first and spread:
        pools[PoolName.FIRST][b.first] = dx
    elif b.is_first:
        model.first_gradient(b.microbatch, pools[PoolName.FIRST][b.first], dx)


def _weight_grad(model: Model, device: _Device, b: Backward[int]) -> None:
    """W."""
    pools = device.pools
    x, dy, stash = (
        pools[PoolName.X][b.x],
        pools[PoolName.COTANGENT][b.cotangent],
        pools[PoolName.STASH][b.stash],
    )
    model.weight_grad(
        b.stage, b.microbatch, x, pools[PoolName.RESIDUAL_WEIGHT][b.residual_weight], dy, stash
    )
