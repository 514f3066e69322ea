"""``trtllm-dflash generate``."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtllm_dflash.cli.option_checks import refuse_given
from trtllm_dflash.cli.progress_bar import plan_progress, waiting
from trtllm_dflash.cli.speculation_option import speculation_option
from trtllm_dflash.config.json_lines import read_json_lines
from trtllm_dflash.config.sampling import SamplingParams, SpeculationMode
from trtllm_dflash.errors import ConfigError

if TYPE_CHECKING:
    from trtllm_dflash.runtime.llm import LLM
    from trtllm_dflash.runtime.outputs import OutputChunk, RequestOutput


@click.command()
@click.option("-e", "--engines", required=True, type=click.Path(path_type=Path), help="Engine directory.")
@click.option("--prompt", "prompts", multiple=True, help="Prompt text; repeatable.")
@click.option(
    "--prompts-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='JSON lines: {"prompt": "…"}, {"messages": […]} or {"token_ids": […]} each.',
)
@click.option(
    "--chat/--no-chat", default=None, help="Put prompt texts through the chat template.  [default: if there is one]"
)
@click.option("--max-tokens", type=int, default=256, show_default=True, help="Output tokens at most.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--top-k", type=int, default=0, show_default=True, help="0 is off.")
@click.option("--min-p", type=float, default=0.0, show_default=True)
@click.option("--seed", type=int, help="The same seed gives the same tokens.")
@click.option("--stop", multiple=True, help="String that ends the output; repeatable.")
@speculation_option
@click.option("--num-speculative-tokens", type=int, help="Drafts per cycle in vLLM's words: block size - 1.")
@click.option("--block-size", type=int, help="Block size S for this run, up to the engine's.")
@click.option("--logprobs", type=int, help="Log-probabilities with N alternatives per token (with --json).")
@click.option("--device", help="cpu or cuda:N.  [default: first GPU, else CPU]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def generate(
    engines: Path,
    prompts: tuple[str, ...],
    prompts_file: Path | None,
    chat: bool | None,
    speculation: SpeculationMode,
    num_speculative_tokens: int | None,
    block_size: int | None,
    device: str | None,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Generate text offline.

    \b
    Example:
      trtllm-dflash generate -e engines --prompt "What is 17 * 23?" --max-tokens 64
    """
    from trtllm_dflash.runtime.llm import LLM

    if not prompts and prompts_file is None:
        raise click.UsageError("give --prompt or --prompts-file")
    if not as_json:
        refuse_given(("logprobs",), "without --json")
    if num_speculative_tokens is not None:
        block_size = _translate(num_speculative_tokens, block_size)
    params = SamplingParams(**sampling)
    # Before an engine is loaded for minutes.
    lines = [] if prompts_file is None else read_json_lines(prompts_file)
    with waiting(f"loading {engines} …"):
        llm = LLM(engines, speculation=speculation, device=device, block_size=block_size)
    with llm:
        wrap = llm.has_chat_template if chat is None else chat
        requests: list[Any] = [_chat(text) if wrap else text for text in prompts]
        requests += [_from_line(line, wrap) for line in lines]
        stream = len(requests) == 1 and not as_json
        started = time.perf_counter()
        if stream:
            outputs = llm.generate(requests, params, on_chunk=lambda _, chunk: click.echo(chunk.text, nl=False))
        else:
            outputs = _generate_all(llm, requests, params)
        elapsed = time.perf_counter() - started
        document = generation_document(llm, outputs, elapsed)
    warn_of_cuts(outputs)
    if as_json:
        click.echo(json.dumps(document, ensure_ascii=False))
    else:
        _print_text(outputs, document["summary"], streamed=stream)
    if any(output.finish_reason == "error" for output in outputs):
        raise SystemExit(1)


def _generate_all(llm: LLM, requests: list[Any], params: SamplingParams) -> list[RequestOutput]:
    ended = 0
    with plan_progress("generating …") as progress:

        def show(_: int, chunk: OutputChunk) -> None:
            nonlocal ended
            if chunk.finish_reason is not None:
                ended += 1
                progress("outputs", ended, len(requests))

        return llm.generate(requests, params, on_chunk=show)


def warn_of_cuts(outputs: Sequence[RequestOutput]) -> None:
    """One line on stderr when outputs ended because their ``max_tokens`` did not fit into the sequence."""
    texts = [text for output in outputs for text in output.warnings]
    if texts:
        others = f" (and {len(texts) - 1} more outputs)" if len(texts) > 1 else ""
        click.echo(f"warning: {texts[0]}{others}", err=True)


def generation_document(llm: LLM, outputs: list[RequestOutput], elapsed_s: float) -> dict[str, Any]:
    """The JSON document of ``generate --json``; acceptance length is pooled over all cycles."""
    cycles = sum(output.metrics.cycles for output in outputs)
    accepted = sum(output.metrics.accepted_tokens for output in outputs)
    tokens = sum(len(output.token_ids) for output in outputs)
    listed = []
    for output in outputs:
        entry: dict[str, Any] = {
            "index": output.index,
            "text": output.text,
            "token_ids": list(output.token_ids),
            "finish_reason": output.finish_reason,
            "prompt_tokens": output.metrics.prompt_tokens,
            "completion_tokens": output.metrics.completion_tokens,
            "cycles": output.metrics.cycles,
            "acceptance_length": output.metrics.acceptance_length,
        }
        if output.error is not None:
            entry["error"] = output.error
        if output.warnings:
            entry["warnings"] = list(output.warnings)
        if output.logprobs is not None:
            entry["logprobs"] = [asdict(token) for token in output.logprobs]
        listed.append(entry)
    return {
        "outputs": listed,
        "summary": {
            "backend": llm.backend,
            "device": str(llm.session.device),
            "speculation": llm.block_size > 1,
            "block_size": llm.block_size,
            "output_tokens": tokens,
            "elapsed_s": round(elapsed_s, 4),
            "output_tokens_per_second": round(tokens / elapsed_s, 2) if elapsed_s else None,
            "acceptance_length": (accepted + cycles) / cycles if cycles else None,
        },
    }


def _print_text(outputs: list[RequestOutput], summary: dict[str, Any], *, streamed: bool) -> None:
    for output in outputs:
        if not streamed:
            click.echo(f"[{output.index}] {output.text}")
        if output.error:
            click.echo(f"error: prompt {output.index}: {output.error}", err=True)
    if streamed:
        click.echo()
    length = summary["acceptance_length"]
    spoken = f", acceptance length {length:.2f}" if summary["speculation"] and length is not None else ""
    click.echo(
        f"{summary['output_tokens']} tokens in {summary['elapsed_s']:.2f} s, "
        f"{summary['output_tokens_per_second']} tokens/s on {summary['device']}{spoken}",
        err=True,
    )


def _translate(num_speculative_tokens: int, block_size: int | None) -> int:
    from trtllm_dflash.config.block_size_words import translate_block_size

    if block_size is not None:
        raise click.UsageError("--num-speculative-tokens and --block-size say the same thing: give one of them")
    translation = translate_block_size("--num-speculative-tokens", num_speculative_tokens)
    click.echo(translation.line, err=True)
    return translation.block_size


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _from_line(line: tuple[str, dict[str, Any]], wrap: bool) -> Any:
    place, document = line
    if isinstance(document.get("messages"), list):
        return document["messages"]
    if isinstance(document.get("token_ids"), list):
        return document["token_ids"]
    if isinstance(document.get("prompt"), str):
        return _chat(document["prompt"]) if wrap else document["prompt"]
    raise ConfigError(f"{place}: expected a key prompt (text), messages (list) or token_ids (list)")
