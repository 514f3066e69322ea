"""Counter-based random numbers: one independent stream per request seed, read at any absolute position.

A draw depends on nothing but (seed, position, purpose), so outputs do not change with batch composition, with the
number of drafts that were rejected before, or with which kernel draws. ``plugins/include/dflash_select.h`` describes
the device copy of this definition; both are Philox4x32-10.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); constants of Random123.
"""

from __future__ import annotations

import torch

WALK_WORD = 0
"""Output word that draws a proposal in the selector walk."""
ACCEPT_WORD = 1
"""Output word that decides whether a draft token is kept."""
RESIDUAL_WORD = 2
"""Output word that draws a residual, bonus or plain (non-speculative) token."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF

Words4 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words4, key: tuple[torch.Tensor, torch.Tensor]) -> Words4:
    """Ten rounds of Philox4x32 on 32-bit words held in int64 tensors.

    Args:
        counter: four int64 tensors of broadcastable shapes, values in [0, 2**32).
        key: two int64 tensors broadcastable against them, values in [0, 2**32).

    Returns:
        Four int64 tensors of the broadcast shape, values in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The 64-bit product may exceed int64: it wraps, and shifting then masking still yields its exact halves.
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The uniform draws of each request at the absolute positions of the tokens being drawn.

    Tensor code of static shape: safe inside a CUDA graph, no synchronisation.

    Args:
        seeds: ``[B]`` int64, the requests' 64-bit seeds (any bit pattern, negative included): the Philox key.
        positions: ``[B, n]`` int64, absolute positions: the low half of the Philox counter.

    Returns:
        ``[B, n, 4]`` float32 in [0, 1), exact multiples of 2**-24. Index the last axis with ``WALK_WORD``,
        ``ACCEPT_WORD`` and ``RESIDUAL_WORD``; word 3 is reserved.
    """
    seeds = seeds.unsqueeze(-1)
    zero = torch.zeros_like(positions)
    words = philox4x32(
        (positions & _MASK, (positions >> 32) & _MASK, zero, zero),
        (seeds & _MASK, (seeds >> 32) & _MASK),
    )
    # 24 bits fit float32's significand, so no draw rounds up to 1.
    return (torch.stack(words, dim=-1) >> 8).to(torch.float32) * 2.0**-24
