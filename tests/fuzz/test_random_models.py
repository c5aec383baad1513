"""A few drawn models in each tier; `MODELS=500 SEED=0 pytest -m exhaustive tests/fuzz`, or `python
-m tests.fuzz`, runs many.
"""

import os
from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.environment import python
from tests.tiers import exhaustive, slow

from .__main__ import main
from .case import Case, draw
from .model import EVERY
from .ops import PASSING
from .trial import Trial, Wrong, run, same

# Models that are drawn at random may have few residuals.
pytestmark = pytest.mark.filterwarnings("ignore:offload moves nothing")

# Much in little: each has several things that other tests have one at a time.
QUICK = (
    Case(
        ops=(("quantised", "scaled_loop"),),
        carrier="dict",
        first="linear",
        loss="SUM_OVER_COUNT",
        metrics=True,
        stage_loss=True,
        scale=0.3,
        clipped=1e-2,
        whole=True,
        table="zb_h1",
        devices=2,
        mesh=(("data", 2), ("pipe", 2)),
        fsdp=True,
        calls=("step",),
    ),
    Case(
        form="list",
        ops=(("normalised",), ("switch", "shared_scale")),
        widths=(3, 5),
        carrier="tuple",
        odd=True,
        devices=2,
        table="1f1b",
        mesh=(("pipe", 2),),
        calls=("grad",),
    ),
    Case(
        form="layers",
        ops=(("dropout",), ("cond", "unused")),
        layout="ab|",
        first="vocab",
        last="vocab",
        tied=True,
        vocab=5,
        frozen=("s",),
        table="gpipe",
        devices=2,
        mesh=(("pipe", 2),),
        calls=("step",),
    ),
    Case(
        ops=(("dropout", "carried", "appended"),),
        rank=3,
        first="linear",
        loss="SUM_OVER_COUNT",
        metrics=True,
        stage_loss=True,
        table="zb_h1",
        devices=2,
        microbatches=4,
        slices=2,
        mesh=(("pipe", 2),),
        calls=("step",),
    ),
    Case(
        form="layers",
        ops=(("dropout", "by_position"),),
        layout="a|a",
        rank=3,
        first="spread",
        last="mse",
        first_ops=("dropout",),
        last_ops=("by_position",),
        table="gpipe",
        devices=2,
        microbatches=2,
        slices=2,
        mesh=(("pipe", 2),),
        calls=("step", "plain"),
    ),
)


@pytest.mark.parametrize(
    "case",
    [
        *QUICK,
        *(slow(draw(seed)) for seed in (*range(10), 45, 49, 377)),
        *(exhaustive(draw(seed)) for seed in range(10, 20)),
    ],
    ids=lambda case: f"seed {case.seed}",
)
def test_a_model(case):
    kind, text = run(case)
    assert kind == "ok" or (kind == "refused" and case not in QUICK), f"{kind}: {case}\n{text}"


@pytest.mark.slow
def test_the_command_needs_no_settings():
    """Workers that are spawned find the function, eight devices and float64."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("JAX", "XLA"))}
    done = python("-m", "tests.fuzz", env=own | {"MODELS": "1", "SEED": "0"})
    assert "{'ok': 1}" in done.stdout


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
def test_many_models():
    assert main() == 0


def test_a_case_is_its_text():
    assert all(eval(str(case)) == case for case in map(draw, range(200)))


def test_other_numbers_are_found():
    right = {"a": np.array([1.0, 2.0]), "b": np.array([1e-20])}
    same("equal", right, right)
    same("what cancels", {**right, "b": np.array([0.0])}, right)
    for name, wrong in (("number", [1.0, 2.0 + 1e-8]), ("nan", [np.nan, 2.0]), ("shape", [1.0])):
        with pytest.raises(Wrong, match=f"{name}.*'a'"):
            same(name, {**right, "a": np.array(wrong)}, right)
    with pytest.raises(Wrong, match="on one side alone"):
        same("leaf", {"a": right["a"]}, right)


def test_a_gradient_of_few_bits_is_as_exact_as_what_it_is_a_sum_of():
    """float32 keeps of 0.3164 - 0.3159 four digits; a run without a pipeline in the same dtypes
    gives the same.
    """
    every = np.array([0.3164121, -0.31593665])
    right, terms = {"s": np.sum(every, keepdims=True)}, {"s": np.sum(np.abs(every), keepdims=True)}
    narrow = {"s": np.array([0.0], np.float32)}
    rounded = {"s": np.array([every.astype(np.float32).sum() + np.float32(2**-25)])}
    same("in float32", rounded, right, like=narrow, terms=terms)
    with pytest.raises(Wrong, match="in float64"):
        same("in float64", rounded, right, terms=terms)
    with pytest.raises(Wrong, match="another sum"):
        same("another sum", {"s": right["s"] * 1.1}, right, like=narrow, terms=terms)


def test_a_wrong_gradient_is_found():
    trial = Trial(Case())
    last = trial._scaled_right["grads"]["last"]
    last["head"] = last["head"].at[0, 0].multiply(1 + 1e-6)
    with pytest.raises(Wrong, match=r"grads\['last'\]\['head'\]"):
        trial.run()


def test_a_gradient_that_is_lost_between_slices_is_found(monkeypatch):
    """The plain model carries a state without a gradient."""
    trial = Trial(QUICK[3])
    carried = PASSING["carried"]

    def stopped(params, h, k):
        h, carry = carried.call(params, h, k)
        return h, jax.lax.stop_gradient(carry)

    monkeypatch.setitem(EVERY, "carried", replace(carried, call=stopped))
    _ = trial._scaled_right
    monkeypatch.undo()
    with pytest.raises(Wrong, match="step: grads"):
        trial.run()
