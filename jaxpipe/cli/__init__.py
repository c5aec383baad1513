"""The `jaxpipe` command."""

from .main import main

__all__ = ["main"]

IMPORTS = (
    "engine",
    "errors",
    "lowering",
    "planner",
    "prices",
    "render",
    "schedules",
    "table",
    "transforms",
    "version",
)
