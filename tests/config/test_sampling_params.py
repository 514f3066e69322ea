"""Sampling parameters: what is accepted, what is refused, and how the refusal reads."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.errors import RequestError

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [0, -1, 1.0, True, "8", NAN]),
        ("min_tokens", [-1, 2.5, False, None]),
        ("temperature", [-0.1, NAN, INF, True, "1", None]),
        ("top_p", [0.0, 1.0001, -1, NAN, True, None]),
        ("top_k", [-1, 1.5, True, None]),
        ("min_p", [-0.01, 1.01, NAN, False]),
        ("repetition_penalty", [0, -1, NAN, INF, True]),
        ("presence_penalty", [-2.01, 2.01, NAN, True]),
        ("frequency_penalty", [-2.01, 2.01, INF, "0"]),
        (
            "logit_bias",
            [[1], {-1: 1.0}, {"a": 1.0}, {"-1": 1.0}, {1.5: 1.0}, {True: 1.0}, {1: 101}, {1: NAN}, {1: None}],
        ),
        ("bad_words", ["", [""], [1], None, b"x"]),
        ("stop", ["", ["a", ""], [1], None, 3]),
        ("stop_token_ids", [[-1], [True], ["1"], "12", 5, None]),
        ("include_stop_in_output", [1, "true", None]),
        ("ignore_eos", [0, None]),
        ("seed", [-1, 2**64, 1.0, True]),
        ("logprobs", [-1, True, 1.5]),
        ("structured_output", [{"json": {}}, False]),
    ],
)
def test_refused_by_field_value_and_range(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field
        assert caught.value.message.startswith(f"{field}: got ")
        assert caught.value.allowed


@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "seed", "bias", "biased id"]
)
def test_numbers_that_no_float_holds_and_python_does_not_print(field: str, digits: int) -> None:
    number = 10**digits
    values: dict[str, Any] = {"bias": {7: number}, "biased id": {"9" * digits: 1.0}}
    with pytest.raises(RequestError, match=r"^\w+: got .*expected"):
        SamplingParams(**({"logit_bias": values[field]} if field in values else {field: number}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", None),
        ("temperature", 0),
        ("top_p", 1),
        ("top_k", np.int64(5)),
        ("temperature", np.float32(0.5)),
        ("min_p", 1.0),
        ("repetition_penalty", 0.01),
        ("presence_penalty", -2),
        ("seed", 2**64 - 1),
        ("logprobs", 0),
    ],
)
def test_edges_are_accepted(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_normalised_values() -> None:
    params = SamplingParams(stop="END", bad_words=["a", "b"], stop_token_ids=[3], logit_bias={"7": -100, 8: 1}, top_p=1)  # type: ignore[arg-type]
    assert params.stop == ("END",)
    assert params.bad_words == ("a", "b")
    assert params.stop_token_ids == (3,)
    assert params.logit_bias == {7: -100.0, 8: 1.0}
    assert isinstance(params.top_p, float)


def test_the_same_token_twice() -> None:
    with pytest.raises(RequestError, match="each token id once"):
        SamplingParams(logit_bias={7: 1.0, "7": 2.0})  # type: ignore[dict-item]


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(RequestError, match=r"min_tokens: got 9, expected an integer in \[0, max_tokens = 8\]"):
        SamplingParams(max_tokens=8, min_tokens=9)
    assert SamplingParams(max_tokens=None, min_tokens=9).min_tokens == 9
    with pytest.raises(RequestError, match=r"^min_tokens: got a number of thousands of digits"):
        SamplingParams(max_tokens=10**5000, min_tokens=10**5001)


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.lists(st.integers()),
    st.dictionaries(st.text(), st.floats()),
)


@given(field=st.sampled_from(sorted(SamplingParams.__dataclass_fields__)), value=anything)
def test_whatever_is_given_only_a_request_error_comes_back(field: str, value: Any) -> None:
    with contextlib.suppress(RequestError):
        SamplingParams(**{field: value})
