"""Bytes that the kernels of a GPU program move beside matmuls and attention, by block, with the
form of blocks that GPUs run and with scans and rows instead.

Llama 3 8B's shapes on 8 described H100s: nothing runs.  On a real H100 the kernels beside matmuls
take the time of these bytes at 2.3 to 2.7 TB/s.

    python -m benchmarks.beside_matmuls -o benchmarks/results/beside_matmuls.txt
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from statistics import fmean
from time import process_time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from benchmarks.machine import describe
from benchmarks.output import Command, Result
from jaxpipe.inspect.hlo import Computation, Instruction, Module, kind_of, walk
from jaxpipe.inspect.programs import compile_and_read
from jaxpipe.lowering.target import GPU_FORM, Form
from jaxpipe.spmd.emit import SpmdExecutor
from tests.gpu.programs import gpu_mesh, require_gpu_compiler

_FREE = frozenset(
    {
        *("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all"),
        *("while", "conditional", "call", "optimization-barrier", "partition-id", "replica-id"),
        *("async-done", "async-update"),
    }
)
_COLLECTIVES = ("collective", "all-", "reduce-scatter", "ragged")
_LIBRARIES = ("gemm", "matmul", "fmha", "cudnn")
GIB = 2**30


def kernel_bytes(module: Module, owner: Computation, each: Instruction) -> int:
    """What a kernel beside matmuls reads and writes; 0 of a matmul, attention or a collective."""
    text = each.attributes.lower()
    if each.opcode in _FREE or each.opcode.startswith(_COLLECTIVES):
        return 0
    if "dot" in module.opcodes(each) or any(word in text for word in _LIBRARIES):
        return 0
    if each.target == "AllocateBuffer":
        return 0
    if each.opcode != "fusion":
        return each.nbytes + sum(owner.by_name[name].nbytes for name in each.operands)
    (name,) = each.called["calls"]
    return _fusion_bytes(module.computations[name])


def _fusion_bytes(body: Computation) -> int:
    """Of a parameter that is read by slices, the slices; of an update in place, what it writes."""
    readers = defaultdict(list)
    for each in body.instructions:
        for name in each.operands if each.opcode not in ("parameter", "constant") else ():
            readers[name].append(each)

    def read(name: str) -> float:
        total = 0.0
        for each in readers[name]:
            first = each.operands[0] == name
            if each.opcode in ("dynamic-slice", "gather", "slice") and first:
                total += each.nbytes
            elif each.opcode == "bitcast":
                total += read(each.name)
            elif each.opcode != "dynamic-update-slice" or not first:
                return math.inf
        return total

    def behind(each: Instruction) -> Instruction:
        is_view = each.opcode == "bitcast" and each.operands[0] in body.by_name
        return behind(body.by_name[each.operands[0]]) if is_view else each

    def written(each: Instruction) -> int:
        each = behind(each)
        is_update = each.opcode == "dynamic-update-slice"
        return (body.by_name[each.operands[1]] if is_update else each).nbytes

    root = body.root
    roots = [body.by_name[n] for n in root.operands] if root.opcode == "tuple" else [root]
    reads = sum(min(p.nbytes, read(p.name)) for p in body.instructions if p.opcode == "parameter")
    return int(reads) + sum(map(written, roots))


def blocks(module: Module) -> Iterator[tuple[str, int]]:
    """(kind of action, bytes beside matmuls) of each copy of a block's code that has a matmul."""
    found: dict[str, dict[str | None, int]] = defaultdict(lambda: defaultdict(int))
    matmuls: dict[str, int] = defaultdict(int)
    for place in walk(module):
        guards = [i for i, frame in enumerate(place.frames) if frame.trips is None]
        if not guards:
            continue
        key = place.frames[guards[-1]].instruction.name
        trips = math.prod(frame.trips or 1 for frame in place.frames[guards[0] :])
        for each in place.computation.instructions:
            found[key][kind_of(each)] += trips * kernel_bytes(module, place.computation, each)
            matmuls[key] += trips * ("dot" in module.opcodes(each))
    for key, kinds in found.items():
        if matmuls[key] > 4:  # the head has fewer
            yield str(max(kinds, key=kinds.__getitem__)), sum(kinds.values())


def of_a_microbatch(module: Module, stages: int) -> Mapping[str, float]:
    """The mean over a kind's copies, for all stages of a device."""
    copies: dict[str, list[int]] = defaultdict(list)
    for kind, size in blocks(module):
        copies[kind].append(size)
    return {kind: stages * fmean(sizes) for kind, sizes in sorted(copies.items())}


WIDTH, HIDDEN, HEADS, KV_HEADS, TIME, VOCAB = 4096, 14336, 32, 8, 4096, 32000
DEVICES, MICROBATCHES = 8, 16
HEAD = WIDTH // HEADS
SHAPES = {
    **{"norm": (WIDTH,), "mlp_norm": (WIDTH,)},
    **{"q": (WIDTH, WIDTH), "k": (WIDTH, KV_HEADS * HEAD), "v": (WIDTH, KV_HEADS * HEAD)},
    **{"o": (WIDTH, WIDTH), "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN)},
    "down": (HIDDEN, WIDTH),
}


def _normed(scale: Any, x: Any) -> Any:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale.astype(x.dtype)


def plain(x: Any, row: Any, name: str) -> Any:
    """The product with a weight, in bfloat16."""
    return x @ row[name].astype(jnp.bfloat16)


def layer(x: Any, row: Any, product: Callable[[Any, Any, str], Any] = plain) -> tuple[Any, None]:
    """A decoder's layer in bfloat16, without positions."""
    rows, time, _ = x.shape
    u = _normed(row["norm"].astype(jnp.bfloat16), x)
    q, k, v = (product(u, row, n).reshape(rows, time, -1, HEAD) for n in "qkv")
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    x = x + product(mixed.reshape(x.shape), row, "o")
    u = _normed(row["mlp_norm"].astype(jnp.bfloat16), x)
    gated = jax.nn.silu(product(u, row, "gate")) * product(u, row, "up")
    return x + product(gated, row, "down"), None


def pretend_cudnn() -> None:
    """Let JAX lower cuDNN's attention: it asks the machine's GPU, and the described one is an
    H100.
    """
    cudnn.check_cudnn_version = lambda: 91000
    cudnn.check_compute_capability = lambda _: True


def _stage(stack: Any, x: Any) -> Any:
    return jax.lax.scan(layer, x, stack)[0]


def _listed(rows: Any, x: Any) -> Any:
    for row in rows:
        x, _ = layer(x, row)
    return x


def _first(params: Any, microbatch: Any) -> Any:
    return params.astype(jnp.bfloat16)[microbatch["tokens"]]


def _last(params: Any, x: Any, microbatch: Any) -> Any:
    logits = (x @ params.astype(jnp.bfloat16)).astype(jnp.float32)
    own = jnp.take_along_axis(logits, microbatch["targets"][..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - own)


class Written(NamedTuple):
    """How the user writes the layers of a stage, and the form of their blocks."""

    text: str
    form: Form
    listed: bool = False  # a leaf for each layer, and not stacks


WAYS = (
    Written("scans and rows", Form()),
    Written("apart", GPU_FORM),
    Written("apart, a leaf a layer", GPU_FORM, listed=True),
)


def line(name: str, way: Written, layers: int) -> tuple[str, ...]:
    """A schedule's program in a form."""
    schedule = jp.schedules.build(name, devices=DEVICES, microbatches=MICROBATCHES)
    mesh, stages = gpu_mesh((DEVICES,), ("pipe",)), schedule.num_stages
    model = jp.Model(_listed if way.listed else _stage, first=_first, last=_last)
    pipe = jp.Pipeline(model, schedule, mesh, executor=SpmdExecutor(form=way.form))
    count = layers // stages
    each = (stages,) if way.listed else (stages, count)
    weights = {
        name: jax.ShapeDtypeStruct((*each, *dims), jnp.float32) for name, dims in SHAPES.items()
    }
    params = {
        "first": jax.ShapeDtypeStruct((VOCAB, WIDTH), jnp.float32),
        "last": jax.ShapeDtypeStruct((WIDTH, VOCAB), jnp.float32),
        "stages": [weights] * count if way.listed else weights,
    }
    everywhere = NamedSharding(mesh, PartitionSpec())
    row = jax.ShapeDtypeStruct((MICROBATCHES, TIME), jnp.int32, sharding=everywhere)
    lowered = pipe.lower(pipe.place(params), {"tokens": row, "targets": row})
    begin = process_time()
    program = compile_and_read(lowered)
    seconds = process_time() - begin
    found = of_a_microbatch(program.module, stages // DEVICES)
    kinds = [f"{found[kind] / GIB:.1f}" if kind in found else "" for kind in "FBIW"]
    temp = program.memory.temp_size_in_bytes / GIB
    return (
        name,
        way.text,
        *kinds,
        f"{sum(found.values()) / GIB:.1f}",
        f"{temp:.1f}",
        f"{seconds:.0f}",
    )


def main() -> None:
    parser = Command(__doc__)
    parser.option("--schedules", ["1f1b", "interleaved_1f1b", "zb_h1", "zbv"], "NAME")
    parser.option("--layers", 32, "L")
    args = parser.parse_args()
    require_gpu_compiler(parser)
    pretend_cudnn()
    rows = []
    for name, way in product(args.schedules, WAYS):
        rows.append(line(name, way, args.layers))
        jax.clear_caches()
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    sizes = f"{args.layers} layers of Llama 3 8B's shapes, 16 microbatches of 4096 tokens"
    title = (
        f"GiB that kernels move beside matmuls and attention, {sizes}, {DEVICES} described H100s"
    )
    columns = "schedule  form  F  B  I  W  a microbatch  temp GiB  CPU s to compile"
    Result(title, describe(), columns, rows, NOTES).write(args.output)


NOTES = (
    "A microbatch: the sum over kinds of actions, for all stages of a device, without the ends.",
    "Scans and rows: layers in a scan, slots are rows of one buffer, functions are kept.",
    "Apart: what Pipeline emits for GPUs by itself, with layers and slots apart.  The gradients of",
    "stacks are stacked after the ticks, which is another copy of them; those of leaves are not.",
)


if __name__ == "__main__":
    main()
