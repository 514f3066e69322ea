"""Fixtures of the checkpoint room."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_checkpoints import write_target, write_zlab


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A random Llama in float32 with 4 layers, 6 query and 2 key/value heads."""
    return write_target(tmp_path / "target")


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    """A random DFlash 2 drafter for ``target``."""
    return write_zlab(tmp_path / "drafter")
