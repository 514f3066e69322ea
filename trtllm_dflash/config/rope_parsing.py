"""Rotary parameters out of the three places where configurations keep them."""

from __future__ import annotations

import logging
from typing import cast, get_args

from trtllm_dflash.config.json_reader import JsonObject
from trtllm_dflash.config.rope import RopeConfig, RopeType
from trtllm_dflash.errors import ConfigError

DEFAULT_THETA = 10_000.0
"""Base used where a file names none: transformers' ``RotaryEmbeddingConfigMixin.default_theta``."""

log = logging.getLogger(__name__)


def parse_rope(config: JsonObject, *, head_dim: int, max_position_embeddings: int) -> RopeConfig:
    """Parse the rotary embedding of one model.

    Understood: ``rope_theta`` at top level (transformers 4), ``rope_scaling`` with ``rope_type`` or ``type``, and
    ``rope_parameters`` holding both (transformers 5), also one set per layer type if all sets are equal. Where two
    places name a value, they must agree.

    Args:
        config: the model's own configuration; a drafter's, never its target's.
        head_dim: dimensions of one head.
        max_position_embeddings: context length, the default of yarn's original length.

    Raises:
        ConfigError: unknown rope type, partial rotation, one set per layer type that differ, contradictory values.
    """
    scaling = _one_set(config, "rope_parameters", _one_set(config, "rope_scaling", None))
    theta = _theta(config, scaling)
    for place in (config, scaling):
        if place is not None and place.number("partial_rotary_factor", default=1.0) != 1.0:
            raise place.error("partial_rotary_factor", "1.0 (partial rotary embeddings are not supported)")
    if scaling is None:
        return RopeConfig(theta=theta, rotary_dim=head_dim)
    rope_type = _rope_type(scaling)
    if rope_type == "default":
        return RopeConfig(theta=theta, rotary_dim=head_dim)
    if rope_type == "linear":
        return RopeConfig(theta, head_dim, "linear", factor=scaling.number("factor", above=0))
    if rope_type == "llama3":
        low, high = scaling.number("low_freq_factor", above=0), scaling.number("high_freq_factor", above=0)
        if high <= low:
            raise scaling.error("high_freq_factor", f"a number above low_freq_factor ({low:g})")
        return RopeConfig(
            theta,
            head_dim,
            "llama3",
            factor=scaling.number("factor", above=0),
            original_max_positions=scaling.integer("original_max_position_embeddings", minimum=1),
            low_freq_factor=low,
            high_freq_factor=high,
        )
    original = scaling.integer("original_max_position_embeddings", default=max_position_embeddings, minimum=1)
    return RopeConfig(
        theta,
        head_dim,
        "yarn",
        # transformers derives the factor from the two lengths where the file leaves it out.
        factor=scaling.number("factor", default=max_position_embeddings / original, above=0),
        original_max_positions=original,
        beta_fast=scaling.number("beta_fast", default=32.0, above=0),
        beta_slow=scaling.number("beta_slow", default=1.0, above=0),
        attention_factor=scaling.optional_number("attention_factor", above=0),
        mscale=scaling.optional_number("mscale"),
        mscale_all_dim=scaling.optional_number("mscale_all_dim"),
        truncate=scaling.boolean("truncate", default=True),
    )


def _rope_type(scaling: JsonObject) -> RopeType:
    names = [key for key in ("rope_type", "type") if scaling.has(key)]
    if not names:
        return "default"
    found = {scaling.string(key) for key in names}
    if len(found) > 1:
        raise scaling.error("type", f"the same as rope_type ({scaling.string('rope_type')})")
    if found.isdisjoint(get_args(RopeType)):
        raise scaling.error(names[0], "a supported rope type: " + ", ".join(get_args(RopeType)))
    return cast(RopeType, found.pop())


def _theta(config: JsonObject, scaling: JsonObject | None) -> float:
    outer = config.optional_number("rope_theta", above=0)
    inner = scaling.optional_number("rope_theta", above=0) if scaling is not None else None
    if outer is not None and inner is not None and outer != inner:
        assert scaling is not None
        raise scaling.error("rope_theta", f"the same value as the top-level rope_theta ({outer:g})")
    theta = inner if inner is not None else outer
    if theta is None:
        log.warning(
            "%s: no rope_theta (top level, rope_parameters or rope_scaling); using %g, the default of transformers",
            config.file,
            DEFAULT_THETA,
        )
        return DEFAULT_THETA
    return theta


def _one_set(config: JsonObject, key: str, other: JsonObject | None) -> JsonObject | None:
    """The rotary parameters under ``key``, or ``other`` where there are none; both present must agree."""
    found = config.optional_child(key)
    if found is None or not found.data:
        return other
    sets = [value for value in found.data.values() if isinstance(value, dict)]
    if sets:
        if any(value != sets[0] for value in sets):
            raise ConfigError(
                f"{found.file}: key '{found.place}': found different rotary parameters per layer type "
                f"({', '.join(found.data)}), expected one set for all layers"
            )
        found = JsonObject(sets[0], found.file, f"{found.place}.{next(iter(found.data))}")
    if other is not None and _without_theta(other) != _without_theta(found):
        raise ConfigError(
            f"{found.file}: keys '{found.place}' and '{other.place}' disagree: found {found.data} and {other.data}",
            hint="keep one of the two",
        )
    return found


def _without_theta(scaling: JsonObject) -> dict[str, object]:
    values = {key: value for key, value in scaling.data.items() if key not in ("rope_theta", "type", "rope_type")}
    return values | {"rope_type": scaling.data.get("rope_type", scaling.data.get("type"))}
