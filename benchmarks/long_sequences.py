"""Slices of sequences against whole ones: memory of a model of Llama 3 8B's shapes on described
H100s, and the step that a roofline predicts.

    JAX_PLATFORMS=cpu python -m benchmarks.long_sequences -o benchmarks/results/long_sequences.txt

Nothing runs on a device: XLA compiles the step for GPUs that are not there, and says how much
memory it takes.  All steps of a context have the same tokens.  Sources of published figures:

    Seq1F1B     Sun et al. 2024 (arXiv 2406.03488)
    SlimPipe    Li et al. 2025 (arXiv 2504.14519)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import jaxpipe as jp
from benchmarks.blockwise import attend
from benchmarks.llama import (
    TENSOR,
    Shape,
    _cast,
    _norm,
    _swiglu,
    batch,
    layered,
    layered_specs,
    parameters,
)
from benchmarks.machine import describe
from benchmarks.output import Command, Result, told, write_all
from jaxpipe.model.arguments import under_policies
from tests.gpu.programs import gpu_mesh, require_gpu_compiler

GIB, ROOM = 2**30, 80e9  # bytes of an H100
PEAK, SHARE = 989e12, 0.5  # of an H100 in bfloat16, and the share that matmuls reach: assumed
NVLINK = 300e9  # bytes a second of a GPU, each way: assumed
LLAMA_8B = Shape(width=4096, heads=32, hidden=14336, layers=32)
LOSS_TOKENS = 512  # whose logits exist at a time
LAYERED = "Et*{}L"


@dataclass(frozen=True)
class Case:
    """A mesh of `pipe` x `tensor` devices, sequences of `context` tokens, and how they are cut."""

    context: int
    sequences: int  # of a step
    slices: int = 1
    tensor: int = 1
    schedule: str = "1f1b"
    remat: bool = True  # each layer keeps its input alone (Chen et al. 2016)
    pipe: int = 8
    shape: Shape = LLAMA_8B
    block: int = 1024  # queries, and keys, whose scores exist at a time

    def table(self) -> jp.Schedule:
        """The schedule's table."""
        shape = {"devices": self.pipe, "microbatches": self.sequences * self.slices}
        return jp.schedules.build(self.schedule, slices=self.slices, **shape)

    def step(self) -> tuple[jp.Pipeline, Any, Any]:
        """The pipeline, its parameters and a batch, as shapes."""
        mesh = gpu_mesh((self.pipe, self.tensor), ("pipe", TENSOR))
        layers = LAYERED.format(self.shape.layers)
        functions = {"E": self._first, "t": self._layer, "L": self._last}
        model = jp.Model(functions, layers=layers, time=("tokens", "targets"))
        if self.remat:
            model = under_policies(model, {"t": "nothing_saveable"})
        table = self.table()
        layout = even(self.shape.layers, table.num_stages)
        sharding = jp.Sharding(specs=layered_specs() if self.tensor > 1 else None)
        pipe = jp.Pipeline(model, table, mesh, layout=layout, sharding=sharding)
        params = pipe.place(jax.eval_shape(layered, parameters(self.shape, 1)))
        shape = replace(self.shape, rows=1, time=self.context)
        everywhere = NamedSharding(mesh, PartitionSpec())
        return pipe, params, batch(shape, self.sequences, everywhere)

    def _first(self, params: Any, microbatch: Any, *, ctx: jp.Context) -> Any:
        """x, with the position of its first token."""
        at = jnp.zeros((), jnp.int32) + ctx.offset
        return {"h": self._between(params["table"][microbatch["tokens"]]), "at": at}

    def _layer(self, params: Any, given: Any, *, ctx: jp.Context) -> Any:
        """Attention to the keys and values of all slices so far, and a SwiGLU."""
        x = given["h"]
        u = self._whole(_norm(params["norm1"], x))
        query = jnp.einsum("btd,dkgh->btkgh", u, _cast(params, "query", x))
        rows = (jnp.einsum("bsd,dkh->bskh", u, _cast(params, name, x)) for name in ("key", "value"))
        keys, values = map(ctx.append, ("keys", "values"), rows)
        mixed = attend(query, keys, values, given["at"], self.block)
        x = self._between(x + jnp.einsum("btkgh,kghd->btd", mixed, _cast(params, "out", x)))
        x = self._between(x + _swiglu(params, self._whole(_norm(params["norm2"], x))))
        return {**given, "h": x}

    def _last(self, params: Any, x: Any, microbatch: Any) -> Any:
        """The mean loss, with the logits of some tokens at a time."""

        @jax.checkpoint
        def of_tokens(part: tuple[Any, Any]) -> Any:
            own, targets = part
            logits = jnp.einsum("btd,dv->btv", own, params["head"].astype(own.dtype))
            logits = logits.astype(jnp.float32)
            target = jnp.arange(self.shape.vocab) == targets[..., None]
            found = jnp.sum(jnp.where(target, logits, 0), axis=-1)
            return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - found)

        def cut(leaf: Any) -> Any:
            blocks = leaf.reshape(leaf.shape[0], -1, LOSS_TOKENS, *leaf.shape[2:])
            return jnp.moveaxis(blocks, 1, 0)

        u, targets = self._whole(_norm(params["norm"], x["h"])), microbatch["targets"]
        return jnp.sum(jax.lax.map(of_tokens, (cut(u), cut(targets)))) / targets.size

    def _between(self, x: Any) -> Any:
        """Between layers x is split by time over the tensor axis (Korthikanti et al. 2022)."""
        return self._constrain(x, PartitionSpec(None, TENSOR, None))

    def _whole(self, x: Any) -> Any:
        return self._constrain(x, PartitionSpec(None, None, None))

    def _constrain(self, x: Any, spec: PartitionSpec) -> Any:
        return jax.lax.with_sharding_constraint(x, spec) if self.tensor > 1 else x

    def compiled(self) -> tuple[str, ...]:
        """A line of the first table."""
        jax.clear_caches()  # what was traced and compiled for the case before
        begin = time.perf_counter()
        found = jp.inspect.report(*self.step())
        parts, slots, each = found["predicted"], found["slots"], found["pool_bytes"]
        total = sum(found[f"{name}_bytes"] for name in ("argument", "output", "temp"))
        rows = each.get("buffer", 0) + each.get("buffer_gradient", 0)
        kept = each["residual_input"] + each["residual_weight"] + each["x"]
        sizes = (parts["parameters"] + parts["gradients"], kept, rows, parts["work"])
        return (
            *self._names(),
            f"{max(slots.residual_input, slots.residual_weight)}",
            f"{slots.buffer}+{slots.buffer_gradient}",
            *(f"{size / GIB:.2f}" for size in (*sizes, parts["total"], total)),
            f"{parts['total'] / total:.3f}",
            "yes" if total <= ROOM else "no",
            f"{time.perf_counter() - begin:.0f}",
        )

    def _names(self) -> tuple[str, ...]:
        return (
            f"{self.pipe} x {self.tensor}",
            f"{self.context // 1024}k",
            f"{self.sequences}",
            self.schedule,
            f"{self.slices}",
            "layer" if self.remat else "-",
        )

    def flops(self) -> tuple[float, float, float]:
        """Operations of a forward, a layer and a token: of matmuls with weights, of attention on
        average (a token sees half of its sequence), and of the head.
        """
        s = self.shape
        heads, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        weights = s.width * (2 * heads + 2 * kv + 3 * s.hidden)
        return 2.0 * weights, 4.0 * heads * self.context / 2, 2.0 * s.width * s.vocab

    def seconds(self) -> tuple[float, float]:
        """Seconds of a step by the table's makespan, and its bubble.

        A backward takes two forwards of matmuls and two and a half of attention (Dao 2023), and
        with `remat` a forward more.
        """
        table, tokens = self.table(), self.context // self.slices
        weights, attention, head = self.flops()
        own = self.shape.layers // table.num_stages
        rate = self.tensor * PEAK * SHARE / tokens
        ends = [head * (s == table.num_stages - 1) for s in range(table.num_stages)]
        again = own * (weights + attention) * self.remat
        place = [(2 * k + 1) / self.slices for k in range(self.slices)]
        costs = jp.Costs(
            forward=[(own * (weights + attention) + end) / rate for end in ends],
            input_grad=[(own * (weights + 2.5 * attention) + again + end) / rate for end in ends],
            weight_grad=[(own * weights + end) / rate for end in ends],
            transfer=2 * tokens * self.shape.width / self.tensor / NVLINK,
            slice_factors=[(weights + attention * p) / (weights + attention) for p in place],
        )
        found = jp.simulate(table, costs)
        return float(found.makespan), float(found.bubble)

    def predicted(self) -> tuple[str, ...]:
        """A line of the second table."""
        step, bubble = self.seconds()
        whole = replace(self, slices=1, schedule="1f1b").seconds()[0]
        kept = replace(self, slices=1, schedule="1f1b", remat=True).seconds()[0]
        tokens = self.context * self.sequences
        weights, attention, head = self.flops()
        model = 3 * (self.shape.layers * (weights + attention) + head) * tokens
        return (
            *self._names(),
            f"{step:.2f}",
            f"{bubble:.1%}",
            f"{whole / step:.2f}",
            f"{kept / step:.2f}",
            f"{tokens / step / self.pipe / self.tensor:,.0f}",
            f"{model / step / (self.pipe * self.tensor * PEAK):.1%}",
        )


def even(layers: int, stages: int) -> str:
    """The layout with as many layers on each stage."""
    middle = "|".join("t" * (layers // stages) for _ in range(stages))
    return f"E{middle}L"


def fused_fault() -> str:
    """Why JAX's call of cuDNN's fused attention cannot be compiled for described GPUs, or ""."""
    rows = jax.ShapeDtypeStruct(
        (1, 2048, 8, 128),
        jnp.bfloat16,
        sharding=NamedSharding(gpu_mesh((2,), ("device",)), PartitionSpec()),
    )

    def fused(query: Any, keys: Any, values: Any) -> Any:
        return jax.nn.dot_product_attention(
            query, keys, values, is_causal=True, implementation="cudnn"
        )

    try:
        jax.jit(fused).lower(rows, rows, rows).compile()
    except Exception as error:  # whatever XLA or JAX raises
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    return ""


SHORT, LONG = Case(131_072, 8), Case(524_288, 4)
COMPILED = (
    SHORT,
    replace(SHORT, slices=16),
    LONG,
    replace(LONG, slices=32),
    replace(LONG, slices=64),
    replace(SHORT, tensor=8),
    replace(SHORT, tensor=8, slices=16),
    replace(SHORT, tensor=8, slices=16, schedule="interleaved_1f1b"),
    replace(SHORT, tensor=8, slices=16, remat=False),
    replace(LONG, tensor=8),
    replace(LONG, tensor=8, slices=32),
)
SIMULATED = tuple(
    replace(base, slices=slices, schedule=name, tensor=tensor, remat=remat)
    for base in (SHORT, LONG)
    for tensor in (1, 8)
    for slices, name, remat in (
        *((k, "1f1b", True) for k in (1, 4, 8, 16, 32, 64)),
        (16, "interleaved_1f1b", True),
        (16, "zb_h1", False),
        (16, "1f1b", False),
    )
)
NAMES = ("pipe x tensor", "context", "sequences", "schedule", "slices", "remat")
COLUMNS = (
    (
        *NAMES,
        "held",
        "buffers",
        "weights",
        "kept",
        "rows",
        "work",
        "predicted",
        "XLA",
        "ratio",
        "fits",
        "seconds",
    ),
    (*NAMES, "step s", "bubble", "over 1F1B", "over 1F1B, layer", "tokens/s a GPU", "MFU"),
)
TITLES = (
    "Llama 3 8B's shapes in bfloat16, long sequences on described H100s: memory of a device",
    "The same steps by a roofline and the table's makespan: a prediction",
)


def notes(fused: str) -> tuple[Sequence[str], Sequence[str]]:
    fault = (
        f"Its kernel does not compile without a GPU ({fused})."
        if fused
        else "Its kernel compiles, but knows no slice: it takes no position of the first query."
    )
    return (
        (
            "GiB of one device.  held: slots of residuals; buffers: of appended rows and of their "
            "gradients.  weights: parameters (bfloat16) and gradients (float32).",
            "kept: residuals and inputs of stages; rows: keys and values of all slices, and their "
            "gradients.  predicted: jaxpipe.inspect.memory; XLA: arguments + outputs + temp;",
            f"ratio: of these.  fits: in {ROOM / 1e9:.0f} GB, without an optimizer.  Steps of one "
            "context and mesh have the same tokens.",
            "remat layer: a layer keeps its input alone.  seconds: of a loaded machine, to trace, "
            "compile the step, and compile its blocks alone.",
            f"Attention by blocks of {SHORT.block} queries and keys.  cuDNN's fused attention is "
            f"not used.  {fault}",
            f"Logits of {LOSS_TOKENS} tokens exist at a time.  Rotary positions are left out.",
        ),
        (
            f"Nobody ran it.  Matmuls and attention at {SHARE:.0%} of {PEAK / 1e12:.0f} TFLOP/s, "
            f"transfers at {NVLINK / 1e9:.0f} GB/s.  Later slices take longer by their attention.",
            "over 1F1B: throughput over 1F1B of whole sequences with the same remat; over 1F1B, "
            "layer: over the same where each layer is computed again,",
            "as whole sequences of these lengths need it to fit.  MFU: attention to half of the "
            "sequence, without what is computed again.  Left out: communication of the tensor",
            "axis, the optimizer's step, norms, the loss of speed of small matmuls.  The head is "
            "on the last device.",
            "Published: Seq1F1B reports 1.14 times the throughput of Megatron's 1F1B with half of "
            "its memory, and 30B parameters with 64k tokens on 64 A100s without recomputation;",
            "SlimPipe reports up to 1.57 times the MFU of other systems for Llama 70B with 512k "
            "tokens, and more than 45 % MFU with 2,048k tokens on 256 Hopper GPUs.",
        ),
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = Command(__doc__)
    parser.add_argument("--only", nargs="+", type=int, help="numbers of cases to compile, from 0")
    args = parser.parse_args(argv)
    require_gpu_compiler(parser)
    machine = describe()
    chosen = COMPILED if args.only is None else [COMPILED[i] for i in args.only]
    lines = (told(case.compiled() for case in chosen), [case.predicted() for case in SIMULATED])
    tables = zip(TITLES, COLUMNS, lines, notes(fused_fault()), strict=True)
    write_all([Result(title, machine, *rest) for title, *rest in tables], args.output)


if __name__ == "__main__":
    main()
