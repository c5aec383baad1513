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
    """A digest of the engines' definitions.

    Comments, docstrings, and the file that a definition is in do not count.
    """
    found = {
        (folder, text)
        for folder, path in _files(root)
        for text in _statements(path.read_text(encoding="utf-8"))
    }
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()[:16]


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    for folder in (root / "jaxpipe", root / "torch_ref"):
        for path in sorted(folder.rglob("*.py")):
            room = path.relative_to(folder).parts[0].removesuffix(".py")
            if folder.name != "jaxpipe" or room not in BESIDE:
                yield folder.name, path


class _Definitions(ast.NodeTransformer):
    """Removes docstrings, and from imports the module of this package that a name is in."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_text(body[0]):
            del body[0]
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom | None:
        renamed = [alias for alias in node.names if alias.asname not in (None, alias.name)]
        if not node.level:
            return node
        return ast.ImportFrom(module=None, names=renamed, level=1) if renamed else None


def _statements(text: str) -> Iterator[str]:
    """What a file defines, and what it imports from elsewhere: a text for each statement."""
    for node in _Definitions().visit(ast.parse(text)).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", "")
            yield from (f"import {module} {ast.dump(alias)}" for alias in node.names)
        elif not ((isinstance(node, ast.If) and not node.body) or _is_imports(node)):
            yield ast.dump(node)


def _is_imports(node: ast.AST) -> bool:
    """Whether it declares which rooms a room imports."""
    return isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "IMPORTS"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
