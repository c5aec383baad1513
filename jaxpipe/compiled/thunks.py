"""Which loops and conditionals became nodes of CUDA graphs, from the thunks that XLA writes out.

XLA:GPU makes its command buffers (CUDA graphs) from thunks, after the HLO is final, so the HLO's
text does not show them.  With `xla_dump_to` it writes two files that do:
`*.thunk_sequence_after_thunk_passes.txt`, a tree by indentation of "number: kind" (only where the
passes changed anything; else `*.thunk_sequence.txt` is final), and `*.thunk_metadata.txt`, the HLO
instruction of each number.
"""

from __future__ import annotations

import re
from pathlib import Path

_LINE = re.compile(r"^(?P<indent> *)(?P<number>\d+): k(?P<kind>\w+)")
_ENTRY = re.compile(
    r'profile_annotation: "(?P<name>[^"]*)"(?:\s+thunk_id: (?P<number>\d+))?\s*\}\s*thunk_kind: '
    r'"k(?P<kind>\w+)"'
)
_HOST = ("While", "Conditional")


def graph_nodes(sequence: str, metadata: str) -> frozenset[str]:
    """The names of `while` and `conditional` instructions that run inside a command buffer, so
    without the host.
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
