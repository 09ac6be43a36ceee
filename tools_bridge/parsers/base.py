"""The sans-IO protocol of every tool-call format: text in, text, reasoning and calls out.

Any split of the same output gives the same joined text, reasoning, argument deltas and calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from moorage.tools_bridge.call import ToolCall

NewCallId: TypeAlias = Callable[[int], str]
"""Index of the call in the reply → its id; the same index gives the same id."""


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a call that is being written."""

    call_id: str
    index: int
    name: str | None
    """With the first delta of a call only."""
    arguments_delta: str
    """A verbatim slice of the model's JSON."""
    failed: bool = False
    """The announced call will not complete: its text is given as content, and it must not be run."""


@dataclass
class ParseDelta:
    """What one `feed` or `finish` released."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    completed: list[ToolCall] = field(default_factory=list)


class ToolCallParser(Protocol):
    """One reply's parser; made anew for each reply."""

    def feed(self, text: str) -> ParseDelta:
        """The next piece of output, of any size. Never raises for what a model wrote."""
        ...

    def finish(self, truncated: bool) -> ParseDelta:
        """The end of the reply. Held-back text comes out; a call that is not complete stays incomplete, whatever
        `truncated` says about the reason."""
        ...
