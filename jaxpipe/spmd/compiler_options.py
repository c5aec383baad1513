"""XLA's options that a pipeline's program wants, by backend."""

from __future__ import annotations

from typing import TypeAlias

from jax.sharding import Mesh

from ..table.schedule import Schedule

Options: TypeAlias = dict[str, str | bool]

# What may be part of a CUDA graph: XLA's default, and WHILE besides, so that a block under a predicate is a node of a graph that the GPU
# decides upon and not a loop that the host waits for.  COLLECTIVES stays out: CUDA allows no communication in a conditional node's body.
_IN_GRAPHS = ("FUSION", "CUBLAS", "CUBLASLT", "CUSTOM_CALL", "CUDNN", "DYNAMIC_SLICE_FUSION", "CONDITIONAL", "WHILE")
_GPU: Options = {
    "xla_gpu_enable_command_buffer": ",".join(_IN_GRAPHS),
    "xla_gpu_graph_min_graph_size": "1",  # a predicate is one operation of its own
    # Stacks that a scan fills from zero are not filled with zeros first.
    "xla_gpu_enable_dus_accumulator_zero_init_elimination": True,
}


# Of an overlapped pair both halves communicate: one's collectives need not wait for the other's.
_PAIRS: Options = {"xla_gpu_experimental_parallel_collective_overlap_limit": "4"}


def options_for(mesh: Mesh, schedule: Schedule) -> Options:
    """The options for the devices of a mesh and a schedule; none but on NVIDIA GPUs.

    An explicit list of commands: the form with "+" is refused here, though XLA_FLAGS takes it (jaxlib 0.10).
    """
    platforms = {device.platform for device in mesh.devices.flat}
    if not platforms <= {"gpu", "cuda"}:
        return {}
    return {**_GPU, **(_PAIRS if len(schedule.encoded.pairs) else {})}
