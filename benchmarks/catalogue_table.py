"""Every schedule of the catalogue: makespan, bubble and peak activations, beside torch's generator
and the published formulas.

Everything is simulated with F = I = W = 1 (B = 2, an overlapped pair 3) and no transfer time, in
units of one chunk's F, so only equal V compare directly.  Run from the repository's root:

    python -m benchmarks.catalogue_table -o benchmarks/results/catalogue.txt
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

import jaxpipe as jp
from benchmarks.output import Command, Result
from benchmarks.torch_tables import CLASSES, torch_table

SIZES = ((4, 2), (4, 4), (4, 8), (4, 32), (8, 4), (8, 8), (8, 11), (8, 16), (8, 64), (16, 64))
COLUMNS = (
    "schedule  P  V  M  makespan  bubble  peak  torch: makespan  bubble  peak  "
    "published: makespan  peak"
)


class Published(NamedTuple):
    """Makespan and peak activations of (P, V, M) as the literature states them, and the smallest M
    for which it does.
    """

    makespan: Callable[[int, int, int], int]
    peak: Callable[[int, int, int], int]
    least_m: Callable[[int], int] = lambda p: p
    about: bool = False


def _one_round(p: int) -> int:
    return 1


# The sources are named in the docstrings of the generators.  Megatron's interleaving is published
# for M a multiple of P.
PUBLISHED = {
    "gpipe": Published(lambda p, v, m: 3 * (m + p - 1), lambda p, v, m: m, _one_round),
    "1f1b": Published(lambda p, v, m: 3 * (m + p - 1), lambda p, v, m: min(p, m), _one_round),
    "looped_bfs": Published(lambda p, v, m: 3 * (v * m + p - 1), lambda p, v, m: v * m),
    "interleaved_1f1b": Published(
        lambda p, v, m: 3 * (v * m + p - 1),
        lambda p, v, m: min(v * m, (v - 1) * p + 2 * (p - 1) + 1),
    ),
    "zb_h1": Published(lambda p, v, m: 3 * m + p - 1, lambda p, v, m: p),
    "zb_1p": Published(lambda p, v, m: 3 * m + p - 1, lambda p, v, m: p),
    "zb_h2": Published(
        lambda p, v, m: 3 * m + p - 1, lambda p, v, m: 2 * p - 1, lambda p: 2 * p - 1
    ),
    "zbv": Published(lambda p, v, m: 6 * m + p - 1, lambda p, v, m: 2 * p, lambda p: 2 * p - 1),
    "v_half": Published(
        lambda p, v, m: 6 * m + 3 * p,
        lambda p, v, m: 2 * ((p + 2) // 2),
        lambda p: 2 * p,
        about=True,
    ),
    "v_min": Published(
        lambda p, v, m: 6 * m + 4 * p, lambda p, v, m: 2 * ((p + 4) // 3), about=True
    ),
    "dualpipe": Published(
        lambda p, v, m: 3 * m + 2 * (p // 2 - 1), lambda p, v, m: p + 1, lambda p: 2 * p
    ),
    "dualpipev": Published(
        lambda p, v, m: 6 * m + 2 * (p - 1), lambda p, v, m: 2 * p + 1, lambda p: 2 * p
    ),
}
CASES: tuple[tuple[str, int, dict[str, object]], ...] = (
    ("no_pipelining", 1, {}),
    ("gpipe", 1, {}),
    ("1f1b", 1, {}),
    ("looped_bfs", 2, {}),
    ("interleaved_1f1b", 2, {}),
    ("interleaved_1f1b", 2, {"lean": True}),
    ("interleaved_1f1b", 4, {}),
    ("1f1b_overlap", 1, {}),
    ("interleaved_1f1b_overlap", 2, {}),
    ("zb_1p", 1, {}),
    ("zb_h1", 1, {}),
    ("zb_h2", 1, {}),
    ("interleaved_zb", 1, {}),
    ("interleaved_zb", 2, {}),
    ("zbv", 2, {}),
    ("v_half", 2, {}),
    ("v_min", 2, {}),
    ("dualpipe", 2, {}),
    ("dualpipev", 2, {}),
    ("auto", 1, {}),
    ("auto", 2, {}),
)
NOTES = (
    "Time is in F of one chunk.  Bubble = 1 - busy / (P makespan).  Peak = the most activations "
    "(stage and microbatch pairs, released",
    "at W) on any device.  Published figures stand where the literature gives them for that M; "
    '"~" marks what it gives as a limit.',
    "torch: its own generator's order under the same simulator; - where it has none, or refuses "
    "this M.  torch's Schedule1F1B runs the",
    "order of 1f1b, but the order it reports leaves out the last rank's forward of microbatch 0, "
    "so there is nothing to simulate.",
    "zb_h2's own claim is the span of a device (no bubble between its first and last action), "
    "which makespan does not show.",
)


def main() -> None:
    """Print the table."""
    parser = Command(__doc__)
    options = parser.parse_args()
    rows = [_row(name, p, v, m, extra) for name, v, extra in CASES for p, m in SIZES]
    title = "The catalogue, with F = I = W = 1"
    made = [f"jaxpipe against torch {torch.__version__}; simulated, so the machine does not matter"]
    Result(title=title, machine=made, columns=COLUMNS, rows=rows, notes=NOTES).write(options.output)


def _row(
    name: str, devices: int, chunks: int, microbatches: int, extra: dict[str, object]
) -> tuple[str, ...]:
    ours = jp.schedules.build(
        name, devices=devices, microbatches=microbatches, chunks=chunks, **extra
    )
    theirs = (
        torch_table(name, devices=devices, chunks=chunks, microbatches=microbatches)
        if name in CLASSES
        else None
    )
    label = name + "".join(f" {key}" for key in extra)
    sizes = (str(devices), str(chunks), str(microbatches))
    return (
        label,
        *sizes,
        *_measured(ours),
        *_measured(theirs),
        *_published(name, devices, chunks, microbatches),
    )


def _measured(schedule: jp.Schedule | None) -> tuple[str, str, str]:
    if schedule is None:
        return "-", "-", "-"
    timeline = jp.simulate(schedule)
    return str(timeline.makespan), f"{timeline.bubble:.1%}", str(max(timeline.peak_activations))


def _published(name: str, p: int, v: int, m: int) -> tuple[str, str]:
    known = PUBLISHED.get(name)
    multiple = m % p == 0 or not name.startswith("interleaved")
    even = m % 2 == 0 or name != "dualpipe"
    if known is None or m < known.least_m(p) or not (multiple and even):
        return "-", "-"
    return f"{'~' if known.about else ''}{known.makespan(p, v, m)}", str(known.peak(p, v, m))


if __name__ == "__main__":
    main()
