"""The form of blocks that GPUs run, on the devices at hand, with pools that begin with NaN."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from jaxpipe.lowering.target import GPU_FORM
from jaxpipe.spmd import pools
from jaxpipe.spmd.emit import SpmdExecutor

# Slots of any size are apart.
APART = replace(GPU_FORM, slot_bytes=0)


def gpu_form(*, apart: bool = True) -> SpmdExecutor:
    """The executor of that form; from now on no pool that begins unfilled has zeros.

    Small slots are rows, if they are not `apart`.
    """
    pools.unfilled = poisoned
    return SpmdExecutor(form=APART if apart else GPU_FORM)


def poisoned(shape, dtype):
    """NaN, or the smallest number of what has no NaN."""
    values = pools.zeros(shape, dtype)
    if not jnp.issubdtype(dtype, jnp.number):
        return values
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    return jnp.full_like(values, jnp.nan if inexact else jnp.iinfo(dtype).min)
