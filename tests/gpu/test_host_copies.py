"""The copies to the host that the doctor times are in the GPU program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpipe.doctor.machine import moved

from .programs import gpu_marks, gpu_mesh

pytestmark = gpu_marks()
HOST = "f32[1024]{0:S(5)}"


def text_of(function: Any, count: int) -> str:
    """The compiled program of so many arrays."""
    here = NamedSharding(gpu_mesh((1,), ("x",)), PartitionSpec())
    each = jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=here)
    return str(jax.jit(function).lower((each,) * count).compile().as_text())


def test_both_arrays_are_copied():
    """Described devices know no inputs in the host's memory: the second copy is on the device."""
    text = text_of(moved, 2)
    (result,) = (line for line in text.splitlines() if "ROOT" in line)
    assert f"({HOST}, f32[1024]{{0}}) tuple(%copy-done" in result
    assert text.count(" copy-done(") + text.count(" copy(") == 2


def test_a_copy_that_comes_back_is_left_out():
    """Its time is that of a copy on the device: more than 800 GB/s."""

    def there_and_back(arrays: tuple[Any]) -> Any:
        return jax.device_put(
            jax.device_put(arrays[0], jax.memory.Space.Host), jax.memory.Space.Device
        )

    assert HOST not in text_of(there_and_back, 1)
