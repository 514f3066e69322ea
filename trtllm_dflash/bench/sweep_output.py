"""The output directory of a sweep, all of it, from one results document."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtllm_dflash.bench.sweep_chart import draw_chart
from trtllm_dflash.bench.sweep_report import write_report
from trtllm_dflash.bench.sweep_results import write_results
from trtllm_dflash.errors import ConfigError

FILES = ("results.json", "results.csv", "pareto.svg", "pareto.png", "report.html")


def require_packages() -> None:
    """See before the first measurement that the output can be written. Raises ``ConfigError`` by package."""
    missing = [name for name in ("matplotlib", "scipy", "yaml") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"a sweep needs packages that are not installed: {', '.join(missing)}",
            hint='pip install "trtllm-dflash[bench]"',
        )


def write_output(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write ``FILES`` into ``folder``, each in one step; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    write_results(document, folder)
    draw_chart(document, folder)
    write_report(document, folder)
    return [folder / name for name in FILES]
