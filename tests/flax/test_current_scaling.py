"""FP8 whose scales come from the arrays themselves: `jax.nn.scaled_matmul`'s, with blocks of 32,
and qwix's.  They need nothing of a pipeline.

Scales of blocks are powers of two.  Weights are -1, 0 and 1, and x is a multiple of 1/4: what the
first stage returns is one of 2^-7, what the second one does of 2^-12, and no sum has more than 24
bits.  So every operation is exact but for the roundings to FP8, of equal numbers on both sides.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe as jp
from jaxpipe.flax import End, from_linen
from tests.forms import gpu_form
from tests.parity.engines import mesh_of
from tests.tiers import slow
from tests.tolerance import FLOAT64, relative, same, step_error

BLOCK, M = 32, 4
CONFIGS = [jax.nn.get_scaled_dot_general_config("mxfp8")] * 3


def product(x: Any, w: Any) -> Any:
    """x [rows, in] @ w [in, out] with a scale for each 32 numbers of a row, and of a gradient's."""
    dims = ((1,), (0,)), ((), ())
    return jax.nn.scaled_dot_general(x, w, dims, jnp.float32, configs=CONFIGS)


def stage(params: Any, x: Any) -> Any:
    return x + nn.relu(product(x, params["w"])) / 32


def last(_: Any, x: Any, microbatch: Any) -> Any:
    """Gradients of a sum with signs are exact."""
    return jnp.sum(x * microbatch["y"]) / x.size


def batch(count: int) -> Any:
    rng = np.random.default_rng(9)
    signs = rng.choice([-1, 1], (count, BLOCK)).astype(np.float32)
    return {"x": rng.integers(-16, 16, (count, BLOCK)).astype(np.float32) / 4, "y": signs}


def grads_of(model: Any, params: Any, rows: Any) -> Any:
    plain = jax.value_and_grad(lambda p: model.loss(p, rows, microbatches=M))
    return jax.jit(plain)(params)


@pytest.mark.parametrize("how", [{}, {"executor": gpu_form()}], ids=["cpu", "gpu_form"])
@pytest.mark.parametrize("name", ["zb_h1", slow("1f1b"), slow("dualpipe")])
def test_scaled_matmul_in_a_stage_gives_the_bits_of_plain_jax(name: str, how: Any) -> None:
    model = jp.Model(stage, last=last)
    weights = np.random.default_rng(0).integers(-1, 2, (2, BLOCK, BLOCK))
    params = {"stages": {"w": jnp.asarray(weights, jnp.float32)}, "last": {}}
    pipe = jp.Pipeline(
        model, jp.schedules.build(name, devices=2, microbatches=M), mesh_of(2), **how
    )
    rows = batch(M * BLOCK)
    loss, grads = pipe.value_and_grad(pipe.place(params), rows)
    wanted, plain = grads_of(model, params, rows)
    assert loss == wanted
    assert same(pipe.canonical(grads)["stages"], plain["stages"])
    x = rows["x"]
    for w in weights:
        x = x + np.maximum(x @ w, 0) / 32
    exact = np.sum(x * rows["y"]) / x.size
    assert 0 < abs(loss - exact) < 0.1 * abs(exact), "nothing was rounded to FP8"


class Gated(nn.Module):
    """A gated feed-forward block in float64."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def dense(name: str, width: int, u: Any) -> Any:
            return nn.Dense(width, use_bias=False, param_dtype=jnp.float64, name=name)(u)

        inner = nn.silu(dense("gate", 2 * BLOCK, x)) * dense("up", 2 * BLOCK, x)
        return x + dense("down", BLOCK, inner)


# qwix 0.1.8 looks for a class of flax that is an alias now.
@pytest.mark.filterwarnings("ignore:'VariableState' was removed:DeprecationWarning")
@pytest.mark.parametrize("how", [{}, {"executor": gpu_form()}], ids=["cpu", "gpu_form"])
def test_qwix_in_a_stage_gives_the_numbers_of_plain_jax(how: Any) -> None:
    """In float64, where no value is so near to the middle between two of FP8 that another order of
    sums would round it to the other one.
    """
    qwix = pytest.importorskip("qwix")
    e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
    rule = qwix.QtRule(weight_qtype=e4m3, act_qtype=e4m3, bwd_qtype=e5m2)
    rows = jax.tree.map(lambda leaf: leaf.astype(np.float64), batch(2 * M))
    variables = [Gated().init(jax.random.key(i), rows["x"][:1]) for i in range(2)]
    in_fp8 = qwix.quantize_model(Gated(), qwix.QtProvider([rule]))
    made = from_linen(in_fp8, variables, num_stages=2, last=End(None, last))
    schedule = jp.schedules.build("zb_h1", devices=2, microbatches=M)
    pipe = jp.Pipeline(made.model, schedule, mesh_of(2), **how)
    wanted = grads_of(made.model, made.params, rows)
    plain = from_linen(Gated(), variables, num_stages=2, last=End(None, last)).model
    assert relative(wanted[0], grads_of(plain, made.params, rows)[0]) > 1e-4, "nothing was rounded"
    own = (wanted[0], {"stages": wanted[1]["stages"]})
    assert step_error(pipe, made.params, rows, own) < FLOAT64
