"""The operation set that every network in ``model/`` is written on.

A dialect implements :class:`Ops` for its own tensor type ``T``: the ``torch`` dialect computes, the ``tensorrt``
dialect emits layers. The torch implementation of each operation is the definition of right; tests hold every other
implementation to it. Shapes use the words of ``docs/architecture.md``: T packed tokens, B requests, S block size,
N rows, H hidden, V vocabulary, K candidates, P pages per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Linear(Generic[T]):
    """A dense projection ``x @ weight.T + bias``.

    ``weight`` is what the dialect's loader made of a ``[out, in]`` matrix (a plain tensor, a packed or a quantised
    one); ``bias`` is ``[out]`` or None.
    """

    weight: Any
    bias: T | None = None


@dataclass(frozen=True)
class CacheLayer(Generic[T]):
    """Paged K and V of one layer, each ``[pages + 1, page_tokens, kv_heads, head_dim]``.

    The last page is the scratch page: rows whose slot is -1 are written there and nobody reads it.
    """

    k: T
    v: T


@dataclass(frozen=True)
class HeadLayout:
    """Heads of an attention projection: ``[N, (heads + 2 * kv_heads) * head_dim]`` gives q, then k, then v."""

    heads: int
    kv_heads: int
    head_dim: int


class Ops(Protocol[T]):
    """Operations on tensors of type ``T``. Unless said otherwise results have the dtype of the first argument."""

    # Dense
    def embedding(self, table: Any, ids: T) -> T:
        """Rows ``ids`` (integers, any shape) of ``table [V, H]``."""

    def linear(self, x: T, projection: Linear[T]) -> T:
        """``x [N, in]`` → ``[N, out]``."""

    def rms_norm(self, x: T, weight: T, eps: float) -> T:
        """RMSNorm over the last axis, computed in float32, weight ``[last]``. The result has the weight's dtype, so
        that a float32 residual stream feeds projections in the compute dtype."""

    def add(self, x: T, y: T) -> T:
        """Element-wise sum of equal shapes; a float32 ``x`` keeps its dtype whatever ``y`` has."""

    def scale(self, x: T, factor: float) -> T:
        """``x * factor``."""

    def softcap(self, x: T, cap: float) -> T:
        """``tanh(x / cap) * cap``."""

    def swiglu(self, gate_up: T) -> T:
        """``[N, 2 I]`` (gate first, then up) → ``silu(gate) * up``, ``[N, I]``."""

    def concat_columns(self, parts: list[T]) -> T:
        """Concatenate along the last axis."""

    def heads(self, x: T, first: int, count: int, head_dim: int) -> T:
        """Columns of heads ``first .. first + count`` of ``x [N, any * head_dim]`` as ``[N, count, head_dim]``."""

    def head_range(self, x: T, first: int, count: int) -> T:
        """Heads ``first .. first + count`` of ``x [N, heads, head_dim]``."""

    def merge_heads(self, x: T) -> T:
        """``[N, heads, head_dim]`` → ``[N, heads * head_dim]``."""

    def to_float32(self, x: T) -> T:
        """Convert to float32."""

    # Rotary embedding
    def rotary_rows(self, cos_sin: T, positions: T) -> Any:
        """Prepare the rotation of N ``positions``; ``cos_sin [max_positions, rotary_dim]`` float32 holds the cos half
        then the sin half (half-split convention of Hugging Face). Prepared once per pass, used by every layer."""

    def rotary(self, x: T, rows: Any) -> T:
        """Rotate the first ``rotary_dim`` dimensions of ``x [N, heads, head_dim]``."""

    # Paged attention
    def write_kv(self, cache: CacheLayer[T], k: T, v: T, slots: T) -> None:
        """Write rows ``k, v [N, kv_heads, head_dim]`` at flat ``slots [N]`` (page * page_tokens + offset; -1 drops)."""

    def plan_attention(
        self,
        page_table: T,
        context_lengths: T,
        query_starts: T,
        max_query: int,
        *,
        queries_per_request: int | None,
        total_queries: int,
    ) -> Any:
        """Prepare attention of one pass over packed queries.

        Args:
            page_table: ``[B, P]`` int64 pages of each request; only pages below the visible length are read.
            context_lengths: ``[B]`` cached positions before this pass; query i of a request is at context + i.
            query_starts: ``[B + 1]`` int64 offsets of each request's queries among the packed rows.
            max_query: host-known bound of queries per request.
            queries_per_request: set when every request has exactly this many queries (verify), else None (prefill).
            total_queries: T.
        """

    def paged_attention(self, plan: Any, q: T, cache: CacheLayer[T], *, scale: float, window: int | None) -> T:
        """Causal attention of packed ``q [T, heads, head_dim]`` over the cache, whose rows for this pass are already
        written. Query at position p sees keys k with ``0 <= p - k`` and, with a window, ``p - k <= window - 1``."""

    def plan_block_attention(self, page_table: T, context_lengths: T, block_lengths: T, block_size: int) -> Any:
        """Prepare attention of one block of S rows per request over cached context plus the block itself.

        Args:
            page_table: ``[B, P]``. context_lengths: ``[B]``, visible cached positions.
            block_lengths: ``[B]`` rows of the block that exist (the rest is padding nobody sees).
            block_size: S.
        """

    def block_attention(
        self,
        plan: Any,
        q: T,
        k_block: T,
        v_block: T,
        cache: CacheLayer[T],
        *,
        scale: float,
        window: int | None,
        causal: bool,
    ) -> T:
        """Attention of ``q [B*S, heads, head_dim]`` over cached context and the block's own ``k_block, v_block
        [B*S, kv_heads, head_dim]`` (never written to the cache). Visibility: ``config.DrafterLayerAttention``."""

    # DFlash 2
    def grouped_dynamic_conv(self, x: T, dynamic: T, base: T, block_size: int) -> T:
        """``out[t] = sum_i (base[i] + dynamic[t, i, group]) * x[t - i]`` inside each block; taps before the block are
        zero. ``x [B*S, H]``, ``dynamic [B*S, taps * groups]`` (tap-major), ``base [taps, H]``.

        Source: ``dflash`` 0.1.0 ``_grouped_dynamic_convolve``.
        """

    def columns(self, x: T, first: int, count: int) -> T:
        """Columns ``first .. first + count`` of ``x [N, any]``."""

    def top_k(self, x: T, k: int) -> tuple[T, T]:
        """The k largest of the last axis, descending, ties to the lowest index: values and int64 indices."""

    def selector_walk(
        self,
        unary: T,
        candidates: T,
        hidden: T,
        predecessor_codebook: Any,
        successor_codebook: Any,
        anchors: T,
        temperatures: T,
        uniforms: T,
    ) -> tuple[T, T]:
        """Walk the candidate lattice: ``score(a, b) = unary[b] + <A[a] * h, B[b]>`` in float32, a = previous choice.

        Args:
            unary: ``[B, S-1, K]`` head logits of the candidates. candidates: ``[B, S-1, K]`` token ids.
            hidden: ``[B, S-1, rank]`` projected drafter states.
            predecessor_codebook, successor_codebook: ``A, B [V, rank]``.
            anchors: ``[B]``. temperatures: ``[B]``, 0 = greedy (argmax, first on ties).
            uniforms: ``[B, S-1]`` in [0, 1), for the inverse CDF over ``softmax(score / temperature)``.

        Returns:
            tokens ``[B, S-1]`` and the realised proposal rows q ``[B, S-1, K]`` float32 (one-hot when greedy).

        Source: ``dflash`` 0.1.0 ``CandidateSelector.select``; DFlash 2 score equation.
        """

    def independent_draw(self, unary: T, temperatures: T, uniforms: T, candidates: T) -> tuple[T, T]:
        """The walk of a drafter without a selector: each position draws from ``softmax(unary / temperature)`` alone.

        Args:
            unary: ``[B, S-1, K]`` head logits of the candidates, descending. candidates: ``[B, S-1, K]`` token ids.
            temperatures: ``[B]``, 0 = greedy (the first candidate). uniforms: ``[B, S-1]`` in [0, 1).

        Returns:
            tokens ``[B, S-1]`` and the realised q rows ``[B, S-1, K]`` float32 (one-hot when greedy).
        """

    # Shape plumbing for the block
    def block_ids(self, anchors: T, mask_token_id: int, block_size: int) -> T:
        """``[B]`` anchors → ``[B * S]`` ids: anchor then masks."""

    def block_positions(self, context_lengths: T, block_size: int) -> T:
        """``[B]`` → ``[B * S]`` positions context + 0 .. S-1."""

    def proposal_rows(self, x: T, block_size: int) -> T:
        """``[B * S, C]`` → rows 1 .. S-1 of each block, ``[B * (S-1), C]``."""

    def per_request(self, x: T, rows: int) -> T:
        """``[B * rows, C]`` → ``[B, rows, C]``."""

    def take_rows(self, x: T, rows: T) -> T:
        """Rows ``rows [R]`` (int64) of ``x [N, C]``."""

    def add_offsets(self, ids: T, offsets: T) -> T:
        """``ids + offsets[ids]``: draft vocabulary → target vocabulary (Speculators ``d2t``)."""

    # Fused places; ``ops.composed.ComposedOps`` defines each from the operations above
    def gated(self, x: T, projection: Linear[T]) -> T:
        """:meth:`swiglu` of :meth:`linear`: ``x [N, in]`` and ``[2 I, in]`` (gate rows first) → ``[N, I]``."""

    def add_rms_norm(self, x: T, y: T, weight: T, eps: float) -> tuple[T, T]:
        """``x + y`` (dtype of x) and its RMSNorm (dtype of the weight). x may be overwritten with the sum."""

    def conv_add_rms_norm(self, x: T, y: T, dynamic: T, base: T, block_size: int, weight: T, eps: float) -> tuple[T, T]:
        """:meth:`add_rms_norm` of x and ``grouped_dynamic_conv(y, dynamic, base, block_size)``."""

    def side_by_side(self, count: int) -> Any:
        """Room for ``count`` tensors ``[N, C]`` that :meth:`add_rms_norm_kept` gives and :meth:`joined` joins."""

    def add_rms_norm_kept(self, x: T, y: T, weight: T, eps: float, kept: Any, place: int) -> tuple[T, T]:
        """:meth:`add_rms_norm`; the sum, which may be overwritten later, is kept as number ``place`` of ``kept``."""

    def joined(self, kept: Any) -> T:
        """What was kept, in order of place, ``[N, count * C]``."""

    def rotate_qkv(
        self, qkv: T, layout: HeadLayout, q_norm: T | None, k_norm: T | None, eps: float, rows: Any
    ) -> tuple[T, T, T]:
        """A projection → normed and rotated q and k, and plain v, each ``[N, heads, head_dim]``."""

    def rotate_qkv_write(
        self,
        qkv: T,
        layout: HeadLayout,
        q_norm: T | None,
        k_norm: T | None,
        eps: float,
        rows: Any,
        cache: CacheLayer[T],
        slots: T,
    ) -> T:
        """:meth:`rotate_qkv`, then :meth:`write_kv` of k and v; returns q."""

    def inject_kv(
        self,
        kv: T,
        layout: HeadLayout,
        k_norms: Sequence[T | None],
        eps: float,
        rows: Any,
        caches: Sequence[CacheLayer[T]],
        slots: T,
    ) -> None:
        """Norm and rotate K, write K and V of every layer at ``slots [N]``; ``kv [N, layers * 2 * kv_heads * D]``
        is layer-major, K then V."""

    def head_logits(self, x: T) -> T:
        """Logits as a network gives them away: float32, or the compute dtype where readers convert as they read."""

    def candidates(self, logits: T, k: int, multiplier: float, softcap: float | None) -> tuple[T, T]:
        """:meth:`top_k` of ``softcap(multiplier * logits)`` in float32; softcap None is off."""
