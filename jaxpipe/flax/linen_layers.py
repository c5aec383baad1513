"""A model of linen modules laid out by letters: uneven numbers of blocks, and blocks of several
kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn

from ..arrays import PyTree
from ..layouts.layout import Layout
from ..model.model import Model
from .common import End, key_of, letters_of, mesh_specs, wanted, with_keywords
from .linen_parts import (
    Variables,
    apart,
    applied,
    difference,
    end_function,
    given_keywords,
    kind_of,
    params_of,
    streams,
    unboxed_ends,
)
from .models import (
    FlaxModel,
    by_letter,
    check_stateless,
    each_end,
    layer_rows,
    letters_with_ends,
    named_specs,
)


@dataclass(frozen=True)
class LinenLayers(FlaxModel):
    """A model of linen modules by letters: parameters of stages are {letter: leaves [layers, ...]
    in model order}.
    """

    _letters: str

    def to_linen(self, params: dict[str, PyTree]) -> list[Variables]:
        """Canonical parameters as each block's variables, in order; those of first, last and shared
        are their modules' already.
        """
        seen = dict.fromkeys(self._letters, 0)
        found: list[Variables] = []
        for letter in self._letters:
            found.append(
                {
                    "params": jax.tree.map(
                        lambda leaf, i=seen[letter]: leaf[i], params["stages"][letter]
                    )
                }
            )
            seen[letter] += 1
        return found


def by_layout(
    modules: Sequence[nn.Module],
    boxed: Sequence[Variables],
    layout: Layout | str,
    *,
    first: End | None,
    last: End | None,
    shared: tuple[Any, Any] | None,
    call: Callable[..., Any] | None,
    rngs: Sequence[str],
    rules: Mapping[str, Any] | None,
    stage_loss: bool,
    contract: Mapping[str, Any],
) -> LinenLayers:
    """`from_linen` with `layout=`: the i-th block is the i-th letter of the layout that is neither
    E nor L.
    """
    first, last, shared, specs = unboxed_ends(first, last, shared, rules)
    given = [nn.meta.unbox(dict(v)) for v in boxed]
    kinds = [kind_of(module, variables) for module, variables in zip(modules, given, strict=True)]
    members = by_letter(layout, kinds, lambda i, j: difference(kinds[i], kinds[j]))
    check_stateless(
        {letter: apart(given[blocks[0]])[1] for letter, blocks in members.items()}, "batch_stats"
    )
    trees = {letter: [apart(given[i])[0] for i in blocks] for letter, blocks in members.items()}
    params: dict[str, PyTree] = {"stages": {key: layer_rows(own) for key, own in trees.items()}}
    layers = {
        letter: _layer(modules[blocks[0]], letter, call, shared, rngs, stage_loss=stage_loss)
        for letter, blocks in members.items()
    }
    for key, letter, end, takes, number in each_end(first, last, len(given)):
        params[key] = params_of(end.modules, end.variables)
        layers[letter] = end_function(end, key, shared, rngs, takes, number)
    if shared is not None:
        params["shared"] = params_of(*shared)
    specs["stages"] = {
        key: mesh_specs(nn.get_partition_spec(apart(boxed[own[0]])[0]), rules)
        for key, own in members.items()
    }
    model = Model(
        layers, layers=letters_with_ends(layout, layers), stage_loss=stage_loss, **contract
    )
    return LinenLayers(model, params, {}, named_specs(specs), layout, letters_of(layout))


def _layer(
    module: nn.Module,
    letter: str,
    call: Callable[..., Any] | None,
    shared: tuple[Any, Any] | None,
    rngs: Sequence[str],
    *,
    stage_loss: bool,
) -> Callable[..., Any]:
    """The function of a layer."""
    wants = frozenset() if call is None else wanted(call)

    def layer(params: PyTree, x: PyTree, **given: Any) -> PyTree:
        ctx = given.get("ctx")
        key = key_of(ctx, ctx.layer) if rngs and ctx is not None else None
        how: dict[str, Any] = {"call": call, "training": True, "stage_loss": stage_loss}
        keywords = given_keywords(shared, wants, given)
        x, loss, _ = applied(
            module, params, {}, x, rngs=streams(rngs, key, 0), keywords=keywords, **how
        )
        return (x, loss) if stage_loss else x

    return with_keywords(
        layer, ("params", "x"), wants | ({"ctx"} if rngs else set()), f"layer_{letter}"
    )
