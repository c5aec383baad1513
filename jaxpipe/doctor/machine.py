"""Check the installed versions for known faults, and XLA for the options of a program."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from ..inspect.programs import compile_and_read
from ..known_faults import TESTED, Effect, Fault, faults_for, installed_version, is_in
from ..lowering.target import Target
from ..spmd.block import while_once
from ..spmd.xla import Options, features_of, options_for
from ..table.effects import Offload
from .run import Findings, Line, Scope, Verdict, at, judged, not_tried

_JAX_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_PACKAGES = {
    "jax": ("jax",),
    "jaxlib": ("jaxlib",),
    "plugin": (*_JAX_PLUGINS, "libtpu"),
    "CUDA": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
    "cuDNN": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "NCCL": ("nccl",),
}
TICKS = 64


def installed() -> dict[str, str]:
    """Name -> version of each installed package."""
    versions = {name: _first(packages) for name, packages in _PACKAGES.items()}
    numbers = {"python": sys.version.split()[0], **versions, "driver": _driver()}
    return {name: number for name, number in numbers.items() if number}


def _first(packages: tuple[str, ...]) -> str | None:
    """The version of the first of these packages that is installed."""
    return next(filter(None, map(installed_version, packages)), None)


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
    faults = faults_for(target.platform, features_of(target, mesh, Offload.RESIDUALS))
    return Findings((judge_versions(installed(), target.platform), *map(line_of, faults)))


def judge_versions(numbers: dict[str, str], platform: str) -> Line:
    """A line that says whether these versions agree and were run with jaxpipe."""
    wrong = [
        f"{name} {numbers[name]} was never run with jaxpipe: install {name}{range_}"
        for name, range_ in TESTED.items()
        if name in numbers and not is_in(numbers[name], range_)
    ]
    plugin = _first(_JAX_PLUGINS)
    if (
        platform == "gpu"
        and plugin is not None
        and numbers.get("plugin", plugin) != numbers["jaxlib"]
    ):
        wrong.append(
            f"the plugin has another version than jaxlib {numbers['jaxlib']}: install both"
        )
    text, expected = (", ".join(map(" ".join, each.items())) for each in (numbers, TESTED))
    return judged("versions", text, expected, "; ".join(wrong), wrong=wrong)


def line_of(fault: Fault) -> Line:
    """A known fault as a line."""
    verdicts = {Effect.SLOW: Verdict.SLOW, Effect.AVOIDED: Verdict.OK}
    return Line(
        f"known fault: {fault.feature.value}",
        verdicts.get(fault.effect, Verdict.WRONG),
        f"{fault.package} {installed_version(fault.package)}: {fault.what} ({fault.thread})",
        f"none of {fault.versions}",
        fault.workaround,
    )


def loop_of_blocks(*, predicated: bool) -> Any:
    """A loop of TICKS small blocks, under predicates or without them; of `loop_inputs`."""

    def block(x: Any) -> Any:
        return jnp.tanh(x @ x)

    def tick(x: Any, flag: Any) -> tuple[Any, None]:
        return (while_once(flag > 0, block, x)[1] if predicated else block(x)), None

    return lambda x, flags: lax.scan(tick, x, flags)[0]


def loop_inputs() -> tuple[Any, Any]:
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
    accepted_by_xla = {name: value for name, value in wanted.items() if name not in refused}
    try:
        predicates = compile_and_read(_lowered(), accepted_by_xla).predicates
        line = judge_effective([each.in_graph for each in predicates])
    except ValueError as error:
        line = not_tried(effective, f"XLA's thunks cannot be read: {error}")
    return Findings((judge_accepted(wanted, refused), line))


def _lowered() -> Any:
    return jax.jit(loop_of_blocks(predicated=True)).lower(*loop_inputs())


def refusal(options: Options) -> str:
    """XLA's reason not to compile with the options; empty where it compiles."""
    try:
        _lowered().compile(compiler_options=options)
    except Exception as error:  # XLA's errors differ between versions
        return str(error).splitlines()[0][:200]
    return ""


def judge_accepted(wanted: Mapping[str, Any], refused: Mapping[str, str]) -> Line:
    """A line about options that XLA does not take."""
    return judged(
        "XLA options: accepted",
        "; ".join(
            [
                f"{len(wanted) - len(refused)} of {len(wanted)}",
                *(f"{name}: {reason}" for name, reason in refused.items()),
            ]
        ),
        f"{len(wanted)} of {len(wanted)}",
        "install a version of jaxlib that jaxpipe was run with",
        wrong=refused,
    )


def judge_effective(in_graph: list[bool]) -> Line:
    """A line about predicates that are nodes of CUDA graphs."""
    return judged(
        "XLA options: effective",
        f"{sum(in_graph)} of {len(in_graph)} predicates in CUDA graphs",
        "all of them",
        "the driver or the toolkit is too old for loops in graphs (CUDA 12.3)",
        slow=not (in_graph and all(in_graph)),
    )
