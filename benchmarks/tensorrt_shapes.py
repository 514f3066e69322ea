"""Plans of large shapes, from checkpoints without data: with weights outside the plan a build reads only shapes.

A checkpoint here is two config.json and two rank files of the right size, which are holes in the file system. For
weights inside the plan the files are filled with random bytes first.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from trtllm_dflash.checkpoint.drafter_plan import plan_drafter
from trtllm_dflash.checkpoint.target_plan import plan_target
from trtllm_dflash.checkpoint.tensor_plan import Plan
from trtllm_dflash.checkpoint.trtllm_config import write_drafter_config, write_target_config
from trtllm_dflash.config.drafter import ConvConfig, DrafterConfig, DrafterLayerAttention, SelectorConfig
from trtllm_dflash.config.mapping import ParallelMapping, QuantizationConfig
from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.config.rope import RopeConfig
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.engine.plan_build import run_plan_worker
from trtllm_dflash.engine.plan_facts import Network, PlanFacts, WeightsMode
from trtllm_dflash.engine.plan_worker import PlanJob
from trtllm_dflash.engine.tensorrt_emission import linear_row_tokens

_SAFETENSORS_NAMES = {torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}
_HEAD_DIM, _BLOCK, _DRAFTER_LAYERS = 128, 16, 5
_ROPE = RopeConfig(1e6, _HEAD_DIM)
_POSITIONS = 40960
_FILL_BYTES = 64 << 20


@dataclass(frozen=True)
class Shape:
    """A Qwen3-shaped dense target; its DFlash 2 drafter is five layers of the same width over five captured layers."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int


SHAPES = {
    "qwen3_8b": Shape(36, 4096, 12288, 32, 8, 151936),
    "dense_30b": Shape(52, 6656, 19968, 32, 2, 151936),
}
EMBEDDED = {"dense_1b": Shape(22, 2048, 5632, 16, 4, 32000)}
"""Weights inside the plan, where they outweigh everything else."""


def shape_figures(folder: Path, name: str) -> dict[str, float | bool]:
    """All three networks of a large shape, bf16, weights outside the plan. The target's keys have no network name."""
    checkpoint, weight_bytes = hollow_checkpoint(folder / name, SHAPES[name])
    figures: dict[str, float | bool] = {f"{name}_weights_gb": round(weight_bytes / 1e9, 2)}
    networks: dict[str, Network] = {name: "target", f"{name}_inject": "inject", f"{name}_draft": "draft"}
    for key, network in networks.items():
        facts, peak_mb = build_network(checkpoint, network, folder / f"{key}.engine", weights="external")
        figures[f"{key}_build_s"] = facts.build_s
        figures[f"{key}_build_peak_mb"] = round(peak_mb, 1)
        figures[f"{key}_plan_mb"] = round(facts.plan_bytes / 1e6, 1)
        print(f"{key}: {facts.build_s:.1f} s, {peak_mb:.0f} MB, plan {facts.plan_bytes / 1e6:.1f} MB", flush=True)
    return figures


def embedded_figures(folder: Path, name: str) -> dict[str, float | bool]:
    """The target network with its weights inside the plan: peak memory over the bytes of the weights."""
    checkpoint, _ = hollow_checkpoint(folder / name, EMBEDDED[name])
    fill(checkpoint / "target" / "rank0.safetensors")
    facts, peak_mb = build_network(checkpoint, "target", folder / f"{name}.engine", weights="embedded")
    return {
        f"{name}_embedded_build_s": facts.build_s,
        f"{name}_embedded_build_peak_mb": round(peak_mb, 1),
        f"{name}_embedded_weights_mb": round(facts.weight_bytes / 1e6, 1),
        f"{name}_embedded_peak_over_weights": round(peak_mb * 1e6 / facts.weight_bytes, 2),
    }


def build_network(
    checkpoint: Path, network: Network, file: Path, *, weights: WeightsMode, block_size: int = _BLOCK
) -> tuple[PlanFacts, float]:
    """One plan for SM120 at the default limits: its facts, and the peak host memory of its process in MB."""
    limits = BuildLimits(16, 4096, 2048, block_size, 1)
    limits = BuildLimits(16, 4096, 2048, block_size, linear_row_tokens(limits) - block_size)
    job = PlanJob(
        backend="tensorrt-rtx",
        network=network,
        lowering="native",
        weights=weights,
        checkpoint=str(checkpoint.absolute()),
        rank=0,
        limits=limits,
        target_sm=(120,),
        file=str(file.absolute()),
        name=file.name,
        timing_cache=None,
    )
    facts, peak_mb = run_plan_worker(job, None)
    file.unlink()
    return facts, peak_mb


def hollow_checkpoint(checkpoint: Path, shape: Shape) -> tuple[Path, int]:
    """Write the pair's configurations and rank files without data; the directory, and bytes of the target's weights."""
    target, drafter, one = _target(shape), _drafter(shape), ParallelMapping(1)
    for model in ("target", "drafter"):
        (checkpoint / model).mkdir(parents=True)
    write_target_config(checkpoint / "target" / "config.json", target, one, QuantizationConfig())
    write_drafter_config(checkpoint / "drafter" / "config.json", drafter, one)
    weight_bytes = _write_hollow(checkpoint / "target" / "rank0.safetensors", plan_target(target, 1))
    _write_hollow(
        checkpoint / "drafter" / "rank0.safetensors", plan_drafter(drafter, set(), source_vocab_size=shape.vocab)
    )
    return checkpoint, weight_bytes


def _target(shape: Shape) -> TargetConfig:
    return TargetConfig(
        family="qwen3",
        architecture="Qwen3ForCausalLM",
        dtype="bfloat16",
        vocab_size=shape.vocab,
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=_HEAD_DIM,
        rms_norm_eps=1e-6,
        rope=_ROPE,
        max_position_embeddings=_POSITIONS,
        tie_word_embeddings=False,
        qk_norm=True,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        sliding_windows=(None,) * shape.layers,
        bos_token_id=None,
        eos_token_ids=(shape.vocab - 1,),
        pad_token_id=None,
    )


def _drafter(shape: Shape) -> DrafterConfig:
    return DrafterConfig(
        version=2,
        source_format="z-lab",
        dtype="bfloat16",
        vocab_size=shape.vocab,
        draft_vocab_size=None,
        num_layers=_DRAFTER_LAYERS,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=_HEAD_DIM,
        rms_norm_eps=1e-6,
        target_hidden_size=shape.hidden,
        rope=_ROPE,
        max_position_embeddings=_POSITIONS,
        qk_norm=True,
        attention_bias=False,
        layers=(DrafterLayerAttention(window=None, causal=False),) * _DRAFTER_LAYERS,
        block_size=_BLOCK,
        mask_token_id=shape.vocab - 2,
        target_layer_ids=tuple(1 + n * (shape.layers - 4) // 4 for n in range(5)),
        num_target_layers=shape.layers,
        conv=ConvConfig(kernel_size=2, group_size=16),
        selector=SelectorConfig(rank=256, top_k=16),
    )


def _write_hollow(file: Path, plan: Plan) -> int:
    """A safetensors file with every tensor of ``plan`` and no data (a sparse file); bytes it pretends to have."""
    header: dict[str, object] = {}
    offset = 0
    for planned in plan.tensors:
        for spec in planned.specs(torch.bfloat16, "none", 1):
            size = math.prod(spec.shape) * spec.dtype.itemsize
            header[spec.name] = {
                "dtype": _SAFETENSORS_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + size],
            }
            offset += size
    text = json.dumps(header).encode()
    # Data begins where any dtype may.
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + offset)
    return offset


def fill(file: Path) -> None:
    """Random bfloat16 numbers instead of the holes of a hollow rank file."""
    generator = torch.Generator().manual_seed(0)
    with file.open("r+b") as out:
        out.seek(8 + int.from_bytes(out.read(8), "little"))
        while left := os.fstat(out.fileno()).st_size - out.tell():
            numbers = torch.randn(min(left, _FILL_BYTES) // 2, generator=generator) * 0.02
            out.write(numbers.to(torch.bfloat16).view(torch.uint8).numpy().tobytes())
