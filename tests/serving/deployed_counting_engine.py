"""An engine directory without weights, and repositories that serve the counting engine."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from fake_engine_process import EOS, LIMITS, VOCAB_SIZE

from trtllm_dflash.checkpoint.manifest import hash_directory, manifest_to_json
from trtllm_dflash.checkpoint.trtllm_config import write_target_config
from trtllm_dflash.config.mapping import ParallelMapping, QuantizationConfig
from trtllm_dflash.config.rope import RopeConfig
from trtllm_dflash.config.target import TargetConfig


def write_engine_directory(path: Path) -> Path:
    """A directory that describes an engine as ``build`` does, without weights."""
    (path / "target").mkdir(parents=True)
    target = TargetConfig(
        family="llama",
        architecture="LlamaForCausalLM",
        dtype="float32",
        vocab_size=VOCAB_SIZE,
        num_layers=1,
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0, rotary_dim=16),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        qk_norm=False,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        sliding_windows=(None,),
        bos_token_id=1,
        eos_token_ids=EOS,
        pad_token_id=None,
    )
    config_file = path / "target" / "config.json"
    write_target_config(config_file, target, ParallelMapping(1), QuantizationConfig())
    config_file.write_text(json.dumps({"pretrained_config": json.loads(config_file.read_text()), "build_config": {}}))
    root = {
        "format_version": 1,
        "kind": "engine",
        "version": "0.1.0",
        "backend": "torch",
        "pairing": None,
        "limits": asdict(LIMITS),
        "tp_size": 1,
        "tokenizer": "tokenizer",
        "source": {},
        "files": manifest_to_json(hash_directory(path)),
    }
    (path / "config.json").write_text(json.dumps(root))
    return path


def use_counting_engine(repository: Path, *arguments: str, **parameters: str) -> None:
    """Point a deployed repository at the counting engine; ``parameters`` replace those of config.pbtxt."""
    path = next(repository.glob("*/config.pbtxt"))
    command = json.dumps([sys.executable, str(Path(__file__).parent / "fake_engine_process.py"), *arguments])
    parameters["engine_command"] = command.replace("\\", "\\\\").replace('"', '\\"')
    lines = []
    for line in path.read_text().splitlines():
        for name, value in parameters.items():
            if line.startswith(f'parameters {{ key: "{name}"'):
                line = f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'
        lines.append(line)
    path.write_text("\n".join(lines) + "\n")
