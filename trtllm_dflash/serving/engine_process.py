"""The engine process: ``python -m trtllm_dflash.serving.engine_process --engines DIR --fd N``.

It is started by the proxy model inside Triton (``triton_server_repo/dflash/1/engine_link.py``) with one end of a Unix
socket pair, loads the engine directory, says ``Ready`` and serves until that socket closes. The socket is the leash:
when the proxy goes away for any reason, the kernel closes its end and this process exits, even while a network runs.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path

import click

from trtllm_dflash.config.sampling import SpeculationMode
from trtllm_dflash.errors import DFlashError
from trtllm_dflash.runtime.llm import LLM
from trtllm_dflash.serving import wire
from trtllm_dflash.serving.chat_prompt import ChatTemplate
from trtllm_dflash.serving.engine_facts import check_fingerprint, read_engine_facts
from trtllm_dflash.serving.engine_server import EngineServer
from trtllm_dflash.serving.log_format import LOG_FORMAT_VARIABLE, configure_logging
from trtllm_dflash.serving.log_prob_details import TokenBytes
from trtllm_dflash.serving.process_lifetime import Leash, exit_on_thread_failure, exit_with_the_proxy

_log = logging.getLogger("trtllm_dflash.engine_process")


@click.command()
@click.option("--engines", type=click.Path(path_type=Path), required=True)
@click.option("--config-sha256", default=None, help="SHA-256 of the directory's config.json, as deploy recorded it.")
@click.option("--device", default=None, help="As LLM's device; default: the engine's own choice.")
@click.option("--fd", type=int, required=True, help="File descriptor of the connected socket.")
@click.option("--prefix-cache/--no-prefix-cache", default=True, help="As LLM's prefix_cache.")
@click.option("--speculation", type=click.Choice(["auto", "on", "off"]), default="auto", help="As LLM's speculation.")
@click.option("--block-size", type=int, default=None, help="As LLM's block_size.")
@click.option("--max-running", type=int, default=None, help="As LLM's max_running.")
@click.option("--kv-cache-tokens", type=int, default=None, help="As LLM's kv_cache_tokens.")
@click.option("--max-queue", type=int, default=None, help="As LLM's max_queue.")
@click.option("--max-tokens-in-flight", type=int, default=None, help="As LLM's max_tokens_in_flight.")
@click.option("--drain-s", type=float, default=30.0, help="After SIGTERM, seconds for the requests in flight.")
def main(
    engines: Path,
    config_sha256: str | None,
    device: str | None,
    fd: int,
    prefix_cache: bool,
    speculation: SpeculationMode,
    block_size: int | None,
    max_running: int | None,
    kv_cache_tokens: int | None,
    max_queue: int | None,
    max_tokens_in_flight: int | None,
    drain_s: float,
) -> None:
    """Serve one engine directory over an inherited socket."""
    configure_logging(sys.stderr, os.environ.get(LOG_FORMAT_VARIABLE, "text"))
    # The terminal's Ctrl-C is for the server, which then closes the socket in its own order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stream = socket.socket(fileno=fd)
    connection = Leash(stream)
    exit_with_the_proxy(stream)
    exit_on_thread_failure()
    try:
        if config_sha256:
            check_fingerprint(engines, config_sha256)
        facts = read_engine_facts(engines)
        chat = ChatTemplate(engines / "tokenizer")
        engine = LLM(
            engines,
            device=device,
            prefix_cache=prefix_cache,
            speculation=speculation,
            block_size=block_size,
            max_running=max_running,
            kv_cache_tokens=kv_cache_tokens,
            max_queue=max_queue,
            max_tokens_in_flight=max_tokens_in_flight,
        )
    except Exception as error:
        _log.exception("the engine in %s could not be loaded", engines)
        hint = getattr(error, "hint", None)
        text = f"{error} (hint: {hint})" if hint else str(error) or type(error).__name__
        # Not closed here: the watcher of the proxy would take that for the proxy's end, and exit with 0.
        connection.send(wire.LoadFailed(text, permanent=isinstance(error, DFlashError)))
        raise SystemExit(1) from error
    # What is loaded now stays as long as the process: the collector need not walk through it, which takes as long as
    # several cycles.
    gc.collect()
    gc.freeze()
    facts = facts.with_choices(block_size=engine.block_size, max_running=max_running)
    _log.info("serving %s, process %d", engines, os.getpid())
    _log.info("%s", facts.startup_line())
    server = EngineServer(
        engine,
        connection,
        # What clients are told is what a request really may have.
        limits=replace(facts.limits, max_seq_len=engine.max_request_tokens),
        eos_token_ids=facts.eos_token_ids,
        vocab_size=facts.vocab_size,
        render_chat=chat.encode,
        token_bytes=TokenBytes(chat.tokenizer),
        info=facts.runs,
        speculates=engine.block_size > 1,
    )
    drained: list[threading.Thread] = []

    def drain(*_: object) -> None:
        if not drained:
            drained.append(threading.Thread(target=server.drain, args=(drain_s,), name="drain"))
            drained[0].start()

    signal.signal(signal.SIGTERM, drain)
    server.run()
    for thread in drained:
        thread.join()
    engine.close()


if __name__ == "__main__":
    main()
