"""Devices that have the same stages, and what they exchange: sums of gradients, and parameters that
they split among them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Devices that have the same stages and rows of their own.

    Attributes:
        axis: of the mesh, along which they are.
        count: of them.
        fsdp: whether they split parameters, gradients and optimizer state: costs of layers are then
            of a device's part.
        bandwidth: bytes a second that a device sends, and as many that it receives, in gathers and
            sums among them.
    """

    axis: str = "data"
    count: int = 1
    fsdp: bool = False
    bandwidth: float = 5e10

    @property
    def shards(self) -> int:
        """The number of parts of each parameter."""
        return self.count if self.fsdp else 1

    def gather(self, size: float) -> float:
        """Seconds in which a device gathers parameters of which it has so many bytes."""
        return (self.shards - 1) * size / self.bandwidth

    def reduce(self, size: float) -> float:
        """Seconds in which gradients are summed of which a device keeps so many bytes: scattered,
        or also gathered again.
        """
        sent = self.count - 1 if self.fsdp else 2 * (self.count - 1) / self.count
        return sent * size / self.bandwidth
