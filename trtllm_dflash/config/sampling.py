"""Sampling parameters of one request."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Values out of range raise ``RequestError`` naming field, value and range.

    The order of processing is: bad words, ``min_tokens`` and ``logit_bias`` on raw logits; repetition, presence and
    frequency penalties; temperature; top-k; top-p; min-p (the order of transformers' warpers, top-p on the
    distribution that top-k left).

    Attributes:
        max_tokens: at most this many output tokens; None means up to the engine's max_seq_len.
        min_tokens: stop token ids (EOS included) are impossible before this many output tokens.
        temperature: 0 is greedy.
        top_p: in (0, 1]. top_k: 0 is off. min_p: in [0, 1], relative to the best token.
        repetition_penalty: > 0; divides positive and multiplies negative logits of tokens in prompt or output.
        presence_penalty, frequency_penalty: in [-2, 2]; over output tokens.
        logit_bias: token id → bias in [-100, 100]; -100 bans the token.
        bad_words: strings that are never produced, as token sequences.
        stop: strings that end generation; stop_token_ids: token ids that do.
        include_stop_in_output: keep the stop string or stop token in the text.
        ignore_eos: the model's own EOS does not end generation.
        seed: 64-bit; the same seed gives the same tokens alone or in any batch. None draws one.
        logprobs: number of top alternatives to report beside each chosen token (0 = the chosen one only), or None.
    """

    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    structured_output: None = None
