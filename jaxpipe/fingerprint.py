"""What all processes of a job must have in common, compared before the first step through JAX's
coordination service.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

# JAX has no public name for the client; orbax takes it from here too
from jax._src import distributed
from jax.extend import core

from .arrays import Params, PyTree, described
from .errors import PipelineError
from .jaxprs.equations import every_equation
from .model.arguments import StepArguments
from .version import __version__

_MOST = 400  # characters of an entry
# Seconds between two processes at a comparison: one may prepare data first.
_WAIT = 600.0
# Seconds that a process waits until the others have read why they are refused.
_LEAVE = 10.0


def client() -> Any:
    """The client of JAX's coordination service, whose messages need no collective, so that none
    waits for ever; None where `jax.distributed` was not initialized.
    """
    return distributed.global_state.client


def texts_of(service: Any, folder: str) -> dict[int, str]:
    """The text of each process in a folder of the service."""
    found = service.key_value_dir_get(f"{folder}/")
    return {int(key.rsplit("/", 1)[1]): text for key, text in found}


def fingerprint(pipe: Any, params: Params, batch: PyTree = None, **more: object) -> dict[str, str]:
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
    values = {name: repr(value) for name, value in more.items()}
    return _of_steps(pipe._steps, params, batch, values)


def _of_steps(steps: Any, params: Params, batch: PyTree, more: Mapping[str, str]) -> dict[str, str]:
    """The `fingerprint` of a pipeline's steps."""
    table, mesh = steps.schedule, steps.partition.mesh
    settings = jax.config
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
    return {name: text[:_MOST] for name, text in {**found, **more}.items()}


def check_same(pipe: Any, params: Params, batch: PyTree = None, **more: object) -> None:
    """Compare the `fingerprint` of all processes before anything is placed or run; every process of
    a job calls it.

    A `Pipeline` compares tables, shapes, code and versions by itself when it first runs; this is
    for what it cannot know (`more`), and for programs that were compiled by `pipe.lower`.

    Raises:
        PipelineError: in every process, with each difference and the processes on its two sides.

    Example:
        check_same(pipe, jax.eval_shape(model.init, key), rows=256, learning_rate=1e-3)
    """
    texts = {"call": "check_same"} | fingerprint(pipe, params, batch, **more)
    compare(texts, range(jax.process_count()))


def compare_first_step(steps: Any, given: StepArguments, step: Any) -> None:
    """Compare what the processes of a pipeline's mesh are about to compile, when it first runs.

    Raises:
        PipelineError: in every process, with each difference and the processes on its two sides.
    """
    devices = steps.partition.mesh.devices.flat
    processes = sorted({device.process_index for device in devices})
    if len(processes) == 1:
        return
    own = {"rng": given.rng, "state": given.state, "scale": given.scale}
    more = {name: _tree(tree) for name, tree in own.items()} | code_texts(step)
    call = "a step" if step.setup.training else "forwards alone"
    compare({"call": call} | _of_steps(steps, given.params, given.batch, more), processes)


def code_texts(step: Any) -> dict[str, str]:
    """Name -> text of the program, and of each traced function: how many operations it has, and a
    digest of what they are.

    The digest knows no order and no names, which may differ between processes for the same code,
    but primitives, shapes and numbers.
    """
    code, program = step.code, step.program
    functions = [(f"stage {code.kind_of.index(k)}", kind) for k, kind in enumerate(code.kinds)]
    functions = [("first", code.first)] * bool(code.first.evaluate.eqns) + functions
    functions += [] if code.last is None else [("last", code.last)]
    found = {}
    for name, function in functions:
        eqns = (*every_equation(function.hoist), *every_equation(function.evaluate))
        lines = sorted(map(_operation, eqns))
        found[f"code of {name}"] = f"{len(lines)} operations {_digest(chr(10).join(lines))}"
    ticks = np.stack(program.ticks.columns, axis=-1)
    segments = [(s.start, s.stop, s.period) for s in program.segments]
    found["program"] = f"{len(ticks)} ticks {_digest(f'{segments} {ticks.tobytes().hex()}')}"
    return found


def _operation(eqn: core.JaxprEqn) -> str:
    """An operation with the shapes or numbers that it takes and gives."""
    takes, gives = (
        [repr(v.val) if isinstance(v, core.Literal) else v.aval.str_short() for v in atoms]
        for atoms in (eqn.invars, eqn.outvars)
    )
    return f"{eqn.primitive.name} {takes} {gives}"


def _options(steps: Any) -> str:
    """The settings of a pipeline."""
    dtype = steps.memory.accumulate
    accumulate = None if dtype is None else np.dtype(dtype).name
    own = [f"loss={steps.functions.loss.value}", f"accumulate={accumulate}"]
    return ", ".join([*steps.settings, *own, f"prices={steps.target.overheads}"])


def _tree(tree: PyTree) -> str:
    leaves = jax.tree.leaves(tree)
    count = sum(int(np.prod(np.shape(leaf), dtype=np.int64)) for leaf in leaves)
    return (
        f"{len(leaves)} arrays of {count:,} numbers, {described(tree, 3)} "
        f"{_digest(described(tree, len(leaves)))}"
    )


def _digest(text: str) -> str:
    return f"({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def compare(texts: Mapping[str, str], processes: Sequence[int]) -> None:
    """Compare texts by name over processes, all of which call it equally often.

    Raises:
        PipelineError: in every process, with each difference and the processes on its two sides; or
            naming those that did not come.
    """
    service, me, lead = client(), jax.process_index(), min(processes)
    if service is None:
        return
    group = f"jaxpipe/compare/{lead}-{max(processes)}-{len(processes)}"
    # The service counts the comparisons of each process, so that the n-th of one is compared with
    # the n-th of the others.
    place = f"{group}/{service.key_value_increment(f'{group}/count/{me}', 1)}"
    service.key_value_set(f"{place}/of/{me}", json.dumps(dict(texts)))
    try:
        service.wait_at_barrier(f"{place}/come", int(1000 * _WAIT), list(processes))
        if me == lead:
            found = texts_of(service, f"{place}/of")
            faults = differences({process: json.loads(found[process]) for process in processes})
            service.key_value_set(f"{place}/verdict", json.dumps(faults))
        verdict = service.blocking_key_value_get(f"{place}/verdict", int(1000 * _LEAVE))
    except jax.errors.JaxRuntimeError as error:
        late = [lead]
        with suppress(jax.errors.JaxRuntimeError):
            found = texts_of(service, f"{place}/of")
            late = [process for process in processes if process not in found] or late
        raise PipelineError(
            f"{named(late, 'has', 'have')} not come to compare with the others within {_WAIT:g} s; "
            "every process has to run the same steps of the same pipelines in the same order (see "
            f"its log) ({error})"
        ) from error
    if faults := json.loads(verdict):
        with suppress(jax.errors.JaxRuntimeError):  # of a process that is gone by now
            # Process 0 holds the service: it may leave when all have read.
            service.wait_at_barrier(f"{place}/read", int(1000 * _LEAVE), list(processes))
        raise PipelineError.listing("the processes of this job were not started alike", faults)


def differences(texts: Mapping[int, Mapping[str, str]]) -> list[str]:
    """A sentence for each thing in which processes differ from the first, from what each has.

    >>> differences({0: {"schedule": "1f1b"}, 1: {"schedule": "gpipe"}, 2: {"schedule": "gpipe"}})
    ['schedule: process 0 has 1f1b, but processes 1, 2 have gpipe']
    """
    faults = []
    for name in dict.fromkeys(name for each in texts.values() for name in each):
        first, *others = (
            f"{named(members, 'has', 'have')} {text}"
            for text, members in by_text(
                {p: each.get(name, "nothing") for p, each in texts.items()}
            )
        )
        if others:
            faults.append(f"{name}: {first}, but {' and '.join(others)}")
    return faults


def by_text(texts: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    """Each text with the processes that have it."""
    groups: dict[str, list[int]] = {}
    for process, text in texts.items():
        groups.setdefault(text, []).append(process)
    return list(groups.items())


def named(members: Sequence[int], one: str, several: str) -> str:
    """Processes by number, with a verb."""
    more = f" and {len(members) - 4} more" if len(members) > 4 else ""
    shown = ", ".join(map(str, members[:4])) + more
    if len(members) == 1:
        return f"process {shown} {one}"
    return f"processes {shown} {several}"
