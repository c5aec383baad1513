"""Published numbers of TPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Assumed bytes of a transfer: 4096 tokens of width 4096 in bfloat16.
TRANSFER = 2**25


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of device.

    Args:
        name: as people call it.
        kind: `device_kind` of JAX.
        flops: floating point operations a second, of bfloat16 matmuls.
        bandwidth: bytes of memory a second.
        memory: bytes of memory.
        link: bytes a second to a neighbour on the torus, in one direction.
    """

    name: str
    kind: str
    flops: float
    bandwidth: float
    memory: float
    link: float

    @property
    def hop(self) -> float:
        """Seconds of a transfer of `TRANSFER` bytes to a neighbour."""
        return TRANSFER / self.link

    @classmethod
    def of(cls, mesh: Any) -> Chip | None:
        """The kind of the devices of a `jax.sharding.Mesh`; None if it is not known, or if there
        are several.
        """
        kinds = {getattr(device, "device_kind", "") for device in mesh.devices.flat}
        return next((chip for chip in CHIPS if {chip.kind} == kinds), None)


# Austin et al., How to Scale Your Model (2025), the table of TPUs.
CHIPS = (
    Chip(
        name="v5e",
        kind="TPU v5 lite",
        flops=1.97e14,
        bandwidth=8.1e11,
        memory=16e9,
        link=4.5e10,
    ),
    Chip(name="v5p", kind="TPU v5", flops=4.59e14, bandwidth=2.8e12, memory=96e9, link=9e10),
    Chip(
        name="v6e",
        kind="TPU v6 lite",
        flops=9.2e14,
        bandwidth=1.6e12,
        memory=32e9,
        link=9e10,
    ),
)
