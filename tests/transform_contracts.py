"""The promise of every table transform: what it keeps and what it changes, checked from the two
tables alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from jaxpipe.table.kinds import (
    BESIDE,
    COLLECTIVES,
    COMPUTE,
    KINDS,
    RECOMPUTE,
    SHARES,
    TRANSFERS,
    Action,
    Kind,
    Pass,
    parts,
)
from jaxpipe.table.schedule import Schedule
from jaxpipe.transforms.add_gathers import add_gathers
from jaxpipe.transforms.add_transfers import add_recompute, add_transfers
from jaxpipe.transforms.rewrites import (
    forward_only,
    merge_backward,
    remove_gathers,
    remove_recompute,
    remove_spread,
    remove_transfers,
    split_backward,
)
from jaxpipe.transforms.spread import defer_last, spread_first, spread_last
from tests.contract import Contract

Faults = tuple[str, ...]


def keeps(
    kept: Collection[Kind], *, holds: Collection[Kind] = tuple(Kind), whole: bool = False
) -> Callable[[Schedule, Schedule], Faults]:
    """A promise: a valid table of the same stages, with the actions of `kept` in each row's order,
    and none but `holds`.

    With `whole`, what each stage and microbatch has done besides is the same too, a B counted as
    its I and its W.
    """

    def faults(before: Schedule, after: Schedule) -> Faults:
        found = [f"the table is not valid: {violation}" for violation in after.violations]
        if (before.num_stages, before.num_microbatches, before.placement) != (
            after.num_stages,
            after.num_microbatches,
            after.placement,
        ):
            found.append("stages, microbatches or placement changed")
        for device, (old, new) in enumerate(zip(_rows(before), _rows(after), strict=True)):
            if [a for a in old if a.kind in kept] != [a for a in new if a.kind in kept]:
                found.append(
                    f"device {device} does other actions of kinds {_names(kept)}, or in another "
                    "order"
                )
            if any(a.kind not in holds for a in new):
                found.append(f"device {device} holds other kinds than {_names(holds)}")
            if whole and _work(old) != _work(new):
                found.append(f"device {device} does other work")
        return tuple(found)

    return faults


def _spreads(
    keeps: Callable[[Schedule, Schedule], Faults], *kinds: Kind
) -> Callable[[Schedule, Schedule], Faults]:
    """A promise kept, and that every device has its share of every microbatch's `last`
    or `first`.
    """

    def faults(before: Schedule, after: Schedule) -> Faults:
        shares = [
            [(a.kind, a.microbatch) for a in row if a.kind in COLLECTIVES] for row in _rows(after)
        ]
        asked = [
            kind
            for kind in kinds
            if KINDS[kind].direction is Pass.FORWARD or not after.forward_only
        ]
        wanted = sorted((kind, m) for kind in asked for m in range(after.num_microbatches))
        whole = all(
            row == shares[0] and sorted(share for share in row if share[0] in kinds) == wanted
            for row in shares
        )
        return (
            *keeps(before, after),
            *(() if whole else ("a device lacks its share of a microbatch",)),
        )

    return faults


def _rows(schedule: Schedule) -> Iterator[list[Action]]:
    return ([action for cell in row for action in parts(cell)] for row in schedule.rows)


def _work(row: list[Action]) -> list[Action]:
    """What is computed, a B as its I and its W."""
    halves = [
        half
        for a in row
        for half in (
            [a._replace(kind=Kind.I), a._replace(kind=Kind.W)] if a.kind is Kind.B else [a]
        )
    ]
    return sorted(a for a in halves if a.kind in COMPUTE and a.kind not in SHARES)


def _names(kinds: Collection[Kind]) -> str:
    return ", ".join(kind.name for kind in kinds)


def _without(*kinds: Kind) -> tuple[Kind, ...]:
    return tuple(kind for kind in Kind if kind not in kinds)


_FORWARD = (Kind.F, Kind.L, Kind.E)
_BACKWARD = (Kind.B, Kind.I, Kind.W)
# The transforms that take a table alone, of compute actions.
CONTRACTS: tuple[Contract[Schedule, Schedule], ...] = (
    Contract("add_transfers", add_transfers, keeps(COMPUTE, whole=True)),
    Contract("remove_transfers", remove_transfers, keeps(COMPUTE, holds=COMPUTE, whole=True)),
    Contract("add_gathers", add_gathers, keeps(_without(*BESIDE), whole=True)),
    Contract("remove_gathers", remove_gathers, keeps(_without(*BESIDE), holds=_without(*BESIDE))),
    Contract("merge_backward", merge_backward, keeps(_without(*_BACKWARD), whole=True)),
    Contract(
        "merge_backward delayed",
        lambda schedule: merge_backward(schedule, delayed=True),
        keeps(_without(*_BACKWARD), holds=_without(Kind.I, Kind.W), whole=True),
    ),
    Contract(
        "split_backward",
        split_backward,
        keeps(_without(*_BACKWARD), holds=_without(Kind.B), whole=True),
    ),
    Contract("forward_only", forward_only, keeps(_FORWARD, holds=_FORWARD)),
    Contract("add_recompute", add_recompute, keeps(_without(*RECOMPUTE, *TRANSFERS))),
    Contract(
        "spread_last",
        spread_last,
        _spreads(keeps(_without(*_BACKWARD, Kind.L), whole=True), Kind.L),
    ),
    Contract(
        "spread_first",
        spread_first,
        _spreads(keeps(_without(*_BACKWARD, Kind.E, Kind.G), whole=True), Kind.E, Kind.G),
    ),
    Contract("remove_spread", remove_spread, keeps(_without(*SHARES), holds=_without(*SHARES))),
    Contract("defer_last", defer_last, keeps(_without(Kind.H), whole=True)),
    Contract(
        "remove_recompute",
        remove_recompute,
        keeps(_without(*RECOMPUTE), holds=_without(*RECOMPUTE)),
    ),
)
