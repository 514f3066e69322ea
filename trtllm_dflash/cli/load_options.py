"""Options that ``bench`` and ``sweep`` share: what is asked, and how it is sampled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trtllm_dflash.cli.option_checks import refuse_given

if TYPE_CHECKING:
    from trtllm_dflash.bench.workload import Workload

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--dataset",
        type=click.Path(path_type=Path),
        help="JSON lines: GSM8K, HumanEval, MT-bench, MATH-500, MBPP as published; or prompt, messages or text a line.",
    ),
    click.option(
        "--synthetic-prompt-tokens",
        type=int,
        metavar="N",
        help="Random prompts of N tokens instead of a data set; only with --force-acceptance-length.",
    ),
    click.option("--max-tokens", type=int, default=256, show_default=True, help="Output tokens of a request at most."),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
    click.option("--top-p", type=float, default=1.0, show_default=True),
    click.option("--top-k", type=int, default=0, show_default=True, help="0 is off."),
    click.option("--min-p", type=float, default=0.0, show_default=True),
    click.option("--seed", type=int, help="Of sampling; request i uses SEED + i."),
    click.option("--stop", multiple=True, help="String that ends an output; repeatable."),
    click.option("--ignore-eos", is_flag=True, help="Every output has --max-tokens tokens."),
    click.option("--chat/--no-chat", default=True, show_default=True, help="Apply the target's chat template."),
    click.option(
        "--force-acceptance-length",
        type=float,
        metavar="X",
        help="Force cycles to commit X tokens on average, bonus counted; the outputs are then not the model's.",
    ),
    click.option("--device", help="cpu or cuda:N, for engines in this process.  [default: first GPU, else CPU]"),
)


def load_options(command: Command) -> Command:
    """Add the shared options to a click command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def workload_from_options(options: dict[str, Any], *, count: int | None, engines: Path | None) -> Workload:
    """The workload that the shared options describe.

    Args:
        options: values of the shared options by name; taken out of it. count: prompts, None for all.
        engines: an engine directory, whose vocabulary random prompts are drawn from.
    """
    from trtllm_dflash.bench.workload import make_workload
    from trtllm_dflash.config.sampling import SamplingParams
    from trtllm_dflash.engine.directory import open_engine_directory

    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos")
    params = SamplingParams(**{name: options.pop(name) for name in names})
    synthetic = options.pop("synthetic_prompt_tokens")
    vocab_size = None
    if synthetic is not None:
        refuse_given(("chat",), "with --synthetic-prompt-tokens: random tokens are no messages")
    if synthetic is not None and engines is not None:
        vocab_size = open_engine_directory(engines, verify=False).target_config.vocab_size
    return make_workload(
        options.pop("dataset"),
        params,
        count=count,
        chat=options.pop("chat"),
        forced_acceptance=options.pop("force_acceptance_length"),
        synthetic_prompt_tokens=synthetic,
        vocab_size=vocab_size,
    )
