"""Bad input, limits, tenants, and the calls beside the tool loop: each error typed, and the server
goes on.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_engine import VOCAB, FakeEngine
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from session_harness import Harbour, eventually, harbour, run
from test_cancel import queued, step
from test_tool_loop import start

from moorage.sessions import errors as e
from moorage.sessions.auth import Authenticator
from moorage.sessions.client import Client, Sampling
from moorage.sessions.client_events import Event, Resumed, TextDelta, TurnEnd
from moorage.sessions.limits import Limits
from moorage.sessions.proto import sessions_pb2 as pb


def yes(prompt: str) -> str:
    return "Yes."


async def still_works(h: Harbour) -> None:
    session = await h.client.create(park_policy="never")
    assert (await session.run("Hi")).text == "Yes."


def tool(**changes: Any) -> pb.ToolSchema:
    values = {"name": "f", "description": "", "parameters_json": '{"type": "object"}'}
    return pb.ToolSchema(**{**values, **changes})


BAD_CREATE: list[tuple[pb.CreateRequest, str]] = [
    (pb.CreateRequest(tools=[tool(name="no spaces")]), "tools[0].name"),
    (pb.CreateRequest(tools=[tool(), tool()]), "tools[1].name"),
    (pb.CreateRequest(tools=[tool(parameters_json="{")]), "tools[0].parameters_json"),
    (
        pb.CreateRequest(tools=[tool(parameters_json='{"type": "array"}')]),
        "tools[0].parameters.type",
    ),
    (
        pb.CreateRequest(tools=[tool(parameters_json='{"required": ["x"]}')]),
        "tools[0].parameters.required",
    ),
    (pb.CreateRequest(tools=[tool(name=f"f{i}") for i in range(129)]), "tools"),
    (pb.CreateRequest(sampling=pb.SamplingParams(temperature=-1.0)), "sampling.temperature"),
    (pb.CreateRequest(sampling=pb.SamplingParams(top_p=0.0)), "sampling.top_p"),
    (pb.CreateRequest(sampling=pb.SamplingParams(stop=[""])), "sampling.stop"),
    (pb.CreateRequest(park_tier="tape"), "park_tier"),
    (pb.CreateRequest(park_policy=99), "park_policy"),  # type: ignore[arg-type]
    (pb.CreateRequest(idempotency_key="k" * 129), "idempotency_key"),
]


@pytest.mark.parametrize(("request_", "field"), BAD_CREATE)
def test_a_malformed_create_names_its_field(
    tmp_path: Path, request_: pb.CreateRequest, field: str
) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(yes)) as h:
            with pytest.raises(e.InvalidArgument) as caught:
                await h.client.call("Create", request_, 5.0)
            assert caught.value.field == field
            await still_works(h)

    run(scenario())


def _message(**values: Any) -> pb.Message:
    return pb.Message(**{"role": "user", "content": "Hi", **values})


BAD_GENERATE: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": [_message()], "tokens": pb.TokenInput(ids=[1])}, "messages"),
    ({"tokens": pb.TokenInput()}, "messages"),
    ({"tokens": pb.TokenInput(ids=[1, VOCAB])}, "tokens.ids[1]"),
    ({"tokens": pb.TokenInput(ids=[-1])}, "tokens.ids[0]"),
    ({"messages": [_message(), _message(role="root")]}, "messages[1].role"),
    (
        {
            "messages": [
                _message(
                    role="assistant",
                    tool_calls=[pb.MessageToolCall(name="f", arguments_json='{"a')],
                )
            ]
        },
        "messages[0].tool_calls[0].arguments_json",
    ),
    ({"messages": [_message()] * 1025}, "messages"),
    ({"messages": [_message()], "deadline_s": -1.0}, "deadline_s"),
    ({"messages": [_message()], "continue_final_message": True}, "continue_final_message"),
    (
        {"messages": [_message()], "sampling": pb.SamplingParams(min_p=2.0)},
        "sampling.min_p",
    ),
]


@pytest.mark.parametrize(("values", "field"), BAD_GENERATE)
def test_a_malformed_generate_names_its_field_and_changes_nothing(
    tmp_path: Path, values: dict[str, Any], field: str
) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(yes)) as h:
            session = await h.client.create()
            request = pb.GenerateRequest(session_id=session.session_id, **values)
            with pytest.raises(e.InvalidArgument) as caught:
                async for _ in h.client.stream("Generate", request, 5.0):
                    pass
            assert caught.value.field == field
            assert (await session.get()).last_seq == 0
            assert (await session.run("Hi")).text == "Yes."

    run(scenario())


@pytest.mark.parametrize("name", ["Park", "Resume", "Cancel", "Close", "Get", "SubmitToolResults"])
def test_d3_an_unknown_session_is_not_found_in_every_call(tmp_path: Path, name: str) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(yes)) as h:
            live = await h.client.create(park_policy="never")
            await live.run("Hi")
            before = await live.get()
            request = getattr(pb, f"{name}Request")(session_id="s-unknown")
            if name == "SubmitToolResults":
                request.results.add(call_id="c", content="x")
            with pytest.raises(e.SessionNotFound):
                await h.client.call(name, request, 5.0)
            assert await live.get() == before

    run(scenario())


@pytest.mark.parametrize(
    "session_id", ["", "../../etc/x", "a/b", "a\\b", "x" * 10_000, "a\nb", "{slot}"]
)
def test_d16_a_malformed_session_id_is_an_invalid_argument(tmp_path: Path, session_id: str) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(yes)) as h:
            with pytest.raises(e.InvalidArgument) as caught:
                await h.client.session(session_id).get()
            assert caught.value.field == "session_id"

    run(scenario())


def test_h1_an_oversized_message_fails_before_it_is_sent_and_on_the_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            harbour(tmp_path, FakeEngine(yes)) as h,
            Client(h.address, max_message_bytes=64 << 20) as careless,
        ):
            session = await h.client.create()
            with pytest.raises(e.MessageTooLarge, match="nothing was sent"):
                await session.run("x" * (6 << 20))
            with pytest.raises(e.MessageTooLarge):
                await careless.session(session.session_id).run("x" * (6 << 20))
            assert (await session.run("Hi")).text == "Yes."

    run(scenario())


def test_a_context_that_is_too_long_names_counts_and_limit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(yes, context_len=64)) as h:
            with pytest.raises(e.ContextTooLong, match="the window is 64"):
                await h.client.create(system="x" * 100)
            session = await h.client.create()
            with pytest.raises(e.ContextTooLong, match="holds 0 tokens and the input has 64"):
                await session.run("x" * 45)  # the template writes 19 tokens more
            ids = [120] * 63
            events = [event async for event in session.generate(token_ids=ids)]
            end = events[-1]
            assert isinstance(end, TurnEnd)
            assert (end.finish_reason, end.usage.num_generated) == ("length", 1)

    run(scenario())


def test_d2_an_empty_session_can_be_parked_and_resumed_and_then_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(yes)) as h:
            session = await h.client.create()
            assert (await session.park()).num_tokens == 0
            assert (await session.resume()).sources.host == 0
            assert (await session.run("Hi")).text == "Yes."

    run(scenario())


def test_park_and_resume_on_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(yes)) as h:
            session = await h.client.create(park_policy="never")
            await session.run("Hi")
            length = len((await session.get()).token_ids)
            parked = await session.park("redis")
            assert (parked.tier, parked.num_tokens) == ("redis", length - 1)
            assert parked.num_freed_blocks == -(-(length - 1) // 16)
            info = await session.get(inspect=True)
            assert info.parked
            assert info.inspection is not None
            assert info.inspection.session_locked_blocks == 0
            resumed = await session.resume()
            assert resumed.sources.host == length - 1
            assert not (await session.get()).parked
            answer = await session.run("More")
            assert answer.usage.stretches[0].sources.device == length - 1
            kept = [ev async for ev in session.attach(0) if isinstance(ev, Resumed)]
            assert [ev.sources.host for ev in kept] == [length - 1]

    run(scenario())


def test_park_and_resume_are_refused_while_a_turn_generates(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(yes, held=True)
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create(park_policy="never")
            events: list[Event] = []
            task = await start(session, "Hi", events)
            await queued(engine, 1)
            await step(engine, 1)
            for call in (session.park, session.resume):
                with pytest.raises(e.StateError, match="generates"):
                    await call()
            engine.allow(None)
            await task

    run(scenario())


def test_a_refused_park_on_request_is_unavailable_and_the_session_usable(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(yes)
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create(park_policy="never")
            await session.run("Hi")
            engine.refuse_parks = True
            with pytest.raises(e.TierUnavailable, match="the tier is full"):
                await session.park()
            engine.refuse_parks = False
            assert (await session.park()).tier == "host"

    run(scenario())


def test_create_and_generate_are_idempotent_under_their_keys(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(yes)
        async with harbour(tmp_path, engine) as h:
            created = await asyncio.gather(
                *(h.client.create(idempotency_key="k", park_policy="never") for _ in range(5))
            )
            assert len({session.session_id for session in created}) == 1
            session = created[0]
            request = pb.GenerateRequest(
                session_id=session.session_id, messages=[_message()], idempotency_key="turn-1"
            )
            both = [
                [ev async for ev in h.client.stream("Generate", request, 5.0)] for _ in range(2)
            ]
            assert [list(ev.token_ids) for ev in both[0]] != []
            assert both[0][0].turn_start == both[1][0].turn_start
            assert both[0][-1] == both[1][-1]
            assert len(engine.requests) == 1

    run(scenario())


def test_attach_beyond_the_end_is_out_of_range(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(yes)) as h:
            session = await h.client.create()
            with pytest.raises(e.SequenceOutOfRange, match="last event is 0"):
                async for _ in session.attach(7):
                    pass

    run(scenario())


def test_streams_of_a_session_are_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        limits = Limits(max_streams_per_session=2)
        async with harbour(tmp_path, FakeEngine(yes), limits=limits) as h:
            session = await h.client.create()

            async def watch() -> None:
                async for _ in session.attach(0, until_turn_end=False):
                    pass

            watching = [asyncio.create_task(watch()) for _ in range(2)]
            await session.get()
            await eventually(lambda: len(h.manager._sessions[session.session_id].streams) == 2)
            with pytest.raises(e.StateError, match="2 streams, which is the limit"):
                await watch()
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            await eventually(lambda: not len(h.manager._sessions[session.session_id].streams))

    run(scenario())


def test_h8_a_slow_reader_holds_nobody_up_and_misses_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(lambda prompt: "abcdefghij" * 300)
        limits = Limits(subscriber_events=8, merge_tokens=32)
        async with harbour(tmp_path, engine, limits=limits) as h:
            session = await h.client.create(park_policy="never")
            await session.run("Hi", sampling=Sampling(max_tokens=1))
            live = h.manager._sessions[session.session_id]
            slow = live.attach(0, until_turn_end=False)  # reads nothing for the whole next turn
            answer = await session.run("More")
            assert len(answer.text) == 3000
            assert slow.largest_buffer <= 8
            text, last = "", 0
            async for event in slow.events():
                assert event.first_seq == last + 1
                last = event.last_seq
                assert len(event.token_ids) <= 32 or event.HasField("input_accepted")
                text += event.delta.text
                if event.turn == 2 and event.HasField("turn_end"):
                    break
            assert text == "a" + "abcdefghij" * 300
            live.detach(slow, dropped=False)

    run(scenario())


def test_tenants_are_walls(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("# token tenant\nalpha-token-0123456 alpha\nbeta-token-01234567 beta\n")

    async def scenario() -> None:
        async with (
            harbour(
                tmp_path / "data",
                FakeEngine(yes),
                authenticator=Authenticator.from_file(tokens),
                token="alpha-token-0123456",
            ) as h,
            Client(h.address, token="beta-token-01234567") as beta,
            Client(h.address, token="gamma-token-0123456") as unknown,
            Client(h.address) as nobody,
        ):
            session = await h.client.create(idempotency_key="k")
            await session.run("Hi")
            with pytest.raises(e.SessionNotFound):
                await beta.session(session.session_id).get()
            other = await beta.create(idempotency_key="k")
            assert other.session_id != session.session_id
            assert {r.namespace.tenant for r in h.engine.requests} == {"alpha"}
            for client in (unknown, nobody):
                with pytest.raises(e.Unauthenticated) as caught:
                    await client.create()
                assert "gamma-token" not in caught.value.message

    run(scenario())


@pytest.mark.parametrize(
    "line", ["short alpha", "one-long-enough-token", "long-enough-token-01 a b"]
)
def test_a_malformed_token_file_names_the_line_and_not_the_token(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"\n{line}\n")
    with pytest.raises(e.InvalidArgument, match=":2: expected TOKEN TENANT") as caught:
        Authenticator.from_file(path)
    assert line.split(maxsplit=1)[0] not in caught.value.message


def test_health_and_reflection_are_served(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            harbour(tmp_path, FakeEngine(yes)) as h,
            grpc.aio.insecure_channel(h.address) as c,
        ):
            health: Any = health_pb2_grpc.HealthStub(c)
            for name in ("", "moorage.v1.Sessions"):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(c)
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            async for reply in stub.ServerReflectionInfo(iter([ask])):
                names = {service.name for service in reply.list_services_response.service}
                assert "moorage.v1.Sessions" in names
                break

    run(scenario())


def test_the_raw_status_and_metadata_carry_the_typed_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            harbour(tmp_path, FakeEngine(yes)) as h,
            grpc.aio.insecure_channel(h.address) as c,
        ):
            get = c.unary_unary(
                "/moorage.v1.Sessions/Get",
                request_serializer=pb.GetRequest.SerializeToString,
                response_deserializer=pb.GetResponse.FromString,
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await get(pb.GetRequest(session_id="s-nobody"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            trailing = dict(caught.value.trailing_metadata() or ())
            detail = pb.ErrorDetail.FromString(bytes(trailing["moorage-error-bin"]))  # type: ignore[arg-type]
            assert (detail.code, detail.field) == ("session_not_found", "session_id")

    run(scenario())


def test_idle_sessions_leave_memory_and_come_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        limits = Limits(idle_sessions=3)
        async with harbour(tmp_path, FakeEngine(yes), limits=limits) as h:
            sessions = [await h.client.create(park_policy="never") for _ in range(8)]
            for session in sessions:
                async for _ in session.generate(token_ids=[72]):
                    pass
            await sessions[-1].get()
            assert len(h.manager._sessions) <= 4
            events = [event async for event in sessions[0].attach(0)]
            assert isinstance(events[-1], TurnEnd)
            assert any(isinstance(event, TextDelta) for event in events)

    run(scenario())


def test_a_deadline_is_handed_to_the_engine_and_shrinks(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(yes)
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create()
            async for _ in session.generate("Hi", deadline_s=5.0):
                pass
            assert engine.requests[0].deadline_s == 5.0

    run(scenario())


def test_the_client_imports_neither_torch_nor_the_engine() -> None:
    script = (
        "import sys; from moorage.sessions import Client, Sampling, MoorageError\n"
        "bad = [m for m in sys.modules if m.partition('.')[0] in ('torch', 'numpy', 'redis')"
        " or m.startswith(('moorage.engine', 'moorage.kernels', 'moorage.prefix_cache'))]\n"
        "assert not bad, bad"
    )
    source = Path(__file__).parents[2] / ".src"
    subprocess.run([sys.executable, "-c", script], check=True, env={"PYTHONPATH": str(source)})


def test_megabytes_that_cannot_fit_are_refused_by_their_beginning(tmp_path: Path) -> None:
    class Counting(FakeEngine):
        num_chars = 0

        def encode(self, text: str, *, allow_special: bool) -> list[int]:
            self.num_chars += len(text)
            return super().encode(text, allow_special=allow_special)

    async def scenario() -> None:
        engine = Counting(yes, context_len=1000)
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create(park_policy="never")
            before = engine.num_chars
            with pytest.raises(e.ContextTooLong, match="has more than 4006: together"):
                await session.run("x" * 2_000_000)
            assert engine.num_chars - before < 5000
            assert (await session.run("Hi")).text == "Yes."

    run(scenario())
