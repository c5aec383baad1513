"""The one place that says which version this is: pyproject.toml and `jaxpipe --version` read it
here.
"""

__version__ = "0.1.0"
