"""What the user gave, functions and parameters, and where the parameters lie on a mesh.

The first room that imports JAX, next to `jaxprs`.  May import `table`, `layouts` and `jaxprs`.
"""
