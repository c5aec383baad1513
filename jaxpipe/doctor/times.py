"""Time a pipeline's work besides its stages: predicates, hops, copies to the host."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..lowering.prices import GUESSED, ON_HOST, ON_THE_HOST
from ..lowering.target import TRANSFER, Chip, Target
from ..measuring.blocks import exchange, timed
from ..spmd.compiler_options import NO_GRAPHS, Options, options_for
from .findings import Found, Line, Scope, at, judged, not_tried, timed_line
from .options import TICKS, arguments, predicated

# A time is slow above this multiple of the expected one.
FACTOR = 3.0
CPU_PREDICATE = 20e-6  # on one thread of a CPU: an order of magnitude
_ON_CPU = 2**20  # bytes of a transfer among CPU devices


def predicates(scope: Scope, mesh: Mesh) -> Found:
    """Time a predicate: on GPUs as a node of a CUDA graph, and decided by the host."""
    target = Target.of(mesh, ())
    # without prices of an earlier run
    guess = Target(target.runs_on, chip=target.chip).overheads
    if not target.on_gpus:
        expected = CPU_PREDICATE if target.on_cpus else guess.predicate
        seconds = predicate_seconds({}, scope.repeats)
        return Found((_predicate("predicate", seconds, expected),), {"predicate": seconds})
    wanted = options_for(target)
    in_graph = predicate_seconds(wanted, scope.repeats)
    on_host = predicate_seconds(wanted | NO_GRAPHS, scope.repeats)
    lines = (
        _predicate("predicate in a CUDA graph", in_graph, guess.predicate),
        _predicate("predicate on the host", on_host, ON_HOST.predicate),
    )
    return Found(lines, {"predicate": in_graph, ON_THE_HOST: on_host})


def _predicate(item: str, seconds: float, expected: float) -> Line:
    advice = "prefer schedules of fewer chunks; jaxpipe plan reads the measured price"
    return timed_line(item, seconds, expected, factor=FACTOR, advice=advice)


def predicate_seconds(options: Options, repeats: int) -> float:
    """The time of one predicate: the longer of a true and a false one."""
    at(f"predicates with {options or 'no options'}")
    x, flags = arguments()
    step = jax.jit(predicated("while"), compiler_options=options or None)
    plain = jax.jit(predicated("plain"), compiler_options=options or None)
    calls: dict[str, Callable[[], Any]] = {
        "taken": lambda: jax.block_until_ready(step(x, flags)),
        "left": lambda: jax.block_until_ready(step(x, 0 * flags)),
        "plain": lambda: jax.block_until_ready(plain(x, flags)),
    }
    found = timed(calls, repeats)
    return max(found["taken"] - found["plain"], found["left"]) / TICKS


def hops(
    scope: Scope, mesh: Mesh, *, exchange: Callable[..., Callable[[], Any]] = exchange
) -> Found:
    """Time each neighbour in each direction alone, then all forward hops during matmuls."""
    (axis,) = mesh.axis_names
    count, target = mesh.shape[axis], Target.of(mesh, ())
    if count == 1:
        return Found((not_tried("hops", "there is one device; give --devices 2 or more"),))
    size = _ON_CPU if target.on_cpus else TRANSFER
    aval = jax.ShapeDtypeStruct((size // 4,), jnp.float32)
    forward = [(i, i + 1) for i in range(count - 1)]
    pairs = [*forward, *((b, a) for a, b in forward)]
    calls = {"nothing": exchange(mesh, axis, (), [aval])}
    for pair in pairs:
        at(f"the hop {pair[0]} -> {pair[1]}")
        calls[_name(pair)] = exchange(mesh, axis, [pair], [aval])
        calls[_name(pair)]()
    at("hops in turn")
    found = timed(calls, scope.repeats)
    alone = {_name(pair): max(0.0, found[_name(pair)] - found["nothing"]) for pair in pairs}
    hop = statistics.median(alone.values())
    at("hops during compute")
    overlap = timed(_overlap_calls(mesh, axis, forward, size), scope.repeats)
    lines = (judge_hops(alone, size, target), judge_overlap(overlap, target))
    return Found(lines, {"hop": hop, "sent": _lost(overlap)})


def _name(pair: tuple[int, int]) -> str:
    return f"{pair[0]} -> {pair[1]}"


def judge_hops(seconds: Mapping[str, float], size: int, target: Target) -> Line:
    """A line about hops: slow ones are named."""
    hop = statistics.median(seconds.values())
    chip: Chip | None = target.chip
    expected = None if target.on_cpus else (GUESSED.hop if chip is None else chip.hop)
    limit = FACTOR * max(hop, 20e-6)
    slow = [name for name, each in seconds.items() if each > limit]
    all_slow = expected is not None and hop > FACTOR * expected
    rate = size / hop / 1e9 if hop else float("inf")
    text = f"{hop * 1e6:.3g} us for {size / 2**20:.0f} MiB ({rate:.3g} GB/s)"
    text = text if hop else "below the noise of the measurement"
    text += "".join(f"; {name}: {seconds[name] * 1e6:.3g} us" for name in slow)
    advice = []
    if slow:
        advice.append("these links are slow: look at cables, `nvidia-smi topo -m`, and placement")
    if all_slow:
        advice.append(
            "all hops are slow: look for NVLink or RDMA that is not used (NCCL_DEBUG=INFO)"
        )
    equal = "equal hops" if expected is None else f"{expected * 1e6:.3g} us, all equal"
    return judged("hops", text, equal, "; ".join(advice), slow=advice)


def _overlap_calls(
    mesh: Mesh, axis: str, pairs: list[tuple[int, int]], size: int
) -> dict[str, Callable[[], Any]]:
    """Matmuls on all devices, the hops, and both in one program."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    width, times = (128, 8) if on_cpu else (4096, 8)
    spec = PartitionSpec(axis)
    count = mesh.shape[axis]

    def full(value: float, shape: tuple[int, ...], dtype: Any) -> Any:
        place = NamedSharding(mesh, spec)
        return jax.jit(lambda: jnp.full((count, *shape), value, dtype), out_shardings=place)()

    x = full(1.0, (size // 4,), jnp.float32)
    w = full(1e-3, (width, width), jnp.float32 if on_cpu else jnp.bfloat16)

    def call(computes: bool, sends: bool) -> Callable[[], Any]:
        def body(x: Any, w: Any) -> tuple[Any, Any]:
            y = w[0]
            if computes:
                y = lax.fori_loop(0, times, lambda _, y: jnp.tanh(y @ w[0]), y)
            return (lax.ppermute(x, axis, pairs) if sends else x + 0), y[None]

        mapped = jax.jit(
            jax.shard_map(
                body, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec), check_vma=False
            )
        )
        return lambda: jax.block_until_ready(mapped(x, w))

    return {
        "compute": call(computes=True, sends=False),
        "hop": call(computes=False, sends=True),
        "both": call(computes=True, sends=True),
    }


def _lost(seconds: Mapping[str, float]) -> float:
    """The time that overlapping work loses to a transfer."""
    return max(0.0, seconds["both"] - max(seconds["compute"], seconds["hop"]))


def judge_overlap(seconds: Mapping[str, float], target: Target) -> Line:
    """A line about a transfer during compute: the hidden part of it, and the lost time."""
    short = min(seconds["compute"], seconds["hop"])
    shown = 1 - _lost(seconds) / short if short else 1.0
    text = f"{_lost(seconds) * 1e6:.3g} us longer; {max(0.0, shown):.0%} hidden"
    if target.on_cpus:
        return judged("hops during compute", text, "CPU devices wait for transfers")
    return judged(
        "hops during compute",
        text,
        "at least 50% hidden",
        "transfers do not run during compute: take debug flags out of XLA_FLAGS",
        slow=shown < 0.5,
    )


_HOST_RATE = 10e9  # bytes a second to the host: PCIe 3.0 of 16 lanes


def host_copies(scope: Scope, mesh: Mesh) -> Found:
    """Time copies of residuals to the host and back, alone and during matmuls."""
    device = jax.local_devices()[0]
    if Target.of(mesh, ()).on_cpus:
        why = "the memory of CPU devices is the host's"
        return Found((not_tried("host copies", why),))
    size = 2**28
    here = NamedSharding(Mesh([device], ("x",)), PartitionSpec())
    there = here.with_memory_kind("pinned_host")
    x = jax.jit(lambda: jnp.zeros(size // 4, jnp.float32), out_shardings=here)()
    w = jax.jit(lambda: jnp.full((8192, 8192), 1e-4, jnp.bfloat16), out_shardings=here)()

    def back_and_forth(x: Any) -> Any:
        return jax.device_put(jax.device_put(x, there), here)

    def work(w: Any) -> Any:
        return lax.fori_loop(0, 8, lambda _, y: jnp.tanh(y @ w), w)

    copy, compute = jax.jit(back_and_forth), jax.jit(work)
    both = jax.jit(lambda x, w: (back_and_forth(x), work(w)))
    at("copies to the host")
    found = timed(
        {
            "hop": lambda: jax.block_until_ready(copy(x)),
            "compute": lambda: jax.block_until_ready(compute(w)),
            "both": lambda: jax.block_until_ready(both(x, w)),
        },
        scope.repeats,
    )
    return Found((judge_copies(found, 2 * size),))


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
