"""What one process of the peer does: its stages as modules, torch's runtime, and the harness's ways
round torch's faults.
"""

from __future__ import annotations

import enum
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from .. import tree
from ..batch import Microbatches
from ..errors import PeerError
from ..models.base import Arrays, Context, StagedModel, SumCount, WithAux
from ..result import Array, to_numpy
from ..table import SHARDED, Kind, Table, read_table
from ..weights import Weights


class Split(enum.Enum):
    """Who does what in I and W."""

    TORCH = "torch"  # torch's own cut of the graph
    # the whole backward at I, nothing at W: for stages that use a weight at several depths, where
    # torch's cut fails
    AT_ONCE = "at_once"


@dataclass
class RankResult:
    """A process's part: gradients by stage and name (not divided), and on the last stage's process
    the rest.
    """

    grads: dict[int, Arrays]
    losses: list[float] | None
    counts: list[float] | None
    outputs: list[Any] | None


class StageModule(nn.Module):  # type: ignore[misc]
    """One stage of a model as a module of positional tensors.

    Every stage is told which rows of the batch it works on, so that `first` and the loss can look
    up any entry of the batch (torch's runtime hands only positional tensors to the first stage, and
    one tensor to the loss).
    """

    def __init__(
        self, model: StagedModel, weights: Weights, stage: int, microbatches: Microbatches
    ) -> None:
        super().__init__()
        self.model, self.stage, self.microbatches = model, stage, microbatches
        seen = weights.of_stage(stage) | (weights.outer if stage == 0 else {})
        self.held = nn.ParameterDict(
            {name: nn.Parameter(value.clone()) for name, value in seen.items()}
        )
        with torch.no_grad():
            # The form of what travels between stages: torch's runtime sends tuples of tensors.
            self.form = model.first(weights.outer, microbatches.parts[0], Context(0, 0))

    def forward(self, *values: Tensor, rows: Tensor) -> Any:
        """Values of the stage before (or, on stage 0, nothing of use) to values for the next."""
        ctx = self.context(rows)
        params = dict(self.held.items())
        if self.stage == 0:
            x = self.model.first(params, self.microbatches.parts[ctx.microbatch], ctx)
        else:
            x = tree.rebuild(self.form, values)
        y = self.model.stage(params, x, ctx)
        if isinstance(y, WithAux):
            raise PeerError(
                "torch's runtime has no place for an auxiliary loss that a stage returns; let it "
                "travel with x"
            )
        # contiguous(): gloo sends no other tensors.
        leaves = tuple(leaf.contiguous() for leaf in tree.leaves(y))
        if self.stage == self.model.num_stages - 1:
            # torch detaches the last stage's outputs in place after I, though a loss with weights
            # of its own needs them at W. It spares views.
            leaves = tuple(leaf.view_as(leaf) for leaf in leaves)
        return leaves if len(leaves) > 1 else leaves[0]

    def loss(self, output: Any, rows: Tensor) -> Tensor | SumCount:
        """The loss of a microbatch."""
        ctx = self.context(rows)
        y = tree.rebuild(self.form, output if isinstance(output, tuple | list) else [output])
        return self.model.last(
            dict(self.held.items()), y, self.microbatches.parts[ctx.microbatch], ctx
        )

    def context(self, rows: Tensor) -> Context:
        """The microbatch that starts with these rows (all have equal numbers of rows)."""
        return Context(self.stage, int(rows[0]) // self.microbatches.rows[0])


class OrderedRuntime(_PipelineScheduleRuntime):  # type: ignore[misc]
    """torch's runtime, mended: a loss is kept by its microbatch, not by the order in which forwards
    ran; outputs are not merged.
    """

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, loss_kwargs: Any = None
    ) -> None:
        if not stage.is_last or self._loss_fn is None:
            return
        if not self._internal_losses:
            self._internal_losses.extend([None] * self._n_microbatches)
        self._internal_losses[mb_index] = self._compute_loss(
            output, target_mbs[mb_index], loss_kwargs
        )

    def _merge_outputs(self, output_chunks: list[Any]) -> None:
        """torch joins outputs in run order, and cannot join scalars; they are taken from the stage
        instead.
        """


def run_rank(
    rank: int,
    text: str,
    model: StagedModel,
    microbatches: Microbatches,
    weights: Weights,
    split: Split,
) -> RankResult:
    """Run a step of the table on this process's stages."""
    table = read_table(text)
    mine = sorted({action.stage for place, action in table.actions() if place.device == rank})
    modules = {stage: StageModule(model, weights, stage, microbatches) for stage in mine}
    builder = None if split is Split.TORCH else _nothing_at_w
    stages = [
        PipelineStage(modules[s], s, model.num_stages, torch.device("cpu"), dw_builder=builder)
        for s in mine
    ]
    final = modules.get(model.num_stages - 1)
    counts: dict[int, float] = {}
    # scale_grads=False: torch would divide again at every evaluation and every accumulated step;
    # sums are divided at the end instead.
    runtime = OrderedRuntime(
        stages, table.num_microbatches, loss_fn=_loss_function(final, counts), scale_grads=False
    )
    load(runtime, text)
    rows = torch.arange(sum(microbatches.rows))
    losses: list[Tensor] = []
    runtime.step(
        *([rows] if 0 in mine else []),
        rows=rows,
        target=rows if final else None,
        losses=losses,
        return_outputs=final is not None,
    )
    grads = {stage: _gradients(module) for stage, module in modules.items()}
    if final is None:
        return RankResult(grads, None, None, None)
    counted = [counts[m] for m in range(table.num_microbatches)] if model.sum_count else None
    return RankResult(
        grads, [loss.item() for loss in losses], counted, _outputs(stages[-1], final, table)
    )


def _nothing_at_w() -> Callable[[], None]:
    """torch calls the builder after the whole backward, and what it returns at W."""
    return lambda: None


def load(runtime: Any, text: str) -> None:
    """Hand a table's text to torch's CSV reader: what computes, of stages that are not sharded."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        path.write_text(SHARDED.sub("", text))
        runtime._load_csv(str(path))


def _loss_function(
    final: StageModule | None, counts: dict[int, float]
) -> Callable[[Any, Tensor], Tensor]:
    """What torch calls on the last stage; other processes need some function too, or they would run
    no backward.
    """

    def loss_of(output: Any, rows: Tensor) -> Tensor:
        assert final is not None, "only the process of the last stage has a loss"
        loss = final.loss(output, rows)
        if not isinstance(loss, SumCount):
            return loss
        counts[final.context(rows).microbatch] = loss.count.item()
        return loss.loss_sum

    return loss_of


def _gradients(module: StageModule) -> dict[str, Array]:
    return {
        name: to_numpy(value.grad) for name, value in module.held.items() if value.grad is not None
    }


def _outputs(stage: Any, module: StageModule, table: Table) -> list[Any]:
    """The last stage's outputs in microbatch order: torch keeps them in the order in which forwards
    ran.
    """
    ran = [
        action.microbatch
        for _, action in table.actions()
        if action.kind is Kind.F and action.stage == module.stage
    ]
    kept = dict(zip(ran, stage.output_chunks, strict=True))
    leaves = [kept[m] if isinstance(kept[m], tuple) else (kept[m],) for m in sorted(ran)]
    return [tree.rebuild(module.form, [to_numpy(leaf) for leaf in values]) for values in leaves]
