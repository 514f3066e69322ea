"""DFlash and DFlash 2 speculative decoding on TensorRT engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.errors import (
    BuildError,
    CheckpointError,
    ConfigError,
    DFlashError,
    EngineError,
    RequestError,
)

if TYPE_CHECKING:
    from trtllm_dflash.runtime.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BuildError",
    "CheckpointError",
    "ConfigError",
    "DFlashError",
    "EngineError",
    "RequestError",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # torch and transformers are loaded only by those who generate: `--help` and serving's proxy stay quick.
    if name == "LLM":
        from trtllm_dflash.runtime.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
