"""A user's functions and parameters, and where the parameters are on a mesh."""

IMPORTS = ("arrays", "engine", "errors", "jaxprs", "layouts", "table", "transforms")
