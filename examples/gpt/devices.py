"""Devices to train on: real accelerators where there are enough of them, virtual CPU devices
otherwise.
"""

from __future__ import annotations

import os
from glob import glob
from importlib.util import find_spec

import jax
from jax.sharding import Mesh


def find(count: int) -> list[jax.Device]:
    """`count` GPUs or TPUs if JAX sees that many, else `count` virtual devices of the CPU; prints
    which.

    Call it before anything else uses JAX: the number of virtual devices is fixed when JAX starts
    its CPU backend.
    """
    jax.config.update("jax_num_cpu_devices", count)
    if (
        find_spec("jax_cuda13_plugin")
        and not glob("/dev/nvidia[0-9]*")
        and "JAX_PLATFORMS" not in os.environ
    ):
        # the plugin is there to compile for GPUs only; starting it would print an error
        jax.config.update("jax_platforms", "cpu")
    devices = jax.devices()
    if len(devices) < count:
        devices = jax.devices("cpu")
        jax.config.update("jax_default_device", devices[0])
    print(f"devices: {devices[:count]}")
    return devices[:count]


def mesh(devices: list[jax.Device], *, pipe: int, data: int) -> Mesh:
    """A pipe x data mesh; neighbours along the pipe axis are `data` devices apart."""
    return jax.make_mesh((pipe, data), ("pipe", "data"), devices=devices)
