"""The interpreter: emits the JAX program of one tick, template by template, from a Program and the stage's code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from ..jaxprs import Slot, run_threaded
from ..model.functions import Context
from ..program.ir import BlockUse, Column, Payload, Permute, Presence, Program, Segment, TickTemplate
from ..stage.code import LastCode, StageCode, run
from ..table.action import Kind
from .operands import Operands, SharedBuffers, StageOperand
from .pools import Leaves, add, read, strengthen, when, when_flagged, write

C = Column
# Where the state has what is sent, and where what arrives is kept.
_OUT = {Payload.ACTIVATION: "out_f", Payload.COTANGENT: "out_b"}
_POOL = {Payload.ACTIVATION: "x", Payload.COTANGENT: "c"}
PyTree: TypeAlias = Any
State: TypeAlias = "dict[str, Any]"


@dataclass(frozen=True)
class Emitter:
    """Turns templates into code.

    State keys: order, x ri rw c st fr (pools), out_f out_b (what is sent), acc.* (gradients), bs.* (the stages' own state), loss, aux.
    """

    program: Program
    axis: str
    kinds: tuple[StageCode, ...]
    kind_of: tuple[int, ...]  # per stage
    wants: tuple[frozenset[str], ...]  # per kind, the keywords that its function takes
    buffers: SharedBuffers
    first: StageCode
    last: LastCode | None
    operands: Operands
    outer_wants: frozenset[str]
    training: bool  # False: forwards only, nothing is kept and `last` has no gradient

    def kinds_at(self, segment: Segment) -> list[list[tuple[int, ...]]]:
        """For each template and each of its blocks, the kinds of the stages that run it."""
        kind_of = np.array(self.kind_of)
        found = []
        for j, template in enumerate(segment.templates):
            rows = self.program.table[segment.start + j : segment.stop : segment.period]
            found.append([tuple(np.unique(kind_of[_stages(rows, use)]).tolist()) for use in template.blocks])
        return found

    def keeps_at(self, segment: Segment) -> list[list[bool]]:
        """For each template and each of its lanes, whether a device that nothing comes to may have no free slot: it keeps what it has."""
        rows = self.program.table[segment.start : segment.stop, :, C.ARRIVAL :]
        return [[bool((rows[j :: segment.period, :, i] < 0).any()) for i in range(rows.shape[2])] for j in range(segment.period)]

    def trip(self, segment: Segment, rows: Any, state: State) -> State:
        """The ticks of one period.  `rows[j]` is this device's line of the table for the j-th of them."""
        kinds, keeps = self.kinds_at(segment), self.keeps_at(segment)
        awaited: dict[int, list[tuple[Payload, bool, Any, Leaves]]] = {}
        for j, template in enumerate(segment.templates):
            for use, those in zip(template.blocks, kinds[j], strict=True):
                for kind in those:
                    state = self._block(use, kind, rows[j], state, asks=len(those) > 1)
            if len(template.exchanges) > 1:
                for number in range(len(template.exchanges)):
                    state = self._gate(template, number, keeps[j], rows[j], state)
            else:
                for lane, permute in zip(template.lanes_of(0), template.exchanges[0], strict=True):
                    sent = self._permute(permute, state[_OUT[permute.payload]])
                    awaited.setdefault(j + permute.delay, []).append((permute.payload, keeps[j][lane], rows[j][C.ARRIVAL + lane], sent))
            # A transfer with slack is written to its slot ticks later, so that nothing in between depends on it; what reads the pool in
            # between must be done by then (see `order` in `_block`), or XLA makes the write on a copy.
            for payload, keep, slot, arrived in awaited.pop(j, ()):
                state = _arrive(state, payload, jnp.where(state["order"], 0, slot), arrived, keep=keep)
        assert not awaited, "a transfer is awaited after its trip"
        return state

    def _gate(self, template: TickTemplate, number: int, keeps: Sequence[bool], row: Any, state: State) -> State:
        """One of several exchanges, where the table names it for this tick.

        All devices choose the same, or those that send would wait for others that do not receive.  One conditional could ask for all
        exchanges at once, but XLA fixes the layouts of its results, and may copy a whole pool into that layout.
        """
        exchange = template.exchanges[number]
        if not exchange:
            return state

        def body(pools: State) -> State:
            arrived = [self._permute(permute, state[_OUT[permute.payload]]) for permute in exchange]
            for lane, permute, leaves in zip(template.lanes_of(number), exchange, arrived, strict=True):
                pools = _arrive(pools, permute.payload, row[C.ARRIVAL + lane], leaves, keep=keeps[lane])
            return pools

        predicate = jnp.logical_and(row[C.EXCHANGE] == number, jnp.logical_not(state["order"]))
        written = _pick(state, [pool for payload, pool in _POOL.items() if any(p.payload is payload for p in exchange)])
        flag, inner = when_flagged(Presence.SOMETIMES, predicate, body, written)
        return {**state, **inner, "order": flag}

    def _permute(self, permute: Permute, leaves: Leaves) -> Leaves:
        return [lax.ppermute(leaf, self.axis, permute.pairs) for leaf in leaves]

    def _block(self, use: BlockUse, kind: int, row: Any, state: State, *, asks: bool) -> State:
        """A block of one kind of stage under its predicate, carrying only what it writes; `asks`: other kinds may run it too."""
        action, chunk = use.block
        if action is Kind.F:
            predicate, stage, body = row[C.F_CHUNK] == chunk, row[C.F_STAGE], self._forward(use, kind, row)
        else:
            predicate, stage = jnp.logical_and(row[C.B_CHUNK] == chunk, row[C.B_KIND] == int(action)), row[C.B_STAGE]
            body = {Kind.B: self._backward, Kind.I: self._input_grad, Kind.W: self._weight_grad}[action](use, kind, row)
        if asks:
            predicate = jnp.logical_and(predicate, jnp.array(self.kind_of)[stage] == kind)
        keys = self._written(use)
        # `order` is False after every block, but XLA cannot know: a block that reads pools must be done before the next writes
        # them, and without this dependency XLA:GPU may run the writer first, on a copy of every pool.
        predicate = jnp.logical_and(predicate, jnp.logical_not(state["order"]))
        active = Presence.SOMETIMES if asks else use.active
        flag, inner = when_flagged(active, predicate, lambda part: _pick(body({**state, **part}), keys), _pick(state, keys))
        return {**state, **inner, "order": flag}

    def _written(self, use: BlockUse) -> tuple[str, ...]:
        """The state that a block may change."""
        action, chunk = use.block
        first, last, local = (p is not Presence.NEVER for p in (use.first, use.last, use.local))
        if action is Kind.F:
            keys = ["ri", "rw", f"bs.{chunk}"] if self.training else []
            keys += ["x"] if first or local else []
            keys += ["fr"] if first and self.training else []
            keys += self._last_keys() if last else []
            keys += ["loss"] if any(code.loss is not None for code in self.kinds) else []
            keys += ["out_f"] if Presence.ALWAYS not in (use.last, use.local) else []
        else:
            keys = [] if action is Kind.I else [f"acc.{chunk}", "acc.shared"]
            keys += ["st"] if action is Kind.I else []
            keys += ["acc.first", "acc.shared"] if first and action is not Kind.W else []
            keys += ["c"] if local else []
            keys += ["out_b"] if action is not Kind.W and Presence.ALWAYS not in (use.first, use.local) else []
        return tuple(dict.fromkeys(keys))

    def _forward(self, use: BlockUse, kind: int, row: Any) -> Callable[[State], State]:
        """F: [first,] stage[, last and its gradient]; keeps residuals, hands y on."""

        def body(state: State) -> State:
            code, chunk, buffers = self.kinds[kind], use.block.chunk, self.buffers
            operand = self.operands.stages[chunk, kind]
            keys = ("x", "fr") if self.training else ("x",)
            state = self._when(use.first, row[C.F_FIRST], keys, self._run_first(row), state)
            x = buffers.x.read(state["x"], row[C.F_X], code.x_avals)
            extra = self._stage_extra(kind, operand, row[C.F_STAGE], row[C.F_MICROBATCH], state[f"bs.{chunk}"])
            arguments = [*code.consts, *operand.params(), *x, *extra, *operand.once]
            if self.training:
                outs, state = self._keep(code, arguments, row, state)
            else:
                outs = run(code.evaluate, *arguments)
            y, rest = outs[: len(code.y_avals)], outs[len(code.y_avals) :]
            if code.loss is not None:
                loss, *rest = rest
                state = {**state, "loss": _add_at(state["loss"], row[C.F_MICROBATCH], loss)}
            if code.state and self.training:
                state = {**state, f"bs.{chunk}": operand.write_state(state[f"bs.{chunk}"], rest)}
            # What only the last stage returns is never sent; then no other kind takes it.
            if buffers.x.has(code.y_avals):
                state = {**state, "out_f": strengthen(buffers.x.put(state["out_f"], code.y_avals, y))}
                hand_over = lambda s: {"x": buffers.x.write(s["x"], row[C.F_OUT], code.y_avals, y)}  # noqa: E731
                state = self._when(use.local, row[C.F_LOCAL], ("x",), hand_over, state)
            run_last = self._run_last(kind, row, y) if self.training else self._evaluate_last(row, y)
            return self._when(use.last if self._fits_last(code) else Presence.NEVER, row[C.F_LAST], self._last_keys(), run_last, state)

        return body

    def _fits_last(self, code: StageCode) -> bool:
        """Whether the last stage may be of this kind: `last` takes what it returns."""
        return self.kinds[self.kind_of[-1]].y_avals == code.y_avals

    def _keep(self, code: StageCode, arguments: Leaves, row: Any, state: State) -> tuple[Leaves, State]:
        """Run a forward whose residuals go into their slots: what it returns besides them, and the state after it."""
        early, count = len(code.residual_input), code.num_outputs
        pools = (
            ("ri", self.buffers.residual_input, code.residual_input, C.F_RI),
            ("rw", self.buffers.residual_weight, code.residual_weight, C.F_RW),
        )
        slots = [slot for key, buffer, avals, column in pools for slot in buffer.slots(state[key], row[column], avals)]
        outs = run_threaded(code.forward, arguments, writes={count + i: s for i, s in enumerate(slots) if s is not None})
        found = (outs[count : count + early], outs[count + early :])
        new = {
            key: buffer.stored(state[key], row[column], avals, values)
            for (key, buffer, avals, column), values in zip(pools, found, strict=True)
        }
        return outs[:count], {**state, **new}

    def _run_first(self, row: Any) -> Callable[[State], State]:
        def body(state: State) -> State:
            code = self.first
            extra = self._extra(row[C.F_STAGE], row[C.F_MICROBATCH], self.outer_wants)
            jaxpr = code.forward if self.training else code.evaluate
            outs = run(jaxpr, *code.consts, *self.operands.first, *extra, *self.operands.first_once)
            x, residuals = outs[: len(code.y_avals)], outs[len(code.y_avals) :]
            after = {"x": self.buffers.x.write(state["x"], row[C.F_X], code.y_avals, x)}
            return {**after, "fr": write(state["fr"], row[C.F_FR], residuals)} if self.training else after

        return body

    def _run_last(self, kind: int, row: Any, y: Leaves) -> Callable[[State], State]:
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
                "c": self.buffers.cotangent.write(state["c"], row[C.F_OUT], self.kinds[kind].dy_avals, rest[own + shared :]),
                "loss": _add_at(state["loss"], row[C.F_MICROBATCH], loss),
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
                "loss": _add_at(state["loss"], row[C.F_MICROBATCH], loss),
                "aux": write(state["aux"], row[C.F_MICROBATCH], aux),
            }

        return body

    def _last_keys(self) -> list[str]:
        return ["c", "loss", "aux", "acc.last", "acc.shared"] if self.training else ["loss", "aux"]

    def _gradient_inputs(self, chunk: int, kind: int, row: Any, state: State) -> tuple[Leaves, dict[int, Slot]]:
        """(consts, parameters, x, extra, once, residuals, dy) of a backward action; residuals are slots where they can be."""
        code, buffers, operand = self.kinds[kind], self.buffers, self.operands.stages[chunk, kind]
        extra = self._stage_extra(kind, operand, row[C.B_STAGE], row[C.B_MICROBATCH], state[f"bs.{chunk}"])
        x = buffers.x.read(state["x"], row[C.B_X], code.x_avals)
        before = [*code.consts, *operand.params(), *x, *extra, *operand.once]
        kept: Leaves = [
            *buffers.residual_input.lazily(state["ri"], row[C.B_RI], code.residual_input),
            *buffers.residual_weight.lazily(state["rw"], row[C.B_RW], code.residual_weight),
        ]
        dy = buffers.cotangent.read(state["c"], row[C.B_DY], code.dy_avals)
        dy += [] if code.loss is None else [self.operands.seed.astype(code.loss.dtype)]
        return [*before, *kept, *dy], {len(before) + i: s for i, s in enumerate(kept) if isinstance(s, Slot)}

    def _accumulate(self, chunk: int, kind: int, dparams: Leaves, state: State) -> State:
        """Add the gradients of a stage's own and of the shared parameters."""
        operand, key = self.operands.stages[chunk, kind], f"acc.{chunk}"
        own = len(dparams) - len(operand.shared)
        shared = add(state["acc.shared"], dparams[own:])
        return {**state, key: operand.accumulate(state[key], dparams[:own]), "acc.shared": shared}

    def _backward(self, use: BlockUse, kind: int, row: Any) -> Callable[[State], State]:
        """B: both gradients at once."""

        def body(state: State) -> State:
            chunk, code = use.block.chunk, self.kinds[kind]
            arguments, slots = self._gradient_inputs(chunk, kind, row, state)
            outs = run_threaded(code.backward, arguments, reads=slots)
            dparams, dx = outs[: code.num_params], outs[code.num_params :]
            return self._hand_on(use, kind, row, dx, self._accumulate(chunk, kind, dparams, state))

        return body

    def _input_grad(self, use: BlockUse, kind: int, row: Any) -> Callable[[State], State]:
        """I: the input's gradient, and a stash for W."""

        def body(state: State) -> State:
            code, buffer = self.kinds[kind], self.buffers.stash
            arguments, slots = self._gradient_inputs(use.block.chunk, kind, row, state)
            count = sum(code.x_wanted)
            stash = buffer.slots(state["st"], row[C.B_STASH], code.stash)
            outs = run_threaded(
                code.input_grad, arguments, reads=slots, writes={count + i: s for i, s in enumerate(stash) if s is not None}
            )
            new = buffer.stored(state["st"], row[C.B_STASH], code.stash, outs[count:])
            return self._hand_on(use, kind, row, outs[:count], {**state, "st": new})

        return body

    def _weight_grad(self, use: BlockUse, kind: int, row: Any) -> Callable[[State], State]:
        """W: the parameters' gradients, from residuals and stash."""

        def body(state: State) -> State:
            chunk, code = use.block.chunk, self.kinds[kind]
            arguments, slots = self._gradient_inputs(chunk, kind, row, state)
            stash = self.buffers.stash.lazily(state["st"], row[C.B_STASH], code.stash)
            reads = slots | {len(arguments) + i: s for i, s in enumerate(stash) if isinstance(s, Slot)}
            outs = run_threaded(code.weight_grad, [*arguments, *stash], reads=reads)
            return self._accumulate(chunk, kind, outs, state)

        return body

    def _hand_on(self, use: BlockUse, kind: int, row: Any, dx: Leaves, state: State) -> State:
        """Send dx, keep it for the chunk before on this device, or give it to `first`."""
        code, buffer = self.kinds[kind], self.buffers.cotangent
        # The first stage's goes nowhere; where no other stage has one like it, it has no place among them.
        if buffer.has(code.dx_avals):
            state = {**state, "out_b": strengthen(buffer.put(state["out_b"], code.dx_avals, dx))}
            hand_over = lambda s: {"c": buffer.write(s["c"], row[C.B_OUT], code.dx_avals, dx)}  # noqa: E731
            state = self._when(use.local, row[C.B_LOCAL], ("c",), hand_over, state)
        at_first = use.first if self.kinds[self.kind_of[0]].x_avals == code.x_avals else Presence.NEVER
        return self._when(at_first, row[C.B_FIRST], ("acc.first", "acc.shared"), self._first_gradient(row, dx, state["fr"]), state)

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

    def _stage_extra(self, kind: int, operand: StageOperand, stage: Any, microbatch: Any, state: Leaves) -> Leaves:
        """Leaves of what a stage is given besides parameters and x: "ctx", "microbatch", "state"."""
        own = operand.read_state(state) if "state" in self.wants[kind] else []
        return [*self._extra(stage, microbatch, self.wants[kind]), *own]


def _arrive(state: State, payload: Payload, slot: Any, arrived: Leaves, *, keep: bool) -> State:
    """Write what has arrived; `keep`: a slot may be negative, for ~slot, which nothing comes to and which stays as it is."""
    pool = _POOL[payload]
    if not keep:
        return {**state, pool: write(state[pool], slot, arrived)}
    at = jnp.where(slot < 0, ~slot, slot)
    chosen = [jnp.where(slot < 0, old, new) for old, new in zip(read(state[pool], at), arrived, strict=True)]
    return {**state, pool: write(state[pool], at, chosen)}


def _stages(rows: NDArray[np.int32], use: BlockUse) -> NDArray[np.int32]:
    """The stages that run a block in these ticks, `rows[tick, device]`."""
    kind, chunk = use.block
    if kind is Kind.F:
        return rows[..., C.F_STAGE][rows[..., C.F_CHUNK] == chunk]
    return rows[..., C.B_STAGE][(rows[..., C.B_CHUNK] == chunk) & (rows[..., C.B_KIND] == int(kind))]


def make_extra(batch: PyTree, rng: Any, stage: Any, microbatch: Any, wants: frozenset[str]) -> dict[str, PyTree]:
    """The microbatch's rows of the batch and the context, those of them that are wanted."""
    extra: dict[str, PyTree] = {}
    if "microbatch" in wants:
        extra["microbatch"] = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, microbatch, 0, keepdims=False), batch)
    if "ctx" in wants:
        key = None if rng is None else jax.random.fold_in(jax.random.fold_in(rng, stage), microbatch)
        common = None if rng is None else jax.random.fold_in(rng, microbatch)
        extra["ctx"] = Context(stage, microbatch, key, common)
    return extra


def _add_at(values: Any, index: Any, value: Any) -> Any:
    """Add to one entry of a vector."""
    now = lax.dynamic_index_in_dim(values, index, 0, keepdims=False)
    return lax.dynamic_update_index_in_dim(values, now + value.astype(values.dtype), index, 0)


def _pick(state: State, keys: Sequence[str]) -> State:
    return {k: state[k] for k in keys}
