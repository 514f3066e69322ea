"""Finding TensorRT: full ``tensorrt`` 11 or ``tensorrt-rtx`` 1.7, one interface, with the errors of a missing one."""

from __future__ import annotations

import importlib
import re
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from trtllm_dflash.errors import BuildError, ConfigError

TensorRTBackend = Literal["tensorrt", "tensorrt-rtx"]

_MODULES: dict[TensorRTBackend, tuple[str, tuple[int, int], tuple[int, int], str]] = {
    "tensorrt": ("tensorrt", (11, 0), (12, 0), 'pip install "tensorrt>=11.0,<12"'),
    "tensorrt-rtx": ("tensorrt_rtx", (1, 7), (2, 0), 'pip install "trtllm-dflash[rtx]"'),
}

# A builder without a driver says this after every other error; it explains nothing.
_NOISE = re.compile(r"CUDA driver version is insufficient|cudaError ?35|no CUDA-capable device")


@dataclass(frozen=True)
class TensorRTLibrary:
    """An imported TensorRT.

    Attributes:
        backend: which of the two. trt: the Python module. version: its version, as printed.
    """

    backend: TensorRTBackend
    trt: Any
    version: str

    @property
    def is_rtx(self) -> bool:
        """TensorRT-RTX: builds for listed compute capabilities without a GPU, has no plugin layers."""
        return self.backend == "tensorrt-rtx"


def load_tensorrt(backend: TensorRTBackend, *, module: ModuleType | None = None) -> TensorRTLibrary:
    """Import TensorRT for ``backend``.

    Args:
        backend: ``tensorrt`` or ``tensorrt-rtx``. module: an already imported module to check instead (tests).

    Raises:
        BuildError: not installed, its libraries do not load, or a version that this toolkit was not written for.
    """
    name, lowest, beyond, install = _MODULES[backend]
    if module is None:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise BuildError(f"{name} cannot be imported: {error}", hint=f"repair it: {install}") from error
            raise BuildError(
                f"backend {backend}: the Python package {name} is not installed",
                hint=f"{install}, or use --backend torch",
            ) from None
        except (ImportError, OSError) as error:
            raise BuildError(f"{name} is installed but does not load: {error}", hint=f"repair it: {install}") from error
    version = str(getattr(module, "__version__", "unknown"))
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not lowest <= found < beyond:
        raise BuildError(
            f"backend {backend}: found {name} {version}, expected at least {lowest[0]}.{lowest[1]} and below "
            f"{beyond[0]}.{beyond[1]}",
            hint=install,
        )
    return TensorRTLibrary(backend, module, version)


def check_backend(name: str) -> TensorRTBackend:
    """``name`` as a backend of TensorRT. Raises ``ConfigError`` for anything else."""
    if name not in _MODULES:
        raise ConfigError(f"backend {name!r}: expected tensorrt or tensorrt-rtx")
    return name


class ErrorLog:
    """TensorRT's log, kept: some mistakes are only logged and then ignored, so a logged error is always fatal.

    Args:
        library: whose log it is.
    """

    def __init__(self, library: TensorRTLibrary) -> None:
        self._lock = threading.Lock()
        self._errors: list[str] = []
        self.warnings: list[str] = []
        self.logger = _make_logger(library.trt, self)

    def add(self, *, is_error: bool, text: str) -> None:
        """Keep one line."""
        if _NOISE.search(text):
            return
        with self._lock:
            (self._errors if is_error else self.warnings).append(text.strip())

    def take_errors(self) -> list[str]:
        """Errors since the last call."""
        with self._lock:
            errors, self._errors = self._errors, []
        return errors

    def check(self, what: str) -> None:
        """Raise ``BuildError`` about ``what`` if anything was logged as an error."""
        errors = self.take_errors()
        if errors:
            raise BuildError(f"{what}: TensorRT reports: {'; '.join(errors)}")


def _make_logger(trt: Any, log: ErrorLog) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                log.add(is_error=True, text=text)
            elif severity == trt.ILogger.WARNING:
                log.add(is_error=False, text=text)

    return Logger()
