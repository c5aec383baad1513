"""Layers -> stages: layout strings, and balanced layouts."""

from .layout import Layout, LayoutError, balanced_layout, check_layout, even_layout, split_layers

__all__ = [
    "Layout",
    "LayoutError",
    "balanced_layout",
    "check_layout",
    "even_layout",
    "split_layers",
]

IMPORTS = ("errors", "table")
