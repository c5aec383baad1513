"""Counts of `Loss.SUM_OVER_COUNT`: their sum before the first forward, where the rows of the batch
determine it, so that backwards begin with the cotangent that the loss of the step has.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays import Leaves, PyTree, Rng
from ..errors import PipelineError
from ..jaxprs.equations import results_of
from ..model.batch import map_rows
from ..model.functions import Functions
from ..table.kinds import By
from .code import StageCode


def check_count(name: str, code: StageCode) -> None:
    """PipelineError where the count that a `last` returns has a gradient."""
    if code.loses_count:
        raise PipelineError(
            f"`{name}` would lose a gradient: it returns (sum, count), and the count depends on "
            "its parameters or on x. The cotangent of a count is known after the last forward, "
            "and backwards begin before. Where that gradient is not wanted, return (sum, "
            "jax.lax.stop_gradient(count)); else return sum / count of each microbatch, with "
            "loss=Loss.MEAN"
        )


def total_count(
    code: StageCode,
    functions: Functions,
    batch: PyTree,
    rng: Rng,
    stage: jax.Array,
    data_axes: tuple[str, ...] = (),
) -> jax.Array | None:
    """The sum of the counts of all microbatches of a batch that is cut, before they run; None where
    something besides rows and context determines a count, or the loss has none.

    Microbatches are a mapped axis: nothing of the batch is copied, and no loop is run.
    """
    count = code.count
    if count is None:
        return None
    leaves, tree = jax.tree.flatten(batch)
    marks = map_rows(lambda _: True, batch, functions.whole, lambda _: False)
    axes = [0 if has_rows else None for has_rows in jax.tree.leaves(marks)]

    def one(number: jax.Array, rows: Leaves) -> jax.Array:
        wants = frozenset({"ctx"})
        extra = functions.extra(batch, rng, stage, number, wants, of=By.LAST)
        extra["microbatch"] = jax.tree.unflatten(tree, rows)
        return results_of(count, *jax.tree.leaves(extra))[0]

    numbers = jnp.arange(next(n.shape[0] for n, a in zip(leaves, axes, strict=True) if a == 0))
    total = jnp.sum(jax.vmap(one, in_axes=(0, axes))(numbers.astype(jnp.int32), leaves))
    return lax.psum(total, data_axes) if data_axes else total
