"""DFlash 2 operations of the torch dialect: grouped dynamic convolution, candidates and selector walk."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_dynamic_conv(x: Tensor, dynamic: Tensor, base: Tensor, block_size: int) -> Tensor:
    """See ``Ops.grouped_dynamic_conv``: ``x [B*S, H]``, ``dynamic [B*S, taps * groups]``, ``base [taps, H]``."""
    taps, hidden = base.shape
    groups = dynamic.shape[-1] // taps
    blocks = x.view(-1, block_size, groups, hidden // groups)
    delta = dynamic.view(-1, block_size, taps, groups, 1)
    kernel = base.to(x.dtype).view(taps, groups, hidden // groups)
    out = (kernel[0] + delta[:, :, 0]) * blocks
    for tap in range(1, taps):
        out[:, tap:] += (kernel[tap] + delta[:, tap:, tap]) * blocks[:, :-tap]
    return out.view(x.shape)


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last axis, descending, ties to the lowest index."""
    if k >= x.shape[-1]:
        values, order = torch.sort(x, dim=-1, descending=True, stable=True)
        return values[..., :k], order[..., :k]
    values, indices = torch.topk(x, k + 1, dim=-1)
    if x.device.type == "cpu" and bool((values[..., -1] == values[..., -2]).any()):
        return _top_k_with_boundary_ties(x, k, values[..., k - 1 : k])
    indices, by_index = torch.sort(indices[..., :k], dim=-1)
    values, by_value = torch.sort(values[..., :k].gather(-1, by_index), dim=-1, descending=True, stable=True)
    return values, indices.gather(-1, by_value)


def _top_k_with_boundary_ties(x: Tensor, k: int, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Exact choice when several entries equal the k-th value: the lowest indices among them are kept."""
    above = x > threshold
    tied = x == threshold
    room = k - above.sum(-1, keepdim=True)
    kept = above | (tied & (tied.cumsum(-1) <= room))
    indices = kept.to(torch.int8).topk(k, dim=-1).indices.sort(-1).values
    values, by_value = torch.sort(x.gather(-1, indices), dim=-1, descending=True, stable=True)
    return values, indices.gather(-1, by_value)


def selector_walk(
    unary: Tensor,
    candidates: Tensor,
    hidden: Tensor,
    predecessor_codebook: Tensor,
    successor_codebook: Tensor,
    anchors: Tensor,
    temperatures: Tensor,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """See ``Ops.selector_walk``. Every edge of the lattice is scored in one product; the walk only gathers."""
    batch, positions, count = candidates.shape
    previous = torch.cat((anchors.view(batch, 1, 1).expand(-1, 1, count), candidates[:, :-1]), dim=1)
    left = predecessor_codebook[previous].float() * hidden.float().unsqueeze(2)
    right = successor_codebook[candidates].float()
    # [B, S-1, K previous, K next]
    scores = unary.float().unsqueeze(2) + left @ right.transpose(-1, -2)
    greedy = (temperatures <= 0).view(batch, 1)
    divisor = torch.where(greedy, torch.ones_like(temperatures).view(batch, 1), temperatures.view(batch, 1))
    ranks = torch.arange(count, device=unary.device)
    choice = torch.zeros(batch, 1, dtype=torch.int64, device=unary.device)
    tokens, q_rows = [], []
    for position in range(positions):
        row = scores[:, position].gather(1, choice.unsqueeze(-1).expand(-1, 1, count)).squeeze(1)
        best = row.argmax(-1, keepdim=True)
        q = torch.softmax(row / divisor, dim=-1)
        choice = torch.where(greedy, best, _inverse_cdf(q, uniforms[:, position]))
        q_rows.append(torch.where(greedy, (ranks == best).to(q.dtype), q))
        tokens.append(candidates[:, position].gather(-1, choice))
    return torch.cat(tokens, dim=1), torch.stack(q_rows, dim=1)


def independent_draw(
    unary: Tensor, temperatures: Tensor, uniforms: Tensor, candidates: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``Ops.independent_draw``."""
    greedy = (temperatures <= 0).view(-1, 1, 1)
    divisor = torch.where(greedy, 1.0, temperatures.view(-1, 1, 1))
    q = torch.softmax(unary.float() / divisor, dim=-1)
    first = (torch.arange(q.shape[-1], device=q.device) == 0).to(q.dtype)
    q = torch.where(greedy, first, q)
    return candidates.gather(-1, _inverse_cdf(q, uniforms)).squeeze(-1), q


def _inverse_cdf(q: Tensor, draws: Tensor) -> Tensor:
    """First index whose running sum exceeds ``draw * total``: ``q [..., K]``, ``draws [...]`` → ``[..., 1]``."""
    running = q.cumsum(-1)
    passed = running <= draws.unsqueeze(-1) * running[..., -1:]
    return passed.sum(-1, keepdim=True).clamp_max(q.shape[-1] - 1)
