"""What a request may ask of the engine is checked by name before anything is queued."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trtllm_dflash.config.sampling import SamplingParams
from trtllm_dflash.errors import RequestError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", 11),
        ("priority", -11),
        ("priority", 1.5),
        ("priority", True),
        ("deadline_s", 0),
        ("deadline_s", -1.0),
        ("deadline_s", float("inf")),
        ("deadline_s", float("nan")),
        ("deadline_s", "soon"),
        pytest.param("deadline_s", 10**400, id="deadline_s-no float"),
        ("cache_salt", ""),
        ("cache_salt", "x" * 257),
        ("cache_salt", 5),
    ],
)
def test_option_out_of_range_is_named(tiny_llms: Callable, name: str, value: object) -> None:
    llm = tiny_llms("llama-v2")
    before = llm.stats()
    with pytest.raises(RequestError, match=f"{name}: got"):
        llm.submit("hello d", SamplingParams(), lambda chunk: None, **{name: value})
    assert llm.stats() == before
