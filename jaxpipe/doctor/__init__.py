"""Check a machine before a long run: versions, options of XLA, times, numbers and memory.  Each
check is a process of its own with a limit of time.

`jaxpipe.cli.checks` starts the checks and needs no JAX; `machine.main` runs one of them.
"""

IMPORTS = (
    "arrays",
    "cli",
    "engine",
    "errors",
    "inspect",
    "known_faults",
    "lowering",
    "measuring",
    "model",
    "pipeline",
    "prices",
    "schedules",
    "spmd",
    "vocabulary",
)
