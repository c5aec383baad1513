"""What a layer costs: times and bytes of one microbatch, and what follows for the stages that are
made of layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from ..engine.costs import Costs
from ..errors import CostError, listed, quoted
from ..layouts.layout import Layout
from ..table.limits import MAX_COST, is_number
from ..table.typed import plain

# Letters that are no layers of stages but `first` and `last`: they run in the blocks of the first
# and the last stage.
FIRST, LAST = "E", "L"


class Remat(Enum):
    """What the backward of a stage computes again."""

    NONE = None
    FULL = "full"  # everything: a forward keeps its input alone
    STAGES = "stages"  # everything, on some devices alone: the table has an R for their stages


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """What one layer takes on one device: times of one microbatch in seconds, sizes in bytes.

    Args:
        forward: seconds of the forward, with what it keeps written to memory.
        input_grad: seconds of the gradient of its input.
        weight_grad: seconds of the gradient of its weights.
        backward: seconds of both in one piece; their sum where it is None.
        parameters: bytes of its parameters, as the device holds them.
        gradients: bytes of their accumulators; as the parameters where it is None.
        optimizer: bytes of the optimizer's state; twice the gradients, as of Adam, where it is
            None.
        residuals: bytes that its forward keeps for the backward of one microbatch, its input not
            counted.
        boundary: bytes of its output of one microbatch, which is sent if the next layer is on
            another device.
        stash: bytes that the gradient of the input leaves for that of the weights.
        workspace: bytes that it needs while it runs.
        hoisted: bytes that are computed from its parameters once a step and kept (casts).
        batch: bytes of one microbatch of the batch that it reads ("E", "L").

    Raises:
        CostError: a value is negative, infinite or no number.

    >>> LayerCost(forward=0.5, input_grad=0.5, weight_grad=0.25).backward_seconds
    0.75
    """

    forward: float
    input_grad: float
    weight_grad: float
    backward: float | None = None
    parameters: float = 0
    gradients: float | None = None
    optimizer: float | None = None
    residuals: float = 0
    boundary: float = 0
    stash: float = 0
    workspace: float = 0
    hoisted: float = 0
    batch: float = 0

    def __post_init__(self) -> None:
        faults = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if not (is_number(value) and 0 <= plain(value) <= MAX_COST):
                faults.append(
                    f"{field.name} is {quoted(value)}; it is a finite number >= 0, in seconds or "
                    "bytes"
                )
                continue
            object.__setattr__(self, field.name, plain(value))
        if faults:
            raise CostError(listed("this is not the cost of a layer", faults))

    @property
    def backward_seconds(self) -> float:
        """Seconds of the whole backward."""
        return self.input_grad + self.weight_grad if self.backward is None else self.backward

    @property
    def gradient_bytes(self) -> float:
        """Bytes of the gradients' accumulators."""
        return self.parameters if self.gradients is None else self.gradients

    @property
    def held_bytes(self) -> float:
        """Bytes of parameters, gradients and optimizer state."""
        return self.parameters + self.gradient_bytes + self.optimizer_bytes

    @property
    def optimizer_bytes(self) -> float:
        """Bytes of the optimizer's state."""
        return 2 * self.gradient_bytes if self.optimizer is None else self.optimizer


def stage_costs(
    layout: Layout, costs: Mapping[str, LayerCost], *, remat: Remat, transfer: float
) -> Costs:
    """The times of a layout's stages as the lowered program spends them.

    The backward of `last` runs in the forward of the last stage.  The backward of `first` runs in
    the input gradient of the first stage.  Under full remat the backward, or its half I, begins
    with the stage's forward.
    """
    last, again = layout.num_stages - 1, remat is Remat.FULL
    times: dict[str, Any] = {}
    for s, letters in enumerate(layout.stages):
        lead = [costs[letter] for letter in letters if is_first(s, letter)]
        loss = [costs[letter] for letter in letters if is_last(s, last, letter)]
        inner = [
            costs[letter]
            for letter in letters
            if not (is_first(s, letter) or is_last(s, last, letter))
        ]
        run, gradient = total(inner, "forward"), total(lead, "backward_seconds")
        found = {"recompute": run} if remat is Remat.STAGES else {}
        found |= {
            "forward": run + total([*lead, *loss], "forward") + total(loss, "backward_seconds"),
            "input_grad": total(inner, "input_grad") + gradient + again * run,
            "weight_grad": total(inner, "weight_grad"),
            "backward": total(inner, "backward_seconds") + gradient + again * run,
        }
        for name, seconds in found.items():
            times[name] = (*times.get(name, ()), seconds)
    return Costs(**times, transfer=transfer, unit="seconds")


def is_first(stage: int, letter: str) -> bool:
    """Whether a layer is the model's `first`."""
    return stage == 0 and letter == FIRST


def is_last(stage: int, last: int, letter: str) -> bool:
    """Whether a layer is the model's `last`."""
    return stage == last and letter == LAST


def total(layers: Sequence[LayerCost], name: str) -> float:
    """The sum of one field, or property, over layers."""
    found: float = sum(getattr(layer, name) for layer in layers)
    return found


def read_layer_costs(given: Mapping[str, Any]) -> dict[str, LayerCost]:
    """Costs of letters as `json.load` gives them: {"t": {"forward": 0.01, ...}, ...}; CostError
    lists what is wrong.
    """
    known = [field.name for field in fields(LayerCost)]
    faults, found = [], {}
    for letter, values in given.items():
        if not isinstance(values, Mapping):
            faults.append(
                f"layer {quoted(letter)}: give its costs as an object, not {quoted(values)}"
            )
            continue
        unknown = [name for name in values if name not in known]
        missing = [name for name in ("forward", "input_grad", "weight_grad") if name not in values]
        faults += [
            f"layer {quoted(letter)}: there is no cost {quoted(name)}; they are {', '.join(known)}"
            for name in unknown
        ]
        faults += [f"layer {quoted(letter)}: {name} is missing" for name in missing]
        if not unknown and not missing:
            found[letter] = LayerCost(**values)
    if faults:
        raise CostError(listed("these are not costs of layers", faults))
    return found
