"""Target families: a registry filled by the modules of this package that define ``FAMILY``."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import get_args

from trtllm_dflash.config.dtypes import ComputeDtype
from trtllm_dflash.config.families.family import Family, TensorNames
from trtllm_dflash.config.json_reader import JsonObject, config_file, read_json
from trtllm_dflash.config.target import TargetConfig

__all__ = ["Family", "TensorNames", "families", "family_named", "parse_target_config"]


@cache
def families() -> dict[str, Family]:
    """Every registered family by name."""
    modules = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
    found = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    return {family.name: family for family in sorted(found, key=lambda family: family.name)}


def family_named(name: str) -> Family:
    """The family that ``TargetConfig.family`` names."""
    return families()[name]


def parse_target_config(path: str | Path, *, dtype: str | None = None) -> TargetConfig:
    """Parse a target's Hugging Face configuration.

    Args:
        path: checkpoint directory, or its config.json. A generation_config.json beside it gives the EOS ids.
        dtype: compute dtype; None takes the file's own (``dtype`` or ``torch_dtype``), float32 if it names none.

    Raises:
        ConfigError: missing, wrong or unsupported values, by file and key; a drafter's configuration.
    """
    config = read_json(config_file(Path(path)))
    architecture = _architecture(config)
    for family in families().values():
        if architecture in family.architectures:
            return family.parse(config, architecture, dtype or declared_dtype(config) or "float32")
    supported = ", ".join(sorted(name for family in families().values() for name in family.architectures))
    raise config.error("architectures", f"a supported target architecture: {supported}")


def declared_dtype(config: JsonObject) -> ComputeDtype | None:
    """The dtype that a Hugging Face config.json declares, or None."""
    key = "dtype" if config.has("dtype") else "torch_dtype"
    if not config.has(key):
        return None
    name = config.string(key).removeprefix("torch.")
    for known in get_args(ComputeDtype):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise config.error(key, "one of " + ", ".join(get_args(ComputeDtype)), hint="pass --dtype")


def _architecture(config: JsonObject) -> str:
    # Imported here: the drafter formats ask this package which architectures are targets.
    from trtllm_dflash.config.drafter_formats import looks_like_drafter

    if looks_like_drafter(config):
        raise config.error(
            "architectures",
            "a target model; this directory holds a DFlash drafter",
            hint="were target and drafter swapped? give the target with --target, its drafter with --drafter",
        )
    if not config.has("architectures") and (config.has("kind") or config.has("architecture")):
        raise config.error(
            "architectures",
            "a Hugging Face configuration; this directory was converted already",
            hint="give the Hugging Face directory or id that it was made from",
        )
    names = config.strings("architectures")
    if len(names) != 1:
        raise config.error("architectures", "a list of exactly one architecture")
    return names[0]
