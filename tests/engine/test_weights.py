"""Checkpoints are complete or refused by name: cases I12, I14, I15, I20, unsupported options."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest_engine import edit_json, make_checkpoint
from engine_harness import DEMO_MODEL
from safetensors.torch import load_file, save_file

from moorage.engine import Engine, EngineConfig
from moorage.engine.config import load_model_config
from moorage.engine.errors import EngineError, ModelError, UnsupportedModel, WeightsError
from moorage.engine.model import Decoder
from moorage.engine.weights import Weights, load_weights, model_fingerprint


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))


def load(directory: Path) -> Weights:
    return load_weights(directory, load_model_config(directory), torch.float32)


def change(directory: Path, edit) -> None:  # type: ignore[no-untyped-def]
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def test_a_whole_checkpoint_loads_and_its_digest_names_its_content(checkpoint: Path) -> None:
    config = load_model_config(checkpoint)
    first = load_weights(checkpoint, config, torch.float32)
    assert first.digest == load_weights(checkpoint, config, torch.float32).digest
    change(checkpoint, lambda tensors: tensors["model.norm.weight"].mul_(2))
    assert first.digest != load_weights(checkpoint, config, torch.float32).digest
    assert all(bool(torch.isfinite(tensor).all()) for tensor in first.parameters.values())


def split_in_two(directory: Path) -> None:
    """The same checkpoint as two shards and an index."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[:40], "model-2.safetensors": names[40:]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, directory / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def fuse_experts(directory: Path) -> None:
    """The same checkpoint in transformers' fused layout."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(3):
            prefix = f"model.layers.{layer}.mlp.experts."
            parts = [
                [tensors.pop(f"{prefix}{expert}.{part}_proj.weight") for expert in range(8)]
                for part in ("gate", "up", "down")
            ]
            gate, up, down = (torch.stack(part) for part in parts)
            tensors[prefix + "gate_up_proj"] = torch.cat((gate, up), dim=1)
            tensors[prefix + "down_proj"] = down

    change(directory, edit)


@pytest.mark.parametrize("rewrite", [split_in_two, fuse_experts])
def test_sharding_and_spelling_change_neither_parameters_nor_digest(
    checkpoint: Path, rewrite: Callable[[Path], None]
) -> None:
    before = load(checkpoint)
    rewrite(checkpoint)
    after = load(checkpoint)
    assert after.digest == before.digest
    assert after.parameters.keys() == before.parameters.keys()
    for name, tensor in before.parameters.items():
        assert torch.equal(after.parameters[name], tensor), name


def test_the_fingerprint_names_all_that_kv_depends_on(checkpoint: Path) -> None:
    config = load_model_config(checkpoint)
    one = model_fingerprint(config, b"digest", torch.float32, "block 16")
    assert one == model_fingerprint(config, b"digest", torch.float32, "block 16")
    assert len(one) == 16
    edit_json(checkpoint / "config.json", norm_topk_prob=False)
    others = {
        model_fingerprint(load_model_config(checkpoint), b"digest", torch.float32, "block 16"),
        model_fingerprint(config, b"another", torch.float32, "block 16"),
        model_fingerprint(config, b"digest", torch.bfloat16, "block 16"),
        model_fingerprint(config, b"digest", torch.float32, "block 32"),
    }
    assert len(others | {one}) == 5


def test_i14_a_tied_head_is_the_embedding_itself(checkpoint: Path) -> None:
    weights = load(checkpoint)
    assert "head" not in weights.parameters
    decoder = Decoder(load_model_config(checkpoint), weights)
    assert decoder._head.data_ptr() == weights.parameters["embedding"].data_ptr()


def test_i14_a_stored_head_of_a_tied_model_must_be_the_embedding(checkpoint: Path) -> None:
    digest = load(checkpoint).digest
    embedding = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    change(checkpoint, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    assert load(checkpoint).digest == digest
    change(checkpoint, lambda tensors: tensors["lm_head.weight"][5, 7].add_(1))
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs .*tie_word_embeddings"):
        load(checkpoint)


def test_i14_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "untied", tie_word_embeddings=False)
    assert "head" in load(directory).parameters
    change(directory, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(WeightsError, match=r"1 tensors are missing: lm_head\.weight"):
        load(directory)


def test_i12_a_shard_that_is_deleted_is_named(checkpoint: Path) -> None:
    split_in_two(checkpoint)
    (checkpoint / "model-2.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"lacks model-2\.safetensors"):
        load(checkpoint)


def test_an_index_reaches_no_file_outside_its_folder(checkpoint: Path) -> None:
    split_in_two(checkpoint)
    (checkpoint.parent / "other.safetensors").write_bytes(b"")
    index = {"weight_map": {"a": "../other.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"outside its folder: \.\./other"):
        load(checkpoint)


def test_i12_a_missing_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        load(checkpoint)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(DEMO_MODEL / "model.safetensors", checkpoint / "model-1.safetensors")
    with pytest.raises(WeightsError, match=r"model-2\.safetensors"):
        load(checkpoint)


def test_i15_a_missing_and_a_renamed_tensor_are_named(checkpoint: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.experts.3.upward.weight"] = tensors.pop(name)

    change(checkpoint, rename)
    with pytest.raises(WeightsError) as caught:
        load(checkpoint)
    # Both sides of the renaming, each with layer, expert and tensor.
    assert f"1 tensors are missing: {name}" in str(caught.value)
    assert "model.layers.1.mlp.experts.3.upward.weight" in str(caught.value)


def test_a_wrong_shape_and_values_that_are_no_numbers_are_named(checkpoint: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    change(checkpoint, lambda tensors: tensors.update({name: tensors[name].T.contiguous()[:-1]}))
    with pytest.raises(WeightsError, match=r"layers\.0\.self_attn\.o_proj.* \[127, 64\]"):
        load(checkpoint)


@pytest.mark.parametrize("rows", [31, 33, 0])
def test_a_part_of_a_fused_parameter_with_other_rows_is_named(checkpoint: Path, rows: int) -> None:
    name = "model.layers.0.self_attn.v_proj.weight"  # the last third of qkv; 64 rows are right
    change(checkpoint, lambda tensors: tensors.update({name: torch.zeros(rows, 64)}))
    with pytest.raises(WeightsError, match=r"self_attn\.v_proj"):
        load(checkpoint)


def test_a_number_in_the_place_of_a_matrix_is_named(checkpoint: Path) -> None:
    change(checkpoint, lambda tensors: tensors.update({"model.norm.weight": torch.tensor(1.0)}))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight has shape \[\]"):
        load(checkpoint)


def test_a_quantised_tensor_is_not_read_as_plain_numbers(checkpoint: Path) -> None:
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    change(
        checkpoint, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)})
    )
    with pytest.raises(WeightsError, match=r"experts\.0\.up_proj.* float8_e4m3fn|float8_e4m3fn"):
        load(checkpoint)


def test_nan_weights_are_refused(checkpoint: Path) -> None:
    change(
        checkpoint, lambda tensors: tensors["model.layers.2.mlp.gate.weight"][0].fill_(float("nan"))
    )
    with pytest.raises(WeightsError, match=r"layers\.2"):
        load(checkpoint)


@pytest.mark.parametrize("damage", ["cut", "extra", "huge header", "header only", "not at all"])
def test_i20_a_damaged_file_is_named_with_sizes(checkpoint: Path, damage: str) -> None:
    path = checkpoint / "model.safetensors"
    data = path.read_bytes()
    header = int.from_bytes(data[:8], "little")
    path.write_bytes(
        {
            "cut": data[:-1],
            "extra": data + b"abc",
            "huge header": (10**13).to_bytes(8, "little") + data[8:],
            "header only": data[: 8 + header],
            "not at all": b"hello",
        }[damage]
    )
    sizes = {
        "cut": (len(data) - 1, len(data)),
        "extra": (len(data) + 3, len(data)),
        "huge header": (len(data), 10**13 + 8),
        "header only": (8 + header, len(data)),
        "not at all": (5,),
    }[damage]
    with pytest.raises(WeightsError, match=r"model\.safetensors") as caught:
        load(checkpoint)
    assert all(f"{size}" in str(caught.value) for size in sizes), caught.value


def test_i20_a_shard_without_tensors_is_legal(checkpoint: Path) -> None:
    split_in_two(checkpoint)
    save_file({}, checkpoint / "model-3.safetensors")
    index = checkpoint / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=weight_map | {"nothing": "model-3.safetensors"})
    assert load(checkpoint).num_bytes > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"use_sliding_window": True}, "sliding"),
        ({"num_key_value_heads": 3}, "3"),
        ({"num_experts_per_tok": 99}, "99"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"hidden_act": "gelu"}, "gelu"),
    ],
)
def test_what_nobody_here_computes_is_refused_by_name(
    checkpoint: Path, changes: dict[str, object], words: str
) -> None:
    edit_json(checkpoint / "config.json", **changes)
    with pytest.raises((UnsupportedModel, ModelError), match=words):
        load_model_config(checkpoint)


def test_an_engine_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"nowhere"):
        Engine(EngineConfig(model_dir=tmp_path / "nowhere"))
    with pytest.raises(EngineError, match=r"config\.json"):
        Engine(EngineConfig(model_dir=tmp_path))
