"""Conversion of a pair: what is written is what was read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_checkpoints import (
    DRAFTER_LAYERS,
    HIDDEN,
    LAYERS,
    VOCAB,
    edit_config,
    rewrite,
    write_speculators,
    write_target,
    write_zlab,
)

from trtllm_dflash.checkpoint.convert import convert
from trtllm_dflash.checkpoint.read import open_checkpoint
from trtllm_dflash.config.drafter_formats import parse_drafter_config
from trtllm_dflash.config.families import parse_target_config
from trtllm_dflash.errors import CheckpointError, ConfigError, DFlashError

TRTLLM_KEYS = {
    "architecture", "dtype", "logits_dtype", "vocab_size", "max_position_embeddings", "hidden_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_size", "hidden_act",
    "intermediate_size", "norm_epsilon", "position_embedding_type", "rotary_base", "rotary_scaling",
    "use_parallel_embedding", "embedding_sharding_dim", "mapping", "quantization", "tie_word_embeddings",
}  # fmt: skip


def expected_layer(source: dict[str, torch.Tensor], prefix: str, n: int) -> dict[str, torch.Tensor]:
    theirs, ours = f"{prefix}layers.{n}.", f"transformer.layers.{n}."
    out = {
        f"{ours}attention.qkv.weight": torch.cat([source[f"{theirs}self_attn.{p}_proj.weight"] for p in "qkv"]),
        f"{ours}attention.dense.weight": source[f"{theirs}self_attn.o_proj.weight"],
        f"{ours}input_layernorm.weight": source[f"{theirs}input_layernorm.weight"],
        f"{ours}post_layernorm.weight": source[f"{theirs}post_attention_layernorm.weight"],
        f"{ours}mlp.fc.weight": source[f"{theirs}mlp.gate_proj.weight"],
        f"{ours}mlp.gate.weight": source[f"{theirs}mlp.up_proj.weight"],
        f"{ours}mlp.proj.weight": source[f"{theirs}mlp.down_proj.weight"],
    }
    for norm in "qk":
        if f"{theirs}self_attn.{norm}_norm.weight" in source:
            out[f"{ours}attention.{norm}_layernorm.weight"] = source[f"{theirs}self_attn.{norm}_norm.weight"]
    return out


def expected_target(source: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {
        "transformer.vocab_embedding.weight": source["model.embed_tokens.weight"],
        "transformer.ln_f.weight": source["model.norm.weight"],
    }
    if "lm_head.weight" in source:
        out["lm_head.weight"] = source["lm_head.weight"]
    for n in range(LAYERS):
        out |= expected_layer(source, "model.", n)
    return out


def expected_drafter(source: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {"transformer.ln_f.weight": source["norm.weight"]}
    for name in ("fc.weight", "hidden_norm.weight"):
        out[name] = source[name]
    out |= {name: tensor for name, tensor in source.items() if name.startswith("candidate_selector.")}
    for n in range(DRAFTER_LAYERS):
        out |= expected_layer(source, "", n)
        for side in ("attention_conv", "mlp_conv"):
            for part in ("base_kernel", "kernel_projection.weight"):
                if f"layers.{n}.{side}.{part}" in source:
                    out[f"transformer.layers.{n}.{side}.{part}"] = source[f"layers.{n}.{side}.{part}"]
    return out


def assert_same(found: Any, expected: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(dtype if tensor.is_floating_point() else tensor.dtype)), name


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_target_tensors(tmp_path: Path, family: str, tied: bool) -> None:
    """A tied head is not written a second time."""
    source = write_target(tmp_path / "target", family=family, tie_word_embeddings=tied)
    convert(str(source), None, tmp_path / "out")
    checkpoint = open_checkpoint(tmp_path / "out")
    assert_same(checkpoint.tensors("target"), expected_target(load_file(source / "model.safetensors")))
    assert checkpoint.target_config == parse_target_config(source)
    assert checkpoint.drafter_config is None


def test_tied_head_that_is_stored_a_second_time(tmp_path: Path) -> None:
    """Left out, as transformers does, whatever it holds."""
    source = write_target(tmp_path / "target", tie_word_embeddings=True)
    expected = expected_target(load_file(source / "model.safetensors"))
    rewrite(source, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(VOCAB, HIDDEN)}))
    convert(str(source), None, tmp_path / "out")
    assert_same(open_checkpoint(tmp_path / "out").tensors("target"), expected)


def test_target_biases(tmp_path: Path) -> None:
    source = write_target(tmp_path / "target", attention_bias=True, mlp_bias=True)
    convert(str(source), None, tmp_path / "out")
    tensors, theirs = open_checkpoint(tmp_path / "out").tensors("target"), load_file(source / "model.safetensors")
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    qkv = torch.cat([theirs[f"{attention}{p}_proj.bias"] for p in "qkv"])
    assert torch.equal(tensors["transformer.layers.1.attention.qkv.bias"], qkv)
    for ours, name in (
        ("attention.dense", f"{attention}o_proj"),
        ("mlp.fc", f"{mlp}gate_proj"),
        ("mlp.gate", f"{mlp}up_proj"),
        ("mlp.proj", f"{mlp}down_proj"),
    ):
        assert torch.equal(tensors[f"transformer.layers.1.{ours}.bias"], theirs[f"{name}.bias"])


@pytest.mark.parametrize("version", [1, 2])
def test_zlab_drafter_tensors(tmp_path: Path, target: Path, version: int) -> None:
    source = write_zlab(tmp_path / "drafter", version)
    convert(str(target), str(source), tmp_path / "out")
    checkpoint = open_checkpoint(tmp_path / "out")
    assert_same(checkpoint.tensors("drafter"), expected_drafter(load_file(source / "model.safetensors")))
    assert checkpoint.drafter_config is not None
    assert checkpoint.drafter_config.version == version
    assert checkpoint.drafter_config.dtype == checkpoint.target_config.dtype == "float32"


def test_codebooks_with_the_older_names(tmp_path: Path, target: Path, drafter: Path) -> None:
    original = load_file(drafter / "model.safetensors")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("predecessor_codebook", "successor_codebook"):
            tensors[f"candidate_selector.{name}.weight"] = tensors.pop(f"candidate_selector.{name}")

    rewrite(drafter, rename)
    convert(str(target), str(drafter), tmp_path / "out")
    assert_same(open_checkpoint(tmp_path / "out").tensors("drafter"), expected_drafter(original))


def test_speculators_reduced_vocabulary(tmp_path: Path, target: Path) -> None:
    """The drafter's own head and the offsets are kept, the mask of drafted ids is not."""
    source = write_speculators(tmp_path / "drafter", draft_vocab=32)
    theirs = load_file(source / "model.safetensors")
    convert(str(target), str(source), tmp_path / "out")
    checkpoint = open_checkpoint(tmp_path / "out")
    expected = expected_drafter(theirs) | {"lm_head.weight": theirs["lm_head.weight"], "d2t": theirs["d2t"]}
    assert_same(checkpoint.tensors("drafter"), expected)
    assert checkpoint.drafter_config is not None
    assert checkpoint.drafter_config.draft_vocab_size == 32
    assert torch.equal(checkpoint.tensors("drafter")["d2t"] + torch.arange(32), torch.arange(32) * 7)


@pytest.mark.parametrize(("offset", "words"), [(1000, "maps a drafted id to 1000"), (7, "two drafted ids to one")])
def test_speculators_offsets_are_checked(tmp_path: Path, target: Path, offset: int, words: str) -> None:
    source = write_speculators(tmp_path / "drafter", draft_vocab=32)
    rewrite(source, lambda tensors: tensors["d2t"][:1].fill_(offset))
    with pytest.raises(CheckpointError, match=words):
        convert(str(target), str(source), tmp_path / "out")


def test_speculators_copies_of_the_targets_tables(tmp_path: Path, target: Path) -> None:
    """Older versions store the verifier's embedding and head: equal copies are left out, others refused."""
    source = write_speculators(tmp_path / "drafter")
    theirs = load_file(source / "model.safetensors")
    tables = load_file(target / "model.safetensors")

    def add_copies(tensors: dict[str, torch.Tensor]) -> None:
        tensors["embed_tokens.weight"] = tables["model.embed_tokens.weight"].to(torch.bfloat16)
        tensors["lm_head.weight"] = tables["lm_head.weight"].to(torch.bfloat16)
        tensors["verifier_norm.weight"] = tables["model.norm.weight"]

    rewrite(source, add_copies)
    convert(str(target), str(source), tmp_path / "out")
    assert_same(open_checkpoint(tmp_path / "out").tensors("drafter"), expected_drafter(theirs))
    rewrite(source, lambda tensors: tensors["lm_head.weight"][-1].add_(1))
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight': found other values than the target's"):
        convert(str(target), str(source), tmp_path / "other")


@pytest.mark.parametrize("drafter_vocab", [VOCAB - 10, VOCAB + 14])
def test_codebooks_follow_the_targets_vocabulary(tmp_path: Path, target: Path, drafter_vocab: int) -> None:
    """Surplus rows are cut; tokens the drafter does not know get zero rows, so the head alone scores them."""
    source = write_zlab(tmp_path / "drafter", vocab=drafter_vocab)
    report = convert(str(target), str(source), tmp_path / "out")
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.drafter_config is not None
    assert checkpoint.drafter_config.vocab_size == VOCAB
    known = min(drafter_vocab, VOCAB)
    for name in ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"):
        found, stored = checkpoint.tensors("drafter")[name], load_file(source / "model.safetensors")[name]
        assert found.shape[0] == VOCAB
        assert torch.equal(found[:known], stored[:known].float())
        assert not found[known:].any()
    assert any("drafter vocabulary" in note for note in report.notes)


def test_padded_vocabulary_rows_are_left_out(tmp_path: Path, target: Path) -> None:
    """Padding rows with large values could win as candidates."""
    original = load_file(target / "model.safetensors")

    def pad(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.cat([tensors[name], torch.full((64, HIDDEN), 1e4)])

    rewrite(target, pad)
    report = convert(str(target), None, tmp_path / "out")
    assert_same(open_checkpoint(tmp_path / "out").tensors("target"), expected_target(original))
    assert sum("64 rows beyond vocab_size" in note for note in report.notes) == 2


def test_sharded_source(tmp_path: Path, target: Path) -> None:
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    weight_map = {}
    for n, name in enumerate(sorted(tensors)):
        weight_map[name] = f"model-{n % 3}.safetensors"
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, target / file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    convert(str(target), None, tmp_path / "out")
    assert_same(open_checkpoint(tmp_path / "out").tensors("target"), expected_target(tensors))
    (target / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors: no such file"):
        convert(str(target), None, tmp_path / "other")


@pytest.mark.parametrize(("dtype", "stored"), [("auto", "bfloat16"), ("float32", "float32"), ("float16", "float16")])
def test_compute_dtype(tmp_path: Path, drafter: Path, dtype: str, stored: str) -> None:
    source = write_target(tmp_path / "target", dtype="bfloat16")
    report = convert(str(source), str(drafter), tmp_path / "out", dtype=dtype)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert report.dtype == checkpoint.target_config.dtype == stored
    for which in ("target", "drafter"):
        assert {tensor.dtype for tensor in checkpoint.tensors(which).values()} == {getattr(torch, stored)}  # type: ignore[arg-type]


def test_dtype_that_no_file_names(tmp_path: Path) -> None:
    source = write_target(tmp_path / "target", dtype="bfloat16")
    edit_config(source, dtype=None, torch_dtype=None)
    assert convert(str(source), None, tmp_path / "out").dtype == "bfloat16"


def test_overflow_in_float16(tmp_path: Path, target: Path) -> None:
    rewrite(target, lambda tensors: tensors["model.norm.weight"][3:4].fill_(1e5))
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight': found values that are not finite as float16"):
        convert(str(target), None, tmp_path / "out", dtype="float16")


def test_trtllm_keys(tmp_path: Path, target: Path, drafter: Path) -> None:
    convert(str(target), str(drafter), tmp_path / "out", kv_cache_dtype="fp8", quantization="int8")
    config = json.loads((tmp_path / "out" / "target" / "config.json").read_text())
    assert set(config) == TRTLLM_KEYS | {"dflash_target"}
    assert config["mapping"] == {"world_size": 1, "tp_size": 1, "pp_size": 1}
    assert config["quantization"]["quant_algo"] == "W8A16"
    assert config["quantization"]["kv_cache_quant_algo"] == "FP8"
    drafter_config = json.loads((tmp_path / "out" / "drafter" / "config.json").read_text())
    assert set(drafter_config) == TRTLLM_KEYS | {"dflash_drafter"}
    assert drafter_config["quantization"]["quant_algo"] is None
    quantization = open_checkpoint(tmp_path / "out").quantization
    assert (quantization.algo, quantization.kv_cache_dtype) == ("int8", "fp8")


def test_root_config(tmp_path: Path, target: Path, drafter: Path) -> None:
    report = convert(str(target), str(drafter), tmp_path / "out")
    root = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (root["format_version"], root["kind"]) == (1, "checkpoint")
    parsed = parse_drafter_config(drafter)
    assert root["pairing"]["block_size"] == parsed.block_size == 8
    assert root["pairing"]["mask_token_id"] == 3
    assert root["pairing"]["target_layer_ids"] == [0, 2, 3]
    assert root["source"]["target"] == {"name": str(target), "revision": None}
    on_disk = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert set(root["files"]) == on_disk - {"config.json"}
    assert report.bytes == sum(file["bytes"] for file in root["files"].values())
    assert report.tensors == sum(len(open_checkpoint(tmp_path / "out").tensors(w)) for w in ("target", "drafter"))


def test_tokenizer_is_copied(tmp_path: Path, target: Path) -> None:
    (target / "chat_template.jinja").write_text("{{ messages }}")
    convert(str(target), None, tmp_path / "out")
    directory = open_checkpoint(tmp_path / "out").tokenizer_dir
    assert directory is not None
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (directory / name).read_bytes() == (target / name).read_bytes()


def test_target_without_tokenizer(tmp_path: Path, target: Path) -> None:
    (target / "tokenizer.json").unlink()
    report = convert(str(target), None, tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").tokenizer_dir is None
    assert any("no tokenizer" in note for note in report.notes)
    (target / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"found a tokenizer in tokenizer\.model, expected tokenizer\.json"):
        convert(str(target), None, tmp_path / "other")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), r"'model\.norm\.weight' is missing, expected shape \[96\]"),
        (lambda t: t.update(extra=torch.zeros(2)), r"1 tensors that a target .*: 'extra' \[2\]"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(97)}),
            r"model\.safetensors: tensor 'model\.norm\.weight': found shape \[97\], expected \[96\]",
        ),
        (
            lambda t: t.update({"model.embed_tokens.weight": torch.zeros(VOCAB - 1, HIDDEN)}),
            rf"found shape \[{VOCAB - 1}, 96\], expected \[{VOCAB}, 96\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(HIDDEN, dtype=torch.int8)}),
            "found dtype I8, expected one of",
        ),
        (
            # A head stored quantised, whose scale nobody would apply.
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}),
            r"'lm_head\.weight': found dtype F8_E4M3, expected one of",
        ),
        (
            # Packed two to a byte: the scale explains the shape.
            lambda t: t.update(
                {
                    "lm_head.weight": torch.zeros(VOCAB, HIDDEN // 2, dtype=torch.uint8),
                    "lm_head.weight_scale": torch.ones(VOCAB),
                }
            ),
            r"'lm_head\.weight_scale': targets with weights that are stored quantised are not supported",
        ),
        (lambda t: t["model.norm.weight"][:1].fill_(float("nan")), "not finite"),
    ],
)
def test_wrong_target_tensors(tmp_path: Path, target: Path, change: Any, words: str) -> None:
    """Tensor, file, found and expected; nothing is left behind."""
    rewrite(target, change)
    with pytest.raises(CheckpointError, match=words):
        convert(str(target), None, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["target"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("embed_tokens.weight", "an embedding table of their own"),
        ("layers.0.self_attn.g_proj.weight", "a gate per attention head"),
        ("aux_hidden_norms.0.weight", "norms on single captured features"),
        ("layers.0.self_attn.sinks", "attention sinks"),
        ("lm_head.weight", "a head of their own"),
        ("d2t", "a reduced vocabulary"),
        ("layers.0.mlp.up_proj.weight_scale", "stored quantised"),
        ("layers.0.mlp.bias", "1 tensors that a drafter"),
    ],
)
def test_unsupported_drafter_tensors(tmp_path: Path, target: Path, drafter: Path, name: str, words: str) -> None:
    """A reduced vocabulary of version 2, and the variants that only their tensors give away."""
    rewrite(drafter, lambda tensors: tensors.update({name: torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=words):
        convert(str(target), str(drafter), tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["candidate_selector.predecessor_codebook", "layers.1.mlp_conv.base_kernel", "hidden_norm.weight"]
)
def test_missing_drafter_tensors(tmp_path: Path, target: Path, drafter: Path, name: str) -> None:
    rewrite(drafter, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"tensor '{name}' is missing"):
        convert(str(target), str(drafter), tmp_path / "out")


def test_swapped_directories(tmp_path: Path, target: Path, drafter: Path) -> None:
    """Says which is which before any tensor name is read."""
    with pytest.raises(ConfigError, match="holds a DFlash drafter") as caught:
        convert(str(drafter), str(target), tmp_path / "out")
    assert caught.value.hint is not None
    assert "--target" in caught.value.hint
    with pytest.raises(ConfigError, match="looks like a target model"):
        convert(str(target), str(target), tmp_path / "out")


def test_drafter_of_another_target(tmp_path: Path, target: Path) -> None:
    drafter = write_zlab(tmp_path / "drafter", num_target_layers=LAYERS + 1)
    with pytest.raises(ConfigError, match="trained for a target of 5 layers"):
        convert(str(target), str(drafter), tmp_path / "out")


def test_pickled_weights(tmp_path: Path, target: Path) -> None:
    (target / "model.safetensors").rename(target / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        convert(str(target), None, tmp_path / "out")


def test_truncated_source(tmp_path: Path, target: Path) -> None:
    data = (target / "model.safetensors").read_bytes()
    (target / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        convert(str(target), None, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "words"),
    [("no-such-dir", "no such directory, and not a hub id"), ("a/b/c", "no such directory"), ("", "no such directory")],
)
def test_no_such_model(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        convert(name, None, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "fp32"}, "--dtype: found 'fp32'"),
        ({"quantization": "int4"}, "--quantization: found 'int4'"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype: found 'int8'"),
        ({"tp_size": 0}, "--tp-size: found 0"),
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DFlashError, match=words):
        convert("demo", None, tmp_path / "out", **options)
