"""Drafter checkpoint formats: which one a config.json is in, and its parser."""

from __future__ import annotations

from pathlib import Path

from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.drafter_formats import speculators, zlab
from trtllm_dflash.config.json_reader import JsonObject, config_file, read_json
from trtllm_dflash.errors import ConfigError

__all__ = ["looks_like_drafter", "parse_drafter_config"]

_REFUSED = {
    "DFlashLagunaForCausalLM": "Laguna's drafter (a gate per head, norms on single features, its own context path)",
    "DFlashMiMoForCausalLM": "MiMo's drafter (partial rotary, attention sinks, value scale)",
    "DominoDraftModel": "a Domino drafter",
    "DSparkDraftModel": "a DSpark drafter",
}


def parse_drafter_config(path: str | Path, *, dtype: str | None = None) -> DrafterConfig:
    """Parse a drafter's configuration in z-lab's or the Speculators format.

    Args:
        path: checkpoint directory, or its config.json.
        dtype: ``DrafterConfig.dtype``; None takes the file's own, float32 if it names none.

    Raises:
        ConfigError: missing, contradictory or unsupported values, by file and key; a target's configuration.
    """
    from trtllm_dflash.config.families import declared_dtype

    config = read_json(config_file(Path(path)))
    dtype = dtype or declared_dtype(config) or "float32"
    if config.has("speculators_model_type"):
        kind = config.string("speculators_model_type")
        if kind not in speculators.MODEL_TYPES:
            raise config.error("speculators_model_type", "one of " + ", ".join(speculators.MODEL_TYPES))
        zlab.refuse_side_files(config)
        return speculators.parse(config, dtype)
    names = config.strings("architectures")
    if len(names) == 1 and names[0] in zlab.ARCHITECTURES:
        zlab.refuse_side_files(config)
        return zlab.parse(config, dtype)
    raise _unknown(config, names)


def looks_like_drafter(config: JsonObject) -> bool:
    """Whether a config.json is a block drafter's, supported or not."""
    names = config.data.get("architectures")
    named = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return (
        config.has("dflash_config")
        or config.has("speculators_model_type")
        or any(name in zlab.ARCHITECTURES or name in _REFUSED or "dflash" in name.lower() for name in named)
    )


def _unknown(config: JsonObject, names: tuple[str, ...]) -> ConfigError:
    for name in names:
        if name in _REFUSED:
            return config.error("architectures", f"a supported drafter; {_REFUSED[name]} is not supported")
    supported = "a drafter: " + ", ".join(zlab.ARCHITECTURES) + ", or a Speculators model (dflash, dflash2)"
    if not looks_like_drafter(config):
        return config.error(
            "architectures",
            supported + "; this directory looks like a target model",
            hint="were target and drafter swapped? give the target with --target, its drafter with --drafter",
        )
    return config.error("architectures", supported)
