"""Which layers each device holds: so that weights are drawn, read and written where they are, and
never whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxpipe as jp

from .model import Llama

Array = np.ndarray[Any, Any]
Slices = tuple[slice, ...]
# A part of one layer of a canonical parameter (of the parameter, where the layer is None).
Read = Callable[[str, int | None, Slices], Array]


class Leaf(NamedTuple):
    """A placed parameter."""

    name: str  # of the canonical one, "stages/t/mlp/up/kernel"
    shape: jax.ShapeDtypeStruct  # with its sharding; [P, rows, ...] where it is of layers
    # of one layer, without the zeros after a dim that the pipeline cuts and that does not divide
    size: tuple[int, ...]
    # int [P, rows], -1 for a row that stands for no layer; None where it is of no layer
    layers: Array | None

    def part(self, read: Read, index: Slices) -> Array:
        """A part of the array."""
        if self.layers is None:
            bounds = _bounds(index, self.shape.shape)
            own = tuple(
                slice(min(a, n), min(b, n)) for (a, b), n in zip(bounds, self.size, strict=True)
            )
            after = [(0, b - a - (k.stop - k.start)) for (a, b), k in zip(bounds, own, strict=True)]
            return np.pad(read(self.name, None, own), after).astype(self.shape.dtype)
        rows = self.layers[index[:2]]
        own = tuple(slice(*b) for b in _bounds(index[2:], self.shape.shape[2:]))
        nothing = np.zeros([k.stop - k.start for k in own], self.shape.dtype)
        found = [
            read(self.name, layer, own).astype(self.shape.dtype) if layer >= 0 else nothing
            for layer in rows.ravel().tolist()
        ]
        return np.stack(found).reshape(*rows.shape, *nothing.shape)

    def holds(self) -> Iterator[tuple[str, int | None, Callable[[Any], Any]]]:
        """Each layer that is in it, with how to take it out of the array."""
        if self.layers is None:
            yield self.name, None, lambda array: array
            return
        for device, row in np.argwhere(self.layers >= 0).tolist():
            yield (
                self.name,
                int(self.layers[device, row]),
                lambda array, device=device, row=row: _of_device(array[:, row], device),
            )


class Shared(NamedTuple):
    """A placed buffer [P, parts, ..., numbers] of parameters that few devices have."""

    shape: jax.ShapeDtypeStruct
    # by device, of each parameter there: its name, its layers, and where it is
    held: tuple[tuple[tuple[str, Array, Any], ...], ...]

    def part(self, read: Read, index: Slices) -> Array:
        """A part of the array."""
        (begin, end), *parts, (a, b) = _bounds(index, self.shape.shape)
        if (a, b) != (0, self.shape.shape[-1]):  # fsdp: cut out of the whole
            whole = (*index[:-1], slice(None))
            return self.part(read, whole)[..., a:b]
        found = np.zeros([y - x for x, y in (*((begin, end), *parts), (a, b))], self.shape.dtype)
        for device in range(begin, end):
            for name, layers, place in self.held[device]:
                for at in np.ndindex(*found.shape[1:-1]):
                    own = [slice(0, n) for n in place.entry.shape[1:]]
                    for part, k, (x, _) in zip(place.entry.parts, at, parts, strict=True):
                        size = place.entry.shape[part.dim] // part.count
                        own[part.dim - 1] = slice((x + k) * size, (x + k + 1) * size)
                    rows = [read(name, layer, tuple(own)).ravel() for layer in layers.tolist()]
                    row = np.concatenate(rows)
                    found[(device - begin, *at)][place.start : place.start + len(row)] = row
        return found

    def holds(self) -> Iterator[tuple[str, int | None, Callable[[Any], Any]]]:
        """Each layer that is in it, with how to take it out of the array."""
        for device, held in enumerate(self.held):
            for name, layers, place in held:
                for row, layer in enumerate(layers.tolist()):
                    yield (
                        name,
                        layer,
                        lambda array, device=device, place=place, row=row: place.take(
                            _of_device(array, device)
                        )[row],
                    )


def leaves(model: Llama, pipe: jp.Pipeline) -> list[Leaf | Shared]:
    """The placed parameters, in the order of `jax.tree.leaves(pipe.place(model.shapes()))`."""
    canonical = {joined(p): a for p, a in jax.tree_util.tree_leaves_with_path(model.shapes())}
    placed = pipe.place(model.shapes())
    layout, names = pipe.layout, model.shapes()["stages"]
    # which layers the stacks of each stage are of: the numbers of layers, cut as their parameters
    numbers = {letter: np.arange(len_of(own)) for letter, own in names.items()}
    stacks = layout.layers.split(numbers)

    def of_stage(device: int, chunk: int, path: str) -> tuple[str, Array]:
        """The canonical name and the layers of a leaf "t/0/mlp/up/kernel" of a device's chunk."""
        letter, group, *rest = path.split("/")
        stage = layout.stage_at(chunk)[device]
        own = stacks[stage].get(letter, ()) if stage >= 0 else ()
        found = own[int(group)] if int(group) < len(own) else np.zeros(0, int)
        return "/".join(["stages", letter, *rest]), np.asarray(found)

    def rows(chunk: int, path: str, count: int) -> tuple[str, Array]:
        found = np.full((pipe.mesh.shape[pipe.axis], count), -1)
        for device in range(len(found)):
            name, own = of_stage(device, chunk, path)
            found[device, : len(own)] = own
        return name, found

    def one(path: Any, leaf: jax.ShapeDtypeStruct) -> Leaf | Shared:
        if path[0].key != "stages":
            name = joined(path)
            return Leaf(name, leaf, canonical[name].shape, None)
        chunk, own = path[1].idx, placed["stages"][path[1].idx]
        packed = getattr(own, "layout", None)  # unlike stages: arrays by name, and buffers
        if packed is None or packed.of(path[2].key) is None:
            name, found = rows(chunk, joined(path[2:]), leaf.shape[1])
            return Leaf(name, leaf, canonical[name].shape[1:], found)
        held = [
            tuple(
                (*of_stage(device, chunk, row.path), place)
                for row, place in zip(form.rows, form.places(packed.names), strict=True)
                if row.array == path[2].key
            )
            for device, form in enumerate(packed.forms)
        ]
        return Shared(leaf, tuple(held))

    return [one(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(placed)]


def made(model: Llama, pipe: jp.Pipeline, read: Read) -> Any:
    """The placed parameters, of which each process reads what its own devices need."""

    def make(leaf: Leaf | Shared) -> jax.Array:
        known: dict[Any, Array] = {}  # devices that differ in other axes have equal parts

        def part(index: Slices) -> Array:
            key = tuple(_bounds(index, leaf.shape.shape))
            if key not in known:
                known[key] = leaf.part(read, index)
            return known[key]

        return jax.make_array_from_callback(leaf.shape.shape, leaf.shape.sharding, part)

    form = jax.tree.structure(pipe.place(model.shapes()))
    return jax.tree.unflatten(form, [make(leaf) for leaf in leaves(model, pipe)])


def joined(path: Any) -> str:
    """A leaf's path as text."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def len_of(tree: Any) -> int:
    """The length of the leading axis of a tree's leaves."""
    return int(jax.tree.leaves(tree)[0].shape[0])


def _of_device(array: Any, device: int) -> Any:
    """One device's row of a placed array, which all devices sum up: an index along the split axis
    would bring the whole array together.
    """
    mine = (np.arange(len(array)) == device).reshape(-1, *(1 for _ in array.shape[1:]))
    return jax.numpy.sum(jax.numpy.where(mine, array, 0), axis=0)


def _bounds(index: Slices, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [k.indices(n)[:2] for k, n in zip(index, shape, strict=True)]
