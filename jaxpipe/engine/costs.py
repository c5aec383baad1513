"""Costs of actions: one number for all stages, or one per stage."""

from __future__ import annotations

import json
from collections.abc import Sequence, Sized
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from ..errors import MAX_COST, MAX_STAGES, CostError, is_cost, quoted, set_typed, typed
from ..table.kinds import KINDS, Kind, Release

Cost: TypeAlias = float | Sequence[float]
_NO_COSTS = ("release", "unit")  # fields that are no times and no sizes
_NOTHING = ("buffer", "gather", "reduce", "parameters", "gradient")  # 0 where they are None
MAX_WHOLE = 2**40  # of a whole cost: a table's sum is a 64-bit integer


@dataclass(frozen=True)
class Costs:
    """Costs in any one unit of time (and of memory); each is a number, or a sequence with one entry
    per stage.

    Sharded numbers (up to 2**40) stay whole, so `makespan` of whole costs is an int.

    Args:
        forward: time of F.
        input_grad: time of I.
        weight_grad: time of W.
        transfer: time from the end of a producer until its result is on another device (latency of
            one hop); an entry of a sequence is for what that stage sends, forwards or backwards.
        backward: time of a full backward B; I + W where it is None.
        overlap: time of an overlapped pair; the sum of its halves where it is None.  An entry of a
            sequence is for pairs whose forward is of that stage.
        activation: memory that a stage's activations of one microbatch take.
        release: whether activations are freed at the end of W (the default) or of I, where the
            backward is split.
        recompute: time of R; that of `forward` where it is None.
        last: time of L, a device's share of a spread `last` for one microbatch (1 where it is
            None); entry d of a sequence is device d's.
        last_weight_grad: time of H, a third of `last` where it is None; in a table with H, L takes
            `last` less that.
        first: the same as `last` of E, of a spread `first`.
        first_grad: the same of G, of its gradient.
        checkpoint: memory of a stage's input of one microbatch, which is all that an F keeps where
            the table has an R for it.
        slice_factors: by slice of a sequence, what the time of its F, B, I, W and R is multiplied
            with: attention makes later slices longer.  All 1 where it is None.
        buffer: memory of the rows that a stage's slices append for one sequence, with their
            gradients, from its first forward to its last backward; 0 where it is None.
        gather: time of U, on the device's link along the fsdp axis, beside its other actions; 0
            where it is None.
        reduce: the same of X.
        parameters: memory of a stage's whole parameters, from its U to its D; 0 where it is None.
        gradient: the same of its whole gradient, from its first B or W to its X.
        unit: what times are in, as `measure` says it: "seconds, measured on ..." or "seconds,
            estimated ..."; empty where any unit will do.

    Raises:
        CostError: an entry is negative or not a finite number.  `simulate` raises it too, where a
            sequence has another length than the schedule has stages.

    >>> Costs(forward=[1, 2], transfer=0.5).forward
    (1, 2)
    """

    forward: Cost = 1
    input_grad: Cost = 1
    weight_grad: Cost = 1
    transfer: Cost = 0
    backward: Cost | None = None
    overlap: Cost | None = None
    activation: Cost = 1
    release: Release = Release.WEIGHT_GRAD
    recompute: Cost | None = None
    checkpoint: Cost = 0
    last: Cost | None = None
    first: Cost | None = None
    first_grad: Cost | None = None
    last_weight_grad: Cost | None = None
    slice_factors: Cost | None = None
    buffer: Cost | None = None
    gather: Cost | None = None
    reduce: Cost | None = None
    parameters: Cost | None = None
    gradient: Cost | None = None
    unit: str = ""

    def __post_init__(self) -> None:
        # Before they are read: a million entries take seconds.
        faults = [
            f"{name} has {len(value):,} entries; {MAX_STAGES:,} stages are the most"
            for name, value in vars(self).items()
            if isinstance(value, Sized) and not isinstance(value, str)
            if getattr(value, "ndim", 1) and len(value) > MAX_STAGES
        ]
        CostError.refuse("these are not costs", faults)
        set_typed(self, CostError)
        for name, value in vars(self).items():
            if name in _NO_COSTS or value is None:
                continue
            entries = value if isinstance(value, tuple) else (value,)
            must = f"a cost is a finite number >= 0, of {MAX_COST:g} at most"
            faults += [f"{name} holds {quoted(n)}; {must}" for n in entries if not is_cost(n)]
            # Sums of larger whole numbers could exceed 64 bits.
            read = tuple(float(n) if n > MAX_WHOLE else n for n in entries)
            object.__setattr__(self, name, read if isinstance(value, tuple) else read[0])
        CostError.refuse("these are not costs", faults)

    def to_json(self) -> str:
        """Write one JSON object; `from_json` reads it."""
        return json.dumps({**vars(self), "release": self.release.value})

    @classmethod
    def from_json(cls, text: str) -> Costs:
        """Read the text of `to_json`; CostError names the fault.

        >>> Costs.from_json(Costs(forward=[1, 2.5], unit="seconds").to_json()).forward
        (1, 2.5)
        """
        try:
            values = json.loads(text)
        except (TypeError, ValueError) as error:
            raise CostError(f"these are not costs as JSON: {error}") from error
        if not isinstance(values, dict):
            raise CostError(f"costs as JSON are one object, not {quoted(values)}")
        known = [field.name for field in fields(cls)]
        unknown = (f"there are no costs {quoted(name)}" for name in values if name not in known)
        CostError.refuse(f"costs are {', '.join(known)}", unknown)
        if "release" in values:
            named = [release for release in Release if release.value == values["release"]]
            values["release"] = named[0] if named else values["release"]
        return cls(**values)

    @typed(CostError)
    def for_stages(self, num_stages: int) -> StageCosts:
        """Every cost as a tuple with one entry per stage; CostError lists each sequence of another
        length.
        """
        if not 0 <= num_stages <= MAX_STAGES:
            raise CostError(f"num_stages must be 0 to {MAX_STAGES:,}, not {quoted(num_stages)}")
        every = {
            name: value if isinstance(value, tuple) else (value,) * num_stages
            for name, value in vars(self).items()
            if name not in (*_NO_COSTS, "slice_factors") and value is not None
        }
        wrong = [
            f"Costs.{name} has {len(value)} entries, but the schedule has {num_stages} stages; "
            "give one number, or one per stage"
            for name, value in every.items()
            if len(value) != num_stages
        ]
        CostError.refuse("", wrong)
        split = tuple(i + w for i, w in zip(every["input_grad"], every["weight_grad"], strict=True))
        ones = (1,) * num_stages
        last = every.get("last", ones)
        defaults = {
            "backward": split,
            "recompute": every["forward"],
            "last": last,
            "first": ones,
            "first_grad": ones,
            "last_weight_grad": tuple(time / 3 for time in last),
            **dict.fromkeys(_NOTHING, (0,) * num_stages),
        }
        factors: Any = self.slice_factors
        if not isinstance(factors, tuple):
            factors = () if factors is None else (factors,)
        return StageCosts(**defaults | every, slice_factors=factors)


@dataclass(frozen=True)
class StageCosts:
    """`Costs` with one entry per stage each; `overlap` is None where a pair costs the sum of its
    halves.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    backward: tuple[float, ...]
    transfer: tuple[float, ...]
    activation: tuple[float, ...]
    recompute: tuple[float, ...]
    checkpoint: tuple[float, ...]
    last: tuple[float, ...]
    first: tuple[float, ...]
    first_grad: tuple[float, ...]
    last_weight_grad: tuple[float, ...]
    buffer: tuple[float, ...]
    gather: tuple[float, ...]
    reduce: tuple[float, ...]
    parameters: tuple[float, ...]
    gradient: tuple[float, ...]
    slice_factors: tuple[float, ...] = ()
    overlap: tuple[float, ...] | None = None

    def factor_of(self, microbatches: int, slices: int) -> list[float]:
        """By microbatch, the factor of its slice; CostError for another number of slices."""
        factors = self.slice_factors or (1,)
        factors = factors * slices if len(factors) == 1 else factors
        if len(factors) != slices:
            raise CostError(
                f"Costs.slice_factors has {len(factors)} entries, but the schedule has {slices} "
                "slices a sequence; give one for each"
            )
        return [*factors] * (microbatches // slices)

    def of(self, kind: Kind) -> tuple[float, ...] | None:
        """The time of each stage's actions of a kind; None where these take none of their own."""
        name = KINDS[kind].cost
        return None if name is None else getattr(self, name)
