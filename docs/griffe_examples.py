"""For mkdocstrings: examples of docstrings as code, under either heading or under none."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Puts doctests into sections that griffe reads as examples."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the text of one docstring."""
        if obj.docstring is None:
            return
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        blocks = re.split(r"\n\n(?=>>> )", text)
        obj.docstring.value = "\n\n".join(
            [blocks[0], *("Examples:\n" + re.sub("^", "    ", b, flags=re.M) for b in blocks[1:])]
        )
