"""Which measured point meets a latency target with the most throughput, and the settings that deploy it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_dflash.bench.configuration import Configuration
from trtllm_dflash.bench.sweep_journal import written_whole
from trtllm_dflash.bench.sweep_results import device_word
from trtllm_dflash.config.json_reader import JsonObject
from trtllm_dflash.errors import ConfigError

DEPLOYMENT = "deployment.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Target:
    """What users must get: at least ``tok_s_user``; at most these milliseconds at the 95th percentile. None: any."""

    tok_s_user: float | None = None
    ttft_p95_ms: float | None = None
    itl_p95_ms: float | None = None

    def __bool__(self) -> bool:
        return any(value is not None for value in (self.tok_s_user, self.ttft_p95_ms, self.itl_p95_ms))

    def words(self) -> str:
        """For people."""
        parts = []
        if self.tok_s_user is not None:
            parts.append(f"at least {self.tok_s_user:g} tok/s per user")
        if self.ttft_p95_ms is not None:
            parts.append(f"first token p95 within {self.ttft_p95_ms:g} ms")
        if self.itl_p95_ms is not None:
            parts.append(f"pauses between events p95 within {self.itl_p95_ms:g} ms")
        return ", ".join(parts)

    def met_by(self, point: Mapping[str, Any]) -> bool:
        """Whether the means of a measured point meet it."""
        rate, ttft, itl = point["tok_s_user"], point["ttft_ms"], point["itl_ms"]
        return (
            (self.tok_s_user is None or (rate is not None and rate["mean"] >= self.tok_s_user))
            and (self.ttft_p95_ms is None or (ttft is not None and ttft["p95"]["mean"] <= self.ttft_p95_ms))
            and (self.itl_p95_ms is None or (itl is not None and itl["p95"]["mean"] <= self.itl_p95_ms))
        )


def best_point(document: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """``best`` of ``results.json``: the point with the most tok/s per GPU among those that meet ``target``.

    When none does, ``found`` is false and ``why`` names what the best of each figure was.
    """
    meeting = [point for point in document["points"] if target.met_by(point) and not point["errors"]]
    if not meeting:
        why = f"no measured point has {target.words()}; {_nearest(document['points'])}"
        return {"found": False, "target": target.words(), "why": why}
    best = max(meeting, key=lambda point: point["tok_s_gpu"]["mean"])
    rate = best["tok_s_gpu"]["mean"]
    others = [point["tok_s_gpu"]["mean"] for point in meeting if point["config"] != best["config"]]
    unit = device_word(document)
    ahead = f", {rate / max(others):.2f}x the best of the other configurations" if others else ""
    most = f"the most throughput ({rate:.1f} tok/s per {unit}{ahead})"
    return {
        "found": True,
        "target": target.words(),
        "config": best["config"],
        "concurrency": best["concurrency"],
        "why": f"{most} of {len(meeting)} points with {target.words()}",
    }


def deployment_of(
    document: Mapping[str, Any], best: Mapping[str, Any], configurations: Sequence[Configuration]
) -> dict[str, Any]:
    """The settings of the best point, for ``deploy --from-sweep``.

    Raises:
        ConfigError: no point was found, or it is a served endpoint, which is deployed already.
    """
    if not best["found"]:
        raise ConfigError(best["why"], hint="relax the target, or sweep more concurrencies or configurations")
    chosen = next(one for one in configurations if one.label == best["config"])
    if chosen.engines is None:
        raise ConfigError(f"the best point is {chosen.label!r}, a served endpoint: there is nothing to deploy")
    facts = next(c["facts"] for c in document["configurations"] if c["label"] == chosen.label)
    point = next(
        p for p in document["points"] if (p["config"], p["concurrency"]) == (best["config"], best["concurrency"])
    )
    return {
        "kind": "deployment",
        "schema_version": SCHEMA_VERSION,
        "target": best["target"],
        "config": chosen.label,
        # Absolute: the settings are read from wherever deploy is run.
        "engines": str(chosen.engines.resolve()),
        "speculation": "auto" if chosen.speculation == "auto" else facts["speculation"],
        "block_size": facts["block_size"],
        "max_concurrency": best["concurrency"],
        "kv_cache_tokens": chosen.kv_cache_tokens,
        "measured": {name: point[name]["mean"] for name in ("tok_s", "tok_s_user", "tok_s_gpu") if point[name]},
    }


def write_deployment(deployment: Mapping[str, Any], folder: Path) -> Path:
    """Write ``deployment.json`` into a sweep's directory; returns its path."""
    path = folder / DEPLOYMENT
    with written_whole(path) as partial:
        partial.write_text(json.dumps(deployment, indent=2) + "\n", encoding="utf-8")
    return path


def forget_deployment(folder: Path) -> None:
    """Remove the settings of an earlier choice, so that nobody deploys what no longer holds."""
    (folder / DEPLOYMENT).unlink(missing_ok=True)


def read_deployment(path: Path) -> dict[str, Any]:
    """Read ``deployment.json``, or that of a sweep's directory.

    Raises:
        ConfigError: it is not there, or is something else.
    """
    file = path / DEPLOYMENT if path.is_dir() else path
    hint = "let a sweep choose: trtllm-dflash sweep … --target-tok-s-user 50"
    if not file.is_file():
        raise ConfigError(f"{file}: there are no deployment settings", hint=hint)
    try:
        deployment = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON: {error}") from error
    if not isinstance(deployment, dict) or deployment.get("kind") != "deployment":
        raise ConfigError(f"{file}: is not a sweep's deployment settings", hint=hint)
    if deployment.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(f"{file}: schema_version is {deployment.get('schema_version')!r}, expected {SCHEMA_VERSION}")
    # Such a file is small and invites editing.
    facts = JsonObject(deployment, file)
    for name in ("config", "engines", "target"):
        facts.string(name)
    for name in ("block_size", "max_concurrency"):
        facts.integer(name, minimum=1)
    facts.optional_integer("kv_cache_tokens", minimum=1)
    if deployment.get("speculation") not in ("auto", True, False):
        raise facts.error("speculation", '"auto", true or false')
    return deployment


def _nearest(points: Sequence[Mapping[str, Any]]) -> str:
    rates = [point["tok_s_user"]["mean"] for point in points if point["tok_s_user"]]
    ttfts = [point["ttft_ms"]["p95"]["mean"] for point in points if point["ttft_ms"]]
    itls = [point["itl_ms"]["p95"]["mean"] for point in points if point["itl_ms"]]
    best = []
    if rates:
        best.append(f"the most tok/s per user was {max(rates):.1f}")
    if ttfts:
        best.append(f"the shortest first token p95 {min(ttfts):.0f} ms")
    if itls:
        best.append(f"the shortest pause p95 {min(itls):.0f} ms")
    return ", ".join(best)
