"""Llama's weights as Hugging Face publishes them: safetensors files, their index and config.json,
read and written piece by piece.

No process ever holds the whole model: each reads what its own devices need, and tensors are
gathered one at a time to be written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
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
from .placed import Array, Leaf, joined, leaves
from .sizes import from_config, to_config

# Path of a canonical parameter -> its name; {} is the layer's number.  Kernels are stored as [out,
# in].
NAMES = {
    "first/table": "model.embed_tokens.weight",
    "shared/table": "model.embed_tokens.weight",
    "stages/t/norm1/scale": "model.layers.{}.input_layernorm.weight",
    "stages/t/attn/q/kernel": "model.layers.{}.self_attn.q_proj.weight",
    "stages/t/attn/k/kernel": "model.layers.{}.self_attn.k_proj.weight",
    "stages/t/attn/v/kernel": "model.layers.{}.self_attn.v_proj.weight",
    "stages/t/attn/out/kernel": "model.layers.{}.self_attn.o_proj.weight",
    "stages/t/norm2/scale": "model.layers.{}.post_attention_layernorm.weight",
    "stages/t/mlp/gate/kernel": "model.layers.{}.mlp.gate_proj.weight",
    "stages/t/mlp/up/kernel": "model.layers.{}.mlp.up_proj.weight",
    "stages/t/mlp/down/kernel": "model.layers.{}.mlp.down_proj.weight",
    "last/norm/scale": "model.norm.weight",
    "last/head/kernel": "lm_head.weight",
}


def sizes_of(folder: Path) -> Any:
    """What the folder's config.json tells."""
    return from_config(json.loads((folder / "config.json").read_text()))


def load(folder: Path, pipe: jp.Pipeline, model: Llama) -> Tree:
    """The placed parameters of a folder of safetensors; SystemExit lists every tensor that is
    missing, unknown or of another shape.
    """
    with ExitStack() as opened:
        files = [
            opened.enter_context(safe_open(path, framework="np"))
            for path in sorted(folder.glob("*.safetensors"))
        ]
        tensors = {name: file.get_slice(name) for file in files for name in list(file.keys())}
        tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if not name.endswith("rotary_emb.inv_freq")
        }
        check(folder, model, {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()})

        def read(leaf: Leaf) -> jax.Array:
            def one(layer: int | None, own: tuple[slice, ...]) -> Array:
                tensor = tensors[NAMES[leaf.name].format(layer)]
                return tensor[own[::-1]].T if leaf.name.endswith("kernel") else tensor[own]

            def part(index: tuple[slice, ...]) -> Array:
                if leaf.layers is None:
                    bounds = [
                        k.indices(n)[:2] for k, n in zip(index, leaf.shape.shape, strict=True)
                    ]
                    own = tuple(
                        slice(min(a, n), min(b, n))
                        for (a, b), n in zip(bounds, leaf.size, strict=True)
                    )
                    after = [
                        (0, b - a - (k.stop - k.start))
                        for (a, b), k in zip(bounds, own, strict=True)
                    ]
                    return np.pad(one(None, own), after).astype(leaf.shape.dtype)
                rows = leaf.layers[index[:2]]
                found = {
                    layer: one(layer, index[2:]) for layer in rows.ravel().tolist() if layer >= 0
                }
                nothing = np.zeros(
                    [
                        len(range(*k.indices(n)))
                        for k, n in zip(index[2:], leaf.shape.shape[2:], strict=True)
                    ]
                )
                stacked = np.stack(
                    [
                        found.get(layer, nothing).astype(leaf.shape.dtype)
                        for layer in rows.ravel().tolist()
                    ]
                )
                return stacked.reshape(*rows.shape, *stacked.shape[1:])

            return jax.make_array_from_callback(leaf.shape.shape, leaf.shape.sharding, part)

        return jax.tree.unflatten(
            jax.tree.structure(pipe.place(model.shapes())),
            [read(leaf) for leaf in leaves(model, pipe)],
        )


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
    plan = list(tensors_of(model.shapes()))
    for name, shape, _, _ in plan:
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

    writes, where = jax.process_index() == 0, _where(leaves(model, pipe), jax.tree.leaves(params))
    gathered = jax.jit(
        partial(_gathered, dtype), out_shardings=NamedSharding(pipe.mesh, PartitionSpec())
    )
    held: dict[str, Array] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for k, (name, shape, path, layer) in enumerate(plan):
        # a collective: all processes take part, one writes
        value = np.asarray(gathered(*where[path, layer]))
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
        (folder / "config.json").write_text(
            json.dumps(to_config(model.sizes, jnp.dtype(dtype).name), indent=1) + "\n"
        )


def _gathered(dtype: Any, leaf: jax.Array, device: Any, row: Any) -> jax.Array:
    """One layer of a placed array, which all devices sum up: an index along the split axis would
    bring the whole array together.
    """
    if device is None:
        return leaf.astype(dtype)
    own = leaf[:, row]
    mine = (jnp.arange(len(own)) == device).reshape(-1, *(1 for _ in own.shape[1:]))
    return jnp.sum(jnp.where(mine, own, 0), axis=0).astype(dtype)


def _where(
    known: Sequence[Leaf], arrays: Sequence[jax.Array]
) -> dict[tuple[str, int | None], tuple[jax.Array, int | None, int | None]]:
    """Canonical path and layer -> the placed array that holds it, and where in it: device
    and row.
    """
    found: dict[tuple[str, int | None], tuple[jax.Array, int | None, int | None]] = {}
    for leaf, array in zip(known, arrays, strict=True):
        if leaf.layers is None:
            found[leaf.name, None] = array, None, None
            continue
        for device, row in np.argwhere(leaf.layers >= 0).tolist():
            found[leaf.name, int(leaf.layers[device, row])] = array, device, row
    return found


def tensors_of(shapes: Any) -> Iterator[tuple[str, tuple[int, ...], str, int | None]]:
    """(name, shape, canonical path, layer or None) of every tensor, layer by layer."""
    leaves = [(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)]
    rows = [
        (
            n,
            leaf.shape[1:] if "{}" in NAMES[joined(p)] else leaf.shape,
            joined(p),
            k if "{}" in NAMES[joined(p)] else None,
        )
        for p, leaf in leaves
        for k, n in enumerate(named(p, leaf))
    ]
    for name, shape, path, layer in sorted(rows, key=lambda row: -1 if row[3] is None else row[3]):
        yield name, shape[::-1] if path.endswith("kernel") else shape, path, layer


def check(folder: Path, model: Llama, found: Mapping[str, tuple[int, ...]]) -> None:
    """SystemExit unless these are the model's tensors."""
    wanted = {name: shape for name, shape, _, _ in tensors_of(model.shapes())}
    if model.sizes.tied:
        # some files repeat the table
        found = {name: shape for name, shape in found.items() if name != "lm_head.weight"}
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


def named(path: Any, leaf: Any) -> list[str]:
    """The names of a canonical parameter's tensors: one for each layer, or one."""
    name = NAMES[joined(path)]
    return [name.format(layer) for layer in range(leaf.shape[0])] if "{}" in name else [name]
