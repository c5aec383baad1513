"""Train a GPT in several processes, one a GPU or one a host: each feeds its own rows, and any may
die without hanging the others.

srun python examples/pod/train.py --cluster --pipe 4 --data 2            JAX reads SLURM's
environment (launch_slurm.sh) python examples/pod/train.py --coordinator HOST:PORT --processes 2
--process 0 --pipe 2          (launch_ssh.sh, launch_mpi.sh) python examples/pod/train.py
--cpu-devices 2 --pipe 2                    one process, two virtual CPU devices: a trial

Start it again with the same --checkpoints and it goes on from the newest one.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for gpt, which lies beside this folder

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

import jaxpipe as jp
from gpt.model import GPT
from gpt.optimizer import adamw
from jaxpipe.checkpoint import Checkpoints
from jaxpipe.distributed import Watchdog, check_same, crossings, global_batch, local_rows, make_mesh


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--cluster",
        action="store_true",
        help="the launcher's environment says which process this is",
    )
    p.add_argument(
        "--coordinator", help="host:port of process 0, for launchers that JAX does not know"
    )
    p.add_argument("--processes", type=int, help="how many processes there are")
    p.add_argument("--process", type=int, help="which of them this is")
    p.add_argument(
        "--local-device", type=int, help="the one GPU of this host that the process takes (all)"
    )
    p.add_argument(
        "--cpu-devices",
        type=int,
        help="use so many virtual CPU devices in each process instead of GPUs",
    )
    p.add_argument(
        "--start-limit",
        type=int,
        default=300,
        help="seconds to wait for all processes to come (300)",
    )
    p.add_argument(
        "--heartbeat",
        type=int,
        default=30,
        help="seconds after which a silent process counts as dead (30)",
    )
    p.add_argument(
        "--step-limit", type=float, default=300, help="seconds that a step may take (300)"
    )
    p.add_argument(
        "--first-limit",
        type=float,
        default=1800,
        help="seconds that the first step may take, with its compilation (1800)",
    )
    p.add_argument(
        "--pipe", type=int, required=True, help="devices along the pipeline: over the slow network"
    )
    p.add_argument("--data", type=int, default=1, help="data-parallel replicas (1)")
    p.add_argument("--schedule", default="1f1b", help="a name of jaxpipe.schedules (1f1b)")
    p.add_argument("--microbatches", type=int, default=8, help="microbatches a step (8)")
    p.add_argument("--layers", type=int, default=4, help="transformer layers (4)")
    p.add_argument("--width", type=int, default=128, help="features of the residual stream (128)")
    p.add_argument("--context", type=int, default=64, help="bytes of text a row (64)")
    p.add_argument("--batch", type=int, default=16, help="rows a step, over all replicas (16)")
    p.add_argument("--steps", type=int, default=200, help="steps in all (200)")
    p.add_argument(
        "--text",
        type=Path,
        default=Path(pydoc_data.topics.__file__),
        help="what to learn: any file, read as bytes",
    )
    p.add_argument(
        "--checkpoints",
        type=Path,
        default=Path("out/pod"),
        help="a folder that all processes see (out/pod)",
    )
    p.add_argument(
        "--save-every",
        type=int,
        default=50,
        help="steps between checkpoints, and one at the end (50); 0 for none",
    )
    p.add_argument(
        "--train-on-unsaved",
        action="store_true",
        help="warn where a checkpoint cannot be saved, and train on (stop)",
    )
    return p


def start(args: argparse.Namespace) -> None:
    """Join the other processes.  This comes before anything else uses JAX."""
    if args.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    limits = {
        "initialization_timeout": args.start_limit,
        "heartbeat_timeout_seconds": args.heartbeat,
        "shutdown_timeout_seconds": args.heartbeat,
    }
    if args.cluster:
        jax.distributed.initialize(**limits)
    elif args.coordinator:
        one = None if args.local_device is None else [args.local_device]
        jax.distributed.initialize(args.coordinator, args.processes, args.process, one, **limits)


def say(text: str) -> None:
    """Print on process 0 alone."""
    if jax.process_index() == 0:
        print(text, flush=True)


def rows_of_text(text: Any, step: int, rows: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The given rows of a step's batch; only these are read from the file."""
    starts = np.random.default_rng(step).integers(0, len(text) - args.context, size=args.batch)[
        rows
    ]
    window = text[starts[:, None] + np.arange(args.context + 1)].astype(np.int32)
    return {"tokens": window[:, :-1], "targets": window[:, 1:]}


def main() -> None:
    args = parser().parse_args()
    start(args)
    mesh = make_mesh({"pipe": args.pipe, "data": args.data})
    schedule = jp.schedules.build(args.schedule, devices=args.pipe, microbatches=args.microbatches)
    model = GPT(
        schedule.num_stages, args.layers, vocab=256, context=args.context, width=args.width, heads=4
    )
    pipe = jp.Pipeline(
        jp.Model(model.stage, first=model.first, last=model.last),
        schedule,
        mesh,
        sharding=jp.Sharding(data=("data",)),
    )
    optimizer = adamw(rate=1e-3, warmup=20, decay=0.1, clip=1.0)

    @pipe.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = pipe.value_and_grad(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    watchdog = Watchdog(seconds=args.step_limit, first=args.first_limit)
    with watchdog.step("the comparison of all processes", seconds=args.first_limit):
        check_same(
            pipe,
            jax.eval_shape(model.init, jax.random.key(0)),
            rows=args.batch,
            context=args.context,
            steps=args.steps,
        )

    # Under jit the parameters are made where they belong: no process ever holds the whole model.
    params = jax.jit(lambda key: pipe.place(model.init(key)))(jax.random.key(0))
    opt_state = pipe.init(optimizer, params)
    checkpoints, done = (
        Checkpoints(args.checkpoints, pipe, layer_axis=True, must_save=not args.train_on_unsaved),
        0,
    )
    if checkpoints.latest is not None:
        done, state = checkpoints.restore({"params": params, "opt_state": opt_state})
        params, opt_state = state["params"], state["opt_state"]
        say(f"resuming after step {done}")

    text, mine = np.memmap(args.text, np.uint8, mode="r"), local_rows(pipe, args.batch)
    say(
        f"{jax.process_count()} processes; neighbours in different processes, of all: "
        f"{crossings(mesh)}"
    )
    print(f"process {jax.process_index()} feeds rows {mine.tolist()}", flush=True)

    for i in range(done, args.steps):
        with watchdog.step(i + 1):
            batch = global_batch(pipe, rows_of_text(text, i, mine, args), rows=args.batch)
            params, opt_state, loss = step(params, opt_state, batch)
            say(f"step {i + 1} loss {float(loss)!r}")
        # A SIGTERM to any process, as clusters send before they take a job's hosts away, stops all
        # of them behind the same step.
        stop = jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(i)
        if stop or (args.save_every and ((i + 1) % args.save_every == 0 or i + 1 == args.steps)):
            with watchdog.step(f"checkpoint {i + 1}", seconds=args.first_limit):
                checkpoints.save(i + 1, {"params": params, "opt_state": opt_state})
        if stop:
            say(f"told to stop: saved after step {i + 1}")
            break
    checkpoints.close()


if __name__ == "__main__":
    main()
