"""`hold`: an XLA operation that does nothing but occupy its device for a given time."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import jax

SOURCE = Path(__file__).with_suffix(".cc")
BUILD = Path(__file__).parent.parent / "build" / "benchmarks"
TARGET = "jaxpipe_benchmarks_hold"


class HoldError(Exception):
    """The host call cannot be built."""


@cache
def library() -> ctypes.CDLL:
    """Compile hold.cc once (it is kept in build/), load it and register it with XLA.  HoldError
    where no C++ compiler is found.
    """
    text = SOURCE.read_bytes() + jax.__version__.encode()
    path = BUILD / f"hold-{hashlib.sha256(text).hexdigest()[:12]}.so"
    if not path.exists():
        _compile(path)
    loaded = ctypes.CDLL(str(path))
    for name in ("hold_count", "hold_nanoseconds"):
        getattr(loaded, name).restype = ctypes.c_int64
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(loaded.Hold), platform="cpu")
    return loaded


def _compile(path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise HoldError(
            "emulated devices need a C++ compiler for their host call; install g++ (or name one "
            "in CXX)"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    command = [
        compiler,
        "-O2",
        "-std=c++17",
        "-shared",
        "-fPIC",
        f"-I{jax.ffi.include_dir()}",
        str(SOURCE),
        "-o",
        str(part),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HoldError(f"{' '.join(command)} failed:\n{done.stderr}")
    part.replace(path)  # several processes may compile at once


def hold(x: jax.Array, seconds: float) -> jax.Array:
    """x, after its device was held for `seconds`.  A device that is held elsewhere in the program
    is waited for.
    """
    library()
    call = jax.ffi.ffi_call(
        TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype), vmap_method="sequential"
    )
    return call(x, nanoseconds=round(seconds * 1e9))


def counts(devices: int) -> list[tuple[int, float]]:
    """(holds, seconds asked for) of each of this process's devices since it started."""
    loaded = library()
    return [(loaded.hold_count(d), loaded.hold_nanoseconds(d) / 1e9) for d in range(devices)]
