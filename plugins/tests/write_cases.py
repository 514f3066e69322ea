"""Write the cases of the plugin harness: inputs, and what the torch definitions make of them.

    python plugins/tests/write_cases.py FOLDER

Every case becomes a folder with ``case.txt`` (the format is described in ``plugin_case.h``) and the tensors' bytes.
Expected values are computed in float32 or float64 from the rounded inputs; a tolerance is one rounding of the result
plus the roundings inside (see ``tests/plugins/test_attention_kernels.py``). A NaN tolerance marks values of no meaning.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from attention_cases import Heads, block_case, injection_case, paged_case, write_case
from case_file import FLOAT8, Case
from select_cases import candidates_case, conv_case, walk_case


def all_cases() -> list[Case]:
    """Every form of every plugin, each element and index type at least once."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    ragged = Heads((0, 17, 300), (5, 1, 16))
    windowed = Heads((40, 3, 130), (4, 9, 1), kv_heads=4, head_dim=64, dtype=fp16, cache_dtype=fp16, window=33)
    float8 = Heads((31, 64), (3, 8), cache_dtype=FLOAT8, kv_scale=0.25)
    return [
        paged_case("attention_ragged", 1, ragged),
        paged_case("attention_window_sinks", 2, replace(windowed, index=torch.int32), sinks=True, extent=True),
        paged_case("attention_float8_verify", 3, replace(float8, queries=(8, 8)), max_query=8),
        write_case("attention_write_norm_rope", 4, ragged, qk_norm=True, rotary_dim=128),
        write_case("attention_write_partial_rope", 5, windowed, qk_norm=False, rotary_dim=32),
        write_case("attention_write_float8", 6, float8, qk_norm=False, rotary_dim=0),
        block_case("attention_block", 7, Heads((0, 100, 37), ()), 8, [8, 5, 0], causal=False),
        block_case(
            "attention_block_window_float8",
            8,
            Heads((500, 3), (), head_dim=96, cache_dtype=FLOAT8, kv_scale=0.5, window=5),
            16,
            [16, 16],
            causal=False,
        ),
        block_case("attention_block_split", 9, Heads((4001,), ()), 16, [16], causal=False),
        block_case(
            "attention_block_little_workspace",
            10,
            Heads((4001,), ()),
            16,
            [16],
            causal=True,
            fields={"workspace_mib": 1},
        ),
        block_case(
            "attention_block_no_split", 11, Heads((700, 2), ()), 8, [8, 8], causal=True, fields={"max_splits": 1}
        ),
        injection_case("inject_norm_rope", 12, layers=3, dtype=bf16, cache_dtype=bf16, rotary_dim=128, norm=True),
        injection_case("inject_float8", 13, layers=2, dtype=fp16, cache_dtype=FLOAT8, rotary_dim=64, norm=False),
        injection_case("inject_plain", 14, layers=1, dtype=fp16, cache_dtype=fp16, rotary_dim=0, norm=False),
        conv_case("conv_in", 15, bf16, residual=False, norm=False, second_half=False),
        conv_case("conv_in_float32", 16, fp32, residual=False, norm=False, second_half=True),
        conv_case("conv_out", 17, fp16, residual=True, norm=False, second_half=True),
        conv_case("conv_out_norm", 18, bf16, residual=True, norm=True, second_half=True),
        candidates_case("candidates", 19, bf16, valid=8990, offset=0, multiplier=1.0, softcap=0.0),
        candidates_case("candidates_float16_shard", 20, fp16, valid=9000, offset=70001, multiplier=1.0, softcap=0.0),
        candidates_case("candidates_softcap", 21, fp32, valid=9000, offset=0, multiplier=0.5, softcap=30.0),
        walk_case("walk", 22, bf16, seeded=False),
        walk_case("walk_seeded", 5000, fp16, seeded=True),
    ]


def main() -> None:
    """Write every case below the folder given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    cases = all_cases()
    for case in cases:
        case.write(folder)
    print(f"{folder}: {len(cases)} cases")


if __name__ == "__main__":
    main()
