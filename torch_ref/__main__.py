"""Run a table, or a training, from files: `python -m torch_ref --help`.

Exit status: 0 good, 1 what was given is wrong (the reason is printed), 2 bad usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

from .errors import TorchRefError
from .executor import run
from .files import batches, load_arrays, load_config, save_arrays
from .models import build, names
from .optim import SGD, AdamW, Optimizer, Rate, Warmup, WarmupCosine
from .training import train

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def main(arguments: list[str] | None = None) -> int:
    """The command; gives its exit status."""
    options = _parser().parse_args(arguments)
    try:
        summary = _train(options) if options.optimizer else _run(options)
    except (TorchRefError, OSError, json.JSONDecodeError) as error:
        print(f"torch_ref: {error}", file=sys.stderr)
        return 1
    print(json.dumps(summary))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_ref",
        description="Run a schedule table on a model with torch autograd; prints losses as JSON, "
        "writes gradients as .npz.",
    )
    parser.add_argument("--table", required=True, help="the schedule, torch's compute-only CSV")
    parser.add_argument(
        "--weights",
        required=True,
        help=".npz, arrays named by path: first/wte, stages/attn/qkv/kernel, ...",
    )
    parser.add_argument(
        "--batch",
        required=True,
        help=".npz, arrays [rows, ...]; with --optimizer [steps, rows, ...]",
    )
    parser.add_argument("--model", required=True, choices=names())
    parser.add_argument(
        "--config",
        required=True,
        help='JSON of the model\'s fields: {"num_stages": 4, "width": 32}',
    )
    parser.add_argument(
        "--out",
        required=True,
        help=".npz to write: gradients; with --optimizer the trained weights",
    )
    parser.add_argument(
        "--dtype",
        choices=sorted(_DTYPES),
        help="cast weights and floating batch entries (default: as they are)",
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", help="rows of each microbatch (default: equal)"
    )
    parser.add_argument("--slices", type=int, default=1, help="slices of each sequence")
    parser.add_argument(
        "--time", nargs="+", default=[], help="arrays of the batch that slices cut along axis 1"
    )
    parser.add_argument("--loss-scale", type=float, default=1.0)
    parser.add_argument(
        "--optimizer",
        help='train instead; JSON: {"name": "adamw" or "sgd", "rate": R, "weight_decay": 0.1, '
        '"no_decay": ["*/bias"], "clip": 1.0, ...}, '
        'where R is 0.001, a list with one a step, {"peak": 0.001, "steps": 10} or {"peak": '
        '0.001, "warmup_steps": 10, "decay_steps": 100}',
    )
    return parser


def _common(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "weights": load_arrays(options.weights),
        "dtype": _DTYPES.get(options.dtype),
        "rows": options.rows,
        "loss_scale": options.loss_scale,
        "slices": options.slices,
        "time": options.time,
    }


def _run(options: argparse.Namespace) -> dict[str, Any]:
    model = build(options.model, load_config(options.config))
    result = run(
        Path(options.table).read_text(), model, load_arrays(options.batch), **_common(options)
    )
    save_arrays(options.out, result.grads)
    return {
        "loss": result.loss,
        "losses": result.losses.tolist(),
        "counts": None if result.counts is None else result.counts.tolist(),
        "peak_activations": list(result.peak_activations),
    }


def _train(options: argparse.Namespace) -> dict[str, Any]:
    model = build(options.model, load_config(options.config))
    optimizer = read_optimizer(load_config(options.optimizer))
    stream = batches(load_arrays(options.batch))
    trained = train(
        Path(options.table).read_text(), model, stream, optimizer=optimizer, **_common(options)
    )
    save_arrays(options.out, trained.weights)
    return {
        "losses": trained.losses.tolist(),
        "grad_norms": trained.grad_norms.tolist(),
        "rates": trained.rates.tolist(),
    }


def read_optimizer(config: dict[str, Any]) -> Optimizer:
    """Make an optimizer of its JSON form; TorchRefError says what does not fit."""
    kinds: dict[str, type[Any]] = {"adamw": AdamW, "sgd": SGD}
    kind = kinds.get(config.get("name", ""))
    if kind is None:
        raise TorchRefError(
            f'the optimizer\'s "name" must be adamw or sgd, not {config.get("name")!r}'
        )
    known = [field.name for field in dataclasses.fields(kind)]
    unknown = [key for key in config if key not in [*known, "name"]]
    if unknown or "rate" not in config:
        raise TorchRefError(
            f"an optimizer needs a rate, and its fields are {', '.join(known)}; not known: "
            f"{unknown}"
        )
    given = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in config.items()
        if key != "name"
    }
    optimizer: Optimizer = kind(**{**given, "rate": _read_rate(config["rate"])})
    return optimizer


def _read_rate(rate: Any) -> Rate:
    if isinstance(rate, int | float):
        return float(rate)
    if isinstance(rate, list):
        return [float(r) for r in rate]
    kind = WarmupCosine if "decay_steps" in rate else Warmup
    try:
        return kind(**rate)
    except TypeError as error:
        raise TorchRefError(f"the rate {rate} does not fit: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
