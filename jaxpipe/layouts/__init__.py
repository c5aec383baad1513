"""Layers -> stages: layout strings, and balanced layouts."""

from .balance import balanced_layout, even_layout, split_layers
from .layout import Layout, LayoutError, check_layout

__all__ = [
    "Layout",
    "LayoutError",
    "balanced_layout",
    "check_layout",
    "even_layout",
    "split_layers",
]

IMPORTS = ("errors", "table")
