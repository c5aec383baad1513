"""Program + stage code -> the body of one `shard_map`."""

IMPORTS = ("arrays", "errors", "jaxprs", "lowering", "model", "program", "stage", "table")
