"""The errors that torch_ref raises; every one is a ValueError."""

from __future__ import annotations


class TorchRefError(ValueError):
    """Base of every error about what was given to torch_ref."""


class TableError(TorchRefError):
    """A table that cannot be read, or that cannot be run to its end."""


class WeightsError(TorchRefError):
    """Weights whose names or shapes do not fit the model."""


class BatchError(TorchRefError):
    """A batch that cannot be cut into the table's microbatches."""


class PeerError(TorchRefError):
    """torch.distributed.pipelining failed, or ran past its time limit."""
