"""The inputs of the Triton model: names, types, other names of three generations of clients, and what is refused."""

from __future__ import annotations

# Every declared input: Triton data type and dims. All are optional for Triton; what is required is checked here.
INPUTS: dict[str, tuple[str, str]] = {
    "text_input": ("STRING", "1"),
    "input_ids": ("INT32", "-1"),
    "input_lengths": ("INT32", "1"),
    "stream": ("BOOL", "1"),
    "streaming": ("BOOL", "1"),
    **dict.fromkeys(("max_tokens", "request_output_len", "sampling_param_max_tokens"), ("INT32", "1")),
    **dict.fromkeys(("min_tokens", "min_length", "sampling_param_min_tokens"), ("INT32", "1")),
    **dict.fromkeys(("top_k", "runtime_top_k", "sampling_param_top_k"), ("INT32", "1")),
    **dict.fromkeys(("temperature", "sampling_param_temperature"), ("FP32", "1")),
    **dict.fromkeys(("top_p", "runtime_top_p", "sampling_param_top_p", "min_p", "sampling_param_min_p"), ("FP32", "1")),
    **dict.fromkeys(("repetition_penalty", "sampling_param_repetition_penalty"), ("FP32", "1")),
    **dict.fromkeys(("presence_penalty", "sampling_param_presence_penalty"), ("FP32", "1")),
    **dict.fromkeys(("frequency_penalty", "sampling_param_frequency_penalty"), ("FP32", "1")),
    **dict.fromkeys(("seed", "random_seed", "sampling_param_seed"), ("UINT64", "1")),
    **dict.fromkeys(("stop_words", "sampling_param_stop", "bad_words"), ("STRING", "-1")),
    **dict.fromkeys(("end_id", "pad_id"), ("INT32", "1")),
    **dict.fromkeys(("ignore_eos", "sampling_param_ignore_eos"), ("BOOL", "1")),
    **dict.fromkeys(("return_log_probs", "return_cumulative_logprob"), ("BOOL", "1")),
    **dict.fromkeys(("exclude_input_in_output", "sampling_param_exclude_input_from_output"), ("BOOL", "1")),
    **dict.fromkeys(
        ("return_finish_reason", "return_perf_metrics", "sampling_param_return_perf_metrics"), ("BOOL", "1")
    ),
    **dict.fromkeys(("return_stop_reason", "return_context_logits", "return_generation_logits"), ("BOOL", "1")),
    **dict.fromkeys(("num_return_sequences", "sampling_param_best_of", "beam_width"), ("INT32", "1")),
    "accumulate_tokens": ("BOOL", "1"),
    "length_penalty": ("FP32", "1"),
    "num_draft_tokens": ("INT32", "1"),
    "use_draft_logits": ("BOOL", "1"),
    "prompt_vocab_size": ("INT32", "1"),
    "lora_task_id": ("UINT64", "1"),
    **dict.fromkeys(("guided_decoding_guide_type", "guided_decoding_guide", "image_url"), ("STRING", "1")),
    "embedding_bias_words": ("STRING", "-1"),
    "embedding_bias_weights": ("FP32", "-1"),
    # Of this toolkit: what the OpenAI front end needs beyond the legacy names. The first three are JSON texts.
    **dict.fromkeys(("chat_messages", "chat_tools", "chat_template_kwargs"), ("STRING", "1")),
    "logit_bias": ("STRING", "1"),
    "top_log_probs": ("INT32", "1"),
    "stop_token_ids": ("INT32", "-1"),
    "include_stop_in_output": ("BOOL", "1"),
    "priority": ("INT32", "1"),
    "deadline_s": ("FP32", "1"),
    "cache_salt": ("STRING", "1"),
    "max_tokens_must_fit": ("BOOL", "1"),
    # Answered by the proxy: stop the request of the same request id; facts for the supervisor.
    "stop": ("BOOL", "1"),
    "control": ("STRING", "1"),
}

DEFAULT_MAX_TOKENS = 256
# A max_tokens of this value asks for as many tokens as the prompt leaves, so nothing is cut.
AS_MANY_AS_FIT = 2**31 - 1

ALIASES: dict[str, str] = {
    "request_output_len": "max_tokens",
    "sampling_param_max_tokens": "max_tokens",
    "sampling_param_temperature": "temperature",
    "runtime_top_k": "top_k",
    "sampling_param_top_k": "top_k",
    "runtime_top_p": "top_p",
    "sampling_param_top_p": "top_p",
    "sampling_param_min_p": "min_p",
    "sampling_param_frequency_penalty": "frequency_penalty",
    "sampling_param_presence_penalty": "presence_penalty",
    "sampling_param_repetition_penalty": "repetition_penalty",
    "sampling_param_stop": "stop_words",
    "sampling_param_seed": "seed",
    "random_seed": "seed",
    "min_length": "min_tokens",
    "sampling_param_min_tokens": "min_tokens",
    "sampling_param_ignore_eos": "ignore_eos",
    "streaming": "stream",
    "sampling_param_exclude_input_from_output": "exclude_input_in_output",
    "return_cumulative_logprob": "return_log_probs",
    "sampling_param_best_of": "num_return_sequences",
}

# What the values must be for the request to mean the same thing without the feature.
NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "num_return_sequences": ((1,), "1 (one sequence per request; send the request again for more)"),
    "beam_width": ((0, 1), "1 (beam search does not combine with speculative decoding)"),
    "length_penalty": ((0.0, 1.0), "1.0 (it only has a meaning with beam search)"),
    "return_context_logits": ((False,), "false (logits are not returned; use return_log_probs)"),
    "return_generation_logits": ((False,), "false (logits are not returned; use return_log_probs)"),
    "return_stop_reason": ((False,), "false (finish_reason is always returned)"),
    "use_draft_logits": ((False,), "false (the engine drafts by itself)"),
    "num_draft_tokens": ((0,), "0 (the engine drafts by itself)"),
    "lora_task_id": ((0,), "0 (LoRA is not supported)"),
    "prompt_vocab_size": ((0,), "0 (prompt tuning is not supported)"),
}

# TensorRT-LLM's guide types, lower case as its Triton backend takes them → ours.
GUIDES: dict[str, str] = {
    "json": "json_object",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf_grammar": "grammar",
}

# What every request gets, so that asking for it changes nothing: facts in the last response, and text that is made of
# all tokens so far and not of one token at a time (accumulate_tokens, which the load generators of vLLM, SGLang and
# TensorRT-LLM always send).
ALWAYS_GIVEN = (
    "return_finish_reason",
    "return_perf_metrics",
    "sampling_param_return_perf_metrics",
    "accumulate_tokens",
)

UNSUPPORTED: dict[str, str] = {
    "embedding_bias_words": "no value: embedding bias is not supported; use bad_words to ban words",
    "embedding_bias_weights": "no value: embedding bias is not supported; use bad_words to ban words",
    "image_url": "no value: images are not supported",
}
