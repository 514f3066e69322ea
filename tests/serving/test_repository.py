"""``deploy``: what the repository holds, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from trtllm_dflash.cli.deploy_cmd import deploy as deploy_command
from trtllm_dflash.errors import CheckpointError, ConfigError, EngineError
from trtllm_dflash.serving import wire
from trtllm_dflash.serving.engine_facts import check_fingerprint
from trtllm_dflash.serving.repository import deploy, fill, repository_facts, repository_model


def test_repository_is_complete(engine_directory: Path, tmp_path: Path) -> None:
    report = deploy(engine_directory, tmp_path / "repository", model_name="llm", max_queue=3)
    config = (tmp_path / "repository" / "llm" / "config.pbtxt").read_text()
    assert "@@" not in config
    assert 'name: "llm"' in config
    assert 'key: "max_queue" value { string_value: "3" }' in config
    copied = (tmp_path / "repository" / "llm" / "1" / "wire.py").read_text()
    assert copied == Path(wire.__file__).read_text()
    assert repository_model(tmp_path / "repository") == "llm"
    assert report.facts.limits.max_seq_len == 2048


def test_inspection_notices_changes(engine_directory: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    deploy(engine_directory, repository)
    assert repository_facts(repository)["hashes"] == "verified"
    model = repository / "dflash" / "1" / "model.py"
    model.write_text(model.read_text() + "#")
    with pytest.raises(CheckpointError, match=r"model\.py"):
        repository_facts(repository)
    with pytest.raises(ConfigError, match="expected a model repository"):
        repository_facts(tmp_path)


def test_speculation_without_a_drafter_is_refused(engine_directory: Path, tmp_path: Path) -> None:
    """Before a server is started that would decode plainly, or not start."""
    with pytest.raises(ConfigError, match=r"speculation is on, but .* has no drafter"):
        deploy(engine_directory, tmp_path / "repository", speculation="on")
    with pytest.raises(ConfigError, match="block size is 4, expected 1 to 1"):
        deploy(engine_directory, tmp_path / "repository", block_size=4)
    assert not (tmp_path / "repository").exists()


def test_existing_directories_are_respected(engine_directory: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError):
        deploy(engine_directory, foreign, force=True)
    assert (foreign / "thesis.txt").read_text() == "mine"
    deploy(engine_directory, tmp_path / "repository")
    with pytest.raises(CheckpointError, match="exists"):
        deploy(engine_directory, tmp_path / "repository")
    deploy(engine_directory, tmp_path / "repository", model_name="other", force=True)
    assert repository_model(tmp_path / "repository") == "other"


@pytest.mark.parametrize("name", ["", "a/b", "../x", 'a"b', "x" * 65])
def test_bad_model_names_are_refused(name: str, engine_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model name"):
        deploy(engine_directory, tmp_path / "repository", model_name=name)
    assert not (tmp_path / "repository").exists()


def test_not_an_engine_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="engine directory"):
        deploy(tmp_path, tmp_path / "repository")


def test_an_engine_of_several_ranks_is_not_deployed(engine_directory: Path, tmp_path: Path) -> None:
    """The engine process would refuse it, but only when somebody wants to serve."""
    file = engine_directory / "config.json"
    file.write_text(file.read_text().replace('"tp_size": 1', '"tp_size": 2'))
    with pytest.raises(ConfigError, match="built for 2 ranks; this version runs engines of one rank"):
        deploy(engine_directory, tmp_path / "repository")
    assert not (tmp_path / "repository").exists()


def test_a_rebuilt_engine_is_noticed(engine_directory: Path, tmp_path: Path) -> None:
    recorded = deploy(engine_directory, tmp_path / "repository").facts.config_sha256
    check_fingerprint(engine_directory, recorded)
    config = engine_directory / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(EngineError, match="SHA-256"):
        check_fingerprint(engine_directory, recorded)


def test_placeholder_without_a_value_is_an_error() -> None:
    assert fill("a @@b@@ c", {"b": "x"}) == "a x c"
    with pytest.raises(ConfigError, match="@@d@@"):
        fill("@@d@@", {"b": "x"})


def test_command_prints_the_limits(engine_directory: Path, tmp_path: Path) -> None:
    arguments = ["-e", str(engine_directory), "-o", str(tmp_path / "repository"), "--max-queue", "5", "--json"]
    result = CliRunner().invoke(deploy_command, arguments)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["limits"]["max_batch_size"] == 16
    assert facts["max_queue"] == 5
