"""DFlash 2 operations as elementary TensorRT layers: grouped dynamic convolution and the selector walk.

Rows are ``[B, S, ..]`` here. The walk scores every edge of the lattice at once and decides, for every previous
choice, which candidate would follow it; what remains sequential is S - 1 gathers of one number.
"""

from __future__ import annotations

import torch

from trtllm_dflash.ops.tensorrt_network import NetworkTensor, NetworkWriter


def grouped_dynamic_conv(
    w: NetworkWriter, x: NetworkTensor, dynamic: NetworkTensor, base: NetworkTensor
) -> NetworkTensor:
    """``x [B, S, H]``, ``dynamic [B, S, taps * groups]``, ``base [taps, H]`` → ``[B, S, H]``; each S is one block."""
    taps, hidden = base.shape
    groups = dynamic.shape[-1] // taps
    blocks = w.reshape(x, (0, 0, groups, hidden // groups))
    base = w.cast(base, x.dtype)
    total: NetworkTensor = None
    for tap in range(taps):
        delta = w.reshape(w.slice(dynamic, 2, tap * groups, groups), (0, 0, groups, 1))
        kernel = w.reshape(w.slice(base, 0, tap, 1), (1, 1, groups, hidden // groups))
        shifted = w.shift(blocks, 1, tap) if tap else blocks
        term = w.elementwise("PROD", w.elementwise("SUM", delta, kernel), shifted)
        total = term if total is None else w.elementwise("SUM", total, term)
    return w.reshape(total, (0, 0, hidden))


def selector_walk(
    w: NetworkWriter,
    unary: NetworkTensor,
    candidates: NetworkTensor,
    hidden: NetworkTensor,
    predecessor_codebook: NetworkTensor,
    successor_codebook: NetworkTensor,
    anchors: NetworkTensor,
    temperatures: NetworkTensor,
    uniforms: NetworkTensor,
) -> tuple[NetworkTensor, NetworkTensor]:
    """See ``Ops.selector_walk``: tokens ``[B, S-1]`` int32 and q rows ``[B, S-1, K]`` float32."""
    w.near = "candidate_selector"
    positions, count = candidates.shape[1], candidates.shape[2]
    # [B, S-1, K previous, K next]
    scores = _edge_scores(w, unary, candidates, hidden, predecessor_codebook, successor_codebook, anchors)
    sampled, q = _softmax(w, scores, temperatures)
    _, best = w.top_k(scores, 1)
    follower = w.select(sampled, _drawn(w, q, w.reshape(uniforms, (0, 0, 1, 1))), best)
    ranks = w.constant(torch.arange(count, dtype=torch.int32).view(1, 1, 1, -1))
    one_hot = w.cast(w.elementwise("EQUAL", best, ranks), w.trt.float32)
    q = w.select(sampled, q, one_hot)

    # follower[b, t, p]: the choice at position t when the choice before it was p.
    follower = w.reshape(follower, (0, 0, count))
    choice = w.reshape(w.slice(w.slice(follower, 1, 0, 1), 2, 0, 1), (0, 1))
    choices = [choice]
    for position in range(1, positions):
        row = w.reshape(w.slice(follower, 1, position, 1), (0, count))
        choice = w.gather(row, choice, 1, per_request=True)
        choices.append(choice)
    # Of the first position all rows are equal, so any of them is the one that was walked from.
    previous = w.concat([choices[0], *choices[:-1]], 1)

    per_edge = w.reshape(q, (-1, count, count))
    walked = w.gather(per_edge, w.reshape(previous, (-1, 1)), 1, per_request=True)
    q_rows = w.reshape(walked, (-1, positions, count))
    chosen = w.reshape(w.concat(choices, 1), (-1, 1))
    tokens = w.gather(w.reshape(candidates, (-1, count)), chosen, 1, per_request=True)
    return w.reshape(tokens, (-1, positions)), q_rows


def _edge_scores(
    w: NetworkWriter,
    unary: NetworkTensor,
    candidates: NetworkTensor,
    hidden: NetworkTensor,
    predecessor_codebook: NetworkTensor,
    successor_codebook: NetworkTensor,
    anchors: NetworkTensor,
) -> NetworkTensor:
    """``unary[b] + <A[a] * h, B[b]>`` in float32 for every pair of neighbouring candidates."""
    trt = w.trt
    positions, count = candidates.shape[1], candidates.shape[2]
    anchor_row = w.reshape(anchors, (0, 1, 1))
    repeated = w.elementwise("PROD", anchor_row, w.constant(torch.ones(1, 1, count, dtype=torch.int32)))
    before = [repeated]
    if positions > 1:
        before.append(w.slice(candidates, 1, 0, positions - 1))
    left = w.cast(w.gather(predecessor_codebook, w.concat(before, 1), 0), trt.float32)
    state = w.reshape(w.cast(hidden, trt.float32), (0, 0, 1, hidden.shape[-1]))
    right = w.cast(w.gather(successor_codebook, candidates, 0), trt.float32)
    products = w.matmul(w.elementwise("PROD", left, state), right, transpose_y=True)
    return w.elementwise("SUM", products, w.reshape(unary, (0, 0, 1, count)))


def independent_draw(
    w: NetworkWriter,
    unary: NetworkTensor,
    temperatures: NetworkTensor,
    uniforms: NetworkTensor,
    candidates: NetworkTensor,
) -> tuple[NetworkTensor, NetworkTensor]:
    """See ``Ops.independent_draw``: tokens ``[B, S-1]`` int32 and q rows ``[B, S-1, K]`` float32."""
    w.near = "independent_draw"
    positions, count = candidates.shape[1], candidates.shape[2]
    sampled, q = _softmax(w, unary, temperatures)
    is_first = torch.zeros(1, 1, count)
    is_first[..., 0] = 1
    first = w.constant(torch.zeros(1, 1, 1, dtype=torch.int32))
    choice = w.select(sampled, _drawn(w, q, w.reshape(uniforms, (0, 0, 1))), first)
    q = w.select(sampled, q, w.constant(is_first))
    tokens = w.gather(w.reshape(candidates, (-1, count)), w.reshape(choice, (-1, 1)), 1, per_request=True)
    return w.reshape(tokens, (-1, positions)), q


def _softmax(
    w: NetworkWriter, scores: NetworkTensor, temperatures: NetworkTensor
) -> tuple[NetworkTensor, NetworkTensor]:
    """Which requests sample (bool) and ``softmax(scores / temperature)`` over the last axis of ``scores [B, ..]``."""
    rank = len(scores.shape)
    per_request = w.reshape(temperatures, (0, *([1] * (rank - 1))))
    sampled = w.elementwise("GREATER", per_request, w.scalar(0.0, per_request))
    divisor = w.select(sampled, per_request, w.scalar(1.0, per_request))
    softmax = w.network.add_softmax(w.elementwise("DIV", scores, divisor))
    softmax.axes = 1 << (rank - 1)
    return sampled, w.add("softmax", softmax)


def _drawn(w: NetworkWriter, q: NetworkTensor, uniforms: NetworkTensor) -> NetworkTensor:
    """Inverse CDF of every row ``q [.., K]`` at ``uniforms [.., 1]`` → ``[.., 1]`` int32."""
    trt = w.trt
    last, count = len(q.shape) - 1, q.shape[-1]
    axis = w.constant(torch.tensor(last, dtype=torch.int32))
    running = w.add("cumulate", w.network.add_cumulative(q, axis, trt.CumulativeOperation.SUM, False, False))
    threshold = w.elementwise("PROD", w.slice(running, last, count - 1, 1), uniforms)
    beyond = w.reduce("SUM", w.cast(w.elementwise("GREATER", running, threshold), trt.int32))
    passed = w.elementwise("SUB", w.scalar(count, beyond), beyond)
    return w.elementwise("MIN", passed, w.scalar(count - 1, passed))
