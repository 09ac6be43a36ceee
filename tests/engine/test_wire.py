"""Every border message survives msgpack: the engine may become a process without a change above it."""

import pytest

from moorage.engine import output, plan, request
from moorage.engine.errors import WireError
from moorage.engine.wire import from_wire, to_wire
from moorage.prefix_cache.block import Namespace, pack_tokens

TENANT = Namespace("acme", "prod")
FAULT = output.EngineFault(output.FaultCode.STORE, "redis at 127.0.0.1:1 is away")
SOURCES = output.TokensBySource(device=16, redis=32, recomputed=3, new=5, recomputed_reason="hole")

MESSAGES = [
    request.Submit(
        request.Request(
            request_id="r1",
            session_id="s1",
            namespace=TENANT,
            token_ids=pack_tokens([1, 2, 2**31 - 1]),
            num_prompt=2,
            num_known=1,
            sampling=request.SamplingParams(temperature=0.8, seed=2**64 - 1, stop=("\n\n", "END")),
            deadline_s=1.5,
            manifest=b"\x00\xff",
            priority=3,
            extra_key=b"adapter",
        )
    ),
    request.Abort("r1"),
    request.Park("s1", 7, "redis"),
    request.ParkCommitted("s1", 7),
    request.ParkFailed("s1", 7),
    request.Restore("s1", TENANT, pack_tokens([4]), None),
    request.Release("s1", TENANT, b"manifest"),
    request.Inspect("i1", "s1"),
    request.RetentionHint("park", 2.5),
    output.StepOutput(
        step=9,
        tokens=(
            output.TokenOutput(
                "r1", "s1", 12, 77, "ü", output.FinishReason.STOP, None, SOURCES, 6, 0.25, 0.5
            ),
            output.TokenOutput("r2", "s2", 3, None, "", output.FinishReason.ERROR, FAULT),
        ),
        events=(
            output.ParkPrepared("s1", 7, b"m", "redis", 48, 4096, 0.01, "host: full"),
            output.ParkRefused("s1", 8, FAULT),
            output.ParkDone("s1", 7, 3),
            output.RestoreDone("s1", SOURCES, 4096, 0.01),
            output.Inspection("i1", "s1", 0, 0, 9, 0, 0, 0, 9, 0, 0, 0, 100, 10),
            output.EngineFailed(FAULT),
        ),
    ),
    output.EngineStatistics(steps=3, tokens_forwarded=100),
    output.ModelInfo("m", 4096, 2560, (2,), "00ff", 16, "bfloat16", "{{x}}", ("<a>",), True),
    plan.StepPlan(
        4,
        (
            plan.SequencePlan("r1", pack_tokens([5]), 12, (3, 9), (0, -32), None),
            plan.SequencePlan("r2", pack_tokens([6, 7]), 0, (1,), (), request.SamplingParams()),
        ),
    ),
    plan.StepResult(
        4, (plan.SequenceResult("r1", 1, None, FAULT), plan.SequenceResult("r2", 2, 8))
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_border_message_comes_back_equal(message: object) -> None:
    back = from_wire(to_wire(message))
    assert back == message
    assert type(back) is type(message)


def test_every_command_and_event_type_is_covered() -> None:
    covered = {type(message) for message in MESSAGES} | {
        type(event)
        for message in MESSAGES
        if isinstance(message, output.StepOutput)
        for event in message.events
    }
    commands = set(request.Command.__args__)
    events = set(output.EngineEvent.__args__)
    assert commands | events <= covered


def test_what_is_no_border_message_is_refused() -> None:
    with pytest.raises(WireError, match="dict is not a border message"):
        to_wire({"a": 1})
    with pytest.raises(WireError):
        from_wire(b"\xc1")
    with pytest.raises(WireError, match="unknown border message"):
        from_wire(b"\x81\xa1$\xa6Nobody")
