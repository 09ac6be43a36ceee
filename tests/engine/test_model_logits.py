"""Logits against transformers on the same files, and bits that do not depend on batch or chunk."""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
import torch
from engine_harness import DEMO_MODEL
from torch.nn import functional

from moorage.engine.attention import AttentionBatch
from moorage.engine.config import load_model_config
from moorage.engine.model import Decoder
from moorage.engine.tokenizer import ModelTokenizer
from moorage.engine.weights import load_weights

BLOCK = 16


class Run:
    """A decoder over its own pool, fed rows of several sequences; unwritten slots hold NaN."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, num_blocks: int = 64) -> None:
        config = load_model_config(model_dir)
        attention = config.attention
        self.decoder = Decoder(config, load_weights(model_dir, config, dtype))
        shape = (
            num_blocks,
            len(config.layers),
            2,
            attention.num_kv_heads,
            BLOCK,
            attention.head_dim,
        )
        self.pool = torch.full(shape, float("nan"), dtype=dtype)

    def step(self, *parts: tuple[list[int], int, list[int]]) -> torch.Tensor:
        """parts: (token ids, first position, block table) per sequence → logits of all rows, fp32 [M, V]."""
        ids = [token for tokens, _, _ in parts for token in tokens]
        positions = [first + i for tokens, first, _ in parts for i in range(len(tokens))]
        width = max(len(table) for _, _, table in parts)
        slots = [
            table[(first + i) // BLOCK] * BLOCK + (first + i) % BLOCK
            for tokens, first, table in parts
            for i in range(len(tokens))
        ]
        ends = torch.tensor([len(tokens) for tokens, _, _ in parts]).cumsum(0).tolist()
        batch = AttentionBatch(
            block_tables=torch.tensor(
                [table + [0] * (width - len(table)) for _, _, table in parts]
            ),
            block_deltas=None,
            context_lens=torch.tensor([first + len(tokens) for tokens, first, _ in parts]),
            cu_seqlens=torch.tensor([0, *ends]),
            slot_mapping=torch.tensor(slots),
        )
        with torch.inference_mode():
            hidden = self.decoder.forward(
                torch.tensor(ids), torch.tensor(positions), batch, self.pool
            )
            return self.decoder.logits(hidden)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(
        10, 2500, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def transformers_logits(model_dir: Path, ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    from transformers import Qwen3MoeForCausalLM

    return _logits(Qwen3MoeForCausalLM.from_pretrained(model_dir, dtype=dtype).eval(), ids)


def _logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0].float()
        return logits


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("which", ["tiny", "demo"])
def test_fp32_logits_equal_transformers(which: str, tiny_checkpoint: Path) -> None:
    model_dir = tiny_checkpoint if which == "tiny" else DEMO_MODEL
    ids = prompt(150, 1)
    ours = Run(model_dir, torch.float32).step((ids, 0, list(range(5, 15))))
    error = relative(ours, transformers_logits(model_dir, ids, torch.float32))
    print(f"{which}: max|a - b| / max|ref| = {error:.2e}")
    assert error < 1e-4


def test_bf16_logits_are_as_near_to_fp32_as_transformers_bf16() -> None:
    """Over 12 pieces of real text, each by its median row.

    Where bf16 noise turns an expert's choice, that row and all that read it go another way, on
    either side at random: one piece alone, or a mean over rows, compares nothing but such turns.
    """
    from transformers import Qwen3MoeForCausalLM

    text = (DEMO_MODEL.parents[2] / "LICENSE").read_text()
    ids = ModelTokenizer(DEMO_MODEL).encode(text, allow_special=False)
    pieces = [ids[at : at + 60] for at in range(0, 720, 60)]
    run = Run(DEMO_MODEL, torch.bfloat16)
    ours = [run.step((piece, 0, [3, 0, 2, 1])) for piece in pieces]
    exact, theirs = (
        [_logits(model, piece) for piece in pieces]
        for model in (
            Qwen3MoeForCausalLM.from_pretrained(DEMO_MODEL, dtype=dtype).eval()
            for dtype in (torch.float32, torch.bfloat16)
        )
    )
    distance, reference = (
        geometric_mean(
            float((1 - functional.cosine_similarity(a.double(), b.double(), dim=1)).median())
            for a, b in zip(found, exact, strict=True)
        )
        for found in (ours, theirs)
    )
    print(f"1 - cosine to fp32: ours {distance:.2e}, transformers {reference:.2e}")
    assert 1e-7 < distance < 1.2 * reference < 1e-3


VARIANTS: dict[str, dict[str, object]] = {
    "untied head": {"tie_word_embeddings": False},
    "a dense layer": {"mlp_only_layers": [1]},
    "every second layer routed": {"decoder_sparse_step": 2},
    "one expert a token": {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "as many KV heads as heads": {"num_key_value_heads": 4},
    "another rope base": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "another epsilon": {"rms_norm_eps": 10.0},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_family_equal_transformers(tmp_path: Path, variant: str) -> None:
    from conftest_engine import make_checkpoint

    directory = make_checkpoint(tmp_path / "model", seed=1, **VARIANTS[variant])
    ids = prompt(40, 6)
    ours = Run(directory, torch.float32).step((ids, 0, [3, 1, 2]))
    assert relative(ours, transformers_logits(directory, ids, torch.float32)) < 1e-4


def test_an_id_outside_the_vocabulary_fails_before_any_kv_is_written(tiny_checkpoint: Path) -> None:
    run = Run(tiny_checkpoint, torch.float32)
    with pytest.raises(IndexError):
        run.step(([5, 2560], 0, [0]))
    assert bool(run.pool.isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_any_chunking_and_any_batch_gives_the_same_bits(
    tiny_checkpoint: Path, dtype: torch.dtype
) -> None:
    # 150 tokens: more than one tile of keys, and a last block that is not full.
    ids, other = prompt(150, 3), prompt(41, 4)
    table, other_table = [9, 3, 12, 1, 30, 7, 22, 40, 5, 11], [2, 4, 6]
    whole_run = Run(tiny_checkpoint, dtype)
    whole = whole_run.step((ids, 0, table))
    for chunk in (1, 7, 16, 64, 130):
        run = Run(tiny_checkpoint, dtype)
        parts = [run.step((ids[at : at + chunk], at, table)) for at in range(0, len(ids), chunk)]
        assert torch.equal(torch.cat(parts), whole), f"chunk {chunk}"
        assert torch.equal(run.pool[table[:9]], whole_run.pool[table[:9]]), f"KV of chunk {chunk}"
    mixed = Run(tiny_checkpoint, dtype)
    mixed.step((other[:30], 0, other_table), (ids[:50], 0, table))
    rows = mixed.step((ids[50:149], 50, table), (other[30:31], 30, other_table))
    assert torch.equal(rows[:99], whole[50:149]), "a prefill beside a decode"
    decodes = mixed.step((other[31:32], 31, other_table), (ids[149:], 149, table))
    assert torch.equal(decodes[1], whole[149]), "a decode beside a decode"
    alone = Run(tiny_checkpoint, dtype).step((other[:32], 0, [0, 1]))
    assert torch.equal(decodes[0], alone[31]), "and the other sequence likewise"
    assert torch.equal(rows[99], alone[30])


def test_i1_the_renormalise_flag_of_the_checkpoint_is_honoured(tmp_path: Path) -> None:
    from conftest_engine import make_checkpoint

    ids = prompt(20, 5)
    for flag in (True, False):
        directory = make_checkpoint(tmp_path / str(flag), seed=3, norm_topk_prob=flag)
        ours = Run(directory, torch.float32).step((ids, 0, [0, 1]))
        assert relative(ours, transformers_logits(directory, ids, torch.float32)) < 1e-4
