"""Cycles of the Qwen3-8B shape with a five-layer DFlash 2 drafter, random weights, forced acceptance, on one GPU."""

from __future__ import annotations

import random
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_roofline import DeviceCeilings, cycle_cost
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.config.drafter import ConvConfig, DrafterConfig, DrafterLayerAttention, SelectorConfig
from trtllm_dflash.config.mapping import QuantAlgo
from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.config.rope import RopeConfig
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.engine.random_weights import random_session
from trtllm_dflash.runtime.cycle_runner import EngineOptions
from trtllm_dflash.runtime.launch_trace import CycleSpans
from trtllm_dflash.runtime.outputs import OutputChunk

FORCED_ACCEPTANCE = 6.35
CONTEXT = 1024


def qwen3_8b(layers: int = 36) -> TargetConfig:
    """Qwen3-8B's geometry."""
    return TargetConfig(
        family="qwen3",
        architecture="Qwen3ForCausalLM",
        dtype="bfloat16",
        vocab_size=151936,
        num_layers=layers,
        hidden_size=4096,
        intermediate_size=12288,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e6, 128),
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        qk_norm=True,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        sliding_windows=(None,) * layers,
        bos_token_id=None,
        eos_token_ids=(1,),
        pad_token_id=None,
    )


def dflash2_drafter(target: TargetConfig, block_size: int = 16) -> DrafterConfig:
    """A five-layer DFlash 2 drafter of the target's width: two taps in groups of 64, rank 256, 16 candidates."""
    few = target.num_layers < 9  # of a dry run
    captured = [n if few else 1 + (target.num_layers - 4) * n // 4 for n in range(min(5, target.num_layers))]
    return DrafterConfig(
        version=2,
        source_format="z-lab",
        dtype=target.dtype,
        vocab_size=target.vocab_size,
        draft_vocab_size=None,
        num_layers=5,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=1e-6,
        target_hidden_size=target.hidden_size,
        rope=target.rope,
        max_position_embeddings=40960,
        qk_norm=True,
        attention_bias=False,
        layers=(DrafterLayerAttention(None, False),) * 5,
        block_size=block_size,
        mask_token_id=2,
        target_layer_ids=tuple(captured),
        num_target_layers=target.num_layers,
        conv=ConvConfig(2, 64),
        selector=SelectorConfig(256, 16),
    )


class ShapeBench:
    """One random pair on the GPU, opened again and again with other settings.

    Args:
        tokenizer: any tokenizer directory of fewer ids. layers: fewer than 36 for a dry run.
    """

    def __init__(
        self,
        tokenizer: Path,
        device: torch.device,
        ceilings: DeviceCeilings,
        *,
        layers: int = 36,
        max_batch_size: int = 64,
        quantization: QuantAlgo = "none",
        target_cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.target = qwen3_8b(layers)
        self.drafter = dflash2_drafter(self.target)
        self._limits = BuildLimits(max_batch_size, 2048, 4096, 16, 32)
        self._tokenizer = tokenizer
        self._ceilings = ceilings
        self._quantization: QuantAlgo = quantization
        self._cache_dtype = target_cache_dtype
        self._device = device

    def open(self, block_size: int, **options: Any) -> LLM:
        """An LLM with this block size (1 = plain decoding, the drafter's cache kept valid)."""
        torch.manual_seed(0)
        session = random_session(
            self.target,
            self.drafter,
            self._limits,
            device=self._device,
            quantization=self._quantization,
            target_cache_dtype=self._cache_dtype,
        )
        forced = FORCED_ACCEPTANCE if block_size > FORCED_ACCEPTANCE else None
        if block_size == 1:
            forced = 1.0
        return LLM.of_session(
            session,
            self._tokenizer,
            speculation="on",
            block_size=block_size,
            kv_cache_tokens=64 * 2048,
            options=EngineOptions(forced_acceptance=forced, **options),
        )

    def cycles(self, llm: LLM, batch: int) -> dict[str, float]:
        """Seconds per cycle in the engine and of graph replays alone, against the roofline, at about 1k of context."""
        block_size = llm.block_size
        replay = llm.profiler.table([batch], [block_size], context=CONTEXT, repeats=15).at(batch, block_size)
        engine, acceptance, spans = _engine_cycle(llm, batch)
        fp8 = self._quantization == "fp8"
        cost = cycle_cost(
            self.target,
            self.drafter,
            batch=batch,
            block_size=block_size,
            context=CONTEXT,
            matrix_bytes=1 if fp8 else 2,
            cache_bytes=2 if self._cache_dtype is None else 1,
        )
        by_bytes, by_flops = cost.seconds(self._ceilings)
        roofline = max(by_bytes, by_flops)
        return {
            "batch": batch,
            "block_size": block_size,
            "engine_ms": engine * 1e3,
            "replay_ms": replay * 1e3,
            "roofline_bytes_ms": by_bytes * 1e3,
            "roofline_flops_ms": by_flops * 1e3,
            "engine_over_roofline": engine / roofline,
            "replay_over_roofline": replay / roofline,
            "replay_over_engine": replay / engine,
            "busy_ms": statistics.median(spans.busy) * 1e3,
            # The device between two cycles: the host's part of the critical path, copies of results included.
            "host_us": statistics.median(spans.idle) * 1e6,
            "host_mean_us": statistics.mean(spans.idle) * 1e6,
            "acceptance_length": acceptance,
            "tokens_per_s": batch * acceptance / engine,
        }


def _engine_cycle(llm: LLM, batch: int, cycles: int = 60) -> tuple[float, float, CycleSpans]:
    """While ``batch`` requests run: median seconds between one's chunks, acceptance length, the device's spans."""
    draw = random.Random(0)
    block_size = llm.block_size
    length = CONTEXT - int(cycles * min(FORCED_ACCEPTANCE, block_size) / 2)
    prompts = [[draw.randrange(10, 40000) for _ in range(length)] for _ in range(batch)]
    per_cycle = FORCED_ACCEPTANCE if block_size > FORCED_ACCEPTANCE else float(min(block_size, 4))
    params = SamplingParams(temperature=0.0, max_tokens=max(8, int(cycles * per_cycle)), ignore_eos=True)
    moments: list[float] = []

    def note(index: int, chunk: OutputChunk) -> None:
        if index == batch - 1:
            moments.append(time.perf_counter())

    with llm.profiler.traced() as trace:
        outputs = llm.generate(prompts, params, on_chunk=note)
    spans = trace.spans()
    # The first chunks still share the device with other requests' prompts, the last cycles may be shorter.
    steady = moments[6:-4]
    gaps = [later - earlier for earlier, later in pairwise(steady)]
    committed = sum(output.metrics.completion_tokens - 1 for output in outputs)
    acceptance = committed / sum(output.metrics.cycles for output in outputs)
    # The same cycles: before them other requests' prompts took turns with them.
    kept = slice(-len(moments) + 6, -4)
    return statistics.median(gaps), acceptance, CycleSpans(spans.busy[kept], spans.idle[kept])
