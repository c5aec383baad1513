"""Versions with known faults in the features that a pipeline uses, with their public threads."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from .errors import PipelineError


class FaultEffect(Enum):
    """The effect of a fault."""

    WRONG = "wrong numbers"
    HANGS = "a hang"
    FAILS = "an error of XLA"
    SLOW = "lower speed"
    AVOIDED = "nothing"  # jaxpipe avoids the fault, or has a remedy


class Feature(Enum):
    """The features of a program that faults depend on."""

    ZERO_INIT = "zero-init elimination"
    GRAPHS = "CUDA graphs"
    LARGE_CLIQUES = "permutes in large cliques"
    SEVERAL_DEVICES = "several devices"
    SEVERAL_PROCESSES = "several processes"
    USER_UPDATES = "constant out-of-range updates"


@dataclass(frozen=True)
class KnownFault:
    """A fault of some versions of a package, on a platform (gpu, tpu, cpu, any).  It has a public
    thread, or lines of a program that shows it.
    """

    thread: str | None
    package: str
    versions: str
    platform: str
    feature: Feature
    effect: FaultEffect
    what: str
    workaround: str
    reproducer: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """Where to read more."""
        return self.thread or "jaxpipe/known_faults.json has a reproducer"

    def __str__(self) -> str:
        return (
            f"{self.package} {self.versions}: {self.what} ({self.effect.value}; {self.source}); "
            f"{self.workaround}"
        )


def read_faults() -> tuple[KnownFault, ...]:
    """The known faults, from known_faults.json."""
    text = (files(__package__) / "known_faults.json").read_text(encoding="utf-8")
    return tuple(
        KnownFault(
            feature=Feature(each.pop("feature")),
            effect=FaultEffect[each.pop("effect")],
            reproducer=tuple(each.pop("reproducer", ())),
            **each,
        )
        for each in json.loads(text)
    )


# The versions that jaxpipe was run with; pyproject.toml allows the same.
TESTED = {"jax": ">=0.11.2,<0.13", "jaxlib": ">=0.11.2,<0.13"}
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def installed_version(package: str) -> str | None:
    """The version of a distribution, or None; "nccl" is NVIDIA's wheel for CUDA 13 or 12."""
    for name in _NCCL if package == "nccl" else (package,):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def is_in(number: str | None, versions: str) -> bool:
    """Whether a version number is in a range such as ">=0.11,<0.13"; suffixes do not count, and an
    unknown number is in none.

    >>> is_in("0.11.0rc1", "==0.11.0"), is_in("0.11.1.dev2026", "<0.11"), is_in("0.9.2", "<0.11")
    (True, False, True)
    """
    try:
        return Version(number or "").base_version in SpecifierSet(versions)
    except InvalidVersion:
        return False


def faults_for(platform: str, features: Collection[Feature]) -> tuple[KnownFault, ...]:
    """The faults in these features, of the installed versions."""
    return tuple(
        fault
        for fault in read_faults()
        if fault.platform in (platform, "any")
        and fault.feature in features
        and is_in(installed_version(fault.package), fault.versions)
    )


def refuse_faults(platform: str, features: Collection[Feature]) -> None:
    """Refuse faults that give wrong numbers, a hang or an error; warn of faults that cost speed.

    Raises:
        PipelineError: the installed versions have such a fault; each is listed with its thread and
            a workaround.
    """
    found = faults_for(platform, features)
    harmless = FaultEffect.SLOW, FaultEffect.AVOIDED
    bad = [fault for fault in found if fault.effect not in harmless]
    PipelineError.refuse(
        "the installed versions have known faults for what this pipeline uses", map(str, bad)
    )
    for fault in found:
        if fault.effect is FaultEffect.SLOW:
            warnings.warn(f"this pipeline may be slow: {fault}", stacklevel=3)
