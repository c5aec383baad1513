"""Flags of the programs that train."""

from __future__ import annotations

import argparse
from typing import Any


def flag(parser: argparse.ArgumentParser, name: str, default: Any, text: str, **more: Any) -> None:
    """Add a flag whose value has the type of its default."""
    parser.add_argument(name, type=type(default), default=default, help=text, **more)


def switch(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    """Add a flag without a value."""
    parser.add_argument(name, action="store_true", help=text)
