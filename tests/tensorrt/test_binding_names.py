"""Every TensorRT name that the sources use exists: in TensorRT-RTX, and in full TensorRT 11's bindings.

The bindings of full TensorRT import without its libraries when stubs answer for the nine C functions they link to.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import binding_names
import pytest

from trtllm_dflash.ops.tensorrt_library import TensorRTLibrary

STUBS = {
    "nvinfer": (
        "createInferBuilder_INTERNAL",
        "createInferRefitter_INTERNAL",
        "createInferRuntime_INTERNAL",
        "getPluginRegistry",
        "getBuilderPluginRegistry",
    ),
    "nvinfer_plugin": ("initLibNvInferPlugins",),
    "nvonnxparser": ("createNvOnnxParser_INTERNAL", "createNvOnnxParserRefitter_INTERNAL", "getNvOnnxParserVersion"),
}


def test_reading_the_sources_finds_names() -> None:
    used = binding_names.used_names()
    expected = (
        "BuilderFlag.TF32",
        "ElementWiseOperation.SUM",
        "INetworkDefinition.add_attention_v2",
        "IExecutionContext.execute_async_v3",
        "IBuilderConfig.progress_monitor",
        "Runtime.deserialize_cuda_engine",
        "IOptimizationProfile.set_shape",
    )
    assert set(expected) <= used
    assert len(used) > 80


def test_rtx_has_every_name(rtx: TensorRTLibrary) -> None:
    assert set(binding_names.missing_names(rtx.trt)) <= set(binding_names.ONLY_FULL)


def test_full_tensorrt_has_every_name(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorrt_bindings") is None:
        pytest.skip("tensorrt_bindings is not installed; pip install --no-deps tensorrt-cu13-bindings")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the stub libraries")
    libraries = []
    for name, functions in STUBS.items():
        source = tmp_path / f"{name}.c"
        source.write_text("".join(f"void *{function}(void) {{ return 0; }}\n" for function in functions))
        library = tmp_path / f"lib{name}.so.11"
        subprocess.run(
            [compiler, "-shared", "-fPIC", f"-Wl,-soname,lib{name}.so.11", str(source), "-o", str(library)], check=True
        )
        libraries.append(str(library))
    checked = subprocess.run(
        [sys.executable, binding_names.__file__, "tensorrt_bindings.tensorrt", *libraries],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stderr
    assert set(checked.stdout.split()) <= set(binding_names.ONLY_RTX)
