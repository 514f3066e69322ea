"""Which settings the comparison of ``auto`` goes on timing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

# benchmarks/ is no installed package: it runs from the tree.
_SPEC = importlib.util.spec_from_file_location(
    "gpu_demo", Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_demo.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
gpu_demo = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(gpu_demo)


def test_only_what_three_runs_have_shown_to_be_far_behind_is_dropped() -> None:
    rates = {"auto": [10.0] * 3, "on": [90.0, 40.0, 100.0], "off": [30.0, 80.0, 55.0]}
    assert [mode for mode in rates if gpu_demo._is_far_behind(mode, rates)] == ["off"]
    rates["on"] += [10.0] * 4
    assert gpu_demo._is_far_behind("off", rates), "what was dropped stays so"
    rates["off"][2] = 65.0
    assert not gpu_demo._is_far_behind("off", rates)
    assert not gpu_demo._is_far_behind("off", {**rates, "off": [1.0, 1.0]})
