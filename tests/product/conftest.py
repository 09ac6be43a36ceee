"""A real server process with the shipped model, one for the module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_server import RedisServer

from moorage.sessions.server_process import ServerProcess


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer
) -> Iterator[ServerProcess]:
    process = ServerProcess(
        tmp_path_factory.mktemp("server"), redis=redis_server.url, fill_freed_with_nan=True
    )
    process.start()
    yield process
    assert process.stop() == 0


@pytest.fixture
def own_server(tmp_path: Path, redis_url: str) -> Iterator[ServerProcess]:
    """A server that the test may kill."""
    process = ServerProcess(tmp_path / "data", redis=redis_url, fill_freed_with_nan=True)
    process.start()
    yield process
    process.stop()
