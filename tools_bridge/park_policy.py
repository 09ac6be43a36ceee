"""Whether a session's context leaves the device while it waits: a pure decision, so that it can be replayed and tested.

The simplest honest rule for now. Parking frees device memory and costs one copy out and one copy in; keeping
costs device memory for the whole wait. `auto` parks where the expected wait is longer than the park and resume
that it would take, and whenever a human is waited for, whose turns take minutes. Measured costs per tool come
with the policy that re-evaluates.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class ParkPolicy(StrEnum):
    """What the session asks for."""

    ALWAYS = "always"
    AUTO = "auto"
    NEVER = "never"


class WaitKind(StrEnum):
    """What is waited for."""

    TOOLS = "tools"
    HUMAN = "human"


@dataclass(frozen=True)
class ParkCosts:
    """What parking would cost now."""

    park_s: float
    """Seconds to store the context."""
    resume_s: float
    """Seconds to bring it back."""


@dataclass(frozen=True)
class RetentionDecision:
    """What to do with the context."""

    action: Literal["keep", "park"]
    reason: str
    """For people; goes into events."""


DEFAULT_COSTS = ParkCosts(park_s=0.05, resume_s=0.05)
"""Before anything was measured: both copies of a 4K-token context of a small model stay well below it."""
PAYBACK = 10.0
"""`auto` parks where the wait is this many times the cost: a device block is worth little for a shorter time."""


def decide(
    policy: ParkPolicy,
    wait: WaitKind,
    *,
    expected_wait_s: float | None = None,
    costs: ParkCosts = DEFAULT_COSTS,
) -> RetentionDecision:
    """Keep or park. Unknown waits for tools count as short: half of all tool calls return within seconds."""
    if policy is ParkPolicy.ALWAYS:
        return RetentionDecision("park", "policy always")
    if policy is ParkPolicy.NEVER:
        return RetentionDecision("keep", "policy never")
    if wait is WaitKind.HUMAN:
        return RetentionDecision("park", "a human turn is over")
    if expected_wait_s is None:
        return RetentionDecision("keep", "the wait is unknown and tools are mostly quick")
    threshold = PAYBACK * (costs.park_s + costs.resume_s)
    if expected_wait_s > threshold:
        return RetentionDecision(
            "park", f"expected wait {expected_wait_s:g} s exceeds {threshold:g} s"
        )
    return RetentionDecision(
        "keep", f"expected wait {expected_wait_s:g} s is below {threshold:g} s"
    )
