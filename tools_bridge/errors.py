"""Typed errors of the tools bridge. Who is at fault is in the type."""

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


class ToolArgumentsError(ToolError, ValueError):
    """The arguments of a call do not fit the schema (the model's fault): it gets this as a result."""


class UnknownTool(ToolError, LookupError):
    """A call names a tool that is not offered (the model's fault)."""
