"""When an engine process ends: with its proxy, and with any of its own threads."""

from __future__ import annotations

import logging
import os
import socket
import threading

from trtllm_dflash.serving import wire

_log = logging.getLogger(__name__)


class Leash(wire.Connection):
    """A connection whose end is the end of the process, whatever the engine thread is doing."""

    def receive(self) -> wire.Message | None:
        message = super().receive()
        if message is None:
            # Not sys.exit: a hung kernel or a thread in native code must not keep the device busy.
            os._exit(0)
        return message


def exit_with_the_proxy(stream: socket.socket) -> None:
    """Watch the socket while the engine loads, when nobody reads from it yet."""

    def watch() -> None:
        try:
            if not stream.recv(1, socket.MSG_PEEK):
                os._exit(0)
        except OSError:
            os._exit(0)

    threading.Thread(target=watch, name="leash", daemon=True).start()


def exit_on_thread_failure() -> None:
    """End the process when any thread ends by an exception: the proxy then fails its requests and starts a new engine.

    A process without its engine thread would look alive and answer nothing.
    """

    def fail(arguments: threading.ExceptHookArgs) -> None:
        name = arguments.thread.name if arguments.thread else "a thread"
        error = arguments.exc_value or arguments.exc_type()
        _log.critical("%s ended by an exception, so this process ends", name, exc_info=error)
        logging.shutdown()
        os._exit(1)

    threading.excepthook = fail
