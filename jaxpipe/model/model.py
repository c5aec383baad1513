"""Model: the functions of a user's model, and its plain loss without a pipeline; the cache of a
generation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from ..arrays import Leaf, Number, Params, PyTree, Rng, without_numpy, zeros_of
from ..errors import Fits, PipelineError, typed
from ..layouts.layout import LETTERS, Layout, LayoutError, parse_layout, split_layers
from ..table.kinds import By
from ..table.placement import Placement
from .batch import batch_faults, split_batch, time_faults
from .calls import OUTER_KEYWORDS, OUTER_WANTS, Cuts, Function, Spread, UserFunction
from .functions import Extra, Functions, Loss, check_forms, mean_over_microbatches, with_aux
from .layers import EMBEDDING, LOSS, LayerMap, with_outer
from .replaced import Replaced, Replacements, in_microbatches
from .settings import names_of, patterns_of

_AXIS = "pipe"  # the name of the pipe axis that a spread function finds in `Model.loss`

_Stages: TypeAlias = Annotated[
    UserFunction | Sequence[UserFunction] | Mapping[str, UserFunction | Spread],
    Fits(
        "a stage function, a list of them (one for each stage), or a dict with a function for each "
        "letter of layers=",
        lambda stages: callable(stages) or stages,
    ),
]
_OuterFunction: TypeAlias = Annotated[
    UserFunction | Spread | None, Fits("a function, or what jaxpipe.spread makes of one")
]
_Frozen: TypeAlias = Annotated[
    Callable[[str, Any], bool] | str | Sequence[str] | None,
    Fits("a function of a path and a shape, or regular expressions of paths"),
]
_RulesByPath: TypeAlias = Annotated[
    Mapping[str, Replaced | tuple[Replaced, Replaced]] | Replacements | None,
    Fits(
        'a dict with a rule for each regular expression of paths, such as {"scale$": '
        "jaxpipe.Replaced.MAX} (or another of LAST, MAX, MEAN, SUM, or a pair of them: over "
        "microbatches, over data axes)"
    ),
]


@dataclass(frozen=True, init=False)
class Model:
    """A model: its functions, their loss contract, and which parameters are trained.

    `first(first_params, microbatch) -> x`, `stage(stage_params, x) -> x` and
    `last(last_params, x, microbatch) -> scalar loss` are the functions.  Each may also take by
    keyword `ctx` (a `Context`: stage, microbatch, rng), `shared` (the parameters under "shared",
    whose gradients are summed over all uses) and `training` (False in `evaluate`).  A stage may
    also take `microbatch`, the rows of the batch, `state` (see `Pipeline.place_state`) and `carry`:
    it returns (x, carry), and the next slice of the sequence is given that carry.
    Without `first`, x is the microbatch's "x".

    Args:
        stages: one function, where all stages have the same parameter shapes and return what they
            take; or a list of functions, one for each stage, with parameters of any shapes; or a
            dict with a function for each letter of `layers`.  In a dict "E" is `first`, "L" is
            `last`, and other letters are layers, `(layer_params, x) -> x`.
        first, last: run before the first stage and after the last one, on those devices only.
            Under `jaxpipe.spread`, or as `jaxpipe.VocabEmbedding` and `jaxpipe.VocabHead`, they
            run on all devices at once, each with its share of the parameters.
        layers: the letters of all layers in model order, "Et*32L" (see `parse_layout`).  Of a
            layout, "Et|t|tL", the letters are taken.
        loss: `Loss.MEAN` over microbatches, or `Loss.SUM_OVER_COUNT` where `last` returns (sum,
            count).
        has_metrics: `last` returns (loss, tree of metrics).  Metrics are averaged over
            microbatches, in float32 at least.
        stage_loss: stages (or layers) return (x, loss).  These losses are added to that of the
            microbatch.
        frozen: parameters that are not trained: a function of a canonical path, "stages/w"
            ("stages/1/w" of a list), and the shape and dtype (without the axis of stages or
            layers), or regular expressions, each found in some path.  They have no gradient (None
            is in its place), no accumulator and no optimizer state, and any dtype.
        replaced: parameters whose gradient is their next value (scales and amax histories of FP8,
            loads of experts), by regular expressions of canonical paths: {"scale$": Replaced.MAX}.
            The rule says how microbatches' values are combined, and those of data shards; a pair of
            rules says both, (Replaced.SUM, Replaced.MEAN).  Neither `scale` nor a count changes
            them, no optimizer has a state for them (see `Pipeline.with_trained`), and they are
            whole on each device.
        time: with slices of sequences, the leaves of the batch that are cut along axis 1, by their
            paths or the first parts of these.
        whole: leaves of the batch without an axis of rows, by their paths or the first parts of
            these: the number of the step, a temperature, a teacher's weights.  They may have any
            shape, and every function is given them as they are, in each microbatch, slice and data
            shard.  A new value needs no new program.
        carry: (stage_params, x) -> the carry that the first slice of a sequence is given.  None
            stands for zeros, of the shapes that a stage returns for a carry that is the number 0.

    Canonical parameters are {"first", "stages", "last", "shared"}.  "stages" has leaves [S, ...]
    in model order; it is a list of S trees for a list of functions, and {letter: leaves
    [layers, ...]} for letters.

    Raises:
        PipelineError: functions or arguments do not fit; every fault is listed.

    Example:
        >>> import jax.numpy as jnp, jaxpipe as jp
        >>> model = jp.Model(lambda p, x: jnp.tanh(x @ p), last=lambda p, x, mb: jnp.mean(x**2))
        >>> params = {"stages": jnp.ones((2, 3, 3)), "last": {}}
        >>> float(model.loss(params, {"x": jnp.zeros((4, 3))}))
        0.0
    """

    stages: Any
    first: UserFunction | Spread | None
    last: UserFunction | Spread | None
    layers: str | None
    contract: Loss
    has_metrics: bool
    stage_loss: bool
    frozen: Callable[[str, Leaf], bool] | None
    replaced: Replacements
    time: tuple[str, ...]
    whole: tuple[str, ...]
    carry: UserFunction | None

    @typed(PipelineError)
    def __init__(
        self,
        stages: _Stages,
        *,
        first: _OuterFunction = None,
        last: _OuterFunction = None,
        layers: str | Layout | None = None,
        loss: Loss = Loss.MEAN,
        has_metrics: bool = False,
        stage_loss: bool = False,
        frozen: _Frozen = None,
        replaced: _RulesByPath = None,
        time: str | Sequence[str] = (),
        whole: str | Sequence[str] = (),
        carry: UserFunction | None = None,
    ) -> None:
        if isinstance(stages, Mapping):
            layers = _letters(stages, layers, first, last)
            first, last = stages.get(EMBEDDING), stages.get(LOSS)
        elif layers is not None:
            raise PipelineError(
                "layers= names functions by letters; give Model a dict with a function for each "
                "letter, or leave layers= out"
            )
        if carry is not None and layers is not None:
            raise PipelineError(
                "carry= is for stages that take `carry`, and layers by letters keep none; give "
                "Model one stage function or a list of them, or leave carry= out"
            )
        time, whole = names_of(time), names_of(whole)
        _check_names(time, whole)
        if frozen is not None and not callable(frozen):
            frozen = patterns_of("frozen", names_of(frozen))
        if not isinstance(replaced, Replacements):
            replaced = Replacements.of_rules(replaced or {})
        fields: dict[str, object] = {
            "stages": stages,
            "first": first,
            "last": last,
            "layers": layers,
            "contract": loss,
            "has_metrics": has_metrics,
            "stage_loss": stage_loss,
            "frozen": frozen,
            "replaced": replaced,
            "time": time,
            "whole": whole,
            "carry": carry,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        _ = self.outer

    @property
    def outer(self) -> tuple[Function | None, Function | None]:
        """`first` and `last`."""
        names = ("first", "last")
        if self.layers is not None:
            names = (f"layers[{EMBEDDING!r}]", f"layers[{LOSS!r}]")
        first = _outer(self.first, names[0], ("params", "microbatch"))
        last = _outer(self.last, names[1], ("params", "x", "microbatch"))
        if last is not None and hasattr(last.call, "returning"):
            # A ready-made head returns what the loss contract asks for.
            own = last.call.returning(self.contract, has_metrics=self.has_metrics)
            last = replace(last, call=own)
        return first, last

    def changed(self, **fields: Any) -> Model:
        """The same model with other fields, checked like a new model; PipelineError as for one."""
        names = self.__dataclass_fields__
        values = {name: getattr(self, name) for name in names} | fields
        if self.layers is not None:
            del values["first"], values["last"]  # letters of `stages`
        return Model(values.pop("stages"), loss=values.pop("contract"), **values)

    def staged(
        self, placement: Placement, layout: str | Layout | None = None, *, in_turn: bool = False
    ) -> tuple[Functions, LayerMap | None]:
        """The functions of a step whose stages are placed so, and the layers of each stage where
        the model is given by letters; PipelineError where they do not fit.  `in_turn`: see
        `LayerMap.of`.
        """
        layers = None
        if self.layers is not None:
            layers = LayerMap.of(_layout(self, placement, layout), placement, in_turn=in_turn)
            stages = layers.functions(self.stages, has_loss=self.stage_loss)
        elif layout is not None:
            raise PipelineError(
                "layout= says which layers each stage has, but the model is not given by letters; "
                'write jaxpipe.Model({"t": layer, ...}, layers="..."), or leave layout= out'
            )
        else:
            stages = self._stages(placement.num_stages)
        names = ("has_metrics", "stage_loss", "time", "whole", "carry")
        own = {name: getattr(self, name) for name in names}
        return Functions(stages, *self.outer, self.contract, **own), layers

    def _stages(self, count: int) -> tuple[Function, ...]:
        """A function for each of `count` stages of a model without letters; PipelineError where a
        list has another number.
        """
        if callable(self.stages):
            return (Function.of(self.stages, "stage"),) * count
        if len(self.stages) != count:
            raise PipelineError(
                f"the model has a list of {len(self.stages)} stage functions, but the schedule has "
                f"{count} stages; give one for each"
            )
        # A function that several stages have is one kind of stage where their parameters have one
        # form too.
        own = [id(call) for call in self.stages]
        return tuple(Function.of(call, f"stage[{own.index(id(call))}]") for call in self.stages)

    def loss(
        self,
        params: Params,
        batch: PyTree,
        *,
        microbatches: int | None = None,
        slices: int = 1,
        rng: Rng = None,
        state: PyTree = (),
        training: bool = True,
    ) -> Any:
        """The loss of canonical parameters without a pipeline, which JAX differentiates: an oracle
        for tests, and the step of one device.

        It returns what `Pipeline.loss` does: the loss, with metrics and state (canonical) where the
        model has these.  The batch is cut into `microbatches` equal parts, which run one after the
        other.  With `slices` each is a slice of a sequence, as in a schedule (as many as `slices`
        where `microbatches` is None); without, whole sequences are run.  With the same number of
        microbatches and `rng`, random numbers are those of the pipeline without data shards.

        Raises:
            PipelineError: rows do not divide into microbatches, leaves cannot be replaced, or a
                function returns something else than it should.
        """
        microbatches = slices if microbatches is None else microbatches
        sequences = microbatches // slices
        faults = batch_faults(batch, max(1, sequences), whole=self.whole)
        faults += time_faults(batch, slices, self.time)
        if microbatches % slices:
            faults.append(f"{microbatches} microbatches are no whole sequences of {slices} slices")
        PipelineError.refuse("", faults)
        rows = split_batch(batch, microbatches, slices, self.time, self.whole)
        params = without_numpy(params)
        leaves, with_leaves = in_microbatches(params, self.replaced, microbatches)
        make = partial(self._plain, rows=rows, rng=rng, training=training, slices=slices)
        plain = make(params)
        functions, numbers = plain.functions, jnp.arange(microbatches, dtype=jnp.int32)

        passed, (losses, aux) = jax.lax.scan(
            lambda passed, row: make(with_leaves(row[1])).microbatch(passed, row[0]),
            *(plain.begin(state), (numbers, leaves)),
            unroll=microbatches == 1,  # XLA leaves a loop of one trip in the program
        )
        loss, *_ = functions.total(losses, aux["count"])
        total = partial(jnp.sum, axis=0)
        metrics = mean_over_microbatches(aux["metrics"], total, microbatches)
        aux = [metrics] if self.has_metrics else []
        return with_aux(loss, [*aux, passed.state] if functions.has_state else aux)

    def _plain(self, params: Params, rows: PyTree, rng: Rng, **how: Any) -> Plain:
        """The model on one device, for the rows of each microbatch."""
        params = with_outer(params)
        stacked = callable(self.stages)
        one = stacked or self.layers is not None
        count = 1 if one else len(params["stages"])
        functions, layers = self.staged(Placement.loop(devices=1, chunks=count))
        if layers is not None:
            params["stages"] = layers.split(params["stages"])
        sizes = Cuts(1, functions.cuts).sizes(params)
        own = replace(functions, axis=_AXIS, sizes=sizes, **how)
        return Plain(own.for_batch(rows), params, rows, rng, stacked)


def _layout(model: Model, placement: Placement, layout: str | Layout | None) -> Layout:
    """The layers of each stage: as given, or as many on each stage where they divide."""
    assert model.layers is not None
    # Each stage is where the table says: some devices of a user's own table have more than others.
    divides = placement.num_stages % placement.num_devices == 0
    devices = placement.num_devices if divides else 1
    if layout is None:
        costs = [float(letter not in (EMBEDDING, LOSS)) for letter in model.layers]
        try:
            pieces = split_layers(costs, stages=placement.num_stages)
        except LayoutError as error:
            raise PipelineError(
                f"the layers {model.layers!r} cannot be split evenly: {error}; give layout=, the "
                "layers of each stage"
            ) from error
        layout = Layout(tuple(model.layers[r.start : r.stop] for r in pieces), devices)
    elif isinstance(layout, str):
        letters = "".join(sorted({*LETTERS, *model.stages}))
        layout = parse_layout(layout, devices=devices, letters=letters)
    if layout.layers != model.layers:
        raise PipelineError(
            f"the layout {str(layout)!r} has other layers than the model, whose layers are "
            f"{model.layers!r}; give each layer of the model to one stage, in model order"
        )
    return layout


def _check_names(time: Sequence[str], whole: Sequence[str]) -> None:
    """PipelineError for a leaf of the batch that is in both."""
    faults = [
        f"time= has {one!r} and whole= has {other!r}: a leaf without an axis of rows is not cut "
        "along time; name it in one of them"
        for one in time
        for other in whole
        if one in (other, other.split("/")[0]) or other == one.split("/")[0]
    ]
    PipelineError.refuse("the leaves of the batch are named twice", faults)


def _letters(
    stages: Mapping[str, object], layers: str | Layout | None, first: object, last: object
) -> str:
    """The letters of all layers in model order; PipelineError lists what does not fit the
    functions.
    """
    ends = {"first": first, "last": last}
    if both := [name for name, call in ends.items() if call is not None]:
        raise PipelineError(
            f"the model is given by letters, so leave {', '.join(both)} out; letters {EMBEDDING} "
            f"and {LOSS} are first and last"
        )
    layers = str(layers) if isinstance(layers, Layout) else layers
    if not isinstance(layers, str):
        raise PipelineError(
            "a dict of functions needs layers=, the letters of all layers in model order, "
            f'"Et*32L" for instance; got {layers!r}'
        )
    try:
        known = {*LETTERS, *stages, *(letter for letter in layers if letter.isalpha())}
        found = parse_layout(layers, devices=1, letters="".join(sorted(known)))
    except LayoutError as error:
        raise PipelineError(f"layers={layers!r} cannot be read: {error}") from error
    used = set(found.layers)
    faults = [
        f"layers={layers!r} has letters {letter!r}, for which there is no function"
        for letter in sorted(used - set(stages))
    ]
    faults += [
        f"there is a function for {letter!r}, which layers={layers!r} does not have"
        for letter in sorted(set(stages) - used)
    ]
    PipelineError.refuse("the functions and layers= do not fit", faults)
    return found.layers


def _outer(call: Any, name: str, takes: tuple[str, ...]) -> Function | None:
    if call is None:
        return None
    spread = call if isinstance(call, Spread) else None
    if getattr(call, "spreads", False):
        spread = Spread(call, call.dim, call.dim)
    own = spread.call if spread else call
    function = Function.of(own, name, OUTER_KEYWORDS, takes=takes)
    return replace(function, spread=spread)


class Passed(NamedTuple):
    """What the stages leave for the next microbatch: a tree for each, or stacked ones."""

    state: PyTree
    carried: PyTree  # to the next slice of the sequence


@dataclass(frozen=True)
class Plain:
    """The functions for a batch, with parameters and rows."""

    functions: Functions
    params: Params  # "stages": a tree for each stage, or leaves [S, ...]
    rows: PyTree  # of each microbatch
    rng: Rng
    # the stages are one function, and their parameters are leaves [S, ...]
    stacked: bool

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        if not self.stacked:
            return len(self.params["stages"])
        leaves = jax.tree.leaves(self.params["stages"])
        return int(leaves[0].shape[0]) if leaves else 1

    def begin(self, state: PyTree) -> Passed:
        """What the stages find before the first microbatch."""
        nothing: PyTree = () if self.stacked else [()] * self.num_stages
        state = state if self.functions.has_state else nothing
        if not self.functions.passes:
            return Passed(state, nothing)
        number = jnp.int32(0)
        *_, after = jax.eval_shape(lambda: self.stages(number, Passed(state, nothing)))
        return Passed(state, zeros_of(after.carried))

    def microbatch(
        self, passed: Passed, index: jax.Array
    ) -> tuple[Passed, tuple[jax.Array, PyTree]]:
        """What the stages find, and the number of a microbatch -> what they leave, (loss, {"count",
        "metrics"}).
        """
        x, of_stages, passed = self.stages(index, passed)
        loss, aux = self._outer("last", x, self.num_stages - 1, index)
        return passed, (loss + of_stages, aux)

    def stages(self, index: jax.Array, passed: Passed) -> tuple[PyTree, Number, Passed]:
        """x after all stages, the sum of their losses, and what each leaves; `passed` are their
        states and what the slice before left.
        """
        functions, shared = self.functions, self.params["shared"]
        x = self._outer("first", (), 0, index)

        def stage[X](x: X, row: PyTree, at: int = 0) -> tuple[X, PyTree]:
            number, own, state, carried = row
            function = functions.stages[at]
            extra = self._extra(number, index, functions.wants(at), of=By.STAGE)
            extra |= {"carried": carried, "state": state}
            y, returned = functions.run_stage(at, (own, shared), x, extra)
            if self.stacked:
                y = jax.tree.map(jnp.asarray, y)
                check_forms(function.name, "x", x, y)
            loss = 0.0 if isinstance(returned.loss, tuple) else returned.loss
            left = returned.carried if functions.passes else ()
            kept = returned.state if "state" in function.wants else state
            return y, (loss, kept, left)

        if self.stacked:
            numbers = jnp.arange(self.num_stages, dtype=jnp.int32)
            rows = numbers, self.params["stages"], *passed
            x, (losses, *after) = jax.lax.scan(stage, x, rows)
            return x, jnp.sum(losses), Passed(*after)
        results = []
        for s, row in enumerate(zip(self.params["stages"], *passed, strict=True)):
            x, result = stage(x, (s, *row), s)
            results.append(result)
        losses, *after = map(list, zip(*results, strict=True))
        return x, sum(losses), Passed(*after)

    def _extra(self, stage: Number, index: jax.Array, wants: frozenset[str], *, of: By) -> Extra:
        return self.functions.extra(self.rows, self.rng, jnp.int32(stage), index, wants, of=of)

    def _outer(self, key: str, x: PyTree, stage: int, index: jax.Array) -> PyTree:
        """`first` or `last`."""
        params = self.params[key], self.params["shared"]
        extra = self._extra(stage, index, OUTER_WANTS, of=By[key.upper()])
        return self.functions.run_whole(key, params, x, extra)
