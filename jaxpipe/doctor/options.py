"""Check that XLA takes the options of a pipeline's program, and that they have an effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from ..inspect.gpu_program import compile_and_read
from ..lowering.target import Target
from ..spmd.block import while_once
from ..spmd.compiler_options import Options, options_for
from .findings import Found, Line, Scope, at, judged, not_tried

TICKS = 64


def predicated(kind: str) -> Any:
    """A loop of TICKS small blocks: under predicates where `kind` is "while", else without them."""

    def block(x: Any) -> Any:
        return jnp.tanh(x @ x)

    def tick(x: Any, flag: Any) -> tuple[Any, None]:
        return (while_once(flag > 0, block, x)[1] if kind == "while" else block(x)), None

    return lambda x, flags: lax.scan(tick, x, flags)[0]


def arguments() -> tuple[Any, Any]:
    """The arguments of `predicated`, with all flags set."""
    return jnp.full((64, 64), 0.01, jnp.float32), jnp.ones(TICKS, jnp.int32)


def options(scope: Scope, mesh: Mesh) -> Found:
    """Compile a small program with the options."""
    wanted = options_for(Target.of(mesh, ()))
    if not wanted:
        why = f"pipelines want none on {mesh.devices.flat[0].platform}"
        return Found(
            (not_tried("XLA options: accepted", why), not_tried("XLA options: effective", why))
        )
    at("compiling with each option")
    refused = {name: reason for name in wanted if (reason := _refused({name: wanted[name]}))}
    return Found((judge_accepted(wanted, refused), _effective(wanted, refused)))


def _lowered() -> Any:
    return jax.jit(predicated("while")).lower(*arguments())


def _refused(options: Options) -> str:
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
        f"{len(wanted) - len(refused)} of {len(wanted)}"
        + "".join(f"; {name}: {reason}" for name, reason in refused.items()),
        f"{len(wanted)} of {len(wanted)}",
        "install a version of jaxlib that jaxpipe was run with",
        wrong=refused,
    )


def _effective(wanted: Options, refused: Mapping[str, str]) -> Line:
    taken = {name: value for name, value in wanted.items() if name not in refused}
    try:
        found = compile_and_read(_lowered(), taken).predicates
    except ValueError as error:
        return not_tried("XLA options: effective", f"XLA's thunks cannot be read: {error}")
    return judge_effective([each.in_graph for each in found])


def judge_effective(in_graph: list[bool]) -> Line:
    """A line about predicates that are nodes of CUDA graphs."""
    return judged(
        "XLA options: effective",
        f"{sum(in_graph)} of {len(in_graph)} predicates in CUDA graphs",
        "all of them",
        "the driver or the toolkit is too old for loops in graphs (CUDA 12.3)",
        slow=not (in_graph and all(in_graph)),
    )
