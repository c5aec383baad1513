"""FP8 matmuls of a layer in programs of described GPUs: none is converted to bfloat16 by JAX."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from benchmarks.beside_matmuls import HEAD, cudnn, pretend_cudnn
from benchmarks.fp8 import CUBLAS, HISTORY, Matmul, counted, kept, traced
from jaxpipe.table.effects import Place
from tests.gpu.programs import gpu_marks
from tests.tiers import slow

pytestmark = gpu_marks()
WIDTH, HIDDEN, TIME = 2 * HEAD, 4 * HEAD, 256
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
    found = counted(traced(name, fp8=True, shapes=SHAPES, time=TIME), options)
    assert {own for _, own in found} == {by}
    kinds = {kind for kind, _ in found}
    assert kinds == ({"F", "B"} if name == "1f1b" else {"F", "I", "W"})
    # A block has its code once for each slot.
    assert all(count % PRODUCTS[kind] == 0 for (kind, _), count in found.items())


def test_fewer_bytes_wait_for_weight_gradients() -> None:
    """By a token, in bytes: one of the input of down and of seven gradients.  W makes the other
    inputs again, of attention's output and x after it, two bytes each.
    """
    plain, fp8 = (traced("zb_h1", fp8=way, shapes=SHAPES, time=TIME) for way in (False, True))
    gradients = 3 * WIDTH + 2 * HEAD + 2 * HIDDEN
    held, past = TIME * 2 * 2 * WIDTH, 7 * 4 * HISTORY
    # what a row has in float32, norms and scales: less than 32 bytes a token
    assert 0 < kept(fp8, Place.STASH) - TIME * (HIDDEN + gradients) < 32 * TIME
    assert 0 < kept(fp8, Place.RESIDUAL_WEIGHT) - held - past < 32 * TIME
    waits = [kept(own, Place.RESIDUAL_WEIGHT) + kept(own, Place.STASH) for own in (plain, fp8)]
    assert waits[1] < 0.7 * waits[0]
