"""Generations on the real engine: batching, reuse, limits, cancellation, isolation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine_harness import EngineHarness

from moorage.engine import (
    Abort,
    FaultCode,
    FinishReason,
    Namespace,
    SamplingParams,
)

Start = Callable[..., EngineHarness]
EIGHT = SamplingParams(max_tokens=8, ignore_eos=True)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(
        10, 2500, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def test_eight_decoding_sessions_take_one_forward_pass_a_step(start_engine: Start) -> None:
    engine = start_engine()
    requests = [engine.submit(f"s{i}", prompt(20, i), sampling=EIGHT) for i in range(8)]
    outcomes = [engine.finish(request) for request in requests]
    statistics = engine.engine.statistics()
    assert statistics.largest_batch == 8
    assert statistics.tokens_forwarded == 8 * (20 + 7)
    # 8 tokens each: at most two passes hold prefills (submissions may fall in two steps), the rest is shared.
    assert statistics.forward_passes <= 8 + 7
    alone = [start_engine().run("s", prompt(20, i), sampling=EIGHT) for i in range(2)]
    assert [outcome.token_ids for outcome in outcomes[:2]] == [
        outcome.token_ids for outcome in alone
    ]


def test_c22_the_next_turn_computes_only_its_new_tokens(start_engine: Start) -> None:
    engine = start_engine()
    first = engine.run("s", prompt(500, 1), sampling=SamplingParams(max_tokens=20, ignore_eos=True))
    log = prompt(500, 1) + first.token_ids
    before = engine.engine.statistics().tokens_forwarded
    second = engine.run("s", log + prompt(20, 2), num_known=519, sampling=EIGHT)
    assert second.sources is not None
    assert (second.sources.device, second.sources.new, second.sources.recomputed) == (519, 21, 0)
    assert second.forwarded_to_first == 21
    assert engine.engine.statistics().tokens_forwarded - before == 21 + 7


def test_another_session_of_the_same_tenant_shares_the_prefix_and_another_tenant_does_not(
    start_engine: Start,
) -> None:
    engine = start_engine()
    shared = prompt(100, 3)
    engine.run("s1", shared + prompt(10, 4), sampling=EIGHT)
    same = engine.run("s2", shared + prompt(10, 5), sampling=EIGHT)
    assert same.sources is not None and same.sources.device == 96  # six whole blocks of 16
    other = engine.run("s3", shared + prompt(10, 5), namespace=Namespace("tenant-b", "default"))
    assert other.sources is not None and other.sources.device == 0
    adapter = engine.run("s4", shared + prompt(10, 5), extra_key=b"adapter")
    assert adapter.sources is not None and adapter.sources.device == 0
    assert other.token_ids == adapter.token_ids == same.token_ids


def test_one_long_context_is_one_node_and_a_divergence_inside_it_one_split(
    start_engine: Start,
) -> None:
    engine = start_engine(num_blocks=300, token_budget=256)
    context = prompt(1000, 6)
    engine.run("s1", context, sampling=SamplingParams(max_tokens=1, ignore_eos=True))
    seen = engine.inspect("s1")
    assert (seen.num_nodes, seen.num_splits) == (1, 0)
    engine.run(
        "s2", context[:505] + prompt(300, 7), sampling=SamplingParams(max_tokens=1, ignore_eos=True)
    )
    seen = engine.inspect("s2")
    assert seen.num_splits == 1
    assert seen.num_nodes == 3  # shared part, and two branches


@pytest.mark.parametrize("length", [31, 32, 33])
def test_c14_a_fully_cached_prompt_still_computes_its_last_token(
    start_engine: Start, length: int
) -> None:
    engine = start_engine()
    tokens = prompt(length, 8)
    cold = engine.run("s1", tokens, sampling=EIGHT)
    warm = engine.run("s2", tokens, sampling=EIGHT)
    assert warm.sources is not None and warm.sources.device == (16 if length < 33 else 32)
    assert warm.token_ids == cold.token_ids


@pytest.mark.parametrize(("length", "outcome"), [(15, 1), (16, None), (17, None)])
def test_e9_the_window_is_exact(start_engine: Start, length: int, outcome: int | None) -> None:
    engine = start_engine(context_len=16)
    result = engine.run(
        "s", prompt(length, 9), sampling=SamplingParams(max_tokens=10, ignore_eos=True)
    )
    if outcome is None:
        assert result.error is not None and result.error.code is FaultCode.TOO_LONG
        assert "16" in result.error.message and str(length) in result.error.message
    else:
        assert (len(result.token_ids), result.finish_reason) == (outcome, FinishReason.LENGTH)


def test_an_abort_ends_one_request_within_a_step_and_no_other(start_engine: Start) -> None:
    engine = start_engine()
    long = SamplingParams(max_tokens=400, ignore_eos=True)
    victim = engine.submit("s1", prompt(30, 10), sampling=long)
    other = engine.submit(
        "s2", prompt(30, 11), sampling=SamplingParams(max_tokens=12, ignore_eos=True)
    )
    engine.until_tokens(victim, 3)
    ended = engine.abort(victim)
    assert ended.finish_reason is FinishReason.CANCELLED
    assert len(ended.token_ids) < 400
    assert len(engine.finish(other).token_ids) == 12
    engine.engine.send(Abort(victim))  # twice is a no-op
    engine.engine.send(Abort("never-seen"))
    again = engine.run("s1", prompt(30, 10) + ended.token_ids, sampling=EIGHT)
    assert again.finish_reason is FinishReason.LENGTH


def test_c17_an_aborted_prefill_leaves_nothing_wrong_behind(start_engine: Start) -> None:
    tokens = prompt(64, 12)
    cold = start_engine().run("s", tokens, sampling=EIGHT)
    engine = start_engine(token_budget=16, max_running=4)
    busy = engine.submit(
        "busy", prompt(20, 13), sampling=SamplingParams(max_tokens=300, ignore_eos=True)
    )
    engine.until_tokens(busy, 1)
    victim = engine.submit("s", tokens, sampling=EIGHT)
    engine.abort(victim)
    again = engine.run("s", tokens, sampling=EIGHT)
    assert again.token_ids == cold.token_ids
    engine.abort(busy)


def test_a_deadline_ends_a_request_and_keeps_the_session(start_engine: Start) -> None:
    engine = start_engine()
    log = prompt(40, 14)
    late = engine.run(
        "s", log, sampling=SamplingParams(max_tokens=800, ignore_eos=True), deadline_s=0.0
    )
    assert late.finish_reason is FinishReason.DEADLINE
    assert engine.run("s", log, sampling=EIGHT).finish_reason is FinishReason.LENGTH


def test_a_small_pool_gives_the_same_tokens_as_a_big_one(start_engine: Start) -> None:
    """Two sessions that do not fit together: one gives way, is computed again, and nobody sees it (case D20)."""
    want = SamplingParams(max_tokens=60, ignore_eos=True)
    big = start_engine()
    small = start_engine(num_blocks=8, context_len=128)
    expected = [big.run(f"s{i}", prompt(40, 20 + i), sampling=want).token_ids for i in range(2)]
    requests = [small.submit(f"s{i}", prompt(40, 20 + i), sampling=want) for i in range(2)]
    assert [small.finish(request).token_ids for request in requests] == expected
    assert small.engine.statistics().num_preempted > 0


def test_more_sessions_than_the_pool_holds_all_get_on(start_engine: Start) -> None:
    """Six sessions take turns on a pool that holds two: waiting turns that hold old KV must give it up."""
    want = SamplingParams(max_tokens=20, ignore_eos=True)
    big, small = start_engine(), start_engine(num_blocks=32, context_len=500)
    logs = {f"s{i}": prompt(100, 200 + i) for i in range(6)}
    for turn in range(3):
        requests = {}
        for name, log in logs.items():
            known = max(0, len(log) - 1) if turn else 0
            log.extend(prompt(40, 300 + turn))
            requests[name] = (
                big.submit(name, log, num_known=known, sampling=want),
                small.submit(name, log, num_known=known, sampling=want),
            )
        for name, (expected, got) in requests.items():
            tokens = big.finish(expected).token_ids
            assert small.finish(got).token_ids == tokens
            logs[name].extend(tokens)
    seen = small.inspect()
    assert seen.total_blocks == 32


def test_idle_contexts_give_way_and_are_recomputed_with_a_reason(start_engine: Start) -> None:
    engine = start_engine(num_blocks=12, context_len=192)
    log = prompt(90, 30)
    first = engine.run("s1", log, sampling=EIGHT)
    engine.run("s2", prompt(150, 31), sampling=EIGHT)
    back = engine.run("s1", log + first.token_ids + [5], num_known=97, sampling=EIGHT)
    assert back.sources is not None
    assert back.sources.recomputed > 0 and back.sources.recomputed_reason
    assert back.sources.device + back.sources.recomputed + back.sources.new == 99
    fresh = start_engine().run("s1", log + first.token_ids + [5], sampling=EIGHT)
    assert back.token_ids == fresh.token_ids


def test_seeded_sampling_is_a_function_of_seed_and_position(start_engine: Start) -> None:
    warm = SamplingParams(temperature=0.9, seed=7, max_tokens=12, ignore_eos=True)
    log = prompt(30, 40)
    whole = start_engine().run("s", log, sampling=warm)
    engine = start_engine()
    # Continued after a crash behind 5 tokens: the same generation, so the same rest.
    rest = engine.run("s", log + whole.token_ids[:5], num_prompt=30, num_known=34, sampling=warm)
    assert rest.token_ids == whole.token_ids[5:]
    assert rest.sources is not None and rest.sources.recomputed == 34 and rest.sources.new == 1
    other_seed = SamplingParams(temperature=0.9, seed=8, max_tokens=12, ignore_eos=True)
    assert engine.run("t", log, sampling=other_seed).token_ids != whole.token_ids


def test_a_generation_that_had_ended_before_a_crash_says_so_at_once(start_engine: Start) -> None:
    engine = start_engine()
    log = prompt(20, 41)
    outcome = engine.run("s", [*log, 5, 6], num_prompt=20, sampling=SamplingParams(max_tokens=2))
    assert (outcome.token_ids, outcome.finish_reason) == ([], FinishReason.LENGTH)
    ended = engine.run("t", [*log, 2], num_prompt=20, sampling=SamplingParams(max_tokens=9))
    assert (ended.token_ids, ended.finish_reason) == ([], FinishReason.STOP)


def test_bad_requests_are_refused_with_value_and_limit(start_engine: Start) -> None:
    engine = start_engine()
    for changes, words in (
        ({"sampling": SamplingParams(temperature=-1)}, "sampling.temperature is -1"),
        ({"sampling": SamplingParams(top_p=0.0)}, "sampling.top_p is 0.0"),
        ({"num_prompt": 9}, "num_prompt is 9, allowed is 1 … 5"),
        ({"num_known": 5}, "num_known is 5, allowed is 0 … 4"),
    ):
        outcome = engine.run("s", prompt(5, 1), **changes)
        assert outcome.error is not None and outcome.error.code is FaultCode.INVALID
        assert words in outcome.error.message
    busy = engine.submit(
        "s", prompt(5, 1), sampling=SamplingParams(max_tokens=200, ignore_eos=True)
    )
    second = engine.run("s", prompt(5, 1))
    assert second.error is not None and second.error.code is FaultCode.STATE
    engine.abort(busy)
    empty = engine.run("s", [])
    assert empty.error is not None and "empty" in empty.error.message
