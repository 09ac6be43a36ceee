"""The park policy of tools_bridge, asked with what sessions know."""

from __future__ import annotations

from collections.abc import Sequence

from moorage.sessions.session_config import ParkPolicyName


def wants_park(policy: ParkPolicyName, *, tool_names: Sequence[str] | None) -> bool:
    """Whether the KV leaves the device now. `tool_names` None: the turn ended and a human is next."""
    raise NotImplementedError
