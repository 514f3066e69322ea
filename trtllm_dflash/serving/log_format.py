"""The log of the serving processes: one line of text, or one JSON object a line."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import TextIO

LOG_FORMAT_VARIABLE = "TRTLLM_DFLASH_LOG_FORMAT"
LOG_FORMATS = ("text", "json")


class JsonLines(logging.Formatter):
    """``{"time", "level", "logger", "message", …}``; a mapping given as ``extra={"request": …}`` is added to it."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        line: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "request", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    """The same facts for people."""

    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "request", {})
        text = super().format(record)
        return text + "".join(f" {name}={value}" for name, value in facts.items())


class _Lines(logging.StreamHandler[TextIO]):
    """A full disk under the log costs its lines: ``logging`` would print a traceback for each of them to stderr."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def configure_logging(stream: TextIO, log_format: str) -> None:
    """Send all of this process's log to ``stream``; ``log_format`` is one of ``LOG_FORMATS``.

    What ``stream`` cannot take (a full disk, a reader that left) is dropped.
    """
    handler = _Lines(stream)
    text = TextLines("%(asctime)s %(name)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if log_format == "json" else text)
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
