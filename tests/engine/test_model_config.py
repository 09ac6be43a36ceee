"""config.json → ModelConfig: both spellings, and every refusal by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moorage.engine.config import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelConfig,
    MoeSpec,
    load_model_config,
)
from moorage.engine.errors import ModelError, UnsupportedModel

VALUES: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LAYER = LayerSpec(
    AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=32, qk_norm=True, rope_theta=5000.0),
    MoeSpec(num_experts=8, top_k=2, intermediate=48, renormalize=True),
)
CONFIG = ModelConfig(
    family="qwen3_moe",
    hidden=64,
    layers=(LAYER, LAYER),
    vocab_size=100,
    context_len=1024,
    norm_eps=1e-5,
    tied_embeddings=True,
    checkpoint_dtype="bfloat16",
)


def read(directory: Path, **changes: Any) -> ModelConfig:
    """The config with `changes`; a change to None takes the key out."""
    values = {name: value for name, value in (VALUES | changes).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(values))
    return load_model_config(directory)


def test_every_field_is_read(tmp_path: Path) -> None:
    assert read(tmp_path) == CONFIG


def test_newer_spellings_mean_the_same(tmp_path: Path) -> None:
    newer = read(
        tmp_path,
        num_experts=None,
        num_local_experts=8,
        rope_theta=None,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        torch_dtype=None,
        dtype="bfloat16",
    )
    assert newer == CONFIG
    assert read(tmp_path, model_type=None) == CONFIG, "architectures alone name the family"
    assert read(tmp_path, rope_scaling={"type": "default"}) == CONFIG


def test_layers_without_routing_are_dense(tmp_path: Path) -> None:
    dense = replace(LAYER, feed_forward=DenseSpec(96))
    assert read(tmp_path, mlp_only_layers=[1]).layers == (LAYER, dense)
    assert read(tmp_path, decoder_sparse_step=2).layers == (dense, LAYER)
    assert read(tmp_path, intermediate_size=None) == CONFIG, "not needed where nothing is dense"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, ["mamba", "qwen3_moe"]),
        ({"architectures": ["Qwen3MoeForTokenClassification"]}, ["TokenClassification"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding_attention"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling", "yarn"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ["full_attention"]),
        ({"rope_parameters": {"rope_theta": -1.0}}, ["rope_theta", "-1.0"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "4"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok", "9", "8"]),
        ({"head_dim": 7}, ["head_dim", "7"]),
        ({"head_dim": None, "hidden_size": 66}, ["66", "head_dim"]),
        ({"mlp_only_layers": ["1"]}, ["mlp_only_layers"]),
    ],
)
def test_what_nobody_computes_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        read(tmp_path, **changes)
    assert all(name in str(refused.value) for name in [*named, "config.json"]), refused.value


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": None}, "vocab_size is None"),
        ({"num_key_value_heads": None}, "num_key_value_heads is None"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'"),
    ],
)
def test_absurd_values_are_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match="config.json") as refused:
        read(tmp_path, **changes)
    assert named in str(refused.value)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_model_config(tmp_path)
    for text, named in (("{", "cannot be read"), ("[]", "list"), ("[" * 10**5, "cannot be read")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=named):
            load_model_config(tmp_path)


def test_the_shape_in_the_fingerprint_tells_layer_kinds_apart() -> None:
    dense = replace(CONFIG, layers=(LAYER, replace(LAYER, feed_forward=DenseSpec(48))))
    assert dense.canonical() != CONFIG.canonical()
    assert replace(CONFIG, context_len=2048).canonical() == CONFIG.canonical()
