"""Hermes format, as Qwen and many others write it:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Rules, all chunk-invariant because every character is looked at once, in order:

- A call completes when its JSON object (a `name`, and `arguments` that are an object or absent) and the
  closing tag are in.
- Argument deltas are verbatim slices of the model's text, from the moment the name is known.
- Anything else between the tags is no call: its text, tags included, is content, verbatim. Where argument
  deltas were out already, a delta with `failed` says that this call must not be run. The same holds for a
  call that the end of the reply cuts off (cases A11, A12). So a call is never half executed and no text is lost.
- White space between text and a call, between calls, and after the last call belongs to the format and is dropped.
- JSON without tags is content (case A10).
- With `reasoning`, `<think>…</think>` is reasoning; `starts_in_reasoning` is for templates that write the
  opening tag themselves.
"""

from __future__ import annotations

import json
from enum import Enum, auto

from moorage.tools_bridge.call import ToolCall
from moorage.tools_bridge.parsers.base import NewCallId, ParseDelta, ToolCallDelta
from moorage.tools_bridge.parsers.json_call import JsonCallReader

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, END_THINK = "<think>", "</think>"


class _Mode(Enum):
    TEXT = auto()
    REASONING = auto()
    CALL = auto()


class HermesParser:
    """See the module."""

    def __init__(
        self,
        new_call_id: NewCallId,
        *,
        calls: bool = True,
        reasoning: bool = False,
        starts_in_reasoning: bool = False,
    ) -> None:
        """Without `calls` (tool_choice none) tags are plain text (case A19)."""
        self._new_call_id = new_call_id
        self._markers = ((OPEN,) if calls else ()) + ((THINK,) if reasoning else ())
        self._mode = _Mode.REASONING if reasoning and starts_in_reasoning else _Mode.TEXT
        self._num_calls = 0
        self._held = ""
        """Possible beginning of a marker."""
        self._space = ""
        """White space whose meaning the next character decides."""
        self._after_call = False
        """No text since the last complete call."""
        self._reader = JsonCallReader()
        self._closing = ""
        """What follows the JSON object inside the tags."""
        self._announced = False
        self._sent = 0
        """End of the argument text that is out."""

    def feed(self, text: str) -> ParseDelta:
        """See `ToolCallParser`."""
        out = ParseDelta()
        for character in text:
            self._step(character, out)
        return _joined(out)

    def finish(self, truncated: bool) -> ParseDelta:
        """See `ToolCallParser`."""
        del truncated  # an incomplete call is incomplete, whoever ended it
        out = ParseDelta()
        while self._mode is _Mode.CALL:
            self._give_up(out)
        held, self._held = self._held, ""
        if self._mode is _Mode.REASONING:
            out.reasoning += held
        else:
            for character in held:
                self._text(character, out)
            if not self._after_call:
                out.text += self._space
        self._space = ""
        return _joined(out)

    def _step(self, character: str, out: ParseDelta) -> None:
        if self._mode is _Mode.CALL:
            self._in_call(character, out)
            return
        markers = (END_THINK,) if self._mode is _Mode.REASONING else self._markers
        self._held += character
        while self._held:
            if self._held in markers:
                marker, self._held = self._held, ""
                self._enter(marker)
            elif any(marker.startswith(self._held) for marker in markers):
                return
            else:
                first, self._held = self._held[0], self._held[1:]
                if self._mode is _Mode.REASONING:
                    out.reasoning += first
                else:
                    self._text(first, out)

    def _enter(self, marker: str) -> None:
        if marker == THINK:
            self._mode = _Mode.REASONING
        elif marker == END_THINK:
            self._mode = _Mode.TEXT
        else:
            self._mode = _Mode.CALL
            self._reader, self._closing = JsonCallReader(), ""
            self._announced, self._sent = False, 0

    def _text(self, character: str, out: ParseDelta) -> None:
        if character.isspace():
            self._space += character
            return
        out.text += self._space + character
        self._space, self._after_call = "", False

    def _in_call(self, character: str, out: ParseDelta) -> None:
        if not self._reader.done:
            self._reader.feed(character)
            if self._reader.broken:
                self._give_up(out)
            else:
                self._announce(out)
            return
        self._closing += character
        tag = self._closing.lstrip()
        if tag == CLOSE:
            self._complete(out)
        elif not CLOSE.startswith(tag):
            self._give_up(out)

    def _announce(self, out: ParseDelta) -> None:
        """Stream what is known of the call: the name once, then argument text as it comes."""
        reader = self._reader
        if reader.name_span is None or reader.arguments_start is None:
            return
        name = self._name()
        if name is None:
            return
        end = len(reader.text) if reader.arguments_end is None else reader.arguments_end
        start = self._sent if self._announced else reader.arguments_start
        if end > start:
            out.tool_calls.append(
                ToolCallDelta(
                    call_id=self._new_call_id(self._num_calls),
                    index=self._num_calls,
                    name=None if self._announced else name,
                    arguments_delta=reader.text[start:end],
                )
            )
            self._announced, self._sent = True, end

    def _name(self) -> str | None:
        span = self._reader.name_span
        if span is None:
            return None
        try:
            name = json.loads(self._reader.text[span[0] : span[1]])
            if isinstance(name, str):
                name.encode()  # an escaped lone surrogate is no text
        except (json.JSONDecodeError, UnicodeEncodeError):
            return None
        return name if isinstance(name, str) and name else None

    def _complete(self, out: ParseDelta) -> None:
        call_text = self._reader.text
        try:
            value = json.loads(call_text)
        except (json.JSONDecodeError, RecursionError):
            value = None
        name = self._name()
        if (
            name is None
            or not isinstance(value, dict)
            or not isinstance(value.get("arguments", {}), dict)
        ):
            self._give_up(out)
            return
        start, end = self._reader.arguments_start, self._reader.arguments_end
        arguments = "{}" if start is None else call_text[start:end]
        call_id = self._new_call_id(self._num_calls)
        if not self._announced:
            out.tool_calls.append(ToolCallDelta(call_id, self._num_calls, name, arguments))
        out.completed.append(ToolCall(call_id, self._num_calls, name, arguments))
        self._num_calls += 1
        self._mode, self._space, self._after_call = _Mode.TEXT, "", True

    def _give_up(self, out: ParseDelta) -> None:
        """No call after all: its text is content, and may hold further markers."""
        if self._announced:
            call_id = self._new_call_id(self._num_calls)
            out.tool_calls.append(ToolCallDelta(call_id, self._num_calls, None, "", failed=True))
            self._num_calls += 1  # the index was seen by the client and is not used again
        inside = self._reader.text + self._closing
        self._mode = _Mode.TEXT
        self._reader, self._closing, self._announced = JsonCallReader(), "", False
        for character in OPEN:
            self._text(character, out)
        for character in inside:
            self._step(character, out)


def _joined(out: ParseDelta) -> ParseDelta:
    """Consecutive pieces of one call as one: characters come in singly and should not go out so."""
    joined: list[ToolCallDelta] = []
    for piece in out.tool_calls:
        last = joined[-1] if joined else None
        if last is not None and last.call_id == piece.call_id and not last.failed:
            joined[-1] = ToolCallDelta(
                last.call_id,
                last.index,
                last.name,
                last.arguments_delta + piece.arguments_delta,
                piece.failed,
            )
        else:
            joined.append(piece)
    out.tool_calls = joined
    return out
