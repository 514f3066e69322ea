"""What is measured: an engine directory with its settings, or a served model; opened, an endpoint with its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtllm_dflash.bench.capacity import capacity_of
from trtllm_dflash.bench.endpoints import Endpoint, InProcess
from trtllm_dflash.bench.served import Api, ServedModel, find_served_model, open_endpoint
from trtllm_dflash.bench.workload import Workload, encode_within
from trtllm_dflash.config.sampling import SpeculationMode
from trtllm_dflash.engine.directory import open_engine_directory
from trtllm_dflash.errors import ConfigError

if TYPE_CHECKING:
    from trtllm_dflash.runtime.llm import LLM

MAX_VOCABULARY = 1 << 31
LoadGenerator = Literal["builtin", "aiperf"]


@dataclass(frozen=True)
class Configuration:
    """One curve of a sweep, or the subject of a bench run.

    Attributes:
        label: its name in reports.
        engines: engine directory, run in this process; or ``url`` of a served model.
        speculation, block_size, kv_cache_tokens: as ``LLM`` takes them.
        prefix_cache: likewise; off, because a repeat of the same prompts would find them computed.
        api, model: of a served model; None asks the server. tokenizer: engine or tokenizer directory whose chat
            template and ids a Triton model is asked with.
        gpus: GPUs that serve it; None takes the engine's ranks, or 1.
        load_generator: who sends to a served OpenAI endpoint. aiperf_command: AIPerf's executable.
    """

    label: str
    engines: Path | None = None
    url: str | None = None
    speculation: SpeculationMode = "auto"
    block_size: int | None = None
    kv_cache_tokens: int | None = None
    prefix_cache: bool = False
    api: Api | None = None
    model: str | None = None
    tokenizer: Path | None = None
    gpus: int | None = None
    load_generator: LoadGenerator = "builtin"
    aiperf_command: str = "aiperf"

    def __post_init__(self) -> None:
        if (self.engines is None) == (self.url is None):
            raise ConfigError(f"{self.label}: expected an engine directory or a url, one of them")
        if self.load_generator not in ("builtin", "aiperf"):
            raise ConfigError(f"{self.label}: load_generator is {self.load_generator!r}, expected builtin or aiperf")
        if self.load_generator == "aiperf" and self.url is None:
            raise ConfigError(f"{self.label}: AIPerf sends to a url; an engine in this process has none")
        if self.gpus is not None and self.gpus < 1:
            raise ConfigError(f"{self.label}: gpus is {self.gpus}, expected at least 1")
        if self.speculation == "off" and self.block_size not in (None, 1):
            raise ConfigError(
                f"{self.label}: block_size is {self.block_size} and speculation is off: plain decoding has no blocks"
            )
        self._refuse_without_effect()

    def _refuse_without_effect(self) -> None:
        """A setting that changes nothing would be taken for a difference between two curves."""
        names: tuple[str, ...]
        if self.url is not None:
            names, owner = ("speculation", "block_size", "kv_cache_tokens", "prefix_cache"), "a url: it is the server's"
        else:
            names, owner = ("api", "model", "tokenizer"), "an engine directory: it belongs to a url"
        defaults = {field.name: field.default for field in fields(self)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise ConfigError(f"{self.label}: {name} has no effect on {owner}")


@dataclass
class Opened:
    """An open configuration.

    Attributes:
        endpoint: where load goes. prompts: in the form it takes. gpus: that serve it.
        gpu_uuids: GPUs of this machine whose energy is its energy. facts: for reports.
        llm: the engine of an in-process one. served: what answers at the url of another.
    """

    configuration: Configuration
    endpoint: Endpoint
    prompts: Sequence[Any]
    gpus: int
    gpu_uuids: tuple[str, ...]
    facts: dict[str, object]
    llm: LLM | None = None
    served: ServedModel | None = None

    def close(self) -> None:
        """Release the engine."""
        if self.llm is not None:
            self.llm.close()


def open_configuration(
    configuration: Configuration,
    workload: Workload,
    *,
    device: str | None = None,
    max_prompt_tokens: int | None = None,
    concurrency: int | None = None,
) -> Opened:
    """Load the engine, or find the served model, and bring the prompts into its form.

    Args:
        device: of an engine in this process, as ``LLM``'s. max_prompt_tokens: longer prompts are left out; None takes
            what the engine's max_seq_len leaves. concurrency: most requests at a time; sizes the KV cache where the
            configuration does not.

    Raises:
        ConfigError, EngineError: it cannot be opened, or takes none of the prompts.
    """
    if configuration.engines is not None:
        return _open_engine(configuration, workload, device, max_prompt_tokens, concurrency)
    return _open_served(configuration, workload, max_prompt_tokens)


def longest_prompt(configurations: Sequence[Configuration], max_tokens: int | None) -> int | None:
    """Prompt tokens that every engine in this process takes beside ``max_tokens`` of output; None without engines."""
    limits = [
        open_engine_directory(configuration.engines, verify=False).limits.max_seq_len
        for configuration in configurations
        if configuration.engines is not None
    ]
    return max(1, min(limits) - (max_tokens or 1)) if limits else None


def _open_engine(
    configuration: Configuration,
    workload: Workload,
    device: str | None,
    max_prompt_tokens: int | None,
    concurrency: int | None,
) -> Opened:
    import torch

    from trtllm_dflash.runtime.cycle_runner import EngineOptions
    from trtllm_dflash.runtime.llm import LLM
    from trtllm_dflash.runtime.prompting import PromptEncoder

    assert configuration.engines is not None
    directory = open_engine_directory(configuration.engines, verify=False)
    limit = max_prompt_tokens or longest_prompt([configuration], workload.params.max_tokens)
    assert limit is not None
    encoder = PromptEncoder(configuration.engines / "tokenizer", directory.target_config.vocab_size)
    if workload.chat and not encoder.has_chat_template:
        raise ConfigError(f"{configuration.engines}: this target has no chat template", hint="give --no-chat")
    encoded, dropped = encode_within(workload.prompts, encoder.encode, limit)
    prompts = [ids for ids in encoded if ids is not None]
    cache_tokens = configuration.kv_cache_tokens
    if cache_tokens is None and concurrency is not None and workload.params.max_tokens is not None:
        cache_tokens = _cache_tokens(
            prompts, workload.params.max_tokens, min(concurrency, directory.limits.max_batch_size)
        )
    forced = workload.forced_acceptance if configuration.speculation != "off" else None
    if forced is not None and directory.drafter_config is not None and forced > directory.limits.block_size:
        # A smaller block of the same engine is cut to what it has; a number that no block has would only be claimed.
        raise ConfigError(
            f"forced acceptance length is {forced:g}, expected at most {directory.limits.block_size}, the block size "
            f"that {configuration.engines} was built for"
        )
    llm = LLM(
        configuration.engines,
        speculation=configuration.speculation,
        device=device,
        block_size=configuration.block_size,
        kv_cache_tokens=cache_tokens,
        options=EngineOptions(forced_acceptance=forced),
        prefix_cache=configuration.prefix_cache,
    )
    on_gpu = llm.session.device.type == "cuda"
    drafter = directory.drafter_config
    facts: dict[str, object] = {
        "kind": "engine",
        "backend": llm.backend,
        "device": llm.session.device.type,
        "drafter_version": None if drafter is None else drafter.version,
        "speculation": llm.block_size > 1,
        "block_size": llm.block_size,
        "dtype": directory.target_config.dtype,
        "quantization": directory.quantization.algo,
        "target_layers": directory.target_config.num_layers,
        "tp_size": directory.tp_size,
        "max_batch_size": directory.limits.max_batch_size,
        "max_seq_len": directory.limits.max_seq_len,
        "kv_cache_tokens": cache_tokens,
        "prefix_cache": configuration.prefix_cache,
        "prompts_left_out": dropped,
    }
    return Opened(
        configuration=configuration,
        endpoint=InProcess(llm),
        prompts=prompts,
        gpus=configuration.gpus or directory.tp_size,
        gpu_uuids=(f"GPU-{torch.cuda.get_device_properties(llm.session.device).uuid}",) if on_gpu else (),
        facts=facts,
        llm=llm,
    )


def _cache_tokens(prompts: Sequence[Sequence[int]], max_tokens: int, requests: int) -> int:
    """KV cache for ``requests`` of the longest prompt, a page more for each: memory that a point cannot run out of."""
    return requests * (max(map(len, prompts)) + max_tokens + 64)


def _open_served(configuration: Configuration, workload: Workload, max_prompt_tokens: int | None) -> Opened:
    assert configuration.url is not None
    if workload.forced_acceptance is not None:
        raise ConfigError(
            f"{configuration.label}: acceptance can only be forced in this process",
            hint="force it in the server, with its own option, and leave --force-acceptance-length away",
        )
    served = find_served_model(configuration.url, api=configuration.api, model=configuration.model)
    prompts, dropped = _served_prompts(configuration, served, workload, max_prompt_tokens)
    facts: dict[str, object] = {
        "kind": "served",
        "api": served.api,
        "model": served.model,
        "load_generator": configuration.load_generator,
        **(capacity_of(served.url, served.model) if served.api == "triton" else {}),
        "prompts_left_out": dropped,
    }
    return Opened(configuration, open_endpoint(served), prompts, configuration.gpus or 1, (), facts, served=served)


def _served_prompts(
    configuration: Configuration, served: ServedModel, workload: Workload, max_prompt_tokens: int | None
) -> tuple[Sequence[Any], int]:
    from trtllm_dflash.runtime.prompting import PromptEncoder

    folder = configuration.tokenizer
    if folder is None:
        if served.api == "triton" and workload.chat:
            raise ConfigError(
                f"{configuration.label}: Triton's generate takes no chat messages, and no tokenizer was given to apply "
                "the chat template with",
                hint="give --tokenizer ENGINES (the directory that is served), or --no-chat",
            )
        return workload.prompts, 0
    nested = folder / "tokenizer"
    encoder = PromptEncoder(nested if nested.is_dir() else folder, MAX_VOCABULARY)
    encoded, dropped = encode_within(workload.prompts, encoder.encode, max_prompt_tokens or MAX_VOCABULARY)
    if served.api == "triton":
        return [ids for ids in encoded if ids is not None], dropped
    # The server applies its own template; ours only says which prompts are short enough.
    return [prompt for prompt, ids in zip(workload.prompts, encoded, strict=True) if ids is not None], dropped
