"""The park policy of tools_bridge, asked with what sessions know."""

from __future__ import annotations

from moorage.sessions.session_config import ParkPolicyName
from moorage.tools_bridge.park_policy import ParkPolicy, WaitKind, decide


def wants_park(policy: ParkPolicyName, *, waits_for_tools: bool) -> bool:
    """Whether the KV leaves the device now: the turn waits for tools, or it ended and a human is
    next.
    """
    kind = WaitKind.TOOLS if waits_for_tools else WaitKind.HUMAN
    return decide(ParkPolicy(policy), kind).action == "park"
