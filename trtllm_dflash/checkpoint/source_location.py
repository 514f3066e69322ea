"""Where a model comes from: a local directory, the embedded demo pair, or the Hugging Face hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trtllm_dflash.checkpoint.demo import demo_drafter, demo_target
from trtllm_dflash.checkpoint.progress import Progress
from trtllm_dflash.errors import CheckpointError, ConfigError

DEMO = "demo"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class SourceLocation:
    """A checkpoint on this machine.

    Attributes:
        name: as the user gave it. directory: where it lies. revision: commit of a hub repository, else None.
    """

    name: str
    directory: Path
    revision: str | None = None

    def facts(self) -> dict[str, object]:
        """What config.json says about the source."""
        return {"name": self.name, "revision": self.revision}


def locate(name: str, model: Literal["target", "drafter"], progress: Progress) -> SourceLocation:
    """Find or fetch a model.

    Args:
        name: ``demo``, a directory, or a hub id ``owner/name`` (``owner/name@revision`` for one revision).
        model: which of the pair it is. progress: for downloads.

    Raises:
        ConfigError: nothing of that name. CheckpointError: a repository without safetensors, or a failed download.
    """
    if name == DEMO:
        return SourceLocation(name, demo_target(progress) if model == "target" else demo_drafter())
    if name and Path(name).is_dir():
        return SourceLocation(name, Path(name))
    if name and Path(name).exists():
        raise ConfigError(f"--{model} {name}: is a file, expected the directory of a checkpoint")
    if _HUB_ID.fullmatch(name):
        return _from_hub(name, model)
    raise ConfigError(
        f"--{model} {name}: no such directory, and not a hub id (owner/name)",
        hint="give a checkpoint directory, a Hugging Face hub id, or demo",
    )


def _from_hub(name: str, model: str) -> SourceLocation:
    # Imported here: it takes half a second, and local conversions need nothing of it.
    from huggingface_hub import HfApi, snapshot_download

    # The base of the hub's HTTP client, which is another package from version to version of huggingface_hub.
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    repository, _, revision = name.partition("@")
    local_only = False
    try:
        info = HfApi().model_info(repository, revision=revision or None)
        _check_repository(name, [file.rfilename for file in info.siblings or ()])
    except RepositoryNotFoundError:
        raise ConfigError(
            f"--{model} {name}: no such directory, and no such repository on the Hugging Face hub",
            hint="check the name; for a gated model accept its licence and run: hf auth login",
        ) from None
    except (HTTPError, OSError):
        # Without the hub a snapshot that is already in the cache is as good.
        local_only = True
    try:
        path = Path(
            snapshot_download(
                repository,
                revision=revision or None,
                allow_patterns=list(_WANTED),
                ignore_patterns=["*/*"],
                local_files_only=local_only,
            )
        )
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"--{model} {name}: the Hugging Face hub cannot be reached and the model is not in its cache",
            hint="check the network (HF_ENDPOINT, proxies), or give a local directory",
        ) from None
    except (HTTPError, OSError) as problem:
        raise CheckpointError(f"--{model} {name}: download failed: {problem}", hint="run the command again") from None
    # A snapshot's directory is called by its commit: the same hub name can change weights between revisions.
    return SourceLocation(name, path, path.name)


def _check_repository(name: str, files: list[str]) -> None:
    if "mask_embedding.pt" in files:
        raise CheckpointError(
            f"{name}: found mask_embedding.pt; drafters with a stored mask embedding are not supported"
        )
    if not any(file.endswith(".safetensors") for file in files):
        pickles = [file for file in files if file.endswith(_PICKLES)]
        found = f"only pickled weights ({pickles[0]})" if pickles else "no weights"
        raise CheckpointError(
            f"{name}: found {found}, expected safetensors; pickles can run code when opened and are never read"
        )
