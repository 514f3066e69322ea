"""Compile the CUDA plugin library without installing the package: ``python build_scripts/build_plugins.py --sm 90``.

``trtllm-dflash plugins build`` does the same; this script serves containers and CI, where only the tree is there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trtllm_dflash.errors import DFlashError
from trtllm_dflash.ops.plugin_build import DEFAULT_SMS, build_library, parse_sms


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the CUDA plugin library.")
    parser.add_argument("--sm", default=",".join(map(str, DEFAULT_SMS)), help="GPU generations (default: %(default)s)")
    parser.add_argument("--tensorrt-root", type=Path, help="TensorRT installation to compile the wrappers against")
    parser.add_argument("-o", "--output", type=Path, help="file or folder (default: trtllm_dflash/lib)")
    parser.add_argument("--jobs", type=int, help="parallel compilations (default: one per core)")
    options = parser.parse_args()
    try:
        report = build_library(
            parse_sms(options.sm), options.output, tensorrt_root=options.tensorrt_root, jobs=options.jobs
        )
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return error.exit_code
    print(f"{report.path}: SM {', '.join(map(str, report.sms))}, compiled in {report.elapsed_s:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
