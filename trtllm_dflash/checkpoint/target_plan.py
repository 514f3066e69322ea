"""The plan of a target: embedding, decoder layers, final norm and head."""

from __future__ import annotations

from trtllm_dflash.checkpoint.sharding import REPLICATED, Segment, padded_rows, rows
from trtllm_dflash.checkpoint.tensor_plan import Plan, PlannedTensor, decoder_layers, plain
from trtllm_dflash.config.families import family_named
from trtllm_dflash.config.target import TargetConfig


def plan_target(config: TargetConfig, tp_size: int) -> Plan:
    """Plan a target's tensors.

    Embedding and head are split by vocabulary rows when there are several ranks, padded with zero rows to equal
    parts; a tied head is then written as a tensor of its own. Rows of the source beyond ``vocab_size`` are padding,
    which could otherwise win as candidates, and are left out.

    Args:
        config: the target. tp_size: number of ranks.
    """
    names = family_named(config.family).tensor_names
    plan = Plan("target", ignored=names.ignored)
    vocab_rows = padded_rows(config.vocab_size, tp_size)
    vocab_rule = rows(Segment(vocab_rows, tp_size)) if tp_size > 1 else REPLICATED
    shape = (vocab_rows, config.hidden_size)

    def vocabulary(name: str, source: str) -> PlannedTensor:
        return PlannedTensor(
            name, shape, ((source, (config.vocab_size, config.hidden_size)),), vocab_rule, extra_rows=True
        )

    plan.tensors.append(vocabulary("transformer.vocab_embedding.weight", names.embedding))
    plan.tensors.extend(
        decoder_layers(config, names, output_bias=config.attention_output_bias, mlp_bias=config.mlp_bias, quantize=True)
    )
    plan.tensors.append(plain("transformer.ln_f.weight", names.final_norm, (config.hidden_size,)))
    if not config.tie_word_embeddings:
        plan.tensors.append(vocabulary("lm_head.weight", names.head))
    else:
        # Some checkpoints store the tied head a second time.
        plan.ignored = (*plan.ignored, names.head)
        if tp_size > 1:
            plan.tensors.append(vocabulary("lm_head.weight", names.embedding))
    return plan
