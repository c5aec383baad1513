"""One check in a process of its own: `python -m jaxpipe.doctor.child CHECK SCOPE`.

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

from .findings import Found, Scope, at
from .run import MARK

AXIS = "pipe"
_COUNT = "xla_force_host_platform_device_count"


def main(name: str, facts: str) -> None:
    """Start JAX for the scope, run the check and print its findings."""
    scope = Scope(**json.loads(facts))
    at("the start of JAX")
    mesh = make_mesh(scope)
    module, function, *more = name.split(":")
    at(function)
    found: Found = getattr(import_module(module), function)(scope, mesh, *more)
    found = replace(found, kind=str(mesh.devices.flat[0].device_kind))
    print(MARK + json.dumps(asdict(found)), flush=True)


def make_mesh(scope: Scope) -> Mesh:
    """The devices in a row; virtual ones where there are only CPUs."""
    here = None if scope.devices is None else -(-scope.devices // scope.processes)
    if here is not None and _COUNT not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", here)
    if scope.coordinator is not None:
        jax.distributed.initialize(scope.coordinator, scope.processes, scope.process)
    found = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if here is not None and scope.processes > 1:
        found = [
            device
            for process in range(scope.processes)
            for device in [d for d in found if d.process_index == process][:here]
        ]
    count = len(found) if scope.devices is None else scope.devices
    if count > len(found):
        raise SystemExit(f"there are {len(found)} devices; give --devices {len(found)} or fewer")
    return Mesh(np.array(found[:count]), (AXIS,))


if __name__ == "__main__":
    main(*sys.argv[1:])
