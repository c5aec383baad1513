"""An independent torch reference: runs a schedule table with autograd and returns losses and gradients.

It shares no code with jaxpipe: tables come in as CSV, weights as arrays named by path.
"""

from .errors import TorchRefError

__all__ = ["TorchRefError"]
