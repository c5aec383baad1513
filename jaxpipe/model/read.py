"""A model cut into the stages of a schedule's placement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import PipelineError
from ..layouts.balance import split_layers
from ..layouts.layout import LETTERS, Layout, LayoutError, parse_layout
from ..table.placement import Placement
from .functions import Function
from .layers import EMBEDDING, LOSS, LayerMap
from .model import Model
from .param_layout import ParamLayout


class StagedModel(NamedTuple):
    """The function of each stage, and how parameters of stages are laid out."""

    stages: tuple[Function, ...]
    layout: ParamLayout
    # of the parameters of functions that are spread: the dims along which they are cut
    cuts: Mapping[str, Any]


def staged(model: Model, placement: Placement, layout: str | Layout | None) -> StagedModel:
    """Cut a model into the stages of a placement; PipelineError where they do not fit."""
    if model.is_layered:
        layers = LayerMap.of(
            _layout(model, placement, layout), placement, ParamLayout(placement).owned
        )
        stages = layers.functions(model.stages, has_loss=model.stage_loss)
        params = ParamLayout(placement, unlike=True, layers=layers)
    elif layout is not None:
        raise PipelineError(
            "layout= says which layers each stage has, but the model is not given by letters; "
            'write jaxpipe.Model({"t": layer, ...}, layers="..."), or leave layout= out'
        )
    else:
        stages = tuple(model.stage_functions(placement.num_stages))
        unlike = not callable(model.stages)
        stacks = getattr(model.stages, "stacks_layers", False)
        params = ParamLayout(placement, unlike=unlike, stacks=stacks)
    _check_copies(stages, params)
    return StagedModel(stages, params, model.cuts(stages))


def _layout(model: Model, placement: Placement, layout: str | Layout | None) -> Layout:
    """The layers of each stage: as given, or as many on each stage where they divide."""
    assert model.layers is not None
    # Each stage is where the table says: some devices of a user's own table have more than others.
    even = placement.num_stages % placement.num_devices == 0
    devices = placement.num_devices if even else 1
    if layout is None:
        outer = (EMBEDDING, LOSS)
        costs = [0.0 if letter in outer else 1.0 for letter in model.layers]
        try:
            pieces = split_layers(costs, stages=placement.num_stages)
        except LayoutError as error:
            raise PipelineError(
                f"the layers {model.layers!r} cannot be split evenly: {error}; give layout=, the "
                "layers of each stage"
            ) from error
        layout = Layout(tuple(model.layers[r.start : r.stop] for r in pieces), devices)
    elif isinstance(layout, str):
        letters = "".join(sorted({*LETTERS, *model.stages}))
        layout = parse_layout(layout, devices=devices, letters=letters)
    if layout.layers != model.layers:
        raise PipelineError(
            f"the layout {str(layout)!r} has other layers than the model, whose layers are "
            f"{model.layers!r}; give each layer of the model to one stage, in model order"
        )
    return layout


def _check_copies(stages: tuple[Function, ...], layout: ParamLayout) -> None:
    """Refuse what a stage that is on two devices cannot have."""
    if not layout.replicas():
        return
    if layout.unlike and layout.num_owned > 1:
        raise PipelineError(
            "unlike stages that are on two devices need a device to own one stage each, as in "
            "dualpipe"
        )
    if any("state" in function.wants for function in stages):
        raise PipelineError(
            "a stage with `state` cannot be on two devices, which would each change it; use a "
            "schedule that is not bidirectional (dualpipev instead of dualpipe)"
        )
