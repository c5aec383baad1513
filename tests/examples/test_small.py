"""The small examples as a person runs them: each ends in its own assertion."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.environment import outside, python, quick
from tests.tiers import exhaustive, slow

EXAMPLES = Path(__file__).parents[2] / "examples"
# Compiling without LLVM's optimisations halves the time where compute is little; convolutions would
# take longer than they save.
ENVIRONMENT, QUICK = outside(), quick()


@pytest.mark.parametrize(
    ("name", "environment", "says"),
    [
        ("mlp", QUICK, "on new points: loss"),
        slow("generate", QUICK, "the same tokens as of each request by itself"),
        slow("long_context", QUICK, "the losses of whole sequences"),
        slow("lora", QUICK, "the losses of plain JAX in every step"),
        slow("conv_net", ENVIRONMENT, "accuracy on new images"),
        ("custom_schedule", QUICK, "1B15 comes before 1F15"),
        slow("uneven_layout", QUICK, "with ZB-V on two devices and another layout"),
        exhaustive("multi_token_prediction", QUICK, "against one device"),
        slow("encoder_decoder", QUICK, "against one device"),
        exhaustive("vision_language", QUICK, "against one device"),
    ],
)
def test_an_example_runs_to_its_end(name, environment, says):
    path = EXAMPLES / f"{name}.py"
    done = python(path, env=environment)
    assert says in done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.stem)
def test_an_example_is_short_and_ends_in_an_assertion(path):
    if path.stem in ("llama", "moe", "train_gpt"):
        pytest.skip("a program with flags, with tests of its own")
    lines = path.read_text().splitlines()
    assert len(lines) <= 150
    assert any(line.strip().startswith("assert ") for line in lines)


INSTALLED = [
    name
    for name in ("jax_cuda13_plugin", "libtpu")
    if (spec := find_spec(name)) and "compilers" not in Path(str(spec.origin)).parts
]


@pytest.mark.skipif(bool(INSTALLED), reason=f"installed for all programs: {INSTALLED}")
def test_a_program_prints_nothing_of_the_plugins_that_only_compile():
    # Tests that compile for TPUs leave libtpu's own variables in the environment.
    environment = {
        key: value
        for key, value in ENVIRONMENT.items()
        if key not in ("JAX_PLATFORMS", "XLA_FLAGS") and not key.startswith("TPU_")
    }
    program = "import jax; print(jax.devices()[0].platform)"
    done = python("-c", program, timeout=120, env=environment)
    assert done.stdout.strip()
    assert done.stderr == ""
