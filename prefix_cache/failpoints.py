"""Failpoints: a named hook before and after each durable write of this folder, for tests that break
things there.

A test installs a function that raises or kills the process; elsewhere `hit` is one global read and
a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum


class Failpoint(StrEnum):
    """Every place where a write of this folder may be cut off."""

    HOST_BEFORE_FRAME = "host.before_frame"
    HOST_AFTER_FRAME = "host.after_frame"
    HOST_BEFORE_DELETE = "host.before_delete"
    HOST_AFTER_DELETE = "host.after_delete"
    DISK_BEFORE_FRAME = "disk.before_frame"
    DISK_AFTER_FRAME = "disk.after_frame"
    DISK_BEFORE_DELETE = "disk.before_delete"
    DISK_AFTER_DELETE = "disk.after_delete"
    DISK_AFTER_UNLINK = "disk.after_unlink"
    REDIS_BEFORE_WRITE = "redis.before_write"
    """Before a pipeline that holds one or more frames is sent."""
    REDIS_AFTER_WRITE = "redis.after_write"
    REDIS_BEFORE_DELETE = "redis.before_delete"
    REDIS_AFTER_DELETE = "redis.after_delete"
    PARK_BEFORE_PUT = "park.before_put"
    PARK_AFTER_PUT = "park.after_put"


Hook = Callable[[Failpoint], None]
_hook: Hook | None = None


def hit(name: Failpoint) -> None:
    """Called where the write happens; does nothing unless a test installed a hook."""
    if _hook is not None:
        _hook(name)


@contextmanager
def installed(hook: Hook) -> Iterator[None]:
    """Install a hook for the time of a test; one at a time, in all threads."""
    global _hook  # noqa: PLW0603
    previous, _hook = _hook, hook
    try:
        yield
    finally:
        _hook = previous
