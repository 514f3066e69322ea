"""OpenAI's answers: one document, or chunks, from the events of the Triton model."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trtllm_dflash.serving.client import token_ids


@dataclass
class Choice:
    """One sequence as it grows.

    Attributes:
        index: its number in the answer. offset: characters of its text before the next token's: at first the echoed
        prompt's. text, tokens: so far. details: log probabilities per token, when asked for.
        finish_reason: set at the end. metrics: facts of the request, at the end.
    """

    index: int
    offset: int = 0
    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    details: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)

    def add(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """Take one event in; returns the log probabilities of its tokens."""
        self.texts.append(event.get("text_output", ""))
        self.tokens += len(token_ids(event))
        new = json.loads(event["log_prob_details"]) if "log_prob_details" in event else []
        self.details += new
        if "finish_reason" in event:
            self.finish_reason = str(event["finish_reason"])
            self.metrics = json.loads(event.get("request_metrics", "{}"))
        return new

    @property
    def text(self) -> str:
        return "".join(self.texts)


class ChatShape:
    """The shape of ``/v1/chat/completions``."""

    prefix, document, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def first(self, index: int) -> dict[str, Any] | None:
        """What a stream begins with for a choice."""
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def part(self, choice: Choice, text: str, details: list[dict[str, Any]], wanted: bool) -> dict[str, Any]:
        """New output of a choice."""
        return {
            "index": choice.index,
            "delta": {"content": text} if text else {},
            "logprobs": {"content": details} if wanted else None,
            "finish_reason": choice.finish_reason,
        }

    def whole(self, choice: Choice, wanted: bool) -> dict[str, Any]:
        """A choice that has ended."""
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": {"content": choice.details, "refusal": None} if wanted else None,
            "finish_reason": choice.finish_reason,
        }


class CompletionShape:
    """The shape of ``/v1/completions``."""

    prefix, document, chunk = "cmpl-", "text_completion", "text_completion"

    def first(self, index: int) -> dict[str, Any] | None:
        """What a stream begins with for a choice: nothing here."""
        return None

    def part(self, choice: Choice, text: str, details: list[dict[str, Any]], wanted: bool) -> dict[str, Any]:
        """New output of a choice."""
        return {
            "index": choice.index,
            "text": text,
            "logprobs": _legacy_logprobs(details, choice) if wanted else None,
            "finish_reason": choice.finish_reason,
        }

    def whole(self, choice: Choice, wanted: bool) -> dict[str, Any]:
        """A choice that has ended."""
        return self.part(choice, choice.text, choice.details, wanted)


Shape = ChatShape | CompletionShape


class Answer:
    """Builds the documents of one request.

    Args:
        shape: chat or completion. identity: the request's id. model: the name in the answer.
        logprobs: the client wants log probabilities. choices: number of sequences. prompts: number of prompts.
        echoed: the prompt's characters that each choice's text begins with, when they are echoed.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        identity: str,
        model: str,
        logprobs: bool,
        choices: int,
        prompts: int,
        echoed: Sequence[int] = (),
    ) -> None:
        self.shape = shape
        self.identity = identity
        self.logprobs = logprobs
        offsets = echoed or [0] * choices
        self.choices = [Choice(index, offset) for index, offset in enumerate(offsets)]
        self._per_prompt = choices // prompts
        head = {"id": identity, "object": shape.chunk, "created": int(time.time()), "model": model}
        self._head = {**head, "object": shape.document}
        # The same in every chunk, so written once.
        self._chunk_start = f"data: {json.dumps(head, separators=(',', ':'))[:-1]},"

    def document(self) -> dict[str, Any]:
        """The whole answer."""
        return {
            **self._head,
            "choices": [self.shape.whole(choice, self.logprobs) for choice in self.choices],
            "usage": self.usage(),
            "metrics": self.metrics(),
        }

    def chunk(self, choices: list[dict[str, Any]], *, with_usage_field: bool, ending: bool = False) -> bytes:
        """One server-sent event. ``ending``: the last one, with the usage and without choices."""
        body = f'"choices":{json.dumps(choices, ensure_ascii=False, separators=(",", ":"))}'
        if ending:
            body += f',"usage":{json.dumps(self.usage())},"metrics":{json.dumps(self.metrics())}'
        elif with_usage_field:
            body += ',"usage":null'
        return f"{self._chunk_start}{body}}}\n\n".encode()

    def usage(self) -> dict[str, Any]:
        """Tokens, as the engine counted them."""
        # Samples of one prompt share its tokens: they are counted once.
        each = self.choices[:: self._per_prompt]
        prompt = sum(int(choice.metrics.get("prompt_tokens", 0)) for choice in each)
        completion = sum(choice.tokens for choice in self.choices)
        found: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        cached = [choice.metrics["cached_tokens"] for choice in each if "cached_tokens" in choice.metrics]
        if cached:
            found["prompt_tokens_details"] = {"cached_tokens": sum(map(int, cached))}
        return found

    def metrics(self) -> dict[str, Any] | None:
        """``metrics.speculative_decoding`` in vLLM's shape (vllm-project/vllm#48915); null for several sequences.

        AIPerf checks that the histogram has ``num_spec_tokens + 1`` entries: entry j counts steps that kept j drafts.
        """
        metrics = self.choices[0].metrics
        steps = int(metrics.get("cycles", 0))
        if len(self.choices) != 1 or not metrics or int(metrics.get("block_size", 1)) < 2:
            return None
        histogram = [int(count) for count in metrics["accepted_histogram"]]
        accepted, drafted = int(metrics["accepted_tokens"]), int(metrics["drafted_tokens"])
        return {
            "speculative_decoding": {
                "mean_acceptance_length": 1 + accepted / steps if steps else 0.0,
                "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
                "acceptance_histogram": histogram,
                "num_spec_steps": steps,
                "num_accepted_draft_tokens": accepted,
                "num_draft_tokens": drafted,
                "num_spec_tokens": len(histogram) - 1,
            }
        }


def _legacy_logprobs(details: list[dict[str, Any]], choice: Choice) -> dict[str, Any]:
    """The older shape: parallel lists, alternatives as a mapping from text.

    Offsets follow the tokens, not the text of the same event, from which a part may be held back.
    """
    offsets = []
    for entry in details:
        offsets.append(choice.offset)
        choice.offset += _characters(entry)
    return {
        "tokens": [entry["token"] for entry in details],
        "token_logprobs": [entry["logprob"] for entry in details],
        "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in details],
        "text_offset": offsets,
    }


def _characters(entry: dict[str, Any]) -> int:
    """Characters that begin in a token. One that is spread over several tokens begins in the first."""
    raw = entry.get("bytes")
    return len(entry["token"]) if raw is None else sum(1 for byte in raw if byte & 0xC0 != 0x80)
