"""A model of nnx modules laid out by letters: uneven numbers of blocks, and blocks of several
kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from ..arrays import PyTree
from ..layouts.layout import Layout
from ..model.model import Model
from .common import End, key_of, mesh_specs, wanted, with_keywords, with_loss
from .models import (
    FlaxModel,
    by_letter,
    check_stateless,
    each_end,
    layer_rows,
    letters_with_ends,
    named_specs,
)
from .nnx_parts import (
    Part,
    calling,
    check_apart,
    difference,
    end_function,
    frozen_paths,
    given_keywords,
    is_in,
    kind_of,
    pure,
)


@dataclass(frozen=True)
class NnxLayers(FlaxModel):
    """A model of nnx modules by letters: parameters of stages are {letter: leaves [layers, ...] in
    model order}.
    """

    _parts: dict[str, Part]
    _blocks: dict[str, tuple[Any, ...]]

    def to_nnx(self, params: dict[str, PyTree]) -> None:
        """Write canonical parameters into the variables of the modules that the model was
        made of.
        """
        for letter, blocks in self._blocks.items():
            for i, block in enumerate(blocks):
                self._parts[letter].write(
                    block, jax.tree.map(lambda leaf, i=i: leaf[i], params["stages"][letter]), {}
                )
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
    stage_loss: bool,
    contract: Mapping[str, Any],
) -> NnxLayers:
    """`from_nnx` with `layout=`: the i-th block is the i-th letter of the layout that is neither E
    nor L.
    """
    numbers = by_letter(
        layout, [kind_of(block) for block in blocks], lambda i, j: difference(blocks[i], blocks[j])
    )
    own = {letter: tuple(blocks[i] for i in members) for letter, members in numbers.items()}
    ends = {
        "first": None if first is None else first.modules,
        "last": None if last is None else last.modules,
        "shared": shared,
    }
    held = {key: modules for key, modules in ends.items() if modules is not None}
    check_apart({**{f"block {i}": b for i, b in enumerate(blocks)}, **held})
    parts = {letter: Part.of(members[0], trainable) for letter, members in own.items()}
    parts |= {key: Part.of(modules, trainable) for key, modules in held.items()}
    check_stateless(
        {letter: parts[letter].rest for letter in own},
        "batch statistics",
        ", or make them parameters that are frozen",
    )
    trees = {
        letter: [pure(nnx.split(block, trainable, ...)[1]) for block in members]
        for letter, members in own.items()
    }
    params: dict[str, PyTree] = {
        "stages": {letter: layer_rows(members) for letter, members in trees.items()}
    }
    params |= {key: pure(parts[key].params) for key in held}
    layers = {letter: _layer(parts, letter, call, stage_loss=stage_loss) for letter in own}
    for key, letter, end, takes, number in each_end(first, last, len(blocks)):
        params.setdefault(key, {})
        layers[letter] = end_function(end, key, parts, takes, number)
    of_letters = {
        letter: mesh_specs(pure(nnx.get_partition_spec(parts[letter].params)), rules)
        for letter in own
    }
    specs = {
        "stages": of_letters,
        **{key: mesh_specs(pure(nnx.get_partition_spec(parts[key].params)), rules) for key in held},
    }
    names = frozenset(
        f"stages/{path}" if path.split("/")[0] in own else path
        for path in frozen_paths(parts, frozen)
    )
    model = Model(
        layers,
        layers=letters_with_ends(layout, layers),
        stage_loss=stage_loss,
        frozen=is_in(names),
        **contract,
    )
    return NnxLayers(model, params, {}, named_specs(specs), layout, parts, own)


def _layer(
    parts: dict[str, Part], letter: str, call: Callable[..., Any] | None, *, stage_loss: bool
) -> Callable[..., Any]:
    """The function of a layer."""
    part = parts[letter]
    wants = frozenset() if call is None else wanted(call)

    def layer(params: PyTree, x: PyTree, **given: Any) -> PyTree:
        ctx = given.get("ctx")
        key = key_of(ctx, ctx.layer) if part.random and ctx is not None else None
        block = part.build(params, pure(part.rest), key, training=given["training"])
        keywords = given_keywords(parts, wants, given)
        run = block if call is None else lambda x, **more: call(block, x, **more)
        out = calling("a block", part, key, given["training"], run, (x,), keywords)
        part.state_of(block, "a block")
        return with_loss("a block", out, stage_loss=True) if stage_loss else out

    return with_keywords(
        layer,
        ("params", "x"),
        wants | {"training"} | ({"ctx"} if part.random else set()),
        f"layer_{letter}",
    )
