"""Finding, loading and building the plugin library, without a GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from trtllm_dflash.cli.plugins_cmd import plugins
from trtllm_dflash.errors import BuildError, ConfigError, EngineError
from trtllm_dflash.ops.plugin_build import build_library, parse_sms
from trtllm_dflash.ops.plugin_library import ABI_VERSION, LIBRARY_VARIABLE, find_library, load_library

needs_c_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

FACTS = {"version": "9.9", "abi": 1, "cuda": "13.0", "sm": ["90a"], "kernels": ["attention"], "plugins": []}
SOURCE = """
#include <stdint.h>
int32_t dflash_abi_version(void) { return %d; }
const char* dflash_last_error(void) { return "page_tokens 24"; }
const char* dflash_library_info(void) { return %s; }
int32_t dflash_fails(int32_t status) { return status; }
"""


def compile_library(folder: Path, abi: int) -> Path:
    source, library = folder / "library.c", folder / "libdflash_plugins.so"
    source.write_text(SOURCE % (abi, json.dumps(json.dumps(FACTS))))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@needs_c_compiler
def test_info_says_what_the_library_says(tmp_path: Path) -> None:
    library = compile_library(tmp_path, ABI_VERSION)
    shown = CliRunner().invoke(plugins, ["info", str(library), "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output) == FACTS | {"path": str(library)}


@needs_c_compiler
def test_the_variable_names_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = compile_library(tmp_path, ABI_VERSION)
    monkeypatch.setenv(LIBRARY_VARIABLE, str(library))
    assert find_library() == library
    assert load_library().info.sm == ("90a",)
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path / "absent.so"))
    assert find_library() is None
    with pytest.raises(EngineError, match=r"absent\.so"):
        load_library()


@needs_c_compiler
def test_another_interface_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=f"interface version {ABI_VERSION + 1}, this package needs {ABI_VERSION}"):
        load_library(compile_library(tmp_path, ABI_VERSION + 1))


@needs_c_compiler
def test_a_failing_call_raises_with_the_librarys_words(tmp_path: Path) -> None:
    import ctypes

    call = load_library(compile_library(tmp_path, ABI_VERSION)).function("dflash_fails", (ctypes.c_int32,))
    call(0)
    with pytest.raises(EngineError, match="dflash_fails: page_tokens 24"):
        call(1)
    with pytest.raises(EngineError, match="has no function dflash_absent"):
        load_library(tmp_path / "libdflash_plugins.so").function("dflash_absent", ())


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(EngineError, match=r"text\.so: cannot be loaded"):
        load_library(tmp_path / "text.so")


def test_the_interface_version_is_the_headers() -> None:
    header = Path(__file__).parents[2] / "plugins" / "include" / "dflash_kernels.h"
    assert f"#define DFLASH_ABI_VERSION {ABI_VERSION}\n" in header.read_text()


def test_sms_are_parsed_once_each() -> None:
    assert parse_sms("90, 120,90") == (90, 120)
    for wrong in ("80", "90;100", "", "sm_90"):
        with pytest.raises(ConfigError, match="not a supported GPU generation"):
            parse_sms(wrong)


def test_missing_sources_and_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="holds no plugin sources"):
        build_library((90,), tmp_path / "out.so", source=tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="cmake was not found"):
        build_library((90,), tmp_path / "out.so")


@pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("nvcc")), reason="needs cmake and nvcc")
def test_a_failed_build_reports_the_compiler_and_keeps_the_old_library(tmp_path: Path) -> None:
    source = tmp_path / "plugins"
    (source / "kernels").mkdir(parents=True)
    original = Path(__file__).parents[2] / "plugins"
    (source / "CMakeLists.txt").write_text((original / "CMakeLists.txt").read_text())
    (source / "kernels" / "library.cu").write_text("this is not C++")
    old = tmp_path / "libdflash_plugins.so"
    old.write_text("old")
    with pytest.raises(BuildError, match=r"library\.cu"):
        build_library((90,), old, source=source)
    assert old.read_text() == "old"
