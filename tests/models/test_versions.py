"""The same model in plain functions, with flax.nnx and with flax.linen modules: the same numbers,
before any pipeline.
"""

import pytest

from tests.models import to_tree, twin
from tests.oracle import oracle_value_and_grad
from tests.parity.engines import case_data, oracle_step, worst_error
from tests.tolerance import apart, longest_chain

ROWS, MICROBATCHES = 2, 2


@pytest.mark.parametrize(
    ("plain", "version", "stages"),
    [
        ("mlp", "mlp_nnx", 2),
        ("mlp", "mlp_linen", 2),
        ("gpt_plain", "gpt_nnx", 1),
        ("gpt_plain", "gpt", 1),
    ],
)
def test_a_model_of_flax_modules_equals_the_plain_one(plain, version, stages):
    """XLA fuses a plain layer norm, say, into other loops than flax's: as far apart as two chains
    of that many roundings may be.
    """
    model, other = twin(plain, stages), twin(version, stages)
    weights, batch = case_data(model, MICROBATCHES, ROWS)
    assert other.weights().keys() == weights.keys()
    steps = [oracle_step(one, weights, batch, MICROBATCHES) for one in (other, model)]
    chain = longest_chain(
        lambda p: oracle_value_and_grad(p, batch, **model.oracle, microbatches=MICROBATCHES),
        to_tree(weights),
    )
    assert worst_error(*steps) <= apart(chain)
