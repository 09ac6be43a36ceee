"""Chat templates: messages → pieces of text, sandboxed and incremental.

A template is the model's own Jinja2 file, by Hugging Face's conventions. Two things differ from
rendering a whole history each turn:

*Incremental.* A session's log is never rendered again. `opening` is what stands before the first
message; `extension` is exactly what the template writes between the end of a generated assistant
turn and the next generation prompt. It is found by rendering a conversation around a marked
assistant turn and taking what comes behind the mark; a template that writes something else *before*
the mark because of what follows (it is not prefix-stable) is refused, for such a log could not be
extended without computing it again.

*Unforgeable.* Content never enters the template: a mark does, and the content is put back
afterwards as a piece of its own, which is encoded without special tokens. Whatever a user or a tool
writes, `<|im_end|>` in it stays text. JSON that the template writes (`tojson`, tool schemas above
all) stays part of the template's text, as models were trained on it; a special token inside it gets
its first character as a JSON escape: the same value, no token. The template sees no clock and no
randomness, so equal input gives equal text (cases J9, J10).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moorage.sessions.errors import InvalidArgument, TemplateError

ROLES = ("system", "user", "assistant", "tool")

_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
"""Private-use characters around a mark's number. Content never passes through the template, so it
cannot hold one.
"""
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MARK = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")


@dataclass(frozen=True)
class Piece:
    """A stretch of rendered text."""

    text: str
    is_content: bool
    """Written by a user or a tool: special tokens in it are plain text."""


@dataclass(frozen=True)
class ChatToolCall:
    """A call in a message of the history."""

    name: str
    arguments_json: str


@dataclass(frozen=True)
class ChatMessage:
    """One message, as the client gave it."""

    role: str
    content: str
    tool_calls: tuple[ChatToolCall, ...] = field(default=())

    def validate(self, path: str) -> None:
        """Raises InvalidArgument with the path of the field at fault."""
        if self.role not in ROLES:
            raise InvalidArgument(
                f"{path}.role is {self.role[:40]!r}, allowed are {', '.join(ROLES)}",
                field=f"{path}.role",
            )
        if self.tool_calls and self.role != "assistant":
            raise InvalidArgument(
                f"{path} has tool calls and role {self.role!r}: only an assistant message can have"
                " them",
                field=f"{path}.tool_calls",
            )
        for i, call in enumerate(self.tool_calls):
            where = f"{path}.tool_calls[{i}].name"
            if _TOOL_NAME.fullmatch(call.name) is None:  # it is written as it is, marks and all
                raise InvalidArgument(
                    f"{where} is {call.name[:40]!r}: 1 to 64 letters, digits, '-' and '_'",
                    field=where,
                )
            where = f"{path}.tool_calls[{i}].arguments_json"
            try:
                arguments = json.loads(call.arguments_json)
            except ValueError as error:
                raise InvalidArgument(f"{where} is not JSON: {error}", field=where) from error
            if not isinstance(arguments, dict):
                raise InvalidArgument(
                    f"{where} is a JSON {type(arguments).__name__}, expected is an object",
                    field=where,
                )


class _Arguments(str):
    """A call's arguments for templates that take them as a string, as a mapping or through `tojson`
    (case J7).
    """

    __slots__ = ("values_by_name",)
    values_by_name: dict[str, Any]

    def items(self) -> Sequence[tuple[str, Any]]:
        return list(self.values_by_name.items())


class _Contents:
    """The marks of one rendering and what stands behind them."""

    def __init__(self, special_tokens: Sequence[str] = ()) -> None:
        self._texts: list[str] = []
        self._special = (
            re.compile(
                "|".join(re.escape(t) for t in sorted(special_tokens, key=len, reverse=True))
            )
            if special_tokens
            else None
        )

    def json(self, value: Any, indent: int | None) -> str:
        """JSON text in which no special token stands. Keys keep their order, HTML is left alone."""
        text = json.dumps(self.unmarked(value), ensure_ascii=False, indent=indent)
        if self._special is None:
            return text
        return self._special.sub(lambda found: f"\\u{ord(found[0][0]):04x}{found[0][1:]}", text)

    def mark(self, text: str) -> str:
        """A stand-in for `text`; empty text stays empty, so that `if message.content` works."""
        if not text:
            return ""
        self._texts.append(text)
        return f"{_OPEN}{len(self._texts) - 1}{_CLOSE}"

    def text(self, number: str) -> str:
        return self._texts[int(number)]

    def unmarked(self, value: Any) -> Any:
        """`value` with content in the place of marks, for `tojson`."""
        if isinstance(value, _Arguments):
            return value.values_by_name
        if isinstance(value, str):
            return _MARK.sub(lambda found: self.text(found[1]), value)
        if isinstance(value, Mapping):
            return {str(self.unmarked(k)): self.unmarked(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.unmarked(item) for item in value]
        return value


class ChatTemplate:
    """One compiled template. Immutable and thread-safe; rendering is bounded by `max_chars`."""

    def __init__(
        self, source: str, *, special_tokens: Sequence[str] = (), max_chars: int = 8 << 20
    ) -> None:
        """Raises TemplateError where the source does not compile."""
        self._special_tokens = tuple(token for token in special_tokens if token)
        self._max_chars = max_chars
        try:
            self._code = _environment(_Contents()).compile(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error

    def opening(self, system: str, tools: Sequence[Mapping[str, Any]]) -> list[Piece]:
        """What stands before the first user message: system prompt and tools.

        `tools` are `{"type": "function", "function": {…}}` mappings, sorted here by name: the same
        set gives the same bytes whatever order it came in. Empty where the template writes nothing.
        """
        contents = _Contents(self._special_tokens)
        head: list[dict[str, Any]] = []
        if system:
            head.append({"role": "system", "content": contents.mark(system)})
        ordered = sorted(tools, key=lambda tool: str(tool["function"]["name"]))
        user = {"role": "user", "content": contents.mark("u")}
        with_user = self._render_around(contents, [*head, user], ordered, generation_prompt=False)
        user_alone = self._render_around(contents, [user], (), generation_prompt=False)
        # The user turn as the template writes it after nothing is the suffix to take off; a
        # template that writes a
        # default system prompt does so in both, and it stands before the user turn in both.
        header = self._user_header(user_alone, str(user["content"]))
        at = with_user.rfind(header + str(user["content"]))
        if at < 0:
            raise TemplateError(
                "the chat template writes the first user message differently after a system prompt"
                " or tools:"
                " its opening cannot be told apart"
            )
        return _pieces(with_user[:at], contents)

    def _user_header(self, user_alone: str, mark: str) -> str:
        """What the template writes right before a user's content: the longest common end of two
        renderings.
        """
        contents = _Contents(self._special_tokens)
        users = [contents.mark("u"), contents.mark("v")]
        twice = self._render_around(
            contents,
            [
                {"role": "user", "content": users[0]},
                {"role": "assistant", "content": "a"},
                {"role": "user", "content": users[1]},
            ],
            (),
            generation_prompt=False,
        )
        first = user_alone[: user_alone.index(mark)] if mark in user_alone else ""
        second = twice[: twice.index(users[1])] if users[1] in twice else ""
        size = 0
        while size < min(len(first), len(second)) and first[-1 - size] == second[-1 - size]:
            size += 1
        return first[len(first) - size :]

    def extension(
        self,
        messages: Sequence[ChatMessage],
        *,
        after_opening: bool = False,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[Piece]:
        """What the template writes for `messages`, from the end of the assistant's last text to the
        next prompt.

        It begins with the template's own end of an assistant turn (the caller leaves that out where
        the model wrote it). With `after_opening` it begins behind `opening` instead.
        `continue_final`: the last message is an assistant's unfinished text; no generation prompt
        and no end of turn is written (case J11). Raises InvalidArgument for malformed messages,
        TemplateError where the template refuses them.
        """
        for i, message in enumerate(messages):
            message.validate(f"messages[{i}]")
        if continue_final and (not messages or messages[-1].role != "assistant"):
            raise InvalidArgument(
                "continue_final_message is set and the last message is not an assistant's",
                field="continue_final_message",
            )
        contents = _Contents(self._special_tokens)
        first_user = {"role": "user", "content": contents.mark("u")}
        anchor = contents.mark("a")
        head: list[dict[str, Any]] = (
            [] if after_opening else [first_user, {"role": "assistant", "content": anchor}]
        )
        added = [_as_mapping(message, contents) for message in messages]
        text = self._render_around(
            contents, [*head, *added], tools if not after_opening else (),
            generation_prompt=not continue_final,
        )  # fmt: skip
        if continue_final:
            mark = str(added[-1]["content"])
            if not mark or mark not in text:
                raise InvalidArgument(
                    "continue_final_message needs an assistant message with content",
                    field=f"messages[{len(messages) - 1}].content",
                )
            text = text[: text.rindex(mark) + len(mark)]
        if after_opening:
            return self._behind_opening(text, contents)
        if anchor not in text:
            raise TemplateError(
                "the chat template drops an earlier assistant turn when messages follow it: it is"
                " not"
                " prefix-stable, and a session's log cannot be extended with it"
            )
        base = self._render_around(contents, head, tools, generation_prompt=False)
        at = text.index(anchor)
        if anchor not in base or base[: base.index(anchor)] != text[:at]:
            raise TemplateError(
                "the chat template changes what stands before an assistant turn when messages"
                " follow it: it is"
                " not prefix-stable, and a session's log cannot be extended with it"
            )
        return _pieces(text[at + len(anchor) :], contents)

    def _behind_opening(self, text: str, contents: _Contents) -> list[Piece]:
        """Take off what `opening("", ())` writes, a default system prompt for instance."""
        default = "".join(piece.text for piece in self.opening("", ()))
        if not text.startswith(default):
            raise TemplateError(
                "the chat template begins the first message differently from its own opening: it"
                " is not"
                " prefix-stable"
            )
        return _pieces(text[len(default) :], contents)

    def _render_around(
        self,
        contents: _Contents,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool,
    ) -> str:
        """Marked text. Raises TemplateError for whatever goes wrong inside the template."""
        environment = _environment(contents)
        size = 0
        chunks: list[str] = []
        try:
            template = environment.template_class.from_code(
                environment, self._code, environment.make_globals(None)
            )
            for chunk in template.generate(
                messages=list(messages),
                tools=list(tools) or None,
                add_generation_prompt=generation_prompt,
            ):
                size += len(chunk)
                if size > self._max_chars:
                    raise TemplateError(
                        f"the chat template wrote more than {self._max_chars} characters, which is"
                        " the limit"
                    )
                chunks.append(chunk)
        except TemplateError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, OverflowError) as error:
            raise TemplateError(f"the chat template refused the messages: {error}") from error
        return "".join(chunks)


def _environment(contents: _Contents) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def tojson(value: Any, indent: int | None = None) -> str:
        if isinstance(value, _Arguments):
            return str(value)
        return contents.json(value, indent)

    def items(value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, _Arguments | Mapping):
            yield from value.items()
        elif not isinstance(value, jinja2.Undefined):
            raise TypeError("items takes a mapping")

    environment.filters["tojson"] = tojson
    environment.filters["items"] = items
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(message)[:300])


def _as_mapping(message: ChatMessage, contents: _Contents) -> dict[str, Any]:
    mapping: dict[str, Any] = {"role": message.role, "content": contents.mark(message.content)}
    if message.tool_calls:
        calls = []
        for call in message.tool_calls:
            values = json.loads(call.arguments_json)
            arguments = _Arguments(contents.mark(json.dumps(values, ensure_ascii=False)))
            arguments.values_by_name = {
                key: contents.mark(value) if isinstance(value, str) else value
                for key, value in values.items()
            }
            calls.append(
                {"type": "function", "function": {"name": call.name, "arguments": arguments}}
            )
        mapping["tool_calls"] = calls
    return mapping


def _pieces(text: str, contents: _Contents) -> list[Piece]:
    """Cut marked text at its marks and put the content back. Neighbours of one kind are joined."""
    pieces: list[Piece] = []

    def add(part: str, is_content: bool) -> None:
        if part and pieces and pieces[-1].is_content == is_content:
            pieces[-1] = Piece(pieces[-1].text + part, is_content)
        elif part:
            pieces.append(Piece(part, is_content))

    at = 0
    for found in _MARK.finditer(text):
        add(text[at : found.start()], False)
        add(contents.text(found[1]), True)
        at = found.end()
    add(text[at:], False)
    return pieces
