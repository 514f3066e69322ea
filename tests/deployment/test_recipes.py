"""The recipes in ``examples/deployment``, checked offline: schemas, options of our commands, names of our metrics."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from trtllm_dflash.cli.deploy_cmd import deploy
from trtllm_dflash.cli.serve_cmd import serve
from trtllm_dflash.serving.metric_definitions import HISTOGRAM_SUFFIXES, METRICS

yaml = pytest.importorskip("yaml", reason="pip install pyyaml")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "deployment"
KUBERNETES = sorted((RECIPES / "kubernetes").glob("*.yaml"))
VERSION = kubernetes_validate.latest_version()


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def check(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
def test_kubernetes_objects_fit_their_schemas(path: Path) -> None:
    for document in documents(path):
        if document["kind"] != "LeaderWorkerSet":
            check(document)
            continue
        # No schema of this custom resource is at hand: its own fields by hand, the pods in it by Kubernetes' schema.
        assert document["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
        assert set(document["spec"]) == {"replicas", "leaderWorkerTemplate"}
        template = document["spec"]["leaderWorkerTemplate"]
        assert set(template) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
        assert template["restartPolicy"] in ("None", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "Default")
        for role in ("leaderTemplate", "workerTemplate"):
            metadata = {"name": "x", **template[role]["metadata"]}
            check({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template[role]["spec"]})


def test_the_schema_check_can_fail() -> None:
    document = documents(RECIPES / "kubernetes" / "deployment.yaml")[0]
    document["spec"]["template"]["spec"]["containers"][0]["prots"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        check(document)


def containers() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(where, pod specification, container) of every pod in the recipes."""
    for path in KUBERNETES:
        for document in documents(path):
            if document["kind"] == "Deployment":
                pods = [document["spec"]["template"]["spec"]]
            elif document["kind"] == "LeaderWorkerSet":
                template = document["spec"]["leaderWorkerTemplate"]
                pods = [template["leaderTemplate"]["spec"], template["workerTemplate"]["spec"]]
            else:
                continue
            for pod in pods:
                for container in pod["containers"]:
                    yield path.name, pod, container


def accepts(command: click.Command, arguments: list[str]) -> click.Context:
    return command.make_context(command.name, list(arguments))


def test_containers_start_serve_with_options_that_it_has() -> None:
    found = 0
    for where, pod, container in containers():
        arguments = container["args"]
        if container.get("command"):  # a shell script that ends in serve-engines
            line = next(line for line in arguments[0].splitlines() if "exec serve-engines" in line)
            arguments = shlex.split(line.split("serve-engines", 1)[1].replace("$urls", "--triton-url http://x:8000"))
        parsed = accepts(serve, ["-m", "x", "--openai-port", "9000", *arguments]).params
        grace = pod["terminationGracePeriodSeconds"]
        # preStop, the drain, and the stop of Triton must fit.
        assert parsed["drain_timeout_s"] + 5 + 15 <= grace, where
        found += 1
    assert found == 3
    compose = yaml.safe_load((RECIPES / "docker-compose.yml").read_text())["services"]["dflash"]
    parsed = accepts(serve, ["-m", "x", *compose["command"]]).params
    assert parsed["drain_timeout_s"] < int(compose["stop_grace_period"].removesuffix("s"))


def test_the_entry_script_uses_options_that_exist() -> None:
    script = (RECIPES / "serve-engines.sh").read_text().replace("\\\n", " ")
    lines = [line.strip().removeprefix("exec ") for line in script.splitlines() if "trtllm-dflash " in line]
    commands = [shlex.split(line) for line in lines if not line.startswith("#")]
    assert [words[1] for words in commands] == ["deploy", "serve"]
    number = {"${MAX_QUEUE:-256}": "256"}
    for words, command in zip(commands, (deploy, serve), strict=True):
        accepts(command, [number.get(word, word) for word in words[2:] if word != "$@"])


def test_nothing_runs_as_root_or_listens_openly_by_accident() -> None:
    dockerfile = (RECIPES / "Dockerfile").read_text()
    assert re.search(r"^USER 10001$", dockerfile, re.MULTILINE)
    for _, pod, container in containers():
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
    for service in yaml.safe_load((RECIPES / "docker-compose.yml").read_text())["services"].values():
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", []))
    assert "--host" not in (RECIPES / "serve-engines.sh").read_text().replace("--openai-host", "")


def test_files_that_the_recipes_name_exist() -> None:
    copied = re.findall(r"^COPY (?:--\S+ )*(.+)$", (RECIPES / "Dockerfile").read_text(), re.MULTILINE)
    sources = [source for line in copied for source in line.split()[:-1]]
    assert len(sources) >= 6
    assert [source for source in sources if not (ROOT / source).exists()] == []
    compose = yaml.safe_load((RECIPES / "docker-compose.yml").read_text())
    for service in compose["services"].values():
        for volume in service["volumes"]:
            if volume.startswith("./"):
                assert (RECIPES / volume.split(":")[0]).is_file()
    build = compose["services"]["dflash"]["build"]
    assert (RECIPES / build["context"] / build["dockerfile"]).is_file()


def served_names() -> set[str]:
    """Every sample name of the front end's endpoint."""
    pytest.importorskip("prometheus_client", reason="pip install 'trtllm-dflash[openai]'")
    from trtllm_dflash.serving.gateway.gateway_metrics import GatewayMetrics

    metrics = GatewayMetrics([])
    metrics.requests.labels(path="x", status="200").inc()
    names = {line.split("{")[0].split()[0] for line in metrics.text().decode().splitlines() if not line.startswith("#")}
    for name, metric in METRICS.items():
        names |= {f"{name}{suffix}" for suffix in HISTOGRAM_SUFFIXES} if metric.buckets else {name}
    return names


def expressions() -> list[str]:
    dashboard = json.loads((RECIPES / "monitoring" / "dashboard.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    found += [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    for group in yaml.safe_load((RECIPES / "monitoring" / "alerts.yml").read_text())["groups"]:
        found += [rule["expr"] for rule in group["rules"]]
    hpa = documents(RECIPES / "kubernetes" / "hpa.yaml")[0]
    return found + [metric["pods"]["metric"]["name"] for metric in hpa["spec"]["metrics"]]


def test_every_metric_that_is_asked_for_is_served() -> None:
    names = served_names()
    asked = {name for text in expressions() for name in re.findall(r"\b(?:dflash|nv)_[a-z_]+", text)}
    assert len(asked) >= 15
    assert asked - names == set()


def test_histograms_are_asked_by_bucket_and_counters_by_rate() -> None:
    for text in expressions():
        for name in re.findall(r"histogram_quantile\([^)]*?(dflash_[a-z_]+)", text):
            assert name.endswith("_bucket"), text
        if "restarts" not in text:
            for name in re.findall(r"dflash_[a-z_]+_total", text):
                assert re.search(rf"rate\({name}[^)]*\[", text), text


def test_dashboard_fits_its_grid() -> None:
    panels = json.loads((RECIPES / "monitoring" / "dashboard.json").read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)
