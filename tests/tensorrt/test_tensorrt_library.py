"""Finding TensorRT, and refusing what is missing or too old."""

from __future__ import annotations

import builtins
from types import ModuleType
from typing import Any

import pytest

from trtllm_dflash.errors import BuildError, ConfigError
from trtllm_dflash.ops.tensorrt_library import ErrorLog, TensorRTLibrary, check_backend, load_tensorrt


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] in ("tensorrt", "tensorrt_rtx"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr("importlib.import_module", without)
    for backend, package in (("tensorrt", "tensorrt"), ("tensorrt-rtx", "tensorrt_rtx")):
        with pytest.raises(BuildError, match=f"{package} is not installed") as caught:
            load_tensorrt(check_backend(backend))
        assert "pip install" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("backend", "version"),
    [("tensorrt", "10.16.1"), ("tensorrt", "12.0.0"), ("tensorrt-rtx", "1.6.0.5"), ("tensorrt-rtx", "2.0")],
)
def test_other_versions(backend: str, version: str) -> None:
    module = ModuleType("anything")
    module.__version__ = version  # type: ignore[attr-defined]
    with pytest.raises(BuildError, match=version):
        load_tensorrt(check_backend(backend), module=module)


def test_unknown_backend() -> None:
    with pytest.raises(ConfigError, match="tensorrt-rtx"):
        check_backend("onnx")


def test_a_logged_error_is_fatal_and_driver_noise_is_not(rtx: TensorRTLibrary) -> None:
    log = ErrorLog(rtx)
    log.logger.log(rtx.trt.ILogger.ERROR, "catchCudaError: cudaError 35: CUDA driver version is insufficient")
    log.logger.log(rtx.trt.ILogger.WARNING, "Unused Input: m")
    log.check("nothing happened")
    log.logger.log(rtx.trt.ILogger.ERROR, "Option mask cannot be used together with CausalMaskKind other than kNONE")
    with pytest.raises(BuildError, match=r"layer 7.*CausalMaskKind"):
        log.check("layer 7")
    log.check("errors are reported once")
    assert log.warnings == ["Unused Input: m"]
