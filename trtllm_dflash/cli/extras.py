"""The optional parts of this distribution: what each is for, and which of its packages are here."""

from __future__ import annotations

import contextlib
import importlib.metadata
from dataclasses import dataclass

from packaging.requirements import Requirement

DISTRIBUTION = "trtllm-dflash"
# extra → what a user gets by it. Packages and versions are pyproject.toml's alone.
PURPOSES = {
    "demo": "the embedded demo pair: quickstart, selfcheck, --target demo",
    "triton": "serve and quickstart: a tritonserver from PyPI, and clients",
    "openai": "serve --openai-port: the OpenAI front end",
    "structured": "structured output: JSON schema, regular expressions, grammars",
    "bench": "sweep: charts, intervals, YAML; energy per token",
    "rtx": "build --backend tensorrt-rtx: plans without a GPU",
    "tensorrt": "build --backend tensorrt, on the GPU that will run it",
    "trtllm": "a server for what deploy --runtime trtllm writes; best in an environment of its own",
    "dev": "tests, types and lint",
}


@dataclass(frozen=True)
class Extra:
    """One extra.

    Attributes:
        name: as in ``trtllm-dflash[name]``. purpose: what it is for. found: package and version of what is here.
        lacking: requirements that nothing here meets, with the version that is here instead, if any.
        is_known: whether the installed distribution has it; an older one does not.
    """

    name: str
    purpose: str
    found: tuple[str, ...]
    lacking: tuple[str, ...]
    is_known: bool = True

    @property
    def command(self) -> str:
        """What installs it."""
        return f'pip install "{DISTRIBUTION}[{self.name}]"'


def installed_extras() -> list[Extra]:
    """Every extra, in the order of ``PURPOSES``."""
    names: list[str] = []
    requirements: list[Requirement] = []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        metadata = importlib.metadata.metadata(DISTRIBUTION)
        names = metadata.get_all("Provides-Extra") or []
        requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist") or []]
    return [
        _extra(name, requirements) if name in names else Extra(name, PURPOSES[name], (), (), is_known=False)
        for name in PURPOSES
    ]


def _extra(name: str, requirements: list[Requirement]) -> Extra:
    found, lacking = [], []
    for requirement in requirements:
        marker = requirement.marker
        # The base requirements hold without any extra.
        if marker is None or marker.evaluate({"extra": ""}) or not marker.evaluate({"extra": name}):
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        version = _version(requirement.name)
        if version is None:
            lacking.append(wanted)
        elif requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name} {version}")
        else:
            lacking.append(f"{wanted} (here: {version})")
    return Extra(name, PURPOSES[name], tuple(found), tuple(lacking))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
