"""What all processes of a job must have in common, compared before the first step."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from .arrays import PyTree, described
from .errors import PipelineError
from .pipeline import Pipeline
from .version import __version__

_BYTES = 16384  # of every process's fingerprint: all give as many, or the comparison itself would hang
_MOST = 400  # characters of an entry


def fingerprint(pipe: Pipeline, params: PyTree, batch: PyTree = None, **more: Any) -> dict[str, str]:
    """Name -> text of what must be equal: versions, the table, the mesh, the pipeline's options, shapes, and `more`.

    Args:
        pipe: the pipeline.
        params: canonical or placed parameters, or their shapes (`jax.eval_shape(init, key)`).
        batch: a batch of all rows, or its shapes; None where it is checked by the numbers that make it, as in `more`.
        more: anything else that decides what is computed: a learning rate, a seed, the number of steps.
    """
    table, mesh = pipe.schedule, pipe.mesh
    settings: Any = jax.config
    found = {
        "versions": f"jaxpipe {__version__}, jax {jax.__version__}, jaxlib {version('jaxlib')}, Python {sys.version.split()[0]}",
        "schedule": f"{table.name} of {table.num_stages} stages and {table.num_microbatches} microbatches {_digest(str(table.rows))}",
        "mesh": f"{dict(mesh.shape)} of {mesh.devices.flat[0].device_kind} {_digest(str([d.id for d in mesh.devices.flat]))}",
        "pipeline": f"{pipe!r}, prefer={pipe.prefer.value}, accumulate_dtype={pipe.accumulate_dtype}, loss={pipe.functions.loss.value}",
        "parameters": _tree(params),
        "batch": _tree(batch),
        "precision": f"x64={settings.jax_enable_x64}, matmul={settings.jax_default_matmul_precision}",
    }
    return {name: text[:_MOST] for name, text in (found | {key: repr(value) for key, value in more.items()}).items()}


def check_same(pipe: Pipeline, params: PyTree, batch: PyTree = None, **more: Any) -> None:
    """Compare the `fingerprint` of all processes; every process of a job calls it, before anything is placed or run.

    Processes that were started with another schedule, model or version would else wait for each other, or train on without a word.

    Raises:
        PipelineError: in every process, with each difference and the processes on its two sides.

    Example:
        check_same(pipe, jax.eval_shape(model.init, key), rows=256, learning_rate=1e-3)
    """
    mine = fingerprint(pipe, params, batch, **more)
    if jax.process_count() == 1:
        return
    text = json.dumps(mine).encode()
    if len(text) > _BYTES:
        raise PipelineError(f"the fingerprint has {len(text)} bytes, more than {_BYTES}; give fewer or shorter things to compare")
    row = np.frombuffer(text.ljust(_BYTES), np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(row)).reshape(jax.process_count(), _BYTES)
    faults = differences([json.loads(bytes(each).decode()) for each in rows])
    if faults:
        raise PipelineError.listing("the processes of this job were not started alike", faults)


def differences(found: Sequence[Mapping[str, str]]) -> list[str]:
    """A sentence for each thing in which processes differ from the first.

    >>> differences([{"schedule": "1f1b"}, {"schedule": "gpipe"}, {"schedule": "gpipe"}])
    ['schedule: process 0 has 1f1b, but processes 1, 2 have gpipe']
    """
    faults = []
    for name in dict.fromkeys(name for each in found for name in each):
        groups: dict[str, list[int]] = {}
        for process, each in enumerate(found):
            groups.setdefault(each.get(name, "nothing"), []).append(process)
        (first, own), *others = groups.items()
        sides = [f"{_processes(members)} {text}" for text, members in others]
        if sides:
            faults.append(f"{name}: {_processes(own)} {first}, but {' and '.join(sides)}")
    return faults


def _processes(members: Sequence[int]) -> str:
    shown = ", ".join(map(str, members[:4])) + (f" and {len(members) - 4} more" if len(members) > 4 else "")
    return f"process {shown} has" if len(members) == 1 else f"processes {shown} have"


def _tree(tree: PyTree) -> str:
    leaves = jax.tree.leaves(tree)
    count = sum(int(np.prod(np.shape(leaf), dtype=np.int64)) for leaf in leaves)
    return f"{len(leaves)} arrays of {count:,} numbers, {described(tree, 3)} {_digest(described(tree, len(leaves)))}"


def _digest(text: str) -> str:
    return f"({hashlib.sha256(text.encode()).hexdigest()[:8]})"
