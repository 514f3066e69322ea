"""The cycle's bookkeeping kernels against the torch definitions, and the layout of their parameters."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trtllm_dflash.engine.session import EngineSession
from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops import cuda_cycle, cuda_select
from trtllm_dflash.ops.plugin_library import find_library
from trtllm_dflash.runtime import cycle
from trtllm_dflash.runtime.acceptance import Accepted
from trtllm_dflash.runtime.random_streams import uniforms
from trtllm_dflash.runtime.slots import MAX_STOP_IDS, SamplingMode, SlotRows, SlotState

HEADER = Path(__file__).resolve().parents[2] / "plugins" / "include" / "dflash_cycle.h"
STRUCTURES = {
    "dflash_cycle_gather_params": cuda_cycle._GatherParams,
    "dflash_cycle_cut_params": cuda_cycle._CutParams,
    "dflash_cycle_publish_params": cuda_cycle._PublishParams,
}


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_parameter_blocks_have_the_layout_of_the_header(tmp_path: Path) -> None:
    lines = []
    for name, structure in STRUCTURES.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        lines += [f'printf("{name}.{field[0]} %zu\\n", offsetof({name}, {field[0]}));' for field in structure._fields_]
    for name in ("DFLASH_STATE_INTS", "DFLASH_STATE_FLOATS", "DFLASH_MAX_STOP_IDS", "DFLASH_MAX_CYCLE_BLOCK"):
        lines.append(f'printf("{name} %zu\\n", (size_t){name});')
    source = tmp_path / "layout.c"
    source.write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n#include "{HEADER}"\nint main(void) {{ {" ".join(lines)} }}\n'
    )
    program = tmp_path / "layout"
    subprocess.run(["cc", "-Wall", "-Werror", "-o", str(program), str(source)], check=True)
    printed = dict(line.split() for line in subprocess.check_output([str(program)], text=True).splitlines())
    for name, structure in STRUCTURES.items():
        assert int(printed[name]) == ctypes.sizeof(structure)
        for field in structure._fields_:
            assert int(printed[f"{name}.{field[0]}"]) == getattr(structure, field[0]).offset, field[0]
    assert int(printed["DFLASH_STATE_INTS"]) == cuda_cycle.STATE_INTS
    assert int(printed["DFLASH_STATE_FLOATS"]) == cuda_cycle.STATE_FLOATS
    assert int(printed["DFLASH_MAX_STOP_IDS"]) == cuda_cycle.MAX_STOP_IDS == MAX_STOP_IDS
    assert int(printed["DFLASH_MAX_CYCLE_BLOCK"]) == cuda_cycle.MAX_BLOCK


def test_tensors_off_the_gpu_are_refused() -> None:
    rows = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(EngineError, match="needs CUDA tensors, got one on cpu"):
        cuda_cycle.cut(rows, rows[:, 0].contiguous(), rows[:, 0].bool(), rows[:, 0].contiguous(), torch.zeros(2, 64))


def _session(kernels: bool) -> EngineSession:
    facts: Any = SimpleNamespace(uses_kernels=kernels, limits=SimpleNamespace(page_tokens=16))
    return facts


def _state(generator: torch.Generator, slots: int, device: str) -> SlotState:
    state = SlotState(slots, 400, 12, 99, 50, torch.device(device))

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator).to(device)

    state._ints.copy_(draw(150, cuda_cycle.STATE_INTS, slots + 1))
    state.remaining.copy_(draw(7, slots + 1))
    state._floats.copy_(torch.rand(cuda_cycle.STATE_FLOATS, slots + 1, generator=generator).to(device))
    state.page_table.copy_(draw(99, slots + 1, 12))
    state.stop_ids.copy_(draw(60, slots + 1, MAX_STOP_IDS) - 1)
    return state


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.skipif(find_library() is None, reason="needs the compiled plugin library")
def test_every_step_equals_its_definition(seed: int) -> None:
    """Random states, batches with repeated idle slots, blocks of every length, stops anywhere, faults."""
    generator = torch.Generator().manual_seed(seed)
    slots_count = int(torch.randint(1, 70, (), generator=generator))
    block_size = int(torch.randint(1, 17, (), generator=generator))
    columns = int(torch.randint(1, 13, (), generator=generator))
    state = _state(generator, slots_count, "cuda")
    state.remaining[state.idle_slot] = 0
    live = torch.randperm(slots_count, generator=generator)[: max(1, slots_count // 2)]
    slots = torch.cat((live, torch.full((3,), state.idle_slot))).cuda()
    ours = state.gather(slots, columns, block_size, kernels=True)
    expected = state.gather(slots, columns, block_size)
    for name in SlotRows.__dataclass_fields__:
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name
    for lengths in (ours.block_lengths, torch.zeros_like(ours.block_lengths)):
        for mine, theirs in zip(
            cycle.block_rows(_session(True), ours, lengths, block_size),
            cycle.block_rows(_session(False), ours, lengths, block_size),
            strict=True,
        ):
            assert torch.equal(mine, theirs)
    batch = slots.shape[0]
    accepted = torch.minimum(
        torch.randint(0, block_size, (batch,), generator=generator).cuda(), (ours.block_lengths - 1).clamp_min(0)
    )
    tokens = torch.randint(0, 50 * (1 + seed % 9), (batch, block_size), generator=generator).cuda()
    faulty = (torch.rand(batch, generator=generator) < 0.1).cuda() & (ours.block_lengths > 0)
    produced, status, packed = cuda_cycle.cut(tokens, accepted, faulty, ours.remaining, ours.stop_ids)
    wanted = cycle._cut(ours, Accepted(tokens, accepted, faulty))
    assert torch.equal(produced, wanted[0])
    assert torch.equal(status, wanted[1])
    assert torch.equal(packed, torch.cat((tokens, produced[:, None], accepted[:, None], status[:, None]), 1))
    result = cycle.CycleResult(tokens, produced, accepted, status)
    before = state._ints.clone()
    cycle.publish(_session(False), state, expected, result, SamplingMode())
    theirs = state._ints.clone()
    state._ints.copy_(before)
    cycle.publish(_session(True), state, ours, result, SamplingMode())
    assert torch.equal(state._ints, theirs)


@pytest.mark.parametrize("word", [0, 1, 2])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.skipif(find_library() is None, reason="needs the compiled plugin library")
def test_uniforms_are_the_streams_own(word: int) -> None:
    seeds = torch.tensor([0, 1, -1, 1 << 40, -(1 << 63)], device="cuda")
    first = torch.tensor([0, 7, (1 << 32) - 2, 5, 1 << 33], device="cuda")
    positions = first[:, None] + torch.arange(9, device="cuda")
    assert torch.equal(cuda_select.uniforms(seeds, first, 9, word), uniforms(seeds, positions)[..., word])
