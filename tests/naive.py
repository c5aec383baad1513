"""Slow and plain second opinions on tables: what `check`, `simulate` and `add_transfers` are compared with.

Everything here works on sets of actions and tries again until nothing moves; nothing is shared with the package but its value types.
"""

from __future__ import annotations

from jaxpipe.table.action import Action, Kind, Overlap, parts
from jaxpipe.table.run_order import Transfers
from jaxpipe.table.schedule import Schedule

SENDS = {Kind.SEND_F, Kind.SEND_B}
RECVS = {Kind.RECV_F, Kind.RECV_B}


def is_complete(s: Schedule) -> bool:
    """Every F once; every backward once, as B or as I and W (or none at all), with an R or without; nothing else; all in range."""
    actions = [a for row in s.rows for c in row for a in parts(c) if a.kind.is_compute]
    if len(set(actions)) != len(actions):
        return False
    pairs = {(stage, m) for stage in range(s.num_stages) for m in range(s.num_microbatches)}
    by_kind = {k: {(a.stage, a.microbatch) for a in actions if a.kind is k} for k in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)}
    full, dgrad, wgrad = by_kind[Kind.B], by_kind[Kind.I], by_kind[Kind.W]
    if by_kind[Kind.F] != pairs or dgrad != wgrad or full & dgrad or not by_kind[Kind.R] <= full | dgrad:
        return False
    return bool(pairs) and full | dgrad in (pairs, set())


def is_well_placed(s: Schedule) -> bool:
    """Every action on a device of its stage, and where its microbatch's forward is."""
    forward_on = {(a.stage, a.microbatch): d for d, row in enumerate(s.rows) for c in row for a in parts(c) if a.kind is Kind.F}
    return all(
        d in s.placement.devices_of[a.stage] and forward_on.get((a.stage, a.microbatch)) == d
        for d, row in enumerate(s.rows)
        for c in row
        for a in parts(c)
        if a.kind.is_compute
    )


def needs(s: Schedule, action: Action) -> list[set[Action]]:
    """What a compute action needs: one of each set."""
    stage, kind, m = action
    if kind is Kind.F:
        return [{Action(stage - 1, Kind.F, m)}] if stage else []
    if kind is Kind.W:
        return [{Action(stage, Kind.I, m)}]
    own = [{Action(stage, Kind.F, m)}]
    if kind is Kind.R:
        return own
    if any(Action(stage, Kind.R, m) in row for row in s.rows):
        own.append({Action(stage, Kind.R, m)})
    return own if stage == s.num_stages - 1 else [*own, {Action(stage + 1, Kind.B, m), Action(stage + 1, Kind.I, m)}]


def runs(s: Schedule) -> bool:
    """Whether a compute-only table runs to its end, each device in its order."""
    head = [0] * s.num_devices
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for d, row in enumerate(s.rows):
            while head[d] < len(row) and all(done & need for a in parts(row[head[d]]) for need in needs(s, a)):
                done.update(parts(row[head[d]]))
                head[d] += 1
                moved = True
    return all(h == len(row) for h, row in zip(head, s.rows, strict=True))


def mate(action: Action) -> Action:
    """The other side of a SEND or RECV."""
    stage, kind, m = action
    other = {Kind.SEND_F: Kind.RECV_F, Kind.RECV_F: Kind.SEND_F, Kind.SEND_B: Kind.RECV_B, Kind.RECV_B: Kind.SEND_B}[kind]
    return Action(stage + (1 if kind in (Kind.SEND_F, Kind.RECV_B) else -1), other, m)


def runs_with_transfers(s: Schedule, transfers: Transfers) -> bool:
    """Whether a table with transfers runs to its end, each device seeing only what it has made or received."""
    rendezvous = transfers is Transfers.RENDEZVOUS
    head = [0] * s.num_devices
    has: list[set[Action]] = [set() for _ in s.rows]
    sent: set[Action] = set()

    def here(d: int):
        return s.rows[d][head[d]] if head[d] < len(s.rows[d]) else None

    def fed(d: int, a: Action) -> bool:
        if a.kind in SENDS:
            made = {Action(a.stage, k, a.microbatch) for k in ([Kind.F] if a.kind is Kind.SEND_F else [Kind.B, Kind.I])}
            return bool(has[d] & made)
        received = Action(a.stage, Kind.RECV_F if a.kind is Kind.F else Kind.RECV_B, a.microbatch)
        arrived = received in has[d] and (transfers is not Transfers.ASYNC or mate(received) in sent)
        return all(has[d] & need or (index_of_neighbour(need, a) and arrived) for need in needs(s, a))

    def index_of_neighbour(need: set[Action], a: Action) -> bool:
        return all(n.stage != a.stage for n in need)

    moved = True
    while moved:
        moved = False
        for d in range(s.num_devices):
            cell = here(d)
            if head[d] >= len(s.rows[d]):
                continue
            kinds = {a.kind for a in parts(cell)}
            if kinds & RECVS:
                other = next((e for e in range(s.num_devices) if here(e) == mate(cell) and e != d), None)
                if rendezvous and (other is None or not fed(other, here(other))):
                    continue
                if transfers is Transfers.BUFFERED and mate(cell) not in sent:
                    continue
                if rendezvous:
                    head[other] += 1
                has[d].add(cell)
            elif kinds & SENDS:
                if rendezvous or not fed(d, cell):
                    continue  # the RECV moves both
                sent.add(cell)
            elif not all(fed(d, a) for a in parts(cell)):
                continue
            else:
                has[d].update(parts(cell))
            head[d] += 1
            moved = True
    return all(h == len(row) for h, row in zip(head, s.rows, strict=True))


def times(s: Schedule, duration, latency) -> dict[Action, tuple[float, float]]:
    """(start, end) of every action of a compute-only table; `duration(cell)` and `latency(producer)` give the costs."""
    where = {a: d for d, row in enumerate(s.rows) for c in row for a in parts(c)}
    found: dict[Action, tuple[float, float]] = {}
    free, head = [0] * s.num_devices, [0] * s.num_devices
    while any(h < len(row) for h, row in zip(head, s.rows, strict=True)):
        for d, row in enumerate(s.rows):
            if head[d] == len(row):
                continue
            cell = row[head[d]]
            inputs = [next((n for n in need if n in found), None) for a in parts(cell) for need in needs(s, a)]
            if None in inputs:
                continue
            ready = [found[n][1] + (latency(n) if where[n] != d else 0) for n in inputs]
            start = max([free[d], *ready])
            if cell is not None:
                free[d] = start + duration(cell)
            found.update(dict.fromkeys(parts(cell), (start, free[d])))
            head[d] += 1
    return found


def deferred(s: Schedule) -> Schedule:
    """The rows with each SEND right behind its producer and each RECV right before its consumer: short, but seldom safe."""
    where = {a: d for d, row in enumerate(s.rows) for c in row for a in parts(c)}

    def crosses(a: Action) -> bool:
        return any(n.stage != a.stage and n in where and where[n] != where[a] for need in needs(s, a) for n in need)

    def transfers(a: Action, *, before: bool) -> list[Action]:
        stage, kind, m = a
        if before:
            return [Action(stage, Kind.RECV_F if kind is Kind.F else Kind.RECV_B, m)] if kind is not Kind.W and crosses(a) else []
        if kind is Kind.F:
            takers = [Action(stage + 1, Kind.F, m)]
        else:
            takers = [Action(stage - 1, k, m) for k in (Kind.B, Kind.I)] if kind in (Kind.B, Kind.I) else []
        send = Kind.SEND_F if kind is Kind.F else Kind.SEND_B
        return [Action(stage, send, m)] if any(t in where and crosses(t) for t in takers) else []

    rows = []
    for row in s.rows:
        cells: list = []
        for cell in row:
            if cell is None:
                continue
            halves = tuple(cell) if isinstance(cell, Overlap) else (cell,)
            cells += [t for a in halves for t in transfers(a, before=True)]
            cells.append(cell)
            cells += [t for a in halves for t in transfers(a, before=False)]
        rows.append(cells)
    return s.with_rows(rows)
