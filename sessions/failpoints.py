"""Failpoints: named places around every durable write where a test makes this process fail or die.

In production `hit` is one dictionary look-up in an empty dictionary.
`MOORAGE_FAILPOINT=name:action[:n]`, comma separated, arms points from outside: `kill` ends the
process by SIGKILL, `error` raises `FailpointError`; `n` (1 if left out) is the hit at which it
acts.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

FAILPOINT_NAMES = frozenset(
    {
        "store.before_begin",
        "store.after_begin",
        "store.after_row",
        "store.after_records",
        "store.after_calls",
        "store.before_commit",
        "store.after_commit",
        "engine.before_submit",
        "engine.before_park_committed",
    }
)
"""Every point there is; arming another name is an error, so that a test cannot pass by a typing
mistake.
"""


class FailpointError(Exception):
    """Raised by an armed point with action `error`."""


_armed: dict[str, Callable[[], None]] = {}


def hit(name: str) -> None:
    """Called at the place `name`. Does nothing unless armed."""
    action = _armed.get(name)
    if action is not None:
        action()


def arm(name: str, action: Callable[[], None]) -> None:
    """Call `action` at every hit of `name`, until `disarm`. Raises ValueError for an
    unknown name.
    """
    if name not in FAILPOINT_NAMES:
        raise ValueError(f"failpoint {name!r} does not exist; there are {sorted(FAILPOINT_NAMES)}")
    _armed[name] = action


def disarm() -> None:
    """Make every point a no-op again."""
    _armed.clear()


def arm_from_environment(value: str | None = None) -> None:
    """Arm what `MOORAGE_FAILPOINT` (or `value`) says. Raises ValueError for a malformed entry."""
    text = os.environ.get("MOORAGE_FAILPOINT", "") if value is None else value
    for entry in filter(None, text.split(",")):
        name, _, rest = entry.partition(":")
        action, _, count = rest.partition(":")
        if action not in ("kill", "error") or (count and not count.isdigit()):
            raise ValueError(f"failpoint entry {entry!r}: expected name:kill[:n] or name:error[:n]")
        arm(name, _counted(name, action, int(count or 1)))


def _counted(name: str, action: str, at: int) -> Callable[[], None]:
    hits = 0

    def act() -> None:
        nonlocal hits
        hits += 1
        if hits == at:
            if action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise FailpointError(f"failpoint {name} at hit {hits}")

    return act
