"""The `jaxpipe` command."""

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
