"""Protobuf values ↔ the plain values of sessions and engine. Enum numbers are named here and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from moorage.engine import EngineStatistics, Inspection, TokensBySource
from moorage.sessions.errors import InvalidArgument
from moorage.sessions.proto import sessions_pb2 as pb
from moorage.sessions.session_config import DisconnectPolicyName, ParkPolicyName
from moorage.sessions.state import SessionState

P = TypeVar("P", bound=str)

PARK_POLICIES: dict[int, ParkPolicyName] = {
    pb.PARK_POLICY_UNSPECIFIED: "auto",
    pb.PARK_POLICY_AUTO: "auto",
    pb.PARK_POLICY_ALWAYS: "always",
    pb.PARK_POLICY_NEVER: "never",
}
DISCONNECT_POLICIES: dict[int, DisconnectPolicyName] = {
    pb.DISCONNECT_POLICY_UNSPECIFIED: "continue",
    pb.DISCONNECT_POLICY_CONTINUE: "continue",
    pb.DISCONNECT_POLICY_PARK: "park",
    pb.DISCONNECT_POLICY_CANCEL: "cancel",
}
_STATES: dict[SessionState, pb.SessionState] = {
    SessionState.IDLE: pb.SESSION_STATE_IDLE,
    SessionState.RUNNING: pb.SESSION_STATE_RUNNING,
    SessionState.WAITING_TOOLS: pb.SESSION_STATE_WAITING_TOOLS,
    SessionState.CLOSED: pb.SESSION_STATE_CLOSED,
}


def policy(number: int, names: Mapping[int, P], field: str) -> P:
    """The name of an enum number. Raises InvalidArgument for one that this server does not know."""
    if number not in names:
        raise InvalidArgument(f"{field} is {number}, allowed are {sorted(names)}", field=field)
    return names[number]


def sampling_values(sampling: pb.SamplingParams) -> dict[str, Any]:
    """field -> value, for the fields that the client set."""
    return {
        field.name: tuple(value) if field.name in ("stop", "stop_token_ids") else value
        for field, value in sampling.ListFields()
    }


def state_to_proto(state: SessionState) -> pb.SessionState:
    """The enum number of a state."""
    return _STATES[state]


def sources_to_proto(sources: TokensBySource) -> pb.TokenSources:
    """Where KV came from."""
    return pb.TokenSources(
        device=sources.device,
        host=sources.host,
        disk=sources.disk,
        redis=sources.redis,
        recomputed=sources.recomputed,
        new=sources.new,
        recomputed_reason=sources.recomputed_reason,
    )


def inspection_to_proto(inspection: Inspection) -> pb.EngineInspection:
    """Block counts."""
    names = [field.name for field in pb.EngineInspection.DESCRIPTOR.fields]
    values: dict[str, Any] = {name: getattr(inspection, name) for name in names}
    return pb.EngineInspection(**{k: v for k, v in values.items() if v is not None})


def statistics_to_proto(statistics: EngineStatistics) -> pb.EngineStatistics:
    """Counters since the engine's start."""
    names = [field.name for field in pb.EngineStatistics.DESCRIPTOR.fields]
    values: dict[str, Any] = {name: getattr(statistics, name) for name in names}
    return pb.EngineStatistics(**values)
