"""Runs one `StepPlan`: rows through the decoder, logits of the rows that sample, tokens out.

The runner keeps the lowest counters there are: rows forwarded and forward passes. Everything that the product
claims about reuse is proved against them.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from moorage.engine.attention import AttentionBatch
from moorage.engine.kv_cache import KVCache
from moorage.engine.model import Decoder
from moorage.engine.output import EngineFault, FaultCode
from moorage.engine.plan import SequencePlan, SequenceResult, StepPlan, StepResult
from moorage.engine.request import SamplingParams
from moorage.engine.sampler import sample
from moorage.prefix_cache.block import unpack_tokens


class ModelRunner:
    """Owns the weights and the KV memory of one rank; knows nothing of sessions or the tree."""

    def __init__(self, decoder: Decoder, kv_cache: KVCache, block_size: int) -> None:
        self._decoder = decoder
        self._kv = kv_cache
        self._block_size = block_size
        self.tokens_forwarded = 0
        self.forward_passes = 0
        self.largest_batch = 0

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """One forward pass over all sequences of the plan. A faulty row (NaN logits) fails alone."""
        token_ids: list[int] = []
        positions: list[int] = []
        for sequence in plan.sequences:
            ids = unpack_tokens(sequence.token_ids)
            token_ids.extend(ids)
            positions.extend(range(sequence.first_position, sequence.first_position + len(ids)))
        batch = self._batch(plan, positions)
        hidden = self._decoder.forward(
            torch.tensor(token_ids, dtype=torch.int64),
            torch.tensor(positions, dtype=torch.int64),
            batch,
            self._kv.pool,
        )
        self.tokens_forwarded += len(token_ids)
        self.forward_passes += 1
        self.largest_batch = max(self.largest_batch, len(plan.sequences))
        drawn = self._sample(plan, hidden)
        return StepResult(
            step=plan.step,
            sequences=tuple(
                SequenceResult(
                    request_id=sequence.request_id,
                    num_forwarded=len(sequence.token_ids) // 4,
                    token_id=drawn[index][0] if index in drawn else None,
                    fault=drawn[index][1] if index in drawn else None,
                )
                for index, sequence in enumerate(plan.sequences)
            ),
        )

    def _batch(self, plan: StepPlan, positions: list[int]) -> AttentionBatch:
        """The step's index tensors, made once and shared by all layers."""
        lengths = [len(sequence.token_ids) // 4 for sequence in plan.sequences]
        width = max(len(sequence.block_ids) for sequence in plan.sequences)
        tables = torch.zeros((len(plan.sequences), width), dtype=torch.int64)
        for row, sequence in enumerate(plan.sequences):
            tables[row, : len(sequence.block_ids)] = torch.tensor(sequence.block_ids)
        slots: list[int] = []
        for sequence, length in zip(plan.sequences, lengths, strict=True):
            slots.extend(self._slots(sequence, length))
        return AttentionBatch(
            block_tables=tables,
            block_deltas=self._deltas(plan, width),
            context_lens=torch.tensor(
                [s.first_position + n for s, n in zip(plan.sequences, lengths, strict=True)],
                dtype=torch.int64,
            ),
            cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int64),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
        )

    def _slots(self, sequence: SequencePlan, length: int) -> list[int]:
        size = self._block_size
        return [
            sequence.block_ids[position // size] * size + position % size
            for position in range(sequence.first_position, sequence.first_position + length)
        ]

    @staticmethod
    def _deltas(plan: StepPlan, width: int) -> torch.Tensor | None:
        if not any(any(sequence.block_deltas) for sequence in plan.sequences):
            return None
        deltas = torch.zeros((len(plan.sequences), width), dtype=torch.int64)
        for row, sequence in enumerate(plan.sequences):
            if sequence.block_deltas:
                deltas[row, : len(sequence.block_deltas)] = torch.tensor(sequence.block_deltas)
        return deltas

    def _sample(
        self, plan: StepPlan, hidden: torch.Tensor
    ) -> dict[int, tuple[int | None, EngineFault | None]]:
        """Sequence index → (token id, None) or (None, fault), for the sequences that sample."""
        rows: list[int] = []
        indices: list[int] = []
        params: list[SamplingParams] = []
        positions: list[int] = []
        row = -1
        for index, sequence in enumerate(plan.sequences):
            length = len(sequence.token_ids) // 4
            row += length
            if sequence.sampling is not None:
                rows.append(row)
                indices.append(index)
                params.append(sequence.sampling)
                positions.append(sequence.first_position + length)
        if not rows:
            return {}
        logits = self._decoder.logits(hidden[torch.tensor(rows, dtype=torch.int64)])
        results = sample(logits, params, positions)
        return {
            index: (result, None)
            if isinstance(result, int)
            else (None, EngineFault(FaultCode.NUMERIC, str(result)))
            for index, result in zip(indices, results, strict=True)
        }
