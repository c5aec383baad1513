"""The example's own modules (`gpt`, `train_gpt`) are importable here, as they are for a person who
runs it.
"""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
