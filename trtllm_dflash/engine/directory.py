"""The engine directory: what ``build`` wrote, read back and opened as a session."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from trtllm_dflash.checkpoint.directory_kind import directory_kind
from trtllm_dflash.checkpoint.manifest import FileRecord, manifest_from_json, verify_directory
from trtllm_dflash.checkpoint.read import RankTensors
from trtllm_dflash.checkpoint.trtllm_config import DRAFTER_KEY, parse_target_config
from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.json_reader import JsonObject, read_json
from trtllm_dflash.config.mapping import QuantAlgo, QuantizationConfig
from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.config.typed_json import from_json
from trtllm_dflash.engine.plan_facts import TensorRTFacts
from trtllm_dflash.engine.session import EngineSession
from trtllm_dflash.engine.torch_session import KernelChoice, TorchSession
from trtllm_dflash.engine.torch_weights import TorchWeightSource
from trtllm_dflash.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
KIND = "engine"

Backend = Literal["torch", "tensorrt", "tensorrt-rtx"]


@dataclass(frozen=True)
class EngineDirectory:
    """An opened engine directory.

    Attributes:
        path: the directory. toolkit_version: what built it. backend: what runs it.
        target_config, drafter_config: the models; no drafter is None. quantization: the target's.
        limits: what it was built for. tp_size: ranks.
        source: names and revisions of what was converted. files: size and SHA-256 of every file.
        tensorrt: what built the plans; None for the torch backend.
    """

    path: Path
    toolkit_version: str
    backend: Backend
    target_config: TargetConfig
    drafter_config: DrafterConfig | None
    quantization: QuantizationConfig
    limits: BuildLimits
    tp_size: int
    source: Mapping[str, object]
    files: Mapping[str, FileRecord]
    tensorrt: TensorRTFacts | None = None


def open_engine_directory(path: str | Path, *, verify: bool = True) -> EngineDirectory:
    """Read and check an engine directory.

    Args:
        path: the directory. verify: check the SHA-256 of every file, not only that config.json is sound.

    Raises:
        ConfigError: not an engine directory, or a damaged config.json, by file and key.
        CheckpointError: a file is missing, truncated or changed, by name.
    """
    directory = Path(path)
    config_file = directory / "config.json"
    if not config_file.is_file():
        state = "has no config.json, so it is not an engine directory" if directory.is_dir() else "no such directory"
        raise ConfigError(f"{directory}: {state}", hint="make one with: trtllm-dflash build -c CHECKPOINT -o ENGINES")
    root = read_json(config_file)
    if directory_kind(root) != KIND:
        raise root.error("kind", f'"{KIND}"', hint="build it first: trtllm-dflash build -c CHECKPOINT -o ENGINES")
    if root.integer("format_version") != FORMAT_VERSION:
        raise root.error("format_version", str(FORMAT_VERSION), hint="build again with this version of the toolkit")
    backend = root.string("backend")
    if backend not in ("torch", "tensorrt", "tensorrt-rtx"):
        raise root.error("backend", "torch, tensorrt or tensorrt-rtx")
    files = manifest_from_json(root.child("files"))
    if verify:
        verify_directory(directory, files)
    pretrained = read_json(directory / "target" / "config.json").child("pretrained_config")
    target_config, _, quantization = parse_target_config(pretrained)
    drafter_config = None
    if root.has("pairing"):
        drafter = read_json(directory / "drafter" / "config.json").child("pretrained_config").child(DRAFTER_KEY)
        drafter_config = from_json(DrafterConfig, drafter)
    return EngineDirectory(
        path=directory,
        toolkit_version=root.string("version"),
        backend=backend,  # type: ignore[arg-type]
        target_config=target_config,
        drafter_config=drafter_config,
        quantization=quantization,
        limits=from_json(BuildLimits, root.child("limits")),
        tp_size=root.integer("tp_size", minimum=1),
        source=_data(root, "source"),
        files=files,
        tensorrt=from_json(TensorRTFacts, root.child("tensorrt")) if root.has("tensorrt") else None,
    )


def load_session(path: str | Path, *, device: str | None = None, kernels: KernelChoice = "auto") -> EngineSession:
    """Open the engine directory ``path`` and load its networks on ``device`` (None: first GPU, else CPU).

    ``kernels`` is what the torch backend computes with on a GPU, see :class:`TorchSession`.

    Raises:
        EngineError: the backend or the device cannot run here.
        ConfigError: ``device`` is none, or the engine is for several ranks. ConfigError, CheckpointError: as
            :func:`open_engine_directory`.
    """
    engine = open_engine_directory(path)
    refuse_several_ranks(engine)
    if engine.backend != "torch":
        from trtllm_dflash.engine.tensorrt_session import open_tensorrt_session

        return open_tensorrt_session(engine, _device(device))
    return _torch_session(engine, _device(device), kernels)


def refuse_several_ranks(engine: EngineDirectory) -> None:
    """Plans of several ranks can be built, and this version runs one rank. Raises ``ConfigError``."""
    if engine.tp_size != 1:
        raise ConfigError(
            f"{engine.path}: built for {engine.tp_size} ranks; this version runs engines of one rank",
            hint="convert with --tp-size 1",
        )


def _torch_session(engine: EngineDirectory, device: torch.device, kernels: KernelChoice) -> TorchSession:
    dtype = getattr(torch, engine.target_config.dtype)
    cache_dtype = None
    if engine.quantization.kv_cache_dtype == "fp8":
        if device.type == "cuda":
            cache_dtype = torch.float8_e4m3fn
        else:
            logger.warning("the KV cache is %s here: an fp8 cache needs the CUDA kernels", engine.target_config.dtype)

    def source(model: str, quantization: QuantAlgo) -> TorchWeightSource:
        tensors = RankTensors(engine.path / model / "rank0.safetensors")
        return TorchWeightSource(tensors, device, dtype, quantization)

    return TorchSession(
        engine.target_config,
        engine.drafter_config,
        engine.limits,
        target=source("target", engine.quantization.algo),
        drafter=None if engine.drafter_config is None else source("drafter", "none"),
        device=device,
        dtype=dtype,
        kernels=kernels,
        target_cache_dtype=cache_dtype,
    )


def _device(wanted: str | None) -> torch.device:
    if wanted is None:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(f"device {wanted!r}: expected cpu or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {wanted!r}: expected cpu or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineError(
            f"device {wanted!r}: no CUDA GPU is available", hint="trtllm-dflash doctor says what is missing"
        )
    return device


def _data(root: JsonObject, key: str) -> Mapping[str, object]:
    return root.child(key).data if root.has(key) else {}
