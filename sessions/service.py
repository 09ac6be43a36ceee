"""The gRPC servicer: protobuf in, session calls, protobuf out. No decision is made here.

Every call is authenticated first and ends with a status from the one table in `errors.py`. Streams
are written with `context.write`, not yielded, so that a client's cancellation is raised here and
the stream is let go at once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeAlias, cast

import grpc
import structlog

from moorage.engine import Namespace, ParkTier
from moorage.sessions.auth import Authenticator
from moorage.sessions.errors import (
    ERROR_METADATA_KEY,
    InvalidArgument,
    MoorageError,
    as_moorage_error,
    status_of,
    to_detail,
)
from moorage.sessions.limits import Limits
from moorage.sessions.manager import SessionManager
from moorage.sessions.open_calls import ResultInput
from moorage.sessions.proto import sessions_pb2 as pb
from moorage.sessions.proto import sessions_pb2_grpc
from moorage.sessions.service_values import (
    DISCONNECT_POLICIES,
    PARK_POLICIES,
    inspection_to_proto,
    policy,
    sampling_values,
    sources_to_proto,
    state_to_proto,
    statistics_to_proto,
)
from moorage.sessions.session import Session
from moorage.sessions.session_config import SessionConfig
from moorage.sessions.subscription import Subscription
from moorage.sessions.templates import ChatMessage, ChatToolCall
from moorage.sessions.tool_schemas import canonical_tools
from moorage.sessions.turn_input import TurnInput

_log = structlog.get_logger("moorage.sessions")

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

TIERS = ("auto", "host", "disk", "redis")


class SessionsServicer(sessions_pb2_grpc.SessionsServicer):
    """One instance a server; holds nothing of its own."""

    def __init__(
        self, manager: SessionManager, authenticator: Authenticator, limits: Limits
    ) -> None:
        self._manager = manager
        self._authenticator = authenticator
        self._limits = limits

    async def Create(self, request: pb.CreateRequest, context: Context) -> pb.CreateResponse:
        """See the proto. INVALID_ARGUMENT names the field."""
        async with self._answering(context) as namespace:
            self._check_key(request.idempotency_key)
            config = SessionConfig(
                system=request.system,
                tools=canonical_tools(request.tools, self._limits.max_tools),
                sampling=sampling_values(request.sampling),
                park_policy=policy(request.park_policy, PARK_POLICIES, "park_policy"),
                disconnect_policy=policy(
                    request.disconnect_policy, DISCONNECT_POLICIES, "disconnect_policy"
                ),
                park_tier=_tier(request.park_tier, "park_tier"),
            )
            session_id, existed = await self._manager.create(
                namespace, config, request.idempotency_key
            )
            info = self._manager.engine.model_info
            return pb.CreateResponse(
                session_id=session_id,
                existed=existed,
                context_len=info.context_len,
                model=info.name,
            )

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """See the proto. The stream ends with TurnEnd or Failed."""
        async with self._answering(context) as namespace:
            self._manager.check_accepting()
            turn_input = self._turn_input(request)
            session = await self._manager.session(namespace, request.session_id)
            await self._stream(context, session, await session.start_turn(turn_input))

    async def Attach(self, request: pb.AttachRequest, context: Context) -> None:
        """See the proto."""
        async with self._answering(context) as namespace:
            self._manager.check_accepting()
            session = await self._manager.session(namespace, request.session_id)
            subscription = session.attach(request.after_seq, until_turn_end=request.until_turn_end)
            await self._stream(context, session, subscription)

    async def _stream(self, context: Context, session: Session, subscription: Subscription) -> None:
        done = False
        try:
            async for event in subscription.events():
                await context.write(event)
            done = True
        except MoorageError:
            done = True  # the server ended it; the client's policy for dropped streams is not meant
            raise
        finally:
            session.detach(subscription, dropped=not done)

    async def SubmitToolResults(
        self, request: pb.SubmitToolResultsRequest, context: Context
    ) -> pb.SubmitToolResultsResponse:
        """See the proto."""
        async with self._answering(context) as namespace:
            if not request.results:
                raise InvalidArgument("results is empty: send at least one", field="results")
            session = await self._manager.session(namespace, request.session_id)
            results = [ResultInput(r.call_id, r.content, r.is_error) for r in request.results]
            accepted, duplicates = await session.submit_results(results)
            return pb.SubmitToolResultsResponse(
                num_accepted=accepted,
                num_duplicates=duplicates,
                pending_call_ids=session.ledger.calls.pending_ids(),
            )

    async def Park(self, request: pb.ParkRequest, context: Context) -> pb.ParkResponse:
        """See the proto."""
        async with self._answering(context) as namespace:
            tier = _tier(request.tier, "tier")
            session = await self._manager.session(namespace, request.session_id)
            outcome = await session.parking.park(tier)
            return pb.ParkResponse(
                tier=outcome.tier,
                num_tokens=outcome.num_tokens,
                num_bytes=outcome.num_bytes,
                duration_s=outcome.duration_s,
                num_freed_blocks=outcome.num_freed_blocks,
            )

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        """See the proto."""
        async with self._answering(context) as namespace:
            session = await self._manager.session(namespace, request.session_id)
            restored = await session.parking.resume()
            if restored is None:
                return pb.ResumeResponse(sources=pb.TokenSources())
            return pb.ResumeResponse(
                sources=sources_to_proto(restored.sources),
                num_bytes=restored.num_bytes,
                duration_s=restored.seconds,
            )

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """See the proto."""
        async with self._answering(context) as namespace:
            session = await self._manager.session(namespace, request.session_id)
            was_running, cancelled = await session.cancel()
            return pb.CancelResponse(
                was_running=was_running,
                cancelled_call_ids=cancelled,
                last_seq=session.ledger.published_seq,
            )

    async def Close(self, request: pb.CloseRequest, context: Context) -> pb.CloseResponse:
        """See the proto."""
        async with self._answering(context) as namespace:
            session = await self._manager.session(namespace, request.session_id)
            await session.close()
            return pb.CloseResponse()

    async def Get(self, request: pb.GetRequest, context: Context) -> pb.GetResponse:
        """See the proto."""
        async with self._answering(context) as namespace:
            response = pb.GetResponse(context_len=self._manager.engine.model_info.context_len)
            if request.session_id or not request.inspect:
                session = await self._manager.session(namespace, request.session_id)
                _describe(session, response)
            if request.inspect:
                inspection = await self._manager.inspect(request.session_id)
                response.inspection.CopyFrom(inspection_to_proto(inspection))
                response.engine.CopyFrom(statistics_to_proto(self._manager.engine.statistics()))
            return response

    def _turn_input(self, request: pb.GenerateRequest) -> TurnInput:
        self._check_key(request.idempotency_key)
        if bool(request.messages) == request.HasField("tokens"):
            raise InvalidArgument(
                "a turn takes messages or tokens: send exactly one of them", field="messages"
            )
        if len(request.messages) > self._limits.max_messages:
            raise InvalidArgument(
                f"there are {len(request.messages)} messages, the limit is"
                f" {self._limits.max_messages}",
                field="messages",
            )
        if not 0.0 <= request.deadline_s < float("inf"):
            raise InvalidArgument(
                f"deadline_s is {request.deadline_s}, allowed is 0 (none) or more",
                field="deadline_s",
            )
        messages = tuple(
            ChatMessage(
                m.role,
                m.content,
                tuple(ChatToolCall(c.name, c.arguments_json) for c in m.tool_calls),
            )
            for m in request.messages
        )
        for i, message in enumerate(messages):
            message.validate(f"messages[{i}]")
        return TurnInput(
            messages=messages,
            token_ids=tuple(request.tokens.ids) if request.HasField("tokens") else None,
            sampling=sampling_values(request.sampling),
            deadline_s=request.deadline_s,
            idempotency_key=request.idempotency_key,
            cancel_pending_calls=request.cancel_pending_calls,
            continue_final_message=request.continue_final_message,
        )

    def _check_key(self, key: str) -> None:
        limit = self._limits.max_idempotency_key_len
        if len(key) > limit:
            raise InvalidArgument(
                f"idempotency_key has {len(key)} characters, the limit is {limit}",
                field="idempotency_key",
            )

    @asynccontextmanager
    async def _answering(self, context: Context) -> AsyncIterator[Namespace]:
        """Authenticate, and turn any error into its status."""
        try:
            yield self._authenticator.namespace(context.invocation_metadata() or ())
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            known = as_moorage_error(error)
            if known is not error:
                _log.exception("unexpected error in a call", error=type(error).__name__)
            await _abort(context, known)


async def _abort(context: Context, error: MoorageError) -> NoReturn:
    detail = to_detail(error)
    await context.abort(
        status_of(error),
        detail.message,
        trailing_metadata=((ERROR_METADATA_KEY, detail.SerializeToString()),),
    )
    raise AssertionError("abort returned")


def _tier(name: str, field: str) -> ParkTier:
    if name not in ("", *TIERS):
        raise InvalidArgument(
            f"{field} is {name[:40]!r}, allowed are {', '.join(TIERS)}", field=field
        )
    return cast(ParkTier, name or "auto")


def _describe(session: Session, response: pb.GetResponse) -> None:
    ledger = session.ledger
    response.session_id = session.session_id
    response.state = state_to_proto(ledger.state)
    response.parked = ledger.row.parked
    response.turn = ledger.row.turn
    response.last_seq = ledger.published_seq
    response.num_tokens = ledger.log.num_tokens
    response.token_ids.extend(ledger.log.ids())
    pending = ledger.calls.pending()
    for row in pending:
        response.pending_calls.add(
            call_id=row.call_id,
            index=row.index,
            name=row.name,
            arguments_json=row.arguments,
            num_calls=len(pending),
        )
