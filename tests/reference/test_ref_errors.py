"""What is wrong with a table, weights or a batch is said: what, where, and what to
write instead.
"""

import numpy as np
import pytest
import torch
from test_ref_executor import mlp_batch

import torch_ref
from tests.environment import python
from torch_ref import BatchError, TableError, TorchRefError, WeightsError
from torch_ref.models import MLP

torch.set_num_threads(1)


def run(table, *, stages=2, batch=None, weights=None, **how):
    model = MLP(num_stages=stages)
    return torch_ref.run(
        table, model, batch or mlp_batch(4), weights=weights or model.init(), **how
    )


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("0F0,0X0\n", ["device 0, position 1", "'0X0' is not an action", "e.g. 2F0"]),
        ("0F0,0B0,0F\n1F0,F1\n", ["device 0, position 2", "device 1, position 1", "'F1'"]),
        ("0F0,0SEND_F0,0B0\n", ["'0SEND_F0' is a transfer", "compute-only"]),
        ("0F0,0b0\n", ["'0b0' is not an action"]),
        ("0F0 0B0\n", ["'0F0 0B0' is not an action"]),
        ("0F-1,0B0\n", ["'0F-1' is not an action"]),
        ("0F0xyz,0B0\n", ["device 0, position 0", "'0F0xyz' is not an action"]),
        ("(0F0;0W1)OVERLAP_F_B\n", ["the first of a pair must be F, the second B or I"]),
        ("(0B0;0F1)OVERLAP_F_B\n", ["the first of a pair must be F, the second B or I"]),
        ("(0F0;0B1;0W1)OVERLAP_F_B\n", ["is not an action"]),
        ("(0F0;0R1)OVERLAP_F_B\n", ["the first of a pair must be F, the second B or I"]),
        ("0UNSHARD,0RESHARD,0REDUCE_GRAD\n", ["holds no action"]),
        ("0UNSHARD0,0F0,0B0\n", ["'0UNSHARD0' is not an action"]),
        (
            "0E0,0F0,0B0\n",
            ["0G0 is missing: every device has its share of the gradient of `first`"],
        ),
        ("0F0,0B0,0G0\n", ["0E0 is missing: every device has its share of `first`"]),
        ("0F0,0B0,0H0\n", ["0L0 is missing: every device has its share of `last`"]),
        (
            "0F0,0F1,0L0,0L1,0B0,0B1,0H0\n",
            [
                "0H1 is missing: every device has its share of the gradient of the parameters of "
                "`last`"
            ],
        ),
        ("", ["holds no action"]),
        (",,\n\n", ["holds no action"]),
    ],
)
def test_unreadable_tables(table, says):
    with pytest.raises(TableError) as caught:
        run(table)
    for words in says:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (
            "0F0,0F0,0B0\n1F0,1B0\n",
            ["0F0 stands 2 times: device 0, position 0; device 0, position 1"],
        ),
        (
            "0F0,0B0\n1F0,1B0,0F0\n",
            ["0F0 stands 2 times: device 0, position 0; device 1, position 2"],
        ),
        ("0F0,0B0\n1F0\n", ["1B0 is missing (or 1I0 and 1W0)"]),
        ("0F0,0B0\n1F0,1I0\n", ["1W0 is missing, though 1I0 is there"]),
        ("0F0,0B0\n1F0,1W0\n", ["1I0 is missing, though 1W0 is there"]),
        ("0F0,0B0\n1F0,1B0,1W0\n", ["1B0 is a full backward, so 1W0 must not be there too"]),
        (
            "0F0,0B0\n1F0,1I0,1B0,1W0\n",
            ["1B0 is a full backward, so 1I0 and 1W0 must not be there too"],
        ),
        ("0F0,0F2,0B0,0B2\n1F0,1F2,1B0,1B2\n", ["0F1 is missing", "1F1 is missing"]),
        (
            "0F0,0R0,0R0,0B0\n1F0,1B0\n",
            ["0R0 stands 2 times: device 0, position 1; device 0, position 2"],
        ),
        ("0F0,0R0\n1F0\n", ["0B0 is missing (or 0I0 and 0W0)"]),
        ("0F0,0B0\n1F0,1B0,1R1\n", ["1F1 is missing", "1B1 is missing"]),
        ("0F0,0B0,1R0\n1F0,1B0\n", ["what F saves stays on its device", "1R0 on device 0"]),
        (
            "0F0,1B0\n1F0,0B0\n",
            ["what F saves stays on its device", "1F0 on device 1, 1B0 on device 0"],
        ),
    ],
)
def test_tables_with_something_missing_doubled_or_misplaced(table, says):
    with pytest.raises(TableError, match="cannot be run") as caught:
        run(table)
    for words in says:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (
            "0F0,0H0,0L0,0B0\n1F0,1L0,1H0,1B0\n",
            ["0H0 needs 0L0", "later in the same row (position 2): it is used before it exists"],
        ),
        (
            "0B0,0F0\n1F0,1B0\n",
            [
                "device 0, position 0: 0B0 needs 0F0",
                "later in the same row (position 1): it is used before it exists",
            ],
        ),
        (
            "0F0,0B0\n1B0,1F0\n",
            ["1B0 needs 1F0", "0B0 needs 1B0, which has not run yet (device 1, position 0)"],
        ),
        ("0F0,0W0,0I0\n1F0,1B0\n", ["0W0 needs 0I0", "used before it exists"]),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            ["0B0 needs 1B0, which has not run yet", "1F1 needs 0F1, which has not run yet"],
        ),
        ("0F0,0I0,0W0\n1F0,1W0,1I0\n", ["1W0 needs 1I0", "0I0 needs 1I0"]),
        (
            "(0F0;0B0)OVERLAP_F_B\n1F0,1B0\n",
            ["0B0 needs 0F0, which is the other half of the same pair"],
        ),
        ("0R0,0F0,0B0\n1F0,1B0\n", ["0R0 needs 0F0", "used before it exists"]),
        ("0F0,0B0,0R0\n1F0,1B0\n", ["0B0 needs 0R0", "used before it exists"]),
        ("0F0,0B0\n1F0,1I0,1R0,1W0\n", ["1I0 needs 1R0", "used before it exists"]),
        ("1F0,0F0,0B0,1B0\n", ["1F0 needs 0F0, which comes later in the same row"]),
    ],
)
def test_tables_that_cannot_go_on(table, says):
    with pytest.raises(TableError, match="cannot go on") as caught:
        run(table)
    for words in says:
        assert words in str(caught.value)


GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_other_number_of_stages():
    with pytest.raises(TableError, match="the table has 2 stages, the model 3"):
        run(GOOD, stages=3)


def test_every_fault_of_weights_is_listed():
    weights = MLP(num_stages=2).init()
    weights["extra"] = weights.pop("last/dense/bias")
    weights["first/dense/kernel"] = weights["first/dense/kernel"][:3]
    with pytest.raises(WeightsError) as caught:
        run(GOOD, weights=weights)
    for words in (
        "last/dense/bias is missing (shape (4,))",
        "extra is not a parameter",
        "has shape (3, 8); it must be (8, 8)",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "how", "says"),
    [
        (
            mlp_batch(5),
            {},
            "5 rows cannot be cut into 2 equal microbatches; pad the batch to 6 rows",
        ),
        (mlp_batch(5), {"rows": [3, 3]}, "do not cut 5 rows into 2"),
        (mlp_batch(5), {"rows": [5, 0]}, "at least one row"),
        ({"x": np.zeros((4, 8)), "y": np.zeros((6, 4))}, {}, "different numbers of rows"),
        ({"x": np.zeros((4, 8)), "y": np.float64(1)}, {}, "y of the batch has no axis"),
    ],
)
def test_batches_that_cannot_be_cut(batch, how, says):
    with pytest.raises(BatchError, match=says.replace("(", r"\(")):
        run(GOOD, batch=batch, **how)


def test_empty_batch():
    with pytest.raises(BatchError, match="the batch is empty"):
        torch_ref.run(GOOD, MLP(num_stages=2), {}, weights=MLP(num_stages=2).init())


def test_loss_that_is_no_scalar():
    class Bad(MLP):
        def last(self, params, x, microbatch, ctx):
            return x

    model = Bad(num_stages=2)
    with pytest.raises(TorchRefError, match="must return a scalar loss"):
        torch_ref.run(GOOD, model, mlp_batch(4), weights=model.init())


def test_torch_ref_never_imports_jax_or_jaxpipe():
    code = (
        "import torch_ref, torch_ref.models, sys; print([m for m in ('jax', 'jaxpipe', "
        "'flax', 'optax') if m in sys.modules])"
    )
    done = python("-c", code, timeout=120)
    assert done.stdout.strip() == "[]"
