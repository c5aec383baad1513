"""What the user gave, functions and parameters, and where the parameters lie on a mesh."""

IMPORTS = ("arrays", "engine", "errors", "jaxprs", "layouts", "lowering", "table", "transforms")
