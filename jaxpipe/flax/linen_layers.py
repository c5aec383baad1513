"""A model of linen modules laid out by letters: uneven numbers of blocks, and blocks of several kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from ..arrays import PyTree
from ..errors import PipelineError
from ..layouts.layout import Layout
from .common import End, key_of, letters_of, mesh_specs, wanted, with_keywords, without_names
from .linen_parts import Variables, apart, difference, drawing, end_function, given_keywords, kind_of, params_of, streams, unboxed_ends


@dataclass(frozen=True)
class LinenLayers:
    """A model of linen modules by letters; `Pipeline(**model.functions, schedule=..., mesh=...)`.

    `params` are canonical: those of stages are {letter: leaves [layers, ...] in model order}.
    """

    layers: dict[str, Callable[..., Any]]
    layout: Layout | str
    params: dict[str, PyTree]
    specs: dict[str, PyTree]  # what `nn.with_partitioning` said of parameters
    _letters: str

    @property
    def functions(self) -> dict[str, Any]:
        """What `Pipeline` is given."""
        found: dict[str, Any] = {"layers": self.layers, "layout": self.layout}
        return found | ({} if without_names(self.specs) else {"specs": self.specs})

    def to_linen(self, params: dict[str, PyTree]) -> list[Variables]:
        """Canonical parameters as each block's variables, in order; those of first, last and shared are their modules' already."""
        seen = dict.fromkeys(self._letters, 0)
        found: list[Variables] = []
        for letter in self._letters:
            found.append({"params": jax.tree.map(lambda leaf, i=seen[letter]: leaf[i], params["stages"][letter])})
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
) -> LinenLayers:
    """`from_linen` with `layout=`: the i-th block is the i-th letter of the layout that is neither E nor L."""
    letters = letters_of(layout)
    if len(letters) != len(boxed):
        raise PipelineError(f"the layout has {len(letters)} layers between E and L, but there are {len(boxed)} blocks")
    first, last, shared, specs = unboxed_ends(first, last, shared, rules)
    given = [nn.meta.unbox(dict(v)) for v in boxed]
    members = {letter: [i for i, own in enumerate(letters) if own == letter] for letter in sorted(set(letters))}
    for letter, blocks in members.items():
        kinds = [kind_of(modules[i], given[i]) for i in blocks]
        odd = next((kind for kind in kinds if kind != kinds[0]), None)
        if odd is not None:
            raise PipelineError(f"blocks of letter {letter!r} are unlike: {difference(kinds[0], odd)}; give them letters of their own")
    stateful = sorted({letter for letter, blocks in members.items() if jax.tree.leaves(apart(given[blocks[0]])[1])})
    if stateful:
        raise PipelineError(
            f"blocks of letters {stateful} have variables that are no parameters (batch_stats), which only even stages can keep: leave "
            "layout= out"
        )
    trees = {letter: [apart(given[i])[0] for i in blocks] for letter, blocks in members.items()}
    params: dict[str, PyTree] = {"stages": {key: jax.tree.map(lambda *leaves: jnp.stack(leaves), *own) for key, own in trees.items()}}
    layers = {letter: _layer(modules[blocks[0]], letter, call, shared, rngs) for letter, blocks in members.items()}
    for key, letter, end, takes in (("first", "E", first, ("microbatch",)), ("last", "L", last, ("x", "microbatch"))):
        if end is not None:
            params[key] = params_of(end.modules, end.variables)
            layers[letter] = end_function(end, key, shared, rngs, takes, len(letters) + (key == "last"))
    if shared is not None:
        params["shared"] = params_of(*shared)
    specs["stages"] = {key: mesh_specs(nn.get_partition_spec(apart(boxed[own[0]])[0]), rules) for key, own in members.items()}
    return LinenLayers(layers, layout, params, specs, letters)


def _layer(
    module: nn.Module, letter: str, call: Callable[..., Any] | None, shared: tuple[Any, Any] | None, rngs: Sequence[str]
) -> Callable[..., Any]:
    """The function of a layer."""
    wants = frozenset() if call is None else wanted(call)

    def layer(params: PyTree, x: PyTree, **given: Any) -> PyTree:
        ctx = given.get("ctx")
        key = key_of(ctx, ctx.layer) if rngs and ctx is not None else None
        keywords = given_keywords(shared, wants, given)
        run = partial(module.apply, {"params": params}, x, method=call, rngs=streams(rngs, key, 0), **keywords)
        return drawing("a block", run)

    return with_keywords(layer, ("params", "x"), wants | ({"ctx"} if rngs else set()), f"layer_{letter}")
