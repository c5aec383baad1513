"""Whether a device's memory is enough for the rest of a partial schedule, whatever comes next."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..engine.job_shop import JobShop

Numbers: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]


class Banker(NamedTuple):
    """Whether memory is left for the rest: the microbatches in flight can be finished one after the
    other (Dijkstra's banker).
    """

    begins: Numbers  # nodes that take memory
    # of each of them, the nodes after which what it took can be released at once
    needs: tuple[tuple[int, ...], ...]
    member: Numbers  # [begins, devices]
    device: Numbers
    cap: int
    microbatches: Numbers

    @classmethod
    def of(cls, shop: JobShop) -> Banker:
        """The banker of a job shop with a cap."""
        begins = [n for n, node in enumerate(shop.nodes) if node.begins]
        release = {node.stage: n for n, node in enumerate(shop.nodes) if node.releases}
        needs = tuple(
            tuple(
                a.source
                for a in shop.arcs
                if a.target == release[shop.nodes[n].stage] and not a.lag
            )
            for n in begins
        )
        device = np.array([shop.nodes[n].device for n in begins])
        member = (device[:, None] == np.arange(shop.devices)).astype(np.int64)
        assert shop.cap is not None
        return cls(np.array(begins), needs, member, device, shop.cap, np.arange(shop.microbatches))

    def unsafe(self, counts: Numbers) -> Flags:
        """Per node, whether its next action would take memory that an earlier microbatch needs."""
        begun = counts[:, self.begins][:, :, None]
        released = np.stack([counts[:, need].min(1) for need in self.needs], 1)[:, :, None]
        missing = begun <= self.microbatches
        held = np.maximum(0, begun - np.maximum(released, self.microbatches)) + missing
        total = np.einsum("rnm,nd->rdm", held, self.member)[:, self.device]
        # One more begins: it is held from its own microbatch on down, and is no longer missing at
        # its own.
        more = (begun >= self.microbatches).astype(np.int64) - (begun == self.microbatches)
        found = np.zeros(counts.shape, bool)
        found[:, self.begins] = (total + more > self.cap).any(2)
        return found
