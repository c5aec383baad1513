"""The interpreter: emits the JAX program of one tick, position by position, from a Program and the stage's code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from .action import Kind
from .blocks import Leaves, add, read, strengthen, when, when_flagged, write
from .functions import Context
from .jaxprs import Slot, run_threaded
from .passes.program import BlockUse, Column, Payload, Position, Presence, Program
from .stage import LastCode, StageCode, run

C = Column
PyTree: TypeAlias = Any
State: TypeAlias = "dict[str, Any]"


@dataclass(frozen=True)
class Operands:
    """Everything that the ticks read and none of them writes (leaves, on this device)."""

    stages: tuple[Leaves, ...]  # per chunk: stage parameters, then shared ones
    once: tuple[Leaves, ...]  # per chunk: what was hoisted
    first: Leaves
    first_once: Leaves
    last: Leaves
    last_once: Leaves
    batch: PyTree  # leaves [M, ...]
    rng: Any  # the step's key, or None
    seed: Any  # cotangent of one microbatch's loss


@dataclass(frozen=True)
class Emitter:
    """Turns positions into code.  State keys: order, x ri rw c st fr (pools), out_f out_b (what is sent), acc.*, loss, aux."""

    program: Program
    axis: str
    stage: StageCode
    first: StageCode
    last: LastCode | None
    operands: Operands
    stage_wants: frozenset[str]
    outer_wants: frozenset[str]
    num_stage_params: int
    blocking: bool  # a permute holds its device until the partner has come (CPU); on GPUs it runs beside the blocks
    training: bool  # False: forwards only, nothing is kept and `last` has no gradient

    def trip(self, positions: Sequence[Position], rows: Any, state: State) -> State:
        """The ticks of one period.  `rows[j]` is this device's line of the table for the j-th of them."""
        awaited: dict[int, list[tuple[str, Any, Leaves]]] = {}
        for j, position in enumerate(positions):
            for use in position.blocks:
                state = self._block(use, rows[j], state)
            for index, permute in enumerate(position.permutes):
                pool, out = ("x", "out_f") if permute.payload is Payload.ACTIVATION else ("c", "out_b")
                arrived = [lax.ppermute(self._ready(leaf, state["order"]), self.axis, permute.pairs) for leaf in state[out]]
                awaited.setdefault(j + permute.delay, []).append((pool, rows[j][C.ARRIVAL + index], arrived))
            # A transfer with slack is written to its slot ticks later, so that nothing in between depends on it; what reads the pool in
            # between must be done by then (see `order` in `_block`), or XLA makes the write on a copy.
            for pool, slot, arrived in awaited.pop(j, ()):
                state = {**state, pool: write(state[pool], jnp.where(state["order"], 0, slot), arrived)}
        assert not awaited, "a transfer is awaited after its trip"
        return state

    def _ready(self, leaf: Any, order: Any) -> Any:
        """A payload that cannot be sent before the tick's blocks are done, where a permute blocks its device.

        What F makes could go before I begins.  On a GPU that is right.  A CPU device that does I in this tick would first wait for its
        neighbour's F: two actions of a tick one after the other.  `order` is False after every block; see `_block`.
        """
        if not self.blocking or not jnp.issubdtype(leaf.dtype, jnp.number):
            return leaf
        return jnp.where(order, jnp.zeros_like(leaf), leaf)

    def _block(self, use: BlockUse, row: Any, state: State) -> State:
        """A block under its predicate, carrying only what it writes."""
        kind, chunk = use.block
        if kind is Kind.F:
            predicate, body = row[C.F_CHUNK] == chunk, self._forward(use, row)
        else:
            predicate = jnp.logical_and(row[C.B_CHUNK] == chunk, row[C.B_KIND] == int(kind))
            body = {Kind.B: self._backward, Kind.I: self._input_grad, Kind.W: self._weight_grad}[kind](use, row)
        keys = self._written(use)
        # `order` is False after every block, but XLA cannot know: a block that reads pools must be done before the next writes
        # them, and without this dependency XLA:GPU may run the writer first, on a copy of every pool.
        predicate = jnp.logical_and(predicate, jnp.logical_not(state["order"]))
        flag, inner = when_flagged(use.active, predicate, lambda part: _pick(body({**state, **part}), keys), _pick(state, keys))
        return {**state, **inner, "order": flag}

    def _written(self, use: BlockUse) -> tuple[str, ...]:
        """The state that a block may change."""
        kind, chunk = use.block
        first, last, local = (p is not Presence.NEVER for p in (use.first, use.last, use.local))
        if kind is Kind.F:
            keys = ["ri", "rw"] if self.training else []
            keys += ["x"] if first or local else []
            keys += ["fr"] if first and self.training else []
            keys += self._last_keys() if last else []
            keys += ["out_f"] if Presence.ALWAYS not in (use.last, use.local) else []
        else:
            keys = [] if kind is Kind.I else [f"acc.{chunk}", "acc.shared"]
            keys += ["st"] if kind is Kind.I else []
            keys += ["acc.first", "acc.shared"] if first and kind is not Kind.W else []
            keys += ["c"] if local else []
            keys += ["out_b"] if kind is not Kind.W and Presence.ALWAYS not in (use.first, use.local) else []
        return tuple(dict.fromkeys(keys))

    def _forward(self, use: BlockUse, row: Any) -> Callable[[State], State]:
        """F: [first,] stage[, last and its gradient]; keeps residuals, hands y on."""

        def body(state: State) -> State:
            extra = self._extra(row[C.F_STAGE], row[C.F_MICROBATCH], self.stage_wants)
            keys = ("x", "fr") if self.training else ("x",)
            state = self._when(use.first, row[C.F_FIRST], keys, self._run_first(row), state)
            code, chunk = self.stage, use.block.chunk
            x = read(state["x"], row[C.F_X])
            arguments = [*code.consts, *self.operands.stages[chunk], *x, *extra, *self.operands.once[chunk]]
            if self.training:
                count = len(code.y_avals)
                slots = [*_slots(state["ri"], row[C.F_RI]), *_slots(state["rw"], row[C.F_RW])]
                outs = run_threaded(code.forward, arguments, writes={count + i: s for i, s in enumerate(slots)})
                y, pools = outs[:count], outs[count:]
                early = len(code.residual_input)
                state = {**state, "ri": pools[:early], "rw": pools[early:]}
            else:
                y = run(code.evaluate, *arguments)
            state = {**state, "out_f": strengthen(y)}
            state = self._when(use.local, row[C.F_LOCAL], ("x",), lambda s: {"x": write(s["x"], row[C.F_OUT], y)}, state)
            run_last = self._run_last(row, y) if self.training else self._evaluate_last(row, y)
            return self._when(use.last, row[C.F_LAST], self._last_keys(), run_last, state)

        return body

    def _run_first(self, row: Any) -> Callable[[State], State]:
        def body(state: State) -> State:
            code = self.first
            extra = self._extra(row[C.F_STAGE], row[C.F_MICROBATCH], self.outer_wants)
            jaxpr = code.forward if self.training else code.evaluate
            outs = run(jaxpr, *code.consts, *self.operands.first, *extra, *self.operands.first_once)
            x, residuals = outs[: len(code.y_avals)], outs[len(code.y_avals) :]
            after = {"x": write(state["x"], row[C.F_X], x)}
            return {**after, "fr": write(state["fr"], row[C.F_FR], residuals)} if self.training else after

        return body

    def _run_last(self, row: Any, y: Leaves) -> Callable[[State], State]:
        """The loss and, at once, its gradient: a cotangent of y is far smaller than the residuals of a head."""

        def body(state: State) -> State:
            code = self.last
            assert code is not None
            extra = self._extra(row[C.F_STAGE], row[C.F_MICROBATCH], self.outer_wants)
            outs = run(code.train, *code.consts, *self.operands.last, *self.operands.last_once, *y, *extra, self.operands.seed)
            loss, *rest = outs
            aux, rest = rest[: len(code.aux_avals)], rest[len(code.aux_avals) :]
            own = len(state["acc.last"])
            shared = len(state["acc.shared"])
            return {
                "c": write(state["c"], row[C.F_OUT], rest[own + shared :]),
                "loss": write([state["loss"]], row[C.F_MICROBATCH], [loss])[0],
                "aux": write(state["aux"], row[C.F_MICROBATCH], aux),
                "acc.last": add(state["acc.last"], rest[:own]),
                "acc.shared": add(state["acc.shared"], rest[own : own + shared]),
            }

        return body

    def _evaluate_last(self, row: Any, y: Leaves) -> Callable[[State], State]:
        """The loss alone."""

        def body(state: State) -> State:
            code = self.last
            assert code is not None
            extra = self._extra(row[C.F_STAGE], row[C.F_MICROBATCH], self.outer_wants)
            loss, *aux = run(code.evaluate, *code.consts, *self.operands.last, *self.operands.last_once, *y, *extra)
            return {
                "loss": write([state["loss"]], row[C.F_MICROBATCH], [loss])[0],
                "aux": write(state["aux"], row[C.F_MICROBATCH], aux),
            }

        return body

    def _last_keys(self) -> list[str]:
        return ["c", "loss", "aux", "acc.last", "acc.shared"] if self.training else ["loss", "aux"]

    def _gradient_inputs(self, chunk: int, row: Any, state: State) -> tuple[Leaves, dict[int, Slot]]:
        """(consts, parameters, x, extra, once, residuals, dy) of a backward action; residuals are slots."""
        code = self.stage
        extra = self._extra(row[C.B_STAGE], row[C.B_MICROBATCH], self.stage_wants)
        x = read(state["x"], row[C.B_X])
        slots = [*_slots(state["ri"], row[C.B_RI]), *_slots(state["rw"], row[C.B_RW])]
        operands = self.operands
        before = [*code.consts, *operands.stages[chunk], *x, *extra, *operands.once[chunk]]
        arguments = [*before, *(None for _ in slots), *read(state["c"], row[C.B_DY])]
        return arguments, {len(before) + i: s for i, s in enumerate(slots)}

    def _accumulate(self, chunk: int, dparams: Leaves, state: State) -> State:
        """Add the gradients of a chunk's own and of the shared parameters."""
        own, shared = dparams[: self.num_stage_params], dparams[self.num_stage_params :]
        key = f"acc.{chunk}"
        return {**state, key: add(state[key], own), "acc.shared": add(state["acc.shared"], shared)}

    def _backward(self, use: BlockUse, row: Any) -> Callable[[State], State]:
        """B: both gradients at once."""

        def body(state: State) -> State:
            chunk = use.block.chunk
            arguments, slots = self._gradient_inputs(chunk, row, state)
            outs = run_threaded(self.stage.backward, arguments, reads=slots)
            params = len(self.operands.stages[chunk])
            return self._hand_on(use, row, outs[params:], self._accumulate(chunk, outs[:params], state))

        return body

    def _input_grad(self, use: BlockUse, row: Any) -> Callable[[State], State]:
        """I: the input's gradient, and a stash for W."""

        def body(state: State) -> State:
            arguments, slots = self._gradient_inputs(use.block.chunk, row, state)
            count = sum(self.stage.x_wanted)
            stash = {count + i: s for i, s in enumerate(_slots(state["st"], row[C.B_STASH]))}
            outs = run_threaded(self.stage.input_grad, arguments, reads=slots, writes=stash)
            return self._hand_on(use, row, outs[:count], {**state, "st": outs[count:]})

        return body

    def _weight_grad(self, use: BlockUse, row: Any) -> Callable[[State], State]:
        """W: the parameters' gradients, from residuals and stash."""

        def body(state: State) -> State:
            chunk = use.block.chunk
            arguments, slots = self._gradient_inputs(chunk, row, state)
            stash = {len(arguments) + i: s for i, s in enumerate(_slots(state["st"], row[C.B_STASH]))}
            outs = run_threaded(self.stage.weight_grad, [*arguments, *(None for _ in stash)], reads={**slots, **stash})
            return self._accumulate(chunk, outs, state)

        return body

    def _hand_on(self, use: BlockUse, row: Any, dx: Leaves, state: State) -> State:
        """Send dx, keep it for the chunk before on this device, or give it to `first`."""
        state = {**state, "out_b": strengthen(dx)}
        state = self._when(use.local, row[C.B_LOCAL], ("c",), lambda s: {"c": write(s["c"], row[C.B_OUT], dx)}, state)
        return self._when(use.first, row[C.B_FIRST], ("acc.first", "acc.shared"), self._first_gradient(row, dx, state["fr"]), state)

    def _first_gradient(self, row: Any, dx: Leaves, pool: Leaves) -> Callable[[State], State]:
        def body(state: State) -> State:
            code, own = self.first, len(state["acc.first"])
            extra = self._extra(row[C.B_STAGE], row[C.B_MICROBATCH], self.outer_wants)
            residuals = read(pool, row[C.B_FR])
            grads = run(code.backward, *code.consts, *self.operands.first, *extra, *self.operands.first_once, *residuals, *dx)
            return {"acc.first": add(state["acc.first"], grads[:own]), "acc.shared": add(state["acc.shared"], grads[own:])}

        return body

    def _when(self, presence: Presence, flag: Any, keys: Sequence[str], body: Callable[[State], State], state: State) -> State:
        """A part of a block under its own predicate."""
        if presence is Presence.NEVER:
            return state
        return state | when(presence, flag != 0, lambda part: _pick(body(part), keys), _pick(state, keys))

    def _extra(self, stage: Any, microbatch: Any, wants: frozenset[str]) -> Leaves:
        """Leaves of what a function is given besides parameters and x."""
        return jax.tree.leaves(make_extra(self.operands.batch, self.operands.rng, stage, microbatch, wants))


def make_extra(batch: PyTree, rng: Any, stage: Any, microbatch: Any, wants: frozenset[str]) -> dict[str, PyTree]:
    """The microbatch's rows of the batch and the context, those of them that are wanted."""
    extra: dict[str, PyTree] = {}
    if "microbatch" in wants:
        extra["microbatch"] = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, microbatch, 0, keepdims=False), batch)
    if "ctx" in wants:
        key = None if rng is None else jax.random.fold_in(jax.random.fold_in(rng, stage), microbatch)
        extra["ctx"] = Context(stage, microbatch, key)
    return extra


def _slots(pool: Leaves, index: Any) -> list[Slot]:
    """One slot of every leaf of a pool."""
    return [Slot(leaf, index) for leaf in pool]


def _pick(state: State, keys: Sequence[str]) -> State:
    return {k: state[k] for k in keys}
