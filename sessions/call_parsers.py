"""Which parser reads a model's tool calls, and the ids of its calls."""

from __future__ import annotations

from hashlib import blake2b

from moorage.sessions.event_projector import NewParser
from moorage.tools_bridge.parsers.base import ToolCallParser
from moorage.tools_bridge.parsers.hermes import HermesParser


def call_id(session_id: str, turn: int, index: int) -> str:
    """The id of the `index`-th call of a turn: the same after a replay, unique in and across
    sessions.
    """
    digest = blake2b(f"{session_id}\0{turn}\0{index}".encode(), digest_size=12).hexdigest()
    return f"call_{digest}"


def parser_factory(session_id: str) -> NewParser:
    """Hermes-style parsers with this session's call ids.

    A turn may hold several replies, with tool results between them: the index restarts in each
    reply, the id counts on over the turn.
    """

    def new_parser(turn: int, num_calls_before: int) -> ToolCallParser:
        return HermesParser(lambda index: call_id(session_id, turn, num_calls_before + index))

    return new_parser
