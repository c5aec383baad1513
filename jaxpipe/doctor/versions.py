"""The installed versions and their known faults."""

from __future__ import annotations

import ctypes
import sys
from importlib.metadata import PackageNotFoundError, version

from jax.sharding import Mesh

from ..known_faults import TESTED, Effect, Fault, faults_for, installed_version, is_in
from ..lowering.target import Target
from ..spmd.compiler_options import features_of
from ..table.effects import Offload
from .findings import Found, Line, Scope, Verdict, judged

_PACKAGES = {
    "plugin": ("jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu"),
    "CUDA": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
    "cuDNN": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}
_CUDA_LIBRARY = "libcuda.so.1"
_PLUGIN_OF = ("jax-cuda13-plugin", "jax-cuda12-plugin")


def installed() -> dict[str, str]:
    """Name -> version of each installed package."""
    found = {"python": sys.version.split()[0]}
    names = {"jax": ("jax",), "jaxlib": ("jaxlib",), **_PACKAGES}
    for name, packages in names.items():
        for package in packages:
            try:
                found[name] = version(package)
                break
            except PackageNotFoundError:
                continue
    driver = _driver()
    return found | ({"driver": driver} if driver else {})


def _driver() -> str:
    """The version of CUDA that the driver supports; empty without one."""
    number = ctypes.c_int()
    try:
        if ctypes.CDLL(_CUDA_LIBRARY).cuDriverGetVersion(ctypes.byref(number)):
            return ""
    except (OSError, AttributeError):
        return ""
    return f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"


def versions(scope: Scope, mesh: Mesh) -> Found:
    """A line about the installed versions, and one for each of their known faults."""
    target = Target.of(mesh, ())
    features = features_of(target, mesh, Offload.RESIDUALS)
    faults = faults_for(target.platform, features)
    return Found((judge(installed(), target.platform), *map(line_of, faults)))


def judge(found: dict[str, str], platform: str) -> Line:
    """A line that says whether these versions agree and were run with jaxpipe."""
    text = ", ".join(f"{name} {number}" for name, number in found.items())
    expected = ", ".join(f"{name} {range_}" for name, range_ in TESTED.items())
    wrong = [
        f"{name} {found[name]} was never run with jaxpipe: install {name}{range_}"
        for name, range_ in TESTED.items()
        if name in found and not is_in(found[name], range_)
    ]
    plugin = next((n for p in _PLUGIN_OF if (n := installed_version(p)) is not None), None)
    if platform == "gpu" and plugin is not None and found.get("plugin", plugin) != found["jaxlib"]:
        wrong.append(f"the plugin has another version than jaxlib {found['jaxlib']}: install both")
    return judged("versions", text, expected, "; ".join(wrong), wrong=wrong)


def line_of(fault: Fault) -> Line:
    """A known fault as a line."""
    verdicts = {Effect.SLOW: Verdict.SLOW, Effect.AVOIDED: Verdict.OK}
    return Line(
        f"known fault: {fault.feature.value}",
        verdicts.get(fault.effect, Verdict.WRONG),
        f"{fault.package} {installed_version(fault.package)}: {fault.what} ({fault.thread})",
        f"none of {fault.versions}",
        fault.workaround,
    )
