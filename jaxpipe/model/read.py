"""The model as a user gives it: one stage function, one for each stage, or one for each letter of a
layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from ..errors import PipelineError
from ..layouts.layout import LETTERS, Layout, parse_layout
from ..table.placement import Placement
from .functions import OUTER_KEYWORDS, Function
from .layers import EMBEDDING, LOSS, LayerMap
from .param_layout import ParamLayout
from .spread import Spread
from .vocabulary import VocabEmbedding, VocabHead

Call: TypeAlias = Callable[..., Any]


class Model(NamedTuple):
    """The functions of a pipeline and how parameters of its stages are laid out."""

    stages: tuple[Function, ...]
    first: Function | None
    last: Function | None
    layout: ParamLayout
    # of the parameters of functions that are spread: the dims along which they are cut
    cuts: Mapping[str, Any]


def read_model(
    placement: Placement,
    stage: Call | Sequence[Call] | None,
    *,
    first: Call | None,
    last: Call | None,
    layers: Mapping[str, Call] | None,
    layout: str | Layout | None,
    stage_loss: bool,
) -> Model:
    """Bring the three forms to one; PipelineError where they are mixed or do not fit
    the schedule.
    """
    if layers is not None or layout is not None:
        found = _by_layers(
            placement,
            stage,
            first=first,
            last=last,
            layers=layers,
            layout=layout,
            stage_loss=stage_loss,
        )
    else:
        found = _by_stages(placement, stage, first=first, last=last)
    _check_copies(found)
    ends = (first, last) if layers is None else (layers.get(EMBEDDING), layers.get(LOSS))
    return found._replace(cuts=_cuts(found, *map(_spread, ends)))


def _by_stages(placement: Placement, stage: Any, *, first: Call | None, last: Call | None) -> Model:
    count = placement.num_stages
    ends = _outer(first, "first"), _outer(last, "last")
    if stage is None:
        raise PipelineError(
            "give Pipeline a stage function, a list of them, or layers= and layout="
        )
    if callable(stage) or not isinstance(stage, Sequence) or isinstance(stage, str):
        layout = ParamLayout(placement, stacks=getattr(stage, "stacks_layers", False))
        return Model((Function.of(stage, "stage"),) * count, *ends, layout, {})
    if len(stage) != count:
        raise PipelineError(
            f"stage is a list of {len(stage)} functions, but the schedule has {count} stages; "
            "give one for each"
        )
    # A function that several stages have is one kind of stage where their parameters have one form
    # too.
    made = {
        id(call): Function.of(call, f"stage[{s}]") for s, call in reversed(list(enumerate(stage)))
    }
    return Model(
        tuple(made[id(call)] for call in stage), *ends, ParamLayout(placement, unlike=True), {}
    )


def _by_layers(
    placement: Placement,
    stage: Any,
    *,
    first: Call | None,
    last: Call | None,
    layers: Mapping[str, Call] | None,
    layout: str | Layout | None,
    stage_loss: bool,
) -> Model:
    if layers is None or layout is None:
        raise PipelineError(
            "layers= and layout= belong together: a function for each letter, and the letters of "
            "each stage"
        )
    both = [
        name
        for name, given in (("stage", stage), ("first", first), ("last", last))
        if given is not None
    ]
    if both:
        raise PipelineError(
            f"the model is given by layers, so leave {', '.join(both)} out; layers {EMBEDDING} "
            f"and {LOSS} are first and last"
        )
    if isinstance(layout, str):
        # Where each stage stands is the table's to say: on some device fewer than on another, in a
        # table of one's own.
        even = placement.num_stages % placement.num_devices == 0
        devices = placement.num_devices if even else 1
        layout = parse_layout(layout, devices=devices, letters="".join(sorted({*LETTERS, *layers})))
    used = set(layout.layers)
    faults = [
        f"the layout {str(layout)!r} has layers {letter!r}, but layers= has no function for it"
        for letter in sorted(used - set(layers))
    ]
    faults += [
        f"layers= has a function for {letter!r}, which the layout {str(layout)!r} does not have"
        for letter in sorted(set(layers) - used)
    ]
    if faults:
        raise PipelineError.listing("layers and layout do not fit", faults)
    bare = ParamLayout(placement)
    by_letter = LayerMap.of(layout, placement, bare.owned)
    return Model(
        by_letter.functions(layers, has_loss=stage_loss),
        _outer(layers.get(EMBEDDING), f"layers[{EMBEDDING!r}]"),
        _outer(layers.get(LOSS), f"layers[{LOSS!r}]"),
        ParamLayout(placement, unlike=True, layers=by_letter),
        {},
    )


def _outer(call: Call | None, name: str) -> Function | None:
    if call is None:
        return None
    is_first = "first" in name or EMBEDDING in name
    takes = ("params", "microbatch") if is_first else ("params", "x", "microbatch")
    spread = _spread(call)
    if spread is None:
        return Function.of(call, name, OUTER_KEYWORDS, takes=takes)
    return replace(Function.of(spread.call, name, OUTER_KEYWORDS, takes=takes), spread=True)


def _spread(call: Any) -> Spread | None:
    """What is given to run on all devices at once; None for any other function."""
    if isinstance(call, (VocabHead, VocabEmbedding)):
        return Spread(call)
    return call if isinstance(call, Spread) else None


def _cuts(model: Model, first: Spread | None, last: Spread | None) -> dict[str, Any]:
    """The dims along which parameters are cut: those under "shared" only where every function that
    takes them is spread.
    """
    ends = {key: spread for key, spread in (("first", first), ("last", last)) if spread is not None}
    if not ends:
        return {}
    functions = [f for f in (*model.stages, model.first, model.last) if f is not None]
    takers = [function for function in functions if "shared" in function.wants]
    cut = bool(takers) and all(function.spread for function in takers)
    dims = {key: spread.dims for key, spread in ends.items()}
    if not cut:
        return dims
    given = [
        ends[key].shared
        for key, function in (("first", model.first), ("last", model.last))
        if function in takers and key in ends
    ]
    if any(one != given[0] for one in given):
        raise PipelineError(
            f"`first` is given jaxpipe.spread(..., shared={given[0]!r}) and `last` "
            f"shared={given[-1]!r}; what they share lies in one way: "
            "give both the same"
        )
    return {**dims, "shared": given[0]}


def _check_copies(model: Model) -> None:
    """What a stage that is on two devices cannot have."""
    if not model.layout.replicas():
        return
    if model.layout.unlike and model.layout.num_owned > 1:
        raise PipelineError(
            "unlike stages that stand on two devices need a device to own one stage each, as in "
            "dualpipe"
        )
    if any("state" in function.wants for function in model.stages):
        raise PipelineError(
            "a stage with `state` cannot stand on two devices, which would each change it; use a "
            "schedule that is not bidirectional "
            "(dualpipev instead of dualpipe)"
        )
