"""Fixtures that several test folders share."""

from pathlib import Path

import pytest

from openwafer.models.pull import pull


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct GGUF, pulled into the user's cache; its tests are marked `network`."""
    (path,) = pull("smollm2").glob("*.gguf")
    return path
