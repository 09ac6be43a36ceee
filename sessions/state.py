"""The transition table of a session. Nothing else moves a session's state.

    IDLE ──turn_started──▶ RUNNING ──tool_calls_emitted──▶ WAITING_TOOLS
     ▲                      │   ▲                            │   │
     ├────turn_ended────────┘   └──────all_results_in────────┘   │
     └────cancelled / failed (from RUNNING and WAITING_TOOLS)────┘        any ──closed──▶ CLOSED

Where the KV is (device, parked) is not part of it: that is an attribute of the session.
"""

from __future__ import annotations

from enum import StrEnum

from moorage.sessions.errors import IllegalTransition


class SessionState(StrEnum):
    """Where the conversation stands."""

    IDLE = "idle"
    RUNNING = "running"
    WAITING_TOOLS = "waiting_tools"
    CLOSED = "closed"


class SessionEvent(StrEnum):
    """What can happen to it."""

    TURN_STARTED = "turn_started"
    TOOL_CALLS_EMITTED = "tool_calls_emitted"
    ALL_RESULTS_IN = "all_results_in"
    TURN_ENDED = "turn_ended"
    CANCELLED = "cancelled"
    FAILED = "failed"
    CLOSED = "closed"


TRANSITIONS: dict[tuple[SessionState, SessionEvent], SessionState] = {
    (SessionState.IDLE, SessionEvent.TURN_STARTED): SessionState.RUNNING,
    (SessionState.IDLE, SessionEvent.CLOSED): SessionState.CLOSED,
    (SessionState.RUNNING, SessionEvent.TOOL_CALLS_EMITTED): SessionState.WAITING_TOOLS,
    (SessionState.RUNNING, SessionEvent.TURN_ENDED): SessionState.IDLE,
    (SessionState.RUNNING, SessionEvent.CANCELLED): SessionState.IDLE,
    (SessionState.RUNNING, SessionEvent.FAILED): SessionState.IDLE,
    (SessionState.RUNNING, SessionEvent.CLOSED): SessionState.CLOSED,
    (SessionState.WAITING_TOOLS, SessionEvent.ALL_RESULTS_IN): SessionState.RUNNING,
    (SessionState.WAITING_TOOLS, SessionEvent.CANCELLED): SessionState.IDLE,
    (SessionState.WAITING_TOOLS, SessionEvent.FAILED): SessionState.IDLE,
    (SessionState.WAITING_TOOLS, SessionEvent.CLOSED): SessionState.CLOSED,
    (SessionState.CLOSED, SessionEvent.CLOSED): SessionState.CLOSED,
}


def advance(state: SessionState, event: SessionEvent) -> SessionState:
    """The state after `event`. Raises IllegalTransition, and nothing has changed, where the table
    has no entry.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        legal = sorted(e.value for (s, e) in TRANSITIONS if s is state)
        raise IllegalTransition(
            f"event {event.value} in state {state.value}: legal here are {', '.join(legal)}"
        ) from None
