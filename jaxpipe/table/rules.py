"""The rules of a table, one function a rule; each returns every place where its rule is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import Violation, quoted
from .encoded import BoolArray, Encoded, IntArray, Transfers, live_activations
from .gathered import run_numbers, runs_of
from .kinds import (
    BACKWARD_HALVES,
    BACKWARDS,
    BESIDE,
    FORWARD_HALVES,
    KEPT,
    KINDS,
    MESSAGES,
    SHARES,
    SPREAD_FIRST,
    TRANSFERS,
    Kind,
    Release,
    Sharded,
    Value,
    droppers,
    gatherers,
    kinds_where,
    makers,
    readers,
    users,
)
from .order import RunOrder, Wait
from .placement import Placement


class Broken(NamedTuple):
    """A place where a rule is broken: the fault, and the actions that take part, of which the first
    is pointed at.
    """

    message: str
    numbers: Sequence[int] = ()


def broken_rules(table: Encoded, placement: Placement) -> tuple[Violation, ...]:
    """Every violation of the rules that look at the table alone: range, duplicate, completeness,
    placement, order, slice, reverse, overlap, transfer, gather, reduce.
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
    cells = tuple(map(table.cell_of, found.numbers))
    device, position = cells[0] if cells else (None, None)
    return Violation(rule, found.message, device, position, cells[1:])


def _too_sparse(table: Encoded) -> Broken:
    sizes = f"{table.num_stages} stages and {table.num_microbatches} microbatches"
    pairs = f"{sizes} need a forward for each pair"
    if not table.num_actions:
        return Broken(f"{pairs}, but the table holds no action")
    number = int(np.argmax(np.maximum(table.stage, table.microbatch)))
    typo = f"{table.text(number)} is a possible typo"
    few = f"the table holds {table.num_actions} actions"
    return Broken(f"{pairs}, but {few}; {typo}", [number])


def _range(table: Encoded, _: Placement) -> Iterator[Broken]:
    """Every stage and microbatch number exists."""
    stages, microbatches = table.num_stages - 1, table.num_microbatches - 1
    limits = f"stages go from 0 to {stages}, microbatches from 0 to {microbatches}"
    for i in np.flatnonzero(~table.in_range).tolist():
        yield Broken(f"{table.text(i)} does not exist: {limits}", [i])


def _duplicate(table: Encoded, _: Placement) -> Iterator[Broken]:
    """No action occurs twice (two runs of a stage may begin with the same microbatch)."""
    once = table.in_range & ~table.of_kinds(BESIDE)
    for i in np.flatnonzero(once & ~_is_first(table)).tolist():
        original = int(table.at[table.kind[i], table.stage[i], table.microbatch[i]])
        device, position = table.cell_of(original)
        where = f"is already on device {device} at position {position}"
        yield Broken(f"{table.text(i)} {where}; run every action once", [i, original])


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
        message = f"stage {stage}, microbatch {m} has {fault}; give it B, or both I and W"
        yield Broken(message, found[found >= 0].tolist())


def _missing_shares(table: Encoded) -> Iterator[Broken]:
    """A share is in every row for every microbatch, or in none: with a late part there is what it
    is a part of, with E there is G, with G there is E.
    """
    devices, kinds = table.num_devices, table.kinds
    needed = {*kinds.intersection(SHARES)}
    needed |= {late for kind in needed if (late := KINDS[kind].part_of) is not None}
    if not kinds.isdisjoint(SPREAD_FIRST):
        unneeded = BACKWARDS if table.forward_only else ()
        needed |= {kind for kind in SPREAD_FIRST if kind not in unneeded}
    for kind in sorted(needed):
        at, what = table.at[kind, :devices], f"{kind.name}, {KINDS[kind].description}"
        if table.num_stages < devices:
            has = f"{devices} devices and {table.num_stages} stages"
            need = f"a table with {kind.name} needs as many stages as devices"
            yield Broken(f"{need}; this one has {has}")
            continue
        why = f"every device does its share of {what}, for every microbatch"
        if kind not in kinds:
            given = table.of_kinds(SPREAD_FIRST if kind in SPREAD_FIRST else SHARES)
            yield Broken(f"the table has no {kind.name}: {why}", [int(given.argmax())])
            continue
        for device, m in np.argwhere(at < 0).tolist():
            others = at[at[:, m] >= 0, m].tolist()
            yield Broken(f"{device}{kind.name}{m} is missing: {why}", others)


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
    known = table.in_range & ~table.of_kinds(TRANSFERS)
    shares, others = known & table.shares, known & ~table.shares
    for i in np.flatnonzero(shares & (table.stage != table.device)).tolist():
        yield Broken(_is_on(table, i, f"it is the share of device {table.stage[i]}"), [i])
    stages_of = placement.stages_of[:rows]
    homes = [s * rows + d for d, stages in enumerate(stages_of) for s in stages]
    strayed = others & ~np.isin(table.stage * rows + table.device, homes)
    for i in np.flatnonzero(strayed).tolist():
        home = " or ".join(map(str, placement.devices_of[table.stage[i]]))
        where = f"stage {table.stage[i]} is on device {home}"
        yield Broken(_is_on(table, i, where), [i])
    mine = np.flatnonzero(others & table.of_kinds(kinds_where(lambda spec: spec.reads)))
    forward = table.at[Kind.F, table.stage[mine], table.microbatch[mine]]
    yield from _apart(table, mine, forward)


def _is_on(table: Encoded, number: int, but: str) -> str:
    return f"{table.text(number)} is on device {table.device[number]}, but {but}"


def _apart(table: Encoded, mine: IntArray, needed: IntArray) -> Iterator[Broken]:
    """Actions on another device than what they need; -1 for no need."""
    apart = (needed >= 0) & (table.device[needed] != table.device[mine])
    for i, j in zip(mine[apart].tolist(), needed[apart].tolist(), strict=True):
        why = f"{table.text(j)}, which it needs, is on device {table.device[j]}; put both on one"
        yield Broken(_is_on(table, i, why), [i, j])


def _late(table: Encoded, mine: IntArray, needed: IntArray) -> Iterator[Broken]:
    """Actions whose need comes later in the same row; -1 for no need."""
    late = (needed > mine) & (table.device[needed] == table.device[mine])
    for i, j in zip(mine[late].tolist(), needed[late].tolist(), strict=True):
        before = f"{table.text(i)} comes before {table.text(j)}, which it needs"
        yield Broken(f"{before}, on device {table.device[i]}; swap them", [i, j])


def _in_turn(table: Encoded, mine: IntArray, needed: IntArray) -> Iterator[Broken]:
    """Actions that do not come after what they need in the same row; -1 for no action."""
    there = (mine >= 0) & (needed >= 0)
    for broken in (_late, _apart):
        yield from broken(table, mine[there], needed[there])


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


def _overlap(table: Encoded, _: Placement) -> Iterator[Broken]:
    """A pair overlaps an F with a B or I that is not of the same stage and microbatch (that one
    would need the F).
    """
    forward, backward = table.of_kinds(FORWARD_HALVES), table.of_kinds(BACKWARD_HALVES)
    for i in table.pairs.tolist():
        pair = table.cell_text(i)
        if not forward[i] or not backward[i + 1]:
            yield Broken(f"{pair} must pair an F with a B or an I, in this order", [i])
        elif table.action(i)[::2] == table.action(i + 1)[::2]:
            why = "overlaps an F with its own backward, which needs it; pair it with another"
            yield Broken(f"{pair} {why}", [i])


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
                yield Broken(f"{lacks}: {feeds}; {add}", [i, p])
            order = (found, ends) if kind is message.send else (ends, found)
            yield from _in_turn(table, *order)
            needed[found[found >= 0]] = True
    spare = ~needed & table.of_kinds(TRANSFERS) & table.in_range & _is_first(table)
    why = "no action on another device uses it; stages on one device hand over without a transfer"
    for i in np.flatnonzero(spare).tolist():
        yield Broken(f"{table.text(i)} is not needed: {why}", [i])


_ADD = "jaxpipe.add_gathers adds U, D and X"


def _gather(table: Encoded, _: Placement) -> Iterator[Broken]:
    """In a table with U or D: each action of a stage runs between a U of its stage and a D; each U
    has a use and a D, each D a U.
    """
    what = Sharded.PARAMETERS
    uses, gathers, drops = map(table.of_kinds, (users(what), gatherers(what), droppers(what)))
    if not (gathers | drops).any():
        return
    runs = runs_of(table, what)
    for i in np.flatnonzero(uses & (runs.begin < 0)).tolist():
        yield Broken(f"{_at(table, i)} where its stage is not gathered; {_ADD}", [i])
    for i in np.flatnonzero(drops & (runs.begin < 0)).tolist():
        yield Broken(f"{_at(table, i)}, but no U before it gathers its stage", [i])
    for i in np.flatnonzero(gathers & (runs.end < 0)).tolist():
        put = "put a D after the last action that needs it, before its stage's next U"
        yield Broken(f"{_at(table, i)}, and no D drops what it gathers; {put}", [i])
    for i in np.flatnonzero(gathers & (runs.end >= 0) & (runs.number < 0)).tolist():
        yield Broken(f"{_at(table, i)}, but nothing uses what it gathers", [i])
    yield from _misnamed(table, gathers | drops)


def _reduce(table: Encoded, _: Placement) -> Iterator[Broken]:
    """In a table with X, or with U and a backward: an X comes after each B and W of its stage, and
    each X has something to reduce.
    """
    what = Sharded.GRADIENT
    reduces = table.of_kinds(droppers(what))
    gathers = table.of_kinds(gatherers(Sharded.PARAMETERS))
    if not reduces.any() and (table.forward_only or not gathers.any()):
        return
    runs = runs_of(table, what)
    home = list(zip(table.device.tolist(), table.stage.tolist(), strict=True))
    last = {home[i]: i for i in np.flatnonzero(reduces).tolist()}
    begins = runs.begin == np.arange(table.num_actions)
    for i in np.flatnonzero(begins & (runs.end < 0)).tolist():
        x = last.get(home[i])
        if x is None:
            yield Broken(f"{_at(table, i)}, and no X reduces its gradient; {_ADD}", [i])
        else:
            adds = f"adds to a gradient that {table.text(x)} has reduced and dropped"
            yield Broken(f"{_at(table, i)} and {adds}; put the X after it", [i, x])
    for i in np.flatnonzero(reduces & (runs.begin < 0)).tolist():
        why = "no B or W of its stage has made a gradient since the X before"
        yield Broken(f"{_at(table, i)}, but {why}", [i])
    yield from _misnamed(table, reduces)


def _at(table: Encoded, number: int) -> str:
    device, position = table.cell_of(number)
    return f"{table.text(number)} runs on device {device} at position {position}"


def _misnamed(table: Encoded, those: BoolArray) -> Iterator[Broken]:
    """Those actions with another number than that of their run's first microbatch."""
    numbers = run_numbers(table)
    wrong = those & (numbers >= 0) & (numbers != table.microbatch)
    for i in np.flatnonzero(wrong).tolist():
        name = table.action(i)._replace(microbatch=int(numbers[i]))
        begins = f"its run begins with microbatch {numbers[i]}"
        yield Broken(f"{_at(table, i)}, but {begins}; write {name}", [i])


def _is_first(table: Encoded) -> BoolArray:
    """Per action in range, whether it is the first of its duplicates."""
    first = np.zeros(table.num_actions, bool)
    first[table.at[table.at >= 0]] = True
    return first


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
    "gather": _gather,
    "reduce": _reduce,
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
    numbers = [w.at for w in cycle] + [w.on for w in cycle]
    return Broken(f"devices wait for each other{how}: {links}", numbers)


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
            yield _violation(table, "memory", Broken(message, [number]))
