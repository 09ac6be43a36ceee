"""Feeds a reply to the Hermes parser in given pieces and joins what comes out, checking on the way
what must hold of every delta.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from moorage.tools_bridge.call import ToolCall
from moorage.tools_bridge.parsers.base import ParseDelta
from moorage.tools_bridge.parsers.hermes import HermesParser


@dataclass
class Streamed:
    """One call as a client of the stream sees it."""

    call_id: str
    name: str
    arguments: str
    failed: bool = False


@dataclass
class Reply:
    """A whole reply, joined."""

    text: str = ""
    reasoning: str = ""
    streamed: dict[int, Streamed] = field(default_factory=dict)
    completed: list[ToolCall] = field(default_factory=list)

    @property
    def calls(self) -> list[tuple[int, str, str]]:
        """(index, name, arguments) of the calls that may be run."""
        return [(call.index, call.name, call.arguments) for call in self.completed]

    def add(self, delta: ParseDelta) -> None:
        self.text += delta.text
        self.reasoning += delta.reasoning
        for piece in delta.tool_calls:
            piece.arguments_delta.encode()  # a lone surrogate would raise here (case A7)
            seen = self.streamed.get(piece.index)
            if seen is None:
                assert piece.name is not None, "the first piece of a call names it"
                seen = Streamed(piece.call_id, piece.name, "")
                self.streamed[piece.index] = seen
            else:
                assert piece.name is None, "only the first piece names the call"
            assert seen.call_id == piece.call_id
            assert not seen.failed, "nothing follows a failure"
            seen.arguments += piece.arguments_delta
            seen.failed = piece.failed
        for call in delta.completed:
            seen = self.streamed[call.index]
            assert (seen.call_id, seen.name, seen.arguments, seen.failed) == (
                call.call_id,
                call.name,
                call.arguments,
                False,
            )
            self.completed.append(call)


def read(
    pieces: Iterable[str],
    *,
    truncated: bool = False,
    calls: bool = True,
    reasoning: bool = False,
    starts_in_reasoning: bool = False,
) -> Reply:
    """The reply whose text arrives in these pieces."""
    parser = HermesParser(
        lambda index: f"call-{index}",
        calls=calls,
        reasoning=reasoning,
        starts_in_reasoning=starts_in_reasoning,
    )
    reply = Reply()
    for piece in pieces:
        reply.add(parser.feed(piece))
    reply.add(parser.finish(truncated))
    for index, streamed in reply.streamed.items():
        done = any(call.index == index for call in reply.completed)
        assert done != streamed.failed, "an announced call completes or fails"
    return reply


def call_text(name: str, arguments: str) -> str:
    """A call as the model is taught to write it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
