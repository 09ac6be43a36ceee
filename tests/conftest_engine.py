"""Tiny random checkpoints made by transformers, and a harness around the real engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from engine_harness import DEMO_MODEL, EngineHarness

from moorage.engine import EngineConfig


def make_checkpoint(directory: Path, *, seed: int = 0, **changes: object) -> Path:
    """A random Qwen3-MoE of a few 100K parameters, saved by transformers, with the demo model's tokenizer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    values: dict[str, object] = {
        "vocab_size": 2560,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "eos_token_id": 2,
        "bos_token_id": None,
    } | changes
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**values)).eval()
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_MODEL / name, directory / name)
    return directory


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def start_engine(tiny_checkpoint: Path) -> Iterator[Callable[..., EngineHarness]]:
    """Starts engines on the tiny checkpoint (fp32, freed blocks NaN-filled) and checks the books at the end."""
    started: list[EngineHarness] = []

    def start(**changes: object) -> EngineHarness:
        values: dict[str, object] = {
            "model_dir": tiny_checkpoint,
            "dtype": "float32",
            "num_blocks": 256,
            "fill_freed_with_nan": True,
        } | changes
        harness = EngineHarness(EngineConfig(**values))  # type: ignore[arg-type]
        started.append(harness)
        return harness

    yield start
    for harness in started:
        harness.close()


def edit_json(path: Path, **changes: object) -> None:
    values = json.loads(path.read_text())
    values.update(changes)
    path.write_text(json.dumps(values))
