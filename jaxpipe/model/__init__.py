"""A user's functions, their batches, and what each axis of a mesh is for."""

IMPORTS = ("arrays", "engine", "errors", "jaxprs", "layouts", "table")
