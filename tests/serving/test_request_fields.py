"""Legacy, llmapi and core tensor names become the same sampling parameters; what cannot be honoured is refused."""

from __future__ import annotations

import pytest

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.errors import RequestError
from trtllm_dflash.serving.request_fields import ServingRequest, parse_request
from trtllm_dflash.serving.request_inputs import ALIASES, INPUTS


def parse(**inputs: object) -> ServingRequest:
    fields = {name: value if isinstance(value, list) else [value] for name, value in inputs.items()}
    return parse_request(fields, eos_token_ids=(2,), vocab_size=1000)


def test_only_a_prompt_is_greedy_with_the_default_length() -> None:
    request = parse(text_input="hi")
    assert request == ServingRequest("hi", SamplingParams(temperature=0.0), stream=False, log_probs=False, echo="")


def test_legacy_names() -> None:
    request = parse(
        text_input="hi", max_tokens=5, stream=True, temperature=0.7, top_k=4, top_p=0.9, stop_words=["a", "b"],
        bad_words=["x"], random_seed=2**63, min_length=2, repetition_penalty=1.1, presence_penalty=0.5,
        frequency_penalty=-0.5, return_log_probs=True,
    )  # fmt: skip
    assert request.stream
    assert request.log_probs
    assert request.params == SamplingParams(
        max_tokens=5, min_tokens=2, temperature=0.7, top_k=4, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.5,
        frequency_penalty=-0.5, bad_words=("x",), stop=("a", "b"), seed=2**63, logprobs=0,
    )  # fmt: skip


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_aliases_mean_the_same(alias: str) -> None:
    name = ALIASES[alias]
    kind = INPUTS[name][0]
    value: object = {"BOOL": True, "STRING": "word", "FP32": 0.5}.get(kind, 1)
    assert parse(text_input="hi", **{alias: value}) == parse(text_input="hi", **{name: value})


def test_two_names_of_one_input_must_agree() -> None:
    assert parse(text_input="hi", max_tokens=4, request_output_len=4).params.max_tokens == 4
    with pytest.raises(RequestError, match="max_tokens"):
        parse(text_input="hi", max_tokens=4, request_output_len=5)


def test_token_ids_prompt() -> None:
    assert parse(input_ids=[5, 6, 7], input_lengths=3).prompt == [5, 6, 7]


def test_echo_puts_the_prompt_first() -> None:
    assert parse(text_input="hi", exclude_input_in_output=False).echo == "hi"
    assert parse(text_input="hi", exclude_input_in_output=True).echo == ""


@pytest.mark.parametrize(
    ("end_id", "ignore_eos", "stop_token_ids"),
    [
        (2, False, ()), (-1, True, ()), (9, True, (9,)), (1000, True, ()), (1048576, True, ()),
    ],
)  # fmt: skip
def test_end_id_replaces_the_models_own(end_id: int, ignore_eos: bool, stop_token_ids: tuple[int, ...]) -> None:
    params = parse(text_input="hi", end_id=end_id).params
    assert (params.ignore_eos, params.stop_token_ids) == (ignore_eos, stop_token_ids)


def test_legacy_top_p_zero_is_off() -> None:
    assert parse(text_input="hi", top_p=0.0, top_k=5).params == SamplingParams(top_k=5)
    assert parse(text_input="hi", top_p=0.0, top_k=0).params.temperature == 0.0


def test_neutral_values_of_unsupported_inputs_are_accepted() -> None:
    request = parse(text_input="hi", beam_width=1, num_return_sequences=1, length_penalty=1.0, pad_id=2, bad_words="")
    assert request.params == SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 4),
        ("num_return_sequences", 2),
        ("sampling_param_best_of", 2),
        ("return_context_logits", True),
        ("guided_decoding_guide_type", "xml"),
        ("embedding_bias_words", ["a"]),
        ("image_url", "http://x"),
        ("lora_task_id", 3),
        ("nonsense", 1),
        ("pad_id", 1000),
        ("end_id", -2),
        ("accumulate_tokens", "all"),
        ("max_tokens", [1, 2]),
        ("max_tokens", "abc"),
        ("max_tokens", True),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        pytest.param("temperature", 10**400, id="temperature-no float"),
        ("stream", "yes"),
        ("input_ids", [5]),
    ],
)
def test_refusals_name_the_input(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        parse(text_input="hi", **{name: value})
    assert caught.value.field == ALIASES.get(name, name)


@pytest.mark.parametrize(
    "inputs", [{}, {"text_input": ""}, {"input_ids": []}, {"input_ids": [-1]}, {"input_ids": [1000]}]
)
def test_prompt_is_required_and_valid(inputs: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=r"text_input|input_ids"):
        parse(**inputs)
