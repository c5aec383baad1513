"""Where each leaf is stored, and what reads that: placing, and back; splits; a step; optimizers."""

IMPORTS = ("arrays", "errors", "jaxprs", "model", "table")
