"""Hermes format, as Qwen and many others write it:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Rules, all chunk-invariant:

- A call completes when its JSON object and the closing mark are in. The object has a printable
  `name` and, at most once, `arguments` that are an object; other keys are ignored, and a call
  without arguments has `{}`.
- Argument deltas are verbatim slices of the model's text, sent as they come from the moment the
  name is known.
- Anything else between the marks is no call: its text, opening mark included, is content, verbatim,
  and marks are looked for again from the first character that is wrong. The same holds for a call
  that the end of the reply cuts off (cases A11, A12). Where argument deltas were out already, a
  delta with `failed` says that this call must not be run, and its index is not used again. So no
  call is half executed and no text is lost. What a broken call wrote inside a JSON string is never
  searched for calls.
- White space (space, tab, line ends) directly before a call belongs to the format and is dropped;
  after a call it is dropped where another call or the end of the reply follows, and kept before
  text. Between reasoning marks and their inside, and directly after the closing one, it is dropped.
  All other white space is content, byte for byte (case A10).
- JSON without marks is content (case A10).
- With `reasoning`, `<think>…</think>` is reasoning, and marks of calls in it mean nothing;
  `starts_in_reasoning` is for templates that write `<think>` themselves.

Held back is only what may be the beginning of a mark: a proper prefix of one, and white space that
a call may follow. Cost: one pass over the text; a call that fails is not read a second time.
"""

from __future__ import annotations

from enum import Enum, auto

from moorage.tools_bridge.call import ToolCall
from moorage.tools_bridge.errors import ParserFinished
from moorage.tools_bridge.parsers.base import NewCallId, ParseDelta, ToolCallDelta
from moorage.tools_bridge.parsers.json_call import JsonCallReader

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, END_THINK = "<think>", "</think>"
WHITESPACE = " \t\n\r"


class _Mode(Enum):
    TEXT = auto()
    REASONING = auto()
    CALL = auto()
    CLOSING = auto()
    """The object is in, the closing mark is not."""
    FINISHED = auto()


class HermesParser:
    """See the module for the rules, and `ToolCallParser` for the methods."""

    def __init__(
        self,
        new_call_id: NewCallId,
        *,
        calls: bool = True,
        reasoning: bool = False,
        starts_in_reasoning: bool = False,
    ) -> None:
        """Without `calls` (tool_choice none) the marks of calls are plain text (case A19)."""
        self._marks = ((OPEN,) if calls else ()) + ((THINK,) if reasoning else ())
        self._first_mode = _Mode.REASONING if reasoning and starts_in_reasoning else _Mode.TEXT
        self.reset(new_call_id)

    def reset(self, new_call_id: NewCallId) -> None:
        """See `ToolCallParser`."""
        self._new_call_id = new_call_id
        self._mode = self._first_mode
        self._num_calls = 0
        """Calls announced or completed: the index of the next one."""
        self._held = ""
        """Possible beginning of a mark, or of the closing mark with white space before it."""
        self._space = ""
        """White space whose meaning the next character decides."""
        self._outer_space = ""
        """The same, of the text around the reasoning that is being read."""
        self._drops_space = self._first_mode is _Mode.REASONING
        """The next white space belongs to a reasoning mark."""
        self._after_call = False
        """No text since the last complete call."""
        self._reader = JsonCallReader()
        self._arguments: list[str] = []
        """Slices of the call's arguments."""
        self._num_sent = 0
        """How many of them are out; the call is announced when it is not 0."""

    def feed(self, text: str) -> ParseDelta:
        """See `ToolCallParser`."""
        if self._mode is _Mode.FINISHED:
            raise ParserFinished("the reply is finished: `reset` begins the next one")
        out = _Collector()
        rest = text
        while rest:
            match self._mode:
                case _Mode.CALL:
                    rest = self._read_call(rest, out)
                case _Mode.CLOSING:
                    rest = self._read_closing(rest, out)
                case _:
                    rest = self._read_text(rest, out)
        if self._mode is _Mode.CALL:
            self._send_arguments(out)
        return out.delta()

    def finish(self, truncated: bool) -> ParseDelta:
        """See `ToolCallParser`. `truncated` changes nothing in this format: only the closing mark
        completes a call, whoever ended the reply.
        """
        if self._mode is _Mode.FINISHED:
            raise ParserFinished("the reply is finished already: `reset` begins the next one")
        out = _Collector()
        if self._mode in (_Mode.CALL, _Mode.CLOSING):
            held, self._held = self._held, ""
            self._give_up(out)
            self._write(held, out)
        else:
            self._write(self._held, out)
        if self._mode is _Mode.REASONING:
            out.reasoning.append(self._space)
            self._space = self._outer_space
        if not self._after_call:
            out.text.append(self._space)
        self._mode = _Mode.FINISHED
        return out.delta()

    def _read_text(self, rest: str, out: _Collector) -> str:
        """Text or reasoning up to the first mark; what follows the mark is returned."""
        text, self._held = self._held + rest, ""
        marks = (END_THINK,) if self._mode is _Mode.REASONING else self._marks
        found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._write(text[:at], out)
            self._enter(mark)
            return text[at + len(mark) :]
        num_held = max((_overlap(text, mark) for mark in marks), default=0)
        self._held = text[len(text) - num_held :]
        self._write(text[: len(text) - num_held], out)
        return ""

    def _enter(self, mark: str) -> None:
        if mark == OPEN:
            self._mode = _Mode.CALL
            self._reader, self._arguments, self._num_sent = JsonCallReader(), [], 0
        elif mark == THINK:
            self._mode, self._drops_space = _Mode.REASONING, True
            self._outer_space, self._space = self._space, ""
        else:
            self._mode, self._drops_space = _Mode.TEXT, True
            self._outer_space, self._space = "", self._outer_space

    def _write(self, text: str, out: _Collector) -> None:
        """Text or reasoning without a mark; trailing white space waits."""
        if self._drops_space:
            text = text.lstrip(WHITESPACE)
        if not text:
            return
        self._drops_space = False
        text = self._space + text
        visible = text.rstrip(WHITESPACE)
        self._space = text[len(visible) :]
        if not visible:
            return
        if self._mode is _Mode.REASONING:
            out.reasoning.append(visible)
        else:
            out.text.append(visible)
            self._after_call = False

    def _read_call(self, rest: str, out: _Collector) -> str:
        num_read = self._reader.feed(rest)
        if self._reader.new_arguments:
            self._arguments.append(self._reader.new_arguments)
        rest = rest[num_read:]
        if self._reader.broken:
            self._send_arguments(out)
            self._give_up(out)
        elif self._reader.done:
            self._send_arguments(out)
            self._mode = _Mode.CLOSING
        return rest

    def _read_closing(self, rest: str, out: _Collector) -> str:
        text, self._held = self._held + rest, ""
        mark = text.lstrip(WHITESPACE)
        if mark.startswith(CLOSE):
            self._complete(out)
            return mark[len(CLOSE) :]
        if CLOSE.startswith(mark):
            self._held = text
            return ""
        self._give_up(out)
        return text  # may begin with the opening mark of the next call

    def _send_arguments(self, out: _Collector) -> None:
        """What is known of the call, once its name is."""
        if self._reader.name is None or len(self._arguments) == self._num_sent:
            return
        out.add(
            ToolCallDelta(
                call_id=self._new_call_id(self._num_calls),
                index=self._num_calls,
                name=None if self._num_sent else self._reader.name,
                arguments_delta="".join(self._arguments[self._num_sent :]),
            )
        )
        self._num_sent = len(self._arguments)

    def _complete(self, out: _Collector) -> None:
        if not self._arguments:
            self._arguments.append("{}")
            self._send_arguments(out)
        name = self._reader.name or ""  # a reader that is done has one
        call_id = self._new_call_id(self._num_calls)
        out.completed.append(ToolCall(call_id, self._num_calls, name, "".join(self._arguments)))
        self._num_calls += 1
        self._mode, self._after_call = _Mode.TEXT, True
        self._space, self._drops_space = "", False

    def _give_up(self, out: _Collector) -> None:
        """No call after all: what was consumed of it is content."""
        if self._num_sent:
            call_id = self._new_call_id(self._num_calls)
            out.add(ToolCallDelta(call_id, self._num_calls, None, "", failed=True))
            self._num_calls += 1  # the client saw this index
        self._mode = _Mode.TEXT
        self._drops_space = False
        self._write(OPEN + self._reader.text, out)


class _Collector:
    """What one `feed` or `finish` releases, in lists until the end: joining is then linear."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.tool_calls: list[ToolCallDelta] = []
        self.completed: list[ToolCall] = []

    def add(self, piece: ToolCallDelta) -> None:
        self.tool_calls.append(piece)

    def delta(self) -> ParseDelta:
        return ParseDelta(
            "".join(self.text), "".join(self.reasoning), self.tool_calls, self.completed
        )


def _overlap(text: str, mark: str) -> int:
    """Length of the longest proper prefix of `mark` that `text` ends with."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
