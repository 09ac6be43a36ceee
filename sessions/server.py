"""One server process: engine, store, manager and gRPC, started in that order and stopped in the
reverse one.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from moorage.sessions.auth import Authenticator
from moorage.sessions.engine_link import EngineFacade
from moorage.sessions.errors import InvalidArgument
from moorage.sessions.failpoints import arm_from_environment
from moorage.sessions.limits import Limits
from moorage.sessions.manager import SessionManager
from moorage.sessions.proto import sessions_pb2, sessions_pb2_grpc
from moorage.sessions.service import SessionsServicer
from moorage.sessions.sqlite_store import SqliteStore
from moorage.sessions.store import SessionStore

_log = structlog.get_logger("moorage.sessions")

HealthServicer = health.aio.HealthServicer  # pyright: ignore[reportAttributeAccessIssue]

SERVICE_NAME = sessions_pb2.DESCRIPTOR.services_by_name["Sessions"].full_name

MAX_PORT = 65_535
MIN_PING_INTERVAL_MS = 5_000
"""Clients may ping this often without a call; shorter than any sensible keepalive, so none is cut
off (case H2).
"""


@dataclass(frozen=True)
class ServerConfig:
    """What `moorage serve` takes."""

    listen: str = "127.0.0.1:50051"
    """HOST:PORT; port 0 takes a free one."""
    data_dir: Path = Path("moorage-data")
    """Where the session store lives; one process at a time."""
    durability: Literal["process", "power"] = "process"
    """What a commit survives; see sqlite_store.py."""
    tokens_file: Path | None = None
    """Bearer tokens and their tenants; None lets everyone in as tenant "default"."""
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class RunningServer:
    """What a started server is."""

    address: str
    """HOST:PORT as bound."""
    manager: SessionManager
    health: Any
    """The asyncio health servicer (its package has no types)."""


def parse_listen(listen: str) -> tuple[str, int]:
    """HOST and port of `HOST:PORT`. Raises InvalidArgument for anything else."""
    host, colon, port = listen.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) <= MAX_PORT):
        raise InvalidArgument(
            f"the address to listen on is {listen!r}, expected HOST:PORT with a port of 0 … {MAX_PORT}"
            " (0 takes a free one)",
            field="listen",
        )
    return host, int(port)


@asynccontextmanager
async def running_server(
    engine: EngineFacade,
    store: SessionStore,
    *,
    listen: str,
    limits: Limits,
    authenticator: Authenticator,
) -> AsyncIterator[RunningServer]:
    """Serve until the context ends; running streams are cut then, so `manager.drain` first.

    Raises InvalidArgument where the address cannot be bound.
    """
    manager = SessionManager(engine, store, limits)
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", limits.max_message_bytes),
            ("grpc.max_send_message_length", limits.max_message_bytes),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
            ("grpc.http2.max_ping_strikes", 0),  # pings that a busy machine bunches are no attack
            ("grpc.so_reuseport", 0),
        ]
    )
    sessions_pb2_grpc.add_SessionsServicer_to_server(  # type: ignore[no-untyped-call]
        SessionsServicer(manager, authenticator, limits), server
    )
    healthy = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    reflection.enable_server_reflection(
        (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    host, _ = parse_listen(listen)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise _not_bound(listen) from error
    if port == 0:
        raise _not_bound(listen)
    async with manager.run():
        await server.start()
        for name in ("", SERVICE_NAME):
            await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
        try:
            yield RunningServer(f"{host}:{port}", manager, healthy)
        finally:
            await healthy.enter_graceful_shutdown()
            await server.stop(grace=0.5)


def check_listen(listen: str) -> None:
    """Raises InvalidArgument where the address cannot be bound now. It may be taken later: the
    server binds it for good once the model is loaded.
    """
    host, port = parse_listen(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), port), family=family).close()
    except OSError as error:
        raise _not_bound(listen) from error


def _not_bound(listen: str) -> InvalidArgument:
    return InvalidArgument(
        f"cannot listen on {listen!r}: the address is taken or not of this machine; take another"
        " with --listen",
        field="listen",
    )


async def serve(
    open_engine: Callable[[], EngineFacade],
    config: ServerConfig,
    *,
    announce: Callable[[str], None],
) -> int:
    """Run until SIGTERM or SIGINT, then drain. The exit status: 0, or 1 where the engine ended by
    itself.

    `open_engine` loads the model, which takes long: it is called once address, tokens and data
    directory are known to be usable. `announce` is called with HOST:PORT once calls are answered.
    Raises MoorageError subclasses for what cannot be used, and whatever `open_engine` raises.
    """
    arm_from_environment()
    check_listen(config.listen)
    authenticator = (
        Authenticator.from_file(config.tokens_file) if config.tokens_file else Authenticator()
    )
    store = SqliteStore(config.data_dir, durability=config.durability)
    try:
        engine = open_engine()
    except BaseException:
        store.close()
        raise
    try:
        async with running_server(
            engine,
            store,
            listen=config.listen,
            limits=config.limits,
            authenticator=authenticator,
        ) as server:
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop.set)
            announce(server.address)
            failed = await _first(stop, server.manager.engine_failed)
            _log.info("stopping", engine_failed=failed)
            await server.health.enter_graceful_shutdown()
            await server.manager.drain(config.limits.drain_s)
    finally:
        await asyncio.to_thread(engine.close)
        store.close()
    return 1 if failed else 0


async def _first(stop: asyncio.Event, failed: asyncio.Event) -> bool:
    """Wait for either; whether it was `failed`."""
    waits = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(failed.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return failed.is_set()
