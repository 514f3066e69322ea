"""From a checked request body to the inputs of the Triton model, one set per sequence to generate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trtllm_dflash.serving.gateway.api_errors import ApiError
from trtllm_dflash.serving.gateway.schema import ChatBody, CompletionBody, Message
from trtllm_dflash.serving.request_inputs import AS_MANY_AS_FIT

DEFAULT_COMPLETION_TOKENS = 16
Inputs = dict[str, Any]


def inputs_of(body: ChatBody | CompletionBody, *, max_choices: int) -> list[Inputs]:
    """Inputs of each sequence, prompts outermost: choice ``p * n + i`` is sample i of prompt p.

    Raises:
        ApiError: more than ``max_choices`` sequences; names the field.
    """
    n = body.n or 1
    prompts = [_chat_prompt(body)] if isinstance(body, ChatBody) else _prompts(body)
    if len(prompts) * n > max_choices:
        param = "n" if n > 1 else "prompt"
        raise ApiError(
            400,
            f"{param}: got {len(prompts)} prompts of {n} sequences each, expected at most {max_choices} sequences in "
            "one request, by this server's slots, queue and settings",
            param=param,
            code="invalid_value",
        )
    sampling = _sampling(body)
    several = []
    for prompt in prompts:
        for index in range(n):
            seed = {} if body.seed is None else {"seed": (body.seed + index) % 2**64}
            several.append({**prompt, **sampling, **seed, "stream": True})
    return several


def echoed_characters(inputs: Inputs) -> int:
    """Characters of the prompt that one sequence's text begins with."""
    return 0 if inputs.get("exclude_input_in_output", True) else len(inputs["text_input"])


def _sampling(body: ChatBody | CompletionBody) -> Inputs:
    if isinstance(body, ChatBody):
        asked = body.max_completion_tokens or body.max_tokens
        limit = asked or AS_MANY_AS_FIT
        top_log_probs = (body.top_logprobs or 0) if body.logprobs else None
    else:
        asked = body.max_tokens
        limit = asked or DEFAULT_COMPLETION_TOKENS
        top_log_probs = body.logprobs
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    given = {
        # A number that a client gives is a number, the largest one too, which means "as many as fit" to the model.
        "max_tokens": min(asked, AS_MANY_AS_FIT - 1) if asked else limit,
        # As OpenAI and vLLM: what a client asks for must fit, our own default is cut.
        "max_tokens_must_fit": True if asked else None,
        # The model is greedy when nothing is said, OpenAI's clients expect temperature 1.
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "min_tokens": body.min_tokens,
        "ignore_eos": body.ignore_eos,
        "stop_words": stop or None,
        "stop_token_ids": body.stop_token_ids or None,
        "include_stop_in_output": body.include_stop_str_in_output,
        "bad_words": body.bad_words or None,
        "logit_bias": json.dumps(body.logit_bias) if body.logit_bias else None,
        "top_log_probs": top_log_probs,
        "priority": body.priority,
        "deadline_s": body.deadline_s,
        "cache_salt": body.cache_salt,
        **_guide(body),
    }
    if body.top_p == 0:
        raise ApiError(400, "top_p: got 0, expected a number in (0, 1]", param="top_p", code="invalid_value")
    return {name: value for name, value in given.items() if value is not None}


def _guide(body: ChatBody | CompletionBody) -> Inputs:
    form = body.response_format
    if form is None or form.type == "text":
        return {}
    if form.type == "json_object" or form.json_schema is None:
        return {"guided_decoding_guide_type": "json"}
    schema = json.dumps(form.json_schema.body, ensure_ascii=False)
    return {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": schema}


def _chat_prompt(body: ChatBody) -> Inputs:
    messages = [_message(message) for message in body.messages]
    prompt: Inputs = {"chat_messages": json.dumps(messages, ensure_ascii=False)}
    if body.tools and body.tool_choice != "none":
        tools = [tool.model_dump() for tool in body.tools]
        prompt["chat_tools"] = json.dumps(tools, ensure_ascii=False)
    if body.chat_template_kwargs:
        prompt["chat_template_kwargs"] = json.dumps(body.chat_template_kwargs, ensure_ascii=False)
    return prompt


def _message(message: Message) -> Inputs:
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    found: Inputs = {"role": message.role, "content": content or ""}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return found


def _tool_call(call: Mapping[str, Any]) -> Inputs:
    """Templates write the arguments as JSON themselves, so a string of JSON becomes the object it means."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


def _prompts(body: CompletionBody) -> list[Inputs]:
    prompt = body.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        several: list[Any] = [prompt]
    else:
        several = list(prompt)
    if body.echo and not isinstance(several[0], str):
        raise ApiError(400, "echo: expected false when the prompt is token ids", param="echo", code="invalid_value")
    echo: Inputs = {"exclude_input_in_output": False} if body.echo else {}
    return [{("text_input" if isinstance(one, str) else "input_ids"): one, **echo} for one in several]
