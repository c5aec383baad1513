"""Train a mixture of experts of any published size through a pipeline, with experts on an axis of
their own.  It runs on one host, or on a pod by the launchers of examples/pod/.

python examples/moe.py --steps 50
    a tiny one on pipe 2 x expert 2 x data 2 virtual CPU devices, and beside it plain JAX
python examples/moe.py --model tiny-latent --capacity 1.25 --schedule dualpipev
    latent attention, a dense layer, shared experts, a balancing bias, one more predicted token
python examples/moe.py --model deepseek-v3 --cluster --pipe 16 --expert 64 --data 2 --fsdp
    --fsdp-axis expert --schedule dualpipev --microbatches 120 --rows 15360 --context 4096
    --remat layer --capacity 1.25 --loss-tokens 512 --tokens corpus.npy --end 1 --peak 989

Start it again with the same --out to continue from the newest checkpoint, under any --schedule and
any --pipe, --expert and --data.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import jaxpipe as jp
import llama
from gpt.devices import find
from gpt.flags import flag
from jaxpipe.distributed import make_mesh
from llama_parts import initial, weights
from llama_parts.model import Remat
from moe_parts.model import MoE
from moe_parts.sizes import PUBLISHED, from_config


def parser() -> argparse.ArgumentParser:
    """The flags of examples/llama.py, and those of experts."""
    p = llama.parser(__doc__, tuple(PUBLISHED), "out/moe")
    flag(p, "--expert", 2, "devices that share the experts (2)")
    p.add_argument(
        "--capacity",
        type=float,
        default=0,
        help="how many times the tokens of an even load an expert takes of a row (0: all tokens)",
    )
    flag(
        p,
        "--bias-rate",
        1e-3,
        "how far the bias of an expert moves in a step (1e-3), where scores are sigmoids",
    )
    p.add_argument(
        "--plain",
        action=argparse.BooleanOptionalAction,
        help="the same training in plain JAX beside it (with the tiny models)",
    )
    flag(
        p,
        "--fsdp-axis",
        "data",
        "the axis of --fsdp (data); experts are split over the expert axis anyway",
        choices=("data", "expert"),
    )
    p.set_defaults(pipe=2, data=2, rows=32, context=64, dtype=None)
    return p


def build(args: argparse.Namespace, mesh: Mesh) -> tuple[MoE, jp.Pipeline]:
    """The model, and the pipeline that runs it."""
    sizes = from_config(weights.config_of(args.load)) if args.load else PUBLISHED[args.model]
    if args.spread_head and (sizes.tied or sizes.predict):
        raise jp.PipelineError(
            "--spread-head cuts a head that no other layer uses; leave it out for a tied table or "
            "for a model that predicts one more token"
        )
    if not 0 <= args.capacity < math.inf:
        raise jp.PipelineError(
            f"--capacity {args.capacity:g} is no capacity: 1.25 takes 1.25 times the tokens of an "
            "even load; 0 drops nothing"
        )
    if args.fp8 and not args.capacity:
        raise jp.PipelineError(
            "--fp8 needs experts with equal room: without a capacity they multiply by "
            "jax.lax.ragged_dot, for which flax has no FP8; give --capacity 1.25, or leave out "
            "--fp8"
        )
    if args.fp8 and args.plain:
        raise jp.PipelineError("--plain trains in plain JAX without FP8: leave out one of them")
    expert = "expert" if args.expert > 1 else None
    # XLA:CPU has no ragged all-to-all
    ragged = mesh.devices.flat[0].platform != "cpu"
    model = MoE(
        sizes,
        jnp.dtype(args.dtype),
        args.remat,
        args.attention,
        args.loss_tokens,
        "tensor" if args.tensor > 1 else None,
        args.sequence,
        args.fp8,
        expert=expert,
        capacity=args.capacity,
        ragged=ragged,
    )
    schedule = llama.schedule_of(args)
    layout = llama.layout_of(args, sizes, schedule)
    sharding = jp.Sharding(
        data=("data",) if expert is None else ("data", expert),
        local=() if expert is None else expert,
        fsdp=args.fsdp_axis if args.fsdp else None,
        max_active=args.max_active,
        specs=model.specs(spread_head=args.spread_head),
    )
    pipe = jp.Pipeline(
        model.pipeline_model(sizes.letters(), spread_head=args.spread_head),
        schedule,
        mesh,
        layout=layout,
        sharding=sharding,
        memory=jp.Memory(remat="full" if args.remat is Remat.STAGE else None),
    )
    return model, pipe


def balance(rate: float, load: jax.Array) -> jax.Array:
    """How far the bias of each expert moves by `rate` towards an even load [layers, E] (Wang et
    al. 2024).
    """
    return rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)


def moved(rate: float, params: Any, grads: Any) -> Any:
    """The gradients of a step, in which the next bias of each expert is in place of its load."""
    if "bias" not in params.get("shared", {}):
        return grads
    load = grads["shared"]["bias"]
    bias = params["shared"]["bias"] + balance(rate, load).astype(load.dtype)
    return {**grads, "shared": {**grads["shared"], "bias": bias}}


def optimizer_of(args: argparse.Namespace) -> optax.GradientTransformation:
    """Llama's optimizer; scales decay too.  A layout may put parameters of dense layers and of
    layers with experts into one array, which has one rule.
    """
    return llama.optimizer_of(args, decay=None)


def _trained(tree: Any) -> Any:
    """Canonical parameters, or gradients, without the bias."""
    shared = {name: leaf for name, leaf in tree.get("shared", {}).items() if name != "bias"}
    return {**tree, "shared": shared}


class Plain:
    """The same training in plain JAX on one device: the same first weights, batches and
    optimizer.
    """

    def __init__(self, args: argparse.Namespace, model: MoE) -> None:
        alone = dataclasses.replace(model, expert=None, tensor=None)
        loss_of = alone.pipeline_model(model.sizes.letters()).loss
        optimizer = optimizer_of(args)

        def loss(params: Any, batch: Any) -> Any:
            found = loss_of(params, batch)
            return found[0] if model.capacity else found

        def step(params: Any, state: Any, batch: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, batch)
            grads, own = moved(args.bias_rate, params, grads), _trained(params)
            updates, state = optimizer.update(_trained(grads), state, own)
            after = optax.apply_updates(own, updates)
            new = {name: grads["shared"][name] for name in params["shared"] if name == "bias"}
            return {**after, "shared": after["shared"] | new}, state, value

        self._step = jax.jit(step, donate_argnums=(0, 1))
        self._params = {"shared": {}, **initial.canonical(model, jax.random.key(args.seed))}
        self._state = optimizer.init(_trained(self._params))

    def __call__(self, batch: Any) -> str:
        self._params, self._state, value = self._step(self._params, self._state, batch)
        return f"   plain {float(value)!r}"


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    tiny = args.model.startswith("tiny") and not args.load
    args.dtype = args.dtype or ("float32" if tiny else "bfloat16")
    jax.config.update("jax_enable_x64", args.dtype == "float64")
    if args.cluster:
        jax.distributed.initialize()
    shape = {"pipe": args.pipe, "data": args.data, "expert": args.expert, "tensor": args.tensor}
    count = args.pipe * args.data * args.expert * args.tensor
    try:
        mesh = make_mesh(shape, devices=None if args.cluster else find(count))
        model, pipe = build(args, mesh)
        llama.say(
            f"{model.sizes.parameters():,} parameters, {model.sizes.active():,} active, {pipe}"
        )
        can = tiny and not args.cluster and not args.fp8
        plain = can if args.plain is None else args.plain
        begun = args.out.exists() and any(args.out.iterdir())
        beside = Plain(args, model) if plain and not begun else lambda batch: ""
        put = partial(moved, args.bias_rate)
        params = llama.train(args, model, pipe, optimizer_of(args), beside, put)
        if args.export:
            weights.save(args.export, pipe, model, params)
    except jp.JaxpipeError as error:  # the message says what to write instead
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
