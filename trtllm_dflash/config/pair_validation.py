"""What a target and a drafter must agree on before anything is converted."""

from __future__ import annotations

from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.target import TargetConfig
from trtllm_dflash.errors import ConfigError

_OTHER_TARGET = "use the drafter that was trained for this target"


def validate_pair(target: TargetConfig, drafter: DrafterConfig) -> tuple[str, ...]:
    """Check that a drafter can draft for a target.

    The vocabularies may differ (padding, added tokens): the drafter uses the target's embedding and head, so its ids
    are the target's; rows that only the drafter knows are cut, and ids that only the target knows get neutral
    selector rows. (Where a reduced vocabulary maps to is checked on its ``d2t`` tensor, by ``convert``.)

    Args:
        target: the target. drafter: the drafter, as parsed.

    Returns:
        Notes to print: adaptations that are harmless but should not pass unseen.

    Raises:
        ConfigError: hidden size, layer count, layer ids or mask token do not fit.
    """
    if drafter.target_hidden_size != target.hidden_size:
        raise ConfigError(
            f"drafter and target do not fit: the drafter reads target features of hidden size "
            f"{drafter.target_hidden_size}, the target has {target.hidden_size}",
            hint=_OTHER_TARGET,
        )
    if drafter.hidden_size != target.hidden_size:
        raise ConfigError(
            f"drafter and target do not fit: hidden_size of the drafter is {drafter.hidden_size}, of the target "
            f"{target.hidden_size}; the drafter works on the target's embeddings and head, so they must be equal",
            hint=_OTHER_TARGET,
        )
    if drafter.num_target_layers is not None and drafter.num_target_layers != target.num_layers:
        raise ConfigError(
            f"drafter and target do not fit: the drafter was trained for a target of {drafter.num_target_layers} "
            f"layers (num_target_layers), this target has {target.num_layers}",
            hint=_OTHER_TARGET,
        )
    beyond = [i for i in drafter.target_layer_ids if not 0 <= i < target.num_layers]
    if beyond:
        raise ConfigError(
            f"drafter and target do not fit: captured layer ids {beyond} are outside [0, {target.num_layers - 1}], "
            f"the target's {target.num_layers} layers (ids of the Speculators format are shifted by -1 first)",
            hint=_OTHER_TARGET,
        )
    if not 0 <= drafter.mask_token_id < target.vocab_size:
        raise ConfigError(
            f"drafter and target do not fit: mask_token_id {drafter.mask_token_id} is outside "
            f"[0, {target.vocab_size - 1}], the target's vocabulary",
            hint=_OTHER_TARGET,
        )
    return _vocabulary_notes(target, drafter)


def _vocabulary_notes(target: TargetConfig, drafter: DrafterConfig) -> tuple[str, ...]:
    if drafter.vocab_size == target.vocab_size:
        return ()
    sizes = f"drafter vocabulary {drafter.vocab_size}, target vocabulary {target.vocab_size}"
    if drafter.selector is not None and drafter.selector.top_k > target.vocab_size:
        raise ConfigError(f"drafter and target do not fit: selector_top_k {drafter.selector.top_k}, {sizes}")
    if drafter.vocab_size > target.vocab_size:
        return (f"{sizes}: rows beyond the target's are cut, they can never be proposed",)
    return (f"{sizes}: tokens the drafter does not know are scored by the head alone",)
