"""Makes the table of results of what the other commands of this folder left in out/.

python -m tests.parity.report           writes benchmarks/results/parity.txt
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from .grid import virtual_devices
from .results import GRID, MUTATIONS, PEER, TABLE, TRAINING, load, sources

Entry = Mapping[str, Any]


def main() -> int:
    """Write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", default="", help="the commit whose engines were run")
    options = parser.parse_args()
    virtual_devices()
    grid = load(GRID)
    lines = [
        *_head(options.commit),
        *_grid(grid),
        *_bits(grid),
        *_peer(),
        *_training(),
        *_mutations(),
    ]
    TABLE.write_text("\n".join(line.rstrip() for line in lines) + "\n")
    print(f"wrote {TABLE}")
    return 0


def _head(commit: str) -> list[str]:
    return [
        "Parity: one table, several engines, the same numbers",
        f"engines {sources()}{f' (commit {commit})' if commit else ''}, jax {version('jax')}, "
        f"torch {version('torch')}, CPU",
        "written by `python -m tests.parity.report` of what tests.parity.grid, .peers, .training "
        "and .mutants found",
        "",
        "Errors are relative to an array's largest entry, the largest of all arrays and cases, "
        "against the un-pipelined oracle",
        "(plain JAX, float64).  step: loss and every gradient of jaxpipe's compiled program on "
        "virtual CPU devices; losses: its losses",
        "by microbatch and outputs by row, of forward-only programs; torch_ref: all of these in "
        "torch_ref, in the same precision.",
        "Limits: float64 1e-12; float32 and bfloat16 as derived in tests/parity/tolerance.py.  "
        "They grow with the number of stages: limit",
        "is the tightest of the row's cases, and of limit the largest error of any case by that "
        "case's own limit.",
        "",
    ]


# The grid


def _grid(have: Mapping[str, Entry]) -> list[str]:
    from .cases import Case, full_grid

    cases, undefined = full_grid()
    run = [case for case in cases if str(case) in have]
    missing = [case for case in cases if str(case) not in have]
    failed = [case for case in run if not have[str(case)]["passed"]]
    lines = [
        "THE GRID: pairs.  Any two values of schedule, P in 1, 2, 4, 8, V in 1, 2, 3, "
        "M in 1, 2, 3, P, 2P, 4P + 1, model and precision",
        "that one table can have are together in some case; precisions beside float64 are of the "
        "MLP",
        "",
        f"cases {len(cases)}, run {len(run)} ({len(run) / len(cases):.1%}), failed {len(failed)}; "
        f"combinations without such a table {len(undefined)}; "
        f"{sum(have[str(c)]['seconds'] for c in run) / 60:.0f} minutes of one process",
        "",
    ]

    def rows(name: str, key: Any, of: Iterable[Case]) -> list[str]:
        groups: dict[str, list[Entry]] = defaultdict(list)
        for case in of:
            groups[key(case)].append(have[str(case)])
        head = [name, "cases", "failed", "step", "losses", "torch_ref", "limit", "of limit"]
        return [*_table(head, [_row(k, group) for k, group in sorted(groups.items())]), ""]

    lines += rows("precision", lambda c: c.dtype, run)
    lines += rows(
        "float64: schedule", lambda c: c.schedule, (c for c in run if c.dtype == "float64")
    )
    lines += rows("float64: model", lambda c: c.model, (c for c in run if c.dtype == "float64"))
    lines += [
        f"FAILED {case}: {have[str(case)]['fault'] or dict(have[str(case)])}" for case in failed
    ]
    lines += _left_out(undefined, missing)
    return lines


def _row(name: str, group: Sequence[Entry]) -> list[str]:
    worst = [max(e.get(key, float("inf")) for e in group) for key in ("step", "losses", "torch")]
    limit = min(e.get("limit", float("inf")) for e in group)
    share = max(
        max(e.get(key, float("inf")) for key in ("step", "losses", "torch")) / e.get("limit", 1.0)
        for e in group
    )
    failed = str(sum(not e["passed"] for e in group))
    return [
        name,
        str(len(group)),
        failed,
        *(f"{w:.1e}" for w in worst),
        f"{limit:.1e}",
        f"{share:.1%}",
    ]


def _left_out(undefined: Sequence[Any], missing: Sequence[Any]) -> list[str]:
    """Combinations without a table, with the reason that `build` gives, and cases that were not
    run.
    """
    import jaxpipe as jp

    reasons: Counter[tuple[str, str]] = Counter()
    for case in undefined:
        try:
            case.build()
        except jp.ScheduleError as error:
            reasons[case.schedule, str(error).splitlines()[-1].strip()] += 1
    by_schedule: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for (schedule, reason), count in reasons.items():
        by_schedule[schedule].append((count, reason))
    lines = [
        "Without a table (the number of combinations, and what `build` says of one of them):",
        "",
    ]
    rows = [
        [s, str(sum(n for n, _ in found)), max(found)[1]]
        for s, found in sorted(by_schedule.items())
    ]
    lines += [*_table(["schedule", "count", "reason"], rows), ""]
    if missing:
        by_name = sorted(Counter(case.schedule for case in missing).items())
        lines += [
            "Not run:",
            "",
            *_table(["schedule", "cases"], [[name, str(count)] for name, count in by_name]),
            "",
        ]
    return lines


def _bits(have: Mapping[str, Entry]) -> list[str]:
    """Where gradients are added in the same order on the same devices, by the same kinds of action,
    bits are mostly the same.
    """
    from .cases import full_grid

    groups: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for case in full_grid()[0]:
        if "bits" in have.get(str(case), {}):
            groups[_additions(case), case.microbatches, case.model, case.dtype].append(case)
    several = [group for group in groups.values() if len(group) > 1]
    apart = [group for group in several if len({have[str(case)]["bits"] for case in group}) > 1]
    lines = [
        "THE SAME ORDER OF ADDITIONS: tables of the grid that add every stage's gradients in the "
        "same order of microbatches on the",
        "same devices, and by the same kinds of backward (B, or I and W), of one model, batch "
        "and precision.  How many are equal depends",
        "on what XLA fuses for the processor that ran them, so the count is reported, not asserted",
        "",
        f"groups of two or more {len(several)} ({sum(map(len, several))} cases), "
        f"equal bit for bit in loss and all gradients {len(several) - len(apart)}",
    ]
    if apart:
        lines.append(f"in the other {len(apart)} the last digits differ, within the errors above:")
        lines += sorted(
            {
                f"  {g[0].model} {g[0].dtype}: "
                + ", ".join(sorted({f"{c.schedule} V={c.chunks}" for c in g}))
                for g in apart
            }
        )
    return [*lines, ""]


def _additions(case: Any) -> tuple[Any, ...]:
    """For every device, the actions that add to a stage's weight gradients, in order; to a tied
    embedding's, all of the device's.
    """
    import jaxpipe as jp
    from jaxpipe.table.kinds import parts
    from jaxpipe.transforms.rewrites import merge_backward

    orders = []
    # as the lowering does: an I with its W behind it is a B
    for row in merge_backward(case.build()).rows:
        adds = [a for cell in row for a in parts(cell) if a.kind in (jp.Kind.B, jp.Kind.W)]
        stages = sorted({a.stage for a in adds})
        tied = case.model.startswith("gpt")
        orders.append(
            (tuple(adds),)
            if tied
            else tuple(tuple(a for a in adds if a.stage == s) for s in stages)
        )
    return tuple(orders)


# The other commands


def _peer() -> list[str]:
    from .peers import cases

    have, of = load(PEER), cases()
    found = [have[str(case)] for case in of if str(case) in have]
    lines = [
        "THE PEER: the same tables (MLP, float64, P = 2 and 4, a stage on one device) run by "
        "torch.distributed.pipelining in gloo",
        "processes, loss, losses by microbatch and gradients against the oracle",
        "",
        f"cases {len(of)}, run {len(found)} ({len(found) / len(of):.1%}), failed "
        f"{sum(not e['passed'] for e in found)}, "
        f"largest error {max((e.get('error', float('inf')) for e in found), default=0.0):.1e}",
    ]
    return [*lines, *(f"FAILED {e['case']}: {e['fault']}" for e in found if not e["passed"]), ""]


def _training() -> list[str]:
    from .training import RUNS, STEPS, curve_case, curve_names, run_case, spread

    have = load(TRAINING)
    rows = []
    for run in RUNS:
        e = have.get(run_case(*run))
        numbers = ["not run"] if e is None else [f"{e['first']:.4f}", f"{e['final']:.4f}"]
        numbers += (
            []
            if e is None
            else [f"{e[k]:.1e}" for k in ("losses", "last_loss", "norms", "weights")]
        )
        rows.append([" ".join(run), *numbers, *[""] * (6 - len(numbers))])
    curves = {
        name: have[curve_case(name)]["curve"] for name in curve_names() if curve_case(name) in have
    }
    lines = [
        f"TRAINING: {STEPS} steps in float64, jaxpipe + optax against torch_ref + torch.optim; "
        "relative differences (limit 1e-9).",
        "adamw: warm-up, cosine decay, clipping by global norm, weight decay with a mask; "
        "momentum: SGD with momentum 0.9",
        "",
        *_table(
            [
                "model, schedule, optimizer",
                "first loss",
                "last loss",
                "losses",
                "last",
                "norms",
                "weights",
            ],
            rows,
        ),
        "",
        f"the GPT's loss curve under {len(curves)} of {len(curve_names())} schedules: largest "
        "relative difference of any two in any step "
        f"{spread(curves.values()):.1e}",
    ]
    left = [name for name in curve_names() if name not in curves]
    return [*lines, *([f"not run: {', '.join(left)}"] if left else []), ""]


def _mutations() -> list[str]:
    have = load(MUTATIONS)
    if "drawn" not in have:
        return ["MUTATIONS: not run"]
    drawn, torch = have["drawn"], have["torch_ref"]
    ran = [e for case, e in have.items() if case.startswith("mutant")]
    stuck = [e for e in ran if e["fault"].startswith("stuck")]
    wrong = [e for e in ran if not e["passed"] and e not in stuck]
    rules = ", ".join(
        f"{rule} {n}" for rule, n in sorted(drawn["rules"].items(), key=lambda item: -item[1])
    )
    return [
        "MUTATIONS: one to three random mistakes in random and named tables",
        "",
        f"drawn {drawn['count']}: refused {drawn['refused']}, unchanged but for idles "
        f"{drawn['unchanged']}, "
        f"the same as another {drawn['doubled']}, accepted {drawn['accepted']}",
        f"refused by rule (a table may break several): {rules}",
        f"accepted, in torch_ref: ran {torch['ran']}, wrong {torch['wrong']}, largest error "
        f"{torch['error']:.1e}",
        f"accepted, in jaxpipe's compiled program: ran {len(ran)} of {drawn['accepted']} "
        f"({len(ran) / drawn['accepted']:.1%}, "
        f"in the order of a seeded shuffle), agreed {len(ran) - len(stuck) - len(wrong)}, hung "
        f"{len(stuck)}, "
        f"wrong or failed {len(wrong)}, largest error "
        f"{max((e['error'] for e in ran if e['error'] is not None), default=0.0):.1e}",
        *(f"FAILED {e}" for e in [*stuck, *wrong]),
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns, the first to the left and numbers to the right."""
    widths = [max(len(row[k]) for row in [head, *rows]) for k in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [
            row[k].ljust(w) if k == 0 or head[k] == "reason" else row[k].rjust(w)
            for k, w in enumerate(widths)
        ]
        return " " + "   ".join(cells)

    return [
        line(head),
        " " + "─" * (sum(widths) + 3 * (len(widths) - 1)),
        *(line(row) for row in rows),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
