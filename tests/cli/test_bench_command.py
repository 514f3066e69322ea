"""``bench``, ``sweep``, ``sweep compare`` and ``selfcheck`` from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtllm_dflash.cli.main import main


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"the an {letter} in"}) + "\n" for letter in "abcdefgh"))
    return path


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """``run(*words)``: exit code, stdout, stderr."""

    def command(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        printed = capsys.readouterr()
        return int(str(ended.value.code or 0)), printed.out, printed.err

    return command


def _bench(engines: Path, dataset: Path, *more: object) -> tuple[object, ...]:
    base = ("bench", "-e", engines, "--dataset", dataset, "--device", "cpu", "--num-prompts", 4, "--max-tokens", 12)
    return (*base, *more)


def test_bench_prints_one_document(tiny_engines: Callable[..., Path], dataset: Path, run: Run) -> None:
    code, out, _ = run(*_bench(tiny_engines("llama-v2"), dataset, "--concurrency", 2, "--json"))
    document = json.loads(out)
    assert code == 0
    assert document["result"]["requests"] == 4
    assert document["result"]["acceptance"]["acceptance_length"] >= 1
    assert document["load"] == {"concurrency": 2, "request_rate": None, "warm_up": 2}
    assert document["workload"]["dataset"] == "prompts.jsonl"
    assert "verify" in document["stage_s"]


def test_bench_says_that_acceptance_was_forced(tiny_engines: Callable[..., Path], dataset: Path, run: Run) -> None:
    code, out, _ = run(*_bench(tiny_engines("llama-v2"), dataset, "--force-acceptance-length", 2, "--no-stages"))
    assert code == 0
    assert "ACCEPTANCE FORCED to 2.0" in out
    assert "tok/s per user" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give --engines or --url"),
        (("--url", "http://127.0.0.1:9", "--speculation"), "the server's business"),
        (("--url", "http://127.0.0.1:9"), "nothing answers"),
        (("--url", "127.0.0.1"), "expected http://host:port"),
    ],
)
def test_bench_refuses_what_it_cannot_do(dataset: Path, run: Run, words: tuple[str, ...], message: str) -> None:
    code, _, err = run("bench", "--dataset", dataset, *words)
    assert code == 2
    assert message in err


def test_bench_needs_prompts(tiny_engines: Callable[..., Path], run: Run) -> None:
    code, _, err = run("bench", "-e", tiny_engines("llama-v2"))
    assert code == 2
    assert "expected a data set or random prompts" in err


@pytest.fixture
def sweep_words(tiny_engines: Callable[..., Path], dataset: Path) -> Callable[[Path], list[object]]:
    pytest.importorskip("matplotlib")

    def words(output: Path) -> list[object]:
        return [
            "sweep", "-e", tiny_engines("llama-v2"), "--configs", "plain,dflash2", "--dataset", dataset,
            "--concurrency", "1,2,3", "--repeats", 1, "--requests-per-user", 1, "--min-requests", 2,
            "--max-tokens", 12, "--device", "cpu", "-o", output,
        ]  # fmt: skip

    return words


def test_sweep_measures_predicts_and_chooses(
    sweep_words: Callable[[Path], list[object]], tmp_path: Path, run: Run
) -> None:
    folder = tmp_path / "out"
    code, out, _ = run(*sweep_words(folder), "--predict", "al=2", "--target-tok-s-user", 0.001)
    assert code == 0
    assert "★" in out
    assert "predicted (not measured) DFlash 2: acceptance length 2" in out
    assert "best: " in out
    results = json.loads((folder / "results.json").read_text())
    assert len(results["points"]) == 6
    assert results["predictions"][0]["median_error"] is not None
    assert results["best"]["found"]
    assert json.loads((folder / "deployment.json").read_text())["config"] == results["best"]["config"]
    assert str(tmp_path) not in results["command"]
    # Again: nothing is measured, the same points are reported; and no point reaches an impossible target.
    before = (folder / "runs.jsonl").read_bytes()
    code, out, _ = run(*sweep_words(folder), "--target-tok-s-user", 1e12)
    assert code == 1
    assert "no measured point has at least 1e+12 tok/s per user" in out
    assert (folder / "runs.jsonl").read_bytes() == before


def test_sweep_compare_judges_repeats_only(
    sweep_words: Callable[[Path], list[object]], tmp_path: Path, run: Run
) -> None:
    folder = tmp_path / "out"
    assert run(*sweep_words(folder))[0] == 0
    code, out, _ = run("sweep", "compare", folder, folder, "--json")
    changes: list[dict[str, Any]] = json.loads(out)["changes"]
    assert code == 0
    assert {change["verdict"] for change in changes} == {"unknown"}
    code, out, _ = run("sweep", "compare", folder, folder)
    assert "cannot be judged" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-o", "x"), "nothing to measure"),
        (("--configs", "plain", "-o", "x"), "needs --engines"),
        (("--label", "a", "-o", "x"), "each names one"),
    ],
)
def test_sweep_refuses_what_it_cannot_do(run: Run, words: tuple[str, ...], message: str) -> None:
    code, _, err = run("sweep", *words)
    assert code == 2
    assert message in err


def test_sweep_needs_an_output_directory(tiny_engines: Callable[..., Path], dataset: Path, run: Run) -> None:
    code, _, err = run("sweep", "-e", tiny_engines("llama-v2"), "--dataset", dataset)
    assert code == 2
    assert "--output" in err


@pytest.mark.parametrize("command", [("bench",), ("sweep",), ("sweep", "compare"), ("selfcheck",)])
def test_help_has_an_example(run: Run, command: tuple[str, ...]) -> None:
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert f"trtllm-dflash {' '.join(command)}" in out
