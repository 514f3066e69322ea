"""Rules about the whole package that a reviewer would look for by hand."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import trtllm_dflash
from trtllm_dflash.serving.path_redaction import without_paths

SOURCES = sorted(Path(trtllm_dflash.__file__).parent.rglob("*.py"))
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal"}


def nodes() -> Iterator[tuple[str, ast.AST]]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            yield f"{path.name}:{getattr(node, 'lineno', 0)}", node


def imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {name.name.split(".")[0] for name in node.names}
    return {(node.module or "").split(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def called(node: ast.AST) -> str:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def test_nothing_is_unpickled() -> None:
    loads = {"torch.load", "numpy.load", "np.load"}
    assert [where for where, node in nodes() if imported(node) & FORBIDDEN_MODULES or called(node) in loads] == []


def test_no_code_of_checkpoints_is_run() -> None:
    runs = {"eval", "exec", "os.system"}
    options = {"trust_remote_code": "False", "shell": "False"}
    found = [where for where, node in nodes() if called(node) in runs]
    for where, node in nodes():
        if isinstance(node, ast.keyword) and node.arg in options and ast.unparse(node.value) != options[node.arg]:
            found.append(where)
    assert found == []


def test_servers_listen_on_loopback_unless_told_otherwise() -> None:
    from trtllm_dflash.cli.serve_cmd import serve
    from trtllm_dflash.serving.gateway.settings import GatewaySettings

    defaults = {option.name: option.default for option in serve.params}
    assert (defaults["host"], defaults["openai_host"]) == ("127.0.0.1", "127.0.0.1")
    assert GatewaySettings(()).host == "127.0.0.1"
    assert GatewaySettings(()).max_body_bytes <= 1 << 20


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("no such file: '/etc/models/rank0.safetensors'", "no such file: '<path>'"),
        ("/root/x/y: permission denied", "<path>: permission denied"),
        ("half of 1/2 and 3/4 of a km/h", "half of 1/2 and 3/4 of a km/h"),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
    ],
)
def test_paths_are_taken_out_of_texts(text: str, clean: str) -> None:
    assert without_paths(text) == clean
