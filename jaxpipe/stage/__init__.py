"""A user's function -> the code of its forward, full backward and halves of the backward."""

IMPORTS = ("arrays", "errors", "jaxprs", "lowering", "model", "program", "storage", "table")
