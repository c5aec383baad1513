"""Random models x tables x meshes x settings x calls, against plain JAX in float64."""

import tests.conftest  # noqa: F401  virtual devices and float64, in a worker and on the command line too
