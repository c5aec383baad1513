"""Weights as Hugging Face publishes them: safetensors files, their index and config.json,
read and written piece by piece.

No process ever holds the whole model: each reads what its own devices need, and tensors are
gathered one at a time to be written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import save_file

import jaxpipe as jp

from .model import Llama, Tree
from .placed import Array, Slices, joined, leaves, made


def config_of(folder: Path) -> Any:
    """The folder's config.json."""
    return json.loads((folder / "config.json").read_text())


def load(folder: Path, pipe: jp.Pipeline, model: Llama) -> Tree:
    """The placed parameters of a folder of safetensors; SystemExit lists every tensor that is
    missing, unknown or of another shape.
    """
    names = model.tensors()
    with ExitStack() as opened:
        files = [
            opened.enter_context(safe_open(path, framework="np"))
            for path in sorted(folder.glob("*.safetensors"))
        ]
        tensors = {name: file.get_slice(name) for file in files for name in list(file.keys())}
        tensors = {name: t for name, t in tensors.items() if not model.ignores(name)}
        check(folder, model, {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()})

        def read(name: str, layer: int | None, own: Slices) -> Array:
            if (tensor := names.get(name)) is None:  # scales of FP8, and their histories
                return np.full([part.stop - part.start for part in own], name.endswith("scale"))
            if layer is None and tensor.stacked:
                every = range(own[0].start, own[0].stop)
                return np.stack([part(name, tensor.name((i,)), own[1:]) for i in every])
            if layer is not None and tensor.stacked > 1:
                every = range(own[0].start, own[0].stop)
                return np.stack([part(name, tensor.name((layer, i)), own[1:]) for i in every])
            return part(name, tensor.name(() if layer is None else (layer,)), own)

        def part(name: str, stored: str, own: Slices) -> Array:
            tensor = tensors[stored]
            return tensor[own[::-1]].T if name.endswith("kernel") else tensor[own]

        return made(model, pipe, read)


def save(
    folder: Path,
    pipe: jp.Pipeline,
    model: Llama,
    params: Tree,
    *,
    dtype: Any = jnp.bfloat16,
    file_bytes: float = 5e9,
) -> None:
    """Write placed parameters as files of at most `file_bytes`, or one tensor, with index and
    config.json; every process calls it.
    """
    pieces: list[list[str]] = [[]]
    size = total = 0
    plan = list(tensors_of(model))
    for name, shape, *_ in plan:
        own = int(np.prod(shape)) * jnp.dtype(dtype).itemsize
        if pieces[-1] and size + own > file_bytes:
            pieces, size = [*pieces, []], 0
        pieces[-1].append(name)
        size, total = size + own, total + own
    files = {
        name: f"model-{k:05}-of-{len(pieces):05}.safetensors"
        for k, piece in enumerate(pieces, 1)
        for name in piece
    }

    writes, gathered = jax.process_index() == 0, _Gathered(pipe, model, params, dtype)
    held: dict[str, Array] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for k, (name, shape, path, numbers) in enumerate(plan):
        # a collective: all processes take part, one writes
        value = gathered(path, numbers)
        held[name] = np.ascontiguousarray(
            (value.T if path.endswith("kernel") else value)[tuple(slice(n) for n in shape)]
        )
        if k + 1 == len(plan) or files[plan[k + 1][0]] != files[name]:
            if writes:
                save_file(held, folder / files[name], metadata={"format": "pt"})
            held = {}
    if writes:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
        config = model.sizes.config(jnp.dtype(dtype).name)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


class _Gathered:
    """Tensors of placed parameters, of which the last layer that was gathered is kept."""

    def __init__(self, pipe: jp.Pipeline, model: Llama, params: Tree, dtype: Any) -> None:
        self._where = {
            (name, layer): (array, take)
            for leaf, array in zip(leaves(model, pipe), jax.tree.leaves(params), strict=True)
            for name, layer, take in leaf.holds()
        }
        self._to, self._dtype = NamedSharding(pipe.mesh, PartitionSpec()), dtype
        self._last: tuple[Any, Any] = (None, None)

    def __call__(self, path: str, numbers: tuple[int, ...]) -> Array:
        """The parameter at the path, of the layer (and the expert) of these numbers."""
        layer, rest = (numbers[0], numbers[1:]) if path.startswith("stages/") else (None, numbers)
        if self._last[0] != (path, layer):
            array, take = self._where[path, layer]
            one = jax.jit(lambda array: take(array).astype(self._dtype), out_shardings=self._to)
            self._last = ((path, layer), np.asarray(one(array)))
        found: Array = self._last[1][rest]
        return found


def tensors_of(model: Llama) -> Iterator[tuple[str, tuple[int, ...], str, tuple[int, ...]]]:
    """(name, shape, canonical path, numbers of layer and expert) of every tensor by layer."""
    rows = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.shapes()):
        if (tensor := model.tensors().get(joined(path))) is None:
            continue  # scales of FP8
        shape = leaf.shape
        own = shape[tensor.stacked :]
        for numbers in np.ndindex(*shape[: tensor.stacked]):
            stored = own[::-1] if joined(path).endswith("kernel") else own
            at = tensor.begin + numbers[0] if numbers else -1
            rows.append((at, tensor.name(numbers), stored, joined(path), numbers))
    for _, *row in sorted(rows, key=lambda row: row[0]):
        yield tuple(row)


def check(folder: Path, model: Llama, found: Mapping[str, tuple[int, ...]]) -> None:
    """SystemExit unless these are the model's tensors."""
    wanted = {name: shape for name, shape, *_ in tensors_of(model)}
    faults = [
        f"{name} is missing, of shape {list(shape)}"
        for name, shape in wanted.items()
        if name not in found
    ]
    faults += [f"{name} is not a tensor of this model" for name in found if name not in wanted]
    both = [name for name in wanted if name in found and wanted[name] != found[name]]
    faults += [
        f"{name} has shape {list(found[name])}; this model wants {list(wanted[name])}"
        for name in both
    ]
    if faults:
        shown = "\n".join(f"  {fault}" for fault in faults[:20])
        more = f"\n  and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise SystemExit(f"the safetensors in {folder} are not of this model:\n{shown}{more}")
