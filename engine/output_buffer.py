"""What one step says to sessions, gathered until its end."""

from __future__ import annotations

from collections.abc import Iterable

from moorage.engine.context import Context, Generation
from moorage.engine.output import (
    EngineEvent,
    EngineFault,
    FinishReason,
    StepOutput,
    TokenOutput,
)
from moorage.engine.request import Request


class OutputBuffer:
    """Tokens and events in the order in which they happened."""

    def __init__(self) -> None:
        self._tokens: list[TokenOutput] = []
        self._events: list[EngineEvent] = []

    def take(self, step: int) -> StepOutput:
        """Everything so far; the buffer is empty afterwards."""
        output = StepOutput(step, tuple(self._tokens), tuple(self._events))
        self._tokens.clear()
        self._events.clear()
        return output

    def events(self, events: Iterable[EngineEvent]) -> None:
        """Append events."""
        self._events.extend(events)

    def token(
        self,
        context: Context,
        generation: Generation,
        token_id: int,
        text: str,
        reason: FinishReason | None,
    ) -> None:
        """A token that was appended to the context's log; the first one carries where the KV came from."""
        first = not generation.first_token_sent
        generation.first_token_sent = True
        self._tokens.append(
            TokenOutput(
                request_id=generation.request.request_id,
                session_id=context.session_id,
                position=context.num_tokens - 1,
                token_id=token_id,
                text=text,
                finish_reason=reason,
                sources=generation.sources if first else None,
                num_forwarded=generation.num_forwarded,
                restore_s=generation.restore_s if first else 0.0,
                queue_s=generation.admitted_s - generation.submitted_s if first else 0.0,
            )
        )

    def end(
        self,
        request: Request,
        position: int,
        reason: FinishReason,
        *,
        text: str = "",
        fault: EngineFault | None = None,
        num_forwarded: int = 0,
    ) -> None:
        """A generation's end without a token; `position` is the length of its log."""
        self._tokens.append(
            TokenOutput(
                request_id=request.request_id,
                session_id=request.session_id,
                position=position,
                token_id=None,
                text=text,
                finish_reason=reason,
                error=fault,
                num_forwarded=num_forwarded,
            )
        )
