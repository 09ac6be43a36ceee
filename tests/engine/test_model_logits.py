"""Logits against transformers on the same files, and bits that do not depend on batch or chunk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_harness import DEMO_MODEL

from moorage.engine.attention import AttentionBatch
from moorage.engine.config import load_model_config
from moorage.engine.model import Decoder
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

    model = Qwen3MoeForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


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


def test_bf16_logits_are_about_as_near_to_fp32_as_transformers_bf16() -> None:
    ids = prompt(200, 2)
    truth = transformers_logits(DEMO_MODEL, ids, torch.float32).flatten()
    ours = Run(DEMO_MODEL, torch.bfloat16).step((ids, 0, list(range(13)))).flatten()
    theirs = transformers_logits(DEMO_MODEL, ids, torch.bfloat16).flatten()
    distance, reference = (
        1 - float(torch.nn.functional.cosine_similarity(logits.double(), truth.double(), dim=0))
        for logits in (ours, theirs)
    )
    assert 0 < distance < 3 * reference
    assert reference < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_any_chunking_and_any_batch_gives_the_same_bits(
    tiny_checkpoint: Path, dtype: torch.dtype
) -> None:
    ids, other = prompt(70, 3), prompt(41, 4)
    table, other_table = [9, 3, 12, 1, 30], [2, 4, 6]
    whole_run = Run(tiny_checkpoint, dtype)
    whole = whole_run.step((ids, 0, table))
    for chunk in (1, 7, 16, 64):
        run = Run(tiny_checkpoint, dtype)
        parts = [run.step((ids[at : at + chunk], at, table)) for at in range(0, len(ids), chunk)]
        assert torch.equal(torch.cat(parts), whole), f"chunk {chunk}"
        assert torch.equal(run.pool[table[:4]], whole_run.pool[table[:4]]), f"KV of chunk {chunk}"
    mixed = Run(tiny_checkpoint, dtype)
    mixed.step((other[:30], 0, other_table), (ids[:50], 0, table))
    rows = mixed.step((ids[50:], 50, table), (other[30:31], 30, other_table))
    assert torch.equal(rows[:20], whole[50:])


def test_i1_the_renormalise_flag_of_the_checkpoint_is_honoured(tmp_path: Path) -> None:
    from conftest_engine import make_checkpoint

    ids = prompt(20, 5)
    for flag in (True, False):
        directory = make_checkpoint(tmp_path / str(flag), seed=3, norm_topk_prob=flag)
        ours = Run(directory, torch.float32).step((ids, 0, [0, 1]))
        assert relative(ours, transformers_logits(directory, ids, torch.float32)) < 1e-4
