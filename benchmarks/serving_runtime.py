"""What the runtime must survive: a soak, shared prefixes, structured output, and injected faults.

    python -m benchmarks.serving_runtime --engines DIR

``DIR`` is an engine directory of the demo pair (for ``prefix`` and ``json``). Parts can be run alone
(``--parts soak,prefix,json,faults``); ``--served`` sends the soak through a real tritonserver. Figures are merged into
``benchmarks/results/serving.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

from benchmarks.result_file import write_result
from benchmarks.serving_prefix import json_figures, prefix_figures
from benchmarks.serving_soak import soak_figures

PARTS = ("soak", "prefix", "json", "faults")
ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, help="engine directory of the demo pair")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--served", action="store_true", help="the soak goes through a real tritonserver")
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the requests, for a dry run")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts {sorted(unknown)}, expected some of {', '.join(PARTS)}")
    if arguments.engines is None and {"prefix", "json"} & set(parts):
        parser.error("--engines is needed for the parts prefix and json")
    for part in parts:
        started = time.perf_counter()
        figures, details = _run(part, arguments)
        details["seconds"] = round(time.perf_counter() - started, 1)
        print(f"{part}: {json.dumps(figures)}\n{json.dumps(details)}", flush=True)
        if arguments.scale == 1.0:
            print(write_result("serving", figures, shapes=_SHAPES[part], details={part: details}), flush=True)


_SHAPES = {
    "soak": {"soak": "tiny random pair, 16 slots, 256 tokens, prompts 1..160, outputs 1..200, 48 clients"},
    "prefix": {"prefix": "SmolLM2-135M-Instruct + DFlash 2, float32, 64 prompts of 600 shared tokens and a question"},
    "json": {"json": "SmolLM2-135M-Instruct + DFlash 2, float32, 100 prompts, 4 schemas, temperature 1"},
    "faults": {"faults": "tests with the marker `fault`"},
}


def _run(part: str, arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    scale = arguments.scale
    if part == "soak":
        return soak_figures(count=max(200, int(10_000 * scale)), served=arguments.served)
    if part == "prefix":
        return prefix_figures(arguments.engines, requests=max(4, int(64 * scale)))
    if part == "json":
        return json_figures(arguments.engines, prompts=max(4, int(100 * scale)))
    return _fault_figures()


def _fault_figures() -> tuple[dict[str, Any], dict[str, Any]]:
    """``fault_tests``: tests that inject a fault and passed; a failing one is an error here."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "tests", "-q", "-m", "fault", f"--junitxml={report}"]
        done = subprocess.run(command, cwd=ROOT, check=False)
        suite = xml.etree.ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    count, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    if done.returncode or failed:
        raise SystemExit(f"{failed} of {count} fault tests failed")
    names = sorted({str(case.attrib["name"]).split("[")[0] for case in suite if case.find("skipped") is None})
    return {"fault_tests": count - skipped}, {"skipped": skipped, "functions": names}


if __name__ == "__main__":
    main()
