"""The cost of a layer (times and bytes of one microbatch), and the times of stages of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Annotated, Any, NamedTuple, TypeAlias

from ..engine.costs import Costs
from ..errors import CostError, Fits, is_cost, quoted, set_typed
from ..layouts.layout import Layout, split_layers
from .replicas import Replicas

# The letters of `first` and `last`, which run in the blocks of the first and the last stage.
FIRST, LAST = "E", "L"


class Remat(Enum):
    """The recomputation in a stage's backward."""

    NONE = None
    FULL = "full"  # everything: a forward keeps only its input
    STAGES = "stages"  # everything, on some devices: the table has an R for their stages


class Ends(Enum):
    """The devices of an end of the model: one, or all of them (`jaxpipe.spread`)."""

    ONE = "one"
    EITHER = "either"  # a plan chooses; costs are of the whole
    ALL = "all"  # costs are of the whole
    WITH_LAST = "with last"  # as many as do `last`, whose table it uses
    SHARE = "share"  # all; costs are of one device's share


class Kept(NamedTuple):
    """The kept bytes and the recomputation of a layer under a `jax.checkpoint` policy."""

    residuals: float  # bytes of one microbatch, the input not counted
    again: float  # seconds that its backward takes longer
    stash: float = 0.0  # bytes that the gradient of the input leaves for that of the weights


Amount: TypeAlias = Annotated[float, Fits("a finite number >= 0, in seconds or bytes", is_cost)]


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """The cost of one layer on one device: times of one microbatch in seconds, sizes in bytes.

    Args:
        forward: seconds of the forward, with what it keeps written to memory.
        input_grad: seconds of the gradient of its input.
        weight_grad: seconds of the gradient of its weights.
        backward: seconds of both in one piece; their sum where it is None.
        parameters: bytes of its parameters, as the device holds them.
        local: bytes of those of them that no other replica has (experts).
        gradients: bytes of their accumulators; as the parameters where it is None.
        optimizer: bytes of the optimizer's state; twice the gradients, as of Adam, where it is
            None.
        residuals: bytes that its forward keeps for the backward of one microbatch, its input not
            counted.
        boundary: bytes of its output of one microbatch, which is sent if the next layer is on
            another device.
        stash: bytes that the gradient of the input leaves for that of the weights.
        workspace: bytes that it needs while it runs.
        hoisted: bytes that are computed from its parameters once a step and kept (casts); of "L"
            those of the batch's leaves without rows too.
        batch: bytes of one microbatch of the batch that it reads ("E", "L").
        attention: seconds of the forward in which positions attend to earlier ones: where sequences
            are cut into slices, a later slice takes longer.
        rows: bytes that it appends for one microbatch where sequences are cut into slices (keys and
            values); their gradients take as much.
        ends: of "E" and "L", who does it.
        policies: what it keeps under each policy that a plan may choose, by the policy's name.

    Raises:
        CostError: a value is negative, infinite or no number.

    >>> LayerCost(forward=0.5, input_grad=0.5, weight_grad=0.25).backward_seconds
    0.75
    """

    forward: Amount
    input_grad: Amount
    weight_grad: Amount
    backward: Amount | None = None
    parameters: Amount = 0
    local: Amount = 0
    gradients: Amount | None = None
    optimizer: Amount | None = None
    residuals: Amount = 0
    boundary: Amount = 0
    stash: Amount = 0
    workspace: Amount = 0
    hoisted: Amount = 0
    batch: Amount = 0
    attention: Amount = 0
    rows: Amount = 0
    ends: Ends = Ends.ONE
    policies: Mapping[str, Kept] = field(default_factory=dict)

    def __post_init__(self) -> None:
        set_typed(self, CostError)

    @property
    def backward_seconds(self) -> float:
        """Seconds of the whole backward."""
        return self.input_grad + self.weight_grad if self.backward is None else self.backward

    @property
    def gradient_bytes(self) -> float:
        """Bytes of the gradients' accumulators."""
        return self.parameters if self.gradients is None else self.gradients

    @property
    def common(self) -> float:
        """The share of its parameters that all replicas have."""
        return 1 - self.local / self.parameters if self.parameters else 1.0

    @property
    def common_bytes(self) -> float:
        """Bytes of those, and of the accumulators of their gradients."""
        return self.common * (self.parameters + self.gradient_bytes)

    @property
    def local_bytes(self) -> float:
        """The same of those that no other replica has."""
        return (1 - self.common) * (self.parameters + self.gradient_bytes)

    @property
    def held_bytes(self) -> float:
        """Bytes of parameters, gradients and optimizer state."""
        return self.parameters + self.gradient_bytes + self.optimizer_bytes

    @property
    def optimizer_bytes(self) -> float:
        """Bytes of the optimizer's state."""
        return 2 * self.gradient_bytes if self.optimizer is None else self.optimizer

    def under(self, policy: str) -> LayerCost:
        """The costs under a policy; the same where the layer has no costs of it."""
        if policy not in self.policies:
            return self
        kept = self.policies[policy]
        return replace(
            self,
            residuals=kept.residuals,
            stash=kept.stash,
            input_grad=self.input_grad + kept.again,
            backward=self.backward_seconds + kept.again,
        )

    def sliced(self, slices: int) -> LayerCost:
        """The costs of an average slice of a sequence."""
        policies = {
            name: Kept(*(value / slices for value in each)) for name, each in self.policies.items()
        }
        names = _numbers("parameters", "local", "gradients", "optimizer", "hoisted", "rows")
        return replace(self.divided(slices, names), policies=policies)

    def share(self, devices: int) -> LayerCost:
        """The costs of one device's share of a spread end."""
        return replace(self.divided(devices, _numbers("boundary", "batch")), ends=Ends.SHARE)

    def split(self, replicas: int) -> LayerCost:
        """The costs of one of some replicas that split all that they have in common."""
        kept = 1 - self.common * (1 - 1 / replicas)
        return replace(
            self,
            parameters=kept * self.parameters,
            gradients=kept * self.gradient_bytes,
            optimizer=kept * self.optimizer_bytes,
        )

    def divided(self, parts: int, names: Sequence[str]) -> LayerCost:
        """The costs of one of some parts that share the named ones equally."""
        numbers = {name: getattr(self, name) for name in names}
        return replace(self, **{n: v / parts for n, v in numbers.items() if v is not None})


def _numbers(*but: str) -> list[str]:
    """The fields that are seconds or bytes, but some."""
    return [field.name for field in fields(LayerCost) if field.name not in (*_OTHERS, *but)]


_OTHERS = ("ends", "policies")


def stage_costs(
    layout: Layout,
    costs: Mapping[str, LayerCost],
    *,
    remat: Remat,
    transfer: float,
    slices: int = 1,
    replicas: Replicas = Replicas(),  # noqa: B008  it is frozen
) -> Costs:
    """The times of a layout's stages as the lowered program spends them.

    The backward of `last` runs in the forward of the last stage.  The backward of `first` runs in
    the input gradient of the first stage.  A spread `last` or `first` is in no stage: all devices
    do their shares of it.  With `slices`, later ones take longer by their attention, in the
    backward too.  Under full remat the backward, or its half I, begins with the stage's
    forward.  `first` and `last` are neither gathered nor reduced with a stage.
    """
    again = remat is Remat.FULL
    times: dict[str, Any] = {}
    spread = {c: costs[c] for c in spread_letters(layout.layers, costs)}
    if LAST in spread:
        times["last"] = spread[LAST].forward + spread[LAST].backward_seconds
    if FIRST in spread:
        times["first"] = spread[FIRST].forward
        times["first_grad"] = spread[FIRST].backward_seconds
    for letters in layout.stages:
        lead, loss = (
            [costs[c] for c in letters if c == end and c not in spread] for end in (FIRST, LAST)
        )
        inner = [costs[c] for c in letters if c not in (FIRST, LAST)]
        run, gradient = total(inner, "forward"), total(lead, "backward_seconds")
        found = {"recompute": run} if remat is Remat.STAGES else {}
        found |= {
            "forward": run + total([*lead, *loss], "forward") + total(loss, "backward_seconds"),
            "input_grad": total(inner, "input_grad") + gradient + again * run,
            "weight_grad": total(inner, "weight_grad"),
            "backward": total(inner, "backward_seconds") + gradient + again * run,
        }
        if replicas.count > 1:
            found["gather"], found["reduce"] = exchanges(inner, replicas)
        for name, seconds in found.items():
            times[name] = (*times.get(name, ()), seconds)
    if slices > 1:
        every = [costs[c] for c in layout.layers if c not in (FIRST, LAST)]
        share = total(every, "attention") / (total(every, "forward") or 1)
        place = [(2 * k + 1) / slices for k in range(slices)]
        times["slice_factors"] = tuple(1 - share + share * p for p in place)
        rows = [2 * total([costs[c] for c in letters], "rows") for letters in layout.stages]
        times["buffer"] = tuple(rows)
    return Costs(**times, transfer=transfer, unit="seconds")


def exchanges(layers: Sequence[LayerCost], replicas: Replicas) -> tuple[float, float]:
    """Seconds in which replicas gather the parameters of layers, and sum their gradients."""
    parameters, gradients = (
        sum(c.common * getattr(c, name) for c in layers)
        for name in ("parameters", "gradient_bytes")
    )
    return replicas.gather(parameters), replicas.reduce(gradients)


def balanced(
    layers: str,
    costs: Mapping[str, LayerCost],
    *,
    devices: int,
    chunks: int,
    remat: Remat,
) -> Layout:
    """The layout whose slowest stage is as fast as possible, with embedding, head and loss counted;
    exact, by dynamic programming.
    """
    spread, again = spread_letters(layers, costs), remat is Remat.FULL
    seconds = [0.0 if c in spread else _seconds(c, costs[c], again=again) for c in layers]
    pieces = split_layers(seconds, stages=devices * chunks)
    return Layout(tuple(layers[r.start : r.stop] for r in pieces), devices)


def spread_letters(layers: str, costs: Mapping[str, LayerCost]) -> str:
    """The collective ends of the model, among "E" and "L"."""
    return "".join(c for c in (FIRST, LAST) if c in layers and costs[c].ends is Ends.SHARE)


def total(layers: Sequence[LayerCost], name: str) -> float:
    """The sum of one field, or property, over layers."""
    found: float = sum(getattr(layer, name) for layer in layers)
    return found


def read_layer_costs(costs: Mapping[str, Any]) -> dict[str, LayerCost]:
    """Costs of letters as `json.load` gives them: {"t": {"forward": 0.01, ...}, ...}; CostError
    lists all faults.
    """
    known, faults = _numbers(), []
    for letter, values in costs.items():
        given = values if isinstance(values, Mapping) else {}
        wrong = [
            f"there is no cost {quoted(name)}; they are {', '.join(known)}"
            for name in given
            if name not in known
        ]
        needed = ("forward", "input_grad", "weight_grad")
        wrong += [f"{name} is missing" for name in needed if name not in given]
        faults += [f"layer {quoted(letter)}: {each}" for each in wrong]
    CostError.refuse("these are not costs of layers", faults)
    return {letter: LayerCost(**values) for letter, values in costs.items()}


def device_work(layers: str, costs: Mapping[str, LayerCost], devices: int, *, again: bool) -> float:
    """A lower bound over all splits: seconds that some device computes for each microbatch.
    Forwards count twice where they run `again`.
    """
    seconds = {c: _seconds(c, costs[c], again=again) for c in set(layers)}
    spread = spread_letters(layers, costs)
    own = [seconds[c] for c in layers if c not in spread]
    return max([sum(own) / devices, *own]) + sum(seconds[c] for c in spread)


def _seconds(letter: str, cost: LayerCost, *, again: bool) -> float:
    """The least seconds of a layer's forward and backward."""
    twice = again and letter not in (FIRST, LAST)
    both = cost.input_grad + cost.weight_grad
    return cost.forward * (1 + twice) + min(cost.backward_seconds, both)
