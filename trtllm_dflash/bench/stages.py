"""Where a cycle's time goes: seconds by stage over the measured window, from whoever can say."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from trtllm_dflash.runtime.llm import LLM

_NETWORKS = ("target", "draft", "inject")


@runtime_checkable
class ReportsStages(Protocol):
    """An engine that times its own stages, as one that replays graphs must: nothing outside sees into a graph."""

    def stage_seconds(self) -> Mapping[str, float]:
        """Seconds per stage since the engine was opened."""


class StageClock:
    """Seconds by stage between :meth:`begin` and :meth:`end`.

    An engine that reports its stages is asked. Of one on a CPU the calls of its three networks are timed, and the
    rest of the window is ``other`` (sampling, scheduling, text, waiting). On a GPU calls return before the work is
    done, so there only the engine itself can say.
    """

    def __init__(self, llm: LLM | None) -> None:
        self._source: ReportsStages | None = llm if isinstance(llm, ReportsStages) else None
        self._timed = _TimedNetworks(llm) if llm is not None and self._source is None and _on_cpu(llm) else None
        self._before: dict[str, float] = {}
        self._begun = 0.0

    def begin(self) -> None:
        """Note the clocks."""
        self._before, self._begun = self._now(), time.perf_counter()

    def end(self) -> dict[str, float] | None:
        """Seconds per stage since :meth:`begin`; None where nobody can say."""
        now, window_s = self._now(), time.perf_counter() - self._begun
        if not now:
            return None
        spent = {name: now[name] - self._before.get(name, 0.0) for name in now}
        if self._timed is not None:
            spent["other"] = max(0.0, window_s - sum(spent.values()))
        return spent

    def close(self) -> None:
        """Stop timing."""
        if self._timed is not None:
            self._timed.restore()

    def _now(self) -> dict[str, float]:
        if self._source is not None:
            return dict(self._source.stage_seconds())
        return self._timed.seconds() if self._timed is not None else {}


class _TimedNetworks:
    def __init__(self, llm: LLM) -> None:
        self._session = llm.session
        self._spent = dict.fromkeys(_NETWORKS, 0.0)
        self._lock = threading.Lock()
        for name in _NETWORKS:
            setattr(self._session, name, self._timed(name, getattr(self._session, name)))

    def seconds(self) -> dict[str, float]:
        with self._lock:
            return dict(self._spent)

    def restore(self) -> None:
        for name in _NETWORKS:
            delattr(self._session, name)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                with self._lock:
                    self._spent[name] += time.perf_counter() - begun

        return timed


def _on_cpu(llm: LLM) -> bool:
    return llm.session.device.type == "cpu"
