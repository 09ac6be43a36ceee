"""One session from its client's side: the tool loop, streams that reconnect, and the
single calls.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from google.protobuf.message import Message as ProtoMessage

from moorage.sessions.client_events import (
    Event,
    Failed,
    TextDelta,
    ToolCallReady,
    TurnEnd,
    Usage,
    flatten,
)
from moorage.sessions.client_tools import ToolBox
from moorage.sessions.errors import (
    DeadlineExceeded,
    InvalidArgument,
    MoorageError,
    StateError,
    ToolResultConflict,
    UnavailableError,
)
from moorage.sessions.proto import sessions_pb2 as pb

_log = logging.getLogger("moorage.client")  # the standard library's: it is the caller's process

CALL_TIMEOUT_S = 30.0
"""Default of every unary call: above the longest wait of the server, a park of 20 s."""
TURN_TIMEOUT_S = 600.0
"""Default of a whole turn, its tools included."""
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.05, 1.0
"""Pause before a call is repeated: doubling, with jitter, up to a second; until the call's timeout.
"""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; None takes the session's default, then the server's."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    """0 … 2^64 − 1; drawn by the server where unset, and told in TurnStart."""
    max_tokens: int | None = None
    """Of a turn, over all its tool calls; 0 is the rest of the window."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None

    def to_proto(self) -> pb.SamplingParams:
        """The wire's form. Raises InvalidArgument where a value does not fit its wire type."""
        values = {k: v for k, v in vars(self).items() if v is not None}
        try:
            return pb.SamplingParams(**values)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"sampling: {error}", field="sampling") from error


@dataclass(frozen=True)
class Answer:
    """The result of `run`."""

    text: str
    """What the model wrote after its last tool call."""
    finish_reason: str
    events: tuple[Event, ...]
    usage: Usage
    turn: int
    num_tool_calls: int


@dataclass(frozen=True)
class SessionInfo:
    """The result of `get`."""

    state: str
    """One of idle, running, waiting_tools, closed."""
    parked: bool
    turn: int
    last_seq: int
    context_len: int
    token_ids: tuple[int, ...]
    pending_calls: tuple[ToolCallReady, ...]
    inspection: pb.EngineInspection | None = None
    engine: pb.EngineStatistics | None = None


class Caller(Protocol):
    """What a session needs of its client; see `Client`."""

    async def call(
        self, name: str, request: ProtoMessage, timeout_s: float, *, repeat: bool = False
    ) -> Any:
        """One unary call."""
        ...

    def stream(
        self, name: str, request: ProtoMessage, timeout_s: float
    ) -> AsyncGenerator[pb.Event, None]:
        """One streaming call."""
        ...


@dataclass
class ClientSession:
    """One session, as its client sees it."""

    client: Caller
    session_id: str
    tools: ToolBox
    context_len: int
    last_seq: int = field(default=0)
    """Last event seen by `generate`, `attach` or `run`."""

    async def run(
        self,
        prompt: str,
        *,
        tools: Sequence[Callable[..., Any]] = (),
        sampling: Sampling | None = None,
        on_event: Callable[[Event], None] | None = None,
        timeout_s: float = TURN_TIMEOUT_S,
    ) -> Answer:
        """One whole turn: send, run the tools the model calls, and go on to the answer.

        `tools` adds functions for schemas that the session was created with. Survives a server that
        dies and comes back within `timeout_s`. Raises the turn's error where it failed,
        DeadlineExceeded, and every CallerError and StateError. Cancelled: running tools are
        cancelled, the turn follows the session's disconnect policy.
        """
        box = self.tools.extended(tools)
        deadline = now() + timeout_s
        events: list[Event] = []
        text: list[str] = []
        dispatched: set[str] = set()
        end: TurnEnd | None = None
        async with _group() as group:
            stream = self.generate(prompt, sampling=sampling, timeout_s=timeout_s)
            async with aclosing(stream):
                async for event in stream:
                    events.append(event)
                    if on_event is not None:
                        on_event(event)
                    match event:
                        case ToolCallReady() if event.call_id not in dispatched:
                            dispatched.add(event.call_id)
                            text.clear()
                            group.create_task(self._answer_call(box, event, deadline))
                        case TextDelta():
                            text.append(event.text)
                        case TurnEnd():
                            end = event
                        case Failed():
                            raise event.error
                        case _:
                            pass
        if end is None:
            raise DeadlineExceeded(
                f"the turn of session {self.session_id} did not end within {timeout_s} s"
            )
        return Answer(
            "".join(text), end.finish_reason, tuple(events), end.usage, end.turn, len(dispatched)
        )

    async def _answer_call(self, box: ToolBox, call: ToolCallReady, deadline: float) -> None:
        """Run a tool once and hand its result in until the server has it."""
        result = await box.run(call.call_id, call.index, call.name, call.arguments)
        request = pb.SubmitToolResultsRequest(session_id=self.session_id, results=[result])
        try:
            await self.client.call("SubmitToolResults", request, deadline - now(), repeat=True)
        except (ToolResultConflict, StateError):
            return  # the turn was cancelled meanwhile: its stream says so

    async def generate(
        self,
        prompt: str | Sequence[pb.Message] | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        sampling: Sampling | None = None,
        deadline_s: float = 0.0,
        cancel_pending_calls: bool = False,
        continue_final_message: bool = False,
        reconnect: bool = True,
        timeout_s: float = TURN_TIMEOUT_S,
    ) -> AsyncGenerator[Event, None]:
        """Start a turn and give its events up to TurnEnd or Failed, tool waits included.

        `prompt` is a user message or a list of messages; `token_ids` are appended as they are
        instead. With `reconnect`, a broken stream is taken up again until `timeout_s`. Closing the
        iterator drops the stream.
        """
        messages = [pb.Message(role="user", content=prompt)] if isinstance(prompt, str) else prompt
        request = pb.GenerateRequest(
            session_id=self.session_id,
            messages=messages,
            tokens=pb.TokenInput(ids=token_ids) if token_ids is not None else None,
            sampling=sampling.to_proto() if sampling else None,
            deadline_s=deadline_s,
            idempotency_key=uuid.uuid4().hex,
            cancel_pending_calls=cancel_pending_calls,
            continue_final_message=continue_final_message,
        )
        async with aclosing(self._follow(request, timeout_s, reconnect)) as stream:
            async for event in stream:
                for flat in flatten(event):
                    yield flat

    async def attach(
        self,
        after_seq: int | None = None,
        *,
        until_turn_end: bool = True,
        timeout_s: float = TURN_TIMEOUT_S,
    ) -> AsyncGenerator[Event, None]:
        """Events behind `after_seq` (the last one seen here, if None). No reconnection
        of its own.
        """
        request = pb.AttachRequest(
            session_id=self.session_id,
            after_seq=self.last_seq if after_seq is None else after_seq,
            until_turn_end=until_turn_end,
        )
        async with aclosing(self.client.stream("Attach", request, timeout_s)) as stream:
            async for event in stream:
                self.last_seq = max(self.last_seq, event.last_seq)
                for flat in flatten(event):
                    yield flat

    async def _follow(
        self, request: pb.GenerateRequest, timeout_s: float, reconnect: bool
    ) -> AsyncGenerator[pb.Event, None]:
        """The wire events of a turn over as many connections as it takes.

        Before the first event, Generate is repeated under its idempotency key (it attaches where it
        was accepted); after it, Attach goes on behind the last event seen.
        """
        deadline = now() + timeout_s
        backoff = Backoff(deadline)
        seen = 0
        while True:
            left = deadline - now()
            if seen:
                attach = pb.AttachRequest(
                    session_id=self.session_id, after_seq=seen, until_turn_end=True
                )
                stream = self.client.stream("Attach", attach, left)
            else:
                stream = self.client.stream("Generate", request, left)
            problem: MoorageError = UnavailableError("the stream ended before the turn did")
            try:
                async with aclosing(stream):
                    async for event in stream:
                        seen = event.last_seq
                        self.last_seq = max(self.last_seq, seen)
                        backoff.reset()
                        yield event
                        if event.WhichOneof("kind") in ("turn_end", "failed"):
                            return
            except UnavailableError as error:
                problem = error
            if not reconnect:
                raise problem
            await backoff.wait(problem)

    async def submit_tool_results(
        self, results: Mapping[str, str], *, timeout_s: float = CALL_TIMEOUT_S
    ) -> tuple[str, ...]:
        """Hand in results (call id -> content); the ids that still wait. Repeated on
        UNAVAILABLE.
        """
        request = pb.SubmitToolResultsRequest(
            session_id=self.session_id,
            results=[pb.ToolResult(call_id=k, content=v) for k, v in results.items()],
        )
        response = await self.client.call("SubmitToolResults", request, timeout_s, repeat=True)
        return tuple(response.pending_call_ids)

    async def park(
        self, tier: str = "auto", *, timeout_s: float = CALL_TIMEOUT_S
    ) -> pb.ParkResponse:
        """Move KV off the device now."""
        response: pb.ParkResponse = await self._unary(
            "Park", pb.ParkRequest(session_id=self.session_id, tier=tier), timeout_s
        )
        return response

    async def resume(self, *, timeout_s: float = CALL_TIMEOUT_S) -> pb.ResumeResponse:
        """Bring KV back ahead of the next turn."""
        response: pb.ResumeResponse = await self._unary(
            "Resume", pb.ResumeRequest(session_id=self.session_id), timeout_s
        )
        return response

    async def cancel(self, *, timeout_s: float = CALL_TIMEOUT_S) -> pb.CancelResponse:
        """End the running turn; a no-op where none runs."""
        response: pb.CancelResponse = await self._unary(
            "Cancel", pb.CancelRequest(session_id=self.session_id), timeout_s
        )
        return response

    async def close(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """End the session for good."""
        await self._unary("Close", pb.CloseRequest(session_id=self.session_id), timeout_s)

    async def get(self, *, inspect: bool = False, timeout_s: float = CALL_TIMEOUT_S) -> SessionInfo:
        """What the session is doing; with `inspect` also its blocks on the device."""
        request = pb.GetRequest(session_id=self.session_id, inspect=inspect)
        response: pb.GetResponse = await self._unary("Get", request, timeout_s)
        state = pb.SessionState.Name(response.state).removeprefix("SESSION_STATE_").lower()
        return SessionInfo(
            state=state,
            parked=response.parked,
            turn=response.turn,
            last_seq=response.last_seq,
            context_len=response.context_len,
            token_ids=tuple(response.token_ids),
            pending_calls=tuple(
                ToolCallReady(
                    response.turn, 0, 0, c.call_id, c.index, c.name, c.arguments_json, c.num_calls
                )
                for c in response.pending_calls
            ),
            inspection=response.inspection if response.HasField("inspection") else None,
            engine=response.engine if response.HasField("engine") else None,
        )

    async def _unary(self, name: str, request: ProtoMessage, timeout_s: float) -> Any:
        return await self.client.call(name, request, timeout_s)


class Backoff:
    """Pauses that double, with jitter, up to a bound; they end with the deadline."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._pause_s = FIRST_BACKOFF_S

    def reset(self) -> None:
        """Something worked."""
        self._pause_s = FIRST_BACKOFF_S

    async def wait(self, problem: MoorageError) -> None:
        """Pause. Raises DeadlineExceeded, caused by `problem`, where no time is left for it."""
        if self._pause_s == FIRST_BACKOFF_S:
            left = self._deadline - now()
            _log.warning("no answer, trying again for %.0f s: %s", left, problem.message)
        pause = self._pause_s * random.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, LAST_BACKOFF_S)
        if now() + pause >= self._deadline:
            raise DeadlineExceeded(
                f"no success before the timeout; the last error: {problem.message}"
            ) from problem
        await asyncio.sleep(pause)


@asynccontextmanager
async def _group() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose first error is raised as itself: callers catch typed errors,
    not groups.
    """
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from several


def now() -> float:
    """The event loop's clock, in seconds."""
    return asyncio.get_running_loop().time()
