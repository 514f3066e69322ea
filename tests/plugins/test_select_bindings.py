"""What can be held to the C header without a GPU: layouts, limits, and refusals before any launch."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from trtllm_dflash.errors import EngineError
from trtllm_dflash.ops import cuda_select

HEADER = Path(__file__).resolve().parents[2] / "plugins" / "include" / "dflash_select.h"
STRUCTURES = {
    "dflash_grouped_conv_params": cuda_select._GroupedConvParams,
    "dflash_candidates_params": cuda_select._CandidatesParams,
    "dflash_walk_params": cuda_select._WalkParams,
    "dflash_accept_params": cuda_select._AcceptParams,
}


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_parameter_blocks_have_the_layout_of_the_header(tmp_path: Path) -> None:
    lines = []
    for name, structure in STRUCTURES.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field in structure._fields_:
            lines.append(f'printf("{name}.{field[0]} %zu\\n", offsetof({name}, {field[0]}));')
    source = tmp_path / "layout.c"
    source.write_text(f'#include <stdio.h>\n#include "{HEADER}"\nint main(void) {{ {" ".join(lines)} return 0; }}\n')
    program = tmp_path / "layout"
    subprocess.run(["cc", "-Wall", "-Werror", "-o", str(program), str(source)], check=True)
    printed = dict(line.split() for line in subprocess.check_output([str(program)], text=True).splitlines())
    for name, structure in STRUCTURES.items():
        assert int(printed[name]) == ctypes.sizeof(structure)
        for field in structure._fields_:
            assert int(printed[f"{name}.{field[0]}"]) == getattr(structure, field[0]).offset, field[0]


def test_limits_equal_the_header() -> None:
    limits = dict(re.findall(r"#define (DFLASH_MAX_\w+) (\d+)", HEADER.read_text()))
    assert int(limits["DFLASH_MAX_CANDIDATES"]) == cuda_select.MAX_CANDIDATES
    assert int(limits["DFLASH_MAX_VOCABULARY"]) == cuda_select.MAX_VOCABULARY


def test_tensors_off_the_gpu_are_refused_by_name() -> None:
    x = torch.zeros(8, 16)
    with pytest.raises(EngineError, match=r"x: is on cpu, expected a CUDA device"):
        cuda_select.grouped_conv(x, torch.zeros(8, 4), torch.zeros(2, 16), 8, out=torch.zeros(8, 16))
    with pytest.raises(EngineError, match=r"logits: is on cpu"):
        cuda_select.candidates(torch.zeros(2, 100), 4)


def test_shapes_that_do_not_fit_are_refused_with_what_was_found() -> None:
    with pytest.raises(EngineError, match=r"dynamic: got \(8, 5\).*expected \[8, 2 \* groups\]"):
        cuda_select.grouped_conv(torch.zeros(8, 16), torch.zeros(8, 5), torch.zeros(2, 16), 8)
    with pytest.raises(EngineError, match=r"logits: got \(2, 100\) torch.int64"):
        cuda_select.candidates(torch.zeros(2, 100, dtype=torch.int64), 4)
    with pytest.raises(EngineError, match=r"unary: got \(1, 3, 4\).*expected \(1, 2, 4\)"):
        cuda_select.selector_walk(
            torch.zeros(1, 3, 4),
            torch.zeros(1, 2, 4, dtype=torch.int64),
            torch.zeros(1, 2, 8),
            torch.zeros(10, 8),
            torch.zeros(10, 8),
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(1),
            torch.zeros(1, 2),
        )
