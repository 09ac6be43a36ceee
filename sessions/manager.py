"""All sessions of one server: making them, finding them, feeding them what the engine says, and
stopping.

Owns the committer's task, the engine link and the sessions in memory. A session is in memory while
it has work or a stream; others are dropped at a bound and loaded from the store when someone asks.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import structlog

from moorage.engine import (
    EngineFailed,
    Inspection,
    Namespace,
    ParkDone,
    ParkPrepared,
    ParkRefused,
    RestoreDone,
    StepOutput,
)
from moorage.sessions.call_parsers import parser_factory
from moorage.sessions.committer import Committer
from moorage.sessions.engine_link import EngineFacade, EngineLink
from moorage.sessions.errors import (
    DeadlineExceeded,
    EngineStopped,
    InvalidArgument,
    ServerDraining,
    SessionNotFound,
    StaleWrite,
    StoreUnavailable,
)
from moorage.sessions.ledger import bounded
from moorage.sessions.limits import Limits
from moorage.sessions.services import SessionServices
from moorage.sessions.session import Session
from moorage.sessions.session_config import SessionConfig, resolve_sampling
from moorage.sessions.state import SessionState
from moorage.sessions.store import SessionRow, SessionStore, SessionWrite
from moorage.sessions.templates import ChatTemplate
from moorage.sessions.turn_input import check_fits

_log = structlog.get_logger("moorage.sessions")
_SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
"""Ids go into cache keys and log lines; anything else is refused before it is looked up (case D16).
"""

PARK_SHARE = 0.2
"""Of a shutdown's grace: a park takes milliseconds, a turn seconds."""

DRAIN_POLL_S = 0.02
"""Pause between looks at the running turns while the server drains."""


class SessionManager:
    """Event loop only. Use `run()` as a context; every coroutine is cancel-safe."""

    def __init__(self, engine: EngineFacade, store: SessionStore, limits: Limits) -> None:
        """Raises TemplateError where the model's chat template does not compile."""
        self.engine = engine
        self.limits = limits
        self._store = store
        self.link = EngineLink(engine, outbox=limits.engine_outbox)
        self.committer = Committer(store, max_pending=limits.pending_commits)
        info = engine.model_info
        template = (
            ChatTemplate(
                info.chat_template,
                special_tokens=info.special_tokens,
                max_chars=limits.max_rendered_chars,
            )
            if info.chat_template
            else None
        )
        self._services = SessionServices(
            engine=engine,
            link=self.link,
            committer=self.committer,
            store=store,
            limits=limits,
            template=template,
            parsers=parser_factory,
            spawn=self._spawn,
        )
        self._sessions: dict[str, Session] = {}
        self._loading: dict[str, asyncio.Task[Session]] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._draining = False
        self.engine_failed = asyncio.Event()
        """The engine thread ended: the server must be restarted."""

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Start the engine, go on with what was running, and on the way out flush and stop."""
        commits = asyncio.create_task(self.committer.run(), name="moorage-committer")
        try:
            self.link.start(self._on_step)
            await self._recover()
            yield
        finally:
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            try:
                await self.committer.flush(self.limits.commit_wait_s)
            except TimeoutError:
                _log.error("commits left behind at shutdown")
            commits.cancel()
            await asyncio.gather(commits, return_exceptions=True)
            self.link.close()
            self.committer.close()

    # -- sessions
    # ------------------------------------------------------------------------------------------

    async def create(
        self, namespace: Namespace, config: SessionConfig, idempotency_key: str = ""
    ) -> tuple[str, bool]:
        """(session id, it existed). Raises ContextTooLong where system prompt and tools alone fill
        the window, InvalidRequest (engine) for sampling out of range, ServerDraining,
        StoreUnavailable.
        """
        self._check_open()
        if idempotency_key and (known := await self._by_key(namespace, idempotency_key)):
            return known, True
        resolve_sampling(config.sampling, {}, 0)
        await self._check_opening(config)
        session_id = f"s-{secrets.token_hex(12)}"
        row = SessionRow(
            session_id=session_id,
            tenant=namespace.tenant,
            name=namespace.name,
            config=config.to_bytes(),
            idempotency_key=idempotency_key,
            version=1,
        )
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def committed(error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self.committer.submit(SessionWrite(row), committed)
        try:
            await bounded(future, self.limits.commit_wait_s, "the session store did not answer")
        except StaleWrite as error:  # another Create with this key was faster
            known = await self._by_key(namespace, idempotency_key)
            if known is None:
                raise StoreUnavailable(
                    f"the other Create with idempotency_key {idempotency_key!r} was not stored:"
                    " send this one again",
                    retry_after_s=0.1,
                ) from error
            return known, True
        return session_id, False

    async def _by_key(self, namespace: Namespace, idempotency_key: str) -> str | None:
        return await asyncio.to_thread(self._store.find_by_key, namespace.tenant, idempotency_key)

    async def _check_opening(self, config: SessionConfig) -> None:
        """Raises ContextTooLong now rather than at the first turn."""
        if not (config.system or config.tools):
            return
        pieces = self._services.chat_template().opening(config.system, config.tools)
        engine = self.engine

        def count() -> int:
            return sum(
                len(engine.encode(piece.text, allow_special=not piece.is_content))
                for piece in pieces
            )

        check_fits(0, await asyncio.to_thread(count), engine.model_info.context_len)

    async def session(self, namespace: Namespace, session_id: str) -> Session:
        """The session, loaded if need be. Raises SessionNotFound (also for another tenant's),
        StoreUnavailable.
        """
        if not _SESSION_ID.match(session_id):
            raise InvalidArgument(
                f"session_id {session_id[:80]!r} is malformed: 1 to 64 letters, digits, '-' and"
                " '_'",
                field="session_id",
            )
        session = self._sessions.get(session_id)
        if session is None:
            task = self._loading.get(session_id)
            if task is None:  # one load for all who ask at once
                task = asyncio.create_task(self._load(session_id))
                self._loading[session_id] = task
                task.add_done_callback(lambda _: self._loading.pop(session_id, None))
            session = await asyncio.shield(task)
        if session.ledger.namespace != namespace:
            raise SessionNotFound(f"session {session_id} does not exist", field="session_id")
        return session

    async def _load(self, session_id: str) -> Session:
        stored = await asyncio.to_thread(self._store.load, session_id)
        if stored is None:
            raise SessionNotFound(f"session {session_id} does not exist", field="session_id")
        session = Session(self._services, stored, self._forget)
        self._sessions[session_id] = session
        self._evict()
        if not self._draining:
            session.recover()
        return session

    def _forget(self, session: Session) -> None:
        if self._sessions.get(session.session_id) is session:
            del self._sessions[session.session_id]

    def _evict(self) -> None:
        surplus = len(self._sessions) - self.limits.idle_sessions
        if surplus <= 0:
            return
        idle = [session for session in self._sessions.values() if session.evictable]
        idle.sort(key=lambda session: session.ledger.last_used_s)
        for session in idle[:surplus]:
            self._forget(session)

    def check_accepting(self) -> None:
        """Raises ServerDraining, EngineStopped."""
        self._check_open()

    def _check_open(self) -> None:
        if self._draining:
            raise ServerDraining(
                "the server is shutting down: connect to another, or again shortly",
                retry_after_s=1.0,
            )
        if self.engine_failed.is_set():
            raise EngineStopped("the engine ended: the server must be restarted", retry_after_s=5.0)

    # -- the engine's word
    # ---------------------------------------------------------------------------------

    def _on_step(self, output: StepOutput) -> None:
        """One step: every session's share, then one wake-up of the committer (it
        gathers them all).
        """
        for token in output.tokens:
            session = self._sessions.get(token.session_id)
            if session is not None:
                session.loop.on_output(token)
        for event in output.events:
            match event:
                case Inspection():
                    self.link.inspected(event)
                case EngineFailed():
                    _log.error("engine failed", error=event.error.message)
                    self.engine_failed.set()
                    stopped = EngineStopped(
                        "the engine ended; running turns go on after a restart", retry_after_s=5.0
                    )
                    for session in tuple(self._sessions.values()):
                        session.streams.end(stopped)
                case ParkPrepared() | ParkRefused() | ParkDone() | RestoreDone():
                    session = self._sessions.get(event.session_id)
                    if session is None:
                        continue
                    match event:
                        case ParkPrepared():
                            session.parking.on_prepared(event)
                        case ParkRefused():
                            session.parking.on_refused(event)
                        case ParkDone():
                            session.parking.on_done(event)
                        case RestoreDone():
                            session.parking.on_restored(event)

    async def _recover(self) -> None:
        """Load what was under way when the last process ended; loading goes on with it."""
        for state in (SessionState.RUNNING, SessionState.WAITING_TOOLS):
            for session_id in await asyncio.to_thread(self._store.sessions_in, state):
                if session_id not in self._sessions:
                    await self._load(session_id)

    def _spawn(self, coroutine: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(_logged(coroutine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- shutdown
    # ------------------------------------------------------------------------------------------

    async def drain(self, grace_s: float, *, park_share: float = PARK_SHARE) -> None:
        """Take no new work, let running turns end, suspend and park the rest, all in `grace_s`.

        The last `park_share` of the time is for parking.

        Streams end with ServerDraining (UNAVAILABLE): the same client goes on with Attach at the
        next server. Sessions that wait for tools are parked at once: their turns cannot end here.
        """
        self._draining = True
        loop = asyncio.get_running_loop()
        end = loop.time() + grace_s
        for session in self._in_state(SessionState.WAITING_TOOLS):
            self._let_go(session)
        while self._in_state(SessionState.RUNNING) and loop.time() < end - park_share * grace_s:
            if self.engine_failed.is_set():
                break
            await asyncio.sleep(DRAIN_POLL_S)
        for session in self._in_state(SessionState.RUNNING):
            session.loop.suspend()
        for session in tuple(self._sessions.values()):
            self._let_go(session)
        while any(_settling(s) for s in self._sessions.values()) and loop.time() < end:
            if self.engine_failed.is_set():
                break
            await asyncio.sleep(DRAIN_POLL_S)

    def _let_go(self, session: Session) -> None:
        session.streams.end(
            ServerDraining("the server is shutting down: attach again shortly", retry_after_s=1.0)
        )
        if session.ledger.state is SessionState.WAITING_TOOLS:
            session.parking.begin(session.config.park_tier)

    def _in_state(self, state: SessionState) -> list[Session]:
        return [s for s in self._sessions.values() if s.ledger.state is state]

    async def inspect(self, session_id: str) -> Inspection:
        """The engine's count of blocks; see `EngineLink.inspect`."""
        return await self.link.inspect(session_id, self.limits.command_wait_s)


def _settling(session: Session) -> bool:
    """The engine still owes an answer: to an abort, which a park follows, or to a park."""
    return session.loop.request is not None or session.parking.busy


async def _logged(coroutine: Coroutine[Any, Any, object]) -> None:
    try:
        await coroutine
    except asyncio.CancelledError:
        raise
    except DeadlineExceeded as error:
        _log.warning("background work timed out", error=error.message)
    except Exception:  # nobody awaits it: the log is where it is heard
        _log.exception("background work failed")
