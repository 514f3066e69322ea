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
from trtllm_dflash.engine.directory import EngineDirectory, open_engine_directory
from trtllm_dflash.errors import ConfigError

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
    engines: Path, output: Path, *, target: str | None = None, drafter: str | None = None, force: bool = False
) -> TrtllmReport:
    """Write the configuration directory ``output``.

    Args:
        engines: engine directory whose pair and limits are taken over.
        target, drafter: Hugging Face ids or directories; None takes what the engine was converted from.
        force: replace a directory that this wrote before.

    Raises:
        ConfigError: the checkpoints are not known, or the engine has no drafter.
        CheckpointError: ``output`` exists and is not empty (without ``force``), or is not ours.
    """
    directory = open_engine_directory(engines, verify=False)
    pair = directory.drafter_config
    if pair is None:
        raise ConfigError(
            f"{engines}: has no drafter, so there is no DFlash to configure", hint="use trtllm-serve as it is"
        )
    target = target or _source(directory, "target")
    drafter = drafter or _source(directory, "drafter")
    limits = directory.limits
    settings: dict[str, object] = {
        "backend": "pytorch",
        "tensor_parallel_size": directory.tp_size,
        "pipeline_parallel_size": 1,
        "max_batch_size": limits.max_batch_size,
        "max_seq_len": limits.max_seq_len,
        "max_num_tokens": limits.max_num_tokens,
        "kv_cache_config": {"free_gpu_memory_fraction": FREE_MEMORY_FRACTION},
        "speculative_config": {
            "decoding_type": "DFlash",
            "speculative_model": drafter,
            # TensorRT-LLM does not count the anchor.
            "max_draft_len": limits.block_size - 1,
            "mask_token_id": pair.mask_token_id,
            "target_layer_ids": list(pair.target_layer_ids),
            # Without it, sampled requests are verified by equality with a sampled token: correct, but fewer accepted.
            "use_rejection_sampling": True,
        },
    }
    note = _NOTE.format(limits=f"max_draft_len {limits.block_size - 1} is block size {limits.block_size}.")
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
