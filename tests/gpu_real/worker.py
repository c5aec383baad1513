"""One process of a job, with one device: python -m tests.gpu_real.worker SETTINGS

SETTINGS is JSON: "job" of `cases.JOBS`, "training" or "loops"; "mode"; "address", "processes" and
"process"; "folder" for checkpoints.  A line of JSON after `MARK` says what came out of each case.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpipe.spmd.xla import NO_GRAPHS, Options
from tests.oracle import oracle_value_and_grad
from tests.tolerance import relative

from . import MARK
from .cases import JOBS, Case
from .loops import loops
from .model import PLAIN, batch, weights
from .training import training


def whole(tree: Any) -> Any:
    """The arrays of a tree, of all devices."""
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def own_bytes(tree: Any) -> bytes:
    """What this process has of the arrays."""
    shards = (each.addressable_shards[0].data for each in jax.tree.leaves(tree))
    return b"".join(np.asarray(shard).tobytes() for shard in shards)


def run(case: Case, options: Options | None) -> dict[str, Any]:
    """Steps with two batches in turn: how far loss and gradients are from those of the plain
    function, and whether the bits are those of the first time.
    """
    begin = time.monotonic()
    pipe = case.pipeline()
    canonical = weights(pipe.schedule.num_stages, case.layers(pipe.schedule.num_stages))
    batches = [batch(case.rows, seed) for seed in (1, 2)]
    with jax.default_device(jax.local_devices()[0]):
        wanted = [jax.device_get(oracle_value_and_grad(canonical, b, **PLAIN)) for b in batches]
    params = pipe.place(canonical)
    step = pipe.jit(pipe.value_and_grad, compiler_options=options)
    first = [step(params, each) for each in batches]
    found = [(whole(loss), whole(pipe.canonical(grads))) for loss, grads in first]
    pairs = [zip(*each, strict=True) for each in zip(found, wanted, strict=True)]
    loss, grads = np.max([[relative(a, b) for a, b in pair] for pair in pairs], axis=0)
    kept = [tuple(map(own_bytes, each)) for each in first]
    same = np.zeros(2, int)
    for number in range(case.count):
        again = map(own_bytes, step(params, batches[number % 2]))
        same += [a == b for a, b in zip(again, kept[number % 2], strict=True)]
    other = [int(case.count - each) for each in same]
    seconds = time.monotonic() - begin
    return {"loss": loss, "grads": grads, "other bits": other, "seconds": seconds}


def results(settings: dict[str, Any], options: Options | None) -> Iterator[tuple[str, Any]]:
    """The results of a job by name of the case."""
    if settings["job"] == "loops":
        yield from loops(options)
    elif settings["job"] == "training":
        yield "three steps, and a checkpoint", training(settings["folder"], options)
    else:
        for case in JOBS[settings["job"]][1]:
            yield str(case), run(case, options)


def main(text: str) -> None:
    settings = json.loads(text)
    jax.config.update("jax_enable_x64", True)
    if settings["processes"] > 1:
        address = [settings[name] for name in ("address", "processes", "process")]
        jax.distributed.initialize(*address, initialization_timeout=120)
    options = NO_GRAPHS if settings["mode"] == "host" else None
    for name, found in results(settings, options):
        told = {"case": name, "kind": jax.devices()[0].device_kind, **found}
        print(MARK + json.dumps(told), flush=True)
    if settings["processes"] > 1:
        multihost_utils.sync_global_devices("the end")


if __name__ == "__main__":
    main(sys.argv[1])
