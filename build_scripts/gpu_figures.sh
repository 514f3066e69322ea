#!/usr/bin/env bash
# Every figure under benchmarks/results/ that a CUDA GPU makes, part by part:
#   bash build_scripts/gpu_figures.sh DATA [PART…]
# DATA holds gsm8k_test.jsonl. Parts: tests sanitize shape memory exact speed adaptive fp8 kernels sweep (default: all).
# A part that fails or takes longer than PART_TIMEOUT seconds (default 900) is named at the end; the others go on. Set
# TRTLLM_DFLASH_PLUGIN_LIBRARY to a library for this GPU, or let `trtllm-dflash plugins build` make one first. Timings
# need a GPU that nobody else uses; tests and sanitizers do not.
set -uo pipefail
cd "$(dirname "$0")/.."
if [ "$#" -eq 0 ]; then sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2; fi
data=$(realpath "$1") || exit 2
shift
if [ ! -f "$data/gsm8k_test.jsonl" ]; then echo "error: $data has no gsm8k_test.jsonl" >&2; exit 2; fi
if [ "$#" -eq 0 ]; then set -- tests sanitize shape memory exact speed adaptive fp8 kernels sweep; fi
export PYTHONPATH=.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

tests() { bash build_scripts/gpu_tests.sh | tee "$work/tests.log" && tail -n 1 "$work/tests.log" > benchmarks/results/gpu_tests.json; }
sanitize() {
  local library
  library=$(python3 -c 'from trtllm_dflash.ops.plugin_library import find_library; print(find_library() or "")')
  if [ -z "$library" ]; then echo "error: no plugin library; trtllm-dflash plugins build makes one" >&2; return 1; fi
  for name in attention select; do
    nvcc -std=c++17 -Iplugins/include -Iplugins/kernels "plugins/tests/sanitize_$name.cu" "$library" \
      -Xlinker "-rpath=$(dirname "$library")" -o "$work/$name" || return 1
    for tool in memcheck racecheck; do compute-sanitizer --tool "$tool" --error-exitcode 1 "$work/$name" || return 1; done
  done
}
kernels() { python3 -m benchmarks.kernels; }
sweep() { python3 -m benchmarks.sweep --data "$data" --parts demo,shape --device cuda:0 --concurrency 1..256 --repeats 2; }
cycle() { python3 -m benchmarks.gpu_cycle --data "$data" --parts "$1"; }
export -f tests sanitize kernels sweep cycle
export data work

failed=()
for part in "$@"; do
  case "$part" in
    tests | sanitize | kernels | sweep) call=$part ;;
    shape | memory | exact | speed | adaptive | fp8) call="cycle $part" ;;
    *) echo "error: no part $part" >&2; exit 2 ;;
  esac
  printf '\n== %s\n' "$part"
  timeout "${PART_TIMEOUT:-900}" bash -o pipefail -c "$call" || failed+=("$part")
done
if [ "${#failed[@]}" -gt 0 ]; then echo "not made: ${failed[*]}" >&2; exit 1; fi
