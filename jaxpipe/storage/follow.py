"""Trees like the placed parameters, as moments and averages: which parameter each leaf follows, and
so how it is spread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeGuard

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ..arrays import ByPart, Leaf, LeafPath, Params, followed, path_text
from ..model.layers import OUTER
from ..model.settings import SpecEntry, names_of, trimmed
from .packed import Packed
from .partition import Partition
from .plan import leaf_plans


@dataclass(frozen=True)
class Follow:
    """How a leaf of a tree like the placed parameters belongs to its parameter."""

    spec: tuple[SpecEntry, ...] = ()  # of all of its dims
    lead: int = 0  # axes of its own, before the parameter's
    follows: bool = True  # False: one value for all stages
    fits: bool = True  # False: no axis is known to be that of stages

    def merged(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape with one axis in the place of those of stages and of layers."""
        lead, own = shape[: self.lead], shape[self.lead :]
        if self.follows and len(own) > 1:
            own = (own[0] * own[1], *own[2:])
        return (*lead, *own)

    def of_merged(self) -> Follow:
        """The same of a leaf of the merged shape."""
        at = self.lead + 1
        return replace(self, spec=(*self.spec[:at], *self.spec[at + 1 :]))


def is_params(node: object) -> TypeGuard[ByPart]:
    """True for a tree laid out like parameters: they themselves, a moment of an optimizer, an
    average, gradients.
    """
    return isinstance(node, dict) and "stages" in node and set(node) <= {"stages", *OUTER}


class Followers:
    """Finds the parameter of each leaf of trees like the placed parameters.

    Args:
        params: the placed parameters (arrays or shapes), or canonical ones of a plain program.
        partition: the pipeline's; None for a plain program.
        layer_axis: leaves of stages are [S, layers, ...].
    """

    def __init__(
        self, params: Params, partition: Partition | None, *, layer_axis: bool = False
    ) -> None:
        self._partition, self._axes = partition, 1 + layer_axis
        self._unlike = partition is not None and partition.layout.unlike
        self._stages = params["stages"]
        leaves = jax.tree_util.tree_leaves_with_path(dict(params))
        specs: list[tuple[SpecEntry, ...]] = [()] * len(leaves)
        if partition is not None:
            plans = leaf_plans(partition.plans(params))
            specs = [tuple(plan.spec(partition.axis)) for plan in plans]
        # by part of the model and path there
        self._known: dict[str, dict[str, tuple[tuple[int, ...], tuple[SpecEntry, ...]]]] = {}
        for (path, leaf), spec in zip(leaves, specs, strict=True):
            part, name = self._named(path)
            self._known.setdefault(part, {})[name] = tuple(leaf.shape), spec

    def of(self, node: ByPart) -> ByPart:
        """The node with a `Follow` for each leaf."""

        def of_leaf(path: LeafPath, leaf: Leaf) -> Follow:
            found = self._follow(*self._named(path), leaf.shape)
            if not (self._unlike and path[0].key == "stages"):
                return found
            assert self._partition is not None
            chunk: Packed = node["stages"][path[1].idx]
            if chunk.layout.forms != self._stages[path[1].idx].layout.forms:
                # the state of an optimizer that has one for each layer
                buffer = chunk.layout.of(path[2].key)
                spec = buffer and self._partition.buffer_spec(buffer, leaf)
                return Follow(tuple(spec or [self._partition.axis]))
            return replace(found, fits=found.fits and found.follows and not found.lead)

        follows: ByPart = jax.tree_util.tree_map_with_path(of_leaf, node)
        return follows

    def shardings(self, node: ByPart) -> ByPart:
        """The sharding of each leaf of a node of placed shapes."""
        assert self._partition is not None, "a plain program places nothing"
        return shardings(self._partition.mesh, self.of(node), node)

    def _follow(self, part: str, name: str, shape: tuple[int, ...]) -> Follow:
        known, stage = self._known.get(part, {}), part.startswith("stages")
        own = self._partition if stage else None
        one_a_device = own is not None and shape[:1] == (len(own.layout.owned),)
        devices = () if own is None else (own.axis,)
        found = known.get(name) or followed(name, shape, known)
        if found is None:
            # an optimizer may have a state for each stage (`per_layer`)
            fits = not stage or (one_a_device and not self._unlike)
            return Follow(devices, follows=one_a_device, fits=fits)
        parameter, spec = found
        lead = len(shape) - len(parameter)
        if lead >= 0 and shape[lead:] == parameter:
            return Follow((*[None] * lead, *spec), lead)
        if not stage or np.prod(shape) == 1:
            return Follow(follows=False)
        # a factored moment lacks some of the parameter's last axes
        fits = lead < 0 and shape[: self._axes] == parameter[: self._axes]
        return Follow(devices, follows=fits or one_a_device, fits=fits)

    def _named(self, path: LeafPath) -> tuple[str, str]:
        """The part of the model that a leaf is in, and its path there.  The chunks of alike stages
        are one part, and each chunk of unlike ones.
        """
        names = [path_text((key,)) for key in path]
        if names[0] != "stages" or self._partition is None:
            return names[0], "/".join(names[1:])
        return "/".join(names[: 1 + self._unlike]), "/".join(names[2:])


def shardings(mesh: Mesh, follows: ByPart, like: Params) -> ByPart:
    """The shardings of a tree of these shapes, like the placed parameters or canonical ones.  A dim
    that does not divide is whole.
    """

    def of(leaf: Leaf, rule: Follow) -> NamedSharding:
        entries = (
            None if length % math.prod(mesh.shape[name] for name in names_of(entry)) else entry
            for entry, length in zip(rule.spec if rule.follows else (), leaf.shape, strict=False)
        )
        return NamedSharding(mesh, trimmed(*entries))

    return dict(jax.tree.map(of, like, follows))
