"""Typed errors of the kernels: a wrong argument names the op, the argument, what was expected and what came."""

from __future__ import annotations


class KernelError(Exception):
    """Root of everything the kernels raise on purpose."""


class InvalidArgument(KernelError, ValueError):
    """A tensor of the wrong shape, dtype or device, or a value out of range."""

    def __init__(self, op: str, argument: str, expected: str, got: object) -> None:
        super().__init__(f"{op}: {argument} must be {expected}, got {got}")


class UnknownBackend(KernelError, ValueError):
    """An override names an op or backend that does not exist."""
