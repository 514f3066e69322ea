"""``trtllm-dflash serve``."""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from pathlib import Path

import click

_PORT = click.IntRange(0, 65535)


@click.command()
@click.option(
    "-m",
    "--model-repository",
    required=True,
    type=click.Path(path_type=Path),
    help="Model repository, written by `deploy`.",
)
@click.option("--http-port", default=8000, show_default=True, type=_PORT, help="0 picks a free port.")
@click.option("--grpc-port", default=8001, show_default=True, type=_PORT, help="0 picks a free port.")
@click.option("--metrics-port", default=8002, show_default=True, type=_PORT, help="0 picks a free port.")
@click.option("--health-port", default=8003, show_default=True, type=_PORT, help="The supervisor's GET /health.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--log-file", type=click.Path(path_type=Path), help="File for all output; default: stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print the startup facts as one JSON document.")
def serve(
    model_repository: Path,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    health_port: int,
    host: str,
    log_file: Path | None,
    as_json: bool,
) -> None:
    """Run Triton Inference Server on a model repository, and keep it running. Ctrl-C stops it.

    \b
    Example:
      trtllm-dflash serve -m triton_models --http-port 8000
    """
    from trtllm_dflash.serving.tritonserver import triton_server

    logging.basicConfig(
        stream=sys.stderr if log_file is None else log_file.open("a"),
        level=logging.INFO,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
    )
    # SIGINT too: a shell starts background jobs with SIGINT ignored, and Python then leaves it so.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _interrupt)
    if host not in ("127.0.0.1", "localhost", "::1"):
        click.echo(
            f"warning: listening on {host}: Triton's HTTP endpoint has no authentication, and a JSON body over 4 MB "
            "can end the bundled server; put a gateway with a body limit in front",
            err=True,
        )
    begin = time.monotonic()
    try:
        with triton_server(
            model_repository,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            health_port=health_port,
            host=host,
            log=log_file,
        ) as server:
            facts = {
                "model": server.model_name,
                "http": server.http_url,
                "grpc": server.grpc_url,
                "metrics": server.metrics_url,
                "health": server.health_url,
                "startup_s": round(time.monotonic() - begin, 1),
            }
            if as_json:
                click.echo(json.dumps(facts))
            else:
                click.echo(
                    f"serving {facts['model']} after {facts['startup_s']} s: HTTP {facts['http']}, "
                    f"gRPC {facts['grpc']}, metrics {facts['metrics']}, health {facts['health']}"
                )
                click.echo(
                    f"try: curl -N {server.http_url}/v2/models/{server.model_name}/generate_stream "
                    '-d \'{"text_input": "Once upon a time", "max_tokens": 32, "stream": true}\''
                )
            sys.stdout.flush()
            while not server.wait(timeout_s=1.0):
                pass
            failure = server.failure
    except KeyboardInterrupt:
        click.echo("stopped", err=True)
        return
    if failure is not None:
        raise failure


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt
