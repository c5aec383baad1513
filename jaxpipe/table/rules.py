"""The rules of a table, one function a rule; each returns every place where its rule is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import Violation, quoted
from .encoded import BoolArray, Encoded, IntArray, RunOrder, Transfers, Wait, live_activations
from .kinds import (
    BACKWARD_HALVES,
    COLLECTIVES,
    FORWARD_HALVES,
    KEPT,
    KIND_NAMES,
    KINDS,
    MESSAGES,
    SPREAD_FIRST,
    Kind,
    Pass,
    Placement,
    Release,
    Value,
    kinds_where,
    makers,
    readers,
)


class Broken(NamedTuple):
    """A place where a rule is broken: the fault, the action, and others that take part."""

    message: str
    number: int | None = None
    others: Sequence[int] = ()
    device: int | None = None  # to point at where there is no action


def broken_rules(table: Encoded, placement: Placement) -> tuple[Violation, ...]:
    """Every violation of the rules that look at the table alone: range, duplicate, completeness,
    placement, order, slice, reverse, overlap, transfer.
    """
    if table.too_sparse:
        return (_violation(table, "completeness", _too_sparse(table)),)
    return tuple(
        _violation(table, rule, found)
        for rule, broken in _RULES.items()
        for found in broken(table, placement)
    )


def _violation(table: Encoded, rule: str, found: Broken) -> Violation:
    """A violation that points at the cells of actions."""
    if found.number is None:
        return Violation(rule, found.message, found.device)
    others = tuple(map(table.cell_of, found.others))
    return Violation(rule, found.message, *table.cell_of(found.number), others)


def _too_sparse(table: Encoded) -> Broken:
    sizes = f"{table.num_stages} stages and {table.num_microbatches} microbatches"
    pairs = f"{sizes} need a forward for each pair"
    if not table.num_actions:
        return Broken(f"{pairs}, but the table holds no action")
    number = int(np.argmax(np.maximum(table.stage, table.microbatch)))
    typo = f"{table.text(number)} is a possible typo"
    few = f"the table holds {table.num_actions} actions"
    return Broken(f"{pairs}, but {few}; {typo}", number)


def _range(table: Encoded, _: Placement) -> Iterator[Broken]:
    """Every stage and microbatch number exists."""
    stages, microbatches = table.num_stages - 1, table.num_microbatches - 1
    limits = f"stages go from 0 to {stages}, microbatches from 0 to {microbatches}"
    for i in np.flatnonzero(~table.in_range).tolist():
        yield Broken(f"{table.text(i)} does not exist: {limits}", i)


def _duplicate(table: Encoded, _: Placement) -> Iterator[Broken]:
    """No action occurs twice."""
    for i in np.flatnonzero(table.in_range & ~_is_first(table)).tolist():
        original = int(table.at[table.kind[i], table.stage[i], table.microbatch[i]])
        device, position = table.cell_of(original)
        where = f"is already on device {device} at position {position}"
        yield Broken(f"{table.text(i)} {where}; run every action once", i, (original,))


def _completeness(table: Encoded, _: Placement) -> Iterator[Broken]:
    """Every stage runs every microbatch's F once, and its B or its I and W (none of them in a
    forward-only table); actions that all devices share are complete.
    """
    if table.num_actions == 0:
        give = "give every stage and microbatch at least an F"
        yield Broken(f"the table holds no action; {give}")
        return
    has = table.at >= 0
    for stage, m in np.argwhere(~has[Kind.F]).tolist():
        lacks = f"no device runs the forward of stage {stage}, microbatch {m}"
        yield Broken(f"{stage}F{m} is missing: {lacks}")
    yield from _missing_shares(table)
    if table.forward_only:
        return
    both = [list(makers(value)) for value in (Value.INPUT_GRAD, Value.WEIGHT_GRAD)]
    wrong = np.any([has[kinds].sum(axis=0) != 1 for kinds in both], axis=0)
    for stage, m in np.argwhere(wrong).tolist():
        present = [k for k in sorted({*both[0], *both[1]}) if has[k, stage, m]]
        texts = [f"{stage}{k.name}{m}" for k in present] or ["no backward"]
        fault = f"{texts[0]} alone" if len(present) == 1 else " and ".join(texts)
        found = table.at[[*present, Kind.F], stage, m]
        message = f"stage {stage}, microbatch {m} has {fault}"
        anchors = _anchored(found[found >= 0].tolist())
        yield Broken(f"{message}; give it B, or both I and W", *anchors)


def _anchored(numbers: Sequence[int]) -> tuple[int | None, Sequence[int]]:
    """The action to point at, where there is any, and the others."""
    return (numbers[0], numbers[1:]) if numbers else (None, ())


def _missing_shares(table: Encoded) -> Iterator[Broken]:
    """A collective action is in every row for every microbatch, or in none; both of a spread
    `first` are there; and each share has its late part, or none has.
    """
    devices = table.num_devices
    for kind in COLLECTIVES:
        at = table.at[kind, :devices]
        if (at >= 0).any() and table.num_stages < devices:
            need = f"a table with {kind.name} needs as many stages as devices"
            has = f"{devices} devices and {table.num_stages} stages"
            yield Broken(f"{need}; this one has {has}")
        elif (at >= 0).any():
            why = f"all devices do their share of {kind.name} together, for every microbatch"
            for device, m in np.argwhere(at < 0).tolist():
                anchors = _anchored(at[at[:, m] >= 0, m].tolist())
                missing = f"{device}{kind.name}{m} is missing"
                yield Broken(f"{missing}: {why}", *anchors, device)
    ends = np.flatnonzero(table.of_kinds(SPREAD_FIRST)).tolist()
    for kind in SPREAD_FIRST if ends else ():
        needed = KINDS[kind].direction is Pass.FORWARD or not table.forward_only
        if needed and kind not in table.kinds:
            has = f"{KIND_NAMES[table.kind[ends[0]]]}, but no {kind.name}"
            what = f"{KINDS[kind].description}, on every device"
            yield Broken(f"the table has {has}: {what}", ends[0])
    for late in table.kinds:
        sooner = KINDS[late].part_of
        if sooner is None:
            continue
        both = table.at[[late, sooner]]
        for number, m in np.argwhere((both >= 0).sum(axis=0) == 1).tolist():
            other = int(both[:, number, m].max())
            lacks = sooner if table.kind[other] == late else late
            what = f"{KINDS[lacks].description}, of the share {table.text(other)}"
            yield Broken(f"{number}{lacks.name}{m} is missing: {what}", other)


def _placement(table: Encoded, placement: Placement) -> Iterator[Broken]:
    """Every action is on a device that holds its stage (shares: on the one that they name), B, I, W
    and R where their microbatch's F is.
    """
    rows = table.num_devices
    if placement.num_devices != rows:
        meant = f"the placement is for {placement.num_devices} devices"
        yield Broken(f"{meant}, but the table has {rows} rows")
    for stage, devices in enumerate(placement.devices_of):
        if not devices or min(devices) < 0 or max(devices) >= rows:
            limits = f"devices go from 0 to {rows - 1}"
            yield Broken(f"stage {stage} is placed on {list(devices)}; {limits}")
    # The rule of transfers says where a transfer belongs.
    known = table.in_range & table.is_compute
    shares, others = known & table.shares, known & ~table.shares
    for i in np.flatnonzero(shares & (table.stage != table.device)).tolist():
        yield Broken(_is_on(table, i, f"it is the share of device {table.stage[i]}"), i)
    homes = [
        stage * rows + device
        for stage, devices in enumerate(placement.devices_of)
        for device in devices
        if 0 <= device < rows
    ]
    strayed = others & ~np.isin(table.stage * rows + table.device, homes)
    for i in np.flatnonzero(strayed).tolist():
        home = " or ".join(map(str, placement.devices_of[table.stage[i]]))
        where = f"stage {table.stage[i]} is on device {home}"
        yield Broken(_is_on(table, i, where), i)
    mine = np.flatnonzero(others & table.of_kinds(kinds_where(lambda spec: spec.reads)))
    forward = table.at[Kind.F, table.stage[mine], table.microbatch[mine]]
    for i, f in _pairs(mine, forward, _elsewhere(table, mine, forward)):
        why = f"{table.text(f)}, which it needs, ran on device {table.device[f]}"
        yield Broken(_is_on(table, i, why), i, (f,))


def _is_on(table: Encoded, number: int, but: str) -> str:
    return f"{table.text(number)} is on device {table.device[number]}, but {but}"


def _pairs(mine: IntArray, others: IntArray, where: BoolArray) -> Iterator[tuple[int, int]]:
    """The actions with another one each, where a condition holds."""
    return zip(mine[where].tolist(), others[where].tolist(), strict=True)


def _elsewhere(table: Encoded, mine: IntArray, others: IntArray) -> BoolArray:
    """Whether an action is there (not -1), on another device."""
    elsewhere: BoolArray = (others >= 0) & (table.device[others] != table.device[mine])
    return elsewhere


def _order(table: Encoded, _: Placement) -> Iterator[Broken]:
    """Per device: F before its R, B or I, R before B or I, I before W, stages in turn; E before F,
    L between F and B, G after B, late parts after L.

    What a device needs of others is the rule of deadlock.
    """
    for value in KEPT:
        mine = np.flatnonzero(table.in_range & table.of_kinds(readers(value)))
        for maker in makers(value):
            needed = table.at[maker, table.stage[mine], table.microbatch[mine]]
            yield from _late(table, mine, needed)
    mine = np.flatnonzero(table.is_compute & (table.producer >= 0))
    yield from _late(table, mine, table.producer[mine])
    # A collective action comes after the action whose value it reads, and before the action that
    # reads its value.
    shares = [
        pair
        for number, collective in table.collectives.items()
        for pair in ((number, collective.source), (collective.user, number))
        if min(pair) >= 0
    ]
    yield from _late(table, *np.array(shares, np.int64).reshape(-1, 2).T)


def _late(table: Encoded, mine: IntArray, needed: IntArray) -> Iterator[Broken]:
    """Actions whose need comes later in the same row."""
    late = (needed > mine) & (table.device[needed] == table.device[mine])
    for i, j in _pairs(mine, needed, late):
        before = f"{table.text(i)} comes before {table.text(j)}, which it needs"
        yield Broken(f"{before}, on device {table.device[i]}; swap them", i, (j,))


def _slice(table: Encoded, _: Placement) -> Iterator[Broken]:
    """On each stage, the forwards of a sequence run in the order of its slices, on one device: each
    needs the carry of the slice before it.
    """
    later = np.flatnonzero(np.arange(table.num_microbatches) % table.slices)
    forward = table.at[Kind.F]
    yield from _in_turn(table, forward[:, later], forward[:, later - 1])


def _reverse(table: Encoded, _: Placement) -> Iterator[Broken]:
    """The backwards of a sequence run in the reverse order of its slices: each needs the gradient
    that the slice after it leaves.
    """
    later = np.flatnonzero(np.arange(table.num_microbatches) % table.slices)
    backward = table.backward_at
    yield from _in_turn(table, backward[:, later - 1], backward[:, later])


def _in_turn(table: Encoded, action: IntArray, need: IntArray) -> Iterator[Broken]:
    """Actions on another device than those that they need, or before them; -1 for none."""
    there = (action >= 0) & (need >= 0)
    yield from _late(table, action[there], need[there])
    elsewhere = there & _elsewhere(table, action, need)
    for i, j in _pairs(action, need, elsewhere):
        other = f"{table.text(j)}, a slice of the same sequence, is on device {table.device[j]}"
        why = "a stage keeps what passes between slices on one device"
        yield Broken(_is_on(table, i, f"{other}; {why}"), i, (j,))


def _overlap(table: Encoded, _: Placement) -> Iterator[Broken]:
    """A pair overlaps an F with a B or I that is not of the same stage and microbatch (that one
    would need the F).
    """
    forward, backward = table.of_kinds(FORWARD_HALVES), table.of_kinds(BACKWARD_HALVES)
    for i in table.pairs.tolist():
        pair = table.cell_text(i)
        if not forward[i] or not backward[i + 1]:
            yield Broken(f"{pair} must pair an F with a B or an I, in this order", i)
        elif table.action(i)[::2] == table.action(i + 1)[::2]:
            why = "overlaps an F with its own backward, which needs it; pair it with another"
            yield Broken(f"{pair} {why}", i)


def _transfer(table: Encoded, _: Placement) -> Iterator[Broken]:
    """In a table with SEND and RECV: each value that crosses devices has a SEND after its producer
    and a RECV before its consumer.

    Stages on one device hand over without a transfer.
    """
    if not table.has_transfers:
        return
    needed = np.zeros(table.num_actions, bool)
    for message in MESSAGES:
        shift = KINDS[message.receive].came_from
        mine = np.flatnonzero(table.crosses & table.of_kinds(message.users))
        sent = (message.send, shift, table.producer[mine])
        for kind, step, ends in (sent, (message.receive, 0, mine)):
            found = table.at[kind, table.stage[mine] + step, table.microbatch[mine]]
            for i in mine[found < 0].tolist():
                p = int(table.producer[i])
                lacks = f"{table.stage[i] + step}{kind.name}{table.microbatch[i]} is missing"
                where = (f"{table.text(j)} on device {table.device[j]}" for j in (p, i))
                feeds = " feeds ".join(where)
                add = "jaxpipe.add_transfers adds transfers"
                yield Broken(f"{lacks}: {feeds}; {add}", i, (p,))
            yield from _strayed(table, found, ends, before=kind is message.receive)
            needed[found[found >= 0]] = True
    spare = ~needed & ~table.is_compute & table.in_range & _is_first(table)
    why = "no action on another device uses it; stages on one device hand over without a transfer"
    for i in np.flatnonzero(spare).tolist():
        yield Broken(f"{table.text(i)} is not needed: {why}", i)


def _is_first(table: Encoded) -> BoolArray:
    """Per action in range, whether it is the first of its duplicates."""
    first = np.zeros(table.num_actions, bool)
    first[table.at[table.at >= 0]] = True
    return first


def _strayed(
    table: Encoded, transfers: IntArray, ends: IntArray, *, before: bool
) -> Iterator[Broken]:
    """Transfers that are on another device than the action they serve, or on the wrong side of
    it.
    """
    elsewhere = _elsewhere(table, ends, transfers)
    for t, end in _pairs(transfers, ends, elsewhere):
        why = f"it serves {table.text(end)} on device {table.device[end]}"
        yield Broken(_is_on(table, t, why), t, (end,))
    wrong = (transfers > ends) if before else (transfers < ends)
    side = "after" if before else "before"
    for t, end in _pairs(transfers, ends, (transfers >= 0) & ~elsewhere & wrong):
        where = f"{table.text(t)} comes {side} {table.text(end)} on device {table.device[t]}"
        yield Broken(f"{where}; swap them", t, (end,))


_RULES: dict[str, Callable[[Encoded, Placement], Iterator[Broken]]] = {
    "range": _range,
    "duplicate": _duplicate,
    "completeness": _completeness,
    "placement": _placement,
    "order": _order,
    "slice": _slice,
    "reverse": _reverse,
    "overlap": _overlap,
    "transfer": _transfer,
}

# Under which transfers a table deadlocks; nothing where it always does.
_WHERE = {
    Transfers.ASYNC: "",
    Transfers.BUFFERED: " where a RECV holds its device until the message is there (buffered)",
    Transfers.RENDEZVOUS: " where SEND and RECV wait for each other (rendezvous)",
}


def deadlocks(
    table: Encoded, order: Callable[[Transfers], RunOrder], transfers: Transfers
) -> tuple[Violation, ...]:
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
    strictest = kinds.index(transfers) if table.has_transfers else 0
    for laxer in kinds[: strictest + 1]:
        if cycles := order(laxer).cycles:
            found = (_deadlock(table, cycle, _WHERE[laxer]) for cycle in cycles)
            return tuple(_violation(table, "deadlock", each) for each in found)
    return ()


def _deadlock(table: Encoded, cycle: tuple[Wait, ...], how: str) -> Broken:
    links = "; ".join(
        f"device {w.device} is at {table.text(w.at)} and waits for {table.text(w.on)}, which "
        f"comes later on device {w.other}"
        for w in cycle
    )
    others = [w.at for w in cycle[1:]] + [w.on for w in cycle]
    return Broken(f"devices wait for each other{how}: {links}", cycle[0].at, others)


def over_cap(table: Encoded, cap: int | Sequence[int], release: Release) -> Iterator[Violation]:
    """The rule of memory: one violation for each device that exceeds its cap, at the first action
    that does.
    """
    devices = table.num_devices
    caps = list(cap) if isinstance(cap, Sequence) else [cap] * devices
    if len(caps) != devices:
        why = f"max_activations has {len(caps)} entries for {devices} devices"
        yield Violation("memory", f"{why}; give one number, or one for each device")
        return
    live = live_activations(table, release)
    for device, most in enumerate(caps):
        held = live[table.first[device] : table.first[device + 1]]
        over = np.flatnonzero(held > most)
        if len(over):
            number = table.first[device] + int(over[0])
            may = f"device {device} may hold {quoted(most)} activations"
            holds = f"holds {held[over[0]]} while {table.text(number)} runs"
            message = f"{may}, but {holds} and {held.max()} at its peak"
            yield _violation(table, "memory", Broken(message, number))
