"""``deploy --runtime trtllm``: the same pair on TensorRT-LLM's own PyTorch backend, for comparison on one machine.

Writes configuration only: ``model.yaml`` for Triton's ``llmapi`` model and a YAML for ``trtllm-serve``, both with
DFlash as ``speculative_config``. Field names are those of TensorRT-LLM 1.3.0rc27 to 1.4.0rc1 (``DFlashDecodingConfig``,
``all_models/llmapi``). TensorRT-LLM loads the Hugging Face checkpoints, not our engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trtllm_dflash.checkpoint.atomic_directory import atomic_directory
from trtllm_dflash.config.json_reader import read_json
from trtllm_dflash.config.sampling import SpeculationMode
from trtllm_dflash.engine.directory import EngineDirectory, open_engine_directory
from trtllm_dflash.errors import ConfigError
from trtllm_dflash.serving.deploy_choices import check_choices

IDENTITY = "trtllm_runtime.json"
SERVE_CONFIG = "trtllm_serve.yaml"
MODEL_CONFIG = "model.yaml"
FREE_MEMORY_FRACTION = 0.9

_NOTE = """\
# Written by `trtllm-dflash deploy --runtime trtllm` for TensorRT-LLM 1.3.0rc27 or later (PyTorch backend).
# {limits}
"""


@dataclass(frozen=True)
class TrtllmReport:
    """What was written: files in ``output``, and the commands that serve them."""

    output: Path
    files: tuple[str, ...]
    serve_command: str
    triton_commands: tuple[str, ...]


def deploy_trtllm(
    engines: Path,
    output: Path,
    *,
    target: str | None = None,
    drafter: str | None = None,
    prefix_cache: bool = True,
    speculation: SpeculationMode = "auto",
    block_size: int | None = None,
    max_running: int | None = None,
    kv_cache_tokens: int | None = None,
    force: bool = False,
) -> TrtllmReport:
    """Write the configuration directory ``output``.

    Args:
        engines: engine directory whose pair and limits are taken over.
        target, drafter: Hugging Face ids or directories; None takes what the engine was converted from.
        prefix_cache, speculation, block_size, max_running, kv_cache_tokens: as ``deploy``'s, in TensorRT-LLM's words;
            ``auto`` is ``on`` there, which has no block size that follows the load.
        force: replace a directory that this wrote before.

    Raises:
        ConfigError: the checkpoints are not known, the engine has no drafter, or a choice is beyond the engine.
        CheckpointError: ``output`` exists and is not empty (without ``force``), or is not ours.
    """
    directory = open_engine_directory(engines, verify=False)
    limits, pair = directory.limits, directory.drafter_config
    check_choices(
        engines.name,
        limits,
        has_drafter=pair is not None,
        speculation=speculation,
        block_size=block_size,
        max_running=max_running,
        kv_cache_tokens=kv_cache_tokens,
    )
    size = 1 if speculation == "off" else block_size or limits.block_size
    if pair is None and speculation != "off":
        raise ConfigError(
            f"{engines}: has no drafter, so there is no DFlash to configure",
            hint="plain decoding: --speculation off",
        )
    if drafter is not None and size == 1:
        raise ConfigError(f"drafter is {drafter!r} without speculation, expected none", hint="leave --drafter away")
    target = target or _source(directory, "target")
    cache: dict[str, object] = {"free_gpu_memory_fraction": FREE_MEMORY_FRACTION}
    if not prefix_cache:
        cache["enable_block_reuse"] = False
    if kv_cache_tokens is not None:
        cache["max_tokens"] = kv_cache_tokens
    settings: dict[str, object] = {
        "backend": "pytorch",
        "tensor_parallel_size": directory.tp_size,
        "pipeline_parallel_size": 1,
        "max_batch_size": max_running or limits.max_batch_size,
        "max_seq_len": limits.max_seq_len,
        "max_num_tokens": limits.max_num_tokens,
        "kv_cache_config": cache,
    }
    if pair is not None and size > 1:
        settings["speculative_config"] = {
            "decoding_type": "DFlash",
            "speculative_model": drafter or _source(directory, "drafter"),
            # TensorRT-LLM does not count the anchor.
            "max_draft_len": size - 1,
            "mask_token_id": pair.mask_token_id,
            "target_layer_ids": list(pair.target_layer_ids),
            # Without it, sampled requests are verified by equality with a sampled token: correct, but fewer accepted.
            "use_rejection_sampling": True,
        }
    note = _NOTE.format(limits=f"max_draft_len {size - 1} is block size {size}." if size > 1 else "Plain decoding.")
    files = {
        # trtllm-serve has the model as its argument.
        SERVE_CONFIG: note + _yaml({key: value for key, value in settings.items() if key != "backend"}),
        MODEL_CONFIG: note
        + _yaml({"model": target, **settings, "triton_config": {"max_batch_size": 0, "decoupled": True}}),
    }
    with atomic_directory(output, force=force, is_ours=is_trtllm_runtime) as staging:
        for name, text in files.items():
            (staging / name).write_text(text, encoding="utf-8")
        (staging / IDENTITY).write_text('{"kind": "trtllm_runtime", "format_version": 1}\n')
    return TrtllmReport(
        output=output,
        files=tuple(files),
        serve_command=f"trtllm-serve {target} --backend pytorch --config {output / SERVE_CONFIG}",
        triton_commands=(
            "cp -r /app/all_models/llmapi triton_models   # in NVIDIA's tritonserver image with TensorRT-LLM",
            f"cp {output / MODEL_CONFIG} triton_models/tensorrt_llm/1/model.yaml",
            "python3 /app/scripts/launch_triton_server.py --model_repo triton_models --no-mpi",
        ),
    )


def is_trtllm_runtime(path: Path) -> bool:
    """Whether ``path`` is a directory that :func:`deploy_trtllm` wrote."""
    try:
        return read_json(path / IDENTITY).string("kind") == "trtllm_runtime"
    except (ConfigError, OSError):
        return False


def _source(directory: EngineDirectory, which: str) -> str:
    """What the engine was converted from, if TensorRT-LLM can load it."""
    source = directory.source.get(which)
    name = source.get("name") if isinstance(source, Mapping) else None
    # The embedded demo target is a GGUF file, which TensorRT-LLM does not read.
    if not isinstance(name, str) or name == "demo" or not (Path(name).is_dir() or "/" in name):
        raise ConfigError(
            f"{directory.path}: was converted from {name!r}, expected a Hugging Face id or a directory for the {which}",
            hint=f"give --{which} with the Hugging Face checkpoint",
        )
    return name


def _yaml(document: Mapping[str, object]) -> str:
    import yaml

    return str(yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True))
