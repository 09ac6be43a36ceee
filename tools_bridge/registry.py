"""Python functions as tools: name, schema and description are the function's own."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, overload

from moorage.tools_bridge.call import ToolCall, ToolSchema, parse_tool_schema
from moorage.tools_bridge.errors import ToolSchemaError, ToolSignatureError, UnknownTool
from moorage.tools_bridge.hints import Convert, read_hint
from moorage.tools_bridge.schema import coerce_arguments


@dataclass(frozen=True)
class Tool:
    """A callable with its schema. Calling it calls the function, so that `@tool` hides nothing."""

    schema: ToolSchema
    """What the model sees."""
    function: Callable[..., Any]
    """Sync or async; called with keyword arguments."""
    deadline_s: float | None = None
    """Seconds that one call may take; None for the runner's default."""
    conversions: dict[str, Convert] = field(default_factory=dict)
    """Parameter → how its JSON value becomes the value the function asks for."""

    @property
    def is_async(self) -> bool:
        """Whether it runs on the event loop. A function that is not `async def` gets a thread."""
        function = _unwrapped(self.function)
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object's own `async def __call__`
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself."""
        return self.function(*args, **kwargs)

    def python_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """What a model wrote as what the function takes. Raises ToolArgumentsError."""
        checked = coerce_arguments(arguments, self.schema)
        return {
            name: self.conversions[name](value) if name in self.conversions else value
            for name, value in checked.items()
        }


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *, name: str | None = None, description: str | None = None, deadline_s: float | None = None
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    deadline_s: float | None = None,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """`@tool`, or `@tool(name=…, description=…, deadline_s=…)` where the function's own will not
    do. A plain function given to a registry is the same as `@tool` without arguments.
    """

    def decorate(inner: Callable[..., Any]) -> Tool:
        return tool_from_function(inner, name=name, description=description, deadline_s=deadline_s)

    return decorate if function is None else decorate(function)


def tool_from_function(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    deadline_s: float | None = None,
) -> Tool:
    """A tool whose name, description and parameters are the function's own.

    The description is the docstring's first paragraph; a Google-style `Args:` section describes
    parameters; a parameter with a default is not required, and its default is not in the schema.
    Raises ToolSignatureError naming function and parameter.
    """
    own_name = getattr(function, "__name__", type(function).__name__)
    name = str(own_name) if name is None else name
    if deadline_s is not None and not deadline_s > 0:
        raise ToolSignatureError(
            f"{name}: deadline_s is {deadline_s}, expected more than 0 or None"
        )
    hints, signature = _read_signature(function, name)
    paragraph, described = _read_docstring(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    conversions: dict[str, Convert] = {}
    for parameter in signature.parameters.values():
        where = f"{name}({parameter.name})"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolSignatureError(
                f"{where} is {parameter.kind.description}: a model names its arguments, so give"
                " every parameter a name of its own"
            )
        if parameter.name not in hints:
            raise ToolSignatureError(f"{where} has no type: annotate it, the model reads the type")
        hint = read_hint(hints[parameter.name], where)
        properties[parameter.name] = dict(hint.schema)
        if parameter.name in described:
            properties[parameter.name]["description"] = described[parameter.name]
        if hint.convert is not None:
            conversions[parameter.name] = hint.convert
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    value = {
        "name": name,
        "description": paragraph if description is None else description,
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    try:
        schema = parse_tool_schema(value, name)
    except ToolSchemaError as error:
        raise ToolSignatureError(str(error)) from error
    return Tool(schema, function, deadline_s, conversions)


class ToolRegistry:
    """Tools by name, in the order given."""

    def __init__(self, tools: Iterable[Callable[..., Any] | Tool] = ()) -> None:
        """Raises ToolSignatureError for a function that cannot be a tool or a name that stands
        twice.
        """
        self._tools: dict[str, Tool] = {}
        for item in tools:
            self.add(item)

    def add(self, item: Callable[..., Any] | Tool) -> Tool:
        """One more tool. Raises ToolSignatureError and then changes nothing."""
        added = item if isinstance(item, Tool) else tool_from_function(item)
        if added.schema.name in self._tools:
            raise ToolSignatureError(
                f"a tool named {added.schema.name} is there already: rename one"
            )
        self._tools[added.schema.name] = added
        return added

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """All schemas, in order."""
        return tuple(one.schema for one in self._tools.values())

    def find(self, name: str) -> Tool:
        """The tool of that name. Raises UnknownTool listing what there is."""
        if name not in self._tools:
            known = ", ".join(self._tools) or "none"
            raise UnknownTool(f"there is no tool {name[:80]!r}; tools: {known}")
        return self._tools[name]

    def arguments(self, call: ToolCall) -> tuple[Tool, dict[str, Any]]:
        """The tool and its arguments as Python values. Raises UnknownTool or ToolArgumentsError,
        both for the model to read; what a dataclass raises in its own checks goes through.
        """
        found = self.find(call.name)
        return found, found.python_arguments(call.parse_arguments())


def _unwrapped(function: Callable[..., Any]) -> Any:
    """What a partial is a partial of."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _read_signature(
    function: Callable[..., Any], name: str
) -> tuple[dict[str, Any], inspect.Signature]:
    target = _unwrapped(function)
    if not (inspect.isroutine(target) or inspect.isclass(target)):
        target = getattr(target, "__call__", target)  # noqa: B004 - hints of a callable object
    try:
        return typing.get_type_hints(target), inspect.signature(function)
    except (TypeError, NameError, ValueError, AttributeError) as error:
        raise ToolSignatureError(f"{name}: its signature cannot be read: {error}") from error


_SECTION = re.compile(r"(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?):\s*")
_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\(.*?\))?:\s*(.*)")


def _read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """(first paragraph, parameter → description), white space collapsed."""
    target = _unwrapped(function)  # a partial would be described as what a partial is
    text = inspect.getdoc(target) or ""
    if _SECTION.fullmatch(text.split("\n", 1)[0]):
        # Cleaning takes the first line's entries for the margin: show it where they begin.
        text = inspect.cleandoc("\n" + (target.__doc__ or text))
    lines = text.splitlines()
    paragraph: list[str] = []
    for line in lines:
        if not line.strip() or _SECTION.fullmatch(line):
            break
        paragraph.append(line.strip())
    return " ".join(paragraph), _read_args(lines)


def _read_args(lines: list[str]) -> dict[str, str]:
    """The entries of the `Args:` section; a deeper line goes on with the entry above it."""
    described: dict[str, str] = {}
    inside, margin, current = False, 0, ""
    for line in lines:
        section = _SECTION.fullmatch(line)
        if section is not None:
            inside, margin = section.group(1) in ("Args", "Arguments"), 0
        elif inside and line.strip():
            indent = len(line) - len(line.lstrip())
            if indent == 0:
                break
            margin = margin or indent
            entry = _ENTRY.fullmatch(line.strip()) if indent <= margin else None
            if entry is not None:
                current = entry.group(1)
                described[current] = entry.group(2).strip()
            elif current:
                described[current] = f"{described[current]} {line.strip()}".strip()
    return {name: words for name, words in described.items() if words}
