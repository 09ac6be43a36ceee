"""What a Redis URL may say, and that no part of a secret comes back out of it."""

from __future__ import annotations

import dataclasses
import traceback
from pathlib import Path
from typing import Any

import pytest

from moorage.prefix_cache.errors import InvalidInput
from moorage.prefix_cache.redis_config import Endpoint, RedisConfig, Topology
from moorage.prefix_cache.redis_store import RedisStore


@pytest.mark.parametrize(
    ("url", "topology", "endpoints", "service", "db"),
    [
        ("redis://h", "single", ["h:6379"], "", 0),
        ("redis://h:7000/3", "single", ["h:7000"], "", 3),
        ("redis://[::1]:7000", "single", ["[::1]:7000"], "", 0),
        ("unix:///run/redis.sock?db=2", "single", ["/run/redis.sock"], "", 2),
        ("redis+sentinel://a,b:26380/kv/1", "sentinel", ["a:26379", "b:26380"], "kv", 1),
        ("rediss+sentinel://a/kv", "sentinel", ["a:26379"], "kv", 0),
        ("redis+cluster://a:7000,b", "cluster", ["a:7000", "b:6379"], "", 0),
        ("rediss+cluster://[::1]:7000,b", "cluster", ["[::1]:7000", "b:6379"], "", 0),
    ],
)
def test_a_url_names_topology_servers_service_and_database(
    url: str, topology: str, endpoints: list[str], service: str, db: int
) -> None:
    target = RedisConfig(url).target()
    assert target.topology == Topology(topology)
    assert [str(one) for one in target.endpoints] == endpoints
    assert (target.service, target.node.db) == (service, db)
    assert (target.node.tls is not None) == url.startswith("rediss")


def test_user_and_password_are_unquoted_and_not_for_sentinels() -> None:
    target = RedisConfig("redis+sentinel://us%40r:p%2Fw%3A@a/kv").target()
    assert (target.node.username, target.node.password) == ("us@r", "p/w:")
    assert (target.sentinel.username, target.sentinel.password) == ("", "")
    plain = RedisConfig("redis://:only@a").target().node
    assert (plain.username, plain.password) == ("", "only")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:6379",
        "http://h",
        "redis://",
        "redis://h:notaport",
        "redis://h:0",
        "redis://h:70000",
        "redis://h:6379:1",
        "redis://a,b",
        "redis://h/x",
        "redis://h/0/1",
        "redis://h/0?colour=blue",
        "redis://h?password_file",
        "redis://h#part",
        "redis://[::1",
        "redis+sentinel://a",
        "redis+cluster://a/1",
        "redis+moon://a",
        "unix+cluster://a",
        "unix://",
    ],
)
def test_a_malformed_url_is_refused_with_the_forms_and_not_shown(url: str) -> None:
    secret = url.replace("://", "://user:hunter2@")
    with pytest.raises(
        InvalidInput, match=r"the Redis URL is malformed .*redis\+cluster"
    ) as caught:
        RedisStore(RedisConfig(secret))
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_secrets_are_in_no_repr() -> None:
    config = RedisConfig("redis://user:hunter2@h")
    assert "hunter2" not in repr(config)
    assert "hunter2" not in repr(config.target())


def test_options_name_files_once(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    url = f"redis+sentinel://user@a/kv?password_file={secret}&sentinel_password_file={secret}x"
    target = RedisConfig(url).target()
    assert (target.node.username, target.node.password_file) == ("user", secret)
    assert target.sentinel.password_file == Path(f"{secret}x")
    with pytest.raises(InvalidInput, match="password_file: give one of them"):
        RedisConfig(f"redis://:hunter2@a?password_file={secret}").target()


@pytest.mark.parametrize("name", ["ca_file", "cert_file"])
def test_a_tls_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match=f"{name} {tmp_path}/none.pem.* No such file"):
        RedisStore(RedisConfig(f"rediss://h?{name}={tmp_path}/none.pem"))
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    with pytest.raises(InvalidInput, match=f"{name} {broken}"):
        RedisStore(RedisConfig(f"rediss://h?{name}={broken}"))


def test_verification_is_on_unless_said_otherwise() -> None:
    strict = RedisConfig("rediss://h").target().node.tls
    assert (
        strict is not None and strict.check_hostname and strict.verify_mode.name == "CERT_REQUIRED"
    )
    loose = RedisConfig("rediss://h?verify=no").target().node.tls
    assert loose is not None and loose.verify_mode.name == "CERT_NONE"
    with pytest.raises(InvalidInput, match="verify in the Redis URL is neither yes nor no"):
        RedisConfig("rediss://h?verify=maybe").target()


@pytest.mark.parametrize(
    "bad",
    [
        {"ttl_s": 0},
        {"max_connections": 0},
        {"socket_timeout_s": -1},
        {"max_retries": -1},
        {"pipeline_bytes": 0},
        {"connect_timeout_s": float("nan")},
    ],
)
def test_bad_settings_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(bad))):
        RedisStore(dataclasses.replace(RedisConfig("redis://127.0.0.1/0"), **bad))


def test_an_endpoint_is_written_as_it_is_read() -> None:
    assert str(Endpoint("::1", 5)) == "[::1]:5"
    assert str(Endpoint("/run/x", 0)) == "/run/x"
