"""Slow and plain second opinions on tables: what `check`, `simulate` and `add_transfers` are
compared with.

Everything here works on sets of actions and tries again until nothing moves; nothing is shared with
the package but its value types.
"""

from __future__ import annotations

from jaxpipe.table.encoded import Transfers
from jaxpipe.table.kinds import Action, Kind, Overlap, parts
from jaxpipe.table.schedule import Schedule

SENDS = {Kind.SEND_F, Kind.SEND_B}
RECVS = {Kind.RECV_F, Kind.RECV_B}
COLLECTIVE = {Kind.E, Kind.G, Kind.L, Kind.H}  # the number before them is their device's


def is_complete(s: Schedule) -> bool:
    """Every F once; every backward once, as B or as I and W (or none at all), with an R or without;
    nothing else; all in range.
    """
    actions = [a for row in s.rows for c in row for a in parts(c) if a.kind.is_compute]
    if len(set(actions)) != len(actions):
        return False
    pairs = {(stage, m) for stage in range(s.num_stages) for m in range(s.num_microbatches)}
    by_kind = {
        k: {(a.stage, a.microbatch) for a in actions if a.kind is k}
        for k in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)
    }
    full, dgrad, wgrad = by_kind[Kind.B], by_kind[Kind.I], by_kind[Kind.W]
    if (
        by_kind[Kind.F] != pairs
        or dgrad != wgrad
        or full & dgrad
        or not by_kind[Kind.R] <= full | dgrad
    ):
        return False
    return bool(pairs) and full | dgrad in (pairs, set())


def is_well_placed(s: Schedule) -> bool:
    """Every action on a device of its stage, and where its microbatch's forward is."""
    forward_on = {
        (a.stage, a.microbatch): d
        for d, row in enumerate(s.rows)
        for c in row
        for a in parts(c)
        if a.kind is Kind.F
    }
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
    return (
        own
        if stage == s.num_stages - 1
        else [*own, {Action(stage + 1, Kind.B, m), Action(stage + 1, Kind.I, m)}]
    )


def runs(s: Schedule) -> bool:
    """Whether a compute-only table runs to its end, each device in its order."""
    head = [0] * s.num_devices
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for d, row in enumerate(s.rows):
            while head[d] < len(row) and all(
                done & need for a in parts(row[head[d]]) for need in needs(s, a)
            ):
                done.update(parts(row[head[d]]))
                head[d] += 1
                moved = True
    return all(h == len(row) for h, row in zip(head, s.rows, strict=True))


def mate(action: Action) -> Action:
    """The other side of a SEND or RECV."""
    stage, kind, m = action
    other = {
        Kind.SEND_F: Kind.RECV_F,
        Kind.RECV_F: Kind.SEND_F,
        Kind.SEND_B: Kind.RECV_B,
        Kind.RECV_B: Kind.SEND_B,
    }[kind]
    return Action(stage + (1 if kind in (Kind.SEND_F, Kind.RECV_B) else -1), other, m)


def runs_with_transfers(s: Schedule, transfers: Transfers) -> bool:
    """Whether a table with transfers runs to its end, each device seeing only what it has made or
    received.
    """
    rendezvous = transfers is Transfers.RENDEZVOUS
    head = [0] * s.num_devices
    has: list[set[Action]] = [set() for _ in s.rows]
    sent: set[Action] = set()

    def here(d: int):
        return s.rows[d][head[d]] if head[d] < len(s.rows[d]) else None

    def fed(d: int, a: Action) -> bool:
        if a.kind in SENDS:
            made = {
                Action(a.stage, k, a.microbatch)
                for k in ([Kind.F] if a.kind is Kind.SEND_F else [Kind.B, Kind.I])
            }
            return bool(has[d] & made)
        received = Action(a.stage, Kind.RECV_F if a.kind is Kind.F else Kind.RECV_B, a.microbatch)
        arrived = received in has[d] and (
            transfers is not Transfers.ASYNC or mate(received) in sent
        )
        return all(
            has[d] & need or (index_of_neighbour(need, a) and arrived) for need in needs(s, a)
        )

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
                other = next(
                    (e for e in range(s.num_devices) if here(e) == mate(cell) and e != d), None
                )
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
    """(start, end) of every action of a compute-only table; `duration(cell)` and
    `latency(producer)` give the costs.
    """
    where = {a: d for d, row in enumerate(s.rows) for c in row for a in parts(c)}
    found: dict[Action, tuple[float, float]] = {}
    free, head = [0] * s.num_devices, [0] * s.num_devices
    while any(h < len(row) for h, row in zip(head, s.rows, strict=True)):
        for d, row in enumerate(s.rows):
            if head[d] == len(row):
                continue
            cell = row[head[d]]
            inputs = [
                next((n for n in need if n in found), None)
                for a in parts(cell)
                for need in needs(s, a)
            ]
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
    """The rows with each SEND right behind its producer and each RECV right before its consumer:
    short, but seldom safe.
    """
    where = {a: d for d, row in enumerate(s.rows) for c in row for a in parts(c)}

    def crosses(a: Action) -> bool:
        return any(
            n.stage != a.stage and n in where and where[n] != where[a]
            for need in needs(s, a)
            for n in need
        )

    def transfers(a: Action, *, before: bool) -> list[Action]:
        stage, kind, m = a
        if before:
            return (
                [Action(stage, Kind.RECV_F if kind is Kind.F else Kind.RECV_B, m)]
                if kind is not Kind.W and crosses(a)
                else []
            )
        if kind is Kind.F:
            takers = [Action(stage + 1, Kind.F, m)]
        else:
            takers = (
                [Action(stage - 1, k, m) for k in (Kind.B, Kind.I)]
                if kind in (Kind.B, Kind.I)
                else []
            )
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


def accepts(s: Schedule, transfers: Transfers = Transfers.RENDEZVOUS) -> bool:
    """Whether a table is valid: everything once, in its place, and all of it runs."""
    return (
        _is_whole(s)
        and _is_at_home(s)
        and _pairs_well(s)
        and _gathers_well(s)
        and _sends_what_crosses(s)
        and _comes_to_its_end(s, transfers)
    )


def _actions(s: Schedule, *kinds: Kind) -> list[Action]:
    """All actions of some kinds (of every kind where none is named), both halves of pairs."""
    return [a for row in s.rows for c in row for a in parts(c) if not kinds or a.kind in kinds]


def _is_whole(s: Schedule) -> bool:
    """Everything that belongs to each stage and microbatch, and to each device and microbatch,
    once, and nothing else.
    """
    actions = _actions(s)
    stages, devices, microbatches = (
        range(s.num_stages),
        range(s.num_devices),
        range(s.num_microbatches),
    )
    known = set(_actions(s, *COLLECTIVE))
    once = [a for a in actions if a.kind not in (Kind.U, Kind.D, Kind.X)]
    if len(set(once)) < len(once) or not actions:
        return False
    if not all(
        a.microbatch in microbatches and a.stage in (devices if a in known else stages)
        for a in actions
    ):
        return False
    has = {kind: {(a.stage, a.microbatch) for a in actions if a.kind is kind} for kind in Kind}
    every, shares = (
        {(s, m) for s in stages for m in microbatches},
        {(d, m) for d in devices for m in microbatches},
    )
    backwards = bool(_actions(s, Kind.B, Kind.I, Kind.W, Kind.R, Kind.G, Kind.H))
    if has[Kind.F] != every or has[Kind.I] != has[Kind.W] or has[Kind.B] & has[Kind.I]:
        return False
    if backwards and has[Kind.B] | has[Kind.I] != every:
        return False
    if any(has[kind] not in (set(), shares) for kind in (Kind.E, Kind.G, Kind.L)) or has[
        Kind.H
    ] not in (set(), has[Kind.L]):
        return False
    if any(has[kind] for kind in (Kind.E, Kind.G, Kind.L)) and len(stages) < len(devices):
        return False
    return bool(has[Kind.E]) == bool(has[Kind.G]) or not backwards


def _is_at_home(s: Schedule) -> bool:
    """Each share on its device, everything else on a device of its stage, and where its
    microbatch's F is.
    """
    home = {a: d for d, row in enumerate(s.rows) for c in row for a in parts(c)}
    if s.placement.num_devices != s.num_devices:
        return False
    for a, device in home.items():
        if a.kind in COLLECTIVE:
            if a.stage != device:
                return False
        elif a.kind.is_compute and (
            device not in s.placement.devices_of[a.stage] or home[a._replace(kind=Kind.F)] != device
        ):
            return False
    return True


def _pairs_well(s: Schedule) -> bool:
    """Each pair is of an F and a B or I, and not of the same stage and microbatch."""
    pairs = [cell for row in s.rows for cell in row if isinstance(cell, Overlap)]
    return all(
        f.kind is Kind.F
        and b.kind in (Kind.B, Kind.I)
        and (f.stage, f.microbatch) != (b.stage, b.microbatch)
        for f, b in pairs
    )


def _gathers_well(s: Schedule) -> bool:
    """In a table with U: what a stage does is between a U and a D of it; in one with X, or with U
    and a backward, an X comes after what adds to a gradient.  Each has its run's first microbatch.
    """
    kinds = {a.kind for a in _actions(s)}
    gathered = bool(kinds & {Kind.U, Kind.D})
    backward = kinds & {Kind.B, Kind.I, Kind.W, Kind.R, Kind.G, Kind.H}
    reduced = Kind.X in kinds or (Kind.U in kinds and bool(backward))
    for device, row in enumerate(s.rows):
        whole: dict[int, list[int]] = {}  # microbatches, the first that of the U
        made: dict[int, list[int]] = {}
        for stage, kind, m in (a for c in row for a in parts(c)):
            if kind in (Kind.U, Kind.D, Kind.X) and device not in s.placement.devices_of[stage]:
                return False
            if kind is Kind.U:
                if stage in whole:
                    return False
                whole[stage] = [m]
            elif kind is Kind.D:
                run = whole.pop(stage, [])
                if len(run) < 2 or not run[0] == run[1] == m:
                    return False
            elif kind is Kind.X:
                if made.pop(stage, [None])[0] != m:
                    return False
            elif gathered and kind in (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W):
                if stage not in whole:
                    return False
                whole[stage].append(m)
            if kind in (Kind.B, Kind.W):
                made.setdefault(stage, []).append(m)
        if whole or (reduced and made):
            return False
    return True


def _sends_what_crosses(s: Schedule) -> bool:
    """In a table with SEND and RECV: those that are needed, on the right devices, and no others."""
    home = {a: d for d, row in enumerate(s.rows) for c in row for a in parts(c)}
    there = {a: home[a] for a in home if a.kind in SENDS | RECVS}
    wanted: dict[Action, int] = {}
    for a in home:
        stage, kind, m = a
        fed = {
            Kind.F: (stage - 1, (Kind.F,)),
            Kind.B: (stage + 1, (Kind.B, Kind.I)),
            Kind.I: (stage + 1, (Kind.B, Kind.I)),
        }.get(kind)
        for feeder in () if fed is None else (Action(fed[0], k, m) for k in fed[1]):
            if feeder in home and home[feeder] != home[a]:
                receive = Action(stage, Kind.RECV_F if kind is Kind.F else Kind.RECV_B, m)
                wanted |= {receive: home[a], mate(receive): home[feeder]}
    return not there or there == wanted


def _comes_to_its_end(s: Schedule, transfers: Transfers) -> bool:
    """Whether the devices come to the ends of their rows, each at one cell at a time."""
    head = [0] * s.num_devices
    done: set[Action] = set()
    every = set(_actions(s))
    home = {a: d for d, row in enumerate(s.rows) for c in row for a in parts(c)}
    sends = bool(every & {a for a in every if a.kind in SENDS | RECVS})

    def at(d: int) -> tuple[Action, ...]:
        return parts(s.rows[d][head[d]]) if head[d] < len(s.rows[d]) else ()

    def made(stage: int, m: int, *kinds: Kind) -> bool:
        return any(Action(stage, kind, m) in done for kind in kinds)

    def arrived(a: Action, stage: int, receive: Kind, *kinds: Kind) -> bool:
        """Whether what another stage makes is on this action's device."""
        feeder = next(f for kind in kinds if (f := Action(stage, kind, a.microbatch)) in every)
        if not sends or home[feeder] == home[a]:
            return feeder in done
        message = Action(a.stage, receive, a.microbatch)
        return message in done and (transfers is not Transfers.ASYNC or mate(message) in done)

    def ready(a: Action) -> bool:
        stage, kind, m = a
        first, last = 0, s.num_stages - 1
        if kind in (Kind.SEND_F, Kind.R, Kind.B, Kind.I) and not made(stage, m, Kind.F):
            return False
        if kind is Kind.F:
            if stage > first:
                return arrived(a, stage - 1, Kind.RECV_F, Kind.F)
            return Action(0, Kind.E, m) not in every or made(0, m, Kind.E)
        if kind in (Kind.B, Kind.I):
            if a._replace(kind=Kind.R) in every and not made(stage, m, Kind.R):
                return False
            if stage < last:
                return arrived(a, stage + 1, Kind.RECV_B, Kind.B, Kind.I)
            return Action(0, Kind.L, m) not in every or made(0, m, Kind.L)
        if kind is Kind.W:
            return made(stage, m, Kind.I)
        if kind is Kind.SEND_B:
            return made(stage, m, Kind.B, Kind.I)
        if kind is Kind.H:
            return made(stage, m, Kind.L)
        if kind is Kind.L:
            return made(last, m, Kind.F)
        if kind is Kind.G:
            return made(first, m, Kind.B, Kind.I)
        return True

    def group(d: int) -> tuple[int, ...]:
        """The devices that go on together with this one; none where it must wait."""
        cell = at(d)
        if not all(ready(a) for a in cell):
            return ()
        if len(cell) == 1 and cell[0].kind in (Kind.E, Kind.L, Kind.G):
            _, kind, m = cell[0]
            return (
                tuple(range(s.num_devices))
                if all(at(e) == (Action(e, kind, m),) for e in range(s.num_devices))
                else ()
            )
        if len(cell) == 1 and cell[0].kind in SENDS | RECVS and transfers is not Transfers.ASYNC:
            other = mate(cell[0])
            if transfers is Transfers.BUFFERED:
                return (d,) if cell[0].kind in SENDS or other in done else ()
            e = home[other]
            return (d, e) if at(e) == (other,) and ready(other) else ()
        return (d,)

    while any(h < len(row) for h, row in zip(head, s.rows, strict=True)):
        moving = next(
            (found for d, row in enumerate(s.rows) if head[d] < len(row) and (found := group(d))),
            (),
        )
        if not moving:
            return False
        for d in moving:
            done.update(at(d))
            head[d] += 1
    return True
