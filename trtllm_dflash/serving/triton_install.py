"""Finding a tritonserver on this machine, and proving that it can start before it is started.

Two kinds are known: the one inside the ``nvidia-pytriton`` package (2.51, Python backend only; its stub needs numpy <
2), and a ``tritonserver`` on PATH, as in NVIDIA's containers, which brings its own Python.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trtllm_dflash.checkpoint.demo import cache_directory
from trtllm_dflash.errors import ConfigError, EngineError

STUB_NUMPY = "numpy>=1.26,<2"
MIN_SHM_BYTES = 64 << 20
_STUB_NAME = "triton_python_backend_stub"


@dataclass(frozen=True)
class TritonInstall:
    """A tritonserver.

    Attributes:
        binary: the executable. python_backend: directory of its Python backend.
        stub: the Python stub that must be linked beside the backend, or None when it is already there.
        bundled: whether it is the one of nvidia-pytriton, whose stub needs an environment of ours.
    """

    binary: Path
    python_backend: Path
    stub: Path | None
    bundled: bool


def find_tritonserver() -> TritonInstall:
    """The bundled tritonserver, else the one on PATH.

    Raises:
        ConfigError: there is none, or the bundled one has no stub for this Python.
    """
    # find_spec, not import: importing pytriton needs its numpy, and we only want its files.
    spec = importlib.util.find_spec("pytriton")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        root = Path(location) / "tritonserver"
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        if not (root / "bin" / "tritonserver").is_file():
            continue
        stub = root / "python_backend_stubs" / version / _STUB_NAME
        if not stub.is_file():
            found = sorted(path.name for path in (root / "python_backend_stubs").iterdir())
            raise ConfigError(
                f"{root}: no Python stub for {version}, found stubs for {', '.join(found)}",
                hint="install the toolkit in an environment of one of these Python versions",
            )
        return TritonInstall(root / "bin" / "tritonserver", root / "backends" / "python", stub, bundled=True)
    on_path = shutil.which("tritonserver")
    if on_path:
        binary = Path(on_path).resolve()
        backend = binary.parents[1] / "backends" / "python"
        if not backend.is_dir():
            raise ConfigError(f"{binary}: no Python backend in {backend}", hint="use an image with the Python backend")
        return TritonInstall(binary, backend, None, bundled=False)
    raise ConfigError(
        "no tritonserver: neither the nvidia-pytriton package nor a tritonserver on PATH",
        hint="pip install 'trtllm-dflash[triton]', or run inside an nvcr.io/nvidia/tritonserver image",
    )


def library_path() -> str:
    """Directories where the bundled stub finds libpython: this interpreter's own first."""
    directories = [sysconfig.get_config_var("LIBDIR") or "", *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    return ":".join(dict.fromkeys(directory for directory in directories if directory))


def preflight(install: TritonInstall, addresses: dict[str, tuple[str, int]]) -> None:
    """Check what would otherwise show as a hang or a late crash.

    Args:
        install: the server. addresses: name (``http``, ``grpc``, …) → (host, port) to listen on.

    Raises:
        EngineError: a shared library of the stub is missing, or /dev/shm is too small.
        ConfigError: a port is taken, or two are the same.
    """
    if install.stub is not None:
        # Without libpython the server neither starts nor fails: it waits for its stub for ever.
        listing = subprocess.run(
            ["ldd", str(install.stub)],
            env={**os.environ, "LD_LIBRARY_PATH": library_path()},
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        missing = [line.split()[0] for line in listing.splitlines() if "not found" in line]
        if missing:
            version = f"{sys.version_info[0]}.{sys.version_info[1]}"
            raise EngineError(
                f"Triton's Python stub needs {', '.join(missing)}, which the loader does not find",
                hint=f"install the shared library of Python {version} (Debian, Ubuntu: apt install libpython{version})",
            )
    shm = shutil.disk_usage("/dev/shm")
    if shm.free < MIN_SHM_BYTES:
        raise EngineError(
            f"/dev/shm has {shm.free >> 20} MiB free, expected at least {MIN_SHM_BYTES >> 20} MiB",
            hint="in a container, start it with --shm-size=1g",
        )
    check_ports(addresses)


def check_ports(addresses: dict[str, tuple[str, int]]) -> None:
    """Refuse ports that are taken or given twice; ``addresses`` as for :func:`preflight`. Raises ``ConfigError``."""
    seen: dict[int, str] = {}
    for name, (_, port) in addresses.items():
        if port in seen:
            raise ConfigError(
                f"{name} port is {port}, the same as the {seen[port]} port", hint=f"choose another --{name}-port"
            )
        seen[port] = name
    for name, (host, port) in addresses.items():
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{name} port {port} on {host} cannot be used: {error.strerror}", hint=f"choose another --{name}-port"
            ) from error


def free_ports(host: str, ports: list[int]) -> list[int]:
    """``ports`` with each 0 replaced by a port that is free now. Raises ``ConfigError`` for a ``host`` of others."""
    return free_addresses([(host, port) for port in ports])


def free_addresses(addresses: Sequence[tuple[str, int]]) -> list[int]:
    """As :func:`free_ports`, on several hosts: ports that are chosen in one call differ from each other."""
    probes = []
    try:
        chosen = []
        for host, port in addresses:
            if port == 0:
                probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
                probes.append(probe)
                try:
                    probe.bind((host, 0))
                except OSError as error:
                    raise ConfigError(
                        f"host {host!r} cannot be listened on: {error.strerror}",
                        hint="give an address of this machine, 127.0.0.1 or 0.0.0.0",
                    ) from error
                port = probe.getsockname()[1]
            chosen.append(port)
        return chosen
    finally:
        for probe in probes:
            probe.close()


def stub_environment() -> Path:
    """The virtual environment that the bundled stub runs in, made on first use; returns its directory.

    The stub takes its packages from the first ``python3`` on PATH, and its backend breaks on numpy 2 (the model loads,
    then the stub dies on the first request). The toolkit's own environment is not tied to that, so the stub gets one
    of its own.

    Raises:
        EngineError: numpy could not be installed (no network); says how to bring it.
    """
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    home = cache_directory() / "triton-stub" / f"python{version}-numpy1"
    complete = home / ".complete"
    if _usable(complete):
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    with _locked(home.with_suffix(".lock")):
        if _usable(complete):  # another process made it while we waited
            return home
        shutil.rmtree(home, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(home)], f"cannot make a virtual environment in {home}")
        _run(
            [str(home / "bin" / "python3"), "-m", "pip", "install", "--quiet", "--no-user", STUB_NUMPY],
            f"cannot install {STUB_NUMPY} for Triton's Python stub",
        )
        complete.write_text(sys.executable + "\n")
    return home


def _usable(complete: Path) -> bool:
    """Finished, and the interpreter that it links to is still there."""
    return complete.is_file() and (complete.parent / "bin" / "python3").exists()


def _run(command: list[str], failure: str) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_USER", "PIP_TARGET")
    }
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        detail = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1:]
        raise EngineError(
            f"{failure}: {' '.join(detail)}",
            hint="this happens once and needs a package index: run again with network, or by hand: "
            + " ".join(command),
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
