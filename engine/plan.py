"""The order from scheduler to runner: what one forward pass computes.

Serialisable, so that rank 0 can broadcast it to the other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from moorage.engine.output import EngineFault
from moorage.engine.request import SamplingParams
from moorage.prefix_cache.block import TokenIds


@dataclass(frozen=True)
class SequencePlan:
    """One sequence's rows in a step."""

    request_id: str
    token_ids: TokenIds
    """The tokens to forward, packed; 1 for a decode."""
    first_position: int
    """Log position of the first of them."""
    block_ids: tuple[int, ...]
    """Device blocks from log position 0 on, enough for the last row's slot."""
    block_deltas: tuple[int, ...]
    """Visible position − log position per block; empty means all 0."""
    sampling: SamplingParams | None
    """Set where the last row's logits are sampled; None for a prefill chunk that is not the last."""


@dataclass(frozen=True)
class StepPlan:
    """One forward pass."""

    step: int
    sequences: tuple[SequencePlan, ...]

    @property
    def num_tokens(self) -> int:
        """Rows of the forward pass."""
        return sum(len(sequence.token_ids) // 4 for sequence in self.sequences)


@dataclass(frozen=True)
class SequenceResult:
    """What a sequence's rows gave."""

    request_id: str
    num_forwarded: int
    token_id: int | None
    fault: EngineFault | None = None


@dataclass(frozen=True)
class StepResult:
    """Results in the plan's order."""

    step: int
    sequences: tuple[SequenceResult, ...]
