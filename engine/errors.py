"""Typed errors of the engine. Who is at fault is in the type."""

from __future__ import annotations


class EngineError(Exception):
    """Root of everything the engine raises on purpose."""


class InvalidRequest(EngineError):
    """The caller's request is malformed: names the field, the value and the limit."""


class ContextTooLong(InvalidRequest):
    """The log does not fit the model's window or the device pool."""


class SessionBusy(InvalidRequest):
    """The session generates, loads or parks: one thing at a time."""


class MailboxFull(EngineError):
    """The engine's command queue is at its bound. Retry after a moment; nothing was accepted."""


class EngineClosed(EngineError):
    """The engine is not running (not started, closed, or its thread ended)."""


class WireError(EngineError):
    """Bytes or an object that are not a border message."""


class TierSetupError(EngineError):
    """A tier below the device cannot be opened: names the directory and the way out."""


class ModelError(EngineError):
    """The model's files are at fault."""


class UnsupportedModel(ModelError):
    """A layer kind or option that no family here implements, named."""


class WeightsError(ModelError):
    """A missing, truncated, unknown or misshapen tensor or file, named."""
