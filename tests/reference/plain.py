"""The yardstick: the same model in plain torch autograd, with no table, no cut and no stage
boundaries.
"""

import numpy as np
import torch

from torch_ref.models import Context, SumCount, WithAux


def plain(model, weights, batch, *, rows):
    """(loss, gradients, loss per microbatch) of the whole batch, one graph for all of it."""
    leaves = {name: torch.tensor(value).requires_grad_() for name, value in weights.items()}
    losses, counts, start = [], [], 0
    for m, count in enumerate(rows):
        microbatch = {
            name: torch.as_tensor(value)[start : start + count] for name, value in batch.items()
        }
        start += count
        x, aux = model.first(leaves, microbatch, Context(0, m)), 0.0
        for s in range(model.num_stages):
            own = {
                name: leaf[s] if name.startswith("stages/") else leaf
                for name, leaf in leaves.items()
            }
            x = model.stage(own, x, Context(s, m))
            if isinstance(x, WithAux):
                x, aux = x.x, aux + x.aux
        loss = model.last(leaves, x, microbatch, Context(model.num_stages - 1, m))
        if isinstance(loss, SumCount):
            loss, number = loss.loss_sum, loss.count
            counts.append(number)
        losses.append(loss + aux)
    total = (
        sum(losses) / sum(counts)
        if counts
        else sum(n / sum(rows) * loss for n, loss in zip(rows, losses, strict=True))
    )
    grads = torch.autograd.grad(
        total, list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    return (
        total.item(),
        {k: g.numpy() for k, g in zip(leaves, grads, strict=True)},
        np.array([x.item() for x in losses]),
    )


def worst(ours, theirs):
    """The largest difference of any gradient, relative to that gradient's largest entry."""
    assert ours.keys() == theirs.keys()
    return max(
        np.abs(ours[k] - theirs[k]).max() / max(np.abs(theirs[k]).max(), 1e-30) for k in theirs
    )
