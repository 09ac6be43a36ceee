"""Whether a session's context leaves the device while it waits: a pure decision, which can be
replayed and tested.

The simplest honest rule. Parking frees device memory and costs one copy out and one copy in;
keeping costs device memory for the whole wait. `auto` parks where the expected wait is many times
what park and resume take, and whenever a human is waited for, who takes minutes. It measures
nothing itself and knows nothing of the memory that others need; a policy that learns the waits of
each tool and weighs memory takes the same values and gives the same decision.
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
    """`keep`: its blocks stay on the device. `park`: they go to a tier and are freed."""
    reason: str
    """For people; goes into events."""


DEFAULT_COSTS = ParkCosts(park_s=0.05, resume_s=0.05)
"""Where nothing was measured. Far above the goal of 5 ms for parking and resuming 4K tokens of a
small model in host memory, so that a guess errs towards keeping."""
PAYBACK = 10.0
"""`auto` parks where the wait is more than this many times the cost: then copying is at most a
tenth of the time for which memory is free. With the default costs that is 1 s."""


def decide(
    policy: ParkPolicy,
    wait: WaitKind,
    *,
    expected_wait_s: float | None = None,
    costs: ParkCosts = DEFAULT_COSTS,
) -> RetentionDecision:
    """Keep or park. An unknown wait for tools counts as short: `auto` never makes a token late on a
    guess. Never raises.
    """
    if policy is ParkPolicy.ALWAYS:
        return RetentionDecision("park", "policy always")
    if policy is ParkPolicy.NEVER:
        return RetentionDecision("keep", "policy never")
    if wait is WaitKind.HUMAN:
        return RetentionDecision("park", "a human turn is over")
    if expected_wait_s is None:
        return RetentionDecision("keep", "the wait for tools is unknown")
    threshold_s = PAYBACK * (costs.park_s + costs.resume_s)
    expected = f"expected wait {expected_wait_s:g} s"
    if expected_wait_s > threshold_s:
        return RetentionDecision("park", f"{expected} exceeds {threshold_s:g} s")
    return RetentionDecision("keep", f"{expected} does not exceed {threshold_s:g} s")
