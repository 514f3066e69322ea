"""The plan of a drafter: injection, decoder layers, and what DFlash 2 and the Speculators format add."""

from __future__ import annotations

from trtllm_dflash.checkpoint.tensor_plan import Plan, PlannedTensor, decoder_layers, plain
from trtllm_dflash.config.drafter import DrafterConfig
from trtllm_dflash.config.families import TensorNames

NAMES = TensorNames(layer="layers.{n}.", final_norm="norm.weight")
"""Names in z-lab and Speculators checkpoints."""

REFUSED = {
    "embed_tokens": "an embedding table of their own",
    "g_proj": "a gate per attention head",
    "aux_hidden_norms": "norms on single captured features",
    "sink": "attention sinks",
    "mask_embedding": "a stored mask embedding",
    "qkv_proj": "fused projections",
    "encoder.": "an encoder of the captured features",
    "d2t": "a reduced vocabulary",
    "lm_head": "a head of their own",
}
"""Parts of tensor names that only unsupported variants have."""

_CODEBOOKS = ("predecessor_codebook", "successor_codebook")


def plan_drafter(config: DrafterConfig, source_names: set[str], *, source_vocab_size: int) -> Plan:
    """Plan a drafter's tensors. Decoder layers are sharded like the target's; everything else is on every rank.

    Args:
        config: the drafter; its ``vocab_size`` is the target's.
        source_names: the source's tensor names (older trainers store codebooks as ``….weight``).
        source_vocab_size: rows of the stored codebooks.
    """
    hidden = config.hidden_size
    plan = Plan("drafter", ignored=NAMES.ignored)
    features = len(config.target_layer_ids) * config.target_hidden_size
    plan.tensors.append(plain("fc.weight", "fc.weight", (hidden, features)))
    plan.tensors.append(plain("hidden_norm.weight", "hidden_norm.weight", (hidden,)))
    plan.tensors.extend(
        decoder_layers(config, NAMES, output_bias=config.attention_bias, mlp_bias=False, quantize=False)
    )
    plan.tensors.append(plain("transformer.ln_f.weight", NAMES.final_norm, (hidden,)))
    if config.conv is not None:
        taps, groups = config.conv.kernel_size, hidden // config.conv.group_size
        for n in range(config.num_layers):
            for side in ("attention_conv", "mlp_conv"):
                source, ours = f"{NAMES.layer.format(n=n)}{side}", f"transformer.layers.{n}.{side}"
                plan.tensors += [
                    plain(f"{ours}.base_kernel", f"{source}.base_kernel", (2, taps, hidden)),
                    plain(
                        f"{ours}.kernel_projection.weight",
                        f"{source}.kernel_projection.weight",
                        (2 * taps * groups, hidden),
                    ),
                ]
    if config.selector is not None:
        rank = config.selector.rank
        for codebook in _CODEBOOKS:
            name = f"candidate_selector.{codebook}"
            source = name if name in source_names else f"{name}.weight"
            plan.tensors.append(
                PlannedTensor(
                    name,
                    (config.vocab_size, rank),
                    ((source if source in source_names else name, (source_vocab_size, rank)),),
                )
            )
        projection = "candidate_selector.hidden_projection.weight"
        plan.tensors.append(plain(projection, projection, (rank, hidden)))
    if config.source_format == "speculators":
        _plan_reduced_vocabulary(plan, config)
    return plan


def repeated_target_weights(config: DrafterConfig) -> tuple[str, ...]:
    """Tensors that may repeat the target's (embedding, then head) in a Speculators checkpoint.

    Older versions of Speculators stored them; they are left out of the plan and must equal the target's.
    """
    if config.source_format != "speculators":
        return ()
    return (
        ("embed_tokens.weight",) if config.draft_vocab_size is not None else ("embed_tokens.weight", "lm_head.weight")
    )


def _plan_reduced_vocabulary(plan: Plan, config: DrafterConfig) -> None:
    # t2d, the mask of drafted ids, repeats what d2t says; the verifier's norm and head serve its training only.
    plan.ignored = (*plan.ignored, "t2d", "verifier_norm.weight", "verifier_lm_head.weight")
    plan.ignored += repeated_target_weights(config)
    if config.draft_vocab_size is None:
        return
    head = (config.draft_vocab_size, config.hidden_size)
    plan.tensors.append(plain("lm_head.weight", "lm_head.weight", head))
    d2t = (config.draft_vocab_size,)
    plan.tensors.append(PlannedTensor("d2t", d2t, (("d2t", d2t),), integers=True))
