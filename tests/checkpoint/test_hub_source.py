"""Models by hub id, against a small server that speaks the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from trtllm_dflash.checkpoint.read import open_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PICKLE = "pytorch_model.bin"

# huggingface_hub reads its environment once, on import, so each case runs in an interpreter of its own.
CONVERT = """
import sys
from pathlib import Path
from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.errors import DFlashError
for name, output in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        convert(name, None, Path(output))
        print("done")
    except DFlashError as error:
        print(type(error).__name__, error.message, "|", error.hint)
"""


def git_blob_id(file: Path) -> str:
    """The id that the hub gives a file that is not in large-file storage."""
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub:
    """A repository ``owner/model`` made of a directory; remembers which files were fetched."""

    def __init__(self, directory: Path) -> None:
        self.fetched: set[str] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, directory, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, directory, body=False)

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, request: BaseHTTPRequestHandler, directory: Path, *, body: bool) -> None:
        path = request.path.split("?")[0]
        headers, content, status = {}, b"{}", 200
        if path.startswith("/api/models/owner/model/tree/"):
            entries = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": git_blob_id(file)}
                for file in sorted(directory.iterdir())
            ]
            content = json.dumps(entries).encode()
        elif path.startswith("/api/models/owner/model"):
            files = [{"rfilename": file.name} for file in sorted(directory.iterdir())]
            content = json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": files}).encode()
        elif path.startswith("/owner/model/resolve/") and (directory / path.split("/")[-1]).is_file():
            name = path.split("/")[-1]
            content = (directory / name).read_bytes()
            headers = {"ETag": f'"{git_blob_id(directory / name)}"', "X-Repo-Commit": COMMIT}
            if body:
                self.fetched.add(name)
        else:
            headers, status = {"X-Error-Code": "RepoNotFound"}, 404
        request.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            request.send_header(key, value)
        request.end_headers()
        if body:
            request.wfile.write(content)


@pytest.fixture
def hub(target: Path) -> Iterator[Hub]:
    """The target of the other tests as a repository, with a pickle of the same weights beside it."""
    (target / PICKLE).write_bytes(b"pickled")
    (target / "README.md").write_text("model card")
    hub = Hub(target)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def run(tmp_path: Path, *arguments: str, **environment: str) -> list[str]:
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE"))}
    variables = (
        plain | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"} | environment
    )
    command = [sys.executable, "-c", CONVERT, *arguments]
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=variables)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_hub_id(tmp_path: Path, hub: Hub) -> None:
    """The commit is recorded; only safetensors, JSON and tokenizer files are fetched; then the cache is enough."""
    lines = run(
        tmp_path, "owner/model", str(tmp_path / "out"), "owner/other", str(tmp_path / "other"), HF_ENDPOINT=hub.url
    )
    assert lines[0] == "done"
    assert lines[1].startswith("ConfigError --target owner/other: no such directory, and no such repository")
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.source["target"] == {"name": "owner/model", "revision": COMMIT}
    assert checkpoint.tokenizer_dir is not None
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= hub.fetched
    assert hub.fetched.isdisjoint({PICKLE, "README.md"})
    offline = run(tmp_path, "owner/model", str(tmp_path / "again"), HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert offline == ["done"]
    assert open_checkpoint(tmp_path / "again").files == checkpoint.files


def test_repository_of_pickles_and_hub_out_of_reach(tmp_path: Path, hub: Hub, target: Path) -> None:
    (target / "model.safetensors").unlink()
    (line,) = run(tmp_path, "owner/model", str(tmp_path / "out"), HF_ENDPOINT=hub.url)
    assert line.startswith(f"CheckpointError owner/model: found only pickled weights ({PICKLE}), expected safetensors")
    hub.server.shutdown()
    hub.server.server_close()
    (line,) = run(tmp_path, "owner/model", str(tmp_path / "out"), HF_ENDPOINT=hub.url)
    assert "the Hugging Face hub cannot be reached and the model is not in its cache" in line
