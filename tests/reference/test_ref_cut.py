"""The cut into input and weight gradients: nothing is computed twice, each part where it belongs,
memory is let go.
"""

import gc
import weakref
from collections import Counter

import pytest
import torch
from test_ref_executor import TOLERANCE, gpt_batch, small_gpt
from torch.utils._python_dispatch import TorchDispatchMode

import torch_ref
from torch_ref.cut import Uses, full_backward, input_gradients

torch.set_num_threads(1)


class CountOps(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.ops = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm", "dot", "mv", "matmul"):
            self.ops["matmul"] += 1
        return func(*args, **(kwargs or {}))


def matmuls(call):
    with CountOps() as count:
        result = call()
    return count.ops["matmul"], result


def chain(depth, *, look_up_once=False):
    """x -> tanh(x @ w) `depth` times with the same weight: one look-up each time, or one
    for all.
    """
    w = torch.randn(4, 4, dtype=torch.float64)
    uses = Uses({"w": w}, grad=True)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    shared, y = uses["w"] if look_up_once else None, x
    for _ in range(depth):
        y = torch.tanh(y @ (shared if look_up_once else uses["w"]))
    return x, y, uses


@pytest.mark.parametrize(("once", "at_i", "at_w"), [(False, 3, 3), (True, 6, 0)])
def test_matmuls_of_a_chain(once, at_i, at_w):
    """One matmul a layer at I, one at W.  A single look-up used by all layers cannot wait for W,
    and costs nothing more.
    """
    torch.manual_seed(0)
    x, y, uses = chain(3, look_up_once=once)
    seed = torch.randn_like(y)
    together, (dx, named) = matmuls(lambda: full_backward([y], [seed], [x], uses))
    assert together == 6
    torch.manual_seed(0)
    x, y, uses = chain(3, look_up_once=once)
    inputs, (dx_cut, late) = matmuls(lambda: input_gradients([y], [seed], [x], uses))
    weights, named_cut = matmuls(late.finish)
    assert (inputs, weights) == (at_i, at_w)
    # The same products of the same numbers, whose sums may be made in another order.
    torch.testing.assert_close(dx_cut[0], dx[0], rtol=0, atol=TOLERANCE * dx[0].abs().max().item())
    for (_, whole), (_, cut) in zip(named, named_cut, strict=True):
        torch.testing.assert_close(cut, whole, rtol=0, atol=TOLERANCE * whole.abs().max().item())


def test_input_that_needs_no_gradient_leaves_all_to_w():
    uses = Uses({"w": torch.randn(4, 4)}, grad=True)
    x = torch.randn(3, 4)
    y = torch.tanh(x @ uses["w"]) @ uses["w"]
    count, (dx, late) = matmuls(lambda: input_gradients([y], [torch.ones_like(y)], [x], uses))
    assert (count, dx) == (0, [None])
    count, named = matmuls(late.finish)
    assert (count, len(named)) == (3, 2)


def test_weight_beside_and_below_another():
    """u is used at a spine node both directly and through a product with v, and v is loose from x
    in a second output.
    """
    torch.manual_seed(1)
    weights = {
        "u": torch.randn(4, 4, dtype=torch.float64),
        "v": torch.randn(4, 4, dtype=torch.float64),
    }

    def forward():
        uses = Uses(weights, grad=True)
        x = torch.randn(
            2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
        ).requires_grad_()
        u, v = uses["u"], uses["v"]
        y = torch.addmm(u[:2] @ v, torch.sin(x), u @ v)
        return x, [y, (v * v).sum(), torch.tanh(y)], uses

    seeds = [
        torch.ones(2, 4, dtype=torch.float64),
        torch.ones((), dtype=torch.float64),
        torch.full((2, 4), 0.5, dtype=torch.float64),
    ]
    x, roots, uses = forward()
    dx, named = full_backward(roots, seeds, [x], uses)
    x, roots, uses = forward()
    dx_cut, late = input_gradients(roots, seeds, [x], uses)
    torch.testing.assert_close(dx_cut[0], dx[0], rtol=0, atol=TOLERANCE * dx[0].abs().max().item())
    for (name, whole), (name_cut, cut) in zip(named, late.finish(), strict=True):
        assert name == name_cut
        torch.testing.assert_close(cut, whole, rtol=0, atol=TOLERANCE * whole.abs().max().item())


def test_output_that_is_the_input():
    """A stage that does nothing hands its gradient through."""
    x = torch.randn(3, requires_grad=True)
    dx, late = input_gradients([x], [torch.ones(3)], [x], Uses({}, grad=True))
    assert torch.equal(dx[0], torch.ones(3))
    assert late.finish() == []


def test_a_whole_table_does_every_matmul_once():
    """Split or whole, a table of the GPT does exactly as many matmuls."""
    model, batch = small_gpt(2), gpt_batch(4)
    weights = model.init()
    tables = (
        "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n",
        "0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1F1,1I0,1I1,1W1,1W0\n",
    )
    whole, split = (
        matmuls(lambda t=t: torch_ref.run(t, model, batch, weights=weights))[0] for t in tables
    )
    assert split == whole


@pytest.mark.parametrize("below", [True, False])
def test_what_the_forward_saved_is_let_go(below):
    """What the weights' nodes stand above lives until W; what only the input's gradient needed,
    above them, dies with I.
    """
    saved = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            kept = x.clone()
            saved.append(weakref.ref(kept))
            ctx.save_for_backward(kept)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    uses = Uses({"w": torch.randn(3, 3)}, grad=True)
    x = torch.randn(3, 3, requires_grad=True)
    y = Noted.apply(x) @ uses["w"] if below else Noted.apply(x @ uses["w"])
    assert saved[0]() is not None
    gc.disable()
    try:
        _, late = input_gradients([y], [torch.ones_like(y)], [x], uses)
        del y, uses
        assert (saved[0]() is not None) == below
        late.finish()
        assert saved[0]() is None
    finally:
        gc.enable()
