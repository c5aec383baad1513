"""The `jaxpipe` command.

May import every room without JAX.
"""

from .main import main

__all__ = ["main"]
