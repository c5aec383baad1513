"""What a twin is, and how named arrays (.npz) become a parameter tree and come back.

torch_ref names a parameter by its path, "stages/attn/qkv/kernel"; in JAX the same path leads
through nested dicts.  Nothing else is converted: kernels are [in, out] on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from torch_ref.models import StagedModel

Array: TypeAlias = Any
Flat: TypeAlias = dict[str, Array]


@dataclass(frozen=True)
class Twin:
    """One model in both worlds: `reference` is torch's, the functions are JAX's; `rows` draws a
    batch.

    `first` is None where the first stage takes the microbatch's "x" as it is.
    """

    name: str
    reference: StagedModel
    first: Callable[..., Any] | None
    stage: Callable[..., Any]
    last: Callable[..., Any]
    rows: Callable[[np.random.Generator, int], Flat]

    def weights(self, seed: int = 0, dtype: Any = np.float64) -> Flat:
        """Named weights, as torch_ref draws them."""
        return (
            self.reference.init(seed, dtype=np.float64)
            if dtype == np.float64
            else cast(self.reference.init(seed), dtype)
        )

    def canonical(self, seed: int = 0, dtype: Any = np.float64) -> dict[str, Any]:
        """The same weights as a canonical parameter tree."""
        return to_tree(self.weights(seed, dtype))

    def batch(self, rows: int, seed: int = 0, dtype: Any = np.float64) -> Flat:
        """A batch of this many rows."""
        return cast(self.rows(np.random.default_rng(seed), rows), dtype)

    @property
    def oracle(self) -> dict[str, Callable[..., Any]]:
        """The functions, for the oracle, which always wants a `first`."""
        return {"first": self.first or _plain_input, "stage": self.stage, "last": self.last}


def _plain_input(_params: Any, microbatch: Flat) -> Array:
    return microbatch["x"]


def cast(arrays: Mapping[str, Array], dtype: Any) -> Flat:
    """Floating arrays in another precision; the others as they are."""
    return {
        k: v.astype(dtype) if np.issubdtype(v.dtype, np.floating) else v for k, v in arrays.items()
    }


def to_tree(flat: Mapping[str, Array]) -> dict[str, Any]:
    """Path names -> nested dicts, with an empty tree for a part of the model that has no
    parameters.
    """
    tree: dict[str, Any] = {"first": {}, "stages": {}, "last": {}}
    for name, value in flat.items():
        *path, leaf = name.split("/")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[leaf] = value
    return tree


def to_flat(tree: Mapping[str, Any], prefix: str = "") -> Flat:
    """Nested dicts -> path names, values as numpy arrays."""
    flat: Flat = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= to_flat(value, f"{prefix}{key}/")
        else:
            flat[prefix + key] = np.asarray(value)
    return flat
