"""A model of nnx modules laid out by letters: uneven numbers of blocks, and blocks of several kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..arrays import PyTree
from ..errors import PipelineError
from ..layouts.layout import Layout
from .common import End, key_of, letters_of, mesh_specs, wanted, with_keywords, without_names
from .nnx_parts import Part, calling, check_apart, difference, end_function, frozen_paths, given_keywords, kind_of, pure


@dataclass(frozen=True)
class NnxLayers:
    """A model of nnx modules by letters; `Pipeline(**model.functions, schedule=..., mesh=...)`.

    `params` are canonical: those of stages are {letter: leaves [layers, ...] in model order}.
    """

    layers: dict[str, Callable[..., Any]]
    layout: Layout | str
    params: dict[str, PyTree]
    specs: dict[str, PyTree]  # what `nnx.with_partitioning` said of parameters
    frozen: frozenset[str]  # paths of parameters that are not trained
    _parts: dict[str, Part]
    _blocks: dict[str, tuple[Any, ...]]

    @property
    def functions(self) -> dict[str, Any]:
        """What `Pipeline` is given."""
        found: dict[str, Any] = {"layers": self.layers, "layout": self.layout}
        found |= {} if without_names(self.specs) else {"specs": self.specs}
        return found | ({"frozen": lambda path, _leaf: path in self.frozen} if self.frozen else {})

    def to_nnx(self, params: dict[str, PyTree]) -> None:
        """Write canonical parameters into the variables of the modules that the model was made of."""
        for letter, blocks in self._blocks.items():
            for i, block in enumerate(blocks):
                self._parts[letter].write(block, jax.tree.map(lambda leaf, i=i: leaf[i], params["stages"][letter]), {})
        for key in ("first", "last", "shared"):
            if key in self._parts:
                self._parts[key].write(self._parts[key].modules, params[key], {})


def by_layout(
    blocks: Sequence[Any],
    layout: Layout | str,
    *,
    first: End | None,
    last: End | None,
    shared: Any,
    call: Callable[..., Any] | None,
    trainable: Any,
    frozen: Any,
    rules: Mapping[str, Any] | None,
) -> NnxLayers:
    """`from_nnx` with `layout=`: the i-th block is the i-th letter of the layout that is neither E nor L."""
    letters = letters_of(layout)
    if len(letters) != len(blocks):
        raise PipelineError(f"the layout has {len(letters)} layers between E and L, but there are {len(blocks)} blocks")
    own = {letter: tuple(b for b, given in zip(blocks, letters, strict=True) if given == letter) for letter in sorted(set(letters))}
    for letter, members in own.items():
        odd = next((m for m in members if kind_of(m) != kind_of(members[0])), None)
        if odd is not None:
            raise PipelineError(f"blocks of letter {letter!r} are unlike: {difference(members[0], odd)}; give them letters of their own")
    ends = {"first": None if first is None else first.modules, "last": None if last is None else last.modules, "shared": shared}
    held = {key: modules for key, modules in ends.items() if modules is not None}
    check_apart({**{f"block {i}": b for i, b in enumerate(blocks)}, **held})
    parts = {letter: Part.of(members[0], trainable) for letter, members in own.items()}
    parts |= {key: Part.of(modules, trainable) for key, modules in held.items()}
    stateful = [letter for letter in own if jax.tree.leaves(parts[letter].rest)]
    if stateful:
        raise PipelineError(
            f"blocks of letters {stateful} have variables that are no parameters (batch statistics), which only even stages can keep: "
            "leave layout= out, or make them parameters that are frozen"
        )
    params = {"stages": {letter: _stacked(members, trainable) for letter, members in own.items()}}
    params |= {key: pure(parts[key].params) for key in held}
    layers = {letter: _layer(parts, letter, call) for letter in own}
    for key, letter, end, takes in (("first", "E", first, ("microbatch",)), ("last", "L", last, ("x", "microbatch"))):
        if end is not None:
            params.setdefault(key, {})
            layers[letter] = end_function(end, key, parts, takes, len(blocks) + (key == "last"))
    of_letters = {letter: mesh_specs(pure(nnx.get_partition_spec(parts[letter].params)), rules) for letter in own}
    specs = {"stages": of_letters, **{key: mesh_specs(pure(nnx.get_partition_spec(parts[key].params)), rules) for key in held}}
    names = frozenset(f"stages/{path}" if path.split("/")[0] in own else path for path in frozen_paths(parts, frozen))
    return NnxLayers(layers, layout, params, specs, names, parts, own)


def _stacked(members: Sequence[Any], trainable: Any) -> PyTree:
    """The parameters of alike blocks, leaves [layers, ...]."""
    trees = [pure(nnx.split(block, trainable, ...)[1]) for block in members]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _layer(parts: dict[str, Part], letter: str, call: Callable[..., Any] | None) -> Callable[..., Any]:
    """The function of a layer."""
    part = parts[letter]
    wants = frozenset() if call is None else wanted(call)

    def layer(params: PyTree, x: PyTree, **given: Any) -> PyTree:
        ctx = given.get("ctx")
        key = key_of(ctx, ctx.layer) if part.random and ctx is not None else None
        block = part.build(params, pure(part.rest), key, training=given["training"])
        keywords = given_keywords(parts, wants, given)
        run = block if call is None else lambda x, **more: call(block, x, **more)
        return calling("a block", part, key, given["training"], run, (x,), keywords)

    return with_keywords(layer, ("params", "x"), wants | {"training"} | ({"ctx"} if part.random else set()), f"layer_{letter}")
