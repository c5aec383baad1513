"""measure: what the stages or layers of a model cost, on the devices at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from ..arrays import PyTree
from ..engine.costs import Costs
from ..errors import PipelineError, quoted
from ..model.model import Model
from ..model.settings import Memory, Sharding
from ..pipeline import Pipeline
from ..planner.layer_cost import FIRST, LAST, LayerCost
from ..schedules import build
from .blocks import refuse_layers, shape_of
from .layers import layer_costs
from .peak import Peak
from .stages import measure_stages


def measure(
    model: Model,
    params: Mapping[str, PyTree],
    microbatch: PyTree,
    *,
    mesh: Mesh | None = None,
    sharding: Sharding = Sharding(),  # noqa: B008  it is frozen
    memory: Memory = Memory(),  # noqa: B008
    rng: Any = None,
    state: Any = (),
    repeats: int = 10,
    peak: Peak | None = None,
) -> Costs | dict[str, LayerCost]:
    """What a model costs for one microbatch, in seconds and bytes: `Costs` with an entry for each
    stage, or a `LayerCost` for each letter of a model that is given by letters.

    F (with what it keeps written to memory), B, I and W of every kind of stage, `first`, its
    gradient, `last` with its gradient and a hop to the next device are compiled as the step would,
    each alone, and run in turn on one coordinate of the pipe and data axes.  The median of
    `repeats` rounds counts.  In `Costs`, `first` is in F of the first stage and its gradient in B
    and I, and `last` is in F of the last one.  Where they are spread, a device's share is
    `Costs.last`, `first` and `first_grad` instead, without the time of its collectives over the
    pipe axis.  Devices that share a stage, along axes that are left to the partitioner, run it
    together; bytes are those of one of them.  Bytes of shared parameters are counted with those of
    letter "L" ("E" where there is no "L").

    Args:
        model: the model, by stages or by letters.
        params: canonical parameters (arrays or shapes); values are not used.
        microbatch: the rows of one microbatch on each data shard, arrays or shapes.
        mesh: the mesh of the pipeline; for letters its pipe axis has one coordinate.  None takes
            local devices: one for letters, and as many as divide the stages otherwise.
        sharding, memory: as for `Pipeline`.
        rng, state: as for `Pipeline.value_and_grad`.
        repeats: rounds of timed runs.
        peak: where it is given nothing is run: seconds are estimated from the blocks' flops and
            bytes, and `unit` says so.

    Raises:
        PipelineError: as `Pipeline` does, and for repeats below 1.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpipe as jp
        >>> layers = {"t": lambda w, x: jnp.tanh(x @ w), "L": lambda p, x, mb: jnp.mean(x**2)}
        >>> params = {"stages": {"t": jnp.ones((6, 8, 8), jnp.float32)}, "last": {}}
        >>> model = jp.Model(layers, layers="t*6L")
        >>> found = jp.measure(model, params, {"x": jnp.ones((4, 8), jnp.float32)}, repeats=1)
        >>> found["t"].parameters, found["t"].boundary, found["t"].forward > 0
        (256, 128, True)
    """
    if not isinstance(model, Model):
        raise PipelineError(f"model must be a jaxpipe.Model, not {quoted(model)}")
    rows = jax.tree.map(shape_of, microbatch)
    settings: dict[str, Any] = {"sharding": sharding, "memory": memory}
    if model.is_layered:
        letters = "".join(letter for letter in model.stages if letter not in (FIRST, LAST))
        refuse_layers(model.stages, params)
        ends = [letter if letter in model.stages else "" for letter in (FIRST, LAST)]
        one = model.with_layers(ends[0] + letters + ends[1])
        schedule = build("no_pipelining", devices=1, microbatches=1, chunks=len(letters))
        mesh = _mesh(1, sharding.pipe) if mesh is None else mesh
        layout = ends[0] + "|".join(letters) + ends[1]
        pipe = Pipeline(one, schedule, mesh, layout=layout, **settings)
        return layer_costs(pipe, letters, params, rows, repeats, peak)
    stages = _count(model, params)
    if mesh is None:
        mesh = _mesh(
            max(d for d in range(1, len(jax.devices()) + 1) if stages % d == 0), sharding.pipe
        )
    devices = dict(mesh.shape).get(sharding.pipe, 1)
    name, chunks = ("no_pipelining" if devices == 1 else "looped_bfs"), max(1, stages // devices)
    schedule = build(name, devices=devices, microbatches=devices, chunks=chunks)
    pipe = Pipeline(model, schedule, mesh, **settings)
    placed = pipe.place(jax.tree.map(shape_of, dict(params)))
    shards = pipe.schedule.num_microbatches * pipe._data_size

    def whole(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((leaf.shape[0] * shards, *leaf.shape[1:]), leaf.dtype)

    if state:
        state = pipe.place_state(state)
    return measure_stages(
        pipe, placed, jax.tree.map(whole, rows), rng=rng, state=state, repeats=repeats, peak=peak
    )


def _mesh(devices: int, axis: str) -> Mesh:
    """A mesh of the first local devices."""
    return jax.make_mesh((devices,), (axis,), devices=jax.devices()[:devices])


def _count(model: Model, params: Mapping[str, PyTree]) -> int:
    """The number of stages of canonical parameters."""
    if not callable(model.stages):
        return len(model.stages)
    leaves = jax.tree.leaves(params.get("stages"))
    if not leaves or not leaves[0].shape:
        raise PipelineError(
            'params["stages"] has no leaves with a leading axis of stages; give canonical '
            "parameters, as for Pipeline.place"
        )
    return int(leaves[0].shape[0])
