"""Tensor-parallel shards: put together they are the whole model again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_checkpoints import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, write_target, write_zlab

from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.checkpoint.read import Model, open_checkpoint
from trtllm_dflash.errors import CheckpointError

TP_SIZES = [2, 6]


def ranks(tmp_path: Path, target: Path, drafter: Path, tp_size: int, which: Model) -> list[dict[str, torch.Tensor]]:
    directory = tmp_path / f"tp{tp_size}"
    if not directory.exists():
        convert(str(target), str(drafter), directory, tp_size=tp_size)
    checkpoint = open_checkpoint(directory)
    assert checkpoint.mapping.tp_size == tp_size
    return [dict(checkpoint.tensors(which, rank)) for rank in range(tp_size)]


def heads_of(qkv: torch.Tensor, q_heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split rows of one rank's fused projection into [heads, head_dim, in]."""
    q, k, v = qkv.split([q_heads * HEAD_DIM, kv_heads * HEAD_DIM, kv_heads * HEAD_DIM])
    return tuple(part.unflatten(0, (-1, HEAD_DIM)) for part in (q, k, v))  # type: ignore[return-value]


@pytest.mark.parametrize("tp_size", TP_SIZES)
@pytest.mark.parametrize("which", ["target", "drafter"])
def test_decoder_layers_reassemble(tmp_path: Path, target: Path, drafter: Path, tp_size: int, which: Model) -> None:
    (whole,) = ranks(tmp_path, target, drafter, 1, which)
    shards = ranks(tmp_path, target, drafter, tp_size, which)
    layer = "transformer.layers.1."
    for name in ("mlp.fc.weight", "mlp.gate.weight"):
        assert torch.equal(torch.cat([shard[layer + name] for shard in shards]), whole[layer + name])
    for name in ("attention.dense.weight", "mlp.proj.weight"):
        assert torch.equal(torch.cat([shard[layer + name] for shard in shards], dim=1), whole[layer + name])
    for name in ("input_layernorm.weight", "post_layernorm.weight"):
        assert all(torch.equal(shard[layer + name], whole[layer + name]) for shard in shards)
    q, k, v = heads_of(whole[layer + "attention.qkv.weight"], HEADS, KV_HEADS)
    kv_per_rank = max(1, KV_HEADS // tp_size)
    parts = [heads_of(shard[layer + "attention.qkv.weight"], HEADS // tp_size, kv_per_rank) for shard in shards]
    assert torch.equal(torch.cat([part[0] for part in parts]), q)
    group = HEADS // KV_HEADS
    for rank, (_, own_k, own_v) in enumerate(parts):
        # Every query head of the rank finds the key/value head of its group on the same rank.
        for local in range(HEADS // tp_size):
            head = rank * (HEADS // tp_size) + local
            mine = local // (HEADS // tp_size // kv_per_rank)
            assert torch.equal(own_k[mine], k[head // group])
            assert torch.equal(own_v[mine], v[head // group])


@pytest.mark.parametrize("tp_size", TP_SIZES)
def test_vocabulary_is_split_and_padded(tmp_path: Path, target: Path, drafter: Path, tp_size: int) -> None:
    (whole,) = ranks(tmp_path, target, drafter, 1, "target")
    shards = ranks(tmp_path, target, drafter, tp_size, "target")
    for name in ("transformer.vocab_embedding.weight", "lm_head.weight"):
        joined = torch.cat([shard[name] for shard in shards])
        assert len({shard[name].shape for shard in shards}) == 1
        assert len(joined) - VOCAB < tp_size
        assert torch.equal(joined[:VOCAB], whole[name])
        assert not joined[VOCAB:].any()


def test_tied_head_is_written_only_for_several_ranks(tmp_path: Path, drafter: Path) -> None:
    target = write_target(tmp_path / "tied", tie_word_embeddings=True)
    (whole,) = ranks(tmp_path, target, drafter, 1, "target")
    assert "lm_head.weight" not in whole
    shards = ranks(tmp_path, target, drafter, 2, "target")
    for shard in shards:
        assert torch.equal(shard["lm_head.weight"], shard["transformer.vocab_embedding.weight"])


@pytest.mark.parametrize("tp_size", TP_SIZES)
def test_drafter_extras_are_replicated(tmp_path: Path, target: Path, drafter: Path, tp_size: int) -> None:
    (whole,) = ranks(tmp_path, target, drafter, 1, "drafter")
    shards = ranks(tmp_path, target, drafter, tp_size, "drafter")
    extras = [n for n in whole if n.startswith(("fc.", "hidden_norm", "candidate_selector")) or "conv" in n]
    assert len(extras) == 5 + 2 * 2 * 2
    for name in extras:
        assert all(torch.equal(shard[name], whole[name]) for shard in shards), name


def test_biases(tmp_path: Path, drafter: Path) -> None:
    """A bias of a row-parallel projection is added once, after the sum, so every rank holds it whole."""
    target = write_target(tmp_path / "biased", attention_bias=True, mlp_bias=True)
    (whole,) = ranks(tmp_path, target, drafter, 1, "target")
    shards = ranks(tmp_path, target, drafter, 2, "target")
    layer = "transformer.layers.0."
    for name in ("attention.dense.bias", "mlp.proj.bias"):
        assert all(torch.equal(shard[layer + name], whole[layer + name]) for shard in shards)
    assert torch.equal(torch.cat([shard[layer + "mlp.fc.bias"] for shard in shards]), whole[layer + "mlp.fc.bias"])
    q = whole[layer + "attention.qkv.bias"][: HEADS * HEAD_DIM]
    halves = [shard[layer + "attention.qkv.bias"][: HEADS * HEAD_DIM // 2] for shard in shards]
    assert torch.equal(torch.cat(halves), q)


@pytest.mark.parametrize("algo", ["fp8", "int8", "nvfp4"])
def test_quantised_shards_are_shards_of_the_quantised_whole(tmp_path: Path, target: Path, algo: str) -> None:
    """The numbers of a model do not depend on the number of ranks."""
    for tp_size in (1, 2):
        convert(str(target), None, tmp_path / f"tp{tp_size}", tp_size=tp_size, quantization=algo)
    whole = open_checkpoint(tmp_path / "tp1").tensors("target")
    shards = [open_checkpoint(tmp_path / "tp2").tensors("target", rank) for rank in range(2)]
    layer = "transformer.layers.0."
    for ending in ("weight", "weights_scaling_factor"):
        rows = [shard[f"{layer}mlp.fc.{ending}"].view(torch.uint8) for shard in shards]
        assert torch.equal(torch.cat(rows), whole[f"{layer}mlp.fc.{ending}"].view(torch.uint8))
    columns = [shard[f"{layer}mlp.proj.weight"].view(torch.uint8) for shard in shards]
    assert torch.equal(torch.cat(columns, dim=1), whole[f"{layer}mlp.proj.weight"].view(torch.uint8))
    scales = [shard[f"{layer}mlp.proj.weights_scaling_factor"] for shard in shards]
    expected = whole[f"{layer}mlp.proj.weights_scaling_factor"]
    if algo == "nvfp4":
        joined = torch.cat([scale.view(torch.uint8) for scale in scales], dim=1)
        assert torch.equal(joined, expected.view(torch.uint8))
    else:
        assert all(torch.equal(scale, expected) for scale in scales)


@pytest.mark.parametrize(
    ("tp_size", "words"), [(3, "2 key/value heads"), (4, "6 attention heads"), (12, "6 attention")]
)
def test_sizes_that_do_not_divide(tmp_path: Path, target: Path, tp_size: int, words: str) -> None:
    """Refused at convert, with the sizes that would work."""
    with pytest.raises(CheckpointError, match=f"the target's {words}") as caught:
        convert(str(target), None, tmp_path / "out", tp_size=tp_size)
    assert caught.value.hint == "tensor-parallel sizes that work for the target: 1, 2, 6"
    assert not (tmp_path / "out").exists()


def test_drafter_that_does_not_divide(tmp_path: Path, target: Path) -> None:
    """The same for the drafter's own geometry."""
    drafter = write_zlab(
        tmp_path / "drafter", num_attention_heads=HEADS // 2, head_dim=HEAD_DIM * 2, num_key_value_heads=1
    )
    with pytest.raises(CheckpointError, match="the drafter's 3 attention heads"):
        convert(str(target), str(drafter), tmp_path / "out", tp_size=2)


def test_nvfp4_blocks_per_rank(tmp_path: Path) -> None:
    target = write_target(tmp_path / "odd", intermediate_size=72)
    with pytest.raises(
        CheckpointError, match=r"mlp\.proj\.weight': 36 input columns per rank, expected a multiple of 16"
    ):
        convert(str(target), None, tmp_path / "out", tp_size=2, quantization="nvfp4")


def test_no_such_rank(tmp_path: Path, target: Path) -> None:
    convert(str(target), None, tmp_path / "out", tp_size=2)
    with pytest.raises(CheckpointError, match="has ranks 0 to 1, asked for rank 2"):
        open_checkpoint(tmp_path / "out").tensors("target", 2)
    with pytest.raises(CheckpointError, match="has no drafter"):
        open_checkpoint(tmp_path / "out").tensors("drafter")
    assert open_checkpoint(tmp_path / "out").target_config.hidden_size == HIDDEN
