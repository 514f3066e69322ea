"""The compiled plugin library: where it is, whether it fits this package, and how to call into it.

The library is plain C (``plugins/include/*.h``), loaded with ctypes; nothing of PyTorch or TensorRT is linked.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trtllm_dflash.errors import EngineError

LIBRARY_NAME = "libdflash_plugins.so"
LIBRARY_VARIABLE = "TRTLLM_DFLASH_PLUGIN_LIBRARY"
# Equals DFLASH_ABI_VERSION of plugins/include/dflash_kernels.h.
ABI_VERSION = 3

_BUILD_HINT = "build it with: trtllm-dflash plugins build"


@dataclass(frozen=True)
class PluginLibraryInfo:
    """What a library says of itself.

    Attributes:
        path: the file. version: package version it was built from. abi: its C interface. cuda: toolkit version.
        sm: compiled GPU architectures, such as ``90a``. kernels, plugins: names of what it holds.
    """

    path: Path
    version: str
    abi: int
    cuda: str
    sm: tuple[str, ...]
    kernels: tuple[str, ...]
    plugins: tuple[str, ...]


class PluginLibrary:
    """A loaded library. Functions that return a status raise :class:`EngineError` with the library's own words."""

    def __init__(self, path: Path) -> None:
        self._functions: dict[str, Callable[..., None]] = {}
        try:
            self.handle = ctypes.CDLL(str(path))
        except OSError as error:
            raise EngineError(f"{path}: cannot be loaded as a plugin library: {error}", hint=_BUILD_HINT) from error
        try:
            self.handle.dflash_abi_version.restype = ctypes.c_int32
            self.handle.dflash_last_error.restype = ctypes.c_char_p
            self.handle.dflash_library_info.restype = ctypes.c_char_p
            abi = self.handle.dflash_abi_version()
        except AttributeError as error:
            raise EngineError(f"{path}: is not a DFlash plugin library ({error})", hint=_BUILD_HINT) from error
        if abi != ABI_VERSION:
            raise EngineError(
                f"{path}: has interface version {abi}, this package needs {ABI_VERSION}",
                hint="build it again with: trtllm-dflash plugins build",
            )
        facts = json.loads(self.handle.dflash_library_info())
        self.info = PluginLibraryInfo(
            path=path,
            version=facts["version"],
            abi=facts["abi"],
            cuda=facts["cuda"],
            sm=tuple(facts["sm"]),
            kernels=tuple(facts["kernels"]),
            plugins=tuple(facts["plugins"]),
        )

    def last_error(self) -> str:
        """Text of this thread's last failure inside the library."""
        return (self.handle.dflash_last_error() or b"").decode(errors="replace")

    def function(self, name: str, argument_types: Sequence[Any]) -> Callable[..., None]:
        """The status-returning function ``name``; calling it raises :class:`EngineError` unless the status is 0."""
        known = self._functions.get(name)
        if known is not None:
            # A pass makes hundreds of launches; looking each up again took longer than launching it.
            return known
        try:
            entry = getattr(self.handle, name)
        except AttributeError as error:
            raise EngineError(f"{self.info.path}: has no function {name}", hint=_BUILD_HINT) from error
        entry.argtypes = list(argument_types)
        entry.restype = ctypes.c_int32

        def call(*arguments: Any) -> None:
            status = entry(*arguments)
            if status != 0:
                raise EngineError(f"{name}: {self.last_error() or f'status {status}'}")

        self._functions[name] = call
        return call


def candidate_paths() -> list[Path]:
    """Where a library is looked for, first match wins: ``TRTLLM_DFLASH_PLUGIN_LIBRARY``, the package's ``lib`` folder
    (where ``plugins build`` puts it), ``plugins/build`` of a source tree."""
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        return [Path(named)]
    package = Path(__file__).resolve().parents[1]
    return [package / "lib" / LIBRARY_NAME, package.parent / "plugins" / "build" / LIBRARY_NAME]


def find_library() -> Path | None:
    """Path of the library, or None when it was not built."""
    return next((path for path in candidate_paths() if path.is_file()), None)


# By the variable's value: what was found and loaded stays so for this process.
_found: dict[str | None, PluginLibrary] = {}


@cache
def _load(path: Path) -> PluginLibrary:
    return PluginLibrary(path)


def load_library(path: str | Path | None = None) -> PluginLibrary:
    """Load the library at ``path``, or the one :func:`find_library` finds; loaded once per path.

    Raises:
        EngineError: it is missing, not a plugin library, or of another interface version.
    """
    if path is not None:
        return _load(Path(path).resolve())
    # Every launch asks: looking at the file system each time took longer than the launch.
    named = os.environ.get(LIBRARY_VARIABLE)
    if named not in _found:
        found = find_library()
        if found is None:
            looked = ", ".join(str(candidate) for candidate in candidate_paths())
            raise EngineError(f"the CUDA plugin library was not found (looked at {looked})", hint=_BUILD_HINT)
        _found[named] = _load(found.resolve())
    return _found[named]
