"""The ``LLM`` facade: an engine directory, ready to generate."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path

from trtllm_dflash.config.sampling import SamplingParams, SpeculationMode
from trtllm_dflash.engine.directory import Backend, load_session, open_engine_directory
from trtllm_dflash.engine.session import EngineSession
from trtllm_dflash.engine.torch_session import KernelChoice
from trtllm_dflash.errors import ConfigError, EngineError, RequestError
from trtllm_dflash.runtime.block_policy import CycleTable
from trtllm_dflash.runtime.cycle_profile import CycleProfiler
from trtllm_dflash.runtime.cycle_runner import EngineOptions, expected_graphs
from trtllm_dflash.runtime.engine import Engine
from trtllm_dflash.runtime.grammar import GrammarCompiler, GrammarRun
from trtllm_dflash.runtime.memory import plan_memory
from trtllm_dflash.runtime.outputs import EngineStats, OutputChunk, RequestOutput, TokenLogprobs
from trtllm_dflash.runtime.prompting import PROMPT_KINDS, Prompt, PromptEncoder
from trtllm_dflash.runtime.request import RequestSpec, Submission
from trtllm_dflash.runtime.request_limits import (
    check_capacity,
    checked_deadline,
    checked_priority,
    checked_salt,
    output_room,
)
from trtllm_dflash.runtime.scheduler import AdmissionLimits
from trtllm_dflash.runtime.slots import SamplingMode

logger = logging.getLogger(__name__)


class LLM:
    """Generation on one engine directory.

    Args:
        engines: directory written by ``trtllm-dflash build``.
        speculation: ``auto`` speculates when the engine has a drafter, on a GPU with the block size that pays most;
            ``on`` insists on a drafter and always uses the whole block; ``off`` decodes plainly.
        device: ``cpu`` or ``cuda:N``; None takes the first CUDA GPU or else the CPU.
        block_size: S, up to the engine's; None takes the engine's.
        kv_cache_tokens: tokens of the KV caches; None takes what the limits need, bounded by free memory.
        prefix_cache: prompts that begin alike are computed once, as long as pages last.
        max_queue: waiting requests; one more is refused with ``QueueFullError``. None is unlimited.
        max_tokens_in_flight: tokens that running requests may come to hold together. None is unlimited.
        max_running: requests that run together; None takes what the engine was built for.
        kernels: what the torch backend computes with on a GPU: ``auto``, ``plugins`` (insist) or ``torch``.
        options: how cycles are launched; the defaults are right unless something is being measured.

    Raises:
        EngineError, ConfigError, CheckpointError: the directory is missing, damaged or cannot run here.
    """

    def __init__(
        self,
        engines: str | Path,
        *,
        speculation: SpeculationMode = "auto",
        device: str | None = None,
        block_size: int | None = None,
        kv_cache_tokens: int | None = None,
        kernels: KernelChoice = "auto",
        options: EngineOptions | None = None,
        prefix_cache: bool = True,
        max_queue: int | None = None,
        max_tokens_in_flight: int | None = None,
        max_running: int | None = None,
    ) -> None:
        admission = AdmissionLimits(max_queue, max_tokens_in_flight, max_running)
        engine_path = Path(engines)
        session = load_session(engine_path, device=device, kernels=kernels)
        backend = open_engine_directory(engine_path, verify=False).backend
        tokenizer = engine_path / "tokenizer"
        self._start(
            session, tokenizer, backend, speculation, block_size, kv_cache_tokens, options, prefix_cache, admission
        )

    @classmethod
    def of_session(
        cls,
        session: EngineSession,
        tokenizer: str | Path,
        *,
        speculation: SpeculationMode = "auto",
        block_size: int | None = None,
        kv_cache_tokens: int | None = None,
        options: EngineOptions | None = None,
        prefix_cache: bool = True,
    ) -> LLM:
        """An LLM on a session that is already there, with the tokenizer of a directory; it then owns the session."""
        llm = cls.__new__(cls)
        llm._start(
            session, Path(tokenizer), "torch", speculation, block_size, kv_cache_tokens, options, prefix_cache, None
        )
        return llm

    def _start(
        self,
        session: EngineSession,
        tokenizer: Path,
        backend: Backend,
        speculation: SpeculationMode,
        block_size: int | None,
        kv_cache_tokens: int | None,
        options: EngineOptions | None,
        prefix_cache: bool,
        admission: AdmissionLimits | None,
    ) -> None:
        self._session = session
        self._block_size = _choose_block_size(session, speculation, block_size)
        self._prompts = PromptEncoder(tokenizer, session.target_config.vocab_size)
        options = _resolve_options(options or EngineOptions(), speculation, session)
        self.memory = plan_memory(
            session,
            kv_cache_tokens,
            block_size=self._block_size,
            graphs=expected_graphs(session, self._block_size, options),
        )
        logger.info("memory plan: %s", self.memory.describe())
        self._engine = Engine(
            session,
            self._prompts.backend,
            num_pages=self.memory.num_pages,
            block_size=self._block_size,
            options=options,
            prefix_cache=prefix_cache,
            limits=admission,
        )
        self._grammars = GrammarCompiler(self._prompts.tokenizer, session.target_config.vocab_size)
        self.limits = session.limits
        self.backend: Backend = backend
        in_flight = None if admission is None else admission.max_tokens_in_flight
        held = self.memory.tokens if in_flight is None else min(self.memory.tokens, in_flight)
        self._max_request_tokens = min(session.limits.max_seq_len, held)

    @property
    def profiler(self) -> CycleProfiler:
        """Measures cycles; only while no request is running. It overwrites pages, so cached prefixes are forgotten."""
        return self._engine.profiler()

    @property
    def block_size(self) -> int:
        """S in use; 1 means plain decoding."""
        return self._block_size

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output of the longest request that ever fits: max_seq_len, or the KV cache where that is less."""
        return self._max_request_tokens

    @property
    def session(self) -> EngineSession:
        """The engine session (facts for reports; running it is the engine's business)."""
        return self._session

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be prompts."""
        return self._prompts.has_chat_template

    @property
    def cycle_table(self) -> CycleTable | None:
        """Measured seconds per cycle that the adaptive block size goes by; None without it."""
        return self._engine.cycle_table

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt as :meth:`generate` would use them."""
        return self._prompts.encode(prompt)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_chunk: Callable[[int, OutputChunk], None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt and wait.

        Args:
            prompts: one prompt or several; each is text, token ids, or chat messages (``[{"role", "content"}]``).
            params: one for all, or one per prompt.
            on_chunk: called with (prompt index, chunk) on the engine thread as output appears; what it raises ends
                the generation and is raised here.

        Returns:
            outputs in the order of the prompts. A request that fails has finish_reason ``error``.

        Raises:
            RequestError: a prompt or parameter is invalid; then nothing has been generated.
        """
        several = _as_prompts(prompts)
        each = _as_params(params, len(several))
        specs = [self._spec(prompt, one) for prompt, one in zip(several, each, strict=True)]
        grammars = [self._grammar(spec) for spec in specs]
        for grammar in grammars:
            if grammar is not None:
                grammar.wait()
        collectors = [_Collector(index, spec, on_chunk) for index, spec in enumerate(specs)]
        try:
            self._engine.submit_all(
                [
                    Submission(spec, collector.add, grammar)
                    for spec, grammar, collector in zip(specs, grammars, collectors, strict=True)
                ]
            )
            return [collector.wait() for collector in collectors]
        except BaseException:
            for spec in specs:
                self._engine.cancel(spec.request_id)
            raise

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        cache_salt: str | None = None,
    ) -> AsyncIterator[OutputChunk]:
        """Chunks of one request as they appear; leaving the iterator cancels the request. Options as in ``submit``."""
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[OutputChunk] = asyncio.Queue()

        def deliver(chunk: OutputChunk) -> None:
            try:
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)
            except RuntimeError:
                # The event loop is closed: nobody is left to read.
                self.cancel(chunk.request_id)

        request_id = self.submit(
            prompt,
            params or SamplingParams(),
            deliver,
            priority=priority,
            deadline_s=deadline_s,
            cache_salt=cache_salt,
        )
        try:
            while True:
                chunk = await chunks.get()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            self.cancel(request_id)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_chunk: Callable[[OutputChunk], None],
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        cache_salt: str | None = None,
        max_tokens_must_fit: bool = False,
    ) -> str:
        """Queue a request and return its id at once.

        Args:
            on_chunk: runs on the engine thread; it must be quick and not raise.
            priority: -10 to 10, larger is sooner: one more is worth ten seconds of waiting, so nobody starves. It
                is a place in the queue: whoever waits, waits for a free slot; no running request is stopped for it.
            deadline_s: seconds from now; a request that is not finished then ends with reason ``error``.
            cache_salt: only requests of the same salt share cached prefixes with this one.
            max_tokens_must_fit: refuse a ``max_tokens`` beyond what the prompt leaves of max_seq_len; otherwise it is
                cut, and an output that ends there says so in ``warnings``.

        Raises:
            RequestError: invalid prompt or parameters. QueueFullError: too many wait. Nothing was queued. A form for
            the output is checked later: an invalid one ends the request with reason ``error``, of kind ``request``.
        """
        spec = self._spec(prompt, params, max_tokens_must_fit=max_tokens_must_fit)
        spec = replace(
            spec,
            request_id=request_id or spec.request_id,
            priority=checked_priority(priority),
            deadline_s=checked_deadline(deadline_s),
            salt=checked_salt(cache_salt),
        )
        self._engine.submit(spec, on_chunk, self._grammar(spec))
        return spec.request_id

    def cancel(self, request_id: str) -> None:
        """Ask for cancellation; the last chunk has finish_reason ``cancelled``. Unknown ids are ignored."""
        self._engine.cancel(request_id)

    def stats(self) -> EngineStats:
        """A snapshot of pages, requests and counters."""
        return self._engine.stats()

    def close(self) -> None:
        """Stop the engine; unfinished requests end as cancelled."""
        self._grammars.close()
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _spec(self, prompt: Prompt, params: SamplingParams, *, max_tokens_must_fit: bool = False) -> RequestSpec:
        ids = self._prompts.encode(prompt)
        room = output_room(
            len(ids),
            params,
            self._session.limits.max_seq_len,
            held_tokens=self.max_request_tokens,
            must_fit=max_tokens_must_fit,
        )
        target = self._session.target_config
        stop_ids = tuple(dict.fromkeys([*(() if params.ignore_eos else target.eos_token_ids), *params.stop_token_ids]))
        bad_words = self._prompts.bad_word_sequences(params.bad_words)
        check_capacity(params, stop_ids, bad_words, target.vocab_size)
        return RequestSpec(
            request_id=uuid.uuid4().hex,
            prompt=ids,
            params=params,
            mode=SamplingMode.of(params),
            max_output_tokens=room,
            stop_ids=stop_ids,
            bad_words=bad_words,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
        )

    def _grammar(self, spec: RequestSpec) -> GrammarRun | None:
        wanted = spec.params.structured_output
        return None if wanted is None else self._grammars.start(wanted, spec.stop_ids, self._engine.wake)


class _Collector:
    """Gathers the chunks of one request into its output."""

    def __init__(self, index: int, spec: RequestSpec, on_chunk: Callable[[int, OutputChunk], None] | None) -> None:
        self._index = index
        self._spec = spec
        self._on_chunk = on_chunk
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._last: OutputChunk | None = None
        self._failure: Exception | None = None
        self._done = threading.Event()

    def add(self, chunk: OutputChunk) -> None:
        self._text.append(chunk.text)
        self._tokens.extend(chunk.token_ids)
        self._logprobs.extend(chunk.logprobs)
        if self._on_chunk is not None and self._failure is None:
            try:
                self._on_chunk(self._index, chunk)
            except Exception as failure:
                self._failure = failure
                self._done.set()
        if chunk.finish_reason is not None:
            self._last = chunk
            self._done.set()

    def wait(self) -> RequestOutput:
        # A plain wait() cannot be interrupted by Ctrl-C on every platform; a bounded one can.
        while not self._done.wait(timeout=1.0):
            pass
        if self._failure is not None:
            raise self._failure
        last = self._last
        if last is None or last.finish_reason is None or last.metrics is None:
            raise EngineError("a request ended without a last chunk")
        return RequestOutput(
            request_id=self._spec.request_id,
            index=self._index,
            text="".join(self._text),
            token_ids=tuple(self._tokens),
            finish_reason=last.finish_reason,
            metrics=last.metrics,
            logprobs=tuple(self._logprobs) if self._spec.params.logprobs is not None else None,
            error=last.error,
            warnings=last.warnings,
        )


def _resolve_options(options: EngineOptions, speculation: SpeculationMode, session: EngineSession) -> EngineOptions:
    if options.adaptive is not None:
        return options
    return replace(options, adaptive=speculation == "auto" and session.device.type == "cuda")


def _choose_block_size(session: EngineSession, speculation: SpeculationMode, wanted: int | None) -> int:
    if speculation not in ("auto", "on", "off"):
        raise RequestError("speculation", speculation, "auto, on or off")
    built = session.limits.block_size
    if session.drafter_config is None and speculation == "on":
        raise ConfigError(
            "speculation is on, but this engine has no drafter",
            hint="convert with --drafter and build again, or use --no-speculation",
        )
    if session.drafter_config is None or speculation == "off":
        if wanted not in (None, 1):
            reason = "this engine has no drafter" if session.drafter_config is None else "speculation is off"
            raise RequestError("block_size", wanted, f"1 or none: {reason}")
        return 1
    if wanted is None:
        return built
    if not 1 <= wanted <= built:
        raise RequestError("block_size", wanted, f"1 to the engine's block size {built}")
    return wanted


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError("prompt", prompts, f"{PROMPT_KINDS}, or a list of these")
    if len(prompts) and isinstance(prompts[0], Integral | dict):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError("params", f"{len(params)} sampling parameters", f"one, or one per prompt ({count})")
    return list(params)
