"""Whether an optimizer tells parameters by their paths, which it cannot where they lie in one buffer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
from jax.tree_util import DictKey

from ..arrays import PyTree
from .packed import Packed
from .placed import Chunks


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class _Renamed(Packed):
    """The same leaves in the same order, one of them under another path."""

    names: dict[str, str] = field(default_factory=dict)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[DictKey, Any]], Any]:
        pairs, aux = Packed(self.leaves, self.forms, self.buffers).tree_flatten_with_keys()
        return [(DictKey(self.names.get(key.key, key.key)), leaf) for key, leaf in pairs], (*aux, tuple(self.names.items()))

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> _Renamed:
        names, forms, buffers, renamed = aux
        return cls(dict(zip(names, children, strict=True)), forms, buffers, dict(renamed))


def is_renamed(stages: Any) -> bool:
    """Whether these are the stages that `path_faults` gives an optimizer: a rule that never sees buffers need not act on them."""
    return any(isinstance(chunk, _Renamed) for chunk in stages)


def path_faults(optimizer: Any, params: dict[str, PyTree]) -> list[str]:
    """Parameters (placed, shapes) of one buffer of which the optimizer makes something else by their paths, as a mask may.

    It is traced with a buffer under the path of each parameter in it: what it does must not depend on that.
    """
    found = []
    for v, chunk in enumerate(params["stages"]):
        for buffer in chunk.buffers if isinstance(chunk, Packed) else ():
            if chunk.leaves[buffer.name] is None:
                continue
            first, text = buffer.paths[0], _traced(optimizer, params, v, buffer.name, buffer.paths[0])
            odd = next((p for p in buffer.paths[1:] if _traced(optimizer, params, v, buffer.name, p) != text), None)
            if odd is not None:
                found.append(
                    f"the optimizer treats {first!r} and {odd!r} differently by their paths, but stages of several kinds keep both in "
                    f"one array, {buffer.name!r}; give rules for one parameter, with their masks and labels, as "
                    "jaxpipe.per_layer(pipe, optimizer)"
                )
    return found


def _traced(optimizer: Any, params: dict[str, PyTree], chunk: int, name: str, path: str) -> str:
    """What the optimizer does where the leaf has this path."""
    stages = params["stages"]
    assert isinstance(stages, Chunks)
    own = stages[chunk]
    renamed = _Renamed(own.leaves, own.forms, own.buffers, {name: path})
    given = {**params, "stages": stages.like(renamed if v == chunk else other for v, other in enumerate(stages))}
    state = jax.eval_shape(optimizer.init, given)
    shapes = str([(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)])
    try:
        return shapes + str(jax.make_jaxpr(lambda g, s, p: jax.tree.leaves(optimizer.update(g, s, p)))(given, state, given))
    except TypeError:
        return shapes  # an update that wants further arguments, such as the loss
