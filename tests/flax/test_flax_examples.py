"""The flax examples, and the one about checkpoints, as a person runs them: each ends in its own
assertion.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.environment import python, quick

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        pytest.param("flax_nnx", "by the nnx model itself", marks=pytest.mark.slow),
        pytest.param("flax_linen", "by the linen model itself", marks=pytest.mark.exhaustive),
        pytest.param(
            "checkpoint_layouts",
            "by 1f1b, 4 devices: differs by 0.0e+00",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_an_example_runs_to_its_end(name: str, says: str) -> None:
    done = python(EXAMPLES / f"{name}.py", env=quick())
    assert says in done.stdout
