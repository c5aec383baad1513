"""`jaxpipe plan`: the fastest pipelines of a model that fit, from its sizes or from a file of
costs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from typing import Any

from ..lowering.target import Target
from ..planner.layer_cost import LayerCost, read_layer_costs
from ..planner.mesh import command_of, plan_mesh
from ..planner.plan import plan
from ..planner.result import COLUMNS, PipelinePlan, Plans
from ..planner.transformer import Transformer
from ..render import to_html, to_svg
from .arguments import UsageError, file_path, read_text
from .terminal import Terminal

_PLANS = 5
_SHOWN = 12  # of what was left out


def plan_command(arguments: argparse.Namespace, terminal: Terminal) -> bool:
    """Print plans side by side, the reasons of the best one, and what was left out."""
    if arguments.output is not None and not arguments.output.lower().endswith((".html", ".svg")):
        raise UsageError(
            f"no picture is known for {arguments.output}; give a file that ends in .html or .svg"
        )
    if arguments.model is not None:
        return _published(arguments, terminal)
    missing = [n for n in ("devices", "microbatches") if getattr(arguments, n) is None]
    if missing:
        raise UsageError(
            f"give {' and '.join(f'--{name}' for name in missing)}, or --model NAME --gpus N "
            "--batch N --memory SIZE, which chooses them"
        )
    layers, costs, transfer = (
        _from_file(arguments.costs) if arguments.costs else _from_sizes(arguments)
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
            slices=arguments.slices or (1,),
            remat=arguments.remat,
            offload=(None,) if arguments.no_offload else (None, "residuals"),
            within=arguments.within,
            search=arguments.search,
            most=_PLANS,
            progress=progress,
            mesh=Target(communicates=(arguments.tensor or 1) > 1),
        )
    _tell(plans, arguments, terminal, estimated=not arguments.costs)
    return True


def _published(arguments: argparse.Namespace, terminal: Terminal) -> bool:
    """Plans of a published model with the mesh chosen, and the command that runs the best."""
    missing = [n for n in ("gpus", "batch", "memory") if getattr(arguments, n) is None]
    if missing:
        raise UsageError(f"--model needs {', '.join(f'--{name}' for name in missing)} too")
    sizes = (f.name for f in fields(Transformer) if f.name not in ("context", "flops", "tensor"))
    own = ("layers", "devices", "microbatches", "slices", "costs", "search", "no_offload", *sizes)
    if given := [n for n in own if getattr(arguments, n, None)]:
        flags = ", ".join(f"--{n.replace('_', '-')}" for n in given)
        raise UsageError(f"--model {arguments.model} has its own sizes and mesh; leave out {flags}")
    name, context = arguments.model, int(arguments.context or 8192)
    tensor = (1, 2, 4, 8) if arguments.tensor is None else (int(arguments.tensor),)
    with terminal.counting(f"planning {name}") as progress:
        plans = plan_mesh(
            name,
            gpus=arguments.gpus,
            batch=arguments.batch,
            context=context,
            memory=arguments.memory,
            tensor=tensor,
            schedules=arguments.schedules,
            chunks=arguments.chunks,
            remat=arguments.remat,
            within=arguments.within,
            progress=progress,
            flops=arguments.flops or Transformer.flops,
        )
    command = command_of(name, plans.best, batch=arguments.batch, context=context)
    _tell(plans, arguments, terminal, estimated=True, command=command)
    return True


def _tell(
    plans: Plans,
    arguments: argparse.Namespace,
    terminal: Terminal,
    *,
    estimated: bool,
    command: str | None = None,
) -> None:
    """Draw the best plan, and print all as JSON or as a table."""
    if arguments.output is not None:
        _draw(plans.best, arguments.output)
        terminal.complain(f"wrote {arguments.output}")
    if arguments.json:
        left = [{"plan": r.what, "why": r.why, "seconds": r.seconds} for r in plans.rejected]
        found = {"plans": [p.facts() for p in plans], "rejected": left, "prices": plans.prices}
        terminal.write(json.dumps(found | ({} if command is None else {"command": command})))
        return
    _print(plans, terminal, estimated=estimated)
    if command is not None:
        terminal.write(command)


def _print(plans: Plans, terminal: Terminal, *, estimated: bool) -> None:
    terminal.table(COLUMNS, plans.rows(), left=2, best=(0,))
    terminal.write(f"best: {plans.best.why}")
    terminal.write(f"prices: {plans.prices}")
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
        draw(best.timeline, title=f"{best.label}: {best.layout}"), encoding="utf-8"
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
    given = {
        field.name: value
        for field in fields(Transformer)
        if (value := getattr(arguments, field.name, None)) is not None
    }
    model = Transformer(**given)
    model = model if arguments.bandwidth else model.on(arguments.devices)
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
