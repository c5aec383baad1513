"""A few drawn models in each tier; `MODELS=500 SEED=0 pytest -m exhaustive tests/fuzz`, or `python
-m tests.fuzz`, runs many.
"""

import numpy as np
import pytest

from tests.tiers import slow

from .__main__ import main
from .case import Case, draw
from .trial import Trial, Wrong, run, same

# Much in little: each has several things that other tests have one at a time.
QUICK = (
    Case(
        ops=(("quantised", "scaled_loop"),),
        carrier="dict",
        first="linear",
        loss="SUM_OVER_COUNT",
        metrics=True,
        stage_loss=True,
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
)


@pytest.mark.parametrize(
    "case",
    [*QUICK, *(slow(draw(seed)) for seed in range(20))],
    ids=lambda case: f"seed {case.seed}",
)
def test_a_model(case):
    kind, text = run(case)
    assert kind == "ok" or (kind == "refused" and case not in QUICK), f"{kind}: {case}\n{text}"


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


def test_a_wrong_gradient_is_found():
    trial = Trial(Case())
    last = trial._step_right["grads"]["last"]
    last["head"] = last["head"].at[0, 0].multiply(1 + 1e-6)
    with pytest.raises(Wrong, match=r"grads\['last'\]\['head'\]"):
        trial.run()
