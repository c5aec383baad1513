"""The same model in plain functions, with flax.nnx and with flax.linen modules: the same numbers, before any pipeline."""

import numpy as np
import pytest

from tests.models import twin
from tests.parity.engines import case_data, oracle_step, worst_error

ROWS, MICROBATCHES = 2, 2
# Five units in the last place of an array's largest entry: XLA fuses the plain layer norm and attention into other loops than flax's.
TOLERANCE = 1e-15


def steps(*names, stages):
    model = twin(names[0], stages)
    weights, batch = case_data(model, MICROBATCHES, ROWS)
    for name in names:
        assert twin(name, stages).weights().keys() == weights.keys()
        yield oracle_step(twin(name, stages), weights, batch, MICROBATCHES)


@pytest.mark.parametrize("version", ["mlp_nnx", "mlp_linen"])
def test_the_mlp_of_flax_modules_equals_the_plain_one_bit_for_bit(version):
    plain, found = steps("mlp", version, stages=2)
    assert found.loss == plain.loss
    for name, grad in plain.grads.items():
        np.testing.assert_array_equal(found.grads[name], grad, err_msg=name)


@pytest.mark.parametrize("version", ["gpt_nnx", "gpt"])
def test_the_gpt_of_flax_modules_equals_the_plain_one(version):
    plain, found = steps("gpt_plain", version, stages=1)
    assert worst_error(found, plain) <= TOLERANCE
