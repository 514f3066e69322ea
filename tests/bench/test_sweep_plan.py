"""Which runs, in which order; shorthands and YAML."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from trtllm_dflash.bench.configuration import Configuration
from trtllm_dflash.bench.sweep_configs import (
    configurations_from_shorthands,
    configurations_from_yaml,
    fingerprint,
)
from trtllm_dflash.bench.sweep_plan import SweepPlan, parse_concurrencies
from trtllm_dflash.errors import ConfigError


def _plan(max_open: int | None = None) -> SweepPlan:
    three = tuple(Configuration(label, engines=Path(label)) for label in "ABC")
    return SweepPlan(three, (1, 2), repeats=2, max_open=max_open)


def test_every_run_is_planned_once() -> None:
    for max_open in (None, 1):
        order = _plan(max_open).order()
        assert len(order) == len(set(order)) == 3 * 2 * 2


def test_a_linear_drift_hits_all_configurations_alike() -> None:
    for max_open in (None, 1):
        moments: dict[str, list[int]] = {}
        for moment, key in enumerate(_plan(max_open).order()):
            moments.setdefault(key.label, []).append(moment)
        assert len({sum(taken) for taken in moments.values()}) == 1


def test_with_all_engines_loaded_neighbours_have_the_same_load() -> None:
    order = _plan().order()
    assert [key.label for key in order[:3]] == ["A", "B", "C"]
    assert {key.concurrency for key in order[:3]} == {1}


def test_one_engine_at_a_time_is_loaded_once_a_repeat() -> None:
    labels = [key.label for key in _plan(1).order()]
    changes = sum(a != b for a, b in itertools.pairwise(labels))
    assert changes == 4  # A B C C B A


def test_requests_grow_with_concurrency() -> None:
    plan = SweepPlan((Configuration("A", engines=Path("A")),), (1, 64), requests_per_user=4, min_requests=8)
    assert (plan.requests(1), plan.requests(64)) == (8, 256)


@pytest.mark.parametrize(
    ("text", "numbers"), [("4,1", (1, 4)), ("1..8", (1, 2, 4, 8)), ("1..6,32", (1, 2, 4, 6, 32)), ("3", (3,))]
)
def test_concurrencies(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_concurrencies(text) == numbers


@pytest.mark.parametrize("text", ["", "0", "a", "1..", "-1", "1;2", "²", "1..²"])
def test_bad_concurrencies_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected for example"):
        parse_concurrencies(text)


def test_shorthands_find_the_engine_with_the_drafter(tiny_engines: Callable[..., Path]) -> None:
    first, second = tiny_engines("llama-v2"), tiny_engines("llama-v1")
    found = configurations_from_shorthands(["plain", "dflash", "dflash2", "S=2", "dflash:S=3"], [first, second])
    assert [(one.label, one.engines, one.speculation, one.block_size) for one in found] == [
        ("plain", first, "off", None),
        ("DFlash", second, "on", None),
        ("DFlash 2", first, "on", None),
        ("S=2", first, "on", 2),
        ("DFlash S=3", second, "on", 3),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eagle"], "expected some of plain"),
        (["S=x"], "expected some of plain"),
        (["dflash"], "has a DFlash 1 drafter"),
        (["plain", "plain"], "two configurations are called 'plain'"),
        ([""], "no configurations"),
    ],
)
def test_bad_shorthands_are_refused(tiny_engines: Callable[..., Path], words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configurations_from_shorthands(words, [tiny_engines("llama-v2")])
    assert message in caught.value.message


def test_yaml_is_read_relative_to_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        "configurations:\n"
        "  - {label: plain, engines: engines, speculation: off}\n"
        "  - {label: eight, engines: engines, speculation: on, block_size: 8, kv_cache_tokens: 4096}\n"
        "  - {label: other, url: 'http://127.0.0.1:8000', api: openai, gpus: 2}\n"
    )
    plain, eight, other = configurations_from_yaml(file)
    assert (plain.engines, plain.speculation) == (tmp_path / "engines", "off")
    assert (eight.speculation, eight.block_size, eight.kv_cache_tokens) == ("on", 8, 4096)
    assert (other.api, other.gpus) == ("openai", 2)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{engines: e}", "has no label"),
        ("{label: a, engines: e, speculation: maybe}", "expected on, off or auto"),
        ("{label: a, engines: e, speculation: [on]}", "expected on, off or auto"),
        ("{label: a, engines: e, batch: 3}", "has a key 'batch'"),
        ("{label: a, url: 8000}", "configurations[0].url is 8000, expected a text"),
        ("{label: a, engines: e, block_size: 0}", "expected a whole number"),
        ("{label: a}", "expected an engine directory or a url"),
        ("nothing", "expected a mapping"),
    ],
)
def test_bad_yaml_is_named(tmp_path: Path, entry: str, message: str) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(f"configurations:\n  - {entry}\n")
    with pytest.raises(ConfigError) as caught:
        configurations_from_yaml(file)
    assert message in caught.value.message


def test_yaml_that_is_not_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_bytes(b"configurations: \xff\xfe\n")
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        configurations_from_yaml(file)


def test_a_fingerprint_is_of_settings_and_engine_not_of_the_place(
    tiny_engines: Callable[..., Path], tmp_path: Path
) -> None:
    engines = tiny_engines("llama-v2")
    elsewhere = tmp_path / "moved"
    elsewhere.symlink_to(engines)
    here = Configuration("a", engines=engines)
    assert fingerprint(here) == fingerprint(Configuration("b", engines=elsewhere))
    assert fingerprint(here) != fingerprint(Configuration("a", engines=engines, block_size=2))
    assert fingerprint(here) != fingerprint(Configuration("a", engines=tiny_engines("llama-v1")))
