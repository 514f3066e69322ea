"""Drafters whose decoder projections are quantised: convert leaves drafters alone, so tests store them themselves."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from trtllm_dflash.checkpoint.quantize import quantize
from trtllm_dflash.config.mapping import QuantAlgo

_PROJECTION = re.compile(r"(transformer\.layers\.\d+\.(?:attention\.(?:qkv|dense)|mlp\.(?:fc|gate|proj)))\.weight")


def quantised_drafter(tensors: Mapping[str, Tensor], algorithm: QuantAlgo) -> dict[str, Tensor]:
    """The drafter's tensors with the projections of its decoder layers stored by ``algorithm``."""
    out: dict[str, Tensor] = {}
    for name in tensors:
        projection = _PROJECTION.fullmatch(name)
        if projection is None:
            out[name] = tensors[name]
        else:
            parts = quantize(tensors[name], algorithm)
            out |= {f"{projection[1]}.{ending}": part for ending, part in parts.items()}
    assert len(out) > len(tensors)
    return out


def write_quantised_drafter(checkpoint: Path, output: Path, algorithm: QuantAlgo) -> Path:
    """A copy of a checkpoint directory with its drafter quantised (its manifest is the old one)."""
    shutil.copytree(checkpoint, output)
    file = output / "drafter" / "rank0.safetensors"
    save_file(quantised_drafter(load_file(file), algorithm), file)
    return output
