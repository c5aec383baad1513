"""Train a Llama through a pipeline, of any published size: on one host, or on a pod by the
launchers of examples/pod/.

python examples/llama.py                                                     a tiny one, on four
virtual CPU devices python examples/llama.py --model llama3.1-8b --load Llama-3.1-8B --pipe 4
--tensor 2 --context 4096 --remat layer --sequence
                         --loss-tokens 1024 --tokens corpus.npy --end 128001 --peak 989
                         continues a published one on eight H100s
python examples/llama.py --model llama3.1-70b --layout "Et*9|(t*10|)*6t*10|tL" ...
layers laid out by hand

Start it again with the same --out and it goes on from the newest checkpoint, under any --schedule
and any number of devices.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import jaxpipe as jp
from gpt.devices import find
from gpt.flags import flag, switch
from jaxpipe.checkpoint import Checkpoints
from jaxpipe.distributed import Watchdog, global_batch, local_rows, make_mesh
from llama_parts import fp8, initial, weights
from llama_parts.model import Attention, Llama, Remat
from llama_parts.packing import Corpus
from llama_parts.sizes import PUBLISHED, Sizes, from_config


def parser(
    about: str | None = __doc__, published: Iterable[str] = tuple(PUBLISHED), out: str = "out/llama"
) -> argparse.ArgumentParser:
    """The flags of a program that trains a language model of published sizes."""
    p = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag(p, "--model", "tiny", "a published size (tiny)", choices=published)
    p.add_argument(
        "--load",
        type=Path,
        help="a folder of Hugging Face: weights as safetensors; its config.json goes before "
        "--model",
    )
    p.add_argument(
        "--export", type=Path, help="where to write safetensors and config.json at the end"
    )
    switch(
        p, "--cluster", "one of several processes, which the launcher's environment tells JAX of"
    )
    flag(p, "--pipe", 4, "devices along the pipeline (4)")
    flag(p, "--data", 1, "data-parallel replicas (1)")
    flag(p, "--tensor", 1, "devices that share each layer (1)")
    switch(p, "--sequence", "split what lies between layers over them too, by time")
    switch(p, "--fsdp", "split parameters and optimizer state over the replicas too")
    flag(p, "--schedule", "1f1b", f"one of {', '.join(jp.schedules.names())} (1f1b)")
    p.add_argument("--chunks", type=int, help="stages a device (what the schedule has by nature)")
    switch(
        p,
        "--merge-backward",
        "no W of its own: a delayed W keeps all activations of its layers in memory",
    )
    p.add_argument(
        "--max-active",
        type=int,
        help="stages that a device has whole at once, with --fsdp (all, gathered once a step)",
    )
    p.add_argument(
        "--layout",
        help="layers of each stage, as jaxpipe.parse_layout reads them (balanced by what they "
        "cost)",
    )
    flag(p, "--microbatches", 8, "microbatches a step (8)")
    flag(p, "--rows", 8, "rows a step, over all replicas (8)")
    flag(p, "--context", 256, "tokens a row (256)")
    flag(p, "--remat", Remat.NONE, "what backwards compute again (none)", choices=Remat)
    flag(p, "--attention", Attention.PLAIN, "how it is computed (plain)", choices=Attention)
    flag(p, "--loss-tokens", 0, "tokens of a row whose logits are there at a time (0: all)")
    switch(
        p, "--spread-head", "the head on all devices of the pipeline, a part each; a tied table too"
    )
    flag(
        p,
        "--dtype",
        "bfloat16",
        "of the compute (bfloat16)",
        choices=("bfloat16", "float32", "float64"),
    )
    switch(p, "--fp8", "products of layers in FP8, with scales of past steps (needs flax)")
    p.add_argument(
        "--tokens",
        type=Path,
        help="an .npy of tokens, documents one after the other (the standard library's bytes)",
    )
    flag(p, "--end", 2, "the token that ends a document of --tokens (2, as in Llama 2)")
    flag(p, "--steps", 100, "steps in all (100)")
    flag(p, "--rate", 3e-4, "learning rate at its highest (3e-4)")
    flag(
        p, "--warmup", 20, "steps until it is reached (20); a cosine takes it to a tenth at the end"
    )
    flag(p, "--seed", 0, "of the weights and of the order of the data (0)")
    flag(p, "--out", Path(out), f"where checkpoints are, a folder that all processes see ({out})")
    flag(p, "--save-every", 50, "steps between checkpoints, and one at the end (50)")
    p.add_argument(
        "--peak",
        type=float,
        help="TFLOP/s of a device in this type (989 of an H100 in bfloat16), for the MFU",
    )
    p.add_argument(
        "--step-limit",
        type=float,
        default=600,
        help="seconds that a step may take before the process ends itself (600)",
    )
    return p


def build(args: argparse.Namespace, mesh: Mesh) -> tuple[Llama, jp.Pipeline]:
    """The model, and the pipeline that runs it."""
    sizes = from_config(weights.config_of(args.load)) if args.load else PUBLISHED[args.model]
    model = Llama(
        sizes,
        jnp.dtype(args.dtype),
        args.remat,
        args.attention,
        args.loss_tokens,
        "tensor",
        args.sequence,
        args.fp8,
    )
    specs, first, last = model.specs(), model.first, model.last
    if args.spread_head:
        specs, last = (
            model.spread_specs(),
            jp.spread(model.spread_last, dims={"norm": None, "head": {"kernel": 1}}),
        )
        # one table: where it is cut, it is for both
        first = jp.spread(model.spread_first) if sizes.tied else first
    schedule = schedule_of(args)
    layout = layout_of(args, sizes, schedule)
    pipe = jp.Pipeline(
        jp.Model(
            {"E": first, "t": model.layer, "L": last},
            layers=layout,
            loss=jp.Loss.SUM_OVER_COUNT,
            replaced=fp8.RULES if args.fp8 else None,
        ),
        schedule,
        mesh,
        layout=layout,
        sharding=jp.Sharding(
            data=("data",),
            fsdp="data" if args.fsdp else None,
            max_active=args.max_active,
            specs=specs,
        ),
        memory=jp.Memory(remat="full" if args.remat is Remat.STAGE else None),
    )
    return model, pipe


def schedule_of(args: argparse.Namespace) -> jp.Schedule:
    """The table of the flags."""
    table = jp.schedules.build(
        args.schedule, devices=args.pipe, microbatches=args.microbatches, chunks=args.chunks
    )
    return jp.merge_backward(table, delayed=True) if args.merge_backward else table


def layout_of(args: argparse.Namespace, sizes: Sizes, schedule: jp.Schedule) -> Any:
    """The layers of each stage: as they were given, or balanced by what they cost."""
    return args.layout or jp.layouts.balanced_layout(
        sizes.letters(),
        sizes.flops(args.context),
        devices=args.pipe,
        chunks=schedule.num_stages // args.pipe,
        letters="".join(sorted({*sizes.letters()})),
    )


def kernels(params: Any) -> Any:
    """Which parameters decay: all but scales."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "scale" not in jax.tree_util.keystr(path), params
    )


def optimizer_of(args: argparse.Namespace, decay: Any = kernels) -> optax.GradientTransformation:
    """AdamW as Llama was trained with: clipped, warmed up, down a cosine; `decay` tells which
    parameters decay, all where it is None.
    """
    rate = optax.warmup_cosine_decay_schedule(
        0.0, args.rate, args.warmup, max(args.steps, args.warmup + 1), 0.1 * args.rate
    )
    rule = optax.adamw(rate, 0.9, 0.95, weight_decay=0.1, mask=decay)
    return optax.chain(optax.clip_by_global_norm(1.0), rule)


def say(text: str) -> None:
    """Print on process 0 alone."""
    if jax.process_index() == 0:
        print(text, flush=True)


def train(
    args: argparse.Namespace,
    model: Llama,
    pipe: jp.Pipeline,
    optimizer: optax.GradientTransformation,
    beside: Callable[[Any], str] = lambda batch: "",
    put: Callable[[Any, Any], Any] = lambda params, grads: grads,
) -> Any:
    """Train from the newest checkpoint, the loaded weights or random ones; returns the placed
    parameters.  What `beside` makes of each batch is printed in the step's line.  `put` puts the
    next values of leaves that are replaced into the gradients.
    """

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        found, grads = pipe.value_and_grad(params, batch)
        loss, metrics = found if pipe.model.has_metrics else (found, {})
        trained = pipe.trained(params)
        updates, opt_state = optimizer.update(pipe.trained(grads, like=params), opt_state, trained)
        after = optax.apply_updates(trained, updates)
        new = pipe.with_trained(params, after, grads=put(params, grads))
        return new, opt_state, loss, metrics

    train_step = pipe.jit(step, donate_argnums=(0, 1))
    params = (
        weights.load(args.load, pipe, model)
        if args.load
        else initial.placed(model, pipe, jax.random.key(args.seed))
    )
    opt_state = pipe.init(optimizer, params)
    checkpoints, done = Checkpoints(args.out, pipe), 0
    if checkpoints.latest is not None:
        done, state = checkpoints.restore({"params": params, "opt_state": opt_state})
        params, opt_state = state["params"], state["opt_state"]
        say(f"resuming after step {done}")

    corpus = (
        Corpus.read(args.tokens, end=args.end, vocab=model.sizes.vocab)
        if args.tokens
        else Corpus.standard_library()
    )
    mine, tokens = local_rows(pipe, args.rows), args.rows * args.context
    flops = (
        sum(model.sizes.flops(args.context)[letter] for letter in model.sizes.letters())
        * tokens
        / pipe.mesh.size
    )
    watchdog, begin = (
        Watchdog(seconds=args.step_limit, first=6 * args.step_limit),
        time.perf_counter(),
    )
    for i in range(done, args.steps):
        with watchdog.step(i + 1):
            local = corpus.batch(i, rows=args.rows, mine=mine, length=args.context, seed=args.seed)
            params, opt_state, loss, metrics = train_step(
                params, opt_state, global_batch(pipe, local, rows=args.rows)
            )
            value, seconds, begin = float(loss), time.perf_counter() - begin, time.perf_counter()
        mfu = f"   MFU {flops / seconds / args.peak / 1e12:.1%}" if args.peak else ""
        speed = (
            f"{tokens / seconds:,.0f} tokens/s   {flops / seconds / 1e12:.3g} TFLOP/s a device{mfu}"
            if i > done
            else "compiled"
        )
        shares = "".join(f"   {name} {float(share):.2%}" for name, share in metrics.items())
        say(f"step {i + 1:>6}/{args.steps}   loss {value!r}{shares}{beside(local)}   {speed}")
        begin = time.perf_counter()  # without the time of `beside`
        if (i + 1) % args.save_every == 0 or i + 1 == args.steps:
            with watchdog.step(f"checkpoint {i + 1}"):
                checkpoints.save(i + 1, {"params": params, "opt_state": opt_state})
            begin = time.perf_counter()
    checkpoints.close()
    return params


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    jax.config.update("jax_enable_x64", args.dtype == "float64")
    if args.cluster:
        jax.distributed.initialize()
    shape = {"pipe": args.pipe, "data": args.data, "tensor": args.tensor}
    try:
        mesh = make_mesh(
            shape, devices=None if args.cluster else find(args.pipe * args.data * args.tensor)
        )
        model, pipe = build(args, mesh)
        say(f"{model.sizes.parameters():,} parameters, {pipe}")
        params = train(args, model, pipe, optimizer_of(args))
        if args.export:
            weights.save(args.export, pipe, model, params)
    except jp.JaxpipeError as error:  # the message tells what to write instead
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
