"""Fixtures for every folder's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from redis_server import RedisServer

settings.register_profile("moorage", deadline=None)  # a busy machine is not a failing example
settings.load_profile("moorage")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One real Redis for the whole run; started at first use. Tests that kill one make their
    own.
    """
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """URL of the shared Redis, emptied for this test."""
    redis_server.flush()
    return redis_server.url
