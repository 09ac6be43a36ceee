"""The bridge between the event loop and the engine thread.

Out: commands, in order, through a bounded outbox that waits out a full mailbox. In: one
`call_soon_threadsafe` a step, whatever the number of sessions in it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from moorage.engine import (
    Command,
    EngineClosed,
    EngineStatistics,
    Inspect,
    Inspection,
    MailboxFull,
    ModelInfo,
    StepOutput,
)
from moorage.sessions.errors import DeadlineExceeded, EngineBusy, EngineStopped, MoorageError
from moorage.sessions.event_projector import Decoder

_log = structlog.get_logger("moorage.sessions")

RETRY_S = 0.01
"""Pause before a full mailbox is tried again: the engine empties it every step, which takes about
as long.
"""


class EngineFacade(Protocol):
    """What sessions use of `moorage.engine.Engine`; tests put a fake in its place."""

    @property
    def model_info(self) -> ModelInfo: ...
    def encode(self, text: str, *, allow_special: bool) -> list[int]: ...
    def decode_stream(
        self, token_ids_before: Sequence[int], stop: tuple[str, ...] = ()
    ) -> Decoder: ...
    def start(self, on_step: Callable[[StepOutput], None]) -> None: ...
    def send(self, command: Command) -> None: ...
    def statistics(self) -> EngineStatistics: ...
    def close(self, deadline_s: float = 10.0) -> None: ...


@dataclass(frozen=True)
class _Waiting:
    command: Command
    deadline: float
    on_refused: Callable[[MoorageError], None] | None


class EngineLink:
    """All methods on the event loop; `on_step` is called on it too."""

    def __init__(self, engine: EngineFacade, *, outbox: int) -> None:
        self._engine = engine
        self._bound = outbox
        self._outbox: deque[_Waiting] = deque()
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._inspections: dict[str, asyncio.Future[Inspection]] = {}
        self._numbers = itertools.count(1)

    def start(self, on_step: Callable[[StepOutput], None]) -> None:
        """Start the engine thread. Its outputs arrive on this loop until the loop is closed."""
        loop = self._loop

        def deliver(output: StepOutput) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(on_step, output)

        self._engine.start(deliver)

    def send(
        self,
        command: Command,
        *,
        wait_s: float = float("inf"),
        on_refused: Callable[[MoorageError], None] | None = None,
    ) -> None:
        """Hand over a command, or keep it up to `wait_s` seconds while the mailbox is full.

        `on_refused` is called with EngineBusy when the time is up, with EngineStopped when the
        engine ended. Raises EngineBusy at the outbox's bound, EngineStopped when the engine does
        not run.
        """
        if not self._outbox and self._try(command):
            return
        if len(self._outbox) >= self._bound:
            raise EngineBusy(
                f"{len(self._outbox)} commands wait for the engine, the bound is {self._bound}:"
                " retry shortly",
                retry_after_s=1.0,
            )
        self._outbox.append(_Waiting(command, self._loop.time() + wait_s, on_refused))
        self._schedule()

    def withdraw(self, command: Command) -> bool:
        """Take back a command that still waits in the outbox; whether it was there."""
        for waiting in self._outbox:
            if waiting.command is command:
                self._outbox.remove(waiting)
                return True
        return False

    async def inspect(self, session_id: str, timeout_s: float) -> Inspection:
        """The engine's own count of blocks. Raises DeadlineExceeded. Cancel-safe."""
        number = f"i{next(self._numbers)}"
        future: asyncio.Future[Inspection] = self._loop.create_future()
        self._inspections[number] = future
        try:
            self.send(Inspect(number, session_id), wait_s=timeout_s)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise DeadlineExceeded(f"the engine did not answer within {timeout_s} s") from None
        finally:
            self._inspections.pop(number, None)

    def inspected(self, inspection: Inspection) -> None:
        """An answer arrived; late ones are dropped."""
        future = self._inspections.get(inspection.inspection_id)
        if future is not None and not future.done():
            future.set_result(inspection)

    def close(self) -> None:
        """Drop what still waits."""
        if self._retry is not None:
            self._retry.cancel()
        self._outbox.clear()

    def _try(self, command: Command) -> bool:
        try:
            self._engine.send(command)
        except MailboxFull:
            return False
        except EngineClosed as error:
            raise EngineStopped(f"the engine takes no commands: {error}") from error
        return True

    def _schedule(self) -> None:
        if self._retry is None:
            self._retry = self._loop.call_later(RETRY_S, self._flush)

    def _flush(self) -> None:
        self._retry = None
        while self._outbox:
            waiting = self._outbox[0]
            refused: MoorageError | None = None
            try:
                if self._loop.time() >= waiting.deadline:
                    refused = EngineBusy(
                        "the engine's queue stayed full for as long as a turn may wait: retry"
                        " later",
                        retry_after_s=5.0,
                    )
                elif not self._try(waiting.command):
                    break
            except EngineStopped as error:
                refused = error
            self._outbox.popleft()
            if refused is not None and waiting.on_refused is not None:
                waiting.on_refused(refused)
        if self._outbox:
            self._schedule()
