"""Time a pipeline's work besides its stages: predicates, hops, copies to the host."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..arrays import PyTree
from ..lowering.prices import GUESSED, ON_HOST, ON_THE_HOST
from ..lowering.target import TRANSFER, Target
from ..measuring.blocks import exchange, timed
from ..spmd.xla import NO_GRAPHS, Options, options_for
from .machine import TICKS, loop_inputs, loop_of_blocks
from .run import Findings, Line, Scope, at, judged, not_tried, timed_line

# A time is slow above this multiple of the expected one.
FACTOR = 3.0
CPU_PREDICATE = 20e-6  # on one thread of a CPU: an order of magnitude
_ON_CPU = 2**20  # bytes of a transfer among CPU devices
_HOST_RATE = 10e9  # bytes a second to the host: PCIe 3.0 of 16 lanes


def call_of(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """A call that waits for its results."""
    return lambda: jax.block_until_ready(function(*arguments))


def filled(shapes: PyTree) -> PyTree:
    """Arrays of these shapes and shardings."""
    return jax.tree.map(
        lambda s: jax.jit(lambda: jnp.full(s.shape, 0.01, s.dtype), out_shardings=s.sharding)(),
        shapes,
    )


def predicates(scope: Scope, mesh: Mesh) -> Findings:
    """Time a predicate: on GPUs as a node of a CUDA graph, and decided by the host."""
    target = Target.of(mesh, ())
    # without prices of an earlier run
    guess = Target(target.runs_on, chip=target.chip).overheads
    if not target.on_gpus:
        expected = CPU_PREDICATE if target.on_cpus else guess.predicate
        seconds = predicate_seconds({}, scope.repeats)
        return Findings((_predicate("predicate", seconds, expected),), {"predicate": seconds})
    wanted = options_for(target)
    in_graph = predicate_seconds(wanted, scope.repeats)
    on_host = predicate_seconds(wanted | NO_GRAPHS, scope.repeats)
    lines = (
        _predicate("predicate in a CUDA graph", in_graph, guess.predicate),
        _predicate("predicate on the host", on_host, ON_HOST.predicate),
    )
    return Findings(lines, {"predicate": in_graph, ON_THE_HOST: on_host})


def _predicate(item: str, seconds: float, expected: float) -> Line:
    advice = "prefer schedules of fewer chunks; jaxpipe plan reads the measured price"
    return timed_line(item, seconds, expected, factor=FACTOR, advice=advice)


def predicate_seconds(options: Options, repeats: int) -> float:
    """The time of one predicate: the longer of a true and a false one."""
    at(f"predicates with {options or 'no options'}")
    compiled = partial(jax.jit, compiler_options=options or None)
    x, flags = loop_inputs()
    step, plain = (compiled(loop_of_blocks(predicated=each)) for each in (True, False))
    calls = {
        "true": call_of(step, x, flags),
        "false": call_of(step, x, 0 * flags),
        "plain": call_of(plain, x, flags),
    }
    seconds = timed(calls, repeats)
    return max(seconds["true"] - seconds["plain"], seconds["false"]) / TICKS


def hops(
    scope: Scope, mesh: Mesh, *, exchange: Callable[..., Callable[[], Any]] = exchange
) -> Findings:
    """Time each neighbour in each direction alone, then all forward hops during matmuls."""
    (axis,) = mesh.axis_names
    count, target = mesh.shape[axis], Target.of(mesh, ())
    if count == 1:
        return Findings((not_tried("hops", "there is one device; give --devices 2 or more"),))
    size = _ON_CPU if target.on_cpus else TRANSFER
    aval = jax.ShapeDtypeStruct((size // 4,), jnp.float32)
    forward = [(i, i + 1) for i in range(count - 1)]
    pairs = {f"{a} -> {b}": (a, b) for a, b in [*forward, *((b, a) for a, b in forward)]}
    calls = {"nothing": exchange(mesh, axis, (), [aval])}
    for name, pair in pairs.items():
        at(f"the hop {name}")
        calls[name] = exchange(mesh, axis, [pair], [aval])
        calls[name]()
    at("hops in turn")
    seconds = timed(calls, scope.repeats)
    alone = {name: max(0.0, seconds[name] - seconds["nothing"]) for name in pairs}

    at("hops during compute")
    spec = PartitionSpec(axis)
    width, dtype = (128, jnp.float32) if target.on_cpus else (4096, jnp.bfloat16)
    inputs = (((count, width, width), dtype), ((count, size // 4), jnp.float32))

    def mapped(body: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(
            jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        )

    overlap = _overlap(
        lambda w: _matmuls(w[0])[None],
        lambda x: lax.ppermute(x, axis, forward),
        [jax.ShapeDtypeStruct(*each, sharding=NamedSharding(mesh, spec)) for each in inputs],
        scope.repeats,
        mapped,
    )
    lines = (judge_hops(alone, size, target), judge_overlap(overlap, target))
    return Findings(lines, {"hop": statistics.median(alone.values()), "sent": _lost(overlap)})


def judge_hops(seconds: Mapping[str, float], size: int, target: Target) -> Line:
    """A line about hops: slow ones are named."""
    hop = statistics.median(seconds.values())
    chip_hop = GUESSED.hop if target.chip is None else target.chip.hop
    expected = None if target.on_cpus else chip_hop
    limit = FACTOR * max(hop, 20e-6)
    slow = {name: each for name, each in seconds.items() if each > limit}
    text = "below the noise of the measurement"
    if hop:
        text = f"{hop * 1e6:.3g} us for {size / 2**20:.0f} MiB ({size / hop / 1e9:.3g} GB/s)"
    text += "".join(f"; {name}: {each * 1e6:.3g} us" for name, each in slow.items())
    advice = []
    if slow:
        advice.append("these links are slow: look at cables, `nvidia-smi topo -m`, and placement")
    if expected is not None and hop > FACTOR * expected:
        advice.append(
            "all hops are slow: look for NVLink or RDMA that is not used (NCCL_DEBUG=INFO)"
        )
    equal = "equal hops" if expected is None else f"{expected * 1e6:.3g} us, all equal"
    return judged("hops", text, equal, "; ".join(advice), slow=advice)


def _matmuls(w: Any) -> Any:
    return lax.fori_loop(0, 8, lambda _, y: jnp.tanh(y @ w), w)


def _overlap(
    work: Callable[[Any], Any],
    transfer: Callable[[Any], Any],
    shapes: Sequence[Any],
    repeats: int,
    compiled: Callable[..., Callable[..., Any]] = jax.jit,
) -> dict[str, float]:
    """The seconds of work, of a transfer ("hop"), and of both in one program.

    Args:
        work: of the first array.
        transfer: of the second one.
        shapes: of both.
        repeats: of timed calls.
        compiled: makes a program of a function.
    """
    w, x = filled(list(shapes))
    calls = {
        "compute": call_of(compiled(work), w),
        "hop": call_of(compiled(transfer), x),
        "both": call_of(compiled(lambda w, x: (work(w), transfer(x))), w, x),
    }
    return timed(calls, repeats)


def _lost(seconds: Mapping[str, float]) -> float:
    """The time that overlapping work loses to a transfer."""
    return max(0.0, seconds["both"] - max(seconds["compute"], seconds["hop"]))


def judge_overlap(seconds: Mapping[str, float], target: Target) -> Line:
    """A line about a transfer during compute: the hidden part of it, and the lost time."""
    short = min(seconds["compute"], seconds["hop"])
    hidden = max(0.0, 1 - _lost(seconds) / short) if short else 1.0
    return judged(
        "hops during compute",
        f"{_lost(seconds) * 1e6:.3g} us longer; {hidden:.0%} hidden",
        "CPU devices wait for transfers" if target.on_cpus else "at least 50% hidden",
        "transfers do not run during compute: take debug flags out of XLA_FLAGS",
        slow=not target.on_cpus and hidden < 0.5,
    )


def host_copies(scope: Scope, mesh: Mesh) -> Findings:
    """Time copies of residuals to the host and back, alone and during matmuls."""
    if Target.of(mesh, ()).on_cpus:
        return Findings((not_tried("host copies", "the memory of CPU devices is the host's"),))
    size = 2**28
    here = NamedSharding(Mesh(jax.local_devices()[:1], ("x",)), PartitionSpec())
    there = here.with_memory_kind("pinned_host")
    inputs = (((8192, 8192), jnp.bfloat16), ((size // 4,), jnp.float32))
    at("copies to the host")
    seconds = _overlap(
        _matmuls,
        lambda x: jax.device_put(jax.device_put(x, there), here),
        [jax.ShapeDtypeStruct(*each, sharding=here) for each in inputs],
        scope.repeats,
    )
    return Findings((judge_copies(seconds, 2 * size),))


def judge_copies(seconds: Mapping[str, float], size: int) -> Line:
    """A line about copies to the host and back."""
    rate = size / seconds["hop"]
    return judged(
        "host copies",
        f"{rate / 1e9:.3g} GB/s; {_lost(seconds) * 1e6:.3g} us longer during compute",
        f"at least {_HOST_RATE / 1e9:.3g} GB/s",
        "offload costs more than it saves here: use remat",
        slow=rate < _HOST_RATE,
    )
