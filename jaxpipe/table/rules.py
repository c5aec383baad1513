"""The rules of a table, one function a rule; each returns every place where its rule is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..errors import Violation
from .encoded import BoolArray, Encoded, IntArray
from .kinds import (
    BACKWARD_HALVES,
    COMPUTE,
    FORWARD_HALVES,
    KEPT,
    KIND_NAMES,
    KINDS,
    MESSAGES,
    SPREAD_FIRST,
    TOGETHER,
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


def _range(table: Encoded) -> list[Violation]:
    """Every stage and microbatch number exists."""
    limits = (
        f"stages go from 0 to {table.num_stages - 1}, microbatches from 0 to "
        f"{table.num_microbatches - 1}"
    )
    bad = np.flatnonzero(~table.in_range)
    return [
        _at(table, "range", i, f"{table.text(i)} does not exist: {limits}") for i in bad.tolist()
    ]


def _duplicates(table: Encoded) -> list[Violation]:
    """No action occurs twice."""
    numbers = np.arange(table.num_actions)
    known = table.in_range
    original = numbers.copy()
    original[known] = table.at[table.kind[known], table.stage[known], table.microbatch[known]]
    found = []
    for i in np.flatnonzero(original != numbers).tolist():
        device, position = table.cell_of(int(original[i]))
        message = (
            f"{table.text(i)} is already on device {device} at position {position}; run "
            "every action once"
        )
        found.append(_at(table, "duplicate", i, message, (int(original[i]),)))
    return found


def _completeness(table: Encoded) -> list[Violation]:
    """Every stage runs every microbatch's F once, and its B or its I and W (none of them in a
    forward-only table).
    """
    if table.num_actions == 0:
        return [
            Violation(
                "completeness",
                "the table holds no action; give every stage and microbatch at least an F",
            )
        ]
    has = table.at >= 0
    found = [
        Violation(
            "completeness",
            f"{stage}F{m} is missing: no device runs the forward of stage {stage}, microbatch {m}",
        )
        for stage, m in np.argwhere(~has[Kind.F]).tolist()
    ]
    found += _shares(table)
    if table.forward_only:
        return found
    by_input, by_weight = makers(Value.INPUT_GRAD), makers(Value.WEIGHT_GRAD)
    wrong = (has[list(by_input)].sum(axis=0) != 1) | (has[list(by_weight)].sum(axis=0) != 1)
    for stage, m in np.argwhere(wrong).tolist():
        present = [k for k in COMPUTE if k in by_input + by_weight and has[k, stage, m]]
        anchors = [int(table.at[k, stage, m]) for k in (*present, Kind.F) if has[k, stage, m]]
        message = (
            f"stage {stage}, microbatch {m} has {_backward_fault(stage, m, present)}; give "
            "it B, or both I and W"
        )
        found.append(
            _at(table, "completeness", anchors[0], message, anchors[1:])
            if anchors
            else Violation("completeness", message)
        )
    return found


def _shares(table: Encoded) -> list[Violation]:
    """A collective action is in every row for every microbatch, or in none."""
    found = []
    for kind in TOGETHER:
        there = table.at[kind, : table.num_devices] >= 0
        if not there.any():
            continue
        if table.num_stages < table.num_devices:
            many = f"{table.num_devices} devices and {table.num_stages} stages"
            message = (
                f"a table with {kind.name} needs as many stages as devices; this one has {many}"
            )
            found.append(Violation("completeness", message))
            continue
        for device, m in np.argwhere(~there).tolist():
            others = table.at[kind, : table.num_devices, m]
            message = (
                f"{device}{kind.name}{m} is missing: all devices do their share of "
                f"{kind.name} together, for every microbatch"
            )
            anchors = others[others >= 0].tolist()
            found.append(
                _at(table, "completeness", anchors[0], message, anchors[1:])
                if anchors
                else Violation("completeness", message, device)
            )
    return found + _lone_shares(table) + _late_parts(table)


def _late_parts(table: Encoded) -> list[Violation]:
    """Where a part of a collective action is done later, each has its part (L its H)."""
    found = []
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
            found.append(_at(table, "completeness", other, message))
    return found


def _lone_shares(table: Encoded) -> list[Violation]:
    """The forward and the gradient of a spread `first` are both there."""
    found = []
    there = np.flatnonzero(table.of_kinds(SPREAD_FIRST))
    for kind in SPREAD_FIRST if len(there) else ():
        needed = KINDS[kind].direction is Pass.FORWARD or not table.forward_only
        if needed and not table.of_kinds((kind,)).any():
            other = int(there[0])
            message = (
                f"the table has {KIND_NAMES[table.kind[other]]}, but no {kind.name}: "
                f"{KINDS[kind].description}, on every device"
            )
            found.append(_at(table, "completeness", other, message))
    return found


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


def _placement(table: Encoded, placement: Placement) -> list[Violation]:
    """Every action is on a device that holds its stage (L, H: on the one that they name), B, I, W
    and R where their microbatch's F is.
    """
    found = []
    if placement.num_devices != table.num_devices:
        message = (
            f"the placement is for {placement.num_devices} devices, but the table has "
            f"{table.num_devices} rows"
        )
        found.append(Violation("placement", message))
    for stage, devices in enumerate(placement.devices_of):
        if not devices or min(devices) < 0 or max(devices) >= table.num_devices:
            found.append(
                Violation(
                    "placement",
                    f"stage {stage} is placed on {list(devices)}; devices go from 0 to "
                    f"{table.num_devices - 1}",
                )
            )
    rows = table.num_devices
    homes = [
        stage * rows + d
        for stage, devices in enumerate(placement.devices_of)
        for d in devices
        if 0 <= d < rows
    ]
    shares = np.flatnonzero(table.in_range & table.shares)
    for i in shares[table.stage[shares] != table.device[shares]].tolist():
        message = (
            f"{table.text(i)} is on device {table.device[i]}, but it is the share of "
            f"device {table.stage[i]}"
        )
        found.append(_at(table, "placement", i, message))
    # A transfer belongs to what it serves: the rule of transfers.
    known = np.flatnonzero(table.in_range & table.is_compute & ~table.shares)
    misplaced = known[~np.isin(table.stage[known] * rows + table.device[known], homes)]
    for i in misplaced.tolist():
        stage = int(table.stage[i])
        where = " or ".join(map(str, placement.devices_of[stage]))
        found.append(
            _at(
                table,
                "placement",
                i,
                f"{table.text(i)} is on device {table.device[i]}, but stage {stage} is on device "
                f"{where}",
            )
        )
    known = np.flatnonzero(
        table.in_range & table.of_kinds(kinds_where(lambda spec: spec.reads)) & ~table.shares
    )
    forward = table.at[Kind.F, table.stage[known], table.microbatch[known]]
    parted = (forward >= 0) & (table.device[forward] != table.device[known])
    for i, f in zip(known[parted].tolist(), forward[parted].tolist(), strict=True):
        needs = f"{table.text(f)}, which it needs, ran on device {table.device[f]}"
        message = f"{table.text(i)} is on device {table.device[i]}, but {needs}"
        found.append(_at(table, "placement", i, message, (f,)))
    return found


def _order(table: Encoded) -> list[Violation]:
    """Per device: F before its R, B or I, R before B or I, I before W, stages in turn; E before F,
    L between F and B, G after B, H after L.

    What a device needs of others is the rule of deadlock.
    """
    found = []
    for value in KEPT:
        mine = np.flatnonzero(table.in_range & table.of_kinds(readers(value)))
        for maker in makers(value):
            found += _late(
                table, "order", mine, table.at[maker, table.stage[mine], table.microbatch[mine]]
            )
    mine = np.flatnonzero(table.is_compute & (table.producer >= 0))
    return found + _late(table, "order", mine, table.producer[mine]) + _late_shares(table)


def _late_shares(table: Encoded) -> list[Violation]:
    """A collective action comes after the action whose value it reads, and before the action that
    reads its value, in the rows of these actions.
    """
    found = []
    for number, collective in table.collectives.items():
        if collective.source >= 0 and table.device[collective.source] == table.device[number]:
            found += _late(table, "order", np.array([number]), np.array([collective.source]))
        if collective.user >= 0 and table.device[collective.user] == table.device[number]:
            found += _late(table, "order", np.array([collective.user]), np.array([number]))
    return found


def _late(table: Encoded, rule: str, mine: IntArray, needed: IntArray) -> list[Violation]:
    """Violations for actions whose need comes later in the same row."""
    late = (needed > mine) & (table.device[needed] == table.device[mine])
    return [
        _at(
            table,
            rule,
            i,
            f"{table.text(i)} comes before {table.text(j)}, which it needs, on device "
            f"{table.device[i]}; swap them",
            (j,),
        )
        for i, j in zip(mine[late].tolist(), needed[late].tolist(), strict=True)
    ]


def _slices(table: Encoded) -> list[Violation]:
    """On each stage, the forwards of a sequence run in the order of its slices, on one device
    (slice), and its backwards in reverse order (reverse).

    A forward needs the carry of the slice before it, and a backward the gradient that the slice
    after it leaves.
    """
    found: list[Violation] = []
    if table.slices == 1:
        return found
    later = np.flatnonzero(np.arange(table.num_microbatches) % table.slices)
    for rule, numbers, mine, needed in (
        ("slice", table.at[Kind.F], later, later - 1),
        ("reverse", table.backward_at, later - 1, later),
    ):
        action, need = numbers[:, mine].ravel(), numbers[:, needed].ravel()
        there = (action >= 0) & (need >= 0)
        action, need = action[there], need[there]
        found += _late(table, rule, action, need)
        parted = table.device[action] != table.device[need]
        for i, j in zip(action[parted].tolist(), need[parted].tolist(), strict=True):
            message = (
                f"{table.text(i)} is on device {table.device[i]}, but {table.text(j)}, a slice of "
                f"the same sequence, is on device {table.device[j]}; a stage keeps what passes "
                "between slices on one device"
            )
            found.append(_at(table, rule, i, message, (j,)))
    return found


def _overlap(table: Encoded) -> list[Violation]:
    """A pair overlaps an F with a B or I that is not of the same stage and microbatch (that one
    would need the F).
    """
    found = []
    forward, backward = table.of_kinds(FORWARD_HALVES), table.of_kinds(BACKWARD_HALVES)
    for i in table.pairs.tolist():
        pair = table.cell_text(i)
        if not forward[i] or not backward[i + 1]:
            found.append(
                _at(table, "overlap", i, f"{pair} must pair an F with a B or an I, in this order")
            )
        elif (
            table.stage[i] == table.stage[i + 1] and table.microbatch[i] == table.microbatch[i + 1]
        ):
            found.append(
                _at(
                    table,
                    "overlap",
                    i,
                    f"{pair} overlaps an F with its own backward, which needs it; pair it with "
                    "another",
                )
            )
    return found


def _transfers(table: Encoded) -> list[Violation]:
    """In a table with SEND and RECV: each value that crosses devices has a SEND after its producer
    and a RECV before its consumer.

    Stages on one device hand over without a transfer.
    """
    if not table.has_transfers:
        return []
    found: list[Violation] = []
    needed = np.zeros(table.num_actions, bool)
    for _, users, send, recv in MESSAGES:
        shift = KINDS[recv].came_from
        consumers = np.flatnonzero(table.crosses & table.of_kinds(users))
        stage, m = table.stage[consumers], table.microbatch[consumers]
        sends, recvs = table.at[send, stage + shift, m], table.at[recv, stage, m]
        found += _missing(table, consumers, sends, send, shift)
        found += _missing(table, consumers, recvs, recv, 0)
        producers = table.producer[consumers]
        found += _strayed(table, sends, producers, before=False)
        found += _strayed(table, recvs, consumers, before=True)
        needed[sends[sends >= 0]] = needed[recvs[recvs >= 0]] = True
    spare = ~needed & ~table.is_compute & table.in_range & _is_first(table)
    why = "no action on another device uses it; stages on one device hand over without a transfer"
    return found + [
        _at(table, "transfer", i, f"{table.text(i)} is not needed: {why}")
        for i in np.flatnonzero(spare).tolist()
    ]


def _is_first(table: Encoded) -> BoolArray:
    """Per action in range, whether it is the first of its duplicates."""
    first = np.zeros(table.num_actions, bool)
    known = np.flatnonzero(table.in_range)
    first[known] = table.at[table.kind[known], table.stage[known], table.microbatch[known]] == known
    return first


def _missing(
    table: Encoded, consumers: IntArray, transfers: IntArray, kind: Kind, shift: int
) -> list[Violation]:
    """Violations for consumers on another device than their producer whose SEND or RECV
    is missing.
    """
    found = []
    for i in consumers[transfers < 0].tolist():
        text = f"{table.stage[i] + shift}{kind.name}{table.microbatch[i]}"
        p = int(table.producer[i])
        where = (
            f"{table.text(p)} on device {table.device[p]} feeds {table.text(i)} on device "
            f"{table.device[i]}"
        )
        found.append(
            _at(
                table,
                "transfer",
                i,
                f"{text} is missing: {where}; jaxpipe.add_transfers adds transfers",
                (p,),
            )
        )
    return found


def _strayed(
    table: Encoded, transfers: IntArray, ends: IntArray, *, before: bool
) -> list[Violation]:
    """Violations for transfers that are on another device than the action they serve, or on the
    wrong side of it.
    """
    found = []
    there = transfers >= 0
    wrong_device = there & (table.device[transfers] != table.device[ends])
    wrong_side = there & ~wrong_device & ((transfers > ends) if before else (transfers < ends))
    for t, end in zip(transfers[wrong_device].tolist(), ends[wrong_device].tolist(), strict=True):
        message = (
            f"{table.text(t)} is on device {table.device[t]}, but it serves "
            f"{table.text(end)} on device {table.device[end]}"
        )
        found.append(_at(table, "transfer", t, message, (end,)))
    side = "after" if before else "before"
    for t, end in zip(transfers[wrong_side].tolist(), ends[wrong_side].tolist(), strict=True):
        found.append(
            _at(
                table,
                "transfer",
                t,
                f"{table.text(t)} comes {side} {table.text(end)} on device {table.device[t]}; "
                "swap them",
                (end,),
            )
        )
    return found


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
