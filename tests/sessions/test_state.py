"""The transition table."""

from __future__ import annotations

import itertools

import pytest

from moorage.sessions.errors import IllegalTransition
from moorage.sessions.state import TRANSITIONS, SessionEvent, SessionState, advance

S, E = SessionState, SessionEvent


def test_a_turn_with_a_tool_call() -> None:
    state = S.IDLE
    visited = []
    for event in (
        E.TURN_STARTED, E.TOOL_CALLS_EMITTED, E.ALL_RESULTS_IN, E.TURN_ENDED, E.CLOSED,
    ):  # fmt: skip
        state = advance(state, event)
        visited.append(state)
    assert visited == [S.RUNNING, S.WAITING_TOOLS, S.RUNNING, S.IDLE, S.CLOSED]


@pytest.mark.parametrize(("state", "event"), list(itertools.product(S, E)))
def test_an_event_the_table_does_not_have_raises_and_names_the_legal_ones(
    state: SessionState, event: SessionEvent
) -> None:
    if (state, event) in TRANSITIONS:
        assert advance(state, event) is TRANSITIONS[state, event]
        return
    with pytest.raises(IllegalTransition, match=f"{event.value} in state {state.value}"):
        advance(state, event)


def test_nothing_leaves_closed() -> None:
    assert {after for (state, _), after in TRANSITIONS.items() if state is S.CLOSED} == {S.CLOSED}
