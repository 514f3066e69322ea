"""Chat messages as templates take them: one text each, and nothing in them that would get lost without a word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtllm_dflash.errors import RequestError


def text_messages(messages: Sequence[object], field: str) -> list[dict[str, Any]]:
    """Check chat messages and make one text of every content.

    Templates leave out what they do not know, or print it as Python would: an image would be dropped silently, and the
    answer would look as if it had been seen.

    Args:
        messages: mappings of ``role`` and ``content``: a text, a list of ``{"type": "text", "text": …}`` parts, or
            None where the message is a tool call. Other keys are the template's business and stay.
        field: name of the request's field, for errors.

    Returns:
        copies whose ``content`` is a string; parts are joined without anything between them.

    Raises:
        RequestError: no such message, or content that is not text.
    """
    return [_text_message(message, field) for message in messages]


def _text_message(message: object, field: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(field, message, "chat messages with role and content")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    if isinstance(content, list | tuple):
        content = "".join(_text_of(part, field) for part in content)
    if not isinstance(content, str):
        found = dict(message) if "content" not in message else f"content {content!r:.40}"
        raise RequestError(field, found, "chat messages with role and content, which is text")
    return {**message, "content": content}


def _text_of(part: object, field: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind != "text":
        found = f"a part of type {kind!r}" if isinstance(part, Mapping) else f"the part {part!r:.40}"
        raise RequestError(field, found, "parts of type 'text': images, audio and files are not supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(field, f"a text part with text {text!r:.40}", "a string")
    return text
