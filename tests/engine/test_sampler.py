"""Sampling: a function of seed and position, exact filters, rows apart from each other."""

from __future__ import annotations

from collections import Counter

import torch

from moorage.engine.request import SamplingParams
from moorage.engine.sampler import NotANumber, sample, uniform

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -8.0])


def draw(params: SamplingParams, position: int, logits: torch.Tensor = LOGITS) -> int:
    (token,) = sample(logits[None], [params], [position])
    assert isinstance(token, int)
    return token


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert draw(SamplingParams(), 0, torch.tensor([0.0, 3.0, 3.0, 1.0])) == 1


def test_the_random_number_is_a_pure_function_that_fills_the_unit_interval() -> None:
    numbers = [uniform(seed, position) for seed in range(40) for position in range(250)]
    assert numbers == [uniform(seed, position) for seed in range(40) for position in range(250)]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) >= 0.0 and max(numbers) < 1.0
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.01
    tenths = Counter(int(10 * number) for number in numbers)
    assert all(850 < tenths[tenth] < 1150 for tenth in range(10))
    assert uniform(2**64 - 1, 5) != uniform(0, 5)


def test_frequencies_follow_the_probabilities() -> None:
    params = SamplingParams(temperature=1.0, seed=3)
    counts = Counter(draw(params, position) for position in range(6000))
    for token, probability in enumerate(LOGITS.softmax(0).tolist()):
        assert abs(counts[token] / 6000 - probability) < 0.02


def test_a_row_does_not_depend_on_its_batch() -> None:
    params = [SamplingParams(temperature=0.9, seed=seed, top_p=0.95) for seed in range(64)]
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(1))
    together = sample(logits, params, list(range(64)))
    alone = [sample(logits[i : i + 1], params[i : i + 1], [i])[0] for i in range(64)]
    assert together == alone


def test_filters_keep_exactly_what_they_say() -> None:
    def seen(**changes: float) -> set[int]:
        params = SamplingParams(temperature=1.0, seed=9, **changes)  # type: ignore[arg-type]
        return {draw(params, position) for position in range(800)}

    assert seen(top_k=2) == {0, 1}
    assert seen(top_k=1) == {0}
    # Probabilities 0.64, 0.24, 0.09, 0.03, 0.00: the smallest sets that reach 0.6 and 0.7.
    assert seen(top_p=0.6) == {0}
    assert seen(top_p=0.7) == {0, 1}
    # At least 0.3 of the likeliest: e^-1 = 0.37 stays, e^-2 = 0.14 goes.
    assert seen(min_p=0.3) == {0, 1}
    assert seen(min_p=1.0) == {0}


def test_a_row_of_nan_fails_alone() -> None:
    logits = torch.stack([LOGITS, torch.full((5,), float("nan")), LOGITS])
    first, broken, last = sample(logits, [SamplingParams()] * 3, [7, 8, 9])
    assert (first, last) == (0, 0)
    assert isinstance(broken, NotANumber) and "8" in str(broken)
