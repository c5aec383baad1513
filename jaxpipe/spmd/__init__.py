"""Program + stage code -> the body of one `shard_map`."""

IMPORTS = (
    "arrays",
    "errors",
    "jaxprs",
    "known_faults",
    "lowering",
    "model",
    "program",
    "stage",
    "storage",
    "table",
)
