"""Fixtures of the cache's tests."""

from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache's folder that does not exist yet."""
    return tmp_path / "cache"
