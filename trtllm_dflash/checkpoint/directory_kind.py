"""Which directory of ours a config.json is the root of, and what else it is where it is none of ours."""

from __future__ import annotations

from trtllm_dflash.config.drafter_formats import looks_like_drafter
from trtllm_dflash.config.json_reader import JsonObject
from trtllm_dflash.errors import ConfigError


def directory_kind(root: JsonObject) -> str:
    """The ``kind`` that ``convert`` and ``build`` write into the root config.json of their directories.

    Args:
        root: of a config.json.

    Raises:
        ConfigError: another tool's directory, by name, with the command that makes one of ours of it.
    """
    if root.has("kind"):
        return root.string("kind")
    found, hint = _foreign(root)
    raise ConfigError(
        f"{root.file.parent}: holds {found} (by its config.json), expected a directory that convert or build wrote",
        hint=hint,
    )


def _foreign(root: JsonObject) -> tuple[str, str]:
    if looks_like_drafter(root):
        return (
            "a drafter",
            f"convert it first: trtllm-dflash convert --target … --drafter {root.file.parent} -o CHECKPOINT",
        )
    if root.has("architectures"):
        return (
            "a Hugging Face checkpoint",
            f"convert it first: trtllm-dflash convert --target {root.file.parent} --drafter … -o CHECKPOINT",
        )
    for key, meaning in (("pretrained_config", "an engine"), ("architecture", "a checkpoint")):
        if root.has(key):
            return (
                f"{meaning} of TensorRT-LLM",
                "convert the Hugging Face checkpoint that it was made from: trtllm-dflash convert --target …",
            )
    return "something else", "make one with trtllm-dflash convert or build"
