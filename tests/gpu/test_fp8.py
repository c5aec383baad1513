"""FP8 matmuls of a layer in programs of described GPUs: none is converted to bfloat16 by JAX."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from benchmarks.beside_matmuls import HEAD, cudnn, pretend_cudnn
from benchmarks.fp8 import CUBLAS, HISTORY, Matmul, compiled, kept, matmuls, traced, transposes
from jaxpipe.table.effects import LastUse, Place
from tests.gpu.programs import gpu_marks
from tests.tiers import slow

pytestmark = gpu_marks()
WIDTH, HIDDEN, TIME = 2 * HEAD, 4 * HEAD, 384  # no weight has the length of TIME
SHAPES = {
    **{"norm": (WIDTH,), "mlp_norm": (WIDTH,)},
    **{"q": (WIDTH, WIDTH), "k": (WIDTH, HEAD), "v": (WIDTH, HEAD), "o": (WIDTH, WIDTH)},
    **{"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)},
}
# Of a layer, by kind of action: seven products with weights, each with two of its backward.
PRODUCTS = {"F": 7, "B": 14, "I": 7, "W": 7}


@pytest.fixture(autouse=True)
def described_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests find what the machine has."""
    for name in ("check_cudnn_version", "check_compute_capability"):
        monkeypatch.setattr(cudnn, name, getattr(cudnn, name))
    pretend_cudnn()


@pytest.mark.parametrize(
    ("name", "options", "by"),
    [
        ("1f1b", CUBLAS, Matmul.CUBLAS_FP8),
        slow("1f1b", {}, Matmul.FUSED_FP8),
        slow("zb_h1", CUBLAS, Matmul.CUBLAS_FP8),
    ],
)
def test_every_product_takes_fp8(name: str, options: Mapping[str, str | bool], by: Matmul) -> None:
    """A weight is transposed at most once a step: no block does it."""
    module = compiled(traced(name, fp8=True, shapes=SHAPES, time=TIME), options)
    found = matmuls(module)
    assert {own for _, own in found} == {by}
    kinds = {kind for kind, _ in found}
    assert kinds == ({"F", "B"} if name == "1f1b" else {"F", "I", "W"})
    # A block has its code once for each slot.
    assert all(count % PRODUCTS[kind] == 0 for (kind, _), count in found.items())
    arrays = [array for _, array in transposes(module).elements()]
    assert len([array for array in arrays if str(TIME) not in array]) <= PRODUCTS["F"]


def test_fewer_bytes_wait_for_weight_gradients() -> None:
    """By a token, in bytes: one of each of seven gradients.  W makes the inputs of products again,
    of what the forward kept.
    """
    plain, fp8 = (traced("zb_h1", fp8=way, shapes=SHAPES, time=TIME) for way in (False, True))
    gradients = 3 * WIDTH + 2 * HEAD + 2 * HIDDEN
    past = 7 * 4 * HISTORY
    # what a row has in float32, norms and scales: less than 32 bytes a token
    assert 0 < kept(fp8, Place.STASH) - TIME * gradients < 32 * TIME
    for place, own in ((Place.RESIDUAL_INPUT, 0), (Place.RESIDUAL_WEIGHT, past)):
        assert 0 <= kept(fp8, place) - own - kept(plain, place) < 32 * TIME
    assert kept(fp8, Place.STASH) < kept(plain, Place.STASH)
    # and with FP8 nothing reads the result's gradient after I
    ends = [own.code.kinds[0].liveness.cotangent for own in (plain, fp8)]
    assert ends == [LastUse.WEIGHT_GRAD, LastUse.INPUT_GRAD]
