"""The model without a pipeline: its functions one after the other, on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import PyTree, zeros_of
from .calls import OUTER_WANTS
from .functions import Extra, Functions, make_extra
from .spread import Cuts


@dataclass(frozen=True)
class Plain:
    """The functions for a batch, with parameters and rows."""

    functions: Functions
    cuts: Cuts
    params: dict[str, PyTree]  # "stages": a tree for each stage, or leaves [S, ...]
    rows: PyTree  # of each microbatch
    rng: Any
    # the stages are one function, and their parameters are leaves [S, ...]
    stacked: bool

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        if not self.stacked:
            return len(self.params["stages"])
        leaves = jax.tree.leaves(self.params["stages"])
        return int(leaves[0].shape[0]) if leaves else 1

    def begin(self, state: PyTree) -> tuple[PyTree, PyTree]:
        """State and what passes between slices, of each stage, before the first microbatch."""
        nothing: PyTree = () if self.stacked else [()] * self.num_stages
        state = state if self.functions.has_state else nothing
        if self.functions.slices == 1:
            return state, nothing
        (_, carried), _ = jax.eval_shape(self.microbatch, (state, nothing), jnp.int32(0))
        return state, zeros_of(carried)

    def first(self, index: Any) -> PyTree:
        """The input of the first stage."""
        return self._outer("first", (), 0, index)

    def microbatch(
        self, passed: tuple[PyTree, PyTree], index: Any
    ) -> tuple[tuple[PyTree, PyTree], tuple[Any, PyTree]]:
        """State, what passes between slices, and the number of a microbatch -> both after it,
        (loss, {"count", "metrics"}).
        """
        x, of_stages, passed = self.stages(self.first(index), index, passed)
        loss, aux = self._outer("last", x, self.num_stages - 1, index)
        return passed, (loss + of_stages, aux)

    def stages(self, x: PyTree, index: Any, passed: PyTree) -> tuple[PyTree, Any, PyTree]:
        """x after all stages, the sum of their losses, and what each leaves; `passed` are their
        states and what the slice before left.
        """
        functions, shared = self.functions, self.params["shared"]

        def stage(x: PyTree, row: PyTree, at: int = 0) -> tuple[PyTree, PyTree]:
            number, own, (state, carried) = row
            function = functions.stages[at]
            extra = self._extra(number, index, function.wants_arrays) | {"carried": carried}
            extra |= {"state": state} if "state" in function.wants else {}
            y, returned = functions.run_stage(at, (own, shared), x, extra)
            loss = 0.0 if isinstance(returned.loss, tuple) else returned.loss
            left = returned.carried if functions.passes else ()
            return y, (loss, (returned.state, left))

        if self.stacked:
            numbers = jnp.arange(self.num_stages, dtype=jnp.int32)
            x, (losses, after) = jax.lax.scan(stage, x, (numbers, self.params["stages"], passed))
            return x, jnp.sum(losses), after
        results = []
        for s, row in enumerate(zip(self.params["stages"], zip(*passed, strict=True), strict=True)):
            x, result = stage(x, (s, *row), s)
            results.append(result)
        losses, after = zip(*results, strict=True)
        states, carried = zip(*after, strict=True)
        return x, sum(losses), ([*states], [*carried])

    def _extra(self, stage: Any, index: Any, wants: frozenset[str]) -> Extra:
        slices = self.functions.slices
        return make_extra(self.rows, self.rng, jnp.int32(stage), index, wants, slices)

    def _outer(self, key: str, x: PyTree, stage: int, index: Any) -> Any:
        """`first` or `last`."""
        params = self.params[key], self.params["shared"]
        extra = self._extra(stage, index, OUTER_WANTS)
        return self.functions.run_whole(key, params, x, extra, self.cuts)
