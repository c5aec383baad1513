"""What runs the matmuls of a Llama layer in FP8 in the program of described H100s, what it
transposes, and the bytes that a layer keeps, with FP8 and without.

A layer of Llama 3 8B's shapes a stage, on two described H100s.  Nothing runs: there was no GPU, so
there are no times here.

    python -m benchmarks.fp8 -o benchmarks/results/fp8.txt
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import fp8_scaled_dot_general
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from benchmarks.beside_matmuls import SHAPES, TIME, WIDTH, layer, pretend_cudnn
from benchmarks.machine import describe
from benchmarks.output import Command, Result, write_all
from jaxpipe.inspect.hlo import Computation, Instruction, Module, kind_of, walk
from jaxpipe.inspect.programs import compile_and_read
from jaxpipe.jaxprs.equations import nbytes
from jaxpipe.table.effects import Place
from tests.gpu.programs import gpu_mesh, require_gpu_compiler

HISTORY = 1024
MIB = 2**20
CUBLAS: Mapping[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
OPTIONS: Mapping[str, Mapping[str, str | bool]] = {"default": {}, "without Triton": CUBLAS}
POOLS = (
    *(Place.X, Place.COTANGENT),
    *(Place.RESIDUAL_INPUT, Place.RESIDUAL_WEIGHT, Place.STASH),
)
_FP8 = ("f8e4m3fn", "f8e5m2")
_KINDS = {"lhs": "input", "rhs": "kernel", "grad": "gradient"}


class Matmul(Enum):
    """What runs a matmul."""

    CUBLAS_FP8 = "cuBLASLt FP8"
    FUSED_FP8 = "Triton fusion of FP8"
    OTHER = "other"


def in_fp8(x: Any, row: Any, name: str) -> Any:
    """The product with a weight, by flax's FP8 with scales of past steps."""
    scales = {f"{flax}_scale": row[f"{name}_{own}_scale"] for flax, own in _KINDS.items()}
    past = {f"{flax}_amax_history": row[f"{name}_{own}_past"] for flax, own in _KINDS.items()}
    found: Any = fp8_scaled_dot_general(
        *(x, row[name].astype(jnp.bfloat16), (((x.ndim - 1,), (0,)), ((), ()))),
        preferred_element_type=jnp.bfloat16,
        quantize_compute_type=jnp.bfloat16,
        **scales,
        **past,
    )
    return found


def shapes_of(shapes: Mapping[str, tuple[int, ...]], *, fp8: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's parameters."""
    found = dict(shapes)
    for name in [n for n, shape in shapes.items() if fp8 and len(shape) == 2]:
        found |= {f"{name}_{own}_scale": (1,) for own in _KINDS.values()}
        found |= {f"{name}_{own}_past": (HISTORY,) for own in _KINDS.values()}
    return found


def traced(
    name: str,
    *,
    fp8: bool,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    time: int = TIME,
    devices: int = 2,
    microbatches: int = 4,
    chunks: int = 1,
) -> Any:
    """The step of a schedule with a layer a stage, traced for described H100s."""
    schedule = jp.schedules.build(name, devices=devices, microbatches=microbatches, chunks=chunks)
    mesh = gpu_mesh((devices,), ("pipe",))
    model = jp.Model(
        lambda row, x: layer(x, row, *([in_fp8] if fp8 else []))[0],
        last=lambda _, x, microbatch: jnp.mean(jnp.square(x.astype(jnp.float32))),
        replaced={"_(scale|past)$": jp.Replaced.MAX} if fp8 else None,
    )
    pipe = jp.Pipeline(model, schedule, mesh)
    stages = {
        key: jax.ShapeDtypeStruct((schedule.num_stages, *dims), jnp.float32)
        for key, dims in shapes_of(shapes, fp8=fp8).items()
    }
    everywhere = NamedSharding(mesh, PartitionSpec())
    rows = (microbatches, time, shapes["norm"][0])
    x = jax.ShapeDtypeStruct(rows, jnp.bfloat16, sharding=everywhere)
    return pipe.trace(pipe.place({"stages": stages, "last": {}}), {"x": x})


def kept(step: Any, place: Place) -> int:
    """Bytes of a microbatch in a place."""
    (code,) = step.code.kinds
    return sum(map(nbytes, code.avals[place]))


def matmuls(module: Module) -> Counter[tuple[str, Matmul]]:
    """The matmuls in the code of blocks, by kind of action and what runs them; cuDNN's attention is
    not among them.
    """
    found: Counter[tuple[str, Matmul]] = Counter()
    for place in walk(module):
        for each in place.computation.instructions:
            for own in _of(module, place.computation, each):
                if kind := kind_of(each):
                    found[kind, own] += 1
    return found


def _of(module: Module, owner: Computation, each: Instruction) -> Iterator[Matmul]:
    """The matmuls of an instruction."""
    if each.opcode == "fusion":
        (name,) = each.called["calls"]
        inside = module.computations[name]
        for own in inside.instructions:
            yield from _of(module, inside, own)
    elif each.opcode == "dot":
        dtypes = [owner.by_name[operand].results[0].dtype for operand in each.operands]
        yield Matmul.FUSED_FP8 if {*dtypes} <= {*_FP8} else Matmul.OTHER
    elif "cublas" in each.target:
        yield Matmul.CUBLAS_FP8 if each.target.endswith("f8") else Matmul.OTHER


def transposes(module: Module) -> Counter[tuple[str, str]]:
    """The arrays of FP8 that are transposed by themselves in the code of blocks, by kind of action;
    a transpose in the fusion that casts to FP8 is not among them.
    """
    found: Counter[tuple[str, str]] = Counter()
    for place in walk(module):
        body = place.computation.instructions
        kinds = Counter(kind for each in body if (kind := kind_of(each)))
        for each in body:
            opcodes = module.opcodes(each)
            is_fp8 = any(array.dtype in _FP8 for array in each.results)
            if is_fp8 and "transpose" in opcodes and "convert" not in opcodes and kinds:
                found[max(kinds, key=kinds.__getitem__), str(each.results[0])] += 1
    return found


def compiled(step: Any, options: Mapping[str, str | bool]) -> Module:
    """A step that is compiled with these options."""
    return compile_and_read(step.function.lower(), options).module


def main() -> None:
    parser = Command(__doc__)
    parser.option("--schedules", ["1f1b", "zb_h1"], "NAME")
    parser.option("--pools", ["zb_h1", "zb_h2", "zbv"], "NAME")
    args = parser.parse_args()
    require_gpu_compiler(parser)
    pretend_cudnn()
    runs, turns = [], []
    for name, (what, options) in product(args.schedules, OPTIONS.items()):
        module = compiled(traced(name, fp8=True), options)
        found, turned = matmuls(module), transposes(module)
        for kind in sorted({kind for kind, _ in found}):
            runs.append((name, what, kind, *(str(found[kind, own]) for own in Matmul)))
        turns += [(name, what, k, own, str(n)) for (k, own), n in sorted(turned.items())]
    pools = [_pools(name, fp8=fp8) for name, fp8 in product(args.pools, (False, True))]
    write_all(_results(runs, turns, pools), args.output)


def _pools(name: str, *, fp8: bool) -> tuple[str, ...]:
    """The slots of each pool, their MiB, and the MiB of all."""
    step = traced(name, fp8=fp8, devices=8, microbatches=16, chunks=1 + (name == "zbv"))
    slots = [(step.program.pools.get(place, 0), kept(step, place) / MIB) for place in POOLS]
    total = sum(count * size for count, size in slots)
    each = [f"{count} x {size:.1f}" for count, size in slots]
    return name, "FP8" if fp8 else "bfloat16", *each, f"{total:.0f}"


def _results(runs: Sequence[Any], turns: Sequence[Any], pools: Sequence[Any]) -> list[Result]:
    what = f"a layer of Llama 3 8B's shapes, a microbatch of {TIME} x {WIDTH}"
    program = ["schedule", "options of XLA", "block"]
    columns = [*program, *(own.value for own in Matmul)]
    slots = "schedule  matmuls  x  cotangent  I alone  W  stash of I  MiB"
    return [
        Result(f"Matmuls in the code of blocks, {what}", describe(), columns, runs, NOTES[:1]),
        Result(
            "FP8 arrays that they transpose", (), [*program, "array", "number"], turns, NOTES[1:4]
        ),
        Result("Slots and their MiB, 8 devices, 16 microbatches", (), slots, pools, NOTES[4:]),
    ]


NOTES = (
    "Without Triton: xla_gpu_enable_triton_gemm=false.  A block has its code once for each slot.",
    "Not those in the fusion that casts an array.  Weights are cast and transposed once a step, by",
    "no block.  I casts gradients for its own products and leaves them for W, which transposes",
    "them: 168 MiB a microbatch.",
    "Of a layer a stage (zbv: two).  I alone, W: residuals that I alone reads, and that W reads",
    "too.  Where there is a B, they wait for it.  In FP8 the stash is gradients of one byte,",
    "4 + 4 + 3 x 16 + 2 x 56; W makes the inputs of all products again.  In bfloat16 W reads the",
    "stage's cotangent, in FP8 I alone.",
)


if __name__ == "__main__":
    main()
