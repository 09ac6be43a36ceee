"""Where a session's KV is: parks, resumes, and what a turn must wait for.

    begin ──Park──▶ engine copies, stores ──ParkPrepared──▶ commit manifest + row in one transaction
                                                                 │ durable
         settled ◀──ParkDone── engine frees blocks ◀──ParkCommitted──┘  event Parked

A turn that wants to run while frames are being stored waits for that (bounded by `park_wait_s`), so
a resume never races its own park. A park that comes too late is declined with ParkFailed and leaves
no trace. After a crash a park in flight counts as not done: the manifest of the last commit still
describes frames that no one has deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar

import structlog

from moorage.engine import (
    Park,
    ParkCommitted,
    ParkDone,
    ParkFailed,
    ParkPrepared,
    ParkRefused,
    ParkTier,
    Restore,
    RestoreDone,
)
from moorage.sessions.errors import DeadlineExceeded, MoorageError, StateError, from_fault
from moorage.sessions.failpoints import hit
from moorage.sessions.ledger import Ledger
from moorage.sessions.park_decision import wants_park
from moorage.sessions.services import SessionServices
from moorage.sessions.session_config import SessionConfig
from moorage.sessions.state import SessionState
from moorage.sessions.store import ManifestChange
from moorage.sessions.token_log import ParkedRecord, ResumedRecord

_log = structlog.get_logger("moorage.sessions")
T = TypeVar("T")


@dataclass(frozen=True)
class ParkOutcome:
    """A park that was settled."""

    tier: str = ""
    """Empty: there was no KV to park."""
    num_tokens: int = 0
    num_bytes: int = 0
    duration_s: float = 0.0
    num_freed_blocks: int = 0


@dataclass
class _Flight:
    """One park between its command and its end."""

    generation: int
    timer: asyncio.TimerHandle
    outcome: ParkOutcome | None = None
    """Set once the manifest is durable: from then on a turn may start."""
    waiters: list[asyncio.Future[ParkOutcome]] = field(default_factory=list)


class Parking:
    """Event loop only; one per session."""

    def __init__(
        self,
        services: SessionServices,
        config: SessionConfig,
        ledger: Ledger,
        manifest: bytes | None,
    ) -> None:
        self._services = services
        self._config = config
        self._ledger = ledger
        self.manifest = manifest
        """The last committed one; handed to the engine with every request."""
        self.on_settled: Callable[[], None] = lambda: None
        """Called when a park no longer holds up a turn."""
        self._next_generation = ledger.row.generation + 1
        self._flight: _Flight | None = None
        self._restore: asyncio.Future[RestoreDone] | None = None

    @property
    def busy(self) -> bool:
        """A park or a restore is under way."""
        return self._flight is not None or self._restore is not None

    @property
    def blocks_submit(self) -> bool:
        """Frames are being stored: a turn waits."""
        return self._flight is not None and self._flight.outcome is None

    def after_tool_calls(self) -> None:
        """The turn waits for tools: park if the policy says so."""
        if self._ledger.state is SessionState.WAITING_TOOLS and wants_park(
            self._config.park_policy, waits_for_tools=True
        ):
            self.begin(self._config.park_tier)

    def after_turn(self) -> None:
        """The turn ended and a human is next."""
        if self._ledger.state is SessionState.IDLE and wants_park(
            self._config.park_policy, waits_for_tools=False
        ):
            self.begin(self._config.park_tier)

    def begin(self, tier: ParkTier) -> None:
        """Ask for a park; nothing where there is no KV, it is parked already, or a park is under
        way.
        """
        if self._flight is not None or self._ledger.row.parked or not self._ledger.log.num_tokens:
            return
        if self._ledger.lost is not None or self._restore is not None:
            return
        generation = self._next_generation
        self._next_generation += 1
        timer = asyncio.get_running_loop().call_later(
            self._services.limits.park_wait_s, self._give_up, generation
        )
        self._flight = _Flight(generation, timer)
        try:
            self._services.link.send(Park(self._ledger.session_id, generation, tier))
        except MoorageError as error:
            self._settle(error)

    async def park(self, tier: ParkTier) -> ParkOutcome:
        """Park now and wait for free device blocks.

        Raises StateError while a turn generates, TierUnavailable where no tier took the frames (the
        KV stays), DeadlineExceeded. Cancel-safe: the park goes on.
        """
        self._check_still("parked")
        if not self._ledger.log.num_tokens or (self._ledger.row.parked and self._flight is None):
            return ParkOutcome()
        self.begin(tier)
        future: asyncio.Future[ParkOutcome] = asyncio.get_running_loop().create_future()
        if self._flight is None:
            raise StateError(f"session {self._ledger.session_id} cannot be parked now: try again")
        self._flight.waiters.append(future)
        return await self._answer(future, "the park was not done")

    async def resume(self) -> RestoreDone | None:
        """Bring KV back; None where there is none. Raises StateError, DeadlineExceeded.
        Cancel-safe.
        """
        self._check_still("resumed")
        if not self._ledger.log.num_tokens:
            return None
        if self.busy:
            raise StateError(
                f"session {self._ledger.session_id} is being parked or resumed: wait for its end"
            )
        future: asyncio.Future[RestoreDone] = asyncio.get_running_loop().create_future()
        self._restore = future
        try:
            self._services.link.send(
                Restore(
                    self._ledger.session_id,
                    self._ledger.namespace,
                    self._ledger.log.packed_ids,
                    self.manifest,
                )
            )
            return await self._answer(future, "the KV was not restored")
        finally:
            self._restore = None

    async def _answer(self, future: asyncio.Future[T], what: str) -> T:
        seconds = self._services.limits.command_wait_s
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            raise DeadlineExceeded(f"{what} within {seconds} s") from None

    def _check_still(self, done: str) -> None:
        self._ledger.check_usable()
        if self._ledger.state is SessionState.RUNNING:
            raise StateError(
                f"session {self._ledger.session_id} generates: it can be {done} when it is idle or"
                " waits for tools"
            )

    # -- what the engine says
    # ------------------------------------------------------------------------------

    def on_prepared(self, event: ParkPrepared) -> None:
        """Frames are stored: make the manifest durable, then let the engine free the blocks."""
        flight = self._flight
        if flight is None or flight.generation != event.generation or self._ledger.lost is not None:
            self._send(ParkFailed(event.session_id, event.generation))
            return
        log = self._ledger.log
        record = ParkedRecord(
            log.take_seq(), self._ledger.row.turn, event.tier, event.num_tokens, event.num_bytes,
            event.seconds, event.degraded,
        )  # fmt: skip
        log.add(record)
        self._ledger.row = replace(self._ledger.row, parked=True, generation=event.generation)

        def durable() -> None:
            self.manifest = event.manifest
            hit("engine.before_park_committed")
            self._send(ParkCommitted(event.session_id, event.generation))
            flight.outcome = ParkOutcome(
                event.tier, event.num_tokens, event.num_bytes, event.seconds
            )
            self.on_settled()

        self._ledger.commit(
            self._ledger.project([record]), manifest=ManifestChange(event.manifest), then=durable
        )

    def on_refused(self, event: ParkRefused) -> None:
        """Nothing was stored; the KV stays on the device."""
        if self._flight is not None and self._flight.generation == event.generation:
            _log.warning("park refused", session_id=event.session_id, code=event.error.code.value)
            self._settle(from_fault(event.error.code.value, event.error.message))

    def on_done(self, event: ParkDone) -> None:
        """Device blocks are free."""
        flight = self._flight
        if (
            flight is not None
            and flight.generation == event.generation
            and flight.outcome is not None
        ):
            flight.outcome = replace(flight.outcome, num_freed_blocks=event.num_freed_blocks)
            self._settle(None)

    def on_restored(self, event: RestoreDone) -> None:
        """KV is on the device as far as its sources say."""
        if self._restore is None or self._ledger.lost is not None:
            return
        if event.error is None:
            log = self._ledger.log
            record = ResumedRecord(
                log.take_seq(),
                self._ledger.row.turn,
                asdict(event.sources),
                0,
                event.seconds,
                0.0,
                0.0,
            )
            log.add(record)
            self._ledger.row = replace(self._ledger.row, parked=False)
            self._ledger.commit(self._ledger.project([record]))
        if not self._restore.done():
            self._restore.set_result(event)

    def lose(self, error: MoorageError) -> None:
        """The session was dropped from memory."""
        self._settle(error)
        if self._restore is not None and not self._restore.done():
            self._restore.set_exception(error)

    def _give_up(self, generation: int) -> None:
        flight = self._flight
        if flight is not None and flight.generation == generation:
            _log.warning("park given up", session_id=self._ledger.session_id, generation=generation)
            seconds = self._services.limits.park_wait_s
            self._settle(
                DeadlineExceeded(f"the park was not done within {seconds} s; the KV stays as it is")
            )

    def _settle(self, error: MoorageError | None) -> None:
        flight, self._flight = self._flight, None
        if flight is None:
            return
        flight.timer.cancel()
        for waiter in flight.waiters:
            if waiter.done():
                continue
            if error is None and flight.outcome is not None:
                waiter.set_result(flight.outcome)
            else:
                waiter.set_exception(error or DeadlineExceeded("the park was not done"))
        self.on_settled()

    def _send(self, command: ParkCommitted | ParkFailed) -> None:
        try:
            self._services.link.send(command)
        except (
            MoorageError
        ) as error:  # the engine keeps its blocks until it is told; nothing is lost
            _log.warning("engine not told", session_id=self._ledger.session_id, code=error.code)
