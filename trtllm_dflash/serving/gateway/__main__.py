"""``python -m trtllm_dflash.serving.gateway --triton-url http://127.0.0.1:8000``: the front end as a process.

``trtllm-dflash serve --openai-port`` starts and supervises it; it can also be run by hand. SIGTERM drains: readiness
turns false, new requests get 503, running ones may finish within the deadline and are told with an error after it. A
second signal, SIGINT, or the end of the process that holds the leash, ends it at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType

import click
import uvicorn

from trtllm_dflash.serving.gateway.app import Gateway
from trtllm_dflash.serving.gateway.settings import API_KEY_VARIABLE, GatewaySettings, hash_keys
from trtllm_dflash.serving.log_format import LOG_FORMATS, configure_logging

# How long the clients of requests that the drain did not finish may take to read their error.
CUT_S = 1.0


@click.command()
@click.option("--triton-url", "triton_urls", multiple=True, required=True, help="http://host:port; one per replica.")
@click.option("--triton-model", default="dflash", show_default=True, help="The model's name in Triton.")
@click.option("--served-name", "served_names", multiple=True, help="Names clients may ask for; default: the model's.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=9000, show_default=True, type=click.IntRange(1, 65535))
@click.option("--max-body-bytes", default=1 << 20, show_default=True, type=click.IntRange(1024, 1 << 20))
@click.option("--drain-timeout", "drain_timeout_s", default=30.0, show_default=True, type=click.FloatRange(min=0.0))
@click.option("--log-format", default="text", show_default=True, type=click.Choice(LOG_FORMATS))
@click.option("--leash-fd", type=int, help="A pipe's end: when the other end closes, so does this process.")
def main(
    triton_urls: tuple[str, ...],
    triton_model: str,
    served_names: tuple[str, ...],
    host: str,
    port: int,
    max_body_bytes: int,
    drain_timeout_s: float,
    log_format: str,
    leash_fd: int | None,
) -> None:
    """Serve OpenAI's API in front of Triton servers."""
    configure_logging(sys.stderr, log_format)
    if leash_fd is not None:
        _end_with_the_holder(leash_fd)
    settings = GatewaySettings(
        triton_urls=triton_urls,
        triton_model=triton_model,
        served_names=served_names or (triton_model,),
        host=host,
        port=port,
        api_key_hashes=hash_keys(os.environ.get(API_KEY_VARIABLE, "")),
        max_body_bytes=max_body_bytes,
        drain_timeout_s=drain_timeout_s,
    )
    run(Gateway(settings))


def run(gateway: Gateway) -> None:
    """Serve until a signal ends it."""
    DrainingServer(server_config(gateway), gateway).run()


def server_config(gateway: Gateway) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        gateway.app,
        host=gateway.settings.host,
        port=gateway.settings.port,
        access_log=False,  # the application logs each request, with its id and outcome
        log_config=None,
        server_header=False,
        timeout_keep_alive=30,
        # After the drain and the errors of what was left then: clients that do not read even these.
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=64 << 10,
    )


class DrainingServer(uvicorn.Server):
    """uvicorn, except that SIGTERM lets running requests finish while new ones are answered with 503."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._drained_by = 0.0
        self._cut_by: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Runs in the signal handler: only notes what to do."""
        if sig != signal.SIGTERM or self._gateway.draining:
            self.should_exit = self.force_exit = True
            return
        self._drained_by = time.monotonic() + self._gateway.settings.drain_timeout_s
        self._gateway.draining = True

    async def on_tick(self, counter: int) -> bool:
        """uvicorn asks ten times a second whether to go on serving."""
        now = time.monotonic()
        if self._gateway.draining and self._cut_by is None and now > self._drained_by:
            self._gateway.cut()
            self._cut_by = now + CUT_S
        if self._gateway.draining and (self._gateway.in_flight == 0 or (self._cut_by or now) < now):
            self.should_exit = True
        return await super().on_tick(counter)


def _end_with_the_holder(leash_fd: int) -> None:
    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(leash_fd, 1):
                pass
        os._exit(0)

    threading.Thread(target=watch, name="leash", daemon=True).start()


if __name__ == "__main__":
    main()
