"""Train a GPT through a pipeline: four devices, any schedule, on the source of Python's standard
library.

python examples/train_gpt.py                                    four virtual CPU devices, 1F1B
python examples/train_gpt.py --schedule gpipe --data 2          another table; two data-parallel
replicas python examples/train_gpt.py --spread-head                      the vocabulary cut over the
four devices python examples/train_gpt.py --resume out/train_gpt/run-1       go on from the newest
checkpoint, bit for bit python examples/train_gpt.py --verify                           20 steps
three ways, and how far they lie apart
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpipe as jp
from gpt import devices, report, verify
from gpt.checkpoint import RunFolder
from gpt.data import Corpus, standard_library
from gpt.flags import flag, switch
from gpt.model import GPT
from gpt.optimizer import adamw
from jaxpipe.checkpoint import Checkpoints

PROMPT = "\n\ndef"
# what a resumed run cannot change
FIXED = ("layers", "width", "heads", "context", "vocab", "tied", "dtype", "seed")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag(p, "--pipe", 4, "devices along the pipeline (4)")
    flag(p, "--data", 1, "data-parallel replicas of the pipeline (1)")
    flag(p, "--schedule", "1f1b", f"one of {', '.join(jp.schedules.names())} (1f1b)")
    flag(p, "--microbatches", 8, "microbatches a step (8)")
    p.add_argument("--chunks", type=int, help="stages a device (what the schedule has by nature)")
    flag(p, "--layers", 4, "transformer layers, a multiple of the stages (4)")
    flag(p, "--width", 128, "features of the residual stream (128)")
    flag(p, "--heads", 4, "attention heads (4)")
    flag(p, "--context", 64, "tokens a row (64)")
    flag(p, "--vocab", 1024, "tokens in the vocabulary, at least 128 (1024)")
    p.add_argument(
        "--tied",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="the head is the token embedding",
    )
    switch(
        p, "--spread-head", "the head on all devices, 1/P of the vocabulary each; a tied table too"
    )
    p.add_argument(
        "--dtype",
        choices=("float32", "float64", "bfloat16"),
        help="type of the compute (float32; float64 with --verify)",
    )
    flag(p, "--batch", 16, "rows a step, over all replicas (16)")
    p.add_argument("--steps", type=int, help="steps in all (1500; 20 with --verify)")
    flag(p, "--rate", 4e-3, "learning rate after the warm-up (4e-3)")
    flag(p, "--warmup", 50, "steps of warm-up (50)")
    flag(p, "--decay", 0.1, "weight decay of the kernels (0.1)")
    flag(p, "--clip", 1.0, "largest global norm of the gradients (1.0)")
    flag(p, "--seed", 0, "of the weights and of the order of the data (0)")
    flag(p, "--save-every", 100, "steps between checkpoints (100)")
    flag(p, "--out", Path("out/train_gpt"), "where run folders are made (out/train_gpt)")
    p.add_argument(
        "--resume",
        type=Path,
        help="the folder of a run: take its settings (flags override) and go on",
    )
    switch(p, "--verify", "compare with plain JAX and with torch_ref instead of training")
    return p


def settings(argv: list[str] | None) -> argparse.Namespace:
    """The flags; those of the run that is resumed are the defaults."""
    p = parser()
    args = p.parse_args(argv)
    if args.resume:
        saved = RunFolder(args.resume).read_settings()["flags"]
        p.set_defaults(**saved)
        args = p.parse_args(argv)
        changed = [
            f"--{name} {getattr(args, name)} (was {saved[name]})"
            for name in FIXED
            if getattr(args, name) != saved[name]
        ]
        if changed:
            raise SystemExit(
                f"a resumed run keeps its model and data: leave out {', '.join(changed)}"
            )
    args.dtype = args.dtype or ("float64" if args.verify else "float32")
    args.steps = args.steps or (20 if args.verify else 1500)
    return args


def flags_of(args: argparse.Namespace) -> dict[str, Any]:
    """What a resumed run takes over."""
    return {
        name: value for name, value in vars(args).items() if name not in ("out", "resume", "verify")
    }


def check_sizes(args: argparse.Namespace, stages: int) -> None:
    """Exit with every flag that does not divide as it must, and the nearest value that does."""
    must = (
        ("layers", stages, "stages"),
        ("width", args.heads, "heads"),
        ("batch", args.microbatches * args.data, "microbatches x data"),
    )
    faults = [
        f"--{flag} {value} does not divide into {parts} ({what}): use --{flag} "
        f"{-(-value // parts) * parts}"
        for flag, parts, what in must
        if (value := getattr(args, flag)) % parts
    ]
    if faults:
        raise SystemExit("\n".join(faults))


def build(args: argparse.Namespace) -> tuple[GPT, jp.Pipeline]:
    """The model, and the pipeline that runs it."""
    schedule = jp.schedules.build(
        args.schedule, devices=args.pipe, microbatches=args.microbatches, chunks=args.chunks
    )
    check_sizes(args, schedule.num_stages)
    model = GPT(
        stages=schedule.num_stages,
        layers=args.layers,
        vocab=args.vocab,
        context=args.context,
        width=args.width,
        heads=args.heads,
        tied=args.tied,
        dtype=jnp.dtype(args.dtype),
    )
    mesh = devices.mesh(devices.find(args.pipe * args.data), pipe=args.pipe, data=args.data)
    first, last = model.first, model.last
    if args.spread_head:
        last = jp.spread(model.spread_last, dims={"ln": None, "head": {"kernel": 1}})
        # one table: where it is cut, it is for both
        first = jp.spread(model.spread_first, dims=None) if args.tied else first
    pipe = jp.Pipeline(
        jp.Model(model.stage, first=first, last=last),
        schedule,
        mesh,
        sharding=jp.Sharding(pipe="pipe", data=("data",)),
    )
    return model, pipe


def train(args: argparse.Namespace, model: GPT, pipe: jp.Pipeline, corpus: Corpus) -> None:
    """Train, saving checkpoints; then evaluate, draw the loss curve and sample some text."""
    optimizer = adamw(rate=args.rate, warmup=args.warmup, decay=args.decay, clip=args.clip)

    @pipe.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = pipe.value_and_grad(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = pipe.place(jax.jit(model.init)(jax.random.key(args.seed)))
    opt_state = pipe.init(optimizer, params)
    folder = RunFolder(args.resume) if args.resume else RunFolder.create(args.out)
    checkpoints, start = Checkpoints(folder.checkpoints, pipe, layer_axis=True), 0
    if args.resume:
        folder.check_corpus(corpus.digest)
        start, state = checkpoints.restore({"params": params, "opt_state": opt_state})
        params, opt_state = state["params"], state["opt_state"]
    print(f"{'resuming after step ' + str(start) if args.resume else 'run folder'}: {folder.path}")
    folder.write_settings({"flags": flags_of(args), "corpus": corpus.digest})
    losses = folder.read_losses(start)

    with report.progress(start, args.steps, tokens_per_step=args.batch * args.context) as advance:
        for i in range(start, args.steps):
            batch = corpus.batch(i, size=args.batch, context=args.context, seed=args.seed)
            params, opt_state, loss = step(params, opt_state, batch)
            losses.append(float(loss))
            folder.append_loss(i + 1, losses[-1])
            advance(i, losses[-1])
            if (i + 1) % args.save_every == 0 or i + 1 == args.steps:
                checkpoints.save(i + 1, {"params": params, "opt_state": opt_state})
    checkpoints.close()
    finish(args, model, pipe, corpus, folder, params, losses)


def finish(
    args: argparse.Namespace,
    model: GPT,
    pipe: jp.Pipeline,
    corpus: Corpus,
    folder: RunFolder,
    params: Any,
    losses: list[float],
) -> None:
    """What the training came to: losses, the curve as a picture, and text that the model writes."""
    held_out = [
        corpus.batch(i, size=args.batch, context=args.context, seed=args.seed, held_out=True)
        for i in range(16)
    ]
    validation = float(np.mean([pipe.evaluate(params, batch) for batch in held_out]))
    newest = float(np.mean(losses[-20:]))
    print(
        f"loss: {losses[0]:.3f} at the first step, {newest:.3f} over the last 20, "
        f"{validation:.3f} on held-out files"
    )
    title = (
        f"GPT, {args.layers} layers of {args.width}, {args.schedule} on {args.pipe} x "
        f"{args.data} devices"
    )
    report.loss_curve(losses, folder.path / "loss.png", validation=validation, title=title)

    canonical = jax.device_get(pipe.canonical(params))
    prompt = jnp.asarray(corpus.vocabulary.encode(PROMPT), jnp.int32)
    tokens = jax.jit(model.generate, static_argnames="length")(
        canonical, prompt, length=200, key=jax.random.key(args.seed)
    )
    sample = PROMPT.lstrip() + corpus.vocabulary.decode(tokens)
    (folder.path / "sample.txt").write_text(sample + "\n")
    print(
        f"sample:\n{sample}\n\n"
        f"written: {folder.path}/loss.png, sample.txt, losses.csv, checkpoints/"
    )


def main(argv: list[str] | None = None) -> int:
    args = settings(argv)
    jax.config.update("jax_enable_x64", args.dtype == "float64")
    try:
        model, pipe = build(args)
    except jp.JaxpipeError as error:
        # an unknown schedule, say: the message tells what to write instead
        raise SystemExit(str(error)) from None
    corpus = standard_library(vocab=args.vocab)
    kinds = {d.device_kind for d in pipe.mesh.devices.flat}
    print(
        f"{args.schedule} on {args.pipe} x {args.data} {'/'.join(kinds)} devices, "
        f"{args.microbatches} microbatches; {corpus.summary}"
    )
    if args.verify:
        return verify.main(args, model, pipe, corpus)
    try:
        train(args, model, pipe, corpus)
    except jp.JaxpipeError as error:  # a folder without a checkpoint
        raise SystemExit(str(error)) from None
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
