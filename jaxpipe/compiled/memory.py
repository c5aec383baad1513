"""The memory of a compiled program on one device, and its largest buffers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# cumulative_size; size; offset; used_by_n_values; shapes_list
_BUFFER = re.compile(
    r"^ *[\d.]+\w+\( *\d+%\); *(?P<size>[\d.]+)(?P<unit>[KMG]?i?B); *(?P<offset>\d+); "
    r"*(?P<values>\d+); (?P<shapes>.*)$"
)


@dataclass(frozen=True)
class Buffer:
    """A piece of the temporary memory, and the arrays that lie there one after the other."""

    nbytes: int  # to four digits, as XLA prints it
    offset: int
    shapes: str


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    temp: int
    arguments: int
    outputs: int
    aliased: int  # outputs that reuse arguments
    largest: tuple[Buffer, ...]  # of the temporary memory

    @property
    def total(self) -> int:
        """Peak bytes of the step."""
        return self.temp + self.arguments + self.outputs - self.aliased


def read_memory(compiled: Any, report: str, *, most: int = 10) -> Memory:
    """From `compiled.memory_analysis()`, and XLA's `*-memory-usage-report.txt` for the largest
    buffers.
    """
    found = compiled.memory_analysis()
    return Memory(
        temp=found.temp_size_in_bytes,
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        largest=largest_buffers(report)[:most],
    )


def largest_buffers(report: str) -> tuple[Buffer, ...]:
    """The buffers of a memory usage report, the largest first."""
    found = []
    for line in report.splitlines():
        match = _BUFFER.match(line)
        if match:
            size = round(float(match["size"]) * _UNITS[match["unit"]])
            found.append(Buffer(size, int(match["offset"]), match["shapes"]))
    return tuple(sorted(found, key=lambda each: -each.nbytes))
