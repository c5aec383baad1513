"""Which parameters of unlike stages share a buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..arrays import PyTree
from ..errors import PipelineError
from ..jaxprs.entry import Entry
from .packed import Buffer, ChunkLayout, Group, InBuffer, Parameter, TreeForm, with_distinct_names


def _alone(_parameter: Parameter, _dtype: Any) -> InBuffer:
    return InBuffer(Group.ALONE)


@dataclass(frozen=True)
class Sharing:
    """The rule by which a chunk of unlike stages is laid out.

    Leaves of one group and dtype that are split over the same axes may be in one buffer.  Where
    stages give one path leaves that may not be together, as one of them is frozen, these have names
    of their own.
    """

    kept: Callable[[Parameter, Any], InBuffer] = _alone  # of a parameter and its dtype
    multiple: int = 1  # of which a buffer's length is, as an axis splits it
    pinned: bool = False  # there are axes that the partitioner may split over
    layered: bool = False  # stages are made of layers

    def layout(self, stages: Sequence[PyTree | None], numbers: Sequence[int]) -> ChunkLayout:
        """The layout of one chunk: its stages by device (arrays or shapes), and their numbers in
        the model.

        Raises:
            PipelineError: leaves of a path have different dtypes.
        """
        forms = list(map(TreeForm.of, stages))
        dtypes = [[jax.typeof(leaf).dtype for leaf in jax.tree.leaves(stage)] for stage in stages]
        _check_dtypes(forms, dtypes)
        kept = [
            list(map(self.kept, form.parameters(number, layered=self.layered), own))
            for form, number, own in zip(forms, numbers, dtypes, strict=True)
        ]
        named = with_distinct_names(forms, kept)
        dtype_of = {
            name: dtype
            for form, own in zip(named, dtypes, strict=True)
            for name, dtype in zip(form.paths, own, strict=True)
        }
        return ChunkLayout(named, self.buffers(named, numbers, dtype_of))

    def buffers(
        self, forms: Sequence[TreeForm], numbers: Sequence[int], dtypes: Mapping[str, Any]
    ) -> tuple[Buffer, ...]:
        """The buffers of stages that share a chunk, where these are smaller than an array for each
        leaf; and one for each leaf whose shapes differ.

        What all stages have alike takes no less room together, so it stays by itself, as it is.
        """
        known = [form for form in forms if not form.is_empty]
        shapes: dict[str, list[tuple[int, ...]]] = {}
        groups: dict[Any, dict[str, InBuffer]] = {}
        for name, owns in by_name(forms, numbers, layered=self.layered).items():
            (kept,) = {self.kept(own, dtypes[name]) for own, _ in owns}
            found = shapes[name] = [shape for _, shape in owns]
            if len(found) < len(known) or len(set(found)) > 1:
                alone = name if kept.group is Group.ALONE else ""
                groups.setdefault((dtypes[name], kept.group, kept.axes, alone), {})[name] = kept
        word = "buffer"
        while any(path.startswith(word) for path in shapes):
            word += "_"

        def buffer(name: str, members: Mapping[str, InBuffer]) -> Buffer:
            paths = tuple(sorted(members))
            empty = Buffer(name, 0, paths, tuple(members[path] for path in paths), self.pinned)
            most = max(
                sum(place.entry.length for place in empty.places(form).values()) for form in known
            )
            return empty._replace(size=math.ceil(most / self.multiple) * self.multiple)

        made: list[Buffer] = []
        for number, members in enumerate(sorted(groups.values(), key=min)):
            one = buffer(f"{word} {number}", members)
            separate = sum(
                max(Entry(shape, kept.parts).length for shape in shapes[path])
                for path, kept in members.items()
            )
            if one.size < separate:
                made.append(one)
                continue
            made += [buffer(p, {p: members[p]}) for p in one.paths if len(set(shapes[p])) > 1]
        return tuple(made)

    def faults(
        self, owns: Mapping[str, Sequence[Parameter]], dtype: Any, buffer: Buffer | None
    ) -> list[str]:
        """Why a leaf (a buffer, or one by itself) that was placed with another sharing cannot be
        used with this one.

        `owns` are the parameters that are in it, by name.
        """
        kept = {name: {self.kept(own, dtype) for own in found} for name, found in owns.items()}
        wanted = {} if buffer is None else dict(zip(buffer.paths, buffer.kept, strict=True))
        odd = [
            name
            for name, found in kept.items()
            if len(found) > 1 or (name in wanted and found != {wanted[name]})
        ]
        again = (
            "bring them over with the pipeline that placed them as `old`: "
            "new.place(old.canonical(...))"
        )
        if odd:
            first, *others = dict.fromkeys(
                [*owns[odd[0]], *(own for found in owns.values() for own in found)]
            )
            how = f"with {others[0].path!r}" if others else "as it is not split here"
            return [
                f"{first.path!r} is stored in one array {how}, but frozen=, specs= or the mesh "
                f"axes of this pipeline keep it apart; {again}"
            ]
        if buffer is not None and buffer.pinned != self.pinned:
            return [f"{buffer.name!r} is of a pipeline whose mesh had other axes; {again}"]
        if buffer is not None and buffer.size % self.multiple:
            return [
                f"{buffer.name!r} of {buffer.size} numbers does not divide over the "
                f"{self.multiple} devices of fsdp; {again}"
            ]
        return []


def by_name(
    forms: Sequence[TreeForm], numbers: Sequence[int], *, layered: bool
) -> dict[str, list[tuple[Parameter, tuple[int, ...]]]]:
    """The parameters that have each name in a chunk, with the shapes of their leaves."""
    found: dict[str, list[tuple[Parameter, tuple[int, ...]]]] = {}
    for form, stage in zip(forms, numbers, strict=True):
        owns = form.parameters(stage, layered=layered)
        for name, own, shape in zip(form.paths, owns, form.shapes, strict=True):
            found.setdefault(name, []).append((own, shape))
    return found


def _check_dtypes(forms: Sequence[TreeForm], dtypes: Sequence[Sequence[Any]]) -> None:
    """PipelineError where stages give one path several dtypes."""
    found: dict[str, set[str]] = {}
    for form, own in zip(forms, dtypes, strict=True):
        for path, dtype in zip(form.paths, own, strict=True):
            found.setdefault(path, set()).add(str(dtype))
    faults = [
        f"parameters {path!r} of stages that share a chunk are {' and '.join(sorted(names))}; "
        "give them one dtype"
        for path, names in found.items()
        if len(names) > 1
    ]
    PipelineError.refuse("", faults)
