"""The pieces of a stage: the right numbers, every matmul done exactly once, and nothing kept that
need not be.
"""

from math import prod

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.inspect.step_report import fallbacks
from jaxpipe.jaxprs.equations import every_equation
from jaxpipe.stage.code import run
from jaxpipe.stage.trace import trace_stage
from jaxpipe.table.effects import LastUse, Place
from tests.lowering.stages import (
    MATRICES,
    OFFLOAD,
    REMAT,
    ROWS,
    STAGES,
    TWINS,
    UNCUT,
    WIDTH,
    X,
    any_case,
    arguments,
    case_of,
    close,
    compiles_bodies,
    cotangents,
    draw,
    mixed_precision,
    offloaded_branch,
    plus,
    work,
)
from tests.tiers import slow
from tests.tolerance import apart, longest_chain


@pytest.mark.parametrize(
    "name", [slow(name) if name == "moe" else name for name in (*STAGES, *TWINS)]
)
def test_pieces_give_the_numbers_of_vjp(name):
    function, params, x, extra = any_case(name)
    y, vjp = jax.vjp(lambda p, h: function(p, h, extra), params, x)
    dy = cotangents(y)

    def gradients(params, x):
        y, vjp = jax.vjp(lambda p, h: function(p, h, extra), params, x)
        return vjp(jax.tree.unflatten(jax.tree.structure(y), dy))

    wanted = jax.tree.leaves(vjp(jax.tree.unflatten(jax.tree.structure(y), dy)))
    code = trace_stage(function, params, x, extra)
    given, found_y = arguments(code, params, x, extra, dy)
    assert close(found_y, jax.tree.leaves(y))
    count = len(jax.tree.leaves(params))
    both = run(code.backward, *given)
    assert close(both, wanted)
    by_input = run(code.input_grad, *given)
    dx, stash = (
        by_input[: len(by_input) - len(code.avals[Place.STASH])],
        by_input[len(by_input) - len(code.avals[Place.STASH]) :],
    )
    assert close(dx, wanted[count:])
    assert close(run(code.weight_grad, *given, *stash), wanted[:count])
    halves = [*run(code.weight_grad, *given, *stash), *dx]
    if name in REMAT or compiles_bodies(code.backward, code.input_grad, code.weight_grad):
        # XLA fuses the body of a loop in the halves in another way than in the whole, and work that
        # is done again is a body too.
        assert close(halves, both, apart(longest_chain(gradients, params, x)))
    else:
        # Run operation by operation, each compiled once by itself, the two halves do what the whole
        # does: the same bits.
        assert all(np.array_equal(a, b) for a, b in zip(halves, both, strict=True))


@pytest.mark.parametrize("name", [*STAGES, *TWINS])
def test_forward_and_backward_do_the_work_of_vjp_and_no_more(name):
    function, params, x, extra = any_case(name)
    code = trace_stage(function, params, x, extra)
    plain = work(jax.make_jaxpr(lambda p, h: function(p, h, extra))(params, x).jaxpr)

    def both(params, x):
        y, vjp = jax.vjp(lambda p, h: function(p, h, extra), params, x)
        return y, vjp(y)

    assert plain, "a stage without work would show nothing"
    assert work(code.forward) == plain
    assert work(code.evaluate) == plain
    assert plus(work(code.forward), work(code.backward)) == work(
        jax.make_jaxpr(both)(params, x).jaxpr
    )
    assert not work(code.hoist)


@pytest.mark.parametrize("name", [*STAGES, *TWINS])
def test_input_gradient_and_weight_gradient_share_the_work_of_the_backward(name):
    function, params, x, extra = any_case(name)
    code = trace_stage(function, params, x, extra)
    assert plus(work(code.input_grad), work(code.weight_grad)) == work(code.backward)
    joint = [
        text.split(":")[0] for text in fallbacks(code.input_grad, len(code.avals[Place.SENT_DX]))
    ]
    expected = [UNCUT[name][0]] if name in UNCUT else []
    # Of a branch under remat JAX 0.11 runs the forward again for one result of W alone.
    again = name == "offload in a branch" and jax.__version_info__ < (0, 12)
    assert joint == expected * (1 + again)


@pytest.mark.parametrize("name", UNCUT)
def test_only_what_cannot_be_cut_is_joint(name):
    code = trace_stage(*any_case(name))
    assert work(code.weight_grad)["dot_general"] == UNCUT[name][1]


@pytest.mark.parametrize(
    ("name", "matmuls"),
    [("linear", (1, 1, 1)), ("perceptron", (2, 2, 2)), ("scan over layers", (6, 6, 6))],
)
def test_each_matmul_has_one_in_each_piece(name, matmuls):
    code = trace_stage(*case_of(name))
    found = tuple(
        work(piece)["dot_general"] for piece in (code.forward, code.input_grad, code.weight_grad)
    )
    assert found == matmuls


def test_remat_runs_the_forward_again_in_i_and_not_again_in_w():
    code = trace_stage(*case_of("remat"))
    pieces = {
        key: work(getattr(code, key))["dot_general"]
        for key in ("forward", "input_grad", "weight_grad", "backward")
    }
    # x + tanh(x a) b: the backward needs tanh(x a) again, but not its product with b.
    assert pieces == {"forward": 2, "input_grad": 3, "weight_grad": 2, "backward": 5}


def test_work_on_parameters_alone_is_hoisted_out_of_every_microbatch():
    def folded(params, x, extra):
        return jnp.tanh(x @ (params["a"] @ params["b"]).astype(jnp.float32).astype(x.dtype))

    code = trace_stage(folded, draw(MATRICES), draw(X), {})
    assert work(code.hoist)["dot_general"] == 1
    assert work(code.forward)["dot_general"] == 1


def test_masks_of_the_trips_of_a_loop_are_made_in_the_trips():
    """Kept for each trip of both loops, the mask of causal attention by blocks would have an entry
    for each pair of a query and a block of keys.
    """

    @jax.checkpoint
    def of_queries(params, x, i):
        @jax.checkpoint
        def of_keys(total, j):
            seen = i * ROWS + jnp.arange(ROWS) >= j * ROWS + jnp.arange(ROWS)
            return total + jnp.where(seen[:, None], jnp.tanh(x @ params["a"]), 0), None

        return jax.lax.scan(of_keys, jnp.zeros_like(x), jnp.arange(8))[0]

    def by_blocks(params, x, extra):
        return jax.lax.map(lambda i: of_queries(params, x, i), jnp.arange(8)).sum(axis=0)

    code = trace_stage(by_blocks, draw(MATRICES), draw(X), {})
    assert not code.hoist.outvars
    assert (*code.avals[Place.RESIDUAL_INPUT], *code.avals[Place.RESIDUAL_WEIGHT]) == ()


def bytes_of(avals):
    return sum(prod(a.shape) * a.dtype.itemsize for a in avals)


def test_a_tanh_layer_keeps_its_output_and_nothing_else():
    code = trace_stage(
        lambda params, x, extra: jnp.tanh(x @ params["a"]), draw({"a": (WIDTH, WIDTH)}), draw(X), {}
    )
    # tanh' = 1 - y^2 needs y, or 1 - y^2 itself; x has a slot of its own and a is a parameter.
    assert (
        bytes_of((*code.avals[Place.RESIDUAL_INPUT], *code.avals[Place.RESIDUAL_WEIGHT]))
        == ROWS * WIDTH * 8
    )
    assert bytes_of(code.avals[Place.STASH]) == ROWS * WIDTH * 8


def test_between_i_and_w_are_the_fewest_bytes():
    """W makes the input of each matmul again from x and residuals, which take no more memory for
    this, and the first part of a backward does not write it.
    """

    def layer(params, x, extra):
        centred = x - x.mean(-1, keepdims=True)
        h = centred * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * params["scale"]
        return (
            x + jax.nn.gelu((h + params["shift"]) @ params["up"] + params["bias"]) @ params["down"]
        )

    rows, width, hidden = 64, 16, 64
    shapes = {"scale": (width,), "shift": (width,), "bias": (hidden,)}
    shapes |= {"up": (width, hidden), "down": (hidden, width)}
    params, x = (
        {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()},
        (rows, width),
    )
    code = trace_stage(layer, params, jax.ShapeDtypeStruct(x, jnp.float32), {})
    assert code.liveness.x is LastUse.WEIGHT_GRAD
    # Two arrays make the GELU and its gradient.
    kept = [(rows, hidden), (rows, hidden), (rows, 1), (rows, 1)]
    assert bytes_of(code.avals[Place.RESIDUAL_WEIGHT]) == sum(4 * prod(shape) for shape in kept)
    # The gradient of the first matmul's result; and gradients of scale, shift and bias, which are
    # sums over rows.
    left = [(rows, hidden), (width,), (width,), (hidden,)]
    assert bytes_of(code.avals[Place.STASH]) == sum(4 * prod(shape) for shape in left)


def test_a_linear_layer_keeps_nothing():
    code = trace_stage(*case_of("linear"))
    assert not code.avals[Place.RESIDUAL_INPUT]
    assert not code.avals[Place.RESIDUAL_WEIGHT]
    assert not code.avals[Place.STASH]


@pytest.mark.parametrize("name", [*STAGES, *TWINS])
def test_residuals_are_no_more_than_those_of_vjp(name):
    function, params, x, extra = any_case(name)
    code = trace_stage(function, params, x, extra)
    _, vjp = jax.eval_shape(
        lambda p, h: jax.vjp(lambda p, h: function(p, h, extra), p, h), params, x
    )
    # What JAX itself would keep besides parameters and input.
    assert bytes_of(
        (*code.avals[Place.RESIDUAL_INPUT], *code.avals[Place.RESIDUAL_WEIGHT])
    ) <= bytes_of(jax.tree.leaves(vjp.opaque_residuals))


def test_remat_keeps_nothing_but_the_input():
    code = trace_stage(*case_of("remat"))
    assert not code.avals[Place.RESIDUAL_INPUT]
    assert not code.avals[Place.RESIDUAL_WEIGHT]


@pytest.mark.parametrize(
    "function", [mixed_precision, jax.checkpoint(mixed_precision)], ids=["saved", "remat"]
)
def test_a_cast_parameter_is_hoisted_once_also_where_the_backward_would_cast_again(function):
    code = trace_stage(function, *case_of("mixed precision")[1:])
    assert [str(v.aval.dtype) for v in code.hoist.outvars] == ["bfloat16", "bfloat16"]
    for jaxpr in (code.forward, code.backward):
        parameters = set(jaxpr.invars[len(code.consts) : len(code.consts) + 2])
        assert not any(
            eqn.primitive.name == "convert_element_type" and parameters & {*eqn.invars}
            for eqn in jaxpr.eqns
        )


def spaces(jaxpr):
    """The memories in which a jaxpr has values, also in its bodies."""
    values = [*jaxpr.invars, *jaxpr.outvars]
    values += [v for eqn in jaxpr.eqns for v in (*eqn.invars, *eqn.outvars)]
    inner = [body for eqn in jaxpr.eqns for body in jax.extend.core.jaxprs_in_params(eqn.params)]
    return {v.aval.memory_space.name for v in values}.union(*map(spaces, inner))


def sharded(params, x, extra):
    """What is kept goes to the host inside `shard_map`."""
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = jax.P(None, "tensor"), jax.P("tensor"), jax.P()

    def local(a, b, x):
        return jax.lax.psum(jnp.tanh(checkpoint_name(x @ a, "kept")) @ b, "tensor")

    split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P())
    return split(params["a"], params["b"], x)


@pytest.mark.parametrize("function", [offloaded_branch, sharded])
def test_what_a_policy_offloads_is_left_on_the_device_also_in_bodies(function):
    """The program itself moves residuals; it could not write a value on the host into a pool."""
    params, x, extra = case_of("cond")[1:]
    function = jax.checkpoint(function, policy=OFFLOAD)
    plain = jax.make_jaxpr(jax.vjp, static_argnums=0)(function, params, x, extra)
    assert spaces(plain.jaxpr) == {"Device", "Host"}
    code = trace_stage(function, params, x, extra)
    assert code.offloads
    for piece in (code.forward, code.backward, code.input_grad):
        assert spaces(piece) == {"Device"}


def test_prints_stay_in_the_forward():
    def printing(params, x, extra):
        jax.debug.print("{}", x.sum())

        def layer(h, w):
            jax.debug.print("{}", h.sum())
            return jnp.tanh(h @ w), None

        return jax.lax.scan(layer, x, params)[0]

    code = trace_stage(printing, draw((3, WIDTH, WIDTH)), draw(X), {})

    def prints(jaxpr):
        return sum(eqn.primitive.name == "debug_print" for eqn in every_equation(jaxpr))

    assert (prints(code.forward), prints(code.evaluate)) == (2, 2)
    assert [prints(jaxpr) for jaxpr in (code.hoist, code.backward, code.input_grad)] == [0, 0, 0]


def test_a_scan_that_returns_a_number_can_be_cut():
    """As layers do that have a loss of their own beside layers that have none."""

    def scanned(params, x, extra):
        x, losses = jax.lax.scan(
            lambda h, p: (jnp.tanh(h @ jnp.sin(p)), jnp.zeros((), h.dtype)), x, params["a"]
        )
        return x, jnp.sum(losses)

    code = trace_stage(scanned, draw({"a": (3, WIDTH, WIDTH)}), draw(X), {})
    assert work(code.input_grad) + work(code.weight_grad) == work(code.backward)


def test_a_scan_that_stacks_a_number_can_be_cut():
    def scanned(params, x, extra):
        x, numbers = jax.lax.scan(lambda h, p: (jnp.tanh(h @ p), 2.0), x, params["a"])
        return x + jnp.sum(numbers)

    code = trace_stage(scanned, draw({"a": (3, WIDTH, WIDTH)}), draw(X), {})
    assert work(code.input_grad) + work(code.weight_grad) == work(code.backward)
