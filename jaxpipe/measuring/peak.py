"""The roofline of a device, for costs that are estimated and not measured."""

from __future__ import annotations

from dataclasses import dataclass

from jax.extend import core

from ..jaxprs.work import count_work


@dataclass(frozen=True, kw_only=True)
class Peak:
    """What a device can do at most, for estimates by roofline (Williams et al. 2009): a block takes
    the longer of compute and memory.

    Args:
        flops: floating point operations a second.
        bandwidth: bytes of memory a second.
        link: bytes a second to the next device of the pipeline; transfers take no time where it is
            None.
        latency: seconds of a transfer besides.
    """

    flops: float
    bandwidth: float
    link: float | None = None
    latency: float = 0.0

    def seconds(self, jaxpr: core.Jaxpr, devices: int) -> float:
        """Of a block that so many devices share."""
        work = count_work(jaxpr)
        return max(work.flops / self.flops, work.bytes / self.bandwidth) / devices

    def hop(self, size: int) -> float:
        """Of a transfer of so many bytes."""
        return 0.0 if self.link is None else self.latency + size / self.link
