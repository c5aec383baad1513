"""The rules of a table, one function a rule; each returns every place where its rule is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ..errors import Violation
from .encoded import BoolArray, Encoded, IntArray
from .kinds import (
    BACKWARD_HALVES,
    COLLECTIVES,
    COMPUTE,
    FORWARD_HALVES,
    KEPT,
    KIND_NAMES,
    KINDS,
    MESSAGES,
    SPREAD_FIRST,
    Kind,
    Pass,
    Value,
    kinds_where,
    makers,
    readers,
)
from .placement import Placement
from .run_order import RunOrder, Transfers, Wait, buffered_order, rendezvous_order, waits

Order = Callable[[Transfers], RunOrder]


def broken_rules(table: Encoded, placement: Placement) -> tuple[Violation, ...]:
    """Every violation of the rules that look at the table alone: range, duplicate, completeness,
    placement, order, slice, reverse, overlap, transfer.
    """
    if table.too_sparse:
        return (_too_sparse(table),)
    return (
        *_range(table),
        *_duplicates(table),
        *_completeness(table),
        *_placement(table, placement),
        *_order(table),
        *_slices(table),
        *_overlap(table),
        *_transfers(table),
    )


def _at(
    table: Encoded, rule: str, number: int, message: str, others: Iterable[int] = ()
) -> Violation:
    """A violation that points at an action's cell (and at further ones that take part)."""
    device, position = table.cell_of(number)
    return Violation(rule, message, device, position, tuple(table.cell_of(o) for o in others))


def _too_sparse(table: Encoded) -> Violation:
    number = int(np.argmax(np.maximum(table.stage, table.microbatch))) if table.num_actions else -1
    asked = (
        f"{table.num_stages} stages and {table.num_microbatches} microbatches need a forward "
        "for each pair"
    )
    if number < 0:
        return Violation("completeness", f"{asked}, but the table holds no action")
    return _at(
        table,
        "completeness",
        number,
        f"{asked}, but the table holds {table.num_actions} actions; {table.text(number)} is a "
        "possible typo",
    )


def _range(table: Encoded) -> Iterator[Violation]:
    """Every stage and microbatch number exists."""
    limits = (
        f"stages go from 0 to {table.num_stages - 1}, microbatches from 0 to "
        f"{table.num_microbatches - 1}"
    )
    for i in np.flatnonzero(~table.in_range).tolist():
        yield _at(table, "range", i, f"{table.text(i)} does not exist: {limits}")


def _duplicates(table: Encoded) -> Iterator[Violation]:
    """No action occurs twice."""
    for i in np.flatnonzero(table.in_range & ~_is_first(table)).tolist():
        original = int(table.at[table.kind[i], table.stage[i], table.microbatch[i]])
        device, position = table.cell_of(original)
        message = (
            f"{table.text(i)} is already on device {device} at position {position}; run "
            "every action once"
        )
        yield _at(table, "duplicate", i, message, (original,))


def _incomplete(
    table: Encoded, message: str, anchors: Sequence[int], device: int | None = None
) -> Violation:
    """A violation that points at actions that are there, if any."""
    if not anchors:
        return Violation("completeness", message, device)
    return _at(table, "completeness", anchors[0], message, anchors[1:])


def _completeness(table: Encoded) -> Iterator[Violation]:
    """Every stage runs every microbatch's F once, and its B or its I and W (none of them in a
    forward-only table).
    """
    if table.num_actions == 0:
        message = "the table holds no action; give every stage and microbatch at least an F"
        yield Violation("completeness", message)
        return
    has = table.at >= 0
    for stage, m in np.argwhere(~has[Kind.F]).tolist():
        message = f"no device runs the forward of stage {stage}, microbatch {m}"
        yield Violation("completeness", f"{stage}F{m} is missing: {message}")
    for kind in COLLECTIVES:
        yield from _missing_shares(table, kind)
    yield from _lone_shares(table)
    yield from _late_parts(table)
    if table.forward_only:
        return
    by_input, by_weight = makers(Value.INPUT_GRAD), makers(Value.WEIGHT_GRAD)
    wrong = (has[list(by_input)].sum(axis=0) != 1) | (has[list(by_weight)].sum(axis=0) != 1)
    for stage, m in np.argwhere(wrong).tolist():
        present = [k for k in COMPUTE if k in by_input + by_weight and has[k, stage, m]]
        anchors = [int(table.at[k, stage, m]) for k in (*present, Kind.F) if has[k, stage, m]]
        message = (
            f"stage {stage}, microbatch {m} has {_backward_fault(stage, m, present)}; give "
            "it B, or both I and W"
        )
        yield _incomplete(table, message, anchors)


def _missing_shares(table: Encoded, kind: Kind) -> Iterator[Violation]:
    """A collective action is in every row for every microbatch, or in none."""
    there = table.at[kind, : table.num_devices] >= 0
    if not there.any():
        return
    if table.num_stages < table.num_devices:
        many = f"{table.num_devices} devices and {table.num_stages} stages"
        message = f"a table with {kind.name} needs as many stages as devices; this one has {many}"
        yield Violation("completeness", message)
        return
    for device, m in np.argwhere(~there).tolist():
        others = table.at[kind, : table.num_devices, m]
        message = (
            f"{device}{kind.name}{m} is missing: all devices do their share of "
            f"{kind.name} together, for every microbatch"
        )
        yield _incomplete(table, message, others[others >= 0].tolist(), device)


def _late_parts(table: Encoded) -> Iterator[Violation]:
    """Where a part of a collective action is done later, each has its part (L its H)."""
    pairs = [(k, part) for k in table.kinds if (part := KINDS[k].part_of) is not None]
    for later, sooner in pairs:
        there, wanted = (table.at[kind] >= 0 for kind in (later, sooner))
        for number, m in np.argwhere(there ^ wanted).tolist():
            has, lacks = (sooner, later) if wanted[number, m] else (later, sooner)
            other = int(table.at[has, number, m])
            message = (
                f"{number}{lacks.name}{m} is missing: {KINDS[lacks].description}, of the share "
                f"{table.text(other)}"
            )
            yield _at(table, "completeness", other, message)


def _lone_shares(table: Encoded) -> Iterator[Violation]:
    """The forward and the gradient of a spread `first` are both there."""
    there = np.flatnonzero(table.of_kinds(SPREAD_FIRST))
    for kind in SPREAD_FIRST if len(there) else ():
        needed = KINDS[kind].direction is Pass.FORWARD or not table.forward_only
        if needed and kind not in table.kinds:
            other = int(there[0])
            message = (
                f"the table has {KIND_NAMES[table.kind[other]]}, but no {kind.name}: "
                f"{KINDS[kind].description}, on every device"
            )
            yield _at(table, "completeness", other, message)


def _backward_fault(stage: int, microbatch: int, present: Sequence[Kind]) -> str:
    """What a (stage, microbatch) has of B, I and W, in words."""
    texts = [f"{stage}{KIND_NAMES[k]}{microbatch}" for k in present]
    return (
        "no backward"
        if not texts
        else f"{texts[0]} alone"
        if len(texts) == 1
        else " and ".join(texts)
    )


def _placement(table: Encoded, placement: Placement) -> Iterator[Violation]:
    """Every action is on a device that holds its stage (L, H: on the one that they name), B, I, W
    and R where their microbatch's F is.
    """
    rows = table.num_devices
    if placement.num_devices != rows:
        message = (
            f"the placement is for {placement.num_devices} devices, but the table has {rows} rows"
        )
        yield Violation("placement", message)
    for stage, devices in enumerate(placement.devices_of):
        if not devices or min(devices) < 0 or max(devices) >= rows:
            message = f"stage {stage} is placed on {list(devices)}; devices go from 0 to {rows - 1}"
            yield Violation("placement", message)
    homes = [
        stage * rows + d
        for stage, devices in enumerate(placement.devices_of)
        for d in devices
        if 0 <= d < rows
    ]
    # The rule of transfers says where a transfer belongs.
    known = table.in_range & table.is_compute
    shares, others = known & table.shares, known & ~table.shares
    for i in np.flatnonzero(shares & (table.stage != table.device)).tolist():
        why = f"it is the share of device {table.stage[i]}"
        yield _at(table, "placement", i, _is_on(table, i, why))
    misplaced = others & ~np.isin(table.stage * rows + table.device, homes)
    for i in np.flatnonzero(misplaced).tolist():
        stage = int(table.stage[i])
        where = " or ".join(map(str, placement.devices_of[stage]))
        yield _at(table, "placement", i, _is_on(table, i, f"stage {stage} is on device {where}"))
    readers_of = np.flatnonzero(others & table.of_kinds(kinds_where(lambda spec: spec.reads)))
    forward = table.at[Kind.F, table.stage[readers_of], table.microbatch[readers_of]]
    for i, f in _pairs(readers_of, forward, _elsewhere(table, readers_of, forward)):
        why = f"{table.text(f)}, which it needs, ran on device {table.device[f]}"
        yield _at(table, "placement", i, _is_on(table, i, why), (f,))


def _is_on(table: Encoded, number: int, but: str) -> str:
    return f"{table.text(number)} is on device {table.device[number]}, but {but}"


def _pairs(mine: IntArray, others: IntArray, where: BoolArray) -> Iterator[tuple[int, int]]:
    """The actions with another one each, where a condition holds."""
    return zip(mine[where].tolist(), others[where].tolist(), strict=True)


def _elsewhere(table: Encoded, mine: IntArray, others: IntArray) -> BoolArray:
    """Whether an action is there (not -1), on another device."""
    elsewhere: BoolArray = (others >= 0) & (table.device[others] != table.device[mine])
    return elsewhere


def _order(table: Encoded) -> Iterator[Violation]:
    """Per device: F before its R, B or I, R before B or I, I before W, stages in turn; E before F,
    L between F and B, G after B, H after L.

    What a device needs of others is the rule of deadlock.
    """
    for value in KEPT:
        mine = np.flatnonzero(table.in_range & table.of_kinds(readers(value)))
        for maker in makers(value):
            needed = table.at[maker, table.stage[mine], table.microbatch[mine]]
            yield from _late(table, "order", mine, needed)
    mine = np.flatnonzero(table.is_compute & (table.producer >= 0))
    yield from _late(table, "order", mine, table.producer[mine])
    # A collective action comes after the action whose value it reads, and before the action that
    # reads its value.
    shares = [
        pair
        for number, collective in table.collectives.items()
        for pair in ((number, collective.source), (collective.user, number))
        if min(pair) >= 0
    ]
    if shares:
        yield from _late(table, "order", *np.array(shares).T)


def _late(table: Encoded, rule: str, mine: IntArray, needed: IntArray) -> Iterator[Violation]:
    """Violations for actions whose need comes later in the same row."""
    late = (needed > mine) & (table.device[needed] == table.device[mine])
    for i, j in _pairs(mine, needed, late):
        message = (
            f"{table.text(i)} comes before {table.text(j)}, which it needs, on device "
            f"{table.device[i]}; swap them"
        )
        yield _at(table, rule, i, message, (j,))


def _slices(table: Encoded) -> Iterator[Violation]:
    """On each stage, the forwards of a sequence run in the order of its slices, on one device
    (slice), and its backwards in reverse order (reverse).

    A forward needs the carry of the slice before it, and a backward the gradient that the slice
    after it leaves.
    """
    if table.slices == 1:
        return
    later = np.flatnonzero(np.arange(table.num_microbatches) % table.slices)
    for rule, numbers, mine, needed in (
        ("slice", table.at[Kind.F], later, later - 1),
        ("reverse", table.backward_at, later - 1, later),
    ):
        action, need = numbers[:, mine].ravel(), numbers[:, needed].ravel()
        there = (action >= 0) & (need >= 0)
        action, need = action[there], need[there]
        yield from _late(table, rule, action, need)
        for i, j in _pairs(action, need, _elsewhere(table, action, need)):
            why = (
                f"{table.text(j)}, a slice of the same sequence, is on device {table.device[j]}; "
                "a stage keeps what passes between slices on one device"
            )
            yield _at(table, rule, i, _is_on(table, i, why), (j,))


def _overlap(table: Encoded) -> Iterator[Violation]:
    """A pair overlaps an F with a B or I that is not of the same stage and microbatch (that one
    would need the F).
    """
    forward, backward = table.of_kinds(FORWARD_HALVES), table.of_kinds(BACKWARD_HALVES)
    for i in table.pairs.tolist():
        pair = table.cell_text(i)
        if not forward[i] or not backward[i + 1]:
            message = f"{pair} must pair an F with a B or an I, in this order"
            yield _at(table, "overlap", i, message)
        elif table.action(i)[::2] == table.action(i + 1)[::2]:
            why = "overlaps an F with its own backward, which needs it; pair it with another"
            yield _at(table, "overlap", i, f"{pair} {why}")


def _transfers(table: Encoded) -> Iterator[Violation]:
    """In a table with SEND and RECV: each value that crosses devices has a SEND after its producer
    and a RECV before its consumer.

    Stages on one device hand over without a transfer.
    """
    if not table.has_transfers:
        return
    needed = np.zeros(table.num_actions, bool)
    for _, users, send, recv in MESSAGES:
        shift = KINDS[recv].came_from
        consumers = np.flatnonzero(table.crosses & table.of_kinds(users))
        producers, m = table.producer[consumers], table.microbatch[consumers]
        for kind, step, ends in ((send, shift, producers), (recv, 0, consumers)):
            transfers = table.at[kind, table.stage[consumers] + step, m]
            yield from _missing(table, consumers[transfers < 0], kind, step)
            yield from _strayed(table, transfers, ends, before=kind is recv)
            needed[transfers[transfers >= 0]] = True
    spare = ~needed & ~table.is_compute & table.in_range & _is_first(table)
    why = "no action on another device uses it; stages on one device hand over without a transfer"
    for i in np.flatnonzero(spare).tolist():
        yield _at(table, "transfer", i, f"{table.text(i)} is not needed: {why}")


def _is_first(table: Encoded) -> BoolArray:
    """Per action in range, whether it is the first of its duplicates."""
    first = np.zeros(table.num_actions, bool)
    known = np.flatnonzero(table.in_range)
    first[known] = table.at[table.kind[known], table.stage[known], table.microbatch[known]] == known
    return first


def _missing(table: Encoded, consumers: IntArray, kind: Kind, shift: int) -> Iterator[Violation]:
    """Violations for consumers on another device than their producer whose SEND or RECV
    is missing.
    """
    for i in consumers.tolist():
        text = f"{table.stage[i] + shift}{kind.name}{table.microbatch[i]}"
        p = int(table.producer[i])
        message = (
            f"{text} is missing: {table.text(p)} on device {table.device[p]} feeds "
            f"{table.text(i)} on device {table.device[i]}; jaxpipe.add_transfers adds transfers"
        )
        yield _at(table, "transfer", i, message, (p,))


def _strayed(
    table: Encoded, transfers: IntArray, ends: IntArray, *, before: bool
) -> Iterator[Violation]:
    """Violations for transfers that are on another device than the action they serve, or on the
    wrong side of it.
    """
    elsewhere = (transfers >= 0) & (table.device[transfers] != table.device[ends])
    for t, end in _pairs(transfers, ends, elsewhere):
        why = f"it serves {table.text(end)} on device {table.device[end]}"
        yield _at(table, "transfer", t, _is_on(table, t, why), (end,))
    wrong = (transfers > ends) if before else (transfers < ends)
    side = "after" if before else "before"
    for t, end in _pairs(transfers, ends, (transfers >= 0) & ~elsewhere & wrong):
        message = (
            f"{table.text(t)} comes {side} {table.text(end)} on device {table.device[t]}; swap them"
        )
        yield _at(table, "transfer", t, message, (end,))


def deadlocks(table: Encoded, order: Order, transfers: Transfers) -> tuple[Violation, ...]:
    """The rule of deadlock: no devices wait for each other, proved over the whole table by running
    it.

    `order` gives the (cached) run order of the table for each kind of transfer.  What runs under
    one kind of transfer runs under every laxer one; a table that does not run under `transfers` is
    reported for the laxest under which it does not. A missing action holds nothing up here: the
    rule of completeness reports it.
    """
    if table.too_sparse:
        return ()
    kinds = tuple(Transfers)  # the laxest first
    asked = kinds.index(transfers) if table.has_transfers else 0
    for laxer in kinds[: asked + 1]:
        if cycles := order(laxer).cycles:
            return tuple(_deadlock(table, cycle, _WHERE[laxer]) for cycle in cycles)
    return ()


# Under which transfers a table deadlocks; nothing where it always does.
_WHERE = {
    Transfers.ASYNC: "",
    Transfers.BUFFERED: " where a RECV holds its device until the message is there (buffered)",
    Transfers.RENDEZVOUS: " where SEND and RECV wait for each other (rendezvous)",
}


def _deadlock(table: Encoded, cycle: tuple[Wait, ...], how: str) -> Violation:
    links = [
        f"device {w.device} is at {table.text(w.at)} and waits for {table.text(w.on)}, which "
        f"comes later on device {w.other}"
        for w in cycle
    ]
    first = cycle[0].at
    others = [w.at for w in cycle[1:]] + [w.on for w in cycle]
    return _at(
        table, "deadlock", first, f"devices wait for each other{how}: " + "; ".join(links), others
    )


def run_order(table: Encoded, transfers: Transfers) -> RunOrder:
    """The run order of a table under one kind of transfer, which matters with SEND and RECV."""
    if transfers is Transfers.RENDEZVOUS and table.has_transfers:
        return rendezvous_order(table)
    return buffered_order(table, waits(table, transfers))
