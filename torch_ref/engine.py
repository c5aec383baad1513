"""Runs a schedule table in one process with autograd: devices take turns, each in the order of its
own row.

A cell runs when every input of it exists.  Where no device can go on, the table is wrong: the error
says what each device waits for, and where that stands.  What an action has used up is dropped at
once, so a table that uses something twice, or before it is there, cannot run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import tree
from .batch import Microbatches
from .cut import PendingWeights, Uses, full_backward, input_gradients
from .errors import TableError, TorchRefError
from .gradients import Gradients
from .kept import Input, Late, Ran, Saved
from .models.base import Context, StagedModel, SumCount, Value, WithAux
from .result import Result, to_numpy
from .slices import Passing, Sequences
from .stuck import why_stuck
from .table import COLLECTIVES, Action, Cell, Kind, Table
from .weights import Weights


class Engine:
    """One run of a table."""

    def __init__(
        self,
        table: Table,
        model: StagedModel,
        weights: Weights,
        microbatches: Microbatches,
        scale: float,
        step: int,
        slices: int = 1,
    ) -> None:
        self.table, self.model, self.weights, self.microbatches = (
            table,
            model,
            weights,
            microbatches,
        )
        self.scale, self.step = scale, step
        self.last_stage = model.num_stages - 1
        self.activations: dict[tuple[int, int], Value] = {}  # (stage, microbatch) -> its input
        # -> the gradients of its output's leaves
        self.cotangents: dict[tuple[int, int], list[Tensor | None]] = {}
        self.sequences = Sequences(slices)
        self.kept: list[dict[tuple[int, int], Input | Saved | Late]] = [{} for _ in table.rows]
        self.peaks = [0] * table.num_devices
        self.losses: list[Tensor | None] = [None] * len(microbatches.parts)
        self.aux: list[list[Tensor]] = [[] for _ in microbatches.parts]
        self.counts: list[Tensor | None] = [None] * len(microbatches.parts)
        self.outputs: list[Any] = [None] * len(microbatches.parts)
        self.gradients = Gradients(weights)
        self.order: list[str] = []
        self.actions: dict[Kind, Callable[[int, Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._input_gradient,
            Kind.W: self._weight_gradient,
            Kind.R: self._recompute,
            Kind.L: self._last,
            Kind.E: self._first,
            Kind.G: self._first_gradient,
            Kind.H: self._last_weight_gradient,
        }
        self.at = [0] * table.num_devices  # how far each device is in its row
        # by microbatch, the last stage's output that waits for an L
        self.ends: dict[int, Value] = {}
        self.begins: dict[int, tuple[list[Tensor], Uses]] = {}  # what E made, until its G
        # by microbatch, what L leaves each device for its H
        self.left: list[dict[int, PendingWeights | None]] = [{} for _ in table.rows]

    def run(self) -> Result:
        """Take turns until every row is done."""
        at = self.at
        while any(position < len(row) for position, row in zip(at, self.table.rows, strict=True)):
            before = list(at)
            for device, row in enumerate(self.table.rows):
                if at[device] < len(row) and not self._waits_for(device, row[at[device]]):
                    collective = row[at[device]] and row[at[device]][0].kind in COLLECTIVES
                    for one in range(self.table.num_devices) if collective else (device,):
                        self._run_cell(one, self.table.rows[one][at[one]])
                        at[one] += 1
            if at == before:
                raise TableError(why_stuck(self.table, at, self._waits_for))
        return self._result()

    def _run_cell(self, device: int, cell: Cell) -> None:
        for action in cell:
            self.actions[action.kind](device, action)
            held = sum(not isinstance(kept, Input) for kept in self.kept[device].values())
            self.peaks[device] = max(self.peaks[device], held)
        if cell:
            self.order.append(";".join(str(action) for action in cell))

    # What an action needs.

    def _waits_for(self, device: int, cell: Cell) -> list[tuple[Action, Action]]:
        """(action, what it still lacks) of a cell; what one half of a pair makes is not there for
        the other half.
        """
        return [(action, need) for action in cell for need in self._lacks(device, action)]

    def _lacks(self, device: int, action: Action) -> list[Action]:
        stage, kind, m = action
        kept = self.kept[device].get((stage, m))
        if kind is Kind.H:
            return [] if m in self.left[device] else [Action(device, Kind.L, m)]
        if kind in COLLECTIVES:
            absent = [
                Action(d, kind, m)
                for d in range(self.table.num_devices)
                if (Action(d, kind, m),) != self._here(d)
            ]
            return [*self._lacks_shares(kind, m), *absent]
        if kind is Kind.F:
            missing = (stage > 0 or self.table.spreads_first) and (stage, m) not in self.activations
            needs = [Action(stage - 1, Kind.F, m) if stage > 0 else Action(device, Kind.E, m)]
            before = [Action(stage, Kind.F, n) for n in self.sequences.before(m)[-1:]]
            return [*(needs if missing else []), *filter(self._is_to_come, before)]
        if kind is Kind.W:
            return [] if isinstance(kept, Late) else [Action(stage, Kind.I, m)]
        if kind is Kind.R:
            return [] if isinstance(kept, Input) else [Action(stage, Kind.F, m)]
        lacks = (
            []
            if isinstance(kept, Saved)
            else [Action(stage, Kind.R if self._is_recomputed(stage, m) else Kind.F, m)]
        )
        if stage < self.last_stage and (stage, m) not in self.cotangents:
            lacks.append(self._backward_of(stage + 1, m))
        if self.sequences.is_followed(m):
            lacks += filter(self._is_to_come, [self._backward_of(stage, m + 1)])
        if (
            stage == self.last_stage
            and self.table.spreads_last
            and (stage, m) not in self.cotangents
        ):
            lacks.append(Action(device, Kind.L, m))
        return lacks

    def _lacks_shares(self, kind: Kind, m: int) -> list[Action]:
        """What is not there yet of what all devices need for their shares."""
        if kind is Kind.L and m not in self.ends:
            return [Action(self.last_stage, Kind.F, m)]
        if kind is Kind.G and (-1, m) not in self.cotangents:
            return [self._backward_of(0, m)]
        return []

    def _backward_of(self, stage: int, m: int) -> Action:
        """The action that makes the gradient of a stage's input."""
        whole = Action(stage, Kind.B, m)
        return whole if whole in self.table.places else Action(stage, Kind.I, m)

    def _is_to_come(self, action: Action) -> bool:
        """Whether a device has not come past an action of its row."""
        place = self.table.places[action]
        return self.at[place.device] <= place.position

    def _here(self, device: int) -> Cell:
        """The cell that a device is at."""
        row = self.table.rows[device]
        return row[self.at[device]] if self.at[device] < len(row) else ()

    # What an action does.

    def _is_recomputed(self, stage: int, m: int) -> bool:
        return Action(stage, Kind.R, m) in self.table.places

    def _forward(self, device: int, action: Action) -> None:
        stage, m = action.stage, action.microbatch
        x = self.activations.pop((stage, m)) if stage > 0 or self.table.spreads_first else None
        if self._is_recomputed(stage, m):
            with torch.no_grad():
                ran = self._run_stage(stage, m, x)
            self.kept[device][stage, m] = Input(x)
        else:
            ran = self._run_stage(stage, m, x)
            if not self.table.forward_only:
                self.kept[device][stage, m] = ran.saved
            else:
                self.peaks[device] = max(self.peaks[device], 1)
        self._hand_on(stage, m, ran)
        self.sequences.keep(stage, m, ran.left, forward_only=self.table.forward_only)

    def _recompute(self, device: int, action: Action) -> None:
        """The forward once more, for what its backward reads; all else that it gives has been
        handed on by F.
        """
        stage, m = action.stage, action.microbatch
        kept = self.kept[device][stage, m]
        assert isinstance(kept, Input), f"{action} ran before its forward"
        self.kept[device][stage, m] = self._run_stage(stage, m, kept.x).saved

    def _run_stage(self, stage: int, m: int, x: Value | None) -> Ran:
        """Run a stage on its input, the first with `first` before it, the last with `last` after
        it; nothing is handed on.
        """
        batch = self.microbatches.parts[m]
        passing = self.sequences.passing(stage, m)
        ctx = Context(stage, m, self.step, passing)
        uses = Uses(self.weights.of_stage(stage), grad=torch.is_grad_enabled())
        embedded: list[Tensor] = []
        embedding_uses = None
        if stage == 0 and not self.table.spreads_first:
            embedding_uses = Uses(self.weights.outer, grad=torch.is_grad_enabled())
            x = self.model.first(embedding_uses, batch, self._outside(0, m))
            embedded = tree.leaves(x)
        inputs = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in tree.leaves(x)]
        y, aux = self.model.stage(uses, tree.rebuild(x, inputs), ctx), None
        if isinstance(y, WithAux):
            y, aux = y.x, y.aux
        roots = tree.leaves(y)
        seeds: list[Tensor | None] = [None] * len(roots)
        loss = count = None
        if stage == self.last_stage and not self.table.spreads_last:
            loss, count = self._loss(uses, y, m)
            roots, seeds = [loss], [self._seed(m, loss)]
        if aux is not None:
            roots, seeds = [*roots, aux], [*seeds, self._seed(m, aux)]
        left = passing.left if self.sequences.is_followed(m) else None
        roots = [*roots, *([] if left is None else tree.leaves(left))]
        saved = Saved(inputs, uses, roots, seeds, embedded, embedding_uses, passing.inputs)
        return Ran(saved, y, aux, loss, count, left)

    def _outside(self, stage: int, m: int) -> Context:
        """The context of `first` and `last`, which take nothing from other slices."""
        return Context(stage, m, self.step, Passing(m % self.sequences.slices))

    def _loss(self, uses: Uses, y: Value, m: int) -> tuple[Tensor, Tensor | None]:
        """`last` of a microbatch: its loss, and its count where it is a sum."""
        loss = self.model.last(
            uses, y, self.microbatches.parts[m], self._outside(self.last_stage, m)
        )
        count = None
        if isinstance(loss, SumCount):
            loss, count = loss.loss_sum, loss.count
        if loss.ndim != 0:
            raise TorchRefError(
                f"`last` must return a scalar loss; it returned {tuple(loss.shape)}: take its "
                "mean, for instance"
            )
        return loss, count

    def _last(self, device: int, action: Action) -> None:
        """`last` and its gradient, once for all shares: this reference cuts no parameter, so it
        shares no fault of one that does.
        """
        m = action.microbatch
        if self.table.defers_last:
            self.left[device][m] = None
        if device > 0:
            return
        y = self.ends.pop(m)
        uses = Uses(self.weights.of_stage(self.last_stage), grad=torch.is_grad_enabled())
        leaves = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in tree.leaves(y)]
        loss, count = self._loss(uses, tree.rebuild(y, leaves), m)
        self.losses[m], self.counts[m] = loss.detach(), None if count is None else count.detach()
        if not self.table.forward_only:
            roots, seeds = [loss], [self._seed(m, loss)]
            if self.table.defers_last:
                dy, self.left[device][m] = input_gradients(roots, seeds, leaves, uses)
            else:
                dy, named = full_backward(roots, seeds, leaves, uses)
                self.gradients.add(self.last_stage, named)
            self.cotangents[self.last_stage, m] = dy

    def _last_weight_gradient(self, device: int, action: Action) -> None:
        """The gradient of the parameters of `last`, once for all shares: by the first device."""
        pending = self.left[device].pop(action.microbatch)
        if pending is not None:
            self.gradients.add(self.last_stage, pending.finish())

    def _first(self, device: int, action: Action) -> None:
        """`first`, once for all shares: see `_last`."""
        m = action.microbatch
        if device > 0:
            return
        uses = Uses(self.weights.outer, grad=torch.is_grad_enabled())
        x = self.model.first(uses, self.microbatches.parts[m], self._outside(0, m))
        embedded = tree.leaves(x)
        if not self.table.forward_only:
            self.begins[m] = embedded, uses
        self.activations[0, m] = tree.rebuild(
            x, [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in embedded]
        )

    def _first_gradient(self, device: int, action: Action) -> None:
        """The gradient of `first`, once for all shares."""
        m = action.microbatch
        if device > 0:
            return
        embedded, uses = self.begins.pop(m)
        _, named = full_backward(embedded, self.cotangents.pop((-1, m)), [], uses)
        self.gradients.add(0, named)

    def _hand_on(self, stage: int, m: int, ran: Ran) -> None:
        """Give a stage's output to the next stage, or note the outputs and the loss of the last
        one.
        """
        if ran.aux is not None:
            self.aux[m].append(ran.aux.detach())
        leaves = tree.leaves(ran.y)
        if stage == self.last_stage:
            self.outputs[m] = tree.rebuild(ran.y, [to_numpy(leaf) for leaf in leaves])
            if ran.loss is None:
                # An F without a graph cannot tell which of its outputs have a gradient: see below.
                blind = self._is_recomputed(stage, m)
                wanted = [
                    leaf.is_floating_point() if blind else leaf.requires_grad for leaf in leaves
                ]
                given = zip(leaves, wanted, strict=True)
                self.ends[m] = tree.rebuild(
                    ran.y, [leaf.detach().requires_grad_(want) for leaf, want in given]
                )
                return
            self.losses[m] = ran.loss.detach()
            self.counts[m] = None if ran.count is None else ran.count.detach()
            return
        # Only detached values travel: what a device keeps stays its own.  An F without a graph
        # cannot tell which of its outputs have a gradient: each float may, and R drops the
        # gradients of those that have none.
        blind = self._is_recomputed(stage, m)
        handed = [
            leaf.detach().requires_grad_(leaf.is_floating_point() if blind else leaf.requires_grad)
            for leaf in leaves
        ]
        self.activations[stage + 1, m] = tree.rebuild(ran.y, handed)

    def _seed(self, m: int, loss: Tensor) -> Tensor:
        """The gradient of the step's loss by a microbatch's: its share of the rows (a sum's is 1,
        divided once at the end).
        """
        share = 1.0 if self._sums() else self.microbatches.share(m)
        return torch.full_like(loss, share * self.scale)

    def _sums(self) -> bool:
        return self.model.sum_count

    def _take(self, device: int, action: Action) -> tuple[Saved, list[Tensor | None]]:
        """What a backward starts from; it is dropped from where it was kept."""
        stage, m = action.stage, action.microbatch
        saved = self.kept[device].pop((stage, m))
        assert isinstance(saved, Saved), f"{action} ran before its forward"
        seeds = list(saved.seeds)
        if stage < self.last_stage or self.table.spreads_last:
            arrived = self.cotangents.pop((stage, m))
            seeds[: len(arrived)] = arrived
        return saved, [*seeds, *self.sequences.take(stage, m)]

    def _backward(self, device: int, action: Action) -> None:
        saved, seeds = self._take(device, action)
        given = [*saved.inputs, *saved.earlier]
        found, named = full_backward(saved.roots, seeds, given, saved.uses)
        self.gradients.add(action.stage, named)
        dx = self._give_back(action, saved, found)
        if saved.embedding_uses is not None:
            _, named = full_backward(saved.embedded, dx, [], saved.embedding_uses)
            self.gradients.add(0, named)
        self._send_back(action, dx)

    def _input_gradient(self, device: int, action: Action) -> None:
        saved, seeds = self._take(device, action)
        given = [*saved.inputs, *saved.earlier]
        found, late = input_gradients(saved.roots, seeds, given, saved.uses)
        dx = self._give_back(action, saved, found)
        first = None
        if saved.embedding_uses is not None:
            _, first = input_gradients(saved.embedded, dx, [], saved.embedding_uses)
        self.kept[device][action.stage, action.microbatch] = Late(late, first)
        self._send_back(action, dx)

    def _weight_gradient(self, device: int, action: Action) -> None:
        late = self.kept[device].pop((action.stage, action.microbatch))
        assert isinstance(late, Late), f"{action} ran before its input gradient"
        self.gradients.add(action.stage, late.stage.finish())
        if late.first is not None:
            self.gradients.add(0, late.first.finish())

    def _give_back(
        self, action: Action, saved: Saved, found: list[Tensor | None]
    ) -> list[Tensor | None]:
        """Give earlier slices the gradients of what they left; gives those of the stage's input."""
        count = len(saved.inputs)
        self.sequences.give(action.stage, action.microbatch, found[count:])
        return found[:count]

    def _send_back(self, action: Action, dx: list[Tensor | None]) -> None:
        if action.stage > 0 or self.table.spreads_first:
            self.cotangents[action.stage - 1, action.microbatch] = dx

    # What comes out.

    def _result(self) -> Result:
        left = [key for kept in self.kept for key in kept] + [
            *self.activations,
            *self.cotangents,
            *self.ends,
            *self.begins,
            *self.sequences.left,
            *self.sequences.arrived,
        ]
        left += [m for waiting in self.left for m in waiting]
        assert not left, f"something was never used: {left}"
        losses = np.array([self._total(m) for m in range(len(self.losses))])
        counts = (
            np.array([float(c) for c in self.counts if c is not None]) if self._sums() else None
        )
        if counts is not None and counts.sum() == 0:
            raise TorchRefError(
                "the counts of all microbatches sum to 0, so the loss has no mean; give some "
                "target a weight"
            )
        shares = np.array([self.microbatches.share(m) for m in range(len(losses))])
        loss = float(losses @ shares) if counts is None else float(losses.sum() / counts.sum())
        divisor = self.scale * (1.0 if counts is None else float(counts.sum()))
        grads = {} if self.table.forward_only else self.gradients.arrays(divisor)
        return Result(
            losses, loss, grads, tuple(self.peaks), tuple(self.outputs), counts, tuple(self.order)
        )

    def _total(self, m: int) -> float:
        """A microbatch's loss with its auxiliary losses."""
        loss = self.losses[m]
        assert loss is not None, f"microbatch {m} has no loss"
        return float(loss) + sum(float(aux) for aux in self.aux[m])
