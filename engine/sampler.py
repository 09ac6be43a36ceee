"""Counter-based sampling: a token's random number is f(seed, log position), so there is no state to
lose in a crash, a park or a move.

Each row is drawn by itself, in fp64, on values that do not depend on the batch: a row's token
depends on nothing but its logits, its parameters, its seed and its position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moorage.engine.request import SamplingParams

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 / golden ratio, the increment of SplitMix64 (Steele, Lea, Flood 2014, OOPSLA)."""


class NotANumber(ValueError):
    """A row's logits hold NaN or +inf, or nothing but −inf: this sequence cannot go on."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits from (seed, position): SplitMix64, twice.

    Two rounds, because seeds and positions are both small and consecutive: one round over their sum
    would make (seed + 1, position) and (seed, position + 1) the same draw.
    """
    return (splitmix64(splitmix64(seed & _MASK) ^ (position & _MASK)) >> 11) / float(1 << 53)


def splitmix64(state: int) -> int:
    """The output of SplitMix64 that follows `state`; a bijection on 64 bits."""
    value = (state + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int | NotANumber]:
    """logits fp32 [rows, V] → a token id per row, or the row's fault; other rows go on.

    `params` are validated ones. `positions` are the log positions that the drawn tokens will have.
    Filters in this order: temperature, top-k, top-p over what top-k left, min-p. Equal logits rank
    by ascending id, so greedy (temperature 0) takes the lowest id among equal maxima.
    """
    return [
        _draw(row, one, position)
        for row, one, position in zip(logits, params, positions, strict=True)
    ]


def _draw(row: torch.Tensor, params: SamplingParams, position: int) -> int | NotANumber:
    highest = row.max()  # NaN wins every maximum
    if not bool(torch.isfinite(highest)):
        return NotANumber(
            f"the highest logit for log position {position} is {float(highest)}, expected a finite"
            " number"
        )
    if params.temperature == 0.0:
        return int((row == highest).nonzero()[0])
    scaled = (row.double() - highest.double()) / params.temperature
    ordered, ids = torch.sort(scaled, descending=True, stable=True)
    if 0 < params.top_k < len(ordered):
        ordered, ids = ordered[: params.top_k], ids[: params.top_k]
    weights = torch.exp(ordered)
    total = torch.cumsum(weights, 0)
    keep = len(ordered)
    if params.top_p < 1.0:
        keep = int((total < params.top_p * total[-1]).sum()) + 1
    if params.min_p > 0.0:
        keep = min(keep, int((weights >= params.min_p).sum()))  # the likeliest has weight 1
    # Inverse of the cumulative weights: the first token whose sum exceeds the target. Tokens of
    # weight 0 never do.
    target = uniform(params.seed, position) * float(total[keep - 1])
    index = int(torch.searchsorted(total[:keep], target, right=True))
    return int(ids[min(index, keep - 1)])
