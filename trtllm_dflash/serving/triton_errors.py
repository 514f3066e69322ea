"""What Triton's own error texts mean, and what to do next.

Triton speaks of batch sizes and JSON buffers where a client wrote a number as a string. The texts are those of release
24.10 (nvidia-pytriton 0.7); one that is not known here is passed on as it is.
"""

from __future__ import annotations

import http.client
import re
from dataclasses import dataclass

INPUTS_PAGE = "triton_server_repo/README.md lists the inputs and their types"
PORTS = "HTTP is on serve's --http-port (8000), not on the ports of gRPC (8001) or metrics (8002)"
_CODED = re.compile(r"^([A-Z_]+): ")
_HINTS = {
    "INVALID_ARGUMENT": INPUTS_PAGE,
    "UNAVAILABLE": "send the request again in a few seconds",
    "DEADLINE_EXCEEDED": "allow a longer deadline_s, or send fewer requests at a time",
    "INTERNAL": "the server's log names the cause",
}
# What `LoadFailed` of the engine process appends.
_HINT_IN_TEXT = re.compile(r"^(.*) \(hint: (.*)\)$", re.DOTALL)


@dataclass(frozen=True)
class Meaning:
    """An error in our words: ``message``, the next step, and whether the request is at fault (exit code 2)."""

    message: str
    hint: str
    is_the_requests: bool = False


def request_failure(status: int, text: str, *, url: str, model: str) -> Meaning:
    """What the answer to a request means.

    Args:
        status: HTTP status; Triton's is 400 or 500 whatever happened. text: its message: the model's own begins with a
            status word. url, model: who was asked.
    """
    said = f"(Triton, HTTP {status}: {text})"
    if coded := _CODED.match(text):
        return Meaning(
            f"HTTP {status}: {text}", _HINTS.get(coded[1], _HINTS["INTERNAL"]), coded[1] == "INVALID_ARGUMENT"
        )
    if "is not found" in text:
        index = f"curl -X POST {url}/v2/repository/index"
        return Meaning(
            f"{url}: has no model {model!r} {said}",
            f"the name is deploy's --model-name (serve --triton-model, bench --model); what this server has: {index}",
            True,
        )
    if "has no available versions" in text or "not ready" in text:
        return Meaning(
            f"{url}: model {model!r} is not ready {said}",
            f"it is loading, or could not be loaded: wait until {url}/v2/models/{model}/ready answers 200, or read the "
            "server's log",
        )
    if "is not healthy" in text:
        return Meaning(
            f"{url}: the process of model {model!r} has died {said}",
            "`trtllm-dflash serve` starts it again: send the request again in a few seconds; the log names the cause",
        )
    if re.search(r"Unable to parse|attempt to (access|get)|request JSON buffer", text):
        return Meaning(
            f"an input has a value of the wrong JSON type, or the body is not JSON {said}", INPUTS_PAGE, True
        )
    if "request has 0 inputs" in text:
        return Meaning(f"the request has no input, expected a prompt at least {said}", INPUTS_PAGE, True)
    if re.search(r"batch size does not match|unexpected (shape|inference input)|data-?type|expects? .*inputs?", text):
        return Meaning(f"an input has the wrong shape, type or name {said}", INPUTS_PAGE, True)
    if status in (404, 405):
        return Meaning(f"{url}: something answers there, but not as Triton does (HTTP {status}: {text})", PORTS)
    if "connection was lost" in text:
        return Meaning(f"HTTP {status}: {text}", "the server ended or is restarting: send the request again")
    return Meaning(f"HTTP {status}: {text}", _HINTS["INTERNAL"])


def no_answer(error: Exception, *, url: str, timeout_s: float) -> Meaning:
    """What it means that a connection failed with ``error``, an ``OSError`` or ``http.client.HTTPException``."""
    if isinstance(error, TimeoutError):
        return Meaning(
            f"{url}: Triton did not answer within {timeout_s:g} s",
            "it is overloaded, or hangs: its /v2/health/ready and serve's /health (8003) say more",
        )
    if isinstance(error, ConnectionResetError | BrokenPipeError | http.client.IncompleteRead):
        return Meaning(
            f"{url}: the connection was lost before the answer was complete",
            "the server ended or is restarting: send the request again; its log names the cause",
        )
    if isinstance(error, http.client.HTTPException):
        return Meaning(f"{url}: what answers there does not speak HTTP ({type(error).__name__})", PORTS)
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return Meaning(
        f"{url}: no Triton server answers: {reason}",
        "start one with: trtllm-dflash serve -m REPOSITORY; or check host and port",
    )


def load_failure(text: str) -> Meaning | None:
    """What a log, or the answer to a load request, says of a model that could not be loaded; None when nothing known.

    Args:
        text: as Triton wrote it. Line ends inside a message are escaped in its log.
    """
    lines = text.replace("\\n", "\n")
    if reasons := re.findall(r"TritonModelException: (.*)$", lines, re.MULTILINE):
        # The last one is the server's own summary.
        reason = str(reasons[-1]).strip().removesuffix('"')
        if with_hint := _HINT_IN_TEXT.match(reason):
            return Meaning(with_hint[1], with_hint[2])
        return Meaning(reason, "the engine process's own lines in the log say more")
    if missing := re.search(r"ModuleNotFoundError: No module named '([\w.]+)'", lines):
        step = (
            "install it where tritonserver runs: pip install 'numpy<2'"
            if missing[1] == "numpy"
            else "write the model repository again with: trtllm-dflash deploy --force"
        )
        return Meaning(f"the Python of Triton's backend has no module {missing[1]!r}", step)
    if "failed to read text proto" in lines or "failed to poll from model repository" in lines:
        return Meaning(
            "Triton cannot read the model's config.pbtxt", "write it again with: trtllm-dflash deploy --force"
        )
    if re.search(r"[Aa]ddress already in use|is already in use", lines):
        return Meaning("a port was taken meanwhile", "choose another with --http-port, --grpc-port or --metrics-port")
    if re.search(r"[Ss]hared memory|/dev/shm", lines):
        return Meaning(
            "Triton's Python backend got no shared memory", "free /dev/shm; in a container: start it with --shm-size=1g"
        )
    return None
