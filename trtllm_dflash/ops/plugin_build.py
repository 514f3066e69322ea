"""Compile the plugin library with CMake and nvcc."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trtllm_dflash.errors import BuildError, ConfigError
from trtllm_dflash.ops.plugin_library import LIBRARY_NAME

# What CMakeLists.txt maps to architecture names (90 → 90a, 100 → 100f, …).
SUPPORTED_SMS = (90, 100, 103, 110, 120, 121)
DEFAULT_SMS = (90, 100, 103, 120)


@dataclass(frozen=True)
class BuildReport:
    """``path`` of the finished library, the ``sms`` it holds and the ``elapsed_s`` wall-clock seconds it took."""

    path: Path
    sms: tuple[int, ...]
    elapsed_s: float


def parse_sms(text: str) -> tuple[int, ...]:
    """``"90,100,120"`` → ``(90, 100, 120)``.

    Raises:
        ConfigError: an entry is no number or names a GPU generation the kernels do not support.
    """
    sms = []
    for entry in text.split(","):
        if not entry.strip().isdecimal() or int(entry) not in SUPPORTED_SMS:
            raise ConfigError(
                f"--sm: {entry.strip()!r} is not a supported GPU generation",
                hint=f"choose among {', '.join(map(str, SUPPORTED_SMS))}, separated by commas",
            )
        if int(entry) not in sms:
            sms.append(int(entry))
    return tuple(sms)


def default_source() -> Path:
    """The ``plugins`` folder of the source tree this package is used from."""
    return Path(__file__).resolve().parents[2] / "plugins"


def default_output() -> Path:
    """Where the loader looks first: the package's ``lib`` folder."""
    return Path(__file__).resolve().parents[1] / "lib" / LIBRARY_NAME


def build_library(
    sms: Sequence[int] = DEFAULT_SMS,
    output: Path | None = None,
    *,
    source: Path | None = None,
    tensorrt_root: Path | None = None,
    jobs: int | None = None,
) -> BuildReport:
    """Compile the library for ``sms`` into ``output`` (a file, or a folder to put it in).

    The finished file is renamed into place: an interrupted build leaves the previous library usable.

    Args:
        sms: GPU generations, a subset of ``SUPPORTED_SMS``.
        output: default ``trtllm_dflash/lib/libdflash_plugins.so``.
        source: the ``plugins`` folder; default the one beside this package.
        tensorrt_root: a TensorRT installation whose headers the wrappers compile against.
        jobs: parallel compilations, default the number of cores.

    Raises:
        ConfigError: the sources, CMake, nvcc or the TensorRT headers are missing.
        BuildError: the compiler failed; the message holds the end of its output.
    """
    source = source or default_source()
    output = output or default_output()
    if output.suffix != ".so":
        output = output / LIBRARY_NAME
    _check_tools(source, tensorrt_root)
    jobs = jobs or os.cpu_count() or 1
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dflash-plugins-") as folder:
        configure = [
            *("cmake", "-S", str(source), "-B", folder, "-DCMAKE_BUILD_TYPE=Release"),
            f"-DDFLASH_SM={';'.join(map(str, sms))}",
            f"-DDFLASH_VERSION={_package_version()}",
        ]
        if shutil.which("ninja"):
            configure += ["-G", "Ninja"]
        if tensorrt_root is not None:
            configure.append(f"-DDFLASH_TENSORRT_ROOT={tensorrt_root.resolve()}")
        _run(configure)
        _run(["cmake", "--build", folder, "--parallel", str(jobs)])
        output.parent.mkdir(parents=True, exist_ok=True)
        finished = output.with_name(output.name + ".new")
        shutil.copy2(Path(folder) / LIBRARY_NAME, finished)
        finished.replace(output)
    return BuildReport(output, tuple(sms), time.monotonic() - started)


def _check_tools(source: Path, tensorrt_root: Path | None) -> None:
    if not (source / "CMakeLists.txt").is_file():
        raise ConfigError(
            f"{source}: holds no plugin sources (CMakeLists.txt)",
            hint="run from a source tree of this project; an installed wheel does not carry the CUDA sources",
        )
    if shutil.which("cmake") is None:
        raise ConfigError("cmake was not found on PATH", hint="pip install cmake ninja")
    if shutil.which("nvcc") is None and "CUDACXX" not in os.environ:
        raise ConfigError(
            "nvcc was not found on PATH and CUDACXX is not set",
            hint="install CUDA 13 or newer, or: pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl",
        )
    if tensorrt_root is not None and not (tensorrt_root / "include" / "NvInfer.h").is_file():
        raise ConfigError(
            f"--tensorrt-root: {tensorrt_root} has no include/NvInfer.h",
            hint="give the folder that holds include/ and lib/ of a TensorRT installation",
        )


def _package_version() -> str:
    try:
        return version("trtllm-dflash")
    except PackageNotFoundError:
        project = Path(__file__).resolve().parents[2] / "pyproject.toml"
        found = re.search(r'^version = "([^"]+)"', project.read_text(), re.MULTILINE) if project.is_file() else None
        return found.group(1) if found else "unversioned"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-30:])
        raise BuildError(
            f"{command[0]} failed with exit code {done.returncode}:\n{tail}",
            hint="the kernels need nvcc 13.0 or newer and a C++17 host compiler",
        )
