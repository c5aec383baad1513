"""Start JAX and run one check; check the installed versions, XLA's options, and the times of a
pipeline's work besides its stages: predicates, hops, copies to the host.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..cli.checks import MARK, Findings, Line, Scope, Verdict, at, judged, not_tried, one_device
from ..inspect.programs import compile_and_read
from ..inspect.timing import exchange, timed
from ..known_faults import TESTED, FaultEffect, KnownFault, faults_for, installed_version, is_in
from ..lowering.target import GUESSED, H100, ON_THE_HOST, TRANSFER, Target
from ..spmd.block import while_once
from ..spmd.xla import NO_GRAPHS, Options, features_of, options_for

_AXIS = "pipe"
_COUNT = "xla_force_host_platform_device_count"
_PACKAGES = {
    "jax": ("jax",),
    "jaxlib": ("jaxlib",),
    "plugin": ("jax-cuda13-plugin", "jax-cuda12-plugin"),
    "libtpu": ("libtpu",),
    "CUDA": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
    "cuDNN": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "NCCL": ("nccl",),
}
TICKS = 64


def main(request: str) -> None:
    """Start JAX for the scope, run the check and print its findings as a line of JSON, after
    `MARK`.
    """
    check, settings, options = json.loads(request)
    scope = Scope(**settings)
    at("the start of JAX")
    mesh = make_mesh(scope)
    module, function = check.split(":")
    at(function)
    module = module if "." in module else f"jaxpipe.doctor.{module}"
    findings: Findings = getattr(import_module(module), function)(scope, mesh, **options)
    findings = replace(findings, kind=str(mesh.devices.flat[0].device_kind))
    print(MARK + json.dumps(asdict(findings)), flush=True)


def make_mesh(scope: Scope) -> Mesh:
    """The devices in a row; virtual ones where there are only CPUs."""
    each = None if scope.devices is None else -(-scope.devices // scope.processes)
    if each is not None and _COUNT not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", each)
    if scope.coordinator is not None:
        jax.distributed.initialize(scope.coordinator, scope.processes, scope.process)
    devices = [
        device for process in range(scope.processes) for device in jax.local_devices(process)[:each]
    ]
    count = scope.devices or len(devices)
    if count > len(devices):
        raise SystemExit(
            f"there are {len(devices)} devices; give --devices {len(devices)} or fewer"
        )
    return Mesh(np.array(devices[:count]), (_AXIS,))


def installed() -> dict[str, str]:
    """Name -> version of each installed package."""
    versions = {
        name: next(filter(None, map(installed_version, packages)), "")
        for name, packages in _PACKAGES.items()
    }
    numbers = {"python": sys.version.split()[0], **versions, "driver": _driver()}
    return {name: number for name, number in numbers.items() if number}


def _driver() -> str:
    """The version of CUDA that the driver supports; empty without one."""
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)):
            return ""
    except (OSError, AttributeError):
        return ""
    return f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"


def versions(scope: Scope, mesh: Mesh) -> Findings:
    """A line about the installed versions, and one for each of their known faults."""
    target = Target.of(mesh, ())
    faults = faults_for(target.platform, features_of(target, mesh))
    return Findings((judge_versions(installed(), target.platform), *map(line_of, faults)))


def judge_versions(numbers: dict[str, str], platform: str) -> Line:
    """A line that says whether these versions agree and were run with jaxpipe."""
    new = [
        f"{name} {numbers[name]} was never run with jaxpipe: see the numbers below, or install "
        f"{name}{range_}"
        for name, range_ in TESTED.items()
        if name in numbers and not is_in(numbers[name], range_)
    ]
    text, expected = (", ".join(map(" ".join, each.items())) for each in (numbers, TESTED))
    if platform == "gpu" and numbers.get("plugin", numbers["jaxlib"]) != numbers["jaxlib"]:
        other = f"the plugin has another version than jaxlib {numbers['jaxlib']}: install both"
        return Line("versions", Verdict.WRONG, text, expected, "; ".join([other, *new]))
    verdict = Verdict.NOT_TRIED if new else Verdict.OK
    return Line("versions", verdict, text, expected, "; ".join(new))


def line_of(fault: KnownFault) -> Line:
    """A known fault as a line."""
    verdicts = {FaultEffect.SLOW: Verdict.SLOW, FaultEffect.AVOIDED: Verdict.OK}
    return Line(
        f"known fault: {fault.feature.value}",
        verdicts.get(fault.effect, Verdict.WRONG),
        f"{fault.package} {installed_version(fault.package)}: {fault.what} ({fault.source})",
        f"none of {fault.versions}",
        fault.workaround,
    )


def loop_of_blocks(*, predicated: bool) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A loop of TICKS small blocks, under predicates or without them; of `loop_inputs`."""

    def block(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ x)

    def tick(x: jax.Array, flag: jax.Array) -> tuple[jax.Array, None]:
        return (while_once(flag > 0, block, x)[1] if predicated else block(x)), None

    return lambda x, flags: lax.scan(tick, x, flags)[0]


def loop_inputs() -> tuple[jax.Array, jax.Array]:
    """A matrix, and flags that are all set."""
    return jnp.full((64, 64), 0.01, jnp.float32), jnp.ones(TICKS, jnp.int32)


def options(scope: Scope, mesh: Mesh) -> Findings:
    """Compile a small program with the options; read whether predicates became nodes of graphs."""
    wanted = options_for(Target.of(mesh, ()))
    accepted, effective = "XLA options: accepted", "XLA options: effective"
    if not wanted:
        why = f"pipelines want none on {mesh.devices.flat[0].platform}"
        return Findings((not_tried(accepted, why), not_tried(effective, why)))
    at("compiling with each option")
    refused = {name: reason for name in wanted if (reason := refusal({name: wanted[name]}))}
    taken = {name: value for name, value in wanted.items() if name not in refused}
    try:
        line = judge_effective([p.in_graph for p in compile_and_read(_lowered(), taken).predicates])
    except ValueError as error:
        line = not_tried(effective, f"XLA's thunks cannot be read: {error}")
    return Findings((judge_accepted(wanted, refused), line))


def _lowered() -> jax.stages.Lowered:
    return jax.jit(loop_of_blocks(predicated=True)).lower(*loop_inputs())


def refusal(options: Options) -> str:
    """XLA's reason not to compile with the options; empty where it compiles."""
    try:
        _lowered().compile(compiler_options=options)
    except Exception as error:  # XLA's errors differ between versions
        return str(error).splitlines()[0][:200]
    return ""


def judge_accepted(wanted: Options, refused: Mapping[str, str]) -> Line:
    """A line about options that XLA does not take."""
    taken, all_of_them = len(wanted) - len(refused), f"{len(wanted)} of {len(wanted)}"
    reasons = [f"{name}: {reason}" for name, reason in refused.items()]
    text = "; ".join([f"{taken} of {len(wanted)}", *reasons])
    advice = "install a version of jaxlib that jaxpipe was run with"
    return judged("XLA options: accepted", text, all_of_them, advice, wrong=refused)


def judge_effective(in_graph: list[bool]) -> Line:
    """A line about predicates that are nodes of CUDA graphs."""
    return judged(
        "XLA options: effective",
        f"{sum(in_graph)} of {len(in_graph)} predicates in CUDA graphs",
        "all of them",
        "the driver or the toolkit is too old for loops in graphs (CUDA 12.3)",
        slow=not (in_graph and all(in_graph)),
    )


# A time is slow above this multiple of the expected one.
FACTOR = 3.0
CPU_PREDICATE = 20e-6  # on one thread of a CPU: an order of magnitude
_ON_CPU = 2**20  # bytes of a transfer among CPU devices
_HOST_RATE = 10e9  # bytes a second to the host: PCIe 3.0 of 16 lanes
_ANY_LINK = 5e11  # bytes a second that no link to a host reaches
_COPIED = 2**28  # bytes of a copy to the host


def predicates(scope: Scope, mesh: Mesh) -> Findings:
    """Time a predicate: on GPUs as a node of a CUDA graph, and decided by the host."""
    target = Target.of(mesh, ())
    if not target.on_gpus:
        # without prices of an earlier run
        guess = Target(target.runs_on, chip=target.chip).overheads.predicate
        expected = CPU_PREDICATE if target.on_cpus else guess
        seconds = predicate_seconds({}, scope.repeats)
        return Findings((_predicate("predicate", seconds, expected),), {"predicate": seconds})
    wanted = options_for(target)
    in_graph = predicate_seconds(wanted, scope.repeats)
    on_host = predicate_seconds(wanted | NO_GRAPHS, scope.repeats)
    lines = (
        _predicate("predicate in a CUDA graph", in_graph, H100["predicate"]),
        _predicate("predicate on the host", on_host, H100[ON_THE_HOST]),
    )
    return Findings(lines, {"predicate": in_graph, ON_THE_HOST: on_host})


def _predicate(item: str, seconds: float, expected: float) -> Line:
    advice = "prefer schedules of fewer chunks; jaxpipe plan reads the measured price"
    is_slow = seconds > FACTOR * expected
    return judged(item, _us(seconds), _us(expected), advice, slow=is_slow)


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us"


def predicate_seconds(options: Options, repeats: int) -> float:
    """The time of one predicate: the longer of a true and a false one."""
    at(f"predicates with {options or 'no options'}")
    compiled = partial(jax.jit, compiler_options=options or None)
    x, flags = loop_inputs()
    step, plain = (compiled(loop_of_blocks(predicated=each)) for each in (True, False))
    calls = {
        "true": partial(step, x, flags),
        "false": partial(step, x, 0 * flags),
        "plain": partial(plain, x, flags),
    }
    seconds = timed(calls, repeats)
    return max(seconds["true"] - seconds["plain"], seconds["false"]) / TICKS


def hops(scope: Scope, mesh: Mesh) -> Findings:
    """Time each neighbour in each direction alone, then all forward hops during matmuls."""
    (axis,) = mesh.axis_names
    count, target = mesh.shape[axis], Target.of(mesh, ())
    if count == 1:
        return one_device("hops", on_gpus=target.on_gpus)
    size = _ON_CPU if target.on_cpus else TRANSFER
    aval = jax.ShapeDtypeStruct((size // 4,), jnp.float32)
    forward = [(i, i + 1) for i in range(count - 1)]
    pairs = {f"{a} -> {b}": (a, b) for a, b in [*forward, *((b, a) for a, b in forward)]}
    calls = {"nothing": exchange(mesh, axis, (), [aval])}
    for name, pair in pairs.items():
        at(f"the hop {name}")
        calls[name] = exchange(mesh, axis, [pair], [aval])
        jax.block_until_ready(calls[name]())
    at("hops in turn")
    seconds = timed(calls, scope.repeats)
    alone = {name: max(0.0, seconds[name] - seconds["nothing"]) for name in pairs}

    at("hops during compute")
    spec = PartitionSpec(axis)
    width, dtype = (128, jnp.float32) if target.on_cpus else (4096, jnp.bfloat16)
    sharding = NamedSharding(mesh, spec)
    send = jax.shard_map(
        lambda x: lax.ppermute(x, axis, forward),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    w = jnp.full((count, width, width), 0.01, dtype, device=sharding)
    x = jnp.full((count, size // 4), 0.01, jnp.float32, device=sharding)
    overlap = _overlap(send, w, x, scope.repeats)
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
        text = f"{_us(hop)} for {size / 2**20:.0f} MiB ({size / hop / 1e9:.3g} GB/s)"
    text += "".join(f"; {name}: {_us(each)}" for name, each in slow.items())
    advice = []
    if slow:
        advice.append("these links are slow: look at cables, `nvidia-smi topo -m`, and placement")
    if expected is not None and hop > FACTOR * expected:
        advice.append(
            "all hops are slow: look for NVLink or RDMA that is not used (NCCL_DEBUG=INFO)"
        )
    equal = "equal hops" if expected is None else f"{_us(expected)}, all equal"
    return judged("hops", text, equal, "; ".join(advice), slow=advice)


def _overlap(
    transfer: Callable[..., object], w: jax.Array, x: object, repeats: int
) -> dict[str, float]:
    """The seconds of matmuls of `w`, on the devices that have it, of a transfer of `x` ("hop"), and
    of both in one program.
    """

    def work(w: jax.Array) -> Any:
        return lax.fori_loop(0, 8, lambda _, y: jnp.tanh(y @ w), w)

    calls = {
        "compute": partial(jax.jit(work), w),
        "hop": partial(jax.jit(transfer), x),
        "both": partial(jax.jit(lambda w, x: (work(w), transfer(x))), w, x),
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
        f"{_us(_lost(seconds))} longer; {hidden:.0%} hidden",
        "CPU devices wait for transfers" if target.on_cpus else "at least 50% hidden",
        "transfers do not run during compute: take debug flags out of XLA_FLAGS",
        slow=not target.on_cpus and hidden < 0.5,
    )


def arrivals(scope: Scope, mesh: Mesh, note: str = "") -> Findings:
    """Send numbers to neighbours in both directions, and compare what arrives with them."""
    (axis,) = mesh.axis_names
    count, size = mesh.shape[axis], _ON_CPU // 4
    forward = [(i, i + 1) for i in range(count - 1)]
    numbers = np.arange(count * size, dtype=np.int32).reshape(count, size)
    sharding = NamedSharding(mesh, PartitionSpec(axis))
    sent = jax.make_array_from_callback(numbers.shape, sharding, numbers.__getitem__)

    def wrong(sent: jax.Array, pairs: list[tuple[int, int]]) -> Any:
        """How many numbers arrive as others on any device; a device without a source has zeros."""
        me = lax.axis_index(axis)
        source = sum((jnp.where(me == to, of + 1, 0) for of, to in pairs), 0)
        wanted = jnp.arange(size)[None] + (source - 1) * size
        found = lax.ppermute(sent, axis, pairs)
        return lax.psum(jnp.sum(found != jnp.where(source > 0, wanted, 0)), axis)

    bad = {}
    for pairs in (forward, [(b, a) for a, b in forward]):
        at(f"hops {pairs}")
        lost = jax.shard_map(
            partial(wrong, pairs=pairs),
            mesh=mesh,
            in_specs=PartitionSpec(axis),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        bad[str(pairs)] = int(jax.jit(lost)(sent))
    return Findings((judge_arrivals(f"hops{note}", bad),))


def judge_arrivals(item: str, bad: Mapping[str, int]) -> Line:
    """A line about the numbers that arrive wrong, by the pairs of devices."""
    wrong = [f"{pairs}: {count} other numbers arrive" for pairs, count in bad.items() if count]
    text = "; ".join(wrong) or "what was sent arrives; no times"
    return judged(item, text, "what was sent", "see the versions above", wrong=wrong)


def host_copies(scope: Scope, mesh: Mesh) -> Findings:
    """Time copies of residuals to the host and back, alone and during matmuls."""
    if Target.of(mesh, ()).on_cpus:
        return Findings((not_tried("host copies", "the memory of CPU devices is the host's"),))
    here = NamedSharding(Mesh(jax.local_devices()[:1], ("x",)), PartitionSpec())
    arrays = copied(here)
    at("copies to the host")
    w = jnp.full((8192, 8192), 0.01, jnp.bfloat16, device=here)
    seconds = _overlap(moved, w, arrays, scope.repeats)
    at("what the copies hold")
    same = are_moved(arrays, jax.jit(moved)(arrays))
    return Findings((judge_copies(seconds, sum(each.nbytes for each in arrays), same=same),))


def copied(here: NamedSharding) -> tuple[jax.Array, jax.Array]:
    """Two arrays of other numbers: one on the device, and one in the host's memory."""
    numbers = np.arange(_COPIED // 4, dtype=np.float32)
    there = here.with_memory_kind("pinned_host")
    return jax.device_put(numbers, here), jax.device_put(-numbers, there)


def moved(arrays: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The first array in the host's memory, and the second one on the device.

    Both are results of the program: XLA leaves out a copy to the host that comes back.
    """
    out, back = arrays
    return jax.device_put(out, jax.memory.Space.Host), jax.device_put(back, jax.memory.Space.Device)


def are_moved(arrays: tuple[jax.Array, jax.Array], found: tuple[jax.Array, jax.Array]) -> bool:
    """Whether both arrays have changed their memories, and not their numbers."""
    kinds = [[each.sharding.memory_kind for each in both] for both in (arrays, found)]
    same = all(np.array_equal(a, b) for a, b in zip(arrays, found, strict=True))
    return same and kinds[0] == kinds[1][::-1]


def judge_copies(seconds: Mapping[str, float], size: int, *, same: bool) -> Line:
    """A line about copies to the host and back."""
    item, rate = "host copies", size / seconds["hop"]
    text = f"{rate / 1e9:.3g} GB/s there and back; {_us(_lost(seconds))} longer during compute"
    expected = f"at least {_HOST_RATE / 1e9:.3g} GB/s"
    if same and rate > _ANY_LINK:
        return not_tried(item, f"{rate / 1e9:.3g} GB/s is no copy: the measurement is wrong")
    advice = "offload costs more than it saves here: use remat"
    if not same:
        text, advice = "other numbers arrive, or nothing moves", "do not use Memory(offload=)"
    return judged(item, text, expected, advice, slow=rate < _HOST_RATE, wrong=not same)
