"""The engine: one thread that owns scheduler, tree, pool and runner. The only class that sessions use.

Commands come in through a bounded mailbox, one `StepOutput` a step goes out through the callback given to
`start`. The thread never awaits and never does tier I/O; workers do, and their completions are commands too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import structlog

from moorage.engine.errors import EngineClosed, EngineError
from moorage.engine.mailbox import Mailbox
from moorage.engine.output import (
    EngineFailed,
    EngineFault,
    EngineStatistics,
    FaultCode,
    ModelInfo,
    StepOutput,
)
from moorage.engine.request import Command
from moorage.engine.settings import EngineConfig
from moorage.engine.step_loop import StepLoop
from moorage.engine.tokenizer import ModelTokenizer, OutputDecoder
from moorage.prefix_cache.tiers import Completion

IDLE_WAIT_S = 0.5
"""Longest sleep of an idle engine thread; commands and completions wake it at once, deadlines need no better."""

BLOCKED_WAIT_S = 0.01
"""Sleep before another try where work is there and nothing can be planned: memory comes free by a completion, which
wakes the thread, or by the end of a park."""

_log = structlog.get_logger("moorage.engine")


class Engine:
    """Facade over the engine thread. All methods may be called from any thread."""

    def __init__(self, config: EngineConfig) -> None:
        """Loads the model and allocates the pool. Raises EngineError subclasses that name what is wrong."""
        config.validate()
        self._config = config
        self._mailbox: Mailbox[Command | Completion] = Mailbox(config.mailbox_len)
        self._loop = StepLoop(config, complete=self._mailbox.complete)
        self._thread: threading.Thread | None = None
        self._on_step: Callable[[StepOutput], None] | None = None
        self._statistics = EngineStatistics()
        self._failed = False

    @property
    def model_info(self) -> ModelInfo:
        """What was loaded."""
        return self._loop.model_info

    @property
    def tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer; thread-safe."""
        return self._loop.tokenizer

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        """Token ids of `text`; without `allow_special`, markers in the text are plain text."""
        return self._loop.tokenizer.encode(text, allow_special=allow_special)

    def decode_stream(
        self, token_ids_before: Sequence[int], stop: tuple[str, ...] = ()
    ) -> OutputDecoder:
        """The incremental decoder that made the live text: fed the same ids it gives the same text."""
        return self._loop.tokenizer.decode_stream(token_ids_before, stop)

    def start(self, on_step: Callable[[StepOutput], None]) -> None:
        """Start the engine thread. `on_step` runs on that thread and must return quickly."""
        if self._thread is not None:
            raise EngineClosed("the engine was started already")
        self._on_step = on_step
        self._thread = threading.Thread(target=self._run, name="moorage-engine", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        """Queue a command; never waits. Raises MailboxFull at the bound, EngineClosed when not running."""
        if self._thread is None or self._failed:
            raise EngineClosed("the engine is not running and takes no commands")
        self._mailbox.put(command)

    def statistics(self) -> EngineStatistics:
        """The snapshot of the last step."""
        return self._statistics

    def close(self, deadline_s: float = 10.0) -> None:
        """Stop after the current step; waits at most `deadline_s` for the thread and the tier workers."""
        self._mailbox.close()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(deadline_s)
            if thread.is_alive():
                _log.warning("engine thread still busy at close", deadline_s=deadline_s)
        self._loop.close(deadline_s)

    def _run(self) -> None:
        assert self._on_step is not None
        try:
            self._statistics = self._loop.statistics()
            while not self._mailbox.closed:
                longest_s = IDLE_WAIT_S
                if self._loop.has_work:
                    longest_s = BLOCKED_WAIT_S if self._loop.blocked else 0.0
                wait_s = self._loop.next_wait_s(longest_s)
                for item in self._mailbox.take_all(wait_s):
                    self._loop.apply(item)
                output = self._loop.step(time.monotonic())
                self._statistics = self._loop.statistics()
                if output.tokens or output.events:
                    self._on_step(output)
        except Exception as error:  # the thread's last word: sessions must hear of its death
            self._failed = True
            _log.exception("engine thread failed")
            kind = type(error).__name__
            message = str(error) if isinstance(error, EngineError) else f"{kind}: {error}"
            fault = EngineFault(FaultCode.INTERNAL, f"the engine thread ended: {message}")
            self._on_step(StepOutput(step=self._statistics.steps, events=(EngineFailed(fault),)))
