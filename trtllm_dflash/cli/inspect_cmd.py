"""``trtllm-dflash inspect``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from trtllm_dflash.checkpoint.directory_kind import directory_kind
from trtllm_dflash.config.json_reader import read_json
from trtllm_dflash.errors import ConfigError


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def inspect(path: Path, as_json: bool) -> None:
    """Facts of a checkpoint, engine or model-repository directory, with every file's hash checked.

    \b
    Example:
      trtllm-dflash inspect engines --json
    """
    facts = directory_facts(path)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    table = Table(show_header=False, box=None)
    for key, value in facts.items():
        if key == "drafter_layers":
            value = "\n".join(
                f"layer {index}: window {layer['window'] or 'full'}, {'causal' if layer['causal'] else 'not causal'}"
                for index, layer in enumerate(value)
            )
        if key == "plans":
            value = "\n".join(line for name, plan in value.items() for line in _plan_lines(name, plan))
        table.add_row(key, json.dumps(value) if isinstance(value, dict | list) else str(value))
    Console().print(table)


def _plan_lines(name: str, plan: dict[str, Any]) -> list[str]:
    layers = ", ".join(f"{count} {kind}" for kind, count in sorted(plan["layers"].items(), key=lambda x: -x[1]))
    return [
        f"{name}: {plan['file']}, {plan['plan_bytes'] / 1e6:.1f} MB, weights {plan['weights']}",
        *(f"  profile {profile}: {extent}" for profile, extent in plan["profiles"].items()),
        f"  layers: {layers}",
        f"  precisions: {', '.join(f'{count} {dtype}' for dtype, count in plan['precisions'].items())}",
    ]


def directory_facts(path: Path) -> dict[str, Any]:
    """Facts of a directory of ours; raises naming the first file that is missing or changed."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory")
    if (path / "config.json").is_file():
        kind = directory_kind(read_json(path / "config.json"))
        if kind == "checkpoint":
            return _checkpoint_facts(path)
        if kind == "engine":
            return _engine_facts(path)
        raise ConfigError(f"{path}/config.json: kind is {kind!r}, expected checkpoint or engine")
    from trtllm_dflash.serving.repository import repository_facts

    return repository_facts(path)


def _checkpoint_facts(path: Path) -> dict[str, Any]:
    from trtllm_dflash.checkpoint.read import open_checkpoint

    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    return {
        "kind": "checkpoint",
        **_model_facts(checkpoint.target_config, checkpoint.drafter_config),
        "tp_size": checkpoint.mapping.tp_size,
        "quantization": checkpoint.quantization.algo,
        "kv_cache_dtype": checkpoint.quantization.kv_cache_dtype,
        "source": dict(checkpoint.source),
        "bytes": sum(record.bytes for record in checkpoint.files.values()),
        "files": len(checkpoint.files),
        "hashes": "verified",
    }


def _engine_facts(path: Path) -> dict[str, Any]:
    from trtllm_dflash.engine.directory import open_engine_directory

    engine = open_engine_directory(path)
    return {
        "kind": "engine",
        "backend": engine.backend,
        "built_by": engine.toolkit_version,
        **_model_facts(engine.target_config, engine.drafter_config),
        "limits": asdict(engine.limits),
        "tp_size": engine.tp_size,
        "quantization": engine.quantization.algo,
        "source": dict(engine.source),
        **_plan_facts(engine),
        "bytes": sum(record.bytes for record in engine.files.values()),
        "files": len(engine.files),
        "hashes": "verified",
    }


def _plan_facts(engine: Any) -> dict[str, Any]:
    """What TensorRT's plans hold; nothing for the torch backend."""
    if engine.tensorrt is None:
        return {}
    from trtllm_dflash.engine.plan_build import read_plan_facts
    from trtllm_dflash.engine.plan_facts import Network

    facts = engine.tensorrt
    networks: tuple[Network, ...] = ("target",) if engine.drafter_config is None else ("target", "inject", "draft")
    plans = {}
    for rank in range(engine.tp_size):
        for network in networks:
            plan = read_plan_facts(engine.path, network, rank)
            name = network if engine.tp_size == 1 else f"{network} rank {rank}"
            plans[name] = {
                "file": plan.file,
                "plan_bytes": plan.plan_bytes,
                "weights": f"{plan.weights}, {len(plan.bindings)} inputs, {plan.weight_bytes / 1e6:.1f} MB",
                "build_s": plan.build_s,
                "profiles": {p.name: f"requests up to {p.rows}, each up to {p.queries} tokens" for p in plan.profiles},
                "layers": {entry.name: entry.count for entry in plan.layers},
                "precisions": {entry.name: entry.count for entry in plan.precisions},
                "inputs": {t.name: f"{t.dtype} {list(t.shape)}" for t in plan.inputs if "_cache." not in t.name},
                "outputs": {t.name: f"{t.dtype} {list(t.shape)}" for t in plan.outputs if "_cache_" not in t.name},
            }
    return {
        "tensorrt": f"{facts.package} {facts.version}",
        "target_sm": list(facts.target_sm),
        "lowering": facts.lowering,
        **_plugin_library(facts.plugin_library),
        "cache": f"{facts.cache}, rows of {facts.row_tokens} tokens" if facts.row_tokens else facts.cache,
        "build_peak_host_mb": facts.peak_host_mb,
        "plans": plans,
    }


def _plugin_library(library: Any) -> dict[str, Any]:
    return {} if library is None else {"plugin_library": asdict(library)}


def _model_facts(target: Any, drafter: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "target": target.architecture,
        "target_layers": target.num_layers,
        "target_hidden": target.hidden_size,
        "vocab_size": target.vocab_size,
        "dtype": target.dtype,
        "tied_embeddings": target.tie_word_embeddings,
    }
    if any(target.sliding_windows):
        facts["target_windows"] = list(target.sliding_windows)
    if drafter is None:
        return {**facts, "drafter": "none"}
    return {
        **facts,
        "drafter": f"DFlash {drafter.version} ({drafter.source_format})",
        "block_size": drafter.block_size,
        "mask_token_id": drafter.mask_token_id,
        "captured_layers": list(drafter.target_layer_ids),
        "drafter_layers": [{"window": layer.window, "causal": layer.causal} for layer in drafter.layers],
        "head": "own reduced vocabulary" if drafter.draft_vocab_size else "shared with the target",
        # At temperature > 0 version 1 draws every position from its own best candidates, not the best one.
        "proposals": "selector walk" if drafter.version == 2 else "per position",
        "selector": None
        if drafter.selector is None
        else {"rank": drafter.selector.rank, "top_k": drafter.selector.top_k},
        "conv": None
        if drafter.conv is None
        else {"kernel_size": drafter.conv.kernel_size, "group_size": drafter.conv.group_size},
    }
