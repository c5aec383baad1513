"""Bytes that the kernels of a GPU program move beside matmuls and attention, by block, with the
form of blocks that GPUs run and with scans and rows instead.

Llama 3 8B's shapes on 8 described H100s, and a mixture of experts on 64: nothing runs.  On a real
H100 the kernels beside matmuls take the time of these bytes at 2.3 to 2.7 TB/s.

    python -m benchmarks.beside_matmuls -o benchmarks/results/beside_matmuls.txt
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from statistics import fmean
from time import process_time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from benchmarks import moe
from benchmarks.gpu_programs import Remat
from benchmarks.llama import TENSOR, layer_again
from benchmarks.machine import describe
from benchmarks.output import Command, Result, Row, told, write_all
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


def is_matmul(module: Module, each: Instruction) -> bool:
    """Whether a kernel is a matmul or attention, of XLA or of a library."""
    text = each.attributes.lower()
    return "dot" in module.opcodes(each) or any(word in text for word in _LIBRARIES)


def kernel_bytes(module: Module, owner: Computation, each: Instruction) -> int:
    """What a kernel beside matmuls reads and writes; 0 of a matmul, attention or a collective."""
    if each.opcode in _FREE or each.opcode.startswith(_COLLECTIVES):
        return 0
    if is_matmul(module, each):
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
            matmuls[key] += trips * is_matmul(module, each)
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


def fused(q: Any, k: Any, v: Any) -> Any:
    """cuDNN's causal attention."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def layer(
    x: Any,
    row: Any,
    product: Callable[[Any, Any, str], Any] = plain,
    attention: Callable[[Any, Any, Any], Any] = fused,
) -> tuple[Any, None]:
    """A decoder's layer in bfloat16, without positions."""
    rows, time, _ = x.shape
    u = _normed(row["norm"].astype(jnp.bfloat16), x)
    q, k, v = (product(u, row, n).reshape(rows, time, -1, HEAD) for n in "qkv")
    mixed = attention(q, k, v)
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


@dataclass(frozen=True)
class Variant:
    """A model, a mesh and options of a program."""

    text: str = ""
    remat: Remat = Remat.NOTHING  # of each layer
    memory: jp.Memory = field(default_factory=jp.Memory)
    tensor: int = 1  # devices that share a layer
    options: Mapping[str, Any] = field(default_factory=dict)  # of XLA

    def layer(self, x: Any, row: Any) -> tuple[Any, None]:
        """A layer, of which the backward computes again what this says."""
        attention = fused
        if self.tensor > 1:  # the partitioner cannot split the kernel
            heads = PartitionSpec(None, None, TENSOR, None)
            attention = jax.shard_map(
                fused, in_specs=heads, out_specs=heads, axis_names={TENSOR}, check_vma=False
            )
        own = partial(layer, attention=attention)
        return layer_again(own, self.remat.of_layer)(x, row)

    def stage(self, stack: Any, x: Any) -> Any:
        """Layers in a scan."""
        return jax.lax.scan(self.layer, x, stack)[0]

    def listed(self, rows: Any, x: Any) -> Any:
        """Layers one after the other."""
        for row in rows:
            x, _ = self.layer(x, row)
        return x

    @property
    def sharding(self) -> jp.Sharding:
        """Columns and rows of weights split over the tensor axis (Shoeybi et al. 2019,
        section 3).
        """
        if self.tensor == 1:
            return jp.Sharding()
        column, row = PartitionSpec(None, None, TENSOR), PartitionSpec(None, TENSOR)
        own = dict.fromkeys(("q", "k", "v", "gate", "up"), column)
        own |= dict.fromkeys(("o", "down"), row)
        return jp.Sharding(specs={"stages": own})


CUBLAS = {"xla_gpu_enable_triton_gemm": False}
KEEP_INPUT = Variant("layers keep their input", remat=Remat.LAYER)
VARIANTS = (
    Variant("layers keep matmuls", remat=Remat.DOTS),
    KEEP_INPUT,
    Variant("stages keep their input", memory=jp.Memory(remat="full")),
    Variant("offload", memory=jp.Memory(offload="residuals")),
    Variant("tensor 2", tensor=2),
    Variant("cuBLAS", options=CUBLAS),
)


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


def built(
    name: str, way: Written, layers: int, variant: Variant = Variant()
) -> tuple[jp.Pipeline, Any, Any]:
    """The pipeline of a schedule in a form, its parameters and a batch, as shapes."""
    schedule = jp.schedules.build(name, devices=DEVICES, microbatches=MICROBATCHES)
    used = 2 if variant.tensor > 1 else 1
    mesh = gpu_mesh((DEVICES, variant.tensor)[:used], ("pipe", TENSOR)[:used])
    stages = schedule.num_stages
    model = jp.Model(variant.listed if way.listed else variant.stage, first=_first, last=_last)
    pipe = jp.Pipeline(
        model,
        schedule,
        mesh,
        sharding=variant.sharding,
        memory=variant.memory,
        executor=SpmdExecutor(form=way.form),
    )
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
    return pipe, pipe.place(params), {"tokens": row, "targets": row}


def line(name: str, way: Written, layers: int, variant: Variant = Variant()) -> Row:
    """A schedule's program in a form."""
    pipe, params, batch = built(name, way, layers, variant)
    chunks = pipe.schedule.num_stages // DEVICES
    names = name, variant.text, way.text
    return counted(pipe.lower(params, batch), names, chunks, variant.options)


def trained(name: str, way: Written, layers: int, variant: Variant = Variant()) -> Row:
    """The memory of a training step, which returns parameters and moments in their place."""
    pipe, params, batch = built(name, way, layers, variant)
    optimizer = optax.adam(1e-4)

    def step(params: Any, moments: Any, batch: Any) -> tuple[Any, Any]:
        _, grads = pipe.value_and_grad(params, batch)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments

    lowered = pipe.jit(step, donate_argnums=(0, 1)).lower(
        params, pipe.init(optimizer, params), batch
    )
    program = compile_and_read(lowered)
    temp = program.memory.temp_size_in_bytes / GIB
    jax.clear_caches()
    return name, variant.text, way.text, f"{temp:.1f}", f"{program.total_bytes / GIB:.1f}"


def experts(name: str, way: Written) -> Row:
    """The program of a mixture of experts, whose devices have their own experts, in a form."""
    own = ("Ettt", "ttt", *["tttt"] * 5, "L")  # all but the last of 4 layers at most
    case = replace(moe.CASES["67b"], schedule=name, layout="|".join(own), remat=moe.Remat.NONE)
    case = replace(case, microbatches=MICROBATCHES, attention=moe.Attention.CUDNN)
    pipe, params, batch = case.arguments(gpu_mesh, SpmdExecutor(form=way.form))
    return counted(pipe.lower(params, batch), (name, "67B-A2B, expert 8", way.text), 1, {})


def counted(
    lowered: jax.stages.Lowered, names: Row, chunks: int, options: Mapping[str, Any]
) -> Row:
    """A line of a program of so many stages a device."""
    begin = process_time()
    program = compile_and_read(lowered, dict(options))
    seconds = process_time() - begin
    found = of_a_microbatch(program.module, chunks)
    kinds = [f"{found[kind] / GIB:.1f}" if kind in found else "" for kind in "FBIW"]
    temp = program.memory.temp_size_in_bytes / GIB
    predicates = program.predicates
    on_host = sum(not each.in_graph for each in predicates)
    jax.clear_caches()
    return (
        *names,
        *kinds,
        f"{sum(found.values()) / GIB:.1f}",
        f"{temp:.1f}",
        f"{on_host}/{len(predicates)}",
        f"{seconds:.0f}",
    )


def main() -> None:
    parser = Command(__doc__)
    parser.option("--schedules", ["1f1b", "interleaved_1f1b", "zb_h1", "zbv"], "NAME")
    parser.option("--varied", ["1f1b", "zb_h1"], "NAME", "those with each option and with experts")
    parser.option("--layers", 32, "L")
    args = parser.parse_args()
    require_gpu_compiler(parser)
    pretend_cudnn()
    machine, both = describe(), WAYS[:2]
    rows = told(line(name, way, args.layers) for name, way in product(args.schedules, WAYS))
    rows += told(
        line(name, way, args.layers, variant)
        for name, variant, way in product(args.varied, VARIANTS, both)
    )
    rows += told(experts(name, way) for name, way in product(args.varied, both))
    sizes = f"{args.layers} layers of Llama 3 8B's shapes, 16 microbatches of 4096 tokens"
    title = (
        f"GiB that kernels move beside matmuls and attention, {sizes}, {DEVICES} described H100s"
    )
    columns = "schedule  with  form  F  B  I  W  a microbatch  temp GiB  on host  CPU s to compile"
    bytes_moved = Result(title, machine, columns, rows, NOTES)
    steps = told(trained(name, way, args.layers) for name, way in product(args.schedules, WAYS))
    steps += told(
        trained(name, way, args.layers, KEEP_INPUT) for name, way in product(args.varied, WAYS)
    )
    whole = Result(
        TRAINED, machine, "schedule  with  form  temp GiB  total GiB", steps, TRAINED_NOTES
    )
    write_all([bytes_moved, whole], args.output)


TRAINED = "Memory of a whole training step of the same model with Adam in float32"
TRAINED_NOTES = (
    "Parameters and moments are donated.  Temp has the gradients, total also what is donated.",
)
NOTES = (
    "A microbatch: the sum over kinds of actions, for all stages of a device, without the ends.",
    "Scans and rows: layers in a scan, slots are rows of one buffer, functions are kept.",
    "Apart: what Pipeline emits for GPUs by itself, with layers and slots apart.  The gradients of",
    "stacks are stacked after the ticks, which is another copy of them; those of leaves are not.",
    "On host: predicates that are no nodes of CUDA graphs, of all.",
    "Tensor 2: of one of two devices.  67B-A2B: 26 layers with experts on 8 x 8 devices, 8192",
    "tokens a microbatch.",
)


if __name__ == "__main__":
    main()
