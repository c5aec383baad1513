"""Runs a case: each of its calls against the plain model, in float64."""

from __future__ import annotations

import gc
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, PartitionSpec

import jaxpipe as jp
from jaxpipe.checkpoint import Checkpoints
from jaxpipe.eager import EagerExecutor
from jaxpipe.spmd.emit import SpmdExecutor
from tests.flat import flat_pipeline
from tests.forms import gpu_form
from tests.keys import key_of

from .case import RULES, Case
from .model import WHOLE, Model

# Programs of float64 that XLA compiles apart lie 1e-12 of an array's largest entry from each other
# (tests/tolerance.py).  A drawn model may multiply that by a thousand: its weights are random, and
# no sum of it is long.  A wrong result is off by far more.
TOLERANCE = 1e-9
# A gradient that is a difference of terms a thousand times as large is compared with those.
CANCELLED = 1e-3
# Parameters of fewer bits: their gradients are rounded once for each microbatch, stage and shard,
# 2^-24 and 2^-8 of what was rounded each.  That may be far larger than the sum of all microbatches:
# 0.3164 - 0.3159 keeps four digits of float32, without a pipeline too.
NARROW = {"float32": 1e-5, "bfloat16": 0.05}
RATE = 0.01


class Wrong(AssertionError):
    """A number that is not the plain model's."""


def same(what: str, found: Any, wanted: Any, like: Any = None, terms: Any = None) -> None:
    """Wrong where trees differ in structure, shapes or numbers.

    `like` has the dtypes that tell how close they must be, and `terms` the sizes of what was
    rounded to those dtypes and then added.
    """
    found_leaves = dict(jax.tree_util.tree_leaves_with_path(jax.device_get(found)))
    wanted_leaves = dict(jax.tree_util.tree_leaves_with_path(jax.device_get(wanted)))
    if set(found_leaves) != set(wanted_leaves):
        odd = [jax.tree_util.keystr(path) for path in set(found_leaves) ^ set(wanted_leaves)]
        raise Wrong(f"{what}: leaves {sorted(odd)[:4]} are on one side alone")
    like_leaves = wanted_leaves if like is None else dict(jax.tree_util.tree_leaves_with_path(like))
    rounded = (
        {} if terms is None else dict(jax.tree_util.tree_leaves_with_path(jax.device_get(terms)))
    )
    sizes = [
        float(np.max(np.abs(leaf), initial=0.0))
        for leaf in wanted_leaves.values()
        if leaf.dtype != bool
    ]
    floor = CANCELLED * max(sizes, default=0.0)
    for path, right in wanted_leaves.items():
        left = np.asarray(found_leaves[path])
        right = np.asarray(right)
        name = f"{what}{jax.tree_util.keystr(path)}"
        if left.shape != right.shape:
            raise Wrong(f"{name}: shape {left.shape} instead of {right.shape}")
        dtype = like_leaves[path].dtype.name
        left, right = (
            a.astype(np.complex128 if np.iscomplexobj(a) else np.float64) for a in (left, right)
        )
        size = max(float(np.max(np.abs(right), initial=0.0)), floor)
        if dtype in NARROW and rounded:
            size = max(size, float(np.max(rounded[path], initial=0.0)))
        error = float(np.max(np.abs(left - right), initial=0.0))
        if not error <= NARROW.get(dtype, TOLERANCE) * size:
            raise Wrong(
                f"{name}: off by {error:.3g}, of {size:.3g}; {left.ravel()[:3]} instead of "
                f"{right.ravel()[:3]}"
            )


def joined(wide: Any, params: Any) -> Any:
    """What is trained of the first tree, and the rest of the second."""
    return jax.tree.map(
        lambda w, p: p if w is None else w, wide, params, is_leaf=lambda leaf: leaf is None
    )


class Trial:
    """A case with its pipeline, its placed parameters and what is right."""

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, Model(case)
        self.schedule = self.model.schedule
        self.key = (
            jax.random.PRNGKey(case.seed) if case.seed % 4 == 0 else jax.random.key(case.seed)
        )
        self.batch = self.model.rows(case.rows * case.sequences * case.data)
        self.mesh = self._mesh()
        with jax.set_mesh(self.mesh) if case.context else nullcontext():
            self.pipe = self.pipeline()
            self.placed = self.pipe.place(self.model.canonical)
            state = self.model.state
            self.state = () if state is None else self.pipe.place_state(state)

    # The pipeline

    def pipeline(self) -> jp.Pipeline:
        """As the case says."""
        c = self.case
        sizes = dict(c.mesh)
        return flat_pipeline(
            **self.model.given,
            schedule=self.schedule,
            mesh=self.mesh,
            data_axes=("data",) if "data" in sizes else (),
            loss=jp.Loss[c.loss],
            has_metrics=c.metrics and c.last != "none",
            stage_loss=c.stage_loss,
            remat=_remat(c.remat),
            fsdp="data" if c.fsdp else None,
            max_active=c.max_active,
            shard_outer=c.outer,
            specs=self._specs() if "tensor" in sizes else None,
            replicated_axes=tuple(name for name in ("other", "tensor") if name in sizes),
            frozen=self._frozen,
            replaced=self._replaced,
            accumulate_dtype=None if c.accumulate is None else jnp.dtype(c.accumulate),
            offload=c.offload,
            costs=jp.Costs(forward=1e-3, input_grad=2e-3, weight_grad=1e-3, unit="seconds, made up")
            if c.costs
            else None,
            executor=EagerExecutor() if c.eager else self._form,
            time=self.model.timed if c.slices > 1 else (),
            whole=WHOLE if c.whole else (),
            carry=self.model.carry if "carried" in c.every_op else None,
        )

    @property
    def _form(self) -> SpmdExecutor | None:
        return gpu_form(apart=self.case.apart) if self.case.gpu_form else None

    def _mesh(self) -> Mesh:
        sizes = dict(self.case.mesh)
        devices = jax.devices()[: int(np.prod(list(sizes.values())))]
        types = (AxisType.Explicit if self.case.explicit else AxisType.Auto,) * len(sizes)
        return Mesh(np.array(devices).reshape(*sizes.values()), tuple(sizes), axis_types=types)

    def _specs(self) -> dict[str, Any]:
        """Matrices split along their last dim, or their last but one."""
        c, size = self.case, dict(self.case.mesh)["tensor"]
        dim = -1 if c.seed % 3 else -2

        def spec(path: Any, leaf: Any) -> PartitionSpec:
            stacked = path[0].key == "stages" and c.form != "list"
            shape = leaf.shape[1:] if stacked else leaf.shape
            name = path[-1].key
            if (
                len(shape) < 2
                or shape[dim] % size
                or (name == "table" and (dim == -2 or c.spreads))
            ):
                return PartitionSpec()
            return PartitionSpec(
                *("tensor" if d == len(shape) + dim else None for d in range(len(shape)))
            )

        found: dict[str, Any] = jax.tree_util.tree_map_with_path(spec, self.model.canonical)
        return found

    @property
    def _frozen(self) -> Any:
        there = {
            jax.tree_util.keystr(path[-1:], simple=True)
            for path, _ in jax.tree_util.tree_leaves_with_path(self.model.canonical)
        }
        names = there & {*self.case.frozen, "q"}
        if not names:
            return None
        return (
            (lambda path, _: path.split("/")[-1] in names)
            if self.case.seed % 2
            else [rf"(^|/){name}$" for name in sorted(names)]
        )

    @property
    def _replaced(self) -> Any:
        if "tracked" not in self.case.every_op:
            return None
        return {"(^|/)most$": tuple(jp.Replaced[rule] for rule in self.case.replaced)}

    def _trained(self, tree: Any, *, replaced: bool = False) -> Any:
        """A canonical tree with None for what is frozen, and for what is `replaced` if that is not
        wanted.
        """
        names = {*self.case.frozen, "q", *([] if replaced else ["most"])}

        def kept(path: Any, leaf: Any) -> Any:
            return (
                None
                if jax.tree_util.keystr(path, simple=True, separator="/").split("/")[-1] in names
                else leaf
            )

        return jax.tree_util.tree_map_with_path(kept, tree)

    @property
    def _wide(self) -> Any:
        """Canonical parameters that have gradients, or next values, in float64."""
        own = self._trained(self.model.canonical, replaced=True)
        return jax.tree.map(lambda leaf: leaf.astype(np.float64), own)

    def _next_value(self, values: Sequence[Any]) -> Any:
        """What a leaf is replaced by, from what the microbatches of all shards give."""
        each = np.stack(values).reshape(self.case.data, -1, *values[0].shape)
        own, shards = (RULES[rule] for rule in self.case.replaced)
        return shards([own(shard) for shard in each])

    # What is right

    def _micro(self, training: bool) -> Callable[..., Any]:
        model = self.model
        states = (
            [{}] * len(model.functions()) if model.state is None else model.unstacked(model.state)
        )

        def loss(wide: Any, params: Any, rows: Any, m: Any, key: Any, factor: Any) -> Any:
            whole = joined(wide, params)
            found = model.sequence(whole, states, rows, m, key, training=training)
            return factor * jnp.asarray(found.get("loss", 0.0), float), found

        return loss

    def right(
        self,
        batch: Any,
        count: int,
        *,
        training: bool,
        grads: bool = False,
        scale: float = 1.0,
    ) -> dict[str, Any]:
        """Everything that a step or an evaluation of `count` sequences should give."""
        if not grads:
            return self._summed(batch, count, training=training)
        c, every = self.case, count * self.case.slices * self.case.data
        summed = c.loss == "SUM_OVER_COUNT"
        late = summed and c.count == "compared" and c.last != "vocab"
        weight = 1.0 / every
        if summed:
            found = self._summed(batch, count, training=training)
            weight = 1.0 / found["counted"] if found["counted"] else 0.0
        # What a gradient begins with, and what it is multiplied with at the end.
        before, after = (scale, weight) if late else (scale * weight, 1.0)
        return self._summed(
            batch, count, training=training, grads=True, before=before, after=after, scale=scale
        )

    def _summed(
        self,
        batch: Any,
        count: int,
        *,
        training: bool,
        grads: bool = False,
        before: float = 1.0,
        after: float = 1.0,
        scale: float = 1.0,
    ) -> dict[str, Any]:
        """The sums over microbatches of what each gives by itself."""
        c, params, data = self.case, self.model.canonical, self.case.data
        # Parameters of few bits are what they are, but their gradients are summed in float64.
        wide = self._wide
        loss = self._micro(training)
        step = jax.jit(
            jax.value_and_grad(loss, has_aux=True) if grads else lambda *a: (loss(*a), None)
        )
        total = len(batch["y"])
        size = total // (count * data)
        every = []
        for shard in range(data):
            key = self.key if data == 1 else key_of(self.key, shard)
            for m in range(count):
                at = shard * (total // data) + m * size
                rows = {
                    name: leaf
                    if name in ("heat", "lift")
                    else jax.tree.map(lambda own, at=at: own[at : at + size], leaf)
                    for name, leaf in batch.items()
                }
                every.append(step(wide, params, rows, m, key, before))
        founds = [found for (_, found), _ in every]
        result: dict[str, Any] = {
            "outputs": jax.tree.map(_joined, *(found["outputs"] for found in founds))
        }
        result["states"] = [found["states"] for found in founds]
        if c.last == "none":
            return result
        every_one = count * c.slices * data
        weight = 1.0 / every_one
        losses = np.array([float(found["loss"]) for found in founds]).reshape(data, count)
        if c.loss == "SUM_OVER_COUNT":
            counted = float(sum(found["count"] for found in founds))
            result["counted"] = counted
            weight = 1.0 / counted if counted else 0.0
        result["loss"] = losses.sum() * weight * scale
        result["losses"] = losses.sum(axis=0) / (1 if c.loss == "SUM_OVER_COUNT" else data)
        if c.metrics:
            result["metrics"] = jax.tree.map(
                lambda *leaves: sum(leaves) / every_one,
                *(found["metrics"] for found in founds),
            )
        if grads:

            def total(path: Any, *leaves: Any) -> Any:
                is_replaced = path[-1] == jax.tree_util.DictKey("most")
                return self._next_value(leaves) if is_replaced else sum(leaves) * after

            result["grads"] = jax.tree_util.tree_map_with_path(total, *(g for _, g in every))
            result["terms"] = jax.tree.map(
                lambda *leaves: sum(map(abs, leaves)) * after, *(g for _, g in every)
            )
        return result

    def right_state(self, founds: list[Any]) -> Any:
        """The stages' state after a step: each takes the microbatches in the order of its row."""
        c, count, begin = self.case, self.case.sequences, self.model.unstacked(self.model.state)
        order: dict[int, list[int]] = {}
        for _, _, action in self.schedule.actions():
            if action.kind is jp.Kind.F:
                order.setdefault(action.stage, []).append(action.microbatch)

        def final(stage: int) -> Any:
            if not founds[0][stage]:
                return {}
            means = []
            for shard in range(c.data):
                mean = start = begin[stage]["mean"]
                # every microbatch was given the same state by the plain model
                for m in order[stage]:
                    mean = 0.9 * (mean - start) + founds[shard * count + m][stage]["mean"]
                means.append(mean)
            return {"mean": sum(means) / c.data, "seen": jnp.int32(count)}

        found = [final(s) for s in range(self.schedule.num_stages)]
        return (
            found if c.form == "list" else jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)
        )

    # Calls

    def run(self) -> None:
        """All calls, one after the other."""
        for name in self.case.calls:
            inside = self.case.context and name != "plain"  # which has no mesh
            with jax.set_mesh(self.mesh) if inside else nullcontext():
                getattr(self, f"_call_{name}")()

    @property
    def _more(self) -> dict[str, Any]:
        return {"rng": self.key} | ({} if self.model.state is None else {"state": self.state})

    @property
    def _step_right(self) -> dict[str, Any]:
        if not hasattr(self, "_known"):
            self._known = self.right(self.batch, self.case.sequences, training=True, grads=True)
        return self._known

    @property
    def _scaled_right(self) -> dict[str, Any]:
        if self.case.scale is None:
            return self._step_right
        if not hasattr(self, "_known_scaled"):
            count, how = self.case.sequences, {"training": True, "grads": True}
            self._known_scaled = self.right(self.batch, count, scale=self.case.scale, **how)
        return self._known_scaled

    @property
    def _scaled(self) -> dict[str, Any]:
        return self._more | {"scale": self.case.scale}

    def _check_answer(self, what: str, found: Any, right: dict[str, Any], *, state: bool) -> None:
        parts = [("loss", right["loss"])]
        parts += [("metrics", right["metrics"])] if self.case.metrics else []
        parts += (
            [("state", self.right_state(right["states"]))]
            if state and self.model.state is not None
            else []
        )
        for (name, wanted), got in zip(parts, (found,) if len(parts) == 1 else found, strict=True):
            same(
                f"{what}: {name}",
                self.pipe.canonical_state(got) if name == "state" else got,
                wanted,
            )

    def _check_grads(self, what: str, grads: Any, right: dict[str, Any]) -> None:
        found, wanted, terms = self.pipe.canonical(grads), right["grads"], right["terms"]
        same(
            f"{what}: grads",
            {key: found[key] for key in wanted},
            wanted,
            like=self.model.canonical,
            terms=terms,
        )

    def _call_step(self) -> None:
        answer, grads = self.pipe.value_and_grad(self.placed, self.batch, **self._scaled)
        self._check_answer("step", answer, self._scaled_right, state=True)
        self._check_grads("step", grads, self._scaled_right)

    def _call_jit(self) -> None:
        step = self.pipe.jit(
            lambda params, batch, scale: self.pipe.value_and_grad(
                params, batch, scale=scale, **self._more
            )
        )
        answer, grads = step(self.placed, self.batch, self.case.scale)
        self._check_answer("jit", answer, self._scaled_right, state=True)
        self._check_grads("jit", grads, self._scaled_right)

    def _call_lowered(self) -> None:
        shapes = self.pipe.place(
            jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self.model.canonical)
        )

        def there(shape: Any, array: Any) -> bool:
            # Where `jax.set_mesh` made axes explicit, arrays have them too, and specs of all dims.
            if self.case.context and self.case.explicit:
                return bool(array.sharding.is_equivalent_to(shape.sharding, array.ndim))
            return bool(array.sharding == shape.sharding)

        assert jax.tree.all(jax.tree.map(there, shapes, self.placed))
        compiled = self.pipe.lower(shapes, self.batch, **self._more).compile()
        answer, grads = compiled(self.placed, self.batch, **self._more)
        self._check_answer("lowered", answer, self._step_right, state=True)
        self._check_grads("lowered", grads, self._step_right)

    def _call_plain(self) -> None:
        """`Model.loss` draws the same numbers as the pipeline."""
        c, state = self.case, self.model.state
        more = {"rng": self.key} | ({} if state is None else {"state": state})
        counts = {"microbatches": c.microbatches, "slices": c.slices}

        def loss(wide: Any) -> tuple[Any, Any]:
            params = joined(wide, self.model.canonical)
            found = self.pipe.model.loss(params, self.batch, **counts, **more)
            return (found[0], found[1]) if isinstance(found, tuple) else (found, ())

        (found, aux), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(self._wide)
        same("plain: loss", found, self._step_right["loss"])
        if c.metrics:
            same("plain: metrics", aux, self._step_right["metrics"])
        like, terms = self.model.canonical, self._step_right["terms"]
        same("plain: grads", grads, self._step_right["grads"], like=like, terms=terms)

    def _call_grad(self) -> None:
        has_aux = self.case.metrics or self.model.state is not None

        def loss(own: Any) -> Any:
            found = self.pipe.loss(
                self.pipe.with_trained(self.placed, own), self.batch, **self._scaled
            )
            return (found[0] * 3.0, found[1]) if has_aux else found * 3.0

        answer, grads = jax.value_and_grad(loss, has_aux=has_aux)(self.pipe.trained(self.placed))
        right = self._scaled_right
        same("grad: loss", answer[0] if has_aux else answer, right["loss"] * 3.0)
        own = {
            name: jax.tree.map(lambda leaf: leaf * 3.0, self._trained(right[name]))
            for name in ("grads", "terms")
        }
        self._check_grads("grad", grads, own)

    def _call_evaluate(self) -> None:
        answer = self.pipe.evaluate(self.placed, self.batch, **self._more)
        self._check_answer(
            "evaluate",
            answer,
            self.right(self.batch, self.case.sequences, training=False),
            state=False,
        )

    def _call_fewer(self) -> None:
        c = self.case
        # rows of a data shard: fewer than a step's, or a few more
        each = 1 + c.seed % (c.rows * c.microbatches + 2)
        batch = self.model.rows(each * c.data)
        count = max(n for n in range(1, c.microbatches + 1) if each % n == 0)
        answer = self.pipe.evaluate(self.placed, batch, **self._more)
        self._check_answer("fewer", answer, self.right(batch, count, training=False), state=False)

    def _call_losses(self) -> None:
        found = self.pipe.losses(self.placed, self.batch, **self._more)
        same(
            "losses",
            found,
            self.right(self.batch, self.case.sequences, training=False)["losses"],
        )

    def _call_outputs(self) -> None:
        found = self.pipe.outputs(self.placed, self.batch, **self._more)
        found = found if self.model.state is None else found[0]
        same(
            "outputs",
            found,
            self.right(self.batch, self.case.sequences, training=False)["outputs"],
        )

    def _call_place(self) -> None:
        back = jax.device_get(self.pipe.canonical(self.placed, spread=self.case.seed % 2 == 0))
        same("place", {key: back[key] for key in self.model.canonical}, self.model.canonical)
        if self.model.state is not None:
            same("place: state", self.pipe.canonical_state(self.state), self.model.state)

    def _call_report(self) -> None:
        report = jp.inspect.report(self.pipe, self.placed, self.batch, **self._more)
        assert report["predicted"]["total"] > 0

    def _call_nonfinite(self) -> None:
        found = jp.debug.find_nonfinite(self.pipe, self.placed, self.batch, rng=self.key)
        if found is not None:
            raise Wrong(f"nonfinite: {found}")

    def _optimizer(self) -> Any:
        if self.case.per_layer:
            return jp.per_layer(self.pipe, optax.lamb(RATE))
        # A norm of all gradients is no nearer than its narrowest one.
        clip = optax.identity() if self.case.mixed else optax.clip_by_global_norm(0.5)
        return [
            optax.sgd(RATE, momentum=0.9),
            optax.adam(RATE),
            optax.chain(clip, optax.adamw(RATE)),
        ][self.case.seed % 3]

    def _by_layer(self, rule: Any) -> Any:
        """The rule on trees whose stages are stacks: of stages that are alike, or of layers."""

        def own(function: Any, trees: tuple[Any, ...]) -> Any:
            stages = [tree["stages"] for tree in trees]
            if self.case.form == "list":
                return {"stages": function(*stages)[0]}
            if self.case.form == "alike":
                return {"stages": by_row(function, stages)}
            return {"stages": {c: by_row(function, [s[c] for s in stages]) for c in stages[0]}}

        def by_row(function: Any, stacks: list[Any]) -> Any:
            return jax.vmap(function)(*stacks)[0] if jax.tree.leaves(stacks[0]) else stacks[0]

        def apart(function: Any, *trees: Any) -> Any:
            rest = [{k: v for k, v in tree.items() if k != "stages"} for tree in trees]
            return own(function, trees) | function(*rest)[0]

        def update(grads: Any, state: Any, params: Any) -> Any:
            return apart(lambda g, p: rule.update(g, rule.init(p), p), grads, params), state

        return optax.GradientTransformation(lambda params: (), update)

    def _trained_once(self) -> tuple[Any, Any]:
        """Placed parameters and optimizer state after a step."""
        optimizer = self._optimizer()
        opt_state = self.pipe.init(optimizer, self.placed)

        @self.pipe.jit
        def step(params: Any, opt_state: Any) -> Any:
            _, grads = self.pipe.value_and_grad(params, self.batch, **self._more)
            trained, grads = self.pipe.trained(params), self.pipe.trained(grads, like=params)
            updates, opt_state = optimizer.update(grads, opt_state, trained)
            return self.pipe.with_trained(params, optax.apply_updates(trained, updates)), opt_state

        return step(self.placed, opt_state)

    def _plain_update(self) -> tuple[Any, Any]:
        """Updates and state of the optimizer in the model without a pipeline, for gradients of the
        same dtypes.
        """
        optimizer, plain = self._optimizer(), self._trained(self.model.canonical)
        if self.case.per_layer:
            optimizer = self._by_layer(optax.lamb(RATE))
        least = self.case.accumulate
        grads = jax.tree.map(
            lambda g, p: g.astype(p.dtype if least is None else jnp.promote_types(p.dtype, least)),
            self._trained(self._step_right["grads"]),
            plain,
        )
        return jax.jit(optimizer.update)(grads, optimizer.init(plain), plain)

    def _call_train(self) -> None:
        params, opt_state = self._trained_once()
        forms = [
            jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
            for tree in (opt_state, self.pipe.init(self._optimizer(), params))
        ]
        if forms[0] != forms[1]:
            raise Wrong(f"train: state of {forms[1]} becomes {forms[0]}")
        found = self._trained(self.pipe.canonical(params))
        wanted = optax.apply_updates(self._trained(self.model.canonical), self._plain_update()[0])
        same("train", {key: found[key] for key in wanted}, wanted)

    def _call_checkpoint(self) -> None:
        params, opt_state = self._trained_once()
        state = {"params": params, "opt_state": opt_state}
        with tempfile.TemporaryDirectory() as folder:
            with Checkpoints(folder, self.pipe) as checkpoints:
                checkpoints.save(1, state)
            plain = jax.tree.map(jnp.asarray, self.model.canonical)
            # Without a pipeline there is no `per_layer`, and so no state like its.
            if not self.case.per_layer:
                like = {"params": plain, "opt_state": self._plain_update()[1]}
                with Checkpoints(folder, None) as checkpoints:
                    _, whole = checkpoints.restore(like)
                back = self.pipe.canonical(params)
                same("checkpoint", whole["params"], {key: back[key] for key in plain})
            with Checkpoints(folder, self.pipe) as checkpoints:
                _, again = checkpoints.restore(state)
        same("checkpoint: again", again["params"], params)
        optimizer = self._optimizer()

        @self.pipe.jit
        def updates(state: Any) -> Any:
            own = self.pipe.trained(state["params"])
            return optimizer.update(own, state["opt_state"], own)[0]

        # A device without some layer has room for its state, which is not saved.
        found, wanted = (self.pipe.canonical(updates(each)) for each in (again, state))
        same("checkpoint: updates", found, wanted)


def _joined(*leaves: Any) -> Any:
    """Rows of all microbatches; a scalar of each is one entry."""
    return jnp.concatenate([jnp.atleast_1d(leaf) for leaf in leaves])


def _remat(name: str | None) -> Any:
    policies = jax.checkpoint_policies
    if name == "save_only_these_names":
        return policies.save_only_these_names("kept")
    if name == "offload_dot_with_no_batch_dims":
        return policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    return name if name in (None, "full") else getattr(policies, name)


def run(case: Case) -> tuple[str, str]:
    """("ok" | "refused" | "wrong" | "raw", what is to be said about it)."""
    try:
        Trial(case).run()
    except jp.JaxpipeError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Wrong as error:
        return "wrong", str(error)
    except Exception as error:
        where = [
            f"{f.filename.split('/')[-1]}:{f.lineno} {f.name}"
            for f in traceback.extract_tb(error.__traceback__)
            if "jaxpipe" in f.filename
        ]
        return "raw", f"{type(error).__name__}: {str(error)[:600]}\n  at {'; '.join(where[-3:])}"
    return "ok", ""


def work(case: Case) -> tuple[str, str]:
    """`run` in a worker, whose memory does not grow; not in `__main__`, where a process that is
    spawned does not find it.
    """
    try:
        return run(case)
    finally:
        jax.clear_caches()  # a case's programs are of no use to the next one
        gc.collect()
