"""Directories of other tools given where one of ours is expected: said by name, with the command that helps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtllm_dflash.checkpoint.read import open_checkpoint
from trtllm_dflash.cli.inspect_cmd import directory_facts
from trtllm_dflash.engine.directory import open_engine_directory
from trtllm_dflash.errors import ConfigError

TRTLLM = {"architecture": "LlamaForCausalLM", "dtype": "float16", "mapping": {"world_size": 4, "cp_size": 2}}


@pytest.mark.parametrize("opened", [open_checkpoint, open_engine_directory, directory_facts])
@pytest.mark.parametrize(
    ("config", "found", "hint"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "a Hugging Face checkpoint", "--target {} --drafter"),
        ({"architectures": ["DFlash2DraftModel"]}, "a drafter", "--drafter {} -o"),
        (TRTLLM, "a checkpoint of TensorRT-LLM", "the Hugging Face checkpoint that it was made from"),
        ({"version": "0.20", "pretrained_config": TRTLLM}, "an engine of TensorRT-LLM", "that it was made from"),
        ({"model_type": "x"}, "something else", "trtllm-dflash convert"),
    ],
    ids=["target", "drafter", "their checkpoint", "their engine", "anything"],
)
def test_a_directory_of_another_tool_is_named(
    tmp_path: Path, config: dict[str, Any], found: str, hint: str, opened: Callable[[Path], object]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path)
    assert caught.value.message.startswith(f"{tmp_path}: holds {found} (by its config.json), expected")
    assert hint.format(tmp_path) in str(caught.value.hint)
