"""Where stages are placed: which device holds which stage, by name or one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from ..errors import MAX_DEVICES, MAX_STAGES, ScheduleError, quoted, set_typed, typed


@dataclass(frozen=True)
class Placement:
    """Stage -> device(s).  `devices_of[s]` is a tuple: one device, or two in a bidirectional
    pipeline.

    >>> Placement.loop(devices=2, chunks=2).stage_to_device
    (0, 1, 0, 1)
    >>> Placement.vee(devices=2).stage_to_device
    (0, 1, 1, 0)
    """

    devices_of: tuple[tuple[int, ...], ...]
    num_devices: int

    def __post_init__(self) -> None:
        """ScheduleError for a value of another type, or one that is far too large.  `check` finds
        devices that do not exist.
        """
        set_typed(self, ScheduleError)
        devices = self.num_devices
        _require_size(devices, len(self.devices_of) // max(1, devices))

    @classmethod
    @typed()
    def loop(cls, *, devices: int, chunks: int = 1) -> Placement:
        """Stage s on device s mod P (Megatron's interleaving, Narayanan et al. 2021, figure 4)."""
        _require_size(devices, chunks)
        return cls(tuple((s % devices,) for s in range(devices * chunks)), devices)

    @classmethod
    @typed()
    def vee(cls, *, devices: int, chunks: int = 2) -> Placement:
        """Up the devices with the first chunk, down with the second, and so on (ZB-V, Qi et al.
        2024, figure 5).
        """
        _require_size(devices, chunks)
        up = tuple((d,) for d in range(devices))
        legs = (up if v % 2 == 0 else up[::-1] for v in range(chunks))
        return cls(tuple(chain.from_iterable(legs)), devices)

    @classmethod
    @typed()
    def bidirectional(cls, *, devices: int) -> Placement:
        """Stage s on devices s and P - 1 - s (DualPipe, DeepSeek-V3, figure 5)."""
        _require_size(devices, 1)
        return cls(tuple((s, devices - 1 - s) for s in range(devices)), devices)

    @classmethod
    @typed()
    def explicit(
        cls, stage_to_device: Sequence[int | Sequence[int]], *, devices: int | None = None
    ) -> Placement:
        """Any map from stage to device; an entry is a device or a sequence of them.  ScheduleError
        on a negative or missing device.
        """
        entries = tuple((e,) if isinstance(e, int) else tuple(e) for e in stage_to_device)
        bad = [stage for stage, each in enumerate(entries) if not each or min(each) < 0]
        if bad:
            why = "have no device, or a negative one; give every stage a device >= 0"
            raise ScheduleError(f"stages {quoted(bad)} {why}")
        highest = max(chain.from_iterable(entries), default=-1)
        count = 1 + highest if devices is None else devices
        most = max(count, 1 + highest)
        _require_size(most, len(entries) // max(1, most))
        if highest >= count:
            where = f"a stage is placed on device {quoted(highest)}"
            raise ScheduleError(f"{where}, but there are only {count} devices")
        return cls(entries, count)

    @property
    def num_stages(self) -> int:
        """S, the number of stages."""
        return len(self.devices_of)

    @property
    def is_bidirectional(self) -> bool:
        """True where some stage is on more than one device."""
        return any(len(e) > 1 for e in self.devices_of)

    @property
    def stage_to_device(self) -> tuple[int | tuple[int, ...], ...]:
        """Per stage, its device; a tuple of devices for a stage that is on several."""
        return tuple(e[0] if len(e) == 1 else e for e in self.devices_of)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Per device, its stages in chunk order.

        Chunk order is model order, but in a bidirectional placement the stage that lists the device
        first comes first.
        """
        table: list[list[tuple[int, int]]] = [[] for _ in range(self.num_devices)]
        for stage, devices in enumerate(self.devices_of):
            for rank, device in enumerate(devices):
                if 0 <= device < self.num_devices and device not in devices[:rank]:
                    table[device].append((rank, stage))
        return tuple(tuple(stage for _, stage in sorted(row)) for row in table)

    @property
    def num_chunks(self) -> int:
        """V, the largest number of stages on one device."""
        return max((len(row) for row in self.stages_of), default=0)

    @typed()
    def chunk_of(self, stage: int, device: int) -> int:
        """The chunk number that `stage` has on `device`; ScheduleError if it is not there."""
        if not 0 <= device < self.num_devices or stage not in self.stages_of[device]:
            where = f"stage {quoted(stage)} is not on device {quoted(device)}"
            raise ScheduleError(where)
        return self.stages_of[device].index(stage)


def _require_size(devices: int, chunks: int) -> None:
    """ScheduleError for fewer devices than none, or for far too many stages."""
    sizes = f"devices={quoted(devices)} and chunks={quoted(chunks)}"
    if devices < 0:
        raise ScheduleError(f"devices={quoted(devices)} must be 0 or more")
    if devices > MAX_DEVICES or max(1, devices) * chunks > MAX_STAGES:
        most = f"a table has at most {MAX_DEVICES:,} devices and {MAX_STAGES:,} stages"
        raise ScheduleError(f"{sizes} are too many; {most}")
