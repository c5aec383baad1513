"""A case's functions, parameters and rows, and what plain JAX makes of them: no table, no mesh, a
loop over microbatches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxpipe as jp
from tests.keys import FIRST, LAST, STAGE, PositionKeys, key_of

from .case import LETTERS, SPREAD, Case, schedule_of
from .ops import OPS, PASSING, POSITIONED, REPLACED

FEATURES, OUT, TOKENS = 3, 2, 2  # of a row of the batch, of its target, and tokens of a row
TIMED = ("x", "tokens", "targets")
WHOLE = ("heat", "lift/w")  # leaves of the batch without rows, where a case has them
NARROW = {"s": np.float32, "bias": jnp.bfloat16}
EVERY = OPS | PASSING | POSITIONED | REPLACED


def _taking(
    wants: Sequence[str], positional: Sequence[str], call: Callable[..., Any]
) -> Callable[..., Any]:
    """The function with a signature that asks for these keywords."""
    kinds = inspect.Parameter
    given = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in positional]

    def function(*args: Any, **keywords: Any) -> Any:
        return call(*args, SimpleNamespace(**keywords))

    function.__signature__ = inspect.Signature(
        [*given, *(kinds(name, kinds.KEYWORD_ONLY) for name in sorted(set(wants)))]
    )
    return function


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _clipped(x: Any, most: float) -> Any:
    """x, with a gradient that is clipped entry by entry: it is not linear in the cotangent."""
    return x


_clipped.defvjp(lambda x, most: (x, None), lambda most, _, g: (jnp.clip(g, -most, most),))


def _wants(ops: Sequence[str]) -> list[str]:
    return [keyword for op in ops for keyword in EVERY[op].wants]


def _cross_entropy(logits: Any, targets: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]


class Rows:
    """Rows that the slices of a sequence append on one stage (or layer), in plain JAX."""

    def __init__(self, slices: int) -> None:
        self.slices, self.before = slices, []
        self.carry: Any = None

    def append(self, _: str, rows: Any, axis: int) -> Any:
        """The rows of all slices, zeros for those to come."""
        self.before.append(rows)
        later = [jnp.zeros_like(rows)] * (self.slices - len(self.before))
        return jnp.concatenate([*self.before, *later], axis)


@dataclass(frozen=True)
class Model:
    """What a case is made of."""

    case: Case

    @cached_property
    def schedule(self) -> jp.Schedule:
        """The table."""
        c = self.case
        return schedule_of(c.table, c.devices, c.microbatches, c.chunks, c.passes, c.slices)

    # Functions

    def _chain(self, ops: Sequence[str], params: Any, h: Any, k: Any) -> tuple[Any, Any]:
        """h after all ops, and the new state or carry."""
        new = None
        for i, name in enumerate(ops):
            h = EVERY[name].call(params.get(f"{name}{i}"), h, k)
            if name in ("normalised", "carried"):
                h, new = h
        return h, new

    def carry(self, params: Any, x: Any) -> Any:
        """The first carry: a parameter."""
        own = next(leaves for name, leaves in params.items() if name.startswith("carried"))
        return jnp.tanh(own["bias"].astype(float)) + jnp.zeros((len(self.inner(x)), 1))

    def stage(self, ops: Sequence[str], *, cut: bool = False) -> Callable[..., Any]:
        """The function of a stage, or of a layer; `cut`: it changes the width."""

        def call(params: Any, x: Any, k: Any) -> Any:
            h = self.inner(x)
            if self.case.whole:
                h = h * k.microbatch["heat"] + jnp.sum(k.microbatch["lift"]["w"])
            h, new = self._chain(ops, params, h @ params["cut"] if cut else h, k)
            h = h if self.case.clipped is None else _clipped(h, self.case.clipped)
            x = self._outer(x, h)
            more = [0.01 * jnp.mean(h**2)] if self.case.stage_loss else []
            more += [new] if new is not None else []
            return (x, *more) if more else x

        wants = [*_wants(ops), *(["microbatch"] if self.case.whole else [])]
        return _taking(wants, ("params", "x"), call)

    def inner(self, x: Any) -> Any:
        """The array that stages change."""
        return {"array": lambda: x, "dict": lambda: x["h"], "tuple": lambda: x[0]}[
            self.case.carrier
        ]()

    def _outer(self, x: Any, h: Any) -> Any:
        """What travels, with a new array."""
        if self.case.carrier == "dict":
            return {"h": h, "n": x["n"] + 1, "sum": x["sum"] + jnp.mean(h)}
        return (h, ~x[1]) if self.case.carrier == "tuple" else h

    def _wrap(self, h: Any) -> Any:
        """What the first stage is given."""
        if self.case.carrier == "dict":
            return {"h": h, "n": jnp.zeros(h.shape[0], jnp.int32), "sum": jnp.zeros(())}
        return (h, jnp.ones(h.shape[0], bool)) if self.case.carrier == "tuple" else h

    def _leaving(self, x: Any) -> Any:
        """What `last` reads of what travelled."""
        h = self.inner(x)
        if self.case.carrier == "dict":
            return h + 0.1 * x["sum"] + x["n"][0]
        return (
            jnp.where(x[1].reshape(-1, *(1,) * (h.ndim - 1)), h, -h)
            if self.case.carrier == "tuple"
            else h
        )

    def first(self, *, plain: bool) -> Callable[..., Any] | None:
        """`first`; `plain`: written for one device, where the pipeline's is spread."""
        c = self.case
        if c.first == "none":
            return None
        if c.first == "vocab" and not plain:
            return jp.VocabEmbedding()
        spread = c.first == "spread" and not plain

        def call(params: Any, microbatch: Any, k: Any) -> Any:
            if c.first == "linear":
                h = microbatch["x"] @ params["w"]
            else:
                table, tokens = (k.shared if c.tied else params)["table"], microbatch["tokens"]
                if spread:
                    ctx = (
                        k.ctx._replace(sizes={"table": k.ctx.sizes.get("table")})
                        if not c.tied
                        else k.ctx
                    )
                    h = jp.VocabEmbedding()(
                        {} if c.tied else {"table": table},
                        microbatch,
                        ctx=ctx,
                        shared=k.shared if c.tied else (),
                    )
                else:
                    h = table[tokens]
                h = h * 1.5 + params["at"] if c.first == "spread" else h
            return self._wrap(self._chain(c.first_ops, params, h, k)[0])

        wants = [
            *_wants(c.first_ops),
            *(["shared"] if c.tied else []),
            *(["ctx"] if spread else []),
        ]
        function = _taking(wants, ("params", "microbatch"), call)
        return jp.spread(function, dims={"table": 0, "at": None}) if spread else function

    def last(self, *, plain: bool) -> Callable[..., Any] | None:
        """`last`, likewise."""
        c = self.case
        if c.last == "none":
            return None
        if c.last == "vocab" and not plain:
            return jp.VocabHead(label_smoothing=0.1, z_loss=0.01)
        spread = c.last == "spread" and not plain

        def call(params: Any, x: Any, microbatch: Any, k: Any) -> Any:
            h = self._chain(c.last_ops, params, self._leaving(x), k)[0]
            mask = microbatch["mask"]
            if c.last == "mse":
                values = jnp.mean(
                    (
                        h @ params["head"]
                        - microbatch["y"].reshape(len(mask), *(1,) * (h.ndim - 2), OUT)
                    )
                    ** 2,
                    -1,
                )
            else:
                table, targets = (k.shared if c.tied else params)["table"], microbatch["targets"]
                h = h * params["norm"] if c.last == "spread" else h
                if spread:
                    logits = lax.all_gather(h @ table.T, k.ctx.axis, axis=-1, tiled=True)
                    size = (k.ctx.shared_sizes if c.tied else k.ctx.sizes)["table"]
                    logits = logits[..., :size]
                else:
                    logits = h @ table.T
                if c.last == "vocab":
                    return self._vocab_loss(logits, microbatch)
                values = _cross_entropy(logits, targets)
            mask = jnp.broadcast_to(mask.reshape(-1, *(1,) * (values.ndim - 1)), values.shape)
            counted = 1 + jnp.sum(h[..., 0] > 0) if c.count == "compared" else jnp.sum(mask)
            loss = (
                (jnp.sum(values * mask), counted)
                if c.loss == "SUM_OVER_COUNT"
                else jnp.mean(values)
            )
            return (loss, {"h": jnp.mean(h, axis=0), "n": jnp.sum(mask)}) if c.metrics else loss

        wants = [*_wants(c.last_ops), *(["shared"] if c.tied else []), *(["ctx"] if spread else [])]
        function = _taking(wants, ("params", "x", "microbatch"), call)
        return jp.spread(function, dims={"table": 0, "norm": None}) if spread else function

    def _vocab_loss(self, logits: Any, microbatch: Any) -> Any:
        """What `VocabHead` says it computes."""
        targets, log_sum = microbatch["targets"], jax.nn.logsumexp(logits, axis=-1)
        kept = targets != -100
        nll = _cross_entropy(logits, jnp.where(kept, targets, 0))
        nll = 0.9 * nll + 0.1 * (log_sum - jnp.mean(logits, axis=-1)) + 0.01 * log_sum**2
        total, count = jnp.sum(jnp.where(kept, nll, 0)), jnp.sum(kept.astype(nll.dtype))
        over = jnp.where(count == 0, 1, count)
        hits = jnp.sum(jnp.where(kept, jnp.argmax(logits, axis=-1) == targets, False)) / over
        loss = (total, count) if self.case.loss == "SUM_OVER_COUNT" else total / over
        return (loss, {"accuracy": hits}) if self.case.metrics else loss

    @cached_property
    def stages(self) -> list[Callable[..., Any]]:
        """The function of each stage, or of each letter."""
        c = self.case
        made = {ops: self.stage(ops, cut=bool(c.widths)) for ops in c.ops}
        return [made[ops] for ops in c.ops]

    @property
    def given(self) -> dict[str, Any]:
        """The model as `Pipeline` is given it."""
        c, first, last = self.case, self.first(plain=False), self.last(plain=False)
        if c.form != "layers":
            return {
                "stage": self.stages if c.form == "list" else self.stages[0],
                "first": first,
                "last": last,
            }
        ends = {"E": first, "L": last}
        layers = {
            **dict(zip(LETTERS, self.stages, strict=False)),
            **{k: v for k, v in ends.items() if v is not None},
        }
        return {
            "layers": layers,
            "layout": ("E" if first else "") + c.layout + ("L" if last else ""),
        }

    @property
    def timed(self) -> tuple[str, ...]:
        """Leaves of the batch with a time."""
        pair = self.case.first == "none" and self.case.carrier == "tuple"
        x = "x/0" if pair else "x"
        return tuple(x if name == "x" else name for name in self.rows(1) if name in TIMED)

    def cut(self, rows: dict[str, Any], k: int) -> dict[str, Any]:
        """The rows of slice k."""

        def own(path: Any, leaf: Any) -> Any:
            timed = path[0].key in TIMED and leaf.ndim > 1
            return leaf[:, k * TOKENS : (k + 1) * TOKENS] if timed else leaf

        return rows if self.case.slices == 1 else jax.tree_util.tree_map_with_path(own, rows)

    # Numbers

    @cached_property
    def _rng(self) -> np.random.Generator:
        return np.random.default_rng(self.case.seed)

    def _array(self, name: str, shape: tuple[int, ...]) -> Any:
        if name == "q":
            return self._rng.integers(-64, 64, size=shape, dtype=np.int8)
        dtype = NARROW.get(name, np.float64) if self.case.mixed else np.float64
        return (
            self._rng.standard_normal(shape) / np.sqrt(max(shape[-1:], default=1) or 1)
            + (not shape)
        ).astype(dtype)

    def _params_of(
        self, ops: Sequence[str], width: int, stack: tuple[int, ...] = ()
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for i, name in enumerate(ops):
            shapes = EVERY[name].shapes(width)
            if shapes:
                found[f"{name}{i}"] = {
                    key: self._array(key, (*stack, *shape)) for key, shape in shapes.items()
                }
        return found | ({"nothing": None, "empty": {}, "pair": ((), [])} if self.case.odd else {})

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """What each stage takes, and what the last one returns."""
        c = self.case
        return (c.width,) * (self.schedule.num_stages + 1) if not c.widths else (c.width, *c.widths)

    @cached_property
    def canonical(self) -> dict[str, Any]:
        """Parameters in the model's own layout."""
        c, entry, leaving = self.case, self.widths[0], self.widths[-1]
        params: dict[str, Any] = {}
        if c.first != "none":
            params["first"] = self._params_of(c.first_ops, entry)
            params["first"] |= (
                {"w": self._array("w", (FEATURES, entry))} if c.first == "linear" else {}
            )
            params["first"] |= (
                {}
                if c.first == "linear" or c.tied
                else {"table": self._array("table", (c.vocab, entry))}
            )
            params["first"] |= {"at": self._array("at", (entry,))} if c.first == "spread" else {}
        if c.form == "alike":
            params["stages"] = self._params_of(c.ops[0], c.width, (self.schedule.num_stages,))
        elif c.form == "list":
            params["stages"] = [
                self._params_of(ops, out)
                | ({"cut": self._array("w", (wide, out))} if c.widths else {})
                for ops, wide, out in zip(c.ops, self.widths, self.widths[1:], strict=False)
            ]
        else:
            letters = zip(LETTERS, c.ops, strict=False)
            params["stages"] = {
                letter: self._params_of(ops, c.width, (c.layout.count(letter),))
                for letter, ops in letters
            }
        if c.last != "none":
            params["last"] = self._params_of(c.last_ops, leaving)
            params["last"] |= (
                {"head": self._array("head", (leaving, OUT))} if c.last == "mse" else {}
            )
            params["last"] |= (
                {}
                if c.last == "mse" or c.tied
                else {"table": self._array("table", (c.vocab, leaving))}
            )
            params["last"] |= (
                {"norm": self._array("norm", (leaving,))} if c.last == "spread" else {}
            )
        shared = {"table": self._array("table", (c.vocab, entry))} if c.tied else {}
        shared |= {"w": self._array("w", (c.width, c.width))} if "shared" in c.every_op else {}
        shared |= {"s": self._array("s", ())} if "shared_scale" in c.every_op else {}
        return params | ({"shared": shared} if shared else {})

    def rows(self, count: int) -> dict[str, Any]:
        """A batch."""
        c, rng = self.case, np.random.default_rng(self.case.seed + 1)
        tokens = (count, TOKENS * c.slices) if c.rank == 3 else (count,)
        batch: dict[str, Any] = {
            "y": rng.standard_normal((count, OUT)),
            "z": rng.standard_normal(count),
            "mask": (rng.random(count) < 0.6).astype(np.int32),
            "targets": rng.integers(0, c.vocab, size=tokens),
        }
        if c.whole:
            batch |= {"heat": np.float64(0.9), "lift": {"w": 0.1 * rng.standard_normal((2, 3))}}
        if c.last == "vocab":
            batch["targets"] = np.where(rng.random(tokens) < 0.3, -100, batch["targets"])
        if c.first in ("embed", *SPREAD):
            batch["tokens"] = rng.integers(0, c.vocab, size=tokens)
            return batch
        h = rng.standard_normal((*tokens, FEATURES if c.first == "linear" else c.width))
        if c.first != "none" or c.carrier == "array":
            return batch | {"x": h}
        if c.carrier == "tuple":
            return batch | {"x": (h, rng.random(count) < 0.5)}
        raise AssertionError("a batch has no scalars")

    @cached_property
    def state(self) -> Any:
        """The canonical state of the stages; None where they have none."""
        c = self.case

        def own(ops: Sequence[str], width: int, stack: tuple[int, ...] = ()) -> Any:
            if "normalised" not in ops:
                return {}
            return {"mean": self._array("mean", (*stack, width)), "seen": np.zeros(stack, np.int32)}

        if not any("normalised" in ops for ops in c.ops):
            return None
        if c.form == "alike":
            return own(c.ops[0], c.width, (self.schedule.num_stages,))
        return [own(ops, width) for ops, width in zip(c.ops, self.widths[1:], strict=False)]

    # The plain model

    def unstacked(self, tree: Any) -> list[Any]:
        """Canonical parameters, or state, of the stages (of the layers in model order)."""
        c = self.case
        if c.form == "list":
            return list(tree)
        if c.form == "alike":
            return [
                jax.tree.map(lambda leaf, s=s: leaf[s], tree)
                for s in range(self.schedule.num_stages)
            ]
        seen = dict.fromkeys(LETTERS, 0)
        found = []
        for letter in c.layout.replace("|", ""):
            found.append(jax.tree.map(lambda leaf, n=seen[letter]: leaf[n], tree[letter]))
            seen[letter] += 1
        return found

    def functions(self) -> list[tuple[Callable[..., Any], int]]:
        """The function of each stage (layer), and the stage on which it stands."""
        c = self.case
        if c.form != "layers":
            return [
                (self.stages[s if c.form == "list" else 0], s)
                for s in range(self.schedule.num_stages)
            ]
        known = dict(zip(LETTERS, self.stages, strict=False))
        return [
            (known[letter], s)
            for s, letters in enumerate(c.layout.split("|"))
            for letter in letters
        ]

    def contexts(self, key: Any, microbatch: Any) -> tuple[list[Any], Any, Any]:
        """What the stages (layers), first and last are told as `ctx`."""
        sequence = microbatch // self.case.slices

        def told(function: int, stage: int, number: int = 0) -> Any:
            return jp.Context(
                stage,
                microbatch,
                key_of(key, function, microbatch, number),
                offset=microbatch % self.case.slices * TOKENS,
                keys=PositionKeys.of(key, function, sequence, number),
            )

        found = [told(STAGE, s, n) for n, (_, s) in enumerate(self.functions())]
        if self.case.form == "layers":
            found = [ctx._replace(layer=n) for n, ctx in enumerate(found)]
        return found, told(FIRST, 0), told(LAST, self.schedule.num_stages - 1)

    def sequence(
        self, params: Any, states: Any, rows: Any, number: Any, key: Any, *, training: bool
    ) -> dict[str, Any]:
        """The sum of what the slices of a sequence give, one after the other."""
        slices = self.case.slices
        kept = [Rows(slices) for _ in self.functions()]
        found = [
            self.one(
                params,
                states,
                self.cut(rows, k),
                number * slices + k,
                key,
                training=training,
                kept=kept,
            )
            for k in range(slices)
        ]
        sums = {
            name: jax.tree.map(lambda *leaves: sum(leaves), *(each[name] for each in found))
            for name in ("loss", "count", "metrics")
            if name in found[0]
        }
        return found[-1] | sums

    def one(
        self,
        params: Any,
        states: Any,
        rows: Any,
        microbatch: Any,
        key: Any,
        *,
        training: bool,
        kept: Sequence[Rows],
    ) -> dict[str, Any]:
        """What one microbatch gives: loss (a sum where there are counts), count, metrics, outputs,
        and the stages' new states.
        """
        contexts, before, after = self.contexts(key, microbatch)
        contexts = [ctx._replace(ledger=own) for ctx, own in zip(contexts, kept, strict=True)]
        first, last = self.first(plain=True), self.last(plain=True)
        told = partial(_told, shared=params.get("shared", ()), training=training, microbatch=rows)
        x = rows["x"] if first is None else first(params["first"], rows, **told(first, before))
        new, total = [], 0.0
        owns = self.unstacked(params["stages"])
        for (function, _), own, ctx, state, passing in zip(
            self.functions(), owns, contexts, states, kept, strict=True
        ):
            names = inspect.signature(function).parameters
            takes_state, carries = "state" in names, "carry" in names
            carry = self.carry(own, x) if carries and passing.carry is None else passing.carry
            x = function(own, x, **told(function, ctx, state=state, carry=carry))
            if self.case.stage_loss or takes_state or carries:
                x, *more = x
                passing.carry = more.pop() if carries else None
                total = total + (more[0] if self.case.stage_loss else 0.0)
                new += [more[-1]] if takes_state else [{}]
            else:
                new.append({})
        found: dict[str, Any] = {"outputs": x, "states": new}
        if last is None:
            return found
        loss = last(params["last"], x, rows, **told(last, after))
        if self.case.metrics:
            loss, found["metrics"] = loss
        if self.case.loss == "SUM_OVER_COUNT":
            loss, found["count"] = loss
        return found | {"loss": loss + total}


def _told(
    function: Callable[..., Any],
    ctx: Any,
    *,
    state: Any = None,
    carry: Any = None,
    **more: Any,
) -> dict[str, Any]:
    """The keywords that a function takes."""
    known = {"ctx": ctx, "state": state, "carry": carry, **more}
    names = [
        p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY
    ]
    return {name: known[name] for name in names}
