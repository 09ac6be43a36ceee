"""A real server on a free port with the fake engine behind it, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine

from moorage.sessions.auth import Authenticator
from moorage.sessions.client import Client
from moorage.sessions.limits import Limits
from moorage.sessions.manager import SessionManager
from moorage.sessions.server import running_server
from moorage.sessions.sqlite_store import SqliteStore

LIMIT_S = 20.0
"""No test may hang: every scenario ends or fails within this."""


@dataclass
class Harbour:
    """One running server and a client that is connected to it."""

    engine: FakeEngine
    manager: SessionManager
    client: Client
    address: str
    store: SqliteStore


Scenario = Callable[[Harbour], Awaitable[None]]


@contextlib.asynccontextmanager
async def harbour(
    data_dir: Path,
    engine: FakeEngine,
    *,
    limits: Limits | None = None,
    authenticator: Authenticator | None = None,
    token: str | None = None,
    listen: str = "127.0.0.1:0",
) -> AsyncIterator[Harbour]:
    """Start everything; stop it in order, as the server does."""
    store = SqliteStore(data_dir)
    try:
        async with (
            running_server(
                engine,
                store,
                listen=listen,
                limits=limits or Limits(),
                authenticator=authenticator or Authenticator(),
            ) as server,
            Client(server.address, token=token) as client,
        ):
            yield Harbour(engine, server.manager, client, server.address, store)
    finally:
        await asyncio.to_thread(engine.close)
        store.close()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run a scenario in a loop of its own, bounded."""

    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            await scenario

    asyncio.run(bounded())


async def eventually(condition: Callable[[], bool]) -> None:
    """Until `condition` holds; the scenario's own bound ends it otherwise."""
    while not condition():
        await asyncio.sleep(0.002)
