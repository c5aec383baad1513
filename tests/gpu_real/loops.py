"""Loops on one device: the forms of a block under a predicate, and loops that users write in a
stage.

XLA's WHILE node of a CUDA graph reads the condition before the body has written it where the
condition is nothing but a flag of the carry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxpipe as jp
from jaxpipe.lowering.target import Target
from jaxpipe.spmd.block import while_once
from jaxpipe.spmd.xla import Options, options_for
from tests.tolerance import relative, same

TICKS, SIZE, RUNS = 12, 64, 30
FORMS: dict[str, Callable[..., Any]] = {
    "counted": lambda flag, f, x: while_once(flag, f, x)[1],
    "fori_loop": lambda flag, f, x: lax.fori_loop(0, flag.astype(int), lambda _, x: f(x), x),
    "cond": lambda flag, f, x: lax.cond(flag, f, lambda x: x, x),
}
DRAW = np.random.default_rng(0)
MATRIX = DRAW.standard_normal((SIZE, SIZE)) / SIZE**0.5
FLAGS = DRAW.random(TICKS) < 0.5
BLOCKS: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: 0.5 * x + 1,
    "matmul": lambda x: jnp.tanh(x @ MATRIX),
    "scan": lambda x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, MATRIX[None])[0],
}


def bare(x: Any) -> Any:
    """A condition that is a flag of the carry; three trips."""

    def body(carry: Any) -> Any:
        _, trips, x = carry
        return trips + 1 < 3, trips + 1, 0.5 * x + 1

    return lax.while_loop(lambda carry: carry[0], body, (jnp.sum(x) < 1e30, 0, x))[2]


def counted(x: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, 0.5 * c[1] + 1), (0, x))[1]


def once_or_not(x: Any) -> Any:
    return lax.cond(jnp.sum(x) < 1e30, lambda x: 0.5 * x + 1, lambda x: x, x)


OWN = (bare, counted, once_or_not)


def distinct(call: Callable[[], Any]) -> tuple[Any, int]:
    """The first result of some runs, and how many results have other bits."""
    found = [call() for _ in range(RUNS)]
    kept = jax.device_get(found)
    return found[0], [same(each, kept[0]) for each in kept].count(False)


def forms(options: Options) -> Iterator[tuple[str, Any]]:
    """Blocks under predicates in a loop, beside the same in Python."""
    x = DRAW.standard_normal((SIZE, SIZE))
    for form, maybe in FORMS.items():
        for name, f in BLOCKS.items():
            wanted = x
            for flag in FLAGS:
                wanted = np.asarray(f(jnp.asarray(wanted))) if flag else wanted

            def tick(x: Any, flag: Any, maybe: Any = maybe, f: Any = f) -> tuple[Any, None]:
                return maybe(flag, f, x), None

            step = jax.jit(lambda x, flags, tick=tick: lax.scan(tick, x, flags)[0])
            compiled = step.lower(x, FLAGS).compile(compiler_options=options or None)
            found, other = distinct(partial(compiled, x, FLAGS))
            yield f"{form}, {name}", {"loss": relative(found, wanted), "other bits": [other]}


def own(options: Options | None) -> Iterator[tuple[str, Any]]:
    """A loop of the user's in a stage: of a step, and of `evaluate`."""
    mesh = jax.make_mesh((1,), ("pipe",))
    schedule = jp.schedules.build("interleaved_1f1b", devices=1, microbatches=4, chunks=2)
    weights = {"stages": {"w": np.stack([MATRIX, MATRIX.T])}, "last": {}}
    batch = {"x": np.random.default_rng(1).standard_normal((8, SIZE))}
    for user_loop in OWN:

        def stage(p: Any, x: Any, loop: Any = user_loop) -> Any:
            return x + jnp.tanh(x @ p["w"]) * jnp.mean(loop(lax.stop_gradient(x)))

        model = jp.Model(stage, last=lambda p, x, mb: jnp.mean(x**2))
        pipe = jp.Pipeline(model, schedule, mesh)
        params = pipe.place(weights)
        plain = jax.jit(jax.value_and_grad(partial(model.loss, microbatches=4)))
        loss, grads = jax.device_get(plain(weights, batch))
        step = pipe.jit(pipe.value_and_grad, compiler_options=options)
        found, other = distinct(partial(step, params, batch))
        of_grads = relative(jax.device_get(pipe.canonical(found[1])), grads)
        told = {"loss": relative(found[0], loss), "grads": of_grads, "other bits": [other]}
        yield f"{user_loop.__name__}, a step", told
        evaluate = pipe.jit(pipe.evaluate, compiler_options=options)
        found, other = distinct(partial(evaluate, params, batch))
        yield (
            f"{user_loop.__name__}, evaluate",
            {"loss": relative(found, loss), "other bits": [other]},
        )


def loops(options: Options | None) -> Iterator[tuple[str, Any]]:
    """All of them."""
    mesh = jax.make_mesh((1,), ("pipe",))
    yield from forms({**options_for(Target.of(mesh, ())), **(options or {})})
    yield from own(options)
