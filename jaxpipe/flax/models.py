"""What models of nnx and of linen have in common: what `Pipeline` is given of them, and how blocks
come to letters and stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import PyTree
from ..errors import PipelineError
from ..layouts.layout import Layout
from ..model.model import Model
from .common import End, is_spec, letters_of, mesh_specs, without_names

_MOST_SHOWN = 4  # shapes in a message


@dataclass(frozen=True)
class FlaxModel:
    """A model of flax modules as a pipeline takes it.

    Attributes:
        model: its functions and their loss contract, for `Pipeline`.
        params: canonical parameters.
        state: the blocks' other variables (batch statistics), for `Pipeline.place_state`; {} where
            there are none.
        specs: sharding metadata of the variables, for `Sharding(specs=)`; None where no variable
            names an axis.
        layout: the layers of each stage, for `Pipeline(layout=)`; None with `num_stages=`.
    """

    model: Model
    params: dict[str, PyTree]
    state: PyTree
    specs: dict[str, PyTree] | None
    layout: Layout | str | None


def named_specs(specs: dict[str, PyTree]) -> dict[str, PyTree] | None:
    """The specs, or None where none of them names an axis."""
    return None if without_names(specs) else specs


def letters_with_ends(layout: Layout | str, layers: Mapping[str, Any]) -> str:
    """The letters of all layers in model order, as `Model` takes them."""
    ends = [letter if letter in layers else "" for letter in ("E", "L")]
    return ends[0] + letters_of(layout) + ends[1]


def check_cut(name: str, num_stages: int | None, layout: Layout | str | None) -> None:
    """PipelineError unless it is said in one way how blocks are cut into stages."""
    if (layout is None) == (num_stages is None):
        raise PipelineError(
            f"give {name} either num_stages=, for stages of equal size, or layout=, the letters "
            "of each stage"
        )


def by_letter(
    layout: Layout | str, kinds: Sequence[Any], difference: Callable[[int, int], str]
) -> dict[str, list[int]]:
    """The numbers of the blocks of each letter; PipelineError where there are more or fewer, or
    those of a letter are unlike.

    Args:
        layout: the i-th block is its i-th letter that is neither E nor L.
        kinds: of each block, what must be equal for two blocks to run the same code.
        difference: says what differs between two blocks, given their numbers.
    """
    letters = letters_of(layout)
    if len(letters) != len(kinds):
        raise PipelineError(
            f"the layout has {len(letters)} layers between E and L, but there are {len(kinds)} "
            "blocks"
        )
    found = {
        letter: [i for i, own in enumerate(letters) if own == letter]
        for letter in sorted(set(letters))
    }
    for letter, members in found.items():
        odd = next((i for i in members if kinds[i] != kinds[members[0]]), None)
        if odd is not None:
            raise PipelineError(
                f"blocks of letter {letter!r} are unlike: {difference(members[0], odd)}; give "
                "them letters of their own"
            )
    return found


def check_stateless(state: Mapping[str, PyTree], what: str, instead: str = "") -> None:
    """PipelineError for letters whose blocks have other variables than parameters, `what` for
    example.
    """
    letters = [letter for letter, tree in state.items() if jax.tree.leaves(tree)]
    if letters:
        raise PipelineError(
            f"blocks of letters {letters} have variables that are no parameters ({what}), which "
            "only even stages can keep: leave "
            f"layout= out{instead}"
        )


def each_end(
    first: End | None, last: End | None, blocks: int
) -> Iterator[tuple[str, str, End, tuple[str, ...], int]]:
    """Of `first` and `last`, where they are given: (name, letter, end, what the function takes,
    number for its keys).
    """
    if first is not None:
        yield "first", "E", first, ("microbatch",), blocks
    if last is not None:
        yield "last", "L", last, ("x", "microbatch"), blocks + 1


def layer_rows(trees: Sequence[PyTree]) -> PyTree:
    """The parameters of alike blocks, leaves [layers, ...]."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def stack_size(leaves: Mapping[str, Any], what: str, instead: str = "") -> int:
    """How many blocks stacked variables hold; PipelineError where they disagree."""
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    if len({shape[:1] for shape in shapes.values()}) != 1 or () in shapes.values():
        some = ", ".join(f"{name} {shape}" for name, shape in list(shapes.items())[:_MOST_SHOWN])
        more = f" and {len(shapes) - _MOST_SHOWN} more" if len(shapes) > _MOST_SHOWN else ""
        raise PipelineError(
            f"{what} must all have a leading axis of blocks, of one length; these have "
            f"{some}{more}{instead}"
        )
    return int(next(iter(shapes.values()))[0])


def stacked_specs(tree: PyTree, leaves: PyTree, rules: Mapping[str, Any] | None) -> PyTree:
    """The specs of stacked variables; metadata may name the axis of blocks, as `nnx.vmap` and
    `nn.scan` add it, or not.
    """
    whole = jax.tree.map(lambda spec, leaf: len(spec) == leaf.ndim, tree, leaves, is_leaf=is_spec)
    return jax.tree.map(
        lambda spec, w: mesh_specs(spec, rules, lead=1, drop=int(w)), tree, whole, is_leaf=is_spec
    )
