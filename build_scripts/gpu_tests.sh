#!/usr/bin/env bash
# Tests marked gpu, on a machine with a CUDA GPU. Prints one JSON document at the end; commit it under
# benchmarks/results/ with the command that made it:
#   bash build_scripts/gpu_tests.sh | tail -n 1 > benchmarks/results/gpu_tests.json
# A library that was compiled elsewhere is taken from TRTLLM_DFLASH_PLUGIN_LIBRARY; otherwise it is compiled here.
# GPU_TEST_JOBS=4 runs that many test files at a time: most tests wait for the host, not for the GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT

if [ -z "${TRTLLM_DFLASH_PLUGIN_LIBRARY:-}" ]; then
  sm=$(python3 -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
  python3 build_scripts/build_plugins.py --sm "$sm" || exit 1
fi
if [ "$#" -eq 0 ]; then set -- tests; fi
export PYTHONPATH=. reports
started=$SECONDS
grep -rlE 'pytest\.mark\.gpu' --include='test_*.py' "$@" | sort |
  xargs -P "${GPU_TEST_JOBS:-1}" -I FILE bash -c '
    name=$(echo FILE | tr / _)
    python3 -m pytest -q -m gpu -p no:cacheprovider --junitxml="$reports/$name.xml" FILE >"$reports/$name.log" 2>&1
    status=$?
    echo "== FILE (exit status $status)"; cat "$reports/$name.log"
    exit "$status"'
status=$?
python3 - "$reports" "$status" "$((SECONDS - started))" "GPU_TEST_JOBS=${GPU_TEST_JOBS:-1} bash build_scripts/gpu_tests.sh $*" <<'PY'
import datetime, json, os, subprocess, sys
from pathlib import Path
from xml.etree import ElementTree

import torch

suites = [suite for file in Path(sys.argv[1]).glob("*.xml") for suite in ElementTree.parse(file).getroot().iter("testsuite")]
counts = {key: sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")}
gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
# A machine that got only the files has no git: DFLASH_COMMIT says what they are.
asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
print(json.dumps({
    "name": "gpu_tests",
    "command": sys.argv[4],
    "commit": os.environ.get("DFLASH_COMMIT") or asked.stdout.strip() or "unknown",
    "date": datetime.date.today().isoformat(),
    "machine": f"{torch.cuda.device_count()} x {gpu}",
    "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
    "figures": {**counts, "seconds": int(sys.argv[3])},
    "exit_status": int(sys.argv[2]),
}))
PY
exit "$status"
