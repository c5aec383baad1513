"""jaxpipe runs without flax, orbax and optax, and says which extra to install where one of them is
asked for.
"""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.environment import python

# A module that is None in sys.modules cannot be imported.
WITHOUT = """
import sys
sys.modules |= dict.fromkeys(("flax", "optax", "orbax", "orbax.checkpoint", "matplotlib", "torch"))
import jax, jax.numpy as jnp, jaxpipe as jp

model = jp.Model(lambda w, x: x * w, last=lambda w, x, microbatch: jnp.sum(x))
schedule = jp.schedules.build("1f1b", devices=2, microbatches=2)
pipe = jp.Pipeline(model, schedule, jax.make_mesh((2,), ("pipe",)))
params = pipe.place({"stages": jnp.array([2.0, 3.0]), "last": {}})
loss, grads = pipe.value_and_grad(params, {"x": jnp.array([[1.0], [3.0]])})
assert loss == 12, loss
assert pipe.canonical(grads)["stages"].tolist() == [6, 4]
assert jp.debug.find_nonfinite is not None
import jaxpipe.distributed
"""


def test_a_pipeline_runs_without_flax_orbax_and_optax():
    python("-c", WITHOUT)


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("jaxpipe.flax", "flax", "jaxpipe[flax]"),
        ("jaxpipe.checkpoint", "orbax.checkpoint", "jaxpipe[checkpoint]"),
    ],
)
def test_what_an_extra_is_for_names_it(monkeypatch, module, missing, extra):
    for name in [n for n in sys.modules if n == module or n.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(module)
    assert str(caught.value).startswith(f"{module} needs {missing.split('.')[0]}")
    assert f"pip install '{extra}'" in str(caught.value)
