"""What the front end needs to know to start."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

API_KEY_VARIABLE = "TRTLLM_DFLASH_API_KEY"
# The bundled Triton release dies of a JSON body over about 4.2 MB; escaping can double what the client sent.
MAX_TRITON_BODY_BYTES = 3 << 20


@dataclass(frozen=True)
class GatewaySettings:
    """Settings of the front end.

    Attributes:
        triton_urls: ``http://host:port`` of each replica. triton_model: the model's name there.
        served_names: names that clients may ask for; the first is the one in answers.
        host, port: where to listen. api_key_hashes: SHA-256 of each accepted key; none means no authentication.
        max_body_bytes: largest request body. max_in_flight: requests at a time, one more is refused with 429.
        max_choices: largest number of sequences of one request (prompts times ``n``).
        drain_timeout_s: how long running requests may go on after SIGTERM.
        body_timeout_s: a request body must be there after this long.
        silence_timeout_s: longest silence of a replica within a request; waiting in its queue counts.
    """

    triton_urls: tuple[str, ...]
    triton_model: str = "dflash"
    served_names: tuple[str, ...] = ("dflash",)
    host: str = "127.0.0.1"
    port: int = 9000
    api_key_hashes: frozenset[bytes] = field(default_factory=frozenset)
    max_body_bytes: int = 1 << 20
    max_in_flight: int = 2048
    max_choices: int = 64
    drain_timeout_s: float = 30.0
    body_timeout_s: float = 30.0
    silence_timeout_s: float = 900.0


def hash_keys(keys: str) -> frozenset[bytes]:
    """Hashes of a comma-separated list of API keys; blanks around a key do not count."""
    return frozenset(hashlib.sha256(key.strip().encode()).digest() for key in keys.split(",") if key.strip())
