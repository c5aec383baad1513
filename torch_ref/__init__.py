"""An independent torch reference: runs a schedule table with autograd and returns losses and
gradients.

It shares no code with jaxpipe: tables come in as CSV, weights as arrays named by path.

>>> import numpy as np, torch_ref
>>> from torch_ref.models import MLP
>>> model = MLP(num_stages=2)
>>> batch = {"x": np.ones((2, 8)), "y": np.ones((2, 4))}
>>> table = "0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1\\n"
>>> result = torch_ref.run(table, model, batch, weights=model.init())
>>> result.order[:3]
('0F0', '1F0', '0F1')
"""

from .errors import BatchError, PeerError, TableError, TorchRefError, WeightsError
from .executor import run
from .models.base import StagedModel
from .result import Result
from .training import Trained, train

__all__ = [
    "BatchError",
    "PeerError",
    "Result",
    "StagedModel",
    "TableError",
    "TorchRefError",
    "Trained",
    "WeightsError",
    "run",
    "train",
]
