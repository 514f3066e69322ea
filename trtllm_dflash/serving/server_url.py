"""Addresses of servers as users type them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from trtllm_dflash.errors import ConfigError

# Names, IPv4 and IPv6 (which urlsplit gives without brackets). Others fail late, with words about sockets or encodings.
_HOST = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?|[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(%\w+)?")


@dataclass(frozen=True)
class ServerUrl:
    """``scheme`` is http or https; ``port`` is None when the url has none."""

    scheme: str
    host: str
    port: int | None

    @property
    def root(self) -> str:
        """The url without a path."""
        return f"{self.scheme}://" + (bracketed(self.host) if self.port is None else address(self.host, self.port))


def bracketed(host: str) -> str:
    """``host`` as it stands in a url: IPv6 addresses have brackets there."""
    return f"[{host}]" if ":" in host else host


def address(host: str, port: int) -> str:
    """``host:port`` as it stands in a url."""
    return f"{bracketed(host)}:{port}"


def reachable(host: str) -> str:
    """An address of this machine to ask a server that listens on ``host``, which may mean all addresses."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def split_url(url: str) -> ServerUrl:
    """The parts of ``http://host:port``; a path is ignored. Raises ``ConfigError`` for anything else."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:  # a port that is no port, brackets that do not match
        raise ConfigError(f"url is {url!r}, expected http://host:port ({error})") from error
    if parts.scheme not in ("http", "https") or not _HOST.fullmatch(host):
        raise ConfigError(f"url is {url!r}, expected http://host:port")
    return ServerUrl(parts.scheme, host, port)
