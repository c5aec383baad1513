"""What all processes of a job must have in common, compared before the first step."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax.extend import core

from .arrays import PyTree, described
from .processes import compare
from .version import __version__

_MOST = 400  # characters of an entry


def fingerprint(pipe: Any, params: PyTree, batch: PyTree = None, **more: Any) -> dict[str, str]:
    """Name -> text of all that must be equal: versions, the table, the mesh, the pipeline's
    options, shapes, and `more`.

    Args:
        pipe: the pipeline.
        params: canonical or placed parameters, or their shapes (`jax.eval_shape(init, key)`).
        batch: a batch of all rows, or its shapes; None where it is checked by the numbers that make
            it, as in `more`.
        more: other values that the results depend on: a learning rate, a seed, the number of
            steps.
    """
    return _of_steps(pipe._steps, params, batch, **more)


def _of_steps(steps: Any, params: PyTree, batch: PyTree, /, **more: Any) -> dict[str, str]:
    """The `fingerprint` of a pipeline's steps."""
    table, mesh = steps.schedule, steps.partition.mesh
    settings: Any = jax.config
    found = {
        "versions": f"jaxpipe {__version__}, jax {jax.__version__}, jaxlib {version('jaxlib')}, "
        f"Python {sys.version.split()[0]}",
        "schedule": f"{table.name} of {table.num_stages} stages and {table.num_microbatches} "
        f"microbatches {_digest(str((table.slices, table.rows)))}",
        "mesh": f"{dict(mesh.shape)} of {mesh.devices.flat[0].device_kind} "
        f"{_digest(str([d.id for d in mesh.devices.flat]))}",
        "pipeline": _options(steps),
        "parameters": _tree(params),
        "batch": _tree(batch),
        "precision": f"x64={settings.jax_enable_x64}, "
        f"matmul={settings.jax_default_matmul_precision}",
    }
    return {
        name: text[:_MOST]
        for name, text in (found | {key: repr(value) for key, value in more.items()}).items()
    }


def check_same(pipe: Any, params: PyTree, batch: PyTree = None, **more: Any) -> None:
    """Compare the `fingerprint` of all processes before anything is placed or run; every process of
    a job calls it.

    A `Pipeline` compares tables, shapes, code and versions by itself when it first runs; this is
    for what it cannot know (`more`), and for programs that were compiled by `pipe.lower`.

    Raises:
        PipelineError: in every process, with each difference and the processes on its two sides.

    Example:
        check_same(pipe, jax.eval_shape(model.init, key), rows=256, learning_rate=1e-3)
    """
    compare(
        {"call": "check_same"} | fingerprint(pipe, params, batch, **more),
        range(jax.process_count()),
    )


def compare_first_step(
    steps: Any, call: str, arguments: tuple[PyTree, PyTree, Any, PyTree], code: Any
) -> None:
    """Compare what the processes of a pipeline's mesh are about to compile, when it first runs.

    Raises:
        PipelineError: in every process, with each difference and the processes on its two sides.
    """
    processes = sorted({device.process_index for device in steps.partition.mesh.devices.flat})
    if len(processes) == 1:
        return
    params, batch, rng, state = arguments
    more = {"rng": _tree(rng), "state": _tree(state)} | code_texts(code)
    compare({"call": call} | _of_steps(steps, params, batch) | more, processes)


def code_texts(code: Any) -> dict[str, str]:
    """Name -> text of each traced function: how many operations it has, and a digest of what they
    are.

    The digest knows no order and no names, which may differ between processes for the same code,
    but primitives, shapes and numbers.
    """
    functions: list[tuple[str, Any]] = [
        (f"stage {code.kind_of.index(k)}", kind) for k, kind in enumerate(code.kinds)
    ]
    functions = [("first", code.first)] * bool(code.first.evaluate.eqns) + functions
    functions += [] if code.last is None else [("last", code.last)]
    found = {}
    for name, function in functions:
        lines = sorted((*_operations(function.hoist), *_operations(function.evaluate)))
        found[f"code of {name}"] = f"{len(lines)} operations {_digest(chr(10).join(lines))}"
    ticks = np.stack(code.program.ticks.columns, axis=-1)
    segments = [(s.start, s.stop, s.period) for s in code.program.segments]
    found["program"] = f"{len(ticks)} ticks {_digest(f'{segments} {ticks.tobytes().hex()}')}"
    return found


def _operations(jaxpr: Any) -> Iterator[str]:
    """Every operation with the shapes or numbers that it takes and gives, those inside
    others too.
    """
    for eqn in jaxpr.eqns:
        takes = [
            repr(v.val) if isinstance(v, core.Literal) else v.aval.str_short() for v in eqn.invars
        ]
        yield f"{eqn.primitive.name} {takes} {[v.aval.str_short() for v in eqn.outvars]}"
        for inner in core.jaxprs_in_params(eqn.params):
            yield from _operations(inner)


def _options(steps: Any) -> str:
    """What else a pipeline was given."""
    functions, dtype, own = steps.functions, steps.memory.accumulate, steps.partition
    parts = [f"axis={own.axis!r}", f"data_axes={own.data_axes}", f"loss={functions.loss.value}"]
    parts += [f"accumulate_dtype={None if dtype is None else np.dtype(dtype).name}"]
    parts += [f"prices={steps.target.overheads}"]
    parts += (
        [f"layout={'|'.join(own.layout.layers.stages)!r}"] if own.layout.layers is not None else []
    )
    return ", ".join(
        [*parts, *(f"with {f.name}" for f in (functions.first, functions.last) if f is not None)]
    )


def _tree(tree: PyTree) -> str:
    leaves = jax.tree.leaves(tree)
    count = sum(int(np.prod(np.shape(leaf), dtype=np.int64)) for leaf in leaves)
    return (
        f"{len(leaves)} arrays of {count:,} numbers, {described(tree, 3)} "
        f"{_digest(described(tree, len(leaves)))}"
    )


def _digest(text: str) -> str:
    return f"({hashlib.sha256(text.encode()).hexdigest()[:8]})"
