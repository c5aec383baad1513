"""A fingerprint of the code that results depend on."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Rooms that change no number of a result.
BESIDE = frozenset(
    {
        *("cli", "doctor", "render", "flax", "checkpoint", "portable", "debug", "distributed"),
        *("errors", "version", "known_faults", "processes", "fingerprint", "modules"),
    }
)


@cache
def engines(root: Path = ROOT) -> str:
    """A digest of the engines' code; comments and docstrings do not count."""
    total = hashlib.sha256()
    for path in _files(root):
        total.update(str(path.relative_to(root)).encode())
        total.update(_code(path.read_text(encoding="utf-8")).encode())
    return total.hexdigest()[:16]


def _files(root: Path) -> Iterator[Path]:
    for folder in (root / "jaxpipe", root / "torch_ref"):
        for path in sorted(folder.rglob("*.py")):
            room = path.relative_to(folder).parts[0].removesuffix(".py")
            if folder.name != "jaxpipe" or room not in BESIDE:
                yield path


def _code(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_text(body[0]):
            del body[0]
    return ast.dump(tree)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
