"""``trtllm-dflash serve``."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trtllm_dflash.cli.option_checks import given, refuse_given
from trtllm_dflash.cli.progress_lines import progress_lines

if TYPE_CHECKING:
    from trtllm_dflash.serving.front_end import FrontEnd
    from trtllm_dflash.serving.tritonserver import ServerHandle

_PORT = click.IntRange(0, 65535)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_log = logging.getLogger("trtllm_dflash.serve")


@click.command()
@click.option(
    "-m",
    "--model-repository",
    type=click.Path(path_type=Path),
    help="Model repository, written by `deploy`.",
)
@click.option("--http-port", default=8000, show_default=True, type=_PORT, help="0 picks a free port.")
@click.option("--grpc-port", default=8001, show_default=True, type=_PORT, help="0 picks a free port.")
@click.option("--metrics-port", default=8002, show_default=True, type=_PORT, help="0 picks a free port.")
@click.option("--health-port", default=8003, show_default=True, type=_PORT, help="GET /health; 0 picks a free port.")
@click.option("--openai-port", type=_PORT, help="Also serve OpenAI's API on this port; 0 picks a free one.")
@click.option(
    "--triton-url",
    "triton_urls",
    multiple=True,
    help="http://host:port of a Triton server elsewhere that the front end uses too (or only, without -m); repeatable.",
)
@click.option(
    "--triton-model", default="dflash", show_default=True, help="The model's name at --triton-url, without -m."
)
@click.option("--served-model-name", "served_names", multiple=True, help="Names OpenAI clients ask for; repeatable.")
@click.option(
    "--api-key",
    envvar="TRTLLM_DFLASH_API_KEY",
    help="Keys that OpenAI clients must send, comma-separated; better in TRTLLM_DFLASH_API_KEY. Default: none asked.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address Triton listens on.")
@click.option("--openai-host", default="127.0.0.1", show_default=True, help="Address the front end listens on.")
@click.option(
    "--drain-timeout",
    "drain_timeout_s",
    default=30.0,
    show_default=True,
    type=click.FloatRange(min=0.0),
    help="Seconds that running requests may go on after SIGTERM.",
)
@click.option("--log-file", type=click.Path(path_type=Path), help="File for all output; default: stderr.")
@click.option("--log-format", default="text", show_default=True, type=click.Choice(["text", "json"]))
@click.option("--json", "as_json", is_flag=True, help="Print the startup facts as one JSON document.")
def serve(
    model_repository: Path | None,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    health_port: int,
    openai_port: int | None,
    triton_urls: tuple[str, ...],
    triton_model: str,
    served_names: tuple[str, ...],
    api_key: str | None,
    host: str,
    openai_host: str,
    drain_timeout_s: float,
    log_file: Path | None,
    log_format: str,
    as_json: bool,
) -> None:
    """Run Triton Inference Server on a model repository, and the OpenAI front end, and keep them running.

    Ctrl-C stops at once; SIGTERM lets running requests finish first (a second signal does not wait).

    \b
    Example:
      trtllm-dflash serve -m triton_models --openai-port 9000
      trtllm-dflash serve --openai-port 9000 --triton-url http://10.0.0.5:8000 --triton-url http://10.0.0.6:8000
    """
    from trtllm_dflash.serving.log_format import LOG_FORMAT_VARIABLE, configure_logging
    from trtllm_dflash.serving.server_url import split_url

    if model_repository is None and not triton_urls:
        raise click.UsageError("give -m/--model-repository, or --triton-url with --openai-port")
    if openai_port is None and (triton_urls or served_names or (api_key and model_repository is None)):
        raise click.UsageError("--triton-url and --served-model-name need --openai-port")
    _refuse_without_effect(model_repository is not None, openai_port is not None)
    for url in triton_urls:
        split_url(url)
    configure_logging(sys.stderr if log_file is None else log_file.open("a"), log_format)
    os.environ[LOG_FORMAT_VARIABLE] = log_format  # for the engine process, which Triton starts
    if api_key:
        os.environ.pop("TRTLLM_DFLASH_API_KEY", None)  # only the front end needs it, not Triton and the engine
    ports = [http_port, grpc_port, metrics_port, health_port]
    if openai_port is not None:
        openai_port, *ports = _chosen_ports(openai_host, openai_port, host, ports)
    stop = _StopSignals()
    _warn_of_open_doors(host, openai_host, openai_port, api_key, model_repository is not None)
    if api_key and openai_port is None and not given("api_key"):
        click.echo(
            "warning: TRTLLM_DFLASH_API_KEY guards the OpenAI front end, which is not started without --openai-port; "
            "Triton's own ports ask for no key",
            err=True,
        )
    begin = time.monotonic()
    failure = None
    try:
        with contextlib.ExitStack() as running:
            server = front_end = None
            facts: dict[str, object] = {}
            if model_repository is not None:
                server = _start_triton(running, model_repository, ports, host, log_file, facts)
            if openai_port is not None:
                front_end = _start_front_end(
                    running,
                    [*([server.http_url] if server else []), *triton_urls],
                    model=server.model_name if server else triton_model,
                    served_names=served_names,
                    host=openai_host,
                    port=openai_port,
                    api_key=api_key,
                    drain_timeout_s=drain_timeout_s,
                    log_format=log_format,
                    log_file=log_file,
                )
                facts["openai"] = f"{front_end.url}/v1"
                _warn_of_replicas(triton_urls, server.model_name if server else triton_model)
                if server is not None:
                    server.also_ready = front_end.problem
            facts["startup_s"] = round(time.monotonic() - begin, 1)
            _announce(facts, server, front_end, as_json)
            failure = _wait(server, front_end, stop)
            if failure is None and stop.signum == signal.SIGTERM:
                _drain(server, front_end, drain_timeout_s)
    except KeyboardInterrupt:
        pass
    if failure is not None:
        raise failure
    click.echo("stopped", err=True)


class _StopSignals:
    """SIGINT and SIGTERM: an interrupt while starting or draining, a note while serving."""

    def __init__(self) -> None:
        self.serving = False
        self.signum: int | None = None
        # SIGINT too: a shell starts background jobs with SIGINT ignored, and Python then leaves it so.
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._handle)

    def _handle(self, signum: int, frame: object) -> None:
        if self.serving and self.signum is None:
            self.signum = signum
            return
        raise KeyboardInterrupt


def _chosen_ports(openai_host: str, openai_port: int, host: str, triton_ports: list[int]) -> list[int]:
    """The front end's port, known to be free before an engine is loaded for minutes, and Triton's: chosen together,
    since what is free twice may be the same port."""
    from trtllm_dflash.errors import ConfigError
    from trtllm_dflash.serving.triton_install import check_ports, free_addresses

    if openai_port and openai_port in triton_ports:
        raise ConfigError(
            f"openai port is {openai_port}, the same as one of Triton's", hint="choose another --openai-port"
        )
    ports = free_addresses([(openai_host, openai_port), *((host, port) for port in triton_ports)])
    check_ports({"openai": (openai_host, ports[0])})
    return ports


def _start_triton(
    running: contextlib.ExitStack,
    repository: Path,
    ports: Sequence[int],
    host: str,
    log_file: Path | None,
    facts: dict[str, object],
) -> ServerHandle:
    from trtllm_dflash.serving.repository import repository_runs
    from trtllm_dflash.serving.tritonserver import triton_server

    line = repository_runs(repository).startup_line()
    click.echo(line, err=True)
    # Lines on a terminal too: without --log-file Triton writes to the same stderr, and would break up a spinner.
    with progress_lines("tritonserver is starting and the engine is loading"):
        server = running.enter_context(
            triton_server(
                repository,
                http_port=ports[0],
                grpc_port=ports[1],
                metrics_port=ports[2],
                health_port=ports[3],
                host=host,
                log=log_file,
            )
        )
    facts |= {
        "model": server.model_name,
        "runs": line,
        "http": server.http_url,
        "grpc": server.grpc_url,
        "metrics": server.metrics_url,
        "health": server.health_url,
    }
    return server


def _start_front_end(
    running: contextlib.ExitStack,
    urls: list[str],
    *,
    model: str,
    served_names: tuple[str, ...],
    host: str,
    port: int,
    api_key: str | None,
    drain_timeout_s: float,
    log_format: str,
    log_file: Path | None,
) -> FrontEnd:
    from trtllm_dflash.serving.front_end import FrontEnd

    front_end = FrontEnd(
        urls,
        triton_model=model,
        served_names=served_names or (model,),
        host=host,
        port=port,
        api_key=api_key,
        drain_timeout_s=drain_timeout_s,
        log_format=log_format,
        log=log_file,
    )
    running.callback(front_end.stop)
    front_end.start()
    return front_end


def _warn_of_replicas(triton_urls: tuple[str, ...], model: str) -> None:
    """They may come later, so the front end starts all the same; but whoever mistyped one should not search for it."""
    from trtllm_dflash.serving.front_end import replica_problems

    for problem in replica_problems(triton_urls, model):
        click.echo(f"warning: {problem.message}; it gets no requests until it is ready", err=True)
        if problem.hint:
            click.echo(f"hint: {problem.hint}", err=True)


def _announce(facts: dict[str, object], server: ServerHandle | None, front_end: FrontEnd | None, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(facts))
    else:
        places = {"http": "HTTP", "grpc": "gRPC", "metrics": "metrics", "health": "health", "openai": "OpenAI"}
        where = ", ".join(f"{word} {facts[name]}" for name, word in places.items() if name in facts)
        click.echo(f"serving {facts.get('model', 'OpenAI')} after {facts['startup_s']} s: {where}")
        if server is not None:
            click.echo(
                f"try: curl -N {server.http_url}/v2/models/{server.model_name}/generate_stream "
                '-d \'{"text_input": "Once upon a time", "max_tokens": 32, "stream": true}\''
            )
        if front_end is not None:
            click.echo(f"OpenAI clients: base_url {front_end.url}/v1, metrics {front_end.url}/metrics")
    sys.stdout.flush()


def _wait(server: ServerHandle | None, front_end: FrontEnd | None, stop: _StopSignals) -> Exception | None:
    """Block until a signal or a failure; returns the failure."""
    stop.serving = True
    while stop.signum is None:
        if server is not None and server.wait(timeout_s=0.0):
            return server.failure
        if front_end is not None and front_end.failure is not None:
            return front_end.failure
        time.sleep(0.2)
    return None


def _drain(server: ServerHandle | None, front_end: FrontEnd | None, timeout_s: float) -> None:
    """The front end first: its streams need Triton until their end. Both share the deadline."""
    deadline = time.monotonic() + timeout_s
    click.echo(f"draining, at most {timeout_s:g} s", err=True)
    if front_end is not None:
        front_end.drain()
    if server is not None:
        server.drain(max(deadline - time.monotonic(), 0.0))


def _refuse_without_effect(has_triton: bool, has_front_end: bool) -> None:
    if has_triton:
        refuse_given(
            ("triton_model",), "with -m: every --triton-url must serve the model of that repository by its name"
        )
    else:
        refuse_given(
            ("http_port", "grpc_port", "metrics_port", "health_port", "host"),
            "without -m/--model-repository: no Triton server is started here",
        )
    if not has_front_end:
        refuse_given(
            ("openai_host", "api_key"),
            "without --openai-port: no front end is started, and Triton's ports ask for no key",
        )


def _warn_of_open_doors(
    host: str, openai_host: str, openai_port: int | None, api_key: str | None, has_triton: bool
) -> None:
    if has_triton and host not in _LOOPBACK:
        click.echo(
            f"warning: listening on {host}: Triton's HTTP endpoint has no authentication, and a JSON body over 4 MB "
            "can end the bundled server; let clients use the front end (--openai-port) instead",
            err=True,
        )
    if openai_port is not None and openai_host not in _LOOPBACK and not api_key:
        click.echo(
            f"warning: the front end listens on {openai_host} without an API key; set TRTLLM_DFLASH_API_KEY", err=True
        )
