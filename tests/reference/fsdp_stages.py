"""torch's runtime on stages that FSDP2 splits; each function runs in new processes."""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

DEVICES, SHARDS, STAGES, MICROBATCHES, WIDTH = 2, 2, 4, 4, 4


def loss_of(found, wanted):
    return ((found - wanted) ** 2).mean()


def worst_error(rank, table):
    """The largest error of a gradient of this process's stages, relative to the largest entry of
    its array, against plain autograd on the whole batch.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (DEVICES, SHARDS), mesh_dim_names=("pipe", "data"))
    device, shard = divmod(rank, SHARDS)
    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(STAGES)]
    x, y = torch.randn(2, 4 * MICROBATCHES, WIDTH, dtype=torch.float64)
    loss_of(nn.Sequential(*modules)(x), y).backward()
    wanted = [[p.grad.clone() for p in module.parameters()] for module in modules]
    own = range(device, STAGES, DEVICES)
    for stage in own:
        modules[stage].zero_grad()
        fully_shard(modules[stage], mesh=mesh["data"])
    cpu, group = torch.device("cpu"), mesh.get_group("pipe")
    stages = [PipelineStage(modules[s], s, STAGES, cpu, group=group) for s in own]
    # torch would divide what it has summed at every REDUCE_GRAD of a stage
    runtime = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        path.write_text(table)
        runtime._load_csv(str(path), format="compute_comms")
    rows = [part.chunk(SHARDS)[shard] for part in (x, y)]
    runtime.step(*(rows[:1] if 0 in own else []), target=rows[1] if STAGES - 1 in own else None)
    return max(
        float((p.grad.full_tensor() / MICROBATCHES - grad).abs().max() / grad.abs().max())
        for stage in own
        for p, grad in zip(modules[stage].parameters(), wanted[stage], strict=True)
    )


def worst_errors(rank, tables):
    """That of several tables, in the same processes."""
    return [worst_error(rank, table) for table in tables]
