"""Functions of stages with what is known of their pieces: cuts, work, shapes."""

from collections import Counter
from math import prod

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.stage.code import run
from jaxpipe.table.effects import Place
from tests.models import twin
from tests.tolerance import FLOAT64

WIDTH, ROWS = 4, 3
POLICIES = jax.checkpoint_policies
OFFLOAD = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["kept"],
    offload_src="device",
    offload_dst="pinned_host",
)
WORK = ("dot_general", "conv_general_dilated")


def work(jaxpr):
    """Matmuls and convolutions that a jaxpr runs, and their multiplications; a scan's body counts
    once a trip.
    """
    total = Counter()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            ((contract, _), _) = eqn.params["dimension_numbers"]
            total[name] += 1
            total["multiplications"] += prod(eqn.outvars[0].aval.shape) * prod(
                eqn.invars[0].aval.shape[d] for d in contract
            )
        if name == "conv_general_dilated":
            kernel = eqn.invars[1].aval.shape
            outputs = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
            total[name] += 1
            total["multiplications"] += prod(eqn.outvars[0].aval.shape) * prod(kernel) // outputs
        trips = eqn.params["length"] if name == "scan" else 1
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    total.update({k: n * trips for k, n in work(inner).items()})
    return total


def plus(*counts):
    return sum(counts, Counter())


def draw(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: jnp.asarray(rng.standard_normal(s) / 2),
        shapes,
        is_leaf=lambda s: isinstance(s, tuple),
    )


def perceptron(params, x, extra):
    return x + jnp.tanh(x @ params["a"]) @ params["b"]


def layers(params, x, extra):
    return jax.lax.scan(lambda h, p: (perceptron(p, h, extra), None), x, params)[0]


def scaled_layers(params, x, extra):
    """A scale that all layers share: its gradient is a carry of the backward scan."""
    scale = params["scale"]
    return jax.lax.scan(lambda h, p: (jnp.tanh((h * scale) @ (p * scale)), None), x, params["a"])[0]


def remat_layers(params, x, extra):
    return jax.lax.scan(jax.checkpoint(lambda h, p: (perceptron(p, h, extra), None)), x, params)[0]


def nested_jit(params, x, extra):
    inner = jax.jit(lambda a, b: jnp.sin(a @ b))
    return jax.jit(lambda p, h: inner(inner(h, p["a"]), p["b"]))(params, x)


@jax.custom_vjp
def matmul_with_own_rule(x, w):
    return jnp.tanh(x @ w)


def _own_forward(x, w):
    y = jnp.tanh(x @ w)
    return y, (x, w, y)


def _own_backward(kept, dy):
    x, w, y = kept
    dh = dy * (1 - y * y)
    return dh @ w.T, x.T @ dh


matmul_with_own_rule.defvjp(_own_forward, _own_backward)


def own_rule(params, x, extra):
    return matmul_with_own_rule(matmul_with_own_rule(x, params["a"]), params["b"])


def own_rule_in_a_scan(params, x, extra):
    return jax.lax.scan(lambda h, p: (own_rule(p, h, extra), None), x, params)[0]


def branches(params, x, extra):
    return jax.lax.cond(extra["flag"], lambda h: perceptron(params, h, extra), lambda h: h * 2.0, x)


def recurrent(params, x, extra):
    """A cell over time: its parameters are constants of the scan, so their gradients are carries of
    the backward scan.
    """

    def step(state, now):
        state = jnp.tanh(now @ params["a"] + state @ params["b"])
        return state, state

    return jax.lax.scan(step, jnp.zeros_like(x[0]), x)[1]


def offloaded_branch(params, x, extra):
    """What one branch keeps goes to the host inside the branch; the other one has nothing of it."""

    def kept(h):
        return jnp.tanh(checkpoint_name(h @ params["a"], "kept"))

    return jax.lax.cond(extra["flag"], kept, lambda h: h @ params["b"], x)


def linear(params, x, extra):
    return x @ params["a"]


def frozen_matrix(params, x, extra):
    return (x @ jax.lax.stop_gradient(params["a"])) @ params["b"]


def scan_in_a_scan(params, x, extra):
    return jax.lax.scan(lambda h, p: (recurrent(p, h, extra), None), x, params)[0]


def reverse_scan(params, x, extra):
    def step(state, now):
        state = jnp.tanh(now @ params["a"] + state @ params["b"])
        return state, state

    return jax.lax.scan(step, jnp.zeros_like(x[0]), x, reverse=True)[1]


def mixed_precision(params, x, extra):
    """Products in bfloat16 of casts of float64 parameters; the casts depend on parameters alone."""
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    return x + (jnp.tanh(x.astype(jnp.bfloat16) @ low["a"]) @ low["b"]).astype(x.dtype)


def named(params, x, extra):
    return checkpoint_name(jnp.tanh(x @ params["a"]), "kept") @ params["b"]


def sorted_and_picked(params, x, extra):
    h = jnp.sort(x @ params["a"], axis=0)
    best = jax.lax.top_k(h, 2)[1]
    return x + jnp.take_along_axis(h, best, axis=-1).sum(-1, keepdims=True) * jnp.cumsum(
        x @ params["b"], axis=0
    )


def switched(params, x, extra):
    steps = [lambda p, h: jnp.tanh(h @ p["a"]), lambda p, h: h @ p["b"] @ p["a"], lambda p, h: h]
    return jax.lax.switch(extra["which"], steps, params, x)


def used_twice(params, x, extra):
    return jnp.tanh(jnp.tanh(x @ params["a"]) @ params["a"].T) @ params["a"]


def convolution(params, x, extra):
    """Over rows, dilated, in two groups of channels."""
    h = jax.lax.conv_general_dilated(
        x.T[None], params["kernel"], (1,), "SAME", rhs_dilation=(2,), feature_group_count=2
    )
    return x + jax.nn.gelu(h[0].T)


def convolution_in_a_scan(params, x, extra):
    return jax.lax.scan(lambda h, p: (convolution(p, h, extra), None), x, params)[0]


def branches_in_a_scan(params, x, extra):
    def layer(h, p):
        return jax.lax.cond(extra["flag"], lambda h: jnp.tanh(h @ p["a"]), lambda h: h, h) @ p[
            "b"
        ], None

    return jax.lax.scan(layer, x, params)[0]


def vmap_of_own_rule(params, x, extra):
    return jax.vmap(lambda row: own_rule(params, row[None], extra)[0])(x)


def loop(params, x, extra):
    return jax.lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ params["a"]), x) @ params["b"]


def jit_in_a_scan(params, x, extra):
    return jax.lax.scan(lambda h, p: (jax.jit(perceptron)(p, h, {}), None), x, params, unroll=3)[0]


def attention(params, x, extra):
    query, key = x @ params["a"], x @ params["b"]
    return x + jax.nn.softmax(query @ key.T) @ x


def prefix_products(params, x, extra):
    return (
        jax.lax.associative_scan(jnp.multiply, jax.nn.sigmoid(x @ params["a"]), axis=0)
        @ params["b"]
    )


@jax.custom_vjp
def kernel(x, w):
    """As a fused kernel would: one opaque operation gives dx and dw."""
    return jnp.tanh(x @ w)


def _kernel_forward(x, w):
    y = jnp.tanh(x @ w)
    return y, (x, w, y)


def _kernel_backward(kept, dy):
    x, w, y = kept
    shapes = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(w.shape, w.dtype)
    return jax.pure_callback(
        lambda x, w, y, dy: ((dy * (1 - y * y)) @ w.T, x.T @ (dy * (1 - y * y))),
        shapes,
        x,
        w,
        y,
        dy,
    )


kernel.defvjp(_kernel_forward, _kernel_backward)


def with_kernel(params, x, extra):
    return kernel(x, params["a"]) @ params["b"]


MATRICES = {"a": (WIDTH, WIDTH), "b": (WIDTH, WIDTH)}
STACKED = {"a": (3, WIDTH, WIDTH), "b": (3, WIDTH, WIDTH)}
STAGES = {
    "linear": (linear, {"a": (WIDTH, WIDTH)}),
    "perceptron": (perceptron, MATRICES),
    "scan over layers": (layers, STACKED),
    "recurrent": (recurrent, MATRICES),
    "remat": (jax.checkpoint(perceptron), MATRICES),
    "remat of each layer": (remat_layers, STACKED),
    "remat by policy": (jax.checkpoint(layers, policy=POLICIES.dots_saveable), STACKED),
    "remat of a shared scale": (
        jax.checkpoint(scaled_layers, policy=POLICIES.dots_saveable),
        {"scale": (WIDTH,), "a": STACKED["a"]},
    ),
    "offload in a branch": (jax.checkpoint(offloaded_branch, policy=OFFLOAD), MATRICES),
    "nested jit": (nested_jit, MATRICES),
    "custom_vjp": (own_rule, MATRICES),
    "custom_vjp in a scan": (own_rule_in_a_scan, STACKED),
    "cond": (branches, MATRICES),
    "frozen": (frozen_matrix, MATRICES),
    "scan in a scan": (scan_in_a_scan, STACKED),
    "reverse scan": (reverse_scan, MATRICES),
    "mixed precision": (mixed_precision, MATRICES),
    "remat by name": (
        jax.checkpoint(named, policy=POLICIES.save_only_these_names("kept")),
        MATRICES,
    ),
    "sorted": (sorted_and_picked, MATRICES),
    "switch": (switched, MATRICES),
    "used twice": (used_twice, {"a": (WIDTH, WIDTH)}),
    "convolution in a scan": (convolution_in_a_scan, {"kernel": (3, WIDTH, WIDTH // 2, 3)}),
    "cond in a scan": (branches_in_a_scan, STACKED),
    "vmap of custom_vjp": (vmap_of_own_rule, MATRICES),
    "remat of custom_vjp": (jax.checkpoint(own_rule), MATRICES),
    "remat of remat": (jax.checkpoint(remat_layers), STACKED),
    "loop": (loop, MATRICES),
    "jit in a scan": (jit_in_a_scan, STACKED),
    "attention": (attention, MATRICES),
    "prefix products": (prefix_products, MATRICES),
    "kernel": (with_kernel, MATRICES),
}
X = (ROWS, WIDTH)
# What is one equation is not cut, and I does it whole: stage -> the primitive, and the matmuls that
# are left for W.
UNCUT = {
    "cond": ("cond", 0),
    "switch": ("cond", 0),
    "cond in a scan": ("cond", 3),
    "offload in a branch": ("cond", 0),
    "kernel": ("pure_callback", 1),
}
# Remat asks for work to be done again.
REMAT = (
    "offload in a branch",
    "remat of a shared scale",
    "remat",
    "remat of each layer",
    "remat by policy",
    "remat by name",
    "remat of custom_vjp",
    "remat of remat",
)


def case_of(name):
    function, shapes = STAGES[name]
    extra = {"flag": jnp.asarray(True), "which": jnp.asarray(1)}
    return function, draw(shapes), draw(X, seed=1), extra


def twin_case(name):
    """One stage of a reference model, applied to the output of its `first`."""
    model = twin(name, 1)
    canonical = jax.tree.map(jnp.asarray, model.canonical())
    batch = jax.tree.map(jnp.asarray, model.batch(2))
    shared = {"shared": canonical["shared"]} if "shared" in canonical else {}
    x = model.first(canonical["first"], batch, **shared)
    return (
        lambda params, x, extra: model.stage(params, x),
        jax.tree.map(lambda a: a[0], canonical["stages"]),
        x,
        {},
    )


def any_case(name):
    return case_of(name) if name in STAGES else twin_case(name)


TWINS = ("conv", "gpt", "moe", "rnn")


def arguments(code, params, x, extra, dy):
    """What B and I take: (consts, parameters, x, extra, hoisted, residuals, dy), and y."""
    leaves = [*code.consts, *jax.tree.leaves(params)]
    once = run(code.hoist, *leaves)
    given = [*leaves, *jax.tree.leaves(x), *jax.tree.leaves(extra)]
    outs = run(code.forward, *given, *once)
    count = len(code.avals[Place.SENT_X])
    return [*given, *once, *outs[count:], *dy], outs[:count]


def cotangents(y):
    return [
        draw(leaf.shape, seed=2 + i)
        for i, leaf in enumerate(jax.tree.leaves(y))
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]


def close(found, wanted, limit=FLOAT64):
    return len(found) == len(wanted) and all(
        float(jnp.max(jnp.abs(a - b), initial=0.0))
        <= limit * max(float(jnp.max(jnp.abs(b), initial=0.0)), 1e-30)
        for a, b in zip(found, wanted, strict=True)
    )


def compiles_bodies(*jaxprs):
    """Whether an equation has a body (a loop, a branch, a jit), which XLA compiles as a whole and
    not operation by operation.
    """
    return any(
        jax.tree.leaves(
            [
                list(jax.extend.core.jaxprs_in_params(eqn.params))
                for jaxpr in jaxprs
                for eqn in jaxpr.eqns
            ]
        )
    )
