#!/usr/bin/env bash
# Tests marked gpu, on a machine with a CUDA GPU. Prints one JSON document at the end; commit it under
# benchmarks/results/ with the command that made it:
#   bash build_scripts/gpu_tests.sh | tail -n 1 > benchmarks/results/gpu_tests.json
# A library that was compiled elsewhere is taken from TRTLLM_DFLASH_PLUGIN_LIBRARY; otherwise it is compiled here.
set -uo pipefail
cd "$(dirname "$0")/.."
report=$(mktemp)
trap 'rm -f "$report"' EXIT

if [ -z "${TRTLLM_DFLASH_PLUGIN_LIBRARY:-}" ]; then
  sm=$(python3 -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
  python3 build_scripts/build_plugins.py --sm "$sm" || exit 1
fi
PYTHONPATH=. python3 -m pytest -q -m gpu -p no:cacheprovider --junitxml="$report" "$@"
status=$?
python3 - "$report" "$status" "$*" <<'PY'
import datetime, json, sys
from xml.etree import ElementTree

import torch

suites = list(ElementTree.parse(sys.argv[1]).getroot().iter("testsuite"))
counts = {key: sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")}
print(json.dumps({
    "name": "gpu_tests",
    "command": f"bash build_scripts/gpu_tests.sh {sys.argv[3]}".strip(),
    "date": datetime.date.today().isoformat(),
    "machine": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}",
    "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
    "figures": {**counts, "seconds": round(sum(float(suite.get("time", 0)) for suite in suites), 1)},
    "exit_status": int(sys.argv[2]),
}))
PY
exit "$status"
