"""Compile a step for GPUs, and read it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .compiled_program import CompiledProgram
from .hlo import parse
from .waits import Predicate, find_predicates


@dataclass(frozen=True)
class GpuProgram(CompiledProgram):
    """A program compiled for GPUs, read from its text and its thunks."""

    graph_nodes: frozenset[str]  # loops and conditionals that run in CUDA graphs

    @cached_property
    def predicates(self) -> tuple[Predicate, ...]:
        """See `waits`."""
        return find_predicates(self.module, self.graph_nodes)


def compile_and_read(lowered: Any, options: Mapping[str, Any] | None = None) -> GpuProgram:
    """Compile and read the result of `pipe.lower(...)` or `jax.jit(f).lower(...)`, with XLA options
    added to its own.

    XLA writes its thunks into a temporary folder; nothing is run.

    Raises:
        ValueError: it has not written them (no GPU program, or a compilation cache has answered).
    """
    with tempfile.TemporaryDirectory() as name:
        return _read(_compile(lowered, options, name), Path(name))


def compile_and_try_to_read(lowered: Any) -> tuple[Any, GpuProgram | None]:
    """The compiled program and its reading, which is None if it is not for GPUs or if XLA has not
    written its thunks.
    """
    with tempfile.TemporaryDirectory() as name:
        compiled = _compile(lowered, None, name)
        try:
            return compiled, _read(compiled, Path(name))
        except ValueError:
            return compiled, None


def _compile(lowered: Any, options: Mapping[str, Any] | None, folder: str) -> Any:
    return lowered.compile(
        compiler_options={**(options or {}), "xla_dump_to": folder, "xla_dump_hlo_as_text": True}
    )


def _read(compiled: Any, folder: Path) -> GpuProgram:
    memory = compiled.memory_analysis()
    return GpuProgram(parse(compiled.as_text()), memory, read_graph_nodes(folder))


_LINE = re.compile(r"^(?P<indent> *)(?P<number>\d+): k(?P<kind>\w+)")
_ENTRY = re.compile(
    r'profile_annotation: "(?P<name>[^"]*)"(?:\s+thunk_id: (?P<number>\d+))?\s*\}\s*thunk_kind: '
    r'"k(?P<kind>\w+)"'
)
_HOST = ("While", "Conditional")


def graph_nodes(sequence: str, metadata: str) -> frozenset[str]:
    """The names of `while` and `conditional` instructions that run inside a command buffer, without
    the host.
    """
    names = {
        int(match["number"]): match["name"]
        for match in _ENTRY.finditer(metadata)
        if match["number"]
    }
    found: set[str] = set()
    around: list[tuple[int, str]] = []
    for line in sequence.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        indent = len(match["indent"])
        while around and around[-1][0] >= indent:
            around.pop()
        if match["kind"] in _HOST and any(kind == "CommandBuffer" for _, kind in around):
            found.add(names[int(match["number"])])
        around.append((indent, match["kind"]))
    return frozenset(found)


def read_graph_nodes(folder: Path) -> frozenset[str]:
    """`graph_nodes` of the one program that was dumped into a folder.

    Raises:
        ValueError: the folder does not hold the thunks of exactly one program (a compilation cache
            may have answered, say).
    """
    changed = any(folder.glob("*.thunk_sequence_after_thunk_passes.txt"))
    sequence = only(folder, f"*.thunk_sequence{'_after_thunk_passes' if changed else ''}.txt")
    return graph_nodes(sequence, only(folder, "*.thunk_metadata.txt"))


def only(folder: Path, pattern: str) -> str:
    """The text of the one file with such a name.

    Raises:
        ValueError: there is none, or several.
    """
    files = sorted(folder.glob(pattern))
    if len(files) != 1:
        raise ValueError(
            f"{len(files)} files {pattern} in {folder}, where the dump of one program has 1: "
            f"{[f.name for f in files]}"
        )
    return files[0].read_text()
