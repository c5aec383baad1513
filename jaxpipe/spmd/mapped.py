"""`shard_map` over some axes of a mesh, where the others are left to the partitioner."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh

from ..arrays import PyTree
from ..jaxprs import Reductions


def mapped(
    function: Callable[..., Any], mesh: Mesh, axes: Set[str], in_specs: PyTree, out_specs: PyTree
) -> Callable[..., Any]:
    """`jax.shard_map` of the function, with reductions in a form that XLA compiles."""
    alone = {name for name, size in mesh.shape.items() if size == 1}
    changes = Reductions(alone, widen=on_cpus(mesh))

    def call(*arguments: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        changed = core.ClosedJaxpr(changes.within(closed.jaxpr), closed.consts)
        return jax.tree.unflatten(
            jax.tree.structure(shapes), core.jaxpr_as_fun(changed)(*jax.tree.leaves(arguments))
        )

    wanted = axes != set(mesh.axis_names) and (changes.widen or bool(alone & axes))
    return jax.shard_map(
        call if wanted else function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axes),
        check_vma=False,
    )


def on_cpus(mesh: Mesh) -> bool:
    """Whether the devices are CPUs."""
    return any(device.platform == "cpu" for device in mesh.devices.flat)
