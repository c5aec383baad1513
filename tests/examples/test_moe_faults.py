"""What examples/moe.py refuses, and where a probability of a router is not a number."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import jaxpipe as jp
import moe
from jaxpipe.debug import find_nonfinite
from llama_parts import initial
from llama_parts.packing import packed
from moe_parts.sizes import PUBLISHED, Routing
from tests.examples.test_moe import EIGHT, on_eight
from tests.tiers import exhaustive, slow


def built(flags, **mesh):
    return moe.build(moe.parser().parse_args([*EIGHT.split(), *flags.split()]), on_eight(**mesh))


def test_experts_that_do_not_divide(monkeypatch):
    odd = dataclasses.replace(PUBLISHED["tiny"], routing=Routing(6, 2, 64))
    monkeypatch.setitem(PUBLISHED, "tiny", odd)
    model, pipe = built("--expert 4 --data 1", expert=4, data=1)
    with pytest.raises(jp.PipelineError) as caught:
        pipe.place(model.shapes())
    for name in ("gate", "up", "down"):  # all faults at once
        assert f"stages/t/experts/{name}/kernel: dim 0 of shape (6, 64, 64)" in str(caught.value)
    fault = "does not divide over 'expert', which has 4 devices; choose a number of devices that "
    assert f"{fault}divides 6" in str(caught.value)


def test_an_expert_axis_that_no_layer_uses(monkeypatch):
    dense = dataclasses.replace(PUBLISHED["tiny"], dense=4)
    monkeypatch.setitem(PUBLISHED, "tiny", dense)
    with pytest.raises(jp.PipelineError, match="no spec splits a parameter over 'expert'"):
        built("")


def test_a_spread_head_that_another_layer_uses():
    with pytest.raises(jp.PipelineError, match="predicts one more token"):
        built("--model tiny-latent --spread-head")


def test_a_capacity_that_is_none():
    for capacity in ("-1", "nan", "inf"):
        with pytest.raises(jp.PipelineError, match=rf"--capacity {capacity}.*; 0 drops nothing"):
            built(f"--capacity {capacity}")


def test_fp8_for_experts_without_a_capacity():
    with pytest.raises(jp.PipelineError, match="flax has no FP8; give --capacity"):
        built("--fp8")
    with pytest.raises(jp.PipelineError, match="--plain trains in plain JAX without FP8"):
        built("--fp8 --capacity 1.25 --plain")


def rows():
    """Eight rows of words 10 to 99; the word 200 occurs in row 5, microbatch 1 of data shard 2."""
    tokens = np.random.default_rng(0).integers(10, 100, (8, 17))
    tokens[5, 7] = 200
    return packed(tokens, end=0)


@pytest.mark.parametrize("capacity", [slow("0"), exhaustive("1.25")])
def test_probabilities_that_are_nan_are_found_in_their_stage_and_microbatch(capacity):
    """One word alone turns them NaN, in the last layer, which is of stage 1."""
    model, pipe = built(f"--model tiny --capacity {capacity}")
    params = jax.tree.map(np.array, jax.device_get(initial.canonical(model, jax.random.key(0))))
    # nothing but the embedding reaches the routers
    layers = params["stages"]["t"]
    layers["attn"]["out"]["kernel"][:] = 0
    layers["experts"]["down"]["kernel"][:] = 0
    params["first"]["table"][:, 0] = np.arange(len(params["first"]["table"])) == 200
    layers["router"]["kernel"][3, 0] = 0
    layers["router"]["kernel"][3, 0, :2] = 1e308  # logits of infinity, of both
    found = find_nonfinite(pipe, pipe.place(params), rows())
    assert (found.function, found.stage, found.microbatch, found.shard) == ("stage", 1, 1, 2)
    assert found.inputs == ()
    assert "stage 1, microbatch 1, data shard 2" in str(found)


@pytest.mark.slow
def test_a_router_that_is_nan_is_named():
    model, pipe = built("--model tiny")
    params = jax.tree.map(np.array, jax.device_get(initial.canonical(model, jax.random.key(0))))
    params["stages"]["t"]["router"]["kernel"][3, 0, 0] = np.nan  # of a layer of stage 1
    found = find_nonfinite(pipe, pipe.place(params), rows())
    assert (found.stage, found.microbatch) == (1, 0)
    assert any("'router'" in text for text in found.inputs)
