"""Sessions that outlive their tool calls: gRPC service, durability, client.

Importing this imports neither torch nor the engine; names are loaded when asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moorage.sessions.client import Answer, Client, ClientSession, Sampling, SessionInfo
    from moorage.sessions.errors import MoorageError

__all__ = ["Answer", "Client", "ClientSession", "MoorageError", "Sampling", "SessionInfo"]


def __getattr__(name: str) -> object:
    if name == "MoorageError":
        from moorage.sessions.errors import MoorageError

        return MoorageError
    if name in __all__:
        from moorage.sessions import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
