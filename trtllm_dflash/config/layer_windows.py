"""Which layers of a Qwen3-shaped model have a sliding window, and how wide it is.

``Qwen3Config`` drops ``sliding_window`` unless ``use_sliding_window`` is true and derives ``layer_types`` from
``max_window_layers`` (28 by default), so a file that looks windowed can run with full attention and nobody notices.
The rules here are the same where a file is clear; a file that contradicts itself is an error.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from trtllm_dflash.config.json_reader import JsonObject

FULL, SLIDING = "full_attention", "sliding_attention"
_DEFAULT_MAX_WINDOW_LAYERS = 28

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerWindow:
    """``sliding``: the layer's type; ``window``: visible positions including the query itself, None for all."""

    sliding: bool
    window: int | None


def layer_windows(config: JsonObject, *, num_layers: int, infer_flag: bool) -> tuple[LayerWindow, ...]:
    """Window of each layer.

    Args:
        config: the object that holds ``layer_types``, ``use_sliding_window``, ``sliding_window``,
            ``max_window_layers``.
        num_layers: number of layers.
        infer_flag: what sliding layers in ``layer_types`` mean without any ``use_sliding_window``: True applies the
            window and says so (drafters: their makers wrote the list by hand), False is an error (targets:
            transformers would run another model than the file describes).

    Raises:
        ConfigError: sliding layers with the window switched off or not given; a window switched on that no layer
            uses; unknown layer types; a list of the wrong length.
    """
    types = layer_types(config, num_layers)
    use_window = config.optional_boolean("use_sliding_window")
    if types is None:
        types = _types_from_flag(config, num_layers, bool(use_window))
    elif SLIDING not in types:
        if use_window:
            raise config.error("layer_types", f'at least one "{SLIDING}", because use_sliding_window is true')
    elif use_window is None and infer_flag:
        log.warning(
            "%s: no use_sliding_window; applying the window to the layers that layer_types calls %s "
            "(transformers' Qwen3Config would ignore it)",
            config.file,
            SLIDING,
        )
    elif not use_window:
        raise config.error(
            "use_sliding_window",
            f'true, because layer_types has "{SLIDING}" (transformers ignores sliding_window without it)',
            hint=f"set use_sliding_window to true to apply the window, or every layer type to {FULL} to run without",
        )
    window = config.integer("sliding_window", minimum=1) if SLIDING in types else None
    return tuple(LayerWindow(kind == SLIDING, window if kind == SLIDING else None) for kind in types)


def layer_types(config: JsonObject, num_layers: int) -> tuple[str, ...] | None:
    """The list ``layer_types``, checked, or None where the file has none.

    Raises:
        ConfigError: unknown layer types, or a list of the wrong length.
    """
    if not config.has("layer_types"):
        return None
    types = config.strings("layer_types")
    if len(types) != num_layers:
        raise config.error("layer_types", f"one entry for each of the {num_layers} layers")
    if set(types) - {FULL, SLIDING}:
        raise config.error("layer_types", f'only "{FULL}" and "{SLIDING}"')
    return types


def _types_from_flag(config: JsonObject, num_layers: int, use_window: bool) -> tuple[str, ...]:
    first = config.integer("max_window_layers", default=_DEFAULT_MAX_WINDOW_LAYERS, minimum=0)
    if use_window and first >= num_layers:
        raise config.error(
            "max_window_layers",
            f"less than num_hidden_layers ({num_layers}), because use_sliding_window is true and this is the "
            f"first layer with a window (absent means {_DEFAULT_MAX_WINDOW_LAYERS})",
            hint="set max_window_layers or layer_types, or use_sliding_window to false for full attention",
        )
    return tuple(SLIDING if use_window and i >= first else FULL for i in range(num_layers))
