"""An incremental, strict reader of one JSON object `{"name": …, "arguments": {…}}`.

A pushdown automaton over RFC 8259, fed pieces of any size. It is strict, not a bracket counter, for
two reasons. Text that is no call shows at its first wrong character, so the parser above gives it
back at once and looks for marks from that very character on: one pass, linear time, whatever the
model writes (a lenient reader that finds out at the end must read again, and a reply of nested
opening marks then costs its length squared). And what it accepts needs no second opinion before it
is called complete.

It knows strings and escapes, so braces and marks inside them mean nothing (case A8).
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

MAX_DEPTH = 128
"""Nesting; beyond it the text is no call. Python's own reader gives up near 1,000."""

_WHITESPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
"""What a string holds between quotes and escapes; control characters must be escaped."""
_SCALAR_CHARACTERS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_HEX = frozenset("0123456789abcdefABCDEF")


class _At(Enum):
    """What may come next."""

    START = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    VALUE_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    SCALAR = auto()
    COMMA_OR_END = auto()
    DONE = auto()
    BROKEN = auto()


class JsonCallReader:
    """Feed pieces until `done` or `broken`."""

    def __init__(self) -> None:
        self.name: str | None = None
        """Known as soon as its string is closed."""
        self.new_arguments = ""
        """The slice of the arguments that the last `feed` read."""
        self._pieces: list[str] = []
        self._at = _At.START
        self._stack: list[str] = []
        """Open containers, `{` or `[`."""
        self._is_key = False
        """The string being read is a key."""
        self._key = ""
        """The key of the outer object whose value comes next or is being read."""
        self._kept: list[str] | None = None
        """Raw text of a scalar, or of a string whose content matters."""
        self._num_hex = 0
        self._has_arguments = False
        self._in_arguments = False
        self._arguments_from = 0
        """Where in the current piece the arguments' slice begins."""

    @property
    def text(self) -> str:
        """Everything consumed."""
        return "".join(self._pieces)

    @property
    def done(self) -> bool:
        """The object is closed and it has a name."""
        return self._at is _At.DONE

    @property
    def broken(self) -> bool:
        """The next character, which was not consumed, makes this no call."""
        return self._at is _At.BROKEN

    def feed(self, piece: str) -> int:
        """Read on; the number of characters consumed: all, or fewer when `done` or `broken`.

        Cost: linear in the piece, whatever came before.
        """
        self.new_arguments = ""
        self._arguments_from = 0
        position = 0
        while position < len(piece) and self._at not in (_At.DONE, _At.BROKEN):
            if self._at is _At.STRING:
                run = _PLAIN.match(piece, position)
                if run is not None and run.end() > position:
                    self._keep(run.group())
                    position = run.end()
                    continue
            before = self._at
            self._at = self._after(piece[position], position)
            if self._at is _At.BROKEN:
                break
            # The character that ends a scalar belongs to what follows it: look at it again.
            if not (before is _At.SCALAR and self._at is _At.COMMA_OR_END):
                position += 1
            if self._in_arguments and self._at is _At.COMMA_OR_END and len(self._stack) == 1:
                self._in_arguments = False
                self.new_arguments = piece[self._arguments_from : position]
        if self._in_arguments:
            self.new_arguments = piece[self._arguments_from : position]
        self._pieces.append(piece[:position])
        return position

    def _after(self, character: str, position: int) -> _At:
        """The state behind `character`; BROKEN if it may not stand here."""
        match self._at:
            case _At.ESCAPE:
                self._keep(character)
                if character == "u":
                    self._num_hex = 0
                    return _At.HEX
                return _At.STRING if character in '"\\/bfnrt' else _At.BROKEN
            case _At.HEX:
                if character not in _HEX:
                    return _At.BROKEN
                self._keep(character)
                self._num_hex += 1
                return _At.STRING if self._num_hex == 4 else _At.HEX
            case _At.STRING:
                if character == "\\":
                    self._keep(character)
                    return _At.ESCAPE
                return self._end_string() if character == '"' else _At.BROKEN
            case _At.SCALAR:
                if character in _SCALAR_CHARACTERS:
                    self._keep(character)
                    return _At.SCALAR
                return self._end_scalar()
        if character in _WHITESPACE:
            return self._at
        match self._at:
            case _At.START if character == "{":
                return self._open(character)
            case _At.KEY_OR_END | _At.KEY if character == '"':
                self._is_key = True
                self._kept = [] if len(self._stack) == 1 else None
                return _At.STRING
            case _At.COLON if character == ":":
                return _At.VALUE
            case _At.VALUE_OR_END if character == "]":
                return self._close(character)
            case _At.VALUE | _At.VALUE_OR_END:
                return self._begin_value(character, position)
            case _At.COMMA_OR_END if character == ",":
                return _At.KEY if self._stack[-1] == "{" else _At.VALUE
            case _At.COMMA_OR_END | _At.KEY_OR_END if character in "}]":
                return self._close(character)
        return _At.BROKEN

    def _begin_value(self, character: str, position: int) -> _At:
        outer = len(self._stack) == 1
        if outer and self._key == "name" and character != '"':
            return _At.BROKEN
        if outer and self._key == "arguments":
            if character != "{":
                return _At.BROKEN
            self._has_arguments = self._in_arguments = True
            self._arguments_from = position
        if character in "{[":
            return self._open(character)
        if character == '"':
            self._is_key = False
            self._kept = [] if outer and self._key == "name" else None
            return _At.STRING
        if character in _SCALAR_CHARACTERS:
            self._kept = [character]
            return _At.SCALAR
        return _At.BROKEN

    def _open(self, character: str) -> _At:
        if len(self._stack) == MAX_DEPTH:
            return _At.BROKEN
        self._stack.append(character)
        return _At.KEY_OR_END if character == "{" else _At.VALUE_OR_END

    def _close(self, character: str) -> _At:
        if self._stack[-1] + character not in ("{}", "[]"):
            return _At.BROKEN
        if len(self._stack) == 1 and self.name is None:
            return _At.BROKEN
        self._stack.pop()
        return _At.COMMA_OR_END if self._stack else _At.DONE

    def _end_string(self) -> _At:
        if self._is_key:
            if self._kept is not None:
                self._key = self._unquoted()
                # A second one would contradict what was announced already.
                if (self._key == "name" and self.name is not None) or (
                    self._key == "arguments" and self._has_arguments
                ):
                    return _At.BROKEN
            return _At.COLON
        if self._kept is not None:
            self.name = self._unquoted()
            if not self.name or not self.name.isprintable():
                return _At.BROKEN
        return _At.COMMA_OR_END

    def _end_scalar(self) -> _At:
        scalar = "".join(self._kept or ())
        return _At.COMMA_OR_END if _SCALAR.fullmatch(scalar) else _At.BROKEN

    def _keep(self, text: str) -> None:
        if self._kept is not None:
            self._kept.append(text)

    def _unquoted(self) -> str:
        return str(json.loads('"' + "".join(self._kept or ()) + '"'))
