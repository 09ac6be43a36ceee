"""Typed errors of the tools bridge. Who is at fault is in the type.

    ToolError
    ├── ToolSchemaError      the application: a JSON schema is malformed
    ├── ToolSignatureError   the application: a Python function cannot be offered as a tool
    ├── ToolConfigError      the application: a limit makes no sense
    ├── ParserFinished       the application: a parser was used after the end of its reply
    ├── ToolArgumentsError   the model: arguments do not fit the schema
    ├── UnknownTool          the model: it calls what is not offered
    └── TooManyAbandoned     the tools: functions that never return fill the places for threads

The last three never reach the application: `ToolRunner` makes results of them, for the model.
"""

from __future__ import annotations


class ToolError(Exception):
    """Root of everything the tools bridge raises on purpose."""


class ToolSchemaError(ToolError, ValueError):
    """A tool's schema is malformed (the application's fault); `path` names the field."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path


class ToolSignatureError(ToolError, TypeError):
    """A Python function cannot be offered as a tool; names the function and the parameter."""


class ToolConfigError(ToolError, ValueError):
    """A limit of a runner makes no sense; names the field, the value and what is allowed."""


class ParserFinished(ToolError, RuntimeError):
    """`feed` or `finish` after `finish`: `reset` begins the next reply."""


class ToolArgumentsError(ToolError, ValueError):
    """The arguments of a call do not fit the schema (the model's fault): it reads this as a
    result.
    """


class UnknownTool(ToolError, LookupError):
    """A call names a tool that is not offered (the model's fault)."""


class TooManyAbandoned(ToolError, RuntimeError):
    """Sync tools that ran past their deadline still hold every place that a thread may have."""
