"""What ``sweep --predict`` asks for, in words, and the curves it gives."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trtllm_dflash.bench.predict import (
    EngineModel,
    held_out_errors,
    median_error,
    model_of,
    scaled,
    with_acceptance,
    with_cycle_table,
)
from trtllm_dflash.errors import ConfigError

# GB/s of memory and dense bf16 TFLOP/s, from NVIDIA's data sheets of the SXM parts.
GPUS: dict[str, tuple[float, float]] = {
    "A100": (2039, 312),
    "H100": (3350, 989),
    "H200": (4800, 989),
    "B200": (8000, 2250),
    "B300": (8000, 2250),
}
LAYER_COMM_US = 15.0
KEYS = "from=LABEL, al=X, S=N, gpu=NAME, bandwidth-x=R, flops-x=R, tp=N, comm-us=U"

CycleTable = dict[int, dict[int, float]]


def predict_curve(
    document: Mapping[str, Any], words: str, *, concurrencies: Sequence[int], table: CycleTable | None = None
) -> dict[str, Any]:
    """One entry of ``predictions`` in ``results.json``.

    Args:
        document: measured results. words: comma-separated ``key=value`` of ``KEYS``; ``from`` may be left out when
            there is one speculative configuration.
        concurrencies: where to predict. table: a cycle table that replaces the one made of measured points.

    Raises:
        ConfigError: unknown words, or what they ask for cannot be predicted from this.
    """
    asked = _parse(words)
    label = asked.pop("from", None) or _only_speculative(document)
    errors = held_out_errors(document, label)
    model = model_of(document, label)
    said: list[str] = [f"from {label}"]
    shared = f"{model.pass_share:.0%} of a prefill is its pass, which prompts share" if model.pass_share else None
    model = _other_block(document, model, asked, table, said)
    if "al" in asked:
        length = _number("al", asked.pop("al"))
        model = with_acceptance(model, length)
        said.append(f"acceptance length {length:g}")
    model = _other_hardware(document, model, asked, said)
    if asked:
        raise ConfigError(f"--predict {words!r}: unknown {', '.join(asked)}, expected some of {KEYS}")
    median = median_error(errors)
    error_text = (
        "error on held-out points unknown (3 measured concurrencies are needed)"
        if median is None
        else f"median error on held-out measured points {median:.1%}"
    )
    return {
        "label": f"{label}: {', '.join(said[1:])}" if said[1:] else label,
        "from": label,
        "words": words,
        "assumptions": "; ".join(filter(None, [*said, shared, error_text])),
        "held_out": errors,
        "median_error": median,
        "points": [model.predict(concurrency) for concurrency in concurrencies],
    }


def read_cycle_table(path: Path) -> CycleTable:
    """Read ``{"cycle_s": {"S": {"batch": seconds}}}``.

    Raises:
        ConfigError: by file and place.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        table = {
            int(size): {int(batch): float(seconds) for batch, seconds in column.items()}
            for size, column in document["cycle_s"].items()
        }
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        expected = 'expected {"cycle_s": {"8": {"1": 0.0041, "2": 0.0042}}}: seconds by block size and batch'
        raise ConfigError(f"{path}: is not a cycle table: {expected}") from error
    if not table or any(not column or min(column.values()) <= 0 for column in table.values()):
        raise ConfigError(f"{path}: a cycle table needs seconds above 0 for each block size")
    return table


def _other_block(
    document: Mapping[str, Any], model: EngineModel, asked: dict[str, str], table: CycleTable | None, said: list[str]
) -> EngineModel:
    size = int(_number("S", asked.pop("S"))) if "S" in asked else None
    if table is None:
        table = _measured_table(document) if size is not None else None
    if table is None:
        return model
    if size is not None:
        said.append(f"block size {size}")
    return with_cycle_table(model, table, model.block_size if size is None else size)


def _measured_table(document: Mapping[str, Any]) -> CycleTable:
    """Cycle times of every block size that the sweep measured in this process."""
    table: CycleTable = {}
    for configuration in document["configurations"]:
        size = configuration["facts"].get("block_size")
        if size is not None and size not in table:
            line = model_of(document, configuration["label"]).cycle_s
            table[size] = {int(place): value for place, value in zip(line.places, line.values, strict=True)}
    return table


def _other_hardware(
    document: Mapping[str, Any], model: EngineModel, asked: dict[str, str], said: list[str]
) -> EngineModel:
    bandwidth, flops = 1.0, 1.0
    if "gpu" in asked:
        name = asked.pop("gpu").upper()
        here = next((gpu for gpu in GPUS if any(gpu in found for found in document["machine"]["gpus"])), None)
        if name not in GPUS or here is None:
            raise ConfigError(
                f"--predict gpu={name} from {document['machine']['gpus'] or 'a CPU'}: both must be known of "
                f"{', '.join(GPUS)}",
                hint="give bandwidth-x=R and flops-x=R: how many times the measured machine's",
            )
        bandwidth, flops = (new / old for new, old in zip(GPUS[name], GPUS[here], strict=True))
        said.append(f"on {name} ({bandwidth:.2f}x bandwidth, {flops:.2f}x FLOP/s of {here})")
    elif "bandwidth-x" in asked or "flops-x" in asked:
        bandwidth = _number("bandwidth-x", asked.pop("bandwidth-x", "1"))
        flops = _number("flops-x", asked.pop("flops-x", str(bandwidth)))
        said.append(f"{bandwidth:g}x bandwidth, {flops:g}x FLOP/s")
    tp = int(_number("tp", asked.pop("tp", "1")))
    comm_us = _number("comm-us", asked.pop("comm-us", str(LAYER_COMM_US)))
    if tp > 1:
        if model.layers is None:
            raise ConfigError("--predict tp: the target's layers are not known, expected an engine in process")
        said.append(f"tensor parallel {tp} ({comm_us:g} us of communication a layer)")
    if (bandwidth, flops, tp) == (1.0, 1.0, 1):
        return model
    return scaled(model, bandwidth=bandwidth, flops=flops, tp=tp, layer_comm_s=comm_us / 1e6)


def _only_speculative(document: Mapping[str, Any]) -> str:
    labels = [c["label"] for c in document["configurations"] if c["facts"].get("speculation")]
    if len(labels) != 1:
        raise ConfigError(
            f"--predict: {len(labels)} speculative configurations were measured, so it must say which",
            hint="add from=LABEL: " + ", ".join(c["label"] for c in document["configurations"]),
        )
    return str(labels[0])


def _parse(words: str) -> dict[str, str]:
    asked = {}
    for part in words.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or not key or not value:
            raise ConfigError(f"--predict {words!r}: expected key=value of {KEYS}")
        asked[key] = value
    return asked


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"--predict: {key} is {text!r}, expected a number") from error
