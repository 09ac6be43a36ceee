"""What every session of a server shares."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from moorage.sessions.committer import Committer
from moorage.sessions.engine_link import EngineFacade, EngineLink
from moorage.sessions.errors import TemplateError
from moorage.sessions.event_projector import NewParser
from moorage.sessions.limits import Limits
from moorage.sessions.store import SessionStore
from moorage.sessions.templates import ChatTemplate


@dataclass(frozen=True)
class SessionServices:
    """Handed to each session by the manager."""

    engine: EngineFacade
    link: EngineLink
    committer: Committer
    store: SessionStore
    limits: Limits
    template: ChatTemplate | None
    """None where the model has none: only raw token ids can be sent then."""
    parsers: Callable[[str], NewParser]
    """session id -> factory of tool-call parsers with that session's call ids."""
    spawn: Callable[[Coroutine[Any, Any, object]], None]
    """Run a coroutine in the manager's task group; its failure is logged, never lost."""

    def chat_template(self) -> ChatTemplate:
        """Raises TemplateError where the model has none."""
        if self.template is None:
            raise TemplateError(
                f"the model {self.engine.model_info.name} has no chat template: send token ids"
                " instead of"
                " messages"
            )
        return self.template
