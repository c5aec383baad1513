"""The options of XLA for a pipeline's program, by backend."""

from __future__ import annotations

import os
from typing import TypeAlias

import jax
from jax.sharding import Mesh

from ..known_faults import Feature, faults_for
from ..lowering.target import Target
from ..table.effects import Offload

Options: TypeAlias = dict[str, str | bool]

# Operations that may be in a CUDA graph: XLA's default and WHILE.  With WHILE a block under a
# predicate is a node of a graph, and the host does not wait for its predicate.  COLLECTIVES is left
# out: CUDA allows no communication in a conditional node's body.  The list has all other types that
# this XLA accepts, because a block is a node only if all of its operations may be in a graph.
_IN_GRAPHS = (
    "FUSION",
    "CUBLAS",
    "CUBLASLT",
    "CUSTOM_CALL",
    "CUDNN",
    "CONVOLUTION",
    "DYNAMIC_SLICE_FUSION",
    "CONDITIONAL",
    "WHILE",
)
_ZERO_INIT = "xla_gpu_enable_dus_accumulator_zero_init_elimination"
_COMPONENTS = "xla_gpu_collective_permute_connected_components"
_GPU: Options = {
    "xla_gpu_enable_command_buffer": ",".join(_IN_GRAPHS),
    "xla_gpu_graph_min_graph_size": "1",  # a predicate is one operation of its own
    # Stacks that a scan fills from zero are not filled with zeros first.
    _ZERO_INIT: True,
    # Several collectives are in flight at a time: transfers of both payloads up and down the model,
    # or those of both halves of a pair.  With one at a time, an awaited transfer keeps all others
    # from running during compute.
    "xla_gpu_experimental_parallel_collective_overlap_limit": "4",
    # Transfers are not merged.  In a vee placement, activations of one half and cotangents of the
    # other have the same direction.  A merged permute would be awaited before the first backward,
    # and could not run during it.
    "xla_gpu_collective_permute_combine_threshold_bytes": "0",
    # Matmuls of one operand are not merged.  XLA merges small ones.  If autotuning gives the merged
    # one to cuBLAS, its concatenated operand is written in every trip: more than half of the bytes
    # that the loops of a small model move.
    "xla_gpu_dot_merger_threshold_mb": "0",
}


# Where blocks communicate, over axes that are left to the partitioner.
_BLOCKS_COMMUNICATE: Options = {
    # The gathers of the two halves of an overlapped pair are not merged: a merged gather would
    # overlap no matmul.  XLA may merge scatters: without that, more of a layer is in memory at a
    # time.
    "xla_gpu_all_gather_combine_threshold_bytes": "0",
    # A transfer is in flight during a whole block with all of its collectives.  With a limit of
    # four, XLA would issue the transfer after the block.
    "xla_gpu_experimental_parallel_collective_overlap_limit": "16",
}


# The host decides every predicate.
NO_GRAPHS: Options = {"xla_gpu_enable_command_buffer": ""}


def options_for(target: Target) -> Options:
    """The options for a target; none except on NVIDIA GPUs.

    The list of commands is explicit: this interface refuses the form with "+", though XLA_FLAGS
    takes it (jaxlib 0.10).
    """
    if not target.on_gpus:
        return {}
    options = _GPU | _BLOCKS_COMMUNICATE if target.communicates else dict(_GPU)
    if faults_for(target.platform, {Feature.ZERO_INIT}):
        del options[_ZERO_INIT]
    return options


_MANY = 8  # devices of a node


def features_of(target: Target, mesh: Mesh, offload: Offload) -> frozenset[Feature]:
    """The features of a pipeline's program that known faults depend on."""
    devices = list(mesh.devices.flat)
    pipes = any(size > 1 for size in mesh.shape.values())
    used = {
        Feature.POOLS: True,
        Feature.GRAPHS: target.on_gpus,
        Feature.ZERO_INIT: target.on_gpus,
        Feature.OFFLOAD: offload is not Offload.NOTHING,
        Feature.COMMUNICATES: target.communicates,
        Feature.SEVERAL_DEVICES: pipes,
        Feature.LARGE_CLIQUES: len(devices) > _MANY and jax.process_count() > 1,
        Feature.COMPONENTS: f"{_COMPONENTS}=true" in os.environ.get("XLA_FLAGS", ""),
        Feature.SEVERAL_PROCESSES: jax.process_count() > 1,
    }
    return frozenset(feature for feature, is_used in used.items() if is_used)
