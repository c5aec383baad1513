"""`jaxpipe plan`: the fastest pipelines of a model that fit, from its sizes or from a file of
costs.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from ..errors import quoted
from ..lowering.target import Target
from ..planner.layer_cost import LayerCost, read_layer_costs
from ..planner.plan import SCHEDULES, plan
from ..planner.result import COLUMNS, PipelinePlan, Plans
from ..planner.transformer import Transformer
from ..render import to_html, to_svg
from .arguments import UsageError, file_path, read_text, real_number, whole_number
from .terminal import Terminal

_UNITS = {
    "": 1.0,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KIB": 2.0**10,
    "MIB": 2.0**20,
    "GIB": 2.0**30,
    "TIB": 2.0**40,
}
_SHOWN = 12  # of what was left out


def size(text: str) -> float:
    """An argument that is a number of bytes, `80GB` or `74.5GiB`, for argparse."""
    match = re.fullmatch(r"([0-9]+\.?[0-9]*(?:[eE][0-9]+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} is not a size; write 80GB, 74.5GiB or a number of bytes"
        )
    return float(match[1]) * _UNITS[match[2].upper()]


def remat(text: str) -> str | None:
    """`none`, `full` or `stages`, for argparse."""
    if text not in ("none", "full", "stages"):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not none, full or stages")
    return None if text == "none" else text


def add_plan(parser: argparse.ArgumentParser) -> None:
    """The arguments of `jaxpipe plan`."""
    parser.description = (
        "The fastest pipelines of a model that fit: layers to stages, schedule, chunks, remat; a "
        "step's seconds and a device's memory.  "
        "The model is given by its sizes (a decoder-only transformer; times are then estimates) "
        "or by a file of costs."
    )
    parser.add_argument(
        "-P",
        "--devices",
        type=whole_number,
        required=True,
        metavar="P",
        help="devices along the pipeline",
    )
    parser.add_argument(
        "-M",
        "--microbatches",
        type=whole_number,
        required=True,
        metavar="M",
        help="microbatches of a step",
    )
    parser.add_argument(
        "--memory", type=size, metavar="SIZE", help="of a device, e.g. 80GB (default: no limit)"
    )
    vary = parser.add_argument_group("what may vary")
    vary.add_argument(
        "--schedules", nargs="+", metavar="NAME", help=f"default: {' '.join(SCHEDULES)}"
    )
    vary.add_argument(
        "-V",
        "--chunks",
        type=whole_number,
        nargs="+",
        default=[1, 2, 4],
        metavar="V",
        help="default: 1 2 4",
    )
    vary.add_argument(
        "--remat",
        type=remat,
        nargs="+",
        default=[None, "full"],
        metavar="none|full|stages",
        help="default: none full",
    )
    vary.add_argument(
        "--search",
        type=real_number,
        default=0.0,
        metavar="SECONDS",
        help="search for a shorter table (needs jaxpipe[solver])",
    )
    model = parser.add_argument_group("model by its sizes")
    model.add_argument("--layers", type=whole_number, metavar="N")
    model.add_argument("--width", type=real_number, metavar="W")
    model.add_argument("--vocab", type=real_number, metavar="N")
    model.add_argument(
        "--context",
        type=real_number,
        default=4096.0,
        metavar="TOKENS",
        help="of a sequence (default: 4096)",
    )
    model.add_argument(
        "--rows",
        type=real_number,
        default=1.0,
        metavar="N",
        help="sequences of a microbatch (default: 1)",
    )
    model.add_argument(
        "--ffn", type=real_number, metavar="W", help="width of the MLP (default: 4 times the width)"
    )
    model.add_argument("--gated", action="store_true", help="the MLP has three matrices (SwiGLU)")
    model.add_argument(
        "--kv-share",
        type=real_number,
        default=1.0,
        metavar="X",
        help="heads of keys / heads (default: 1)",
    )
    model.add_argument(
        "--tensor",
        type=real_number,
        default=1.0,
        metavar="N",
        help="devices that share a layer (default: 1)",
    )
    model.add_argument(
        "--shards",
        type=real_number,
        default=1.0,
        metavar="N",
        help="devices that share the optimizer's state (default: 1)",
    )
    model.add_argument(
        "--flops",
        type=real_number,
        default=4e14,
        metavar="RATE",
        help="a second that matmuls reach (default: 4e14)",
    )
    model.add_argument(
        "--bandwidth",
        type=real_number,
        default=5e10,
        metavar="RATE",
        help="bytes a second of a hop (default: 5e10)",
    )
    costs = parser.add_argument_group("model by a file of costs")
    costs.add_argument(
        "--costs",
        metavar="FILE",
        help='JSON: {"layers": "Et*80,L", "costs": {"t": {"forward": 0.01, ...}, ...}, '
        '"transfer": 0}',
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="draw the best plan: a file that ends in .html or .svg",
    )


def plan_command(arguments: argparse.Namespace, terminal: Terminal) -> bool:
    """Print plans side by side, the reasons of the best one, and what was left out."""
    layers, costs, transfer = (
        _from_file(arguments.costs) if arguments.costs else _from_sizes(arguments)
    )
    if arguments.output is not None and not arguments.output.lower().endswith((".html", ".svg")):
        raise UsageError(
            f"no picture is known for {arguments.output}; give a file that ends in .html or .svg"
        )
    with terminal.counting("planning") as progress:
        plans = plan(
            layers,
            costs,
            devices=arguments.devices,
            microbatches=arguments.microbatches,
            memory=arguments.memory,
            transfer=transfer,
            schedules=arguments.schedules,
            chunks=arguments.chunks,
            remat=arguments.remat,
            search=arguments.search,
            progress=progress,
            mesh=Target(communicates=arguments.tensor > 1),
        )
    if arguments.output is not None:
        _draw(plans.best, arguments.output)
        terminal.complain(f"wrote {arguments.output}")
    if arguments.json:
        facts = [{"plan": r.what, "why": r.why, "seconds": r.seconds} for r in plans.rejected]
        terminal.write(json.dumps({"plans": [p.facts() for p in plans], "rejected": facts}))
        return True
    _print(plans, terminal, estimated=not arguments.costs)
    return True


def _print(plans: Plans, terminal: Terminal, *, estimated: bool) -> None:
    terminal.table(COLUMNS, plans.rows(), left=2, best=(0,))
    terminal.write(f"best: {plans.best.why}")
    if estimated:
        terminal.write(
            "times are estimates from flops at a stated rate; measure with jaxpipe.measure"
        )
    if plans.rejected:
        lines = [f"  {r}" for r in plans.rejected[:_SHOWN]]
        lines += (
            [f"  ... and {len(plans.rejected) - _SHOWN} more"]
            if len(plans.rejected) > _SHOWN
            else []
        )
        terminal.write("\n".join(["left out:", *lines]))


def _draw(best: PipelinePlan, output: str) -> None:
    draw = to_html if output.lower().endswith(".html") else to_svg
    file_path(output).write_text(
        draw(best.timeline, title=f"{best.words}: {best.layout}"), encoding="utf-8"
    )


def _from_sizes(arguments: argparse.Namespace) -> tuple[str, dict[str, LayerCost], float]:
    missing = [
        f"--{name}" for name in ("layers", "width", "vocab") if getattr(arguments, name) is None
    ]
    if missing:
        raise UsageError(
            f"give {', '.join(missing)}, or --costs FILE; e.g. --layers 80 --width 8192 --vocab "
            "128256"
        )
    names = (
        "width",
        "vocab",
        "context",
        "rows",
        "ffn",
        "gated",
        "kv_share",
        "tensor",
        "shards",
        "flops",
        "bandwidth",
    )
    model = Transformer(**{name: getattr(arguments, name) for name in names})
    if arguments.layers < 1:
        raise UsageError(f"--layers must be at least 1, not {arguments.layers}")
    return f"Et*{arguments.layers},L", model.costs(), model.transfer


def _from_file(name: str) -> tuple[str, dict[str, LayerCost], float]:
    try:
        given: Any = json.loads(read_text(file_path(name)))
    except json.JSONDecodeError as error:
        raise UsageError(f"{name} is not JSON: {error}") from error
    wrong = (
        not isinstance(given, dict)
        or not isinstance(given.get("layers"), str)
        or not isinstance(given.get("costs"), dict)
    )
    if wrong:
        raise UsageError(
            f'{name} must hold {{"layers": "Et*80,L", "costs": {{"t": {{"forward": 0.01, ...}}, '
            '...}, "transfer": seconds}'
        )
    return given["layers"], read_layer_costs(given["costs"]), given.get("transfer", 0.0)
