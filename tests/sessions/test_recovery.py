"""What a crash, a lost commit or a shutdown leaves: every event once, every tool run once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_engine import FakeEngine, Tiers
from fake_server import PacedEngine
from session_harness import eventually, harbour, run
from test_cancel import ends, queued, step, text_of
from test_tool_loop import calculator, calls_ready, kinds, start

from moorage.sessions import failpoints
from moorage.sessions.client import Client
from moorage.sessions.client_events import Event, Resumed, TextDelta, ToolCallReady
from moorage.sessions.errors import EngineStopped, ServerDraining, StoreUnavailable
from moorage.sessions.proto import sessions_pb2 as pb

SCHEMA = [{"name": "add", "description": "Add.", "parameters": {"type": "object"}}]
HERE = Path(__file__).parent


def reply(prompt: str) -> str:
    return "The quick brown fox jumps."


def test_a_turn_that_was_running_goes_on_in_the_next_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = FakeEngine(reply, held=True)
        async with harbour(tmp_path, first) as h:
            session = await h.client.create(park_policy="never")
            session_id = session.session_id
            events: list[Event] = []
            task = await start(session, "Hi", events)
            await queued(first, 1)
            await step(first, 9)
            await eventually(lambda: text_of(events) == "The quick")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        seen = events[-1].last_seq
        second = FakeEngine(reply)
        async with harbour(tmp_path, second) as h:
            session = h.client.session(session_id)
            rest = [e async for e in session.attach(seen)]
            assert rest[0].first_seq == seen + 1
            assert text_of(events) + text_of(rest) == "The quick brown fox jumps."
            (resumed,) = (e for e in rest if isinstance(e, Resumed))
            assert resumed.sources.recomputed > 0
            (request,) = second.requests
            assert request.num_prompt + 9 == request.num_tokens
            assert request.num_known == request.num_tokens - 1
            everything = [e async for e in session.attach(0)]
            assert text_of(everything) == "The quick brown fox jumps."
            assert len(ends(everything)) == 1

    run(scenario())


def test_d1_a_session_that_waited_for_tools_resumes_from_its_manifest(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        tiers = Tiers()
        async with harbour(tmp_path, FakeEngine(calculator, tiers=tiers)) as h:
            session = await h.client.create(tool_schemas=SCHEMA, park_policy="always")
            events: list[Event] = []
            task = await start(session, "2 + 3?", events)
            (call,) = await calls_ready(events, 1)
            await eventually(lambda: "Parked" in kinds(events))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        async with harbour(tmp_path, FakeEngine(calculator, tiers=tiers)) as h:
            session = h.client.session(session.session_id)
            info = await session.get()
            assert (info.state, info.parked) == ("waiting_tools", True)
            assert [c.call_id for c in info.pending_calls] == [call.call_id]
            await session.submit_tool_results({call.call_id: "5"})
            rest = [e async for e in session.attach(events[-1].last_seq)]
            assert text_of(rest) == "The sum is 5."
            (resumed,) = (e for e in rest if isinstance(e, Resumed))
            assert resumed.sources.recomputed == 0
            assert resumed.sources.host == len(info.token_ids) - 1

    run(scenario())


def test_results_that_were_durable_continue_without_being_sent_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(calculator)) as h:
            session = await h.client.create(tool_schemas=SCHEMA, park_policy="never")
            events: list[Event] = []
            task = await start(session, "2 + 3?", events)
            (call,) = await calls_ready(events, 1)
            live = h.manager._sessions[session.session_id]
            live.loop.continue_if_complete = lambda: None  # type: ignore[method-assign]
            await session.submit_tool_results({call.call_id: "5"})  # and the process dies here
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        async with harbour(tmp_path, FakeEngine(calculator)) as h:
            session = h.client.session(session.session_id)
            assert text_of([e async for e in session.attach(events[-1].last_seq)]) == (
                "The sum is 5."
            )

    run(scenario())


def test_a_commit_that_fails_loses_no_token_and_repeats_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.001")

    async def scenario() -> None:
        engine = PacedEngine(lambda prompt: "x" * 300)
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create(park_policy="never")
            failpoints.arm_from_environment("store.before_commit:error:5")
            try:
                answer = await session.run("Hi")
            finally:
                failpoints.disarm()
            assert answer.text == "x" * 300
            assert len(engine.requests) == 2  # before and after the loss
            info = await session.get()
            assert tuple(i for e in answer.events for i in e.token_ids) == info.token_ids

    run(scenario())


def test_a_store_that_is_away_is_unavailable_and_the_server_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(reply)) as h:
            session = await h.client.create(park_policy="never")
            failpoints.arm_from_environment("store.before_begin:error")
            try:
                with pytest.raises(StoreUnavailable) as caught:
                    async for _ in session.generate("Hi", reconnect=False):
                        pass
            finally:
                failpoints.disarm()
            assert caught.value.retry_after_s > 0
            assert (await session.run("Hi")).text == "The quick brown fox jumps."
            assert (await session.get()).turn == 1

    run(scenario())


def test_h12_a_drain_ends_streams_as_unavailable_and_leaves_turns_resumable(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        tiers = Tiers()
        engine = FakeEngine(lambda prompt: "x" * 2000, held=True, tiers=tiers)
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create(park_policy="never")  # a drain parks all the same
            events: list[Event] = []

            async def follow() -> None:
                async for event in session.generate("Hi", reconnect=False):
                    events.append(event)

            task = asyncio.create_task(follow())
            await queued(engine, 1)
            await step(engine, 3)
            await eventually(lambda: text_of(events) == "xxx")
            draining = asyncio.create_task(h.manager.drain(8.0, park_share=0.98))
            await asyncio.sleep(0)
            with pytest.raises(ServerDraining):
                async for _ in session.generate("More", reconnect=False):
                    pass
            await queued(engine, 1)  # the abort that suspends
            await step(engine, 1)
            await queued(engine, 1)  # the park
            engine.allow(None)
            await draining
            assert h.manager._sessions[session.session_id].ledger.row.parked
            with pytest.raises(ServerDraining):
                await task
            assert not ends(events)
        async with harbour(tmp_path, FakeEngine(lambda prompt: "x" * 2000, tiers=tiers)) as h:
            rest = [
                e async for e in h.client.session(session.session_id).attach(events[-1].last_seq)
            ]
            assert len(text_of(events)) + len(text_of(rest)) == 2000
            assert kinds(rest) == ["Parked", "Resumed", "TurnEnd"]

    run(scenario())


def test_an_engine_that_dies_ends_streams_and_the_turn_stays_open(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(lambda prompt: "x" * 2000, held=True)
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create()

            async def follow() -> None:
                async for _ in session.generate("Hi", reconnect=False):
                    pass

            task = asyncio.create_task(follow())
            await queued(engine, 1)
            await step(engine, 3)
            engine.die = True
            engine.allow(1)
            with pytest.raises(EngineStopped):
                await task
            assert h.manager.engine_failed.is_set()
            with pytest.raises(EngineStopped):
                await h.client.call("Create", pb.CreateRequest(), 5.0)
        async with harbour(tmp_path, FakeEngine(lambda prompt: "x" * 2000)) as h:
            events = [e async for e in h.client.session(session.session_id).attach(0)]
            assert text_of(events) == "x" * 2000

    run(scenario())


class Server:
    """The fake server as a process of its own."""

    def __init__(self, data_dir: Path, address: str = "127.0.0.1:0", **environment: str) -> None:
        path = f"{HERE.parent.parent / '.src'}:{HERE}"
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "fake_server.py"), str(data_dir), address],
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("ready "), line
        self.address = line.split()[1]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def terminate(self) -> int:
        self._process.terminate()
        return self._process.wait(10)

    def wait(self) -> int:
        return self._process.wait(10)


async def _dialogue(
    tmp_path: Path, kill_at: str | None
) -> tuple[tuple[Event, ...], int, list[int]]:
    """One turn with a tool; the server is killed while it runs, or in mid-decode."""
    server = Server(tmp_path, FAKE_STEP_S="0.001")
    address, runs = server.address, 0
    restarts: list[Server] = []

    def restart() -> None:
        (restarts[-1] if restarts else server).kill()
        restarts.append(Server(tmp_path, address, FAKE_STEP_S="0.001"))

    async def slow(n: int) -> str:
        """Slow."""
        nonlocal runs
        runs += 1
        if kill_at == "tool":
            await asyncio.to_thread(restart)
        return f"{n} is done"

    written = 0

    def on_event(event: Event) -> None:
        nonlocal written
        if isinstance(event, TextDelta) and kill_at == "decode":
            written += 1
            if written == 45:
                restart()

    try:
        async with Client(address) as client:
            session = await client.create(tools=[slow], park_policy="always")
            answer = await session.run("Go", on_event=on_event, timeout_s=15)
            assert answer.text.endswith("38 39 and 4 is done.")
            ids = list((await session.get()).token_ids)
            return answer.events, runs, ids
    finally:
        for one in [server, *restarts]:
            one.kill()


@pytest.mark.parametrize("kill_at", ["tool", "decode"])
def test_a_killed_server_costs_no_event_and_no_second_tool_run(
    tmp_path: Path, kill_at: str
) -> None:
    async def scenario() -> None:
        undisturbed, _, ids = await _dialogue(tmp_path / "undisturbed", None)
        events, runs, ids_killed = await _dialogue(tmp_path / "killed", kill_at)
        assert runs == 1
        assert ids_killed == ids
        assert text_of(list(events)) == text_of(list(undisturbed))
        assert [i for e in events for i in e.token_ids] == ids
        assert sum(isinstance(e, ToolCallReady) for e in events) == 1
        assert len(ends(list(events))) == 1
        ranges = sorted({(e.first_seq, e.last_seq) for e in events})
        assert all(a[1] + 1 == b[0] for a, b in zip(ranges, ranges[1:], strict=False))

    run(scenario())


@pytest.mark.parametrize(
    "point",
    ["store.before_commit:kill:12", "store.after_commit:kill:12", "engine.before_submit:kill"],
)
def test_a_server_that_dies_at_a_failpoint_leaves_a_turn_that_goes_on(
    tmp_path: Path, point: str
) -> None:
    async def scenario() -> None:
        server = Server(tmp_path, MOORAGE_FAILPOINT=point)
        after: list[Server] = []

        async def restart() -> None:
            assert await asyncio.to_thread(server.wait) == -signal.SIGKILL
            after.append(await asyncio.to_thread(Server, tmp_path, server.address))

        try:
            async with Client(server.address) as client:

                async def slow(n: int) -> str:
                    """Slow."""
                    return "done"

                session = await client.create(tools=[slow])
                restarting = asyncio.create_task(restart())
                answer = await session.run("Go", timeout_s=15)
                await restarting
                assert answer.text.endswith("39 and done.")
                ids = (await session.get()).token_ids
                assert tuple(i for e in answer.events for i in e.token_ids) == ids
        finally:
            for one in [server, *after]:
                one.kill()

    run(scenario())


def test_h12_sigterm_ends_with_status_0_and_a_dead_engine_with_1(tmp_path: Path) -> None:
    assert Server(tmp_path / "a").terminate() == 0
    assert Server(tmp_path / "b", FAKE_DIES="1").wait() == 1
