"""What whoever deploys chooses beyond the engine directory, held to what the engine was built for."""

from __future__ import annotations

from trtllm_dflash.config.pairing import BuildLimits
from trtllm_dflash.config.sampling import SpeculationMode
from trtllm_dflash.errors import ConfigError


def check_choices(
    engines: str,
    limits: BuildLimits,
    *,
    has_drafter: bool,
    speculation: SpeculationMode,
    block_size: int | None,
    max_running: int | None,
    kv_cache_tokens: int | None,
) -> None:
    """Raise ``ConfigError`` for a choice that the engine cannot do, or that another choice leaves without effect.

    Args:
        engines: the engine directory's name, for messages. limits: what it was built for. The rest as ``LLM``'s.
    """
    for name, value, most in (
        ("block size", block_size, limits.block_size if has_drafter else 1),
        ("max running", max_running, limits.max_batch_size),
    ):
        if value is not None and not 1 <= value <= most:
            raise ConfigError(f"{name} is {value}, expected 1 to {most}, as {engines} was built")
    if kv_cache_tokens is not None and kv_cache_tokens < limits.page_tokens:
        raise ConfigError(
            f"KV cache tokens are {kv_cache_tokens}, expected at least {limits.page_tokens}, a page of {engines}"
        )
    if speculation == "on" and not has_drafter:
        raise ConfigError(f"speculation is on, but {engines} has no drafter")
    if speculation == "off" and block_size not in (None, 1):
        raise ConfigError(
            f"block size is {block_size} and speculation is off: plain decoding has no blocks",
            hint="leave one of them away",
        )
