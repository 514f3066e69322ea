"""Engines for tests: tiny pairs, really converted and built once per session, and the demo pair."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_pair import PAIRS, random_target, write_drafter, write_target
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.checkpoint.demo import demo_drafter, demo_target
from trtllm_dflash.engine.build import build
from trtllm_dflash.errors import CheckpointError
from trtllm_dflash.runtime.llm import LLM


@dataclass(frozen=True)
class PairDirectories:
    """Hugging Face directories of a pair, and the target as a transformers model (float32, eager)."""

    target: Path
    drafter: Path
    model: PreTrainedModel


PairFactory = Callable[[str], PairDirectories]
EngineFactory = Callable[..., Path]
LlmFactory = Callable[..., LLM]


@pytest.fixture(autouse=True)
def _log_of_one_test() -> Iterator[None]:
    """``serve`` sends the log of its whole process somewhere; in this process that place is gone after the test."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
    for handler in [handler for handler in root.handlers if type(handler).__module__.startswith("trtllm_dflash.")]:
        root.removeHandler(handler)


@pytest.fixture(scope="session")
def tiny_pairs(tmp_path_factory: pytest.TempPathFactory) -> PairFactory:
    """``tiny_pairs(name)``: a pair of ``tiny_pair.PAIRS``, written once."""
    written: dict[str, PairDirectories] = {}

    def pair(name: str) -> PairDirectories:
        if name not in written:
            root = tmp_path_factory.mktemp(name)
            target_recipe, drafter_recipe = PAIRS[name]
            write_target(root / "target", target_recipe)
            model = random_target(target_recipe)
            write_drafter(root / "drafter", drafter_recipe, model)
            written[name] = PairDirectories(root / "target", root / "drafter", model)
        return written[name]

    return pair


@pytest.fixture(scope="session")
def tiny_checkpoints(tiny_pairs: PairFactory, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``tiny_checkpoints(name)``: the pair converted, once."""
    converted: dict[str, Path] = {}

    def checkpoint(name: str) -> Path:
        if name not in converted:
            pair = tiny_pairs(name)
            output = tmp_path_factory.mktemp(name) / "checkpoint"
            convert(str(pair.target), str(pair.drafter), output)
            converted[name] = output
        return converted[name]

    return checkpoint


@pytest.fixture(scope="session")
def tiny_engines(tiny_checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> EngineFactory:
    """``tiny_engines(name, **limits)``: the pair built, once per set of limits (16 slots, 256 tokens, 64 a pass)."""
    built: dict[str, Path] = {}

    def engines(name: str, **limits: int) -> Path:
        limits = {"max_batch_size": 16, "max_seq_len": 256, "max_num_tokens": 64} | limits
        key = name + json.dumps(limits, sort_keys=True)
        if key not in built:
            output = tmp_path_factory.mktemp(name) / "engines"
            build(tiny_checkpoints(name), output, backend="torch", **limits)  # type: ignore[arg-type]
            built[key] = output
        return built[key]

    return engines


@pytest.fixture(scope="session")
def tiny_llms(tiny_engines: EngineFactory) -> Iterator[LlmFactory]:
    """``tiny_llms(name, limits=…, **LLM arguments)``: an open LLM, shared by tests that leave it idle."""
    opened: dict[str, LLM] = {}

    def llm(name: str, *, limits: dict[str, int] | None = None, **arguments: Any) -> LLM:
        key = json.dumps([name, limits, arguments], sort_keys=True)
        if key not in opened:
            opened[key] = LLM(tiny_engines(name, **(limits or {})), device="cpu", **arguments)
        return opened[key]

    yield llm
    for one in opened.values():
        one.close()


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_pairs: PairFactory) -> PreTrainedTokenizerBase:
    """The tokenizer that every tiny pair has."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tiny_pairs("llama-v2").target)
    return tokenizer


@dataclass(frozen=True)
class DemoPair:
    """The demo engines (float32, 16 slots, 1,024 tokens), and the directories they were made of."""

    engines: Path
    target: Path
    drafter: Path


@pytest.fixture(scope="session")
def demo_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoPair]:
    """The demo pair, converted and built; skips where its target is not in the cache and cannot be fetched."""
    try:
        target, drafter = demo_target(), demo_drafter()
    except CheckpointError as problem:
        pytest.skip(f"the demo pair is not available: {problem}")
    root = tmp_path_factory.mktemp("demo")
    convert("demo", "demo", root / "checkpoint")
    build(root / "checkpoint", root / "engines", backend="torch", max_batch_size=16, max_seq_len=1024)
    yield DemoPair(root / "engines", target, drafter)
    # Half a gigabyte that pytest would keep for three runs.
    shutil.rmtree(root)


@pytest.fixture(scope="session")
def demo_llm(demo_pair: DemoPair) -> Iterator[LLM]:
    """The demo pair with speculation."""
    with LLM(demo_pair.engines, device="cpu") as llm:
        yield llm


@pytest.fixture(scope="session")
def demo_model(demo_pair: DemoPair) -> PreTrainedModel:
    """The demo target in transformers, float32."""
    return AutoModelForCausalLM.from_pretrained(demo_pair.target, dtype=torch.float32).eval()
