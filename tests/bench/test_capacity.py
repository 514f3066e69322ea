"""Loads beyond slots, queue and sequences are measured and remarked on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from served_doubles import served
from sweep_documents import document, result, run

from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.bench.capacity import capacity_of, queueing_warning
from trtllm_dflash.bench.configuration import Configuration, open_configuration
from trtllm_dflash.bench.load import Load
from trtllm_dflash.bench.run import run_point
from trtllm_dflash.bench.workload import make_workload
from trtllm_dflash.cli.main import main
from trtllm_dflash.errors import ConfigError


def test_a_load_within_the_slots_is_not_remarked_on() -> None:
    assert queueing_warning({"max_batch_size": 8}, [1, 8]) is None
    assert queueing_warning({}, [1000]) is None


def test_what_is_beyond_the_slots_waits_and_beyond_the_queue_is_refused() -> None:
    text = queueing_warning({"max_batch_size": 8, "max_queue": 20}, [4, 28, 16])
    assert text is not None
    assert text.startswith("concurrency 16, 28 is more than the engine's 8 slots (max_batch_size): 8 requests run")
    assert "refused" not in text
    refused = queueing_warning({"max_batch_size": 8, "max_queue": 20}, [29])
    assert refused is not None
    assert refused.endswith("beyond 28 requests are refused (max_queue 20)")


def test_results_json_says_what_was_beyond_an_engine() -> None:
    cut = result(10, 10) | {"cut_short": 3}
    runs = [run("plain", 64, 0, result(10, 10), prompts_left_out=2), run("fast", 128, 0, cut, prompts_left_out=2)]
    warnings = [text for text in document(runs)["warnings"] if text.startswith(("plain", "fast"))]
    assert [text.split(":")[0] for text in warnings] == ["plain, fast", "fast", "fast"]
    left_out, queue, short = warnings
    assert "concurrency 128 is more than the engine's 64 slots" in queue
    assert "2 prompts are left out" in left_out
    assert "3 of 8 outputs were cut short of --max-tokens" in short


def test_runs_of_an_older_journal_have_no_such_count() -> None:
    assert not any("cut short" in text for text in document([run("fast", 1, 0, result(10, 10))])["warnings"])


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"the an {letter} in"}) + "\n" for letter in "abcdef"))
    return path


def test_bench_warns_before_and_in_its_document(
    tiny_engines: Callable[..., Path], dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = tiny_engines("llama-v2", max_batch_size=2)
    words = ["bench", "-e", engines, "--dataset", dataset, "--device", "cpu", "--num-prompts", 4, "--max-tokens", 8]
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in (*words, "--concurrency", 3, "--no-stages", "--json")])
    printed = capsys.readouterr()
    assert ended.value.code == 0
    (warning,) = json.loads(printed.out)["warnings"]
    assert "concurrency 3 is more than the engine's 2 slots" in warning
    assert printed.err.count(f"warning: {warning}") == 1


def test_sweep_warns_before_and_in_its_results(
    tiny_engines: Callable[..., Path], dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    engines, output = tiny_engines("llama-v2", max_batch_size=2), tmp_path / "out"
    words = [
        "sweep",
        "-e",
        engines,
        "--configs",
        "auto",
        "--dataset",
        dataset,
        "--device",
        "cpu",
        "--concurrency",
        "1,3",
    ]
    words += ["--repeats", 1, "--requests-per-user", 1, "--min-requests", 2, "--max-tokens", 8, "-o", output, "--json"]
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code == 0
    assert "warning: auto: concurrency 3 is more than the engine's 2 slots" in capsys.readouterr().err
    warnings = json.loads((output / "results.json").read_text())["warnings"]
    assert any(text.startswith("auto: concurrency 3 is more than the engine's 2 slots") for text in warnings)


def test_outputs_that_a_server_cut_are_counted(
    tiny_engines: Callable[..., Path], tiny_llms: Callable[..., LLM], dataset: Path
) -> None:
    """In this process prompts that do not fit beside --max-tokens are left out; a server's limit is its own."""
    workload = make_workload(dataset, SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True))
    with served(tiny_llms("llama-v2"), "triton") as url:
        configuration = Configuration("triton", url=url, tokenizer=tiny_engines("llama-v2"))
        opened = open_configuration(configuration, workload, device="cpu")
        measured = run_point(opened, workload, Load(2, None, 4))
    assert (measured.requests, measured.cut_short, measured.errors) == (4, 4, 0)


def test_slots_and_queue_are_asked_of_a_triton_model(tiny_llms: Callable[..., LLM]) -> None:
    with served(tiny_llms("llama-v2"), "triton") as url:
        assert capacity_of(url, "dflash") == {"max_batch_size": 16, "max_queue": 256}
        assert capacity_of(url, "another") == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "http://x", "block_size": 4}, "block_size has no effect on a url"),
        ({"url": "http://x", "prefix_cache": True}, "prefix_cache has no effect on a url"),
        ({"engines": Path("e"), "api": "triton"}, "api has no effect on an engine directory"),
        ({"engines": Path("e"), "speculation": "off", "block_size": 4}, "plain decoding has no blocks"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Configuration("a", **settings)
