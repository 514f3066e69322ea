"""Streaming text: chunks concatenated are the text of the tokens, no character is split, no stop string leaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_pair import ACTIVE, BOS, EOS, VOCAB_SIZE
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.runtime.text import TextStream

REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module")
def demo_tokenizer(demo_pair: object) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(demo_pair.target)  # type: ignore[attr-defined]
    return tokenizer


def _stream(tokenizer: Tokenizer, blocks: Sequence[Sequence[int]], stop: Sequence[str] = ()) -> tuple[list[str], int]:
    """Chunks of text, the last one from ``finish``, and the tokens used."""
    stream = TextStream(tokenizer, stop, include_stop=False)
    chunks, used = [], 0
    for block in blocks:
        delta = stream.push(block)
        chunks.append(delta.text)
        used += delta.tokens_used
        if delta.stopped:
            return chunks, used
    return [*chunks, stream.finish()], used


def _check(tokenizer: PreTrainedTokenizerBase, blocks: Sequence[Sequence[int]]) -> None:
    ids = [token for block in blocks for token in block]
    chunks, used = _stream(tokenizer.backend_tokenizer, blocks)
    assert "".join(chunks) == tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert used == len(ids)


BLOCKS_OF_ANY_DEMO_IDS = st.lists(st.lists(st.integers(0, 49151), min_size=1, max_size=8), max_size=6)
# The tiny tokenizer is nearly all single bytes: most sequences are no UTF-8.
BLOCKS_OF_BYTES = st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8), max_size=8)
BLOCKS_OF_ACTIVE = st.lists(st.lists(st.sampled_from(ACTIVE), min_size=1, max_size=6), max_size=8)
TEXTS = st.text(
    st.one_of(st.sampled_from("ab é日本語한글🙂👩‍👩‍👧🇯🇵ﬁ\u0301\n"), st.characters(exclude_categories=["Cs"])),
    max_size=24,
)


RAW_BYTES = [f"<0x{byte:02X}>" for byte in (0xC3, 0xBF, 0xE2, 0x82, 0xAC, 0xEF, 0xBD)]
BYTES_AND_TEXTS = [*RAW_BYTES, "a", "\u20ac", REPLACEMENT]


@given(st.lists(st.lists(st.integers(0, len(BYTES_AND_TEXTS) - 1), min_size=1, max_size=4), max_size=5))
@example([[7, 0, 1], [1, 9, 2], [4, 1, 5, 8]])
@settings(max_examples=300, deadline=None, derandomize=True)
def test_stop_strings_that_never_come_change_no_text(blocks: list[list[int]]) -> None:
    """Where tokens are bytes, some sequences make the decoder lose its place; it is set up again in one way."""
    tokenizer = Tokenizer(models.WordLevel({text: n for n, text in enumerate(BYTES_AND_TEXTS)}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    plain, _ = _stream(tokenizer, blocks)
    searched, _ = _stream(tokenizer, blocks, ["never there"])
    assert "".join(plain) == "".join(searched)


@given(BLOCKS_OF_ANY_DEMO_IDS)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_demo_ids(demo_tokenizer: PreTrainedTokenizerBase, blocks: list[list[int]]) -> None:
    _check(demo_tokenizer, blocks)


@given(st.one_of(BLOCKS_OF_BYTES, BLOCKS_OF_ACTIVE))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_bytes(tiny_tokenizer: PreTrainedTokenizerBase, blocks: list[list[int]]) -> None:
    _check(tiny_tokenizer, blocks)


def _cut(ids: Sequence[int], size: int) -> list[Sequence[int]]:
    return [ids[start : start + size] for start in range(0, len(ids), size)]


@given(TEXTS, st.integers(1, 7))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_no_character_is_split(tiny_tokenizer: PreTrainedTokenizerBase, text: str, size: int) -> None:
    """Text that is whole at its end never shows a replacement character on the way."""
    ids = tiny_tokenizer.encode(text, add_special_tokens=False)
    chunks, _ = _stream(tiny_tokenizer.backend_tokenizer, _cut(ids, size))
    assert "".join(chunks) == text
    assert not any(REPLACEMENT in chunk for chunk in chunks) or REPLACEMENT in text


@given(TEXTS, st.integers(1, 7))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_no_character_is_split_demo(demo_tokenizer: PreTrainedTokenizerBase, text: str, size: int) -> None:
    ids = demo_tokenizer.encode(text, add_special_tokens=False)
    chunks, _ = _stream(demo_tokenizer.backend_tokenizer, _cut(ids, size))
    # SmolLM2's vocabulary lacks some bytes, so the decoded text may differ from the original.
    whole = demo_tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert "".join(chunks) == whole
    assert sum(chunk.count(REPLACEMENT) for chunk in chunks) == whole.count(REPLACEMENT)


def test_text_appears_as_soon_as_it_is_certain(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tiny_tokenizer.encode("a日b", add_special_tokens=False)
    chunks, _ = _stream(tiny_tokenizer.backend_tokenizer, [[token] for token in ids])
    assert chunks == ["a", "", "", "日", "b", ""]


@given(st.text("abc日", max_size=20), st.lists(st.text("abc日", min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_stop_string_never_leaks(tiny_tokenizer: PreTrainedTokenizerBase, text: str, stop: list[str]) -> None:
    """Every chunk is part of the text before the match; nothing of the match was sent before it was known."""
    ids = tiny_tokenizer.encode(text, add_special_tokens=False)
    for size in (1, 3, 20):
        chunks, used = _stream(tiny_tokenizer.backend_tokenizer, _cut(ids, size), stop)
        matches = [(text.index(one) + len(one), text.index(one)) for one in stop if one in text]
        # Tokens arrive one by one: the match that ends first ends the output; of those, the one that starts first.
        expected = text[: min(matches)[1]] if matches else text
        assert "".join(chunks) == expected
        assert matches or used == len(ids)


def test_only_special_tokens_have_no_text(tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    """Reasoning models mark their thoughts with added tokens that are text: the first one must not get lost."""
    tokenizer = Tokenizer.from_str(tiny_tokenizer.backend_tokenizer.to_str())
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    ids = tokenizer.encode("<think>\n日</think>a", add_special_tokens=False).ids
    assert ids[0] == VOCAB_SIZE
    for size in (1, 3, 20):
        chunks, used = _stream(tokenizer, _cut([BOS, *ids, EOS], size))
        assert ("".join(chunks), used) == ("<think>\n日</think>a", len(ids) + 2)
    assert "".join(_stream(tokenizer, _cut(ids, 3), ["</think>"])[0]) == "<think>\n日"


def test_text_that_might_become_a_stop_string_is_delivered_at_the_end(
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> None:
    ids = tiny_tokenizer.encode("xab", add_special_tokens=False)
    chunks, _ = _stream(tiny_tokenizer.backend_tokenizer, [[token] for token in ids], ["abc"])
    assert chunks == ["x", "", "", "ab"]


@pytest.mark.parametrize("stop", [(), ("\n", "c a")])
def test_chunks_of_requests(
    tiny_llms: Callable, tiny_tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]
) -> None:
    """Sampled tokens, most of them unfinished characters, streamed from real cycles."""
    chunks: dict[int, list[str]] = {index: [] for index in range(32)}
    each = [SamplingParams(temperature=1.0, max_tokens=50, ignore_eos=True, seed=seed, stop=stop) for seed in range(32)]
    outputs = tiny_llms("llama-v2").generate(
        ["abc"] * 32, each, on_chunk=lambda index, chunk: chunks[index].append(chunk.text)
    )
    for output in outputs:
        whole = tiny_tokenizer.decode(output.token_ids, skip_special_tokens=True)
        assert "".join(chunks[output.index]) == output.text
        assert len(chunks[output.index]) > 1 or len(output.token_ids) < 7
        if output.finish_reason == "stop":
            assert whole.startswith(output.text)
            assert not any(one in output.text for one in stop)
        else:
            assert output.text == whole
    assert not stop or {output.finish_reason for output in outputs} == {"stop", "length"}
