"""`jaxpipe plan`: the fastest pipelines of a model that fit, from its sizes or from a file of
costs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from typing import Any

from ..lowering.target import Target
from ..planner.candidate import COLUMNS, Plans
from ..planner.layer_cost import LayerCost, read_layer_costs
from ..planner.plan import plan
from ..planner.transformer import Transformer, command_of, plan_mesh
from ..render import to_html, to_svg
from .arguments import UsageError, file_path, flag, missing_flags, read_text
from .terminal import BEST, counting, print_table, save, write

_PLANS = 5
_SHOWN = 12  # of the rejected plans
_CHUNKS = (1, 2, 4)


def plan_command(arguments: argparse.Namespace) -> bool:
    """Find the fastest pipelines of a model that fit into memory.  A plan has layers of stages,
    schedule, chunks and remat, with a step's seconds and a device's memory.  The model is given by
    its sizes (a decoder-only transformer; times are then estimates) or by a file of costs.
    """
    if arguments.output is not None and not arguments.output.lower().endswith((".html", ".svg")):
        raise UsageError(
            f"no picture is known for {arguments.output}; give a file that ends in .html or .svg"
        )
    plans, command = (_of_layers if arguments.model is None else _published)(arguments)
    if arguments.output is not None:
        draw = to_html if arguments.output.lower().endswith(".html") else to_svg
        title = f"{plans.best.label}: {plans.best.layout}"
        save(file_path(arguments.output), draw(plans.best.timeline, title=title))
    if arguments.json:
        left = [{"plan": r.what, "why": r.why, "seconds": r.seconds} for r in plans.rejected]
        facts = {"plans": [p.facts() for p in plans], "rejected": left, "prices": plans.prices}
        write(json.dumps(facts | ({} if command is None else {"command": command})))
        return True
    print_table(COLUMNS, plans.rows(), left=2, styles={0: BEST})
    lines = [f"best: {plans.best.why}", f"prices: {plans.prices}"]
    if not arguments.costs:
        lines.append(
            "times are estimates from flops at a stated rate; measure with jaxpipe.measure"
        )
    if plans.rejected:
        lines += ["left out:", *(f"  {r}" for r in plans.rejected[:_SHOWN])]
    if len(plans.rejected) > _SHOWN:
        lines.append(f"  ... and {len(plans.rejected) - _SHOWN} more")
    write("\n".join(lines + ([] if command is None else [command])))
    return True


def _of_layers(arguments: argparse.Namespace) -> tuple[Plans, None]:
    """Plans of a model by its sizes, or by a file of costs."""
    if missing := missing_flags(arguments, "devices", "microbatches"):
        raise UsageError(
            f"give {' and '.join(missing)}, or --model NAME --gpus N "
            "--batch N --memory SIZE, which chooses them"
        )
    layers, costs, transfer = (
        _from_file(arguments.costs) if arguments.costs else _from_sizes(arguments)
    )
    with counting("planning") as progress:
        plans = plan(
            layers,
            costs,
            **_choices(arguments),
            devices=arguments.devices,
            microbatches=arguments.microbatches,
            transfer=transfer,
            slices=arguments.slices or (1,),
            offload=(None,) if arguments.no_offload else (None, "residuals"),
            search=arguments.search,
            most=_PLANS,
            progress=progress,
            mesh=Target(communicates=(arguments.tensor or 1) > 1),
        )
    return plans, None


def _published(arguments: argparse.Namespace) -> tuple[Plans, str]:
    """Plans of a published model with the mesh chosen, and the command that runs the best."""
    if missing := missing_flags(arguments, "gpus", "batch", "memory"):
        raise UsageError(f"--model needs {', '.join(missing)} too")
    sizes = (f.name for f in fields(Transformer) if f.name not in ("context", "flops", "tensor"))
    own = ("layers", "devices", "microbatches", "slices", "costs", "search", "no_offload", *sizes)
    if excess := [flag(name) for name in own if getattr(arguments, name, None)]:
        raise UsageError(
            f"--model {arguments.model} has its own sizes and mesh; leave out {', '.join(excess)}"
        )
    name, context = arguments.model, int(arguments.context or 8192)
    with counting(f"planning {name}") as progress:
        plans = plan_mesh(
            name,
            **_choices(arguments),
            gpus=arguments.gpus,
            batch=arguments.batch,
            context=context,
            tensor=(1, 2, 4, 8) if arguments.tensor is None else (int(arguments.tensor),),
            progress=progress,
            flops=arguments.flops or Transformer.flops,
        )
    return plans, command_of(name, plans.best, batch=arguments.batch, context=context)


def _choices(arguments: argparse.Namespace) -> dict[str, Any]:
    """The limits and the choices for `plan` and `plan_mesh`."""
    names = ("memory", "schedules", "within")
    choices = {name: getattr(arguments, name) for name in names}
    policies = arguments.remat and [None if name == "none" else name for name in arguments.remat]
    return choices | {"chunks": arguments.chunks or _CHUNKS, "remat": policies}


def _from_sizes(arguments: argparse.Namespace) -> tuple[str, dict[str, LayerCost], float]:
    if missing := missing_flags(arguments, "layers", "width", "vocab"):
        raise UsageError(
            f"give {', '.join(missing)}, or --costs FILE; e.g. --layers 80 --width 8192 --vocab "
            "128256"
        )
    names = (field.name for field in fields(Transformer))
    sizes = {name: size for name in names if (size := getattr(arguments, name, None)) is not None}
    model = Transformer(**sizes)
    model = model if arguments.bandwidth else model.on(arguments.devices)
    if arguments.layers < 1:
        raise UsageError(f"--layers must be at least 1, not {arguments.layers}")
    return f"Et*{arguments.layers},L", model.costs(), model.transfer


def _from_file(name: str) -> tuple[str, dict[str, LayerCost], float]:
    try:
        facts: Any = json.loads(read_text(name))
    except json.JSONDecodeError as error:
        raise UsageError(f"{name} is not JSON: {error}") from error
    match facts:
        case {"layers": str(layers), "costs": dict(costs)}:
            return layers, read_layer_costs(costs), facts.get("transfer", 0.0)
    raise UsageError(
        f'{name} must hold {{"layers": "Et*80,L", "costs": {{"t": {{"forward": 0.01, ...}}, '
        '...}, "transfer": seconds}'
    )
