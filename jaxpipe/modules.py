"""Layers that are pytrees with functions and settings among their leaves (equinox's modules, and
dataclasses that are registered with JAX), and layers of which the lowest are frozen.

A pipeline takes trees of arrays.  `split` and `stack` take the arrays out of such a module, and
give the function that puts them back.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .arrays import Params, PyTree, by_path, stacked
from .errors import PipelineError
from .model.model import Model

Rebuild: TypeAlias = Callable[[PyTree], Any]


def split(module: object) -> tuple[PyTree, Rebuild]:
    """Cut a module into its arrays, and a function that makes the module of such arrays.

    Other leaves (functions, numbers, strings) are None in the tree of arrays, and part of the
    function.  The source of the idea is equinox's `partition` and `combine`.

    Args:
        module: a pytree.

    Returns:
        The arrays, a tree like the module; and (arrays) -> module.

    Example:
        >>> import jax.numpy as jnp
        >>> arrays, rebuild = split({"w": jnp.ones(3), "act": jnp.tanh, "scale": 2})
        >>> arrays["act"] is None, rebuild(arrays)["scale"]
        (True, 2)
    """
    rest = jax.tree.map(lambda leaf: None if _is_array(leaf) else leaf, module)

    def rebuild(arrays: PyTree) -> object:
        return jax.tree.map(
            lambda other, array: other if array is None else array,
            rest,
            arrays,
            is_leaf=lambda leaf: leaf is None,
        )

    return jax.tree.map(lambda leaf: leaf if _is_array(leaf) else None, module), rebuild


def stack(modules: Sequence[object]) -> tuple[PyTree, Rebuild]:
    """Stack modules that differ in their arrays alone: the layers of a model.

    Args:
        modules: at least one, of one structure, with arrays of the same shapes and dtypes, and
            equal other leaves.

    Returns:
        Arrays with leaves [layers, ...], as `Model` takes them; and (arrays of a layer) -> module.

    Raises:
        PipelineError: modules differ in more than their arrays; every difference is listed.

    Example:
        >>> import jax.numpy as jnp
        >>> arrays, rebuild = stack([{"w": jnp.ones(3), "act": jnp.tanh}] * 4)
        >>> arrays["w"].shape
        (4, 3)
    """
    if not modules:
        raise PipelineError("stack: give at least one module")
    faults = []
    for n, one in enumerate(modules):
        faults += [f"module {n} {fault}" for fault in _faults(modules[0], one)]
    PipelineError.refuse("stack: modules differ in more than their arrays", faults)
    every, rebuilds = zip(*map(split, modules), strict=True)
    return stacked(every), rebuilds[0]


def freeze_lowest(
    model: Model, params: Params, count: int
) -> tuple[Model, Params, Callable[[Params], Params]]:
    """Freeze the first `count` layers of a model that is given by letters.

    The frozen layers get letters that the model does not use, so layouts for the new model name
    these.  `first` is trained on: name "first/" in the model's own `frozen=` to freeze it too.

    Args:
        model: with `layers=`.
        params: canonical.
        count: at least 1, at most the number of layers.

    Returns:
        The model with the letters; its canonical parameters; and (such parameters) -> parameters
        of the model that was given.

    Raises:
        PipelineError: the model has no letters, or not so many layers.

    Example:
        >>> import jax.numpy as jnp, jaxpipe as jp
        >>> calls = {"t": lambda p, x: x * p, "L": lambda p, x, microbatch: x.sum()}
        >>> model = jp.Model(calls, layers="t*6L")
        >>> tuned, params, rejoin = freeze_lowest(model, {"stages": {"t": jnp.ones(6)}}, 2)
        >>> tuned.layers, params["stages"]["t"].shape, rejoin(params)["stages"]["t"].shape
        ('aattttL', (4,), (6,))
    """
    if model.layers is None:
        raise PipelineError("freeze_lowest: give the model by letters, with layers=")
    begin = model.layers[:1].count("E")
    own = model.layers[begin:].removesuffix("L")
    lowest, others = own[:count], own[count:]
    if not 1 <= count <= len(own):
        raise PipelineError(f"freeze_lowest: count={count}; the model has {len(own)} layers")
    counts = Counter(lowest)
    letters = {*model.layers, "E", "L"}
    unused = [letter for letter in string.ascii_letters if letter not in letters]
    # by the letter that the layers have now
    renamed = dict(zip(counts, unused, strict=False))
    new_letters = "".join(renamed[letter] for letter in lowest)
    layers = model.layers[:begin] + new_letters + model.layers[begin + count :]

    def is_frozen(path: str, leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
        own = path.split("/")[:2] in [["stages", new] for new in renamed.values()]
        own &= model.replaced.of(path) is None  # scales of FP8 follow what layers are given
        return own or (model.frozen is not None and model.frozen(path, leaf))

    tree = dict(params["stages"])
    for letter, new in renamed.items():
        cut, whole = counts[letter], tree.pop(letter)
        tree[new] = jax.tree.map(lambda leaf, cut=cut: leaf[:cut], whole)
        if letter in others:
            tree[letter] = jax.tree.map(lambda leaf, cut=cut: leaf[cut:], whole)

    def rejoin(params: Params) -> Params:
        found = dict(params["stages"])
        for letter, new in renamed.items():
            parts = [found.pop(new), *([found[letter]] if letter in found else [])]
            found[letter] = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
        return {**params, "stages": found}

    before = {new: letter for letter, new in renamed.items()}
    calls = {letter: model.stages[before.get(letter, letter)] for letter in layers}
    tuned = model.changed(layers=layers, stages=calls, frozen=is_frozen)
    return tuned, {**params, "stages": tree}, rejoin


def _is_array(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _faults(first: object, other: object) -> list[str]:
    """How a module differs from the first one."""
    wanted, found = (by_path(jax.tree.map(_form, module)) for module in (first, other))
    if wanted.keys() != found.keys():
        return [f"has the leaves {list(found)}, module 0 has {list(wanted)}"]
    if len({jax.tree.structure(first), jax.tree.structure(other)}) > 1:
        return ["has other static fields than module 0"]
    return [
        f"has {found[path]} at {path}, module 0 has {leaf}"
        for path, leaf in wanted.items()
        if leaf != found[path]
    ]


def _form(leaf: jax.Array | jax.ShapeDtypeStruct) -> object:
    """The dtype and the shape of an array as text; any other leaf."""
    return f"{leaf.dtype}{list(leaf.shape)}" if _is_array(leaf) else leaf
