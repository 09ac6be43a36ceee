"""An incremental reader of one JSON object `{"name": …, "arguments": {…}}`, character by character.

It knows strings and escapes, so that braces and tags inside them mean nothing (case A8), and it says where the argument
value lies while that is still being written. Full validation is `json.loads` at the end.
"""

from __future__ import annotations

from enum import Enum, auto

_WHITESPACE = " \t\r\n"
_SCALAR_ENDS = _WHITESPACE + ",}"


class _At(Enum):
    OBJECT = auto()
    KEY = auto()
    KEY_TEXT = auto()
    COLON = auto()
    VALUE = auto()
    IN_STRING = auto()
    IN_CONTAINER = auto()
    IN_SCALAR = auto()
    AFTER_VALUE = auto()
    DONE = auto()
    BROKEN = auto()


class JsonCallReader:
    """Feed characters; look at `name_span`, `arguments_span`, `done`, `broken`. Spans are half-open in `text`."""

    def __init__(self) -> None:
        self.text = ""
        self.name_span: tuple[int, int] | None = None
        self.arguments_start: int | None = None
        self.arguments_end: int | None = None
        self._at = _At.OBJECT
        self._key_start = 0
        self._key = ""
        self._value_start = 0
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self._first = True

    @property
    def done(self) -> bool:
        """The object is closed."""
        return self._at is _At.DONE

    @property
    def broken(self) -> bool:
        """No continuation can make it an object."""
        return self._at is _At.BROKEN

    def feed(self, character: str) -> None:
        """One more character."""
        position = len(self.text)
        self.text += character
        if self._at in (_At.KEY_TEXT, _At.IN_STRING):
            self._in_string(character, position)
        elif self._at is _At.IN_CONTAINER:
            self._in_container(character, position)
        elif self._at is _At.IN_SCALAR and character not in _SCALAR_ENDS:
            return
        elif self._at is _At.IN_SCALAR:
            self._end_value(position)
            self._between(character, position)
        elif character not in _WHITESPACE:
            self._between(character, position)

    def _between(self, character: str, position: int) -> None:
        """A character outside of any value; white space was skipped but may end a scalar."""
        if character in _WHITESPACE:
            return
        at, self._at = self._at, _At.BROKEN
        if at is _At.OBJECT and character == "{":
            self._at = _At.KEY
        elif at is _At.KEY and character == '"':
            self._at, self._key_start = _At.KEY_TEXT, position + 1
        elif at is _At.KEY and character == "}" and self._first:
            self._at = _At.DONE
        elif at is _At.COLON and character == ":":
            self._at = _At.VALUE
        elif at is _At.VALUE and character not in ",:}]":
            self._begin_value(character, position)
        elif at is _At.AFTER_VALUE and character == ",":
            self._at, self._first = _At.KEY, False
        elif at is _At.AFTER_VALUE and character == "}":
            self._at = _At.DONE

    def _begin_value(self, character: str, position: int) -> None:
        self._value_start = position
        if character == '"':
            self._at = _At.IN_STRING
        elif character in "{[":
            self._at, self._depth, self._quoted = _At.IN_CONTAINER, 1, False
            if self._key == "arguments" and character == "{":
                self.arguments_start, self.arguments_end = position, None
        else:
            self._at = _At.IN_SCALAR

    def _in_string(self, character: str, position: int) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"' and self._at is _At.KEY_TEXT:
            self._key = self.text[self._key_start : position]
            self._at = _At.COLON
        elif character == '"':
            self._end_value(position + 1)

    def _in_container(self, character: str, position: int) -> None:
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._quoted = False
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value(position + 1)

    def _end_value(self, end: int) -> None:
        if self._key == "name":
            self.name_span = (self._value_start, end)
        elif self._key == "arguments" and self.arguments_start == self._value_start:
            self.arguments_end = end
        self._at = _At.AFTER_VALUE
