"""Typed errors of the kernels. A wrong argument names op, argument, what is expected, what came.

KernelError
  ├─ InvalidArgument    the caller's mistake; nothing was computed or written
  └─ UnknownBackend     an override or a device type that no backend serves
"""

from __future__ import annotations


class KernelError(Exception):
    """Root of everything the kernels raise on purpose."""


class InvalidArgument(KernelError, ValueError):
    """A tensor of the wrong shape or dtype, or a value out of range."""

    def __init__(self, op: str, argument: str, expected: str, got: object) -> None:
        super().__init__(f"{op}: {argument} must be {expected}, got {got}")


class UnknownBackend(KernelError, ValueError):
    """No such op or backend; the message lists those that exist."""
