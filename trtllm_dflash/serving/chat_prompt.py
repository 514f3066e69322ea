"""Chat messages to a prompt, in the engine process: the target's own template, tools included.

The template is a program that came with the checkpoint. transformers runs it in Jinja's immutable sandbox, which is
checked here once more by running an escape attempt; nothing a client sends is ever a template.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trtllm_dflash.errors import EngineError, RequestError
from trtllm_dflash.serving.request_fields import ChatRequest

_ESCAPE = "{{ ''.__class__.__mro__[1].__subclasses__() }}"


class ChatTemplate:
    """The chat template of a tokenizer directory.

    Args:
        directory: ``tokenizer/`` of an engine directory.

    Raises:
        EngineError: the tokenizer cannot be loaded, or templates would not run in a sandbox.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(directory.resolve()), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise EngineError(f"{directory}: the tokenizer cannot be loaded: {error}") from error
        self._reserved = frozenset(inspect.signature(self._tokenizer.apply_chat_template).parameters)
        check_sandbox(self._tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """The ``tokenizers`` object."""
        backend: Tokenizer = self._tokenizer.backend_tokenizer
        return backend

    def encode(self, request: ChatRequest) -> list[int]:
        """Token ids of the rendered messages, ready for an answer. Raises ``RequestError``."""
        if not self._tokenizer.chat_template:
            raise RequestError("chat_messages", "chat messages", "text: this target has no chat template")
        for name, _ in request.template_values:
            if name in self._reserved or not name.isidentifier():
                raise RequestError("chat_template_kwargs", name, "names of variables that the chat template uses")
        try:
            values: dict[str, Any] = dict(request.template_values)
            messages: list[Any] = [dict(message) for message in request.messages]
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=[dict(tool) for tool in request.tools] or None,
                add_generation_prompt=True,
                tokenize=False,
                **values,
            )
        except Exception as error:
            # Whatever a template raises for these messages is the messages' fault: raise_exception() or a type error.
            raise RequestError(
                "chat_messages", "chat messages", f"messages that the chat template takes ({error})"
            ) from error
        return list(self._tokenizer.encode(str(text), add_special_tokens=False))


def check_sandbox(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse to serve when a template could reach Python's internals; raises ``EngineError``."""
    try:
        found = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], chat_template=_ESCAPE, tokenize=False)
    except Exception:
        return  # jinja2.exceptions.SecurityError
    if str(found).strip():
        raise EngineError(
            "the installed transformers runs chat templates without a sandbox",
            hint="install transformers>=5.0,<6, which uses jinja2's ImmutableSandboxedEnvironment",
        )
