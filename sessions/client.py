"""The client: sessions over gRPC, with the tool loop and reconnection. Imports no torch and no
engine.

    async with Client("localhost:50051") as client:
        session = await client.create(system="You are helpful.", tools=[add])
        answer = await session.run("What is 2 + 3?")
        print(answer.text)

A stream that breaks is taken up again with Attach behind the last event that was seen, so nothing
is lost or repeated; a tool call is run once by this client, and its result is sent until the server
has it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import grpc
from google.protobuf.message import Message as ProtoMessage

from moorage.sessions.client_session import (
    CALL_TIMEOUT_S,
    Answer,
    Backoff,
    ClientSession,
    Sampling,
    SessionInfo,
    now,
)
from moorage.sessions.client_tools import ToolBox
from moorage.sessions.errors import (
    InvalidArgument,
    MessageTooLarge,
    UnavailableError,
    from_rpc_error,
)
from moorage.sessions.proto import sessions_pb2 as pb
from moorage.sessions.proto import sessions_pb2_grpc

__all__ = ["Answer", "Client", "ClientSession", "Sampling", "SessionInfo"]

ParkPolicy = Literal["auto", "always", "never"]
DisconnectPolicy = Literal["continue", "park", "cancel"]

MAX_MESSAGE_BYTES = 4 << 20
"""As the server's; a larger request is refused before it is sent."""

_PARK = {
    "auto": pb.PARK_POLICY_AUTO,
    "always": pb.PARK_POLICY_ALWAYS,
    "never": pb.PARK_POLICY_NEVER,
}
_DISCONNECT = {
    "continue": pb.DISCONNECT_POLICY_CONTINUE,
    "park": pb.DISCONNECT_POLICY_PARK,
    "cancel": pb.DISCONNECT_POLICY_CANCEL,
}


class Client:
    """One connection. Safe to share between tasks of one event loop."""

    def __init__(
        self, target: str, *, token: str | None = None, max_message_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        """`target`: HOST:PORT. `token`: bearer token, where the server asks for one."""
        self._target = target
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._max_bytes = max_message_bytes
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any | None = None

    async def __aenter__(self) -> Client:
        self._channel = grpc.aio.insecure_channel(
            self._target,
            options=[
                ("grpc.max_receive_message_length", self._max_bytes),
                (
                    "grpc.max_send_message_length",
                    -1,
                ),  # checked here, with a text that says what to do
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.min_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 1_000),
            ],
        )
        self._stub = sessions_pb2_grpc.SessionsStub(self._channel)  # type: ignore[no-untyped-call]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = self._stub = None

    async def create(
        self,
        *,
        system: str = "",
        tools: Sequence[Callable[..., Any]] = (),
        tool_schemas: Sequence[Mapping[str, Any]] = (),
        sampling: Sampling | None = None,
        park_policy: ParkPolicy = "auto",
        disconnect_policy: DisconnectPolicy = "continue",
        park_tier: str = "auto",
        idempotency_key: str | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> ClientSession:
        """Make a session. `tools` are Python functions that `run` calls; `tool_schemas` are tools
        that the caller answers himself (`{"name", "description", "parameters"}`).

        Repeated on UNAVAILABLE until `timeout_s`: a key is made where none is given, so it makes
        one session.
        """
        box = ToolBox(tools)
        request = pb.CreateRequest(
            system=system,
            tools=[*box.schemas(), *map(_schema_to_proto, tool_schemas)],
            sampling=sampling.to_proto() if sampling else None,
            park_policy=_PARK[park_policy],
            disconnect_policy=_DISCONNECT[disconnect_policy],
            park_tier=park_tier,
            idempotency_key=idempotency_key or uuid.uuid4().hex,
        )
        response = await self.call("Create", request, timeout_s, repeat=True)
        return ClientSession(self, response.session_id, box, response.context_len)

    def session(
        self, session_id: str, *, tools: Sequence[Callable[..., Any]] = ()
    ) -> ClientSession:
        """A session that exists already."""
        return ClientSession(self, session_id, ToolBox(tools), 0)

    async def inspect_engine(self, *, timeout_s: float = CALL_TIMEOUT_S) -> pb.GetResponse:
        """The engine's block counts and counters, without a session."""
        response: pb.GetResponse = await self.call("Get", pb.GetRequest(inspect=True), timeout_s)
        return response

    async def call(
        self, name: str, request: ProtoMessage, timeout_s: float, *, repeat: bool = False
    ) -> Any:
        """One unary call of the service by name, with typed errors.

        `repeat`: again on UNAVAILABLE, with back-off, until `timeout_s` has passed. Only for calls
        that may be repeated. Cancel-safe.
        """
        self._check_size(request)
        deadline = now() + timeout_s
        backoff = Backoff(deadline)
        while True:
            try:
                method = getattr(self._connected(), name)
                return await method(
                    request, timeout=max(0.01, deadline - now()), metadata=self._metadata
                )
            except grpc.RpcError as error:
                known = from_rpc_error(error)
                if not (repeat and isinstance(known, UnavailableError)):
                    raise known from error
                await backoff.wait(known)

    async def stream(
        self, name: str, request: ProtoMessage, timeout_s: float
    ) -> AsyncGenerator[pb.Event, None]:
        """One streaming call, with typed errors. Closing the iterator cancels the call."""
        self._check_size(request)
        call = getattr(self._connected(), name)(
            request, timeout=max(0.01, timeout_s), metadata=self._metadata
        )
        try:
            async for event in call:
                yield event
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    def _connected(self) -> Any:
        if self._stub is None:
            raise InvalidArgument("the client is not connected: use `async with Client(...)`")
        return self._stub

    def _check_size(self, request: ProtoMessage) -> None:
        size = request.ByteSize()
        if size > self._max_bytes:
            raise MessageTooLarge(
                f"the request has {size} bytes and the limit is {self._max_bytes}: shorten the"
                " content; nothing"
                " was sent"
            )


def _schema_to_proto(schema: Mapping[str, Any]) -> pb.ToolSchema:
    return pb.ToolSchema(
        name=schema.get("name", ""),
        description=schema.get("description", ""),
        parameters_json=json.dumps(schema.get("parameters", {})),
    )
