"""What torch.distributed.pipelining does where it is wrong; each function runs in new processes,
without our harness's repairs.
"""

import logging
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

IN_ORDER = "0F0,1F0,0F1,1F1,0F2,1F2,1B0,0B0,1B1,0B1,1B2,0B2\n"
SPLIT = "0F0,1F0,1I0,0I0,1W0,0W0\n"
TWO_DEVICES = "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n"
MIXED = "0F2,0F0,0F1,0B0,0B1,0B2\n1F2,1F0,1F1,1B0,1B1,1B2\n"


class Reused(nn.Module):
    """Two weights, each at two depths, as in a recurrent cell or a stack of layers kept as one
    array.
    """

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 2, dtype=torch.float64))
        self.u = nn.Parameter(torch.randn(2, dtype=torch.float64))

    def forward(self, x):
        for _ in range(2):
            x = torch.tanh(x @ self.w) * self.u
        return x


def linear():
    return nn.Linear(2, 2, dtype=torch.float64)


def build(rank, table, *, modules=None, loss=None, **how):
    """(runtime, this rank's modules, x, target): two stages on as many devices as the table has
    lines.
    """
    torch.manual_seed(0)
    modules = modules or [linear(), linear()]
    text = table.strip().split("\n")
    mine = [s for s in range(2) if f"{s}F0" in text[rank].split(",")]
    stages = [PipelineStage(modules[s], s, 2, torch.device("cpu")) for s in mine]
    microbatches = 1 + max(
        int(cell.split("F")[1]) for line in text for cell in line.split(",") if "F" in cell
    )
    runtime = _PipelineScheduleRuntime(
        stages, microbatches, loss_fn=loss or nn.functional.mse_loss, **how
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        path.write_text(table)
        runtime._load_csv(str(path))
    x, target = (torch.randn(2 * microbatches, 2, dtype=torch.float64) for _ in range(2))
    return runtime, modules, x, target


def attempt(call):
    """What a call gives, or the class and first line of its error."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def step(rank, table, *, evaluate=False):
    """Losses, outputs and the first layer's gradient of a step or an evaluation, and what they
    should be.
    """
    runtime, modules, x, target = build(rank, table)
    losses = []
    call = runtime.eval if evaluate else runtime.step
    output = call(*((x,) if rank == 0 else ()), target=target if rank == 1 else None, losses=losses)
    found = {
        "losses": [loss.item() for loss in losses],
        "output": output,
        "gradient": modules[0].weight.grad,
    }
    torch.manual_seed(0)
    fresh = nn.Sequential(linear(), linear())
    plain = [
        nn.functional.mse_loss(fresh(x[i : i + 2]), target[i : i + 2]) for i in range(0, len(x), 2)
    ]
    (sum(plain) / len(plain)).backward()
    right = {
        "losses": [loss.item() for loss in plain],
        "output": fresh(x).detach(),
        "gradient": fresh[0].weight.grad,
    }
    return found, right


def divided_again(rank, again):
    """The first layer's gradient on rank 0, after a step and after something more."""
    runtime, modules, x, target = build(rank, TWO_DEVICES)
    given = ((x,) if rank == 0 else (), {"target": target if rank == 1 else None})
    runtime.step(*given[0], **given[1])
    before = None if rank else modules[0].weight.grad.clone()
    getattr(runtime, again)(*given[0], **given[1])
    return before, None if rank else modules[0].weight.grad.clone()


def evaluated_on_one_device():
    runtime, _, x, target = build(0, IN_ORDER)
    runtime.eval(x, target=target)
    return "no error"


def with_own_weights():
    """A loss that has weights of its own, in a table with W on the last stage."""
    head = linear()
    runtime, _, x, target = build(
        0,
        SPLIT,
        loss=lambda y, t: nn.functional.mse_loss(head(y), t),
        modules=[linear(), WithHead(head)],
    )
    runtime.step(x, target=target)
    return "no error"


class WithHead(nn.Module):
    """A stage that owns the loss's weights, so that torch knows of them."""

    def __init__(self, head):
        super().__init__()
        self.body, self.head = linear(), head

    def forward(self, x):
        return self.body(x)


class WithScalar(nn.Module):
    """A stage with a scalar among its outputs."""

    def forward(self, x):
        return x, x.sum()


def reused():
    runtime, _, x, target = build(0, SPLIT, modules=[linear(), Reused()])
    runtime.step(x, target=target)
    return "no error"


def scalar_output():
    runtime, _, x, target = build(
        0,
        IN_ORDER,
        modules=[linear(), WithScalar()],
        loss=lambda y, t: nn.functional.mse_loss(y[0], t) + y[1],
    )
    runtime.step(x, target=target)
    return "no error"


def forward_only():
    build(0, "0F0,1F0\n")
    return "no error"


def one_process(_rank):
    """All that shows with both stages in one process, where nothing can hang."""
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
    return {
        "evaluated on one device": attempt(evaluated_on_one_device),
        "reused": attempt(reused),
        "own weights": attempt(with_own_weights),
        "scalar output": attempt(scalar_output),
        "forward only": attempt(forward_only),
        "trailing letters": attempt(lambda: str(_Action.from_str("0F0xyz"))),
    }


def two_processes(rank):
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
    return {again: divided_again(rank, again) for again in ("eval", "step")} | {
        "in order": step(rank, TWO_DEVICES),
        "mixed, evaluated": step(rank, MIXED, evaluate=True),
    }


def mixed(rank):
    """Backwards of a table whose forwards do not run in the order of microbatches."""
    return step(rank, MIXED)


def uneven(rank):
    """Seven rows in three microbatches."""
    runtime, _, x, target = build(rank, TWO_DEVICES)
    runtime.step(*([x[:5]] if rank == 0 else []), target=target[:5] if rank == 1 else None)


def never_ends(rank):
    """Both wait for the other's message."""
    torch.distributed.recv(torch.zeros(1), src=1 - rank)


def fails(rank):
    if rank == 1:
        raise KeyError("it was never there")
    torch.distributed.recv(torch.zeros(1), src=1)
