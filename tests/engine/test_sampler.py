"""Counter-based sampling: right distribution, exact ties and filters, nothing shared between rows."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from moorage.engine.errors import InvalidRequest
from moorage.engine.request import SamplingParams
from moorage.engine.sampler import NotANumber, sample, splitmix64, uniform

NAN, INF = float("nan"), float("inf")
FIXED = [0.6524484863740322, 0.23928447285727472, 0.3943715225628349]


def draws(logits: list[float], params: SamplingParams, count: int = 2000) -> Counter[int]:
    """Token id -> how often it is drawn at log positions 0 … count − 1."""
    rows = torch.tensor([logits]).expand(count, -1)
    found = sample(rows, [params] * count, range(count))
    assert all(isinstance(token, int) for token in found)
    return Counter(token for token in found if isinstance(token, int))


def test_splitmix64_gives_its_published_sequence() -> None:
    golden = 0x9E3779B97F4A7C15
    states = [(1234567 + step * golden) % 2**64 for step in range(5)]
    assert [splitmix64(state) for state in states] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_the_random_number_of_a_position_never_changes() -> None:
    # Literals: another value would change the tokens of every parked seeded session.
    assert [uniform(0, 0), uniform(7, 1), uniform(2**64 - 1, 4095)] == FIXED
    assert uniform(7, 1) == uniform(7, 1)


def test_neighbouring_seeds_and_positions_share_no_draw() -> None:
    numbers = [uniform(seed, position) for seed in range(60) for position in range(60)]
    assert len(set(numbers)) == 3600
    assert 0.0 <= min(numbers) < 0.002 and 0.998 < max(numbers) < 1.0
    assert sum(numbers) / 3600 == pytest.approx(0.5, abs=0.02)


def test_greedy_takes_the_lowest_id_among_equal_maxima() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -INF], [0.0, 0.0, 0.0, 0.0], [-5.0, -INF, -INF, -4.0]])
    assert sample(logits, [SamplingParams()] * 3, [5, 6, 7]) == [1, 0, 3]


def test_the_distribution_is_the_softmax() -> None:
    probabilities = [0.5, 0.3, 0.15, 0.05]
    logits = torch.tensor(probabilities).log().tolist()
    counts = draws(logits, SamplingParams(temperature=1.0, seed=11), 10_000)
    for token, probability in enumerate(probabilities):
        assert counts[token] / 10_000 == pytest.approx(probability, abs=0.015)
    # Temperature 0.5 squares the odds: 25 : 9 : 2.25 : 0.25 of 36.5.
    counts = draws(logits, SamplingParams(temperature=0.5, seed=11), 10_000)
    for token, share in enumerate([25 / 36.5, 9 / 36.5, 2.25 / 36.5, 0.25 / 36.5]):
        assert counts[token] / 10_000 == pytest.approx(share, abs=0.015)


@pytest.mark.parametrize(
    ("filters", "allowed"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 3}, {1, 3, 0}),  # ids 0 and 2 tie at the edge: the lower one stays
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.71}, {1, 3, 0}),
        ({"min_p": 0.74}, {1, 3}),
        ({"min_p": 0.76}, {1}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 2, "top_p": 0.5}, {1}),  # 0.4 of the 0.7 that top-k left is 0.57
        ({"top_p": 0.75, "min_p": 0.3}, {1, 3}),
    ],
)
def test_filters_keep_exactly_these(filters: dict[str, float], allowed: set[int]) -> None:
    logits = torch.tensor([0.12, 0.4, 0.12, 0.3, 0.06]).double().log().float().tolist()
    params = SamplingParams(temperature=1.0, seed=3, **filters)  # type: ignore[arg-type]
    assert set(draws(logits, params)) == allowed


def test_a_masked_token_is_never_drawn() -> None:
    logits = [-INF, 0.0, -INF, 0.0, -INF]
    assert set(draws(logits, SamplingParams(temperature=100.0, seed=1))) == {1, 3}
    assert set(draws([0.0, 1.0], SamplingParams(temperature=1e-300, seed=1), 50)) == {1}


def test_a_row_that_is_not_a_number_fails_alone() -> None:
    logits = torch.tensor([[0.0, 9.0], [1.0, NAN], [-INF, -INF], [INF, 0.0], [9.0, 0.0]])
    for params in (SamplingParams(), SamplingParams(temperature=1e-3)):
        found = sample(logits, [params] * 5, [40, 41, 42, 43, 44])
        assert (found[0], found[4]) == (1, 0)
        for row, position in ((1, 41), (2, 42), (3, 43)):
            fault = found[row]
            assert isinstance(fault, NotANumber)
            assert str(position) in str(fault)


def test_a_row_does_not_depend_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((64, 2560), generator=generator) * 3
    params = [
        SamplingParams(temperature=0.8, seed=row, top_p=0.9, top_k=50 * (row % 2))
        for row in range(64)
    ]
    positions = [100 + row for row in range(64)]
    together = sample(logits, params, positions)
    alone = [
        sample(logits[row : row + 1].clone(), [params[row]], [positions[row]])[0]
        for row in range(64)
    ]
    assert together == alone
    backwards = sample(logits.flip(0), params[::-1], positions[::-1])
    assert backwards[::-1] == together
    assert len(set(together)) > 32, "and they are not all the same"


def test_the_global_random_state_is_not_touched() -> None:
    before = torch.get_rng_state()
    draws([0.0, 1.0, 2.0], SamplingParams(temperature=1.0, seed=5), 20)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", INF),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", -1),
        ("stop", ("",)),
        ("stop", ("x",) * 17),
        ("stop", ("x" * 257,)),
    ],
)
def test_parameters_are_refused_with_field_and_limit(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=rf"sampling\.{field} is .*, allowed is"):
        SamplingParams(**{field: value}).validate()  # type: ignore[arg-type]
