"""Text in columns."""

from __future__ import annotations

from collections.abc import Sequence


def in_columns(
    lines: Sequence[Sequence[str]], *, left: int | None = None, between: str = "  "
) -> str:
    """Lines of cells as text, in columns, of which the first `left` (all without it) are flush
    left.

    >>> print(in_columns([("name", "size"), ("a", "10")], left=1))
    name  size
    a       10
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    most = len(widths) if left is None else left

    def placed(line: Sequence[str]) -> str:
        cells = enumerate(zip(line, widths, strict=True))
        texts = [cell.ljust(w) if i < most else cell.rjust(w) for i, (cell, w) in cells]
        return between.join(texts).rstrip()

    return "\n".join(map(placed, lines))
