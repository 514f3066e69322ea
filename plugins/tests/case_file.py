"""One case of the plugin harness: fields, inputs, expected outputs, and the folder it is written to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
EPS = 1e-6
NO_MEANING = float("nan")
Fields = dict[str, int | float | list[float]]


@dataclass
class Case:
    """One plugin call. ``fields``: int → ``kINT32``, float or list of float → ``kFLOAT32``."""

    name: str
    plugin: str
    fields: Fields
    inputs: dict[str, Tensor]
    outputs: dict[str, tuple[Tensor, Tensor, torch.dtype]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def expect(self, name: str, values: Tensor, tolerance: Tensor | float, dtype: torch.dtype, alias: str = "") -> None:
        """``values`` of output ``name`` within ``tolerance``; ``alias`` names the input it is written in place of."""
        bound = torch.as_tensor(tolerance, dtype=torch.float64).expand(values.shape)
        self.outputs[name] = (values.double(), bound, dtype)
        if alias:
            self.aliases[name] = alias

    def write(self, parent: Path) -> None:
        """Write the case's folder below ``parent``."""
        folder = parent / self.name
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"plugin {self.plugin}"]
        for name, value in self.fields.items():
            if isinstance(value, int):
                lines.append(f"int {name} {value}")
            else:
                reals = value if isinstance(value, list) else [value]
                lines.append(" ".join((f"real {name}", *(repr(float(real)) for real in reals))))
        for name, tensor in self.inputs.items():
            lines.append(f"input {name} {_type(tensor.dtype)} {_shape(tensor)}")
            (folder / f"{name}.bin").write_bytes(_bytes(tensor))
        order = list(self.inputs)
        for name, (values, tolerance, dtype) in self.outputs.items():
            alias = order.index(self.aliases[name]) if name in self.aliases else -1
            lines.append(f"output {name} {_type(dtype)} {_shape(values)} {alias}")
            (folder / f"{name}.expected.bin").write_bytes(_bytes(values))
            (folder / f"{name}.tolerance.bin").write_bytes(_bytes(tolerance))
        (folder / "case.txt").write_text("\n".join(lines) + "\n")


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(tensor: Tensor) -> str:
    return ",".join(map(str, tensor.shape))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


class Draw:
    """Random tensors of one case."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """Normal values of ``dtype``."""
        return (torch.randn(shape, generator=self.generator) * scale).to(dtype)

    def order(self, count: int) -> Tensor:
        """``0 .. count - 1`` shuffled, int64."""
        return torch.randperm(count, generator=self.generator)


def rounding(dtype: torch.dtype) -> float:
    """Half the relative distance of neighbouring values of ``dtype``."""
    return torch.finfo(dtype).eps / 2
