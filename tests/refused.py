"""What users are told about models, meshes and batches that do not fit."""

from __future__ import annotations

from typing import Any

import pytest

from jaxpipe.errors import PipelineError


def refused(text: str) -> Any:
    """A block that ends in a PipelineError whose message matches the text."""
    return pytest.raises(PipelineError, match=text)
