"""One check in a process of its own: `python -m jaxpipe.doctor CHECK SCOPE OPTIONS`.

It prints its findings as one line of JSON, after `MARK`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from importlib import import_module

import jax
import numpy as np
from jax.sharding import Mesh

from .run import MARK, Findings, Scope, at

_AXIS = "pipe"
_COUNT = "xla_force_host_platform_device_count"


def main(check: str, settings: str, options: str) -> None:
    """Start JAX for the scope, run the check and print its findings."""
    scope = Scope(**json.loads(settings))
    at("the start of JAX")
    mesh = make_mesh(scope)
    module, function = check.split(":")
    at(function)
    name = module if "." in module else f"jaxpipe.doctor.{module}"
    findings: Findings = getattr(import_module(name), function)(scope, mesh, **json.loads(options))
    findings = replace(findings, kind=str(mesh.devices.flat[0].device_kind))
    print(MARK + json.dumps(asdict(findings)), flush=True)


def make_mesh(scope: Scope) -> Mesh:
    """The devices in a row; virtual ones where there are only CPUs."""
    each = None if scope.devices is None else -(-scope.devices // scope.processes)
    if each is not None and _COUNT not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", each)
    if scope.coordinator is not None:
        jax.distributed.initialize(scope.coordinator, scope.processes, scope.process)
    devices = [
        device for process in range(scope.processes) for device in jax.local_devices(process)[:each]
    ]
    count = scope.devices or len(devices)
    if count > len(devices):
        raise SystemExit(
            f"there are {len(devices)} devices; give --devices {len(devices)} or fewer"
        )
    return Mesh(np.array(devices[:count]), (_AXIS,))


if __name__ == "__main__":
    main(*sys.argv[1:])
