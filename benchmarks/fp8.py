"""What runs the matmuls of a Llama layer in FP8 in the program of described H100s, and the bytes
that a layer keeps, with FP8 and without.

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

DEVICES, MICROBATCHES, HISTORY = 2, 4, 1024
MIB = 2**20
CUBLAS: Mapping[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
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
    name: str, *, fp8: bool, shapes: Mapping[str, tuple[int, ...]] = SHAPES, time: int = TIME
) -> Any:
    """The step of a schedule with a layer a stage, traced for described H100s."""
    schedule = jp.schedules.build(name, devices=DEVICES, microbatches=MICROBATCHES)
    mesh = gpu_mesh((DEVICES,), ("pipe",))
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
    rows = (MICROBATCHES, time, shapes["norm"][0])
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


def counted(step: Any, options: Mapping[str, str | bool]) -> Counter[tuple[str, Matmul]]:
    """Those of a step that is compiled with these options."""
    return matmuls(compile_and_read(step.function.lower(), options).module)


def main() -> None:
    parser = Command(__doc__)
    parser.option("--schedules", ["1f1b", "zb_h1"], "NAME")
    args = parser.parse_args()
    require_gpu_compiler(parser)
    pretend_cudnn()
    runs, sizes = [], []
    for name, fp8 in product(args.schedules, (False, True)):
        step = traced(name, fp8=fp8)
        places = (Place.RESIDUAL_INPUT, Place.RESIDUAL_WEIGHT, Place.STASH)
        own = [kept(step, place) / MIB for place in places]
        if name == args.schedules[-1]:
            waits = f"{own[0] + own[1]:.1f}", f"{own[1] + own[2]:.1f}"
            sizes.append(("FP8" if fp8 else "bfloat16", *(f"{n:.1f}" for n in own), *waits))
        if fp8:
            for options, what in (({}, "default"), (CUBLAS, "without Triton")):
                found = counted(step, options)
                kinds = sorted({kind for kind, _ in found})
                each = [
                    (name, what, kind, *(str(found[kind, own]) for own in Matmul)) for kind in kinds
                ]
                runs += each
    write_all(_results(runs, sizes), args.output)


def _results(runs: Sequence[Any], sizes: Sequence[Any]) -> list[Result]:
    what = f"a layer of Llama 3 8B's shapes, a microbatch of {TIME} x {WIDTH}"
    columns = ["schedule", "options of XLA", "block", *(own.value for own in Matmul)]
    bytes_of = "matmuls  I alone  W  stash of I  between F and I  between I and W"
    return [
        Result(f"Matmuls in the code of blocks, {what}", describe(), columns, runs, NOTES[:1]),
        Result(f"MiB in slots of {what}", (), bytes_of, sizes, NOTES[1:]),
    ]


NOTES = (
    "Without Triton: xla_gpu_enable_triton_gemm=false.  A block has its code once for each slot.",
    "Residuals that I alone reads, those that W reads too, and what I leaves for W.",
    "1F1B's B frees all residuals, ZB-H1's I the first.  The stage's input and cotangent have",
    "slots of their own and are not counted.  Between I and W in FP8: the input of down (56) and",
    "gradients (4 + 4 + 3 x 16 + 2 x 56) of one byte; of attention's output and x after it (64)",
    "W makes the other inputs again.",
)


if __name__ == "__main__":
    main()
