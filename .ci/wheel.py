#!/usr/bin/env python3
"""Build the wheel, install it into an empty environment, and use it there:  python .ci/wheel.py

A minute.  Packages come from where pip takes them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ("jaxpipe/py.typed", "jaxpipe/render/page.html", "jaxpipe/known_faults.json")
PROGRAM = """
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 2)
import jaxpipe as jp
model = jp.Model(lambda p, x: jnp.tanh(x @ p), last=lambda p, x, microbatch: jnp.mean(x**2))
schedule = jp.schedules.build("1f1b", devices=2, microbatches=2)
pipe = jp.Pipeline(model, schedule, jax.make_mesh((2,), ("pipe",)))
params = pipe.place({"stages": jnp.ones((2, 3, 3)), "last": {}})
loss, grads = pipe.value_and_grad(params, {"x": jnp.ones((4, 3))})
assert jnp.isfinite(loss)
print(jp.__version__, "trains from", jp.__file__)
"""


def check(wheel: Path) -> None:
    """Refuse a wheel that holds more than jaxpipe, or lacks its data."""
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    missing = [name for name in DATA if name not in names]
    if tops != {"jaxpipe"} or missing:
        raise SystemExit(f"{wheel.name} holds {sorted(tops)} and lacks {missing}")


def main() -> None:
    """Build, look, install, use."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run(
            [*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True
        )
        (wheel,) = folder.glob("jaxpipe-*.whl")
        check(wheel)
        venv.create(folder / "venv", with_pip=True)
        scripts = folder / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
        python = str(scripts / "python")
        install = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*install, str(wheel)], check=True)
        for command in (
            [str(scripts / "jaxpipe"), "list"],
            [str(scripts / "jaxpipe"), "simulate", "zb_h1", "-P", "4", "-M", "8", "--json"],
            [python, "-c", PROGRAM],
        ):
            subprocess.run(command, check=True, cwd=folder)
        other = subprocess.run([python, "-c", "import torch_ref"], cwd=folder, check=False)
        if not other.returncode:
            raise SystemExit("the wheel installs torch_ref")
    print("the wheel is good")


if __name__ == "__main__":
    main()
