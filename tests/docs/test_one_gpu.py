"""Programs of README, pages and examples run on a machine with one GPU: on virtual devices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.environment import python, quick

from .test_pages import DOCS, ROOT

ONE_GPU, RUN_PAGE = ROOT / "tests" / "one_gpu.py", Path(__file__).with_name("run_page.py")
PAGES = [page for page in sorted(DOCS.glob("*.md")) if "jax_num_cpu_devices" in page.read_text()]
# Programs with flags: a few steps.
FLAGS = {
    "llama": ["--steps", "1", "--out", "out"],
    "moe": ["--steps", "1", "--out", "out"],
    "train_gpt": ["--steps", "1", "--out", "out"],
}
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
VIRTUAL = re.compile(r"^(devices: )?\[CpuDevice\(id=0\), CpuDevice\(id=1\)", re.MULTILINE)


def on_one_gpu(*arguments: object, folder: Path) -> str:
    """What the program prints, as a person would run it there."""
    return python(ONE_GPU, *arguments, env=quick(), cwd=folder).stdout


def test_a_program_for_two_devices_fails_there_without_a_choice(tmp_path):
    """What the others are kept from."""
    program = tmp_path / "program.py"
    choice = 'jax.config.update("jax_num_cpu_devices", 2)'
    program.write_text(f"import jax\n{choice}\njax.make_mesh((2,), ('pipe',))\n")
    done = python(ONE_GPU, program, env=quick(), status=1)
    assert "Number of devices 1 must be >= the product of mesh_shape" in done.stderr


@pytest.mark.slow
def test_readme_s_programs_run_and_say_where(tmp_path):
    program, walk = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    pasted = tmp_path / "pasted.py"
    pasted.write_text(program.replace("range(20)", "range(1)") + walk)
    assert VIRTUAL.match(on_one_gpu(pasted, folder=tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs(page, tmp_path):
    on_one_gpu(RUN_PAGE, page, folder=tmp_path)
    assert "devices=devices" in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_says_where(path, tmp_path):
    out = on_one_gpu(path, *FLAGS.get(path.stem, []), folder=tmp_path)
    assert VIRTUAL.search(out) or 'update("jax_platforms", "cpu")' in path.read_text()
