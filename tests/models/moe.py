"""The mixture of experts in plain functions; {"aux", "h"} travels between stages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from torch_ref.models import MoE

from .base import Twin
from .gpt import token_loss


def moe(stages: int, **flags: Any) -> Twin:
    """The mixture of experts."""
    model = MoE(stages, **{"vocab": 11, "width": 6, "experts": 3, **flags})

    def first(params, microbatch):
        h = params["wte"][microbatch["tokens"]]
        return {"aux": jnp.zeros((), h.dtype), "h": h}

    def stage(params, x):
        u = layer_norm(params["ln"], x["h"], model.eps)
        p = jax.nn.softmax(u @ params["router"]["kernel"], axis=-1)
        _, best = jax.lax.top_k(p, model.chosen)
        chosen = jax.nn.one_hot(best, model.experts, dtype=p.dtype).sum(-2)
        gate = p * chosen
        gate = gate / jnp.sum(gate, axis=-1, keepdims=True)
        up, down = params["experts"]["up"], params["experts"]["down"]
        hidden = jax.nn.gelu(
            jnp.einsum("ntd,edf->ntef", u, up["kernel"]) + up["bias"], approximate=True
        )
        out = jnp.einsum("ntef,efd->nted", hidden, down["kernel"]) + down["bias"]
        load = jax.lax.stop_gradient(jnp.mean(chosen, axis=(0, 1)) / model.chosen)
        aux = model.aux_weight * model.experts * jnp.sum(load * jnp.mean(p, axis=(0, 1)))
        return {"aux": x["aux"] + aux, "h": x["h"] + jnp.einsum("nte,nted->ntd", gate, out)}

    def last(params, x, microbatch):
        logits = layer_norm(params["ln"], x["h"], model.eps) @ params["head"]["kernel"]
        loss = token_loss(logits, microbatch, sum_count=model.sum_count)
        return (loss[0] + x["aux"] * loss[1], loss[1]) if model.sum_count else loss + x["aux"]

    def rows(rng, count):
        return {name: rng.integers(0, model.vocab, (count, 5)) for name in ("tokens", "targets")}

    return Twin("moe", model, first, stage, last, rows)


def layer_norm(params, x, eps):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return centred / jnp.sqrt(variance + eps) * params["scale"] + params["bias"]
