"""What a turn begins with, and how it becomes token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moorage.sessions.errors import ContextTooLong, InvalidArgument
from moorage.sessions.ledger import Ledger
from moorage.sessions.services import SessionServices
from moorage.sessions.session_config import SessionConfig
from moorage.sessions.store import CallRow
from moorage.sessions.templates import ChatMessage, Piece


@dataclass(frozen=True)
class TurnInput:
    """One Generate call, checked for form."""

    messages: tuple[ChatMessage, ...] = ()
    token_ids: tuple[int, ...] | None = None
    """Instead of messages: appended as they are."""
    sampling: Mapping[str, Any] | None = None
    """field of `SamplingParams` -> value, for the fields that the turn sets."""
    deadline_s: float = 0.0
    """Seconds of generation; 0 is none."""
    idempotency_key: str = ""
    cancel_pending_calls: bool = False
    continue_final_message: bool = False

    @property
    def source(self) -> str:
        """As logged."""
        return "messages" if self.token_ids is None else "tokens"


class InputEncoder:
    """Templating and tokenisation for one session. Reads the log, changes nothing."""

    def __init__(self, services: SessionServices, config: SessionConfig, ledger: Ledger) -> None:
        self._services = services
        self._config = config
        self._ledger = ledger

    async def turn(self, turn_input: TurnInput, unsent: Sequence[CallRow]) -> list[int]:
        """Ids to append for a turn: results that are still to be told, then the input.

        Raw ids are kept as they are: whoever sends them writes the tool results of a cancelled turn
        himself. Raises InvalidArgument, TemplateError. Cancel-safe.
        """
        empty = self._ledger.log.num_tokens == 0
        pieces: list[Piece] = []
        if turn_input.token_ids is not None:
            self._check_vocabulary(turn_input.token_ids)
            if empty and (self._config.system or self._config.tools):
                pieces = self.opening()
            return [*await self.encode(pieces), *turn_input.token_ids]
        if empty:
            pieces += self.opening()
        results = [ChatMessage("tool", call.content or "") for call in unsent]
        pieces += self._services.chat_template().extension(
            [*results, *turn_input.messages],
            after_opening=empty,
            continue_final=turn_input.continue_final_message,
            tools=self._config.tools,
        )
        return await self.encode(pieces)

    async def results(self, unsent: Sequence[CallRow]) -> list[int]:
        """Ids to append for tool results in mid-turn. Raises TemplateError. Cancel-safe."""
        messages = [ChatMessage("tool", call.content or "") for call in unsent]
        template = self._services.chat_template()
        return await self.encode(template.extension(messages, tools=self._config.tools))

    def opening(self) -> list[Piece]:
        """What stands before the first message."""
        return self._services.chat_template().opening(self._config.system, self._config.tools)

    async def encode(self, pieces: Sequence[Piece]) -> list[int]:
        """On a worker thread: a message of megabytes must not stop the other sessions' tokens.

        Raises ContextTooLong for a piece whose beginning alone does not fit.
        """
        if not pieces:
            return []
        engine, held = self._services.engine, self._ledger.log.num_tokens
        limit = engine.model_info.context_len

        def work() -> list[int]:
            ids: list[int] = []
            for piece in pieces:
                for num_chars in (4 * limit, 16 * limit):  # megabytes are refused by their head
                    if len(piece.text) > num_chars:
                        head = engine.encode(piece.text[:num_chars], allow_special=False)
                        check_fits(held, len(ids) + len(head), limit, more=True)
                ids += engine.encode(piece.text, allow_special=not piece.is_content)
            return ids

        return await asyncio.to_thread(work)

    def fit(self, ids: list[int]) -> list[int]:
        """`ids` as they are appended now: without an end of turn that the model wrote itself.

        Raises InvalidArgument for an empty input, ContextTooLong with the counts and the limit.
        """
        info = self._services.engine.model_info
        log = self._ledger.log
        written = log.last_id if self._ledger.ends_generated else None
        if written is not None and ids and ids[0] == written and written in info.eos_token_ids:
            ids = ids[1:]
        if not ids:
            raise InvalidArgument(
                "the input is empty: a turn needs at least one token", field="messages"
            )
        check_fits(log.num_tokens, len(ids), info.context_len)
        return ids

    def _check_vocabulary(self, token_ids: Sequence[int]) -> None:
        size = self._services.engine.model_info.vocab_size
        for i, token_id in enumerate(token_ids):
            if not 0 <= token_id < size:
                raise InvalidArgument(
                    f"tokens.ids[{i}] is {token_id}, allowed is 0 … {size - 1}",
                    field=f"tokens.ids[{i}]",
                )


def check_fits(num_held: int, num_new: int, limit: int, *, more: bool = False) -> None:
    """Raises ContextTooLong unless one token of the window stays free for the answer.

    `more`: the input was counted in part only.
    """
    if num_held + num_new >= limit:
        least = "more than " if more else ""
        raise ContextTooLong(
            f"the session holds {num_held} tokens and the input has {least}{num_new}: together"
            f" {least}{num_held + num_new}, and the window is {limit}, one of which must be free"
            " for the answer; shorten the input or begin another session"
        )
