"""The sans-IO protocol of every tool-call format: text in, text, reasoning and calls out.

Any split of the same output gives the same joined text, reasoning, argument deltas and calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from moorage.tools_bridge.call import ToolCall

NewCallId: TypeAlias = Callable[[int], str]
"""Index of the call in the reply → its id. Must be a pure function of session, turn and index:
the same index gives the same id, so that a replay names the same calls (case A13)."""


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a call that is being written."""

    call_id: str
    """Of the call; the same in each of its pieces."""
    index: int
    """Position of the call in the reply."""
    name: str | None
    """With the first piece of a call only."""
    arguments_delta: str
    """A verbatim slice of the model's JSON, cut between characters."""
    failed: bool = False
    """The announced call will not complete: its text is given as content; it must not be run."""


@dataclass
class ParseDelta:
    """What one `feed` or `finish` released; all parts may be empty."""

    text: str = ""
    """Content for the user."""
    reasoning: str = ""
    """What stood between reasoning marks."""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    """Pieces of calls, in order; at most one piece a call, and a `failed` one beside it."""
    completed: list[ToolCall] = field(default_factory=list)
    """Calls whose closing mark is in: these, and no others, may be run."""


class ToolCallParser(Protocol):
    """One reply's parser. Pure state: no clock, no I/O, no thread of its own."""

    def feed(self, text: str) -> ParseDelta:
        """The next piece of output, of any size. Never raises for what a model wrote; raises
        ParserFinished after `finish`.
        """
        ...

    def finish(self, truncated: bool) -> ParseDelta:
        """The end of the reply; held-back text comes out.

        `truncated`: the reply was cut off (length, cancel) and did not end by itself. A call that
        is not closed stays incomplete either way, and is never guessed to an end (case A12).
        """
        ...

    def reset(self, new_call_id: NewCallId) -> None:
        """Forget everything; the next reply begins. Its calls need ids of their own."""
        ...
