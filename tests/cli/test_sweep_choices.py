"""What a sweep leaves behind for ``deploy``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from trtllm_dflash.bench.sweep_output import require_packages
from trtllm_dflash.bench.targets import DEPLOYMENT, forget_deployment
from trtllm_dflash.errors import ConfigError


def test_missing_packages_are_named_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "scipy" else found(name, *more)
    )
    with pytest.raises(ConfigError, match="not installed: scipy") as caught:
        require_packages()
    assert caught.value.hint == 'pip install "trtllm-dflash[bench]"'


def test_an_earlier_choice_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / DEPLOYMENT).write_text("{}")
    forget_deployment(tmp_path)
    forget_deployment(tmp_path)
    assert list(tmp_path.iterdir()) == []
