"""Checkpoints are complete or refused by name: cases I12, I15, I20, and unsupported options."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest_engine import edit_json
from engine_harness import DEMO_MODEL
from safetensors.torch import load_file, save_file

from moorage.engine import Engine, EngineConfig
from moorage.engine.config import load_model_config
from moorage.engine.errors import EngineError, ModelError, UnsupportedModel, WeightsError
from moorage.engine.weights import load_weights


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))


def load(directory: Path) -> None:
    load_weights(directory, load_model_config(directory), torch.float32)


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
    assert name in str(caught.value) or "upward" in str(caught.value)


def test_a_wrong_shape_and_values_that_are_no_numbers_are_named(checkpoint: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    change(checkpoint, lambda tensors: tensors.update({name: tensors[name].T.contiguous()[:-1]}))
    with pytest.raises(WeightsError, match=r"layers\.0\.self_attn\.o_proj"):
        load(checkpoint)
    shutil.rmtree(checkpoint)


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
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        load(checkpoint)


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
