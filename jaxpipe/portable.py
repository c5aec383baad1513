"""A whole training state (parameters, optimizer state, averages) in the model's canonical layout, whatever schedule holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from .arrays import PyTree
from .errors import CheckpointError
from .model.mesh import explicit_context, jit_on_mesh, trimmed
from .model.packed import Packed
from .model.param_layout import OUTER
from .model.placed import Chunks, home_faults
from .model.spread import is_padded
from .pipeline import Pipeline

Path: TypeAlias = Any


OWN_STATE = "state"


def is_params(node: PyTree) -> bool:
    """True for a tree laid out like parameters: they themselves, a moment of an optimizer, an average, gradients."""
    return isinstance(node, dict) and "stages" in node and set(node) <= {"stages", *OUTER}


class Reference(NamedTuple):
    """What a leaf that belongs to a parameter is measured by: the parameter's shape and how it is spread over the mesh."""

    shape: tuple[int, ...]
    spec: tuple[Any, ...]


class Rule(NamedTuple):
    """How a leaf of a stage follows its parameter: after how many axes of its own, or not at all (a placeholder)."""

    lead: int
    follows: bool
    spec: tuple[Any, ...]  # of the dims after the stage axis


@dataclass(frozen=True)
class PortableState:
    """Placed <-> canonical, for a state that holds parameters under "params" and, anywhere, trees laid out like them.

    What stands under "state" is the stages' own (`Pipeline.place_state`), which is in model order too, as {"stages": ...}.

    Canonical: leaves of stages are [S, ...] in model order; with `layer_axis` those of [S, layers, ...] become
    [S * layers, ...], so that another number of stages fits too.  With `pipe` None the state lies in model order already.
    Leaves are arrays, or ShapeDtypeStructs, which give ShapeDtypeStructs with shardings.
    """

    pipe: Pipeline | None
    layer_axis: bool = False
    _programs: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # moments move as parameters do: compiled once

    def of(self, state: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """The canonical layout; stages are spread over the pipe axis, parts without parameters left out, the rest on the host.

        Raises:
            CheckpointError: leaves belong to a parameter but cannot be laid out; all are listed.
        """
        state = _wrapped(state)
        rules = self._rules(state)

        def outside(path: Path, node: PyTree) -> PyTree:
            if not is_params(node):
                return _host(node)
            found = {key: node[key] for key in node if key != "stages" and jax.tree.leaves(node[key])}
            found = jax.tree_util.tree_map_with_path(lambda p, leaf: self._spread(leaf, rules[(*path, *p)]), found)
            found = jax.tree.map(self._without_padding, found, is_leaf=is_padded)
            return {**found, "stages": self._merged(path, node["stages"], rules, _whole(state, path, node))}

        return dict(jax.tree_util.tree_map_with_path(outside, dict(state), is_leaf=is_params))

    def placed(self, canonical: Mapping[str, PyTree], like: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """The inverse: a state with the structure of `like`, parameters and what follows them spread as parameters are."""
        like = _wrapped(like)
        rules = self._rules(like)

        def inside(path: Path, node: PyTree, found: PyTree) -> PyTree:
            if not is_params(node):
                return self._back(found, node)
            whole = {
                key: jax.tree.map(_padded, node[key], found[key], is_leaf=is_padded) if key in found and key != "stages" else node[key]
                for key in node
            }
            if not jax.tree.leaves(node["stages"]):
                return {**whole, "stages": node["stages"]}
            return {**whole, "stages": self._divided(path, found["stages"], node["stages"], rules, _whole(like, path, node))}

        nodes, tree = jax.tree_util.tree_flatten_with_path(dict(like), is_leaf=is_params)
        values = jax.tree.leaves(dict(canonical), is_leaf=is_params)
        found = dict(jax.tree.unflatten(tree, [inside(path, node, v) for (path, node), v in zip(nodes, values, strict=True)]))
        return {key: value["stages"] if key == OWN_STATE else value for key, value in found.items()}

    # Which leaf follows which parameter

    def _rules(self, state: Mapping[str, PyTree]) -> dict[Path, Rule]:
        """The rule of every leaf that belongs to a parameter, by path; of a stage, by that of its first chunk."""
        if not is_params(state.get("params")):
            raise CheckpointError('a state must hold parameters under "params", as `Pipeline.place` gives them')
        if self.pipe is not None:
            home = home_faults(state["params"]["stages"], self.pipe.layout.home, "params", "place")
            if home:
                raise CheckpointError.listing("this state is not the pipeline's", home)
        params = jax.tree_util.tree_leaves_with_path(state["params"])
        known = {self._parameter(path): Reference(leaf.shape, _spec(leaf)) for path, leaf in params}
        rules: dict[Path, Rule] = {}
        faults: list[str] = []
        for path, node in jax.tree_util.tree_leaves_with_path(dict(state), is_leaf=is_params):
            if not is_params(node):
                continue
            if isinstance(node["stages"], Chunks) and self.pipe is not None:
                home = home_faults(node["stages"], self.pipe.layout.home, _text(path) or "parameters", "place")
                if home:
                    faults += home
                    continue
            if self.pipe is not None and not self._unlike and len({jax.tree.structure(chunk) for chunk in node["stages"]}) > 1:
                faults.append(f"{_text(path)}: chunks of stages have unlike structures; a mask must treat every stage the same")
            by_layer = _has_own_forms(state, node)
            for p, leaf in jax.tree_util.tree_leaves_with_path(node):
                stage = self._parameter(p)[0] == "stages"
                own = path == (jax.tree_util.DictKey(OWN_STATE),) or (by_layer and stage)
                rule = Rule(0, True, ()) if own else self._rule(leaf, known.get(self._parameter(p)), stage=stage)
                rules[(*path, *p)] = rule or Rule(0, False, ())
                if rule is None:
                    faults.append(f"{_text((*path, *p))} of shape {leaf.shape} fits no axis of its parameter to the stages")
        if faults:
            raise CheckpointError.listing("this state has no canonical layout", faults)
        return rules

    def _rule(self, leaf: Any, parameter: Reference | None, *, stage: bool) -> Rule | None:
        """None where it cannot be told which axis of the leaf is that of stages."""
        if (
            parameter is None
            and stage
            and self.pipe is not None
            and not self._unlike
            and leaf.shape[:1] == (self.pipe.schedule.num_devices,)
        ):
            return Rule(0, True, _spec(leaf)[1:])  # the state of an optimizer that has one for each stage (`per_layer`)
        if parameter is None:
            return None if stage else Rule(0, False, ())
        shape, spec = parameter
        lead = len(leaf.shape) - len(shape)
        if lead >= 0 and leaf.shape[lead:] == shape:
            return Rule(lead, True, spec[1:] if stage else spec)
        if not stage or np.prod(leaf.shape) == 1:
            return Rule(0, False, ())
        axes = 2 if self.layer_axis else 1  # a factored moment lacks some of the parameter's last axes
        return Rule(0, True, ()) if lead < 0 and leaf.shape[:axes] == shape[:axes] else None

    @property
    def _unlike(self) -> bool:
        """Whether each stage has parameters of its own form, which move all together."""
        return self.pipe is not None and self.pipe.layout.unlike

    def _parameter(self, path: Path) -> tuple[str, ...]:
        """The parameter's name within its tree, the same for every chunk of alike stages: ("stages", "w")."""
        names = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        if self._unlike:
            return names
        return (names[0], *names[2:]) if self.pipe is not None and names[0] == "stages" else names

    # Stages

    def _merged(self, path: Path, stages: PyTree, rules: Mapping[Path, Rule], whole: PyTree) -> PyTree:
        """Placed stages -> leaves in model order."""
        if self._unlike:
            return self._merged_unlike(path, stages, rules, whole)
        chunks = stages if self.pipe is not None else (stages,)
        mine = self._stage_rules(path, chunks, rules)
        leaves = [jax.tree.leaves(chunk) for chunk in chunks]
        self._check_placeholders(path, mine, leaves)

        def arrange(leaves: Sequence[Sequence[Any]]) -> list[Any]:
            return [self._join(rule, group) for rule, group in zip(mine, zip(*leaves, strict=True), strict=True)]

        joined = self._run(("of", *mine), arrange, leaves, lambda like: list(map(self._canonical_spec, mine, like)))
        return jax.tree.unflatten(jax.tree.structure(chunks[0]), joined) if chunks else {}

    def _divided(self, path: Path, stages: PyTree, like: PyTree, rules: Mapping[Path, Rule], whole: PyTree) -> PyTree:
        """Leaves in model order -> placed stages."""
        if self._unlike:
            return self._divided_unlike(stages, like, whole)
        chunks = like if self.pipe is not None else (like,)
        mine = self._stage_rules(path, chunks, rules)
        wanted = [leaf.shape for leaf in jax.tree.leaves(chunks[:1])]

        def arrange(leaves: Sequence[Any]) -> list[list[Any]]:
            parts = [self._cut(rule, leaf, shape, len(chunks)) for rule, leaf, shape in zip(mine, leaves, wanted, strict=True)]
            return [[part[v] for part in parts] for v in range(len(chunks))]

        def specs(_like: PyTree) -> list[list[PartitionSpec]]:
            return [[self._placed_spec(rule) for rule in mine] for _ in chunks]

        parts = self._run(("placed", *mine), arrange, jax.tree.leaves(stages), specs)
        found = tuple(jax.tree.unflatten(jax.tree.structure(chunk), part) for chunk, part in zip(chunks, parts, strict=True))
        if self.pipe is None:
            return found[0]
        return like.like(found) if isinstance(like, Chunks) else found

    def _merged_unlike(self, path: Path, stages: PyTree, rules: Mapping[Path, Rule], whole: PyTree) -> PyTree:
        """Placed stages of unlike forms -> the canonical tree; `whole` are the shapes of all that the parameters have."""
        assert self.pipe is not None
        layout, axis, count = self.pipe.layout, self.pipe.axis, self.pipe.schedule.num_devices
        key = jax.tree_util.DictKey("stages")
        odd = [_text((*path, key, *p)) for p, _ in jax.tree_util.tree_leaves_with_path(stages) if rules[(*path, key, *p)][:2] != (0, True)]
        if odd:
            faults = tuple(f"{name} does not have its parameter's shape" for name in odd)
            text = "\n".join(f"  {f}" for f in faults)
            raise CheckpointError(f"with unlike stages every leaf must be as its parameter is, but:\n{text}", faults)

        def spread(like: PyTree) -> PyTree:
            return jax.tree.map(lambda a: PartitionSpec(axis if a.shape and a.shape[0] % count == 0 else None), like)

        def arrange(stages: PyTree) -> PyTree:
            return layout.canonical_stages(_filled(stages, whole))

        found = self._run(("of unlike", jax.tree.structure(stages)), arrange, stages, spread)
        masked = _masked_node(stages)
        if masked is None:
            return found
        out = jax.jit(lambda: jax.tree.map(jnp.max, layout.canonical_stages(_marked(stages, whole))))()
        return jax.tree.map(lambda leaf, gone: masked if gone else leaf, found, out)

    def _divided_unlike(self, stages: PyTree, like: PyTree, whole: PyTree) -> PyTree:
        """The inverse."""
        assert self.pipe is not None
        layout = self.pipe.layout
        canonical = jax.eval_shape(layout.canonical_stages, whole)

        def spread(_like: PyTree) -> PyTree:
            return jax.tree.map(lambda leaf: PartitionSpec(*_spec(leaf)), like)

        def arrange(stages: PyTree) -> PyTree:
            return _like_leaves(layout.place_stages(_filled(stages, canonical), like=whole), like)

        return self._run(("placed unlike", jax.tree.structure(like)), arrange, stages, spread)

    def _stage_rules(self, path: Path, chunks: Sequence[PyTree], rules: Mapping[Path, Rule]) -> list[Rule]:
        stages = jax.tree_util.DictKey("stages")
        chunk = () if self.pipe is None else (jax.tree_util.SequenceKey(0),)
        return [rules[(*path, stages, *chunk, *p)] for p, _ in jax.tree_util.tree_leaves_with_path(chunks[0])] if chunks else []

    def _check_placeholders(self, path: Path, rules: Sequence[Rule], leaves: Sequence[Sequence[Any]]) -> None:
        """One value a chunk, where it does not follow stages, has no place in model order unless all are equal."""
        for i, rule in enumerate(rules):
            group = [chunk[i] for chunk in leaves]
            if rule.follows or len(group) == 1 or isinstance(group[0], jax.ShapeDtypeStruct):
                continue
            values = [np.asarray(leaf) for leaf in group]
            if any(not np.array_equal(values[0], v) for v in values[1:]):
                raise CheckpointError(
                    f"{_text(path)} holds one number for all stages of a chunk, {[v.item() for v in values]}: it belongs to this "
                    "schedule's chunks and not to the model; use a transformation that keeps one for each parameter or for all"
                )

    def _join(self, rule: Rule, group: Sequence[Any]) -> Any:
        """One leaf of every chunk -> the leaf in model order."""
        if not rule.follows:
            return group[0]

        def join(*group: Any) -> Any:
            whole = group[0] if self.pipe is None else self.pipe.layout.canonical_stages(group)
            return whole.reshape(-1, *whole.shape[2:]) if self.layer_axis and whole.ndim > 1 else whole

        return _behind(rule.lead, join)(*group)

    def _cut(self, rule: Rule, leaf: Any, shape: tuple[int, ...], chunks: int) -> Sequence[Any]:
        """The inverse of `_join`; `shape` is what the leaf of a chunk has."""
        if not rule.follows:
            return (leaf,) * chunks

        def cut(leaf: Any) -> Any:
            count = shape[rule.lead] if self.pipe is None else self.pipe.schedule.num_stages
            whole = leaf.reshape(count, *shape[rule.lead + 1 :]) if self.layer_axis else leaf
            return (whole,) if self.pipe is None else self.pipe.layout.place_stages(whole)

        return tuple(_behind(rule.lead, cut)(leaf))

    # Shardings

    def _canonical_spec(self, rule: Rule, like: Any) -> PartitionSpec:
        """Stages, or layers, over the pipe axis where they divide; the other dims as the parameter's."""
        assert self.pipe is not None
        if not rule.follows:
            return PartitionSpec()
        rest = rule.spec[1:] if self.layer_axis else rule.spec
        divides = like.shape[rule.lead] % self.pipe.schedule.num_devices == 0
        return PartitionSpec(*(None,) * rule.lead, self.pipe.axis if divides else None, *rest)

    def _placed_spec(self, rule: Rule) -> PartitionSpec:
        assert self.pipe is not None
        return trimmed(*(None,) * rule.lead, self.pipe.axis, *rule.spec) if rule.follows else PartitionSpec()

    def _run(self, key: Any, arrange: Callable[[PyTree], PyTree], leaves: PyTree, specs: Callable[[PyTree], PyTree]) -> PyTree:
        """Move arrays to where `specs` wants them, in one program for each `key`; ShapeDtypeStructs give ShapeDtypeStructs."""
        like = jax.eval_shape(arrange, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), leaves))
        abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(leaves))
        if self.pipe is None:
            if not abstract:
                return arrange(leaves)
            new, tree = jax.tree.flatten(like)  # one chunk, so as many leaves as before
            old = jax.tree.leaves(leaves)
            return jax.tree.unflatten(tree, [_with_sharding(a, _unplaced(b, a)) for a, b in zip(new, old, strict=True)])
        mesh = self.pipe.mesh
        to = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(like), is_leaf=lambda s: isinstance(s, PartitionSpec))
        if abstract:
            return jax.tree.map(_with_sharding, like, to)
        key = (*key, *(leaf.shape for leaf in jax.tree.leaves(leaves)), explicit_context(mesh))
        if key not in self._programs:
            self._programs[key] = jit_on_mesh(mesh, arrange, to)
        return self._programs[key](jax.tree.map(lambda leaf: _from_elsewhere(leaf, mesh), leaves))

    def _spread(self, leaf: Any, rule: Rule) -> Any:
        """A leaf of first, last or shared, or of what follows them, where its parameter lies."""
        abstract = isinstance(leaf, jax.ShapeDtypeStruct)
        if self.pipe is None:
            return _with_sharding(leaf, _unplaced(leaf, leaf)) if abstract else leaf
        to = NamedSharding(self.pipe.mesh, trimmed(*(None,) * rule.lead, *rule.spec) if rule.follows else PartitionSpec())
        return _with_sharding(leaf, to) if abstract else jax.device_put(leaf, to)

    def _without_padding(self, leaf: Any) -> Any:
        """A leaf of its parameter's own size, for those that are padded to be cut over the devices: it is on every device."""
        if not is_padded(leaf):
            return leaf
        array, dim, size = leaf.array, leaf.dim, leaf.size
        if len(array.shape) <= dim or self.pipe is None:
            return array
        shape = (*array.shape[:dim], min(size, array.shape[dim]), *array.shape[dim + 1 :])
        to = NamedSharding(self.pipe.mesh, PartitionSpec())
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, array.dtype, sharding=to)
        return jax.jit(lambda a: jax.lax.slice(a, (0,) * a.ndim, shape), out_shardings=to)(array)

    def _back(self, value: Any, like: Any) -> Any:
        """A leaf that belongs to no parameter: a number as it was, an array on the whole mesh."""
        if not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
            return type(like)(value) if isinstance(like, int | float) else value
        if _is_key(like):
            impl: list[Any] = []
            jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), like)  # a ShapeDtypeStruct does not tell it by itself
            value = jax.random.wrap_key_data(value, impl=impl[0])
        return jax.device_put(value, _unplaced(like, like) if self.pipe is None else NamedSharding(self.pipe.mesh, PartitionSpec()))


def _padded(like: Any, value: Any) -> Any:
    """The inverse, for leaves laid out like `like`."""
    if not is_padded(like):
        return value
    shape, sharding = like.array.shape, like.array.sharding
    if isinstance(value, jax.ShapeDtypeStruct):
        return replace(like, array=jax.ShapeDtypeStruct(shape, value.dtype, sharding=sharding))
    widths = [(0, new - old) for new, old in zip(shape, value.shape, strict=True)]
    return replace(like, array=jax.device_put(jnp.pad(value, widths), sharding))


def _whole(state: Mapping[str, PyTree], path: Path, node: Mapping[str, PyTree]) -> PyTree:
    """The shapes of all leaves that stages have: the parameters', or those of the stages' own state, or of an optimizer's."""
    own = path == (jax.tree_util.DictKey(OWN_STATE),) or _has_own_forms(state, node)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), node["stages"] if own else state["params"]["stages"])


def _has_own_forms(state: Mapping[str, PyTree], node: Mapping[str, PyTree]) -> bool:
    """Whether stages of unlike forms hold other trees than parameters: the state of an optimizer that has one for each layer."""
    if not isinstance(node["stages"], Chunks) or not isinstance(state["params"]["stages"], Chunks):
        return False
    chunks = zip(node["stages"], state["params"]["stages"], strict=False)
    return any(isinstance(one, Packed) and isinstance(other, Packed) and one.forms != other.forms for one, other in chunks)


def _filled(tree: PyTree, whole: PyTree) -> PyTree:
    """The tree with zeros where a mask took leaves out of it."""
    have = dict(jax.tree_util.tree_leaves_with_path(tree))
    return jax.tree_util.tree_map_with_path(lambda p, a: have[p] if p in have else jnp.zeros(a.shape, a.dtype), whole)


def _marked(tree: PyTree, whole: PyTree) -> PyTree:
    """True wherever a mask took leaves out of the tree."""
    have = {path for path, _ in jax.tree_util.tree_leaves_with_path(tree)}
    return jax.tree_util.tree_map_with_path(lambda p, a: jnp.full(a.shape, p not in have), whole)


def _like_leaves(tree: PyTree, wanted: PyTree) -> PyTree:
    """The tree without the leaves that a mask took out of `wanted`."""
    have = dict(jax.tree_util.tree_leaves_with_path(tree))
    return jax.tree_util.tree_map_with_path(lambda path, _: have[path], wanted)


def _masked_node(stages: PyTree) -> Any:
    """What stands where a mask took a leaf out of packed stages (`optax.MaskedNode`), or None."""
    return next((leaf for chunk in stages for leaf in chunk.leaves.values() if not jax.tree.leaves(leaf)), None)


def _wrapped(state: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """The stages' own state in the form of parameters."""
    return {key: {"stages": value} if key == OWN_STATE else value for key, value in state.items()}


def _host(leaf: Any) -> Any:
    """On the host, as numpy; a key as its words."""
    if _is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else jax.random.key_data(leaf)
    return np.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else np.asarray(leaf)


def _from_elsewhere(leaf: Any, mesh: Mesh) -> Any:
    """A leaf that one program can take: one that lies on other devices than the mesh's goes over the host."""
    here = not isinstance(leaf, jax.Array) or not leaf.committed or leaf.sharding.device_set == set(mesh.devices.flat)
    if here or not leaf.is_fully_addressable:
        return leaf
    return np.asarray(leaf)


def _with_sharding(leaf: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _unplaced(leaf: Any, like: Any) -> Any:
    """Where a plain program's array of another shape lies: on its device, or whole on its mesh."""
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) and leaf.shape != like.shape else sharding


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _behind(lead: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on all entries of so many leading axes."""
    for _ in range(lead):
        function = jax.vmap(function)
    return function


def _spec(leaf: Any) -> tuple[Any, ...]:
    """How an array is spread, an entry a dim."""
    spec = tuple(leaf.sharding.spec) if isinstance(getattr(leaf, "sharding", None), NamedSharding) else ()
    return (*spec, *(None for _ in range(len(leaf.shape) - len(spec))))


def _text(path: Path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
