"""Rank files that are mapped, not read."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from trtllm_dflash.engine.rank_file import RankFile

BYTES = 64 << 20


def resident_file_bytes() -> int:
    """Bytes of mapped files that this process has in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile:"))


def test_released_pages_leave_memory_and_come_back(tmp_path: Path) -> None:
    stored = torch.randint(256, (BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    save_file({"weights": stored}, tmp_path / "rank0.safetensors")
    file = RankFile(tmp_path / "rank0.safetensors", shapes_only=False)
    tensor = file["weights"]
    before = resident_file_bytes()
    assert torch.equal(tensor, stored)
    mapped = resident_file_bytes() - before
    assert mapped > BYTES // 2
    file.release_pages()
    assert resident_file_bytes() - before < BYTES // 8
    assert torch.equal(tensor, stored)


def test_shapes_alone_have_nothing_to_release(tmp_path: Path) -> None:
    save_file({"weights": torch.zeros(3, 4)}, tmp_path / "rank0.safetensors")
    file = RankFile(tmp_path / "rank0.safetensors", shapes_only=True)
    file.release_pages()
    assert (file["weights"].shape, file["weights"].device.type) == ((3, 4), "meta")
