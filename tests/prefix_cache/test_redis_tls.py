"""Redis over TLS, terminated before a real Redis: verified by default, with client certificates, and errors that say
what to do.
"""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis_frames import ACME, HUGE, own, run, within
from redis_server import Proxy, RedisServer

from moorage.prefix_cache.errors import StoreError, StoreTimeout, StoreUnavailable
from moorage.prefix_cache.redis_store import RedisConfig, RedisStore


@dataclass(frozen=True)
class Authority:
    """A throw-away CA with a server's and a client's certificate."""

    directory: Path

    def __getattr__(self, name: str) -> Path:
        return self.directory / name.replace("_", ".")

    def context(self, *, client: bool = False) -> ssl.SSLContext:
        """The server's side; `client`: clients must show a certificate of this CA."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.directory / "server.pem", self.directory / "server.key")
        if client:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.directory / "ca.pem")
        return context


def make_authority(directory: Path) -> Authority:
    binary = shutil.which("openssl")
    assert binary is not None, "these tests make their certificates with the openssl command"

    def openssl(*words: str) -> None:
        subprocess.run([binary, *words], cwd=directory, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2"
    )
    for name in ("server", "client"):
        openssl(
            "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"
        )
        (directory / "ext").write_text("subjectAltName=IP:127.0.0.1")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-CAcreateserial", "-out", f"{name}.pem", "-days", "2", "-extfile", "ext",
        )  # fmt: skip
    return Authority(directory)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture
def proxy(redis_url: str, redis_server: RedisServer, ours: Authority) -> Iterator[Proxy]:
    with Proxy(redis_server.port, tls=ours.context()) as made:
        yield made


def url(proxy: Proxy, **options: object) -> str:
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"rediss://127.0.0.1:{proxy.port}/0?{query}".rstrip("?")


def test_frames_pass_whole_over_tls(proxy: Proxy, ours: Authority) -> None:
    store = RedisStore(RedisConfig(url(proxy, ca_file=ours.ca_pem)))
    frames = [run(1, geometry=HUGE), run(2), own("a", 1, geometry=HUGE)]
    keys = [key for key, _ in frames]
    for _ in range(3):
        store.put(frames, "a", ACME, 20.0)
        assert store.get(keys, "a", ACME, 20.0) == [frame.join() for _, frame in frames]
    store.close()


def test_a_certificate_of_nobody_we_know_is_not_accepted(proxy: Proxy, tmp_path: Path) -> None:
    for where in (url(proxy), url(proxy, ca_file=make_authority(tmp_path).ca_pem)):
        store = RedisStore(RedisConfig(where))
        with within(1.0), pytest.raises(StoreUnavailable, match="not accepted.*ca_file") as caught:
            store.put([run(1)], "a", ACME, 2.0)
        assert f"127.0.0.1:{proxy.port}" in str(caught.value)
        store.close()


def test_a_certificate_for_another_name_is_not_accepted(proxy: Proxy, ours: Authority) -> None:
    where = url(proxy, ca_file=ours.ca_pem).replace("127.0.0.1", "localhost")
    store = RedisStore(RedisConfig(where))
    with pytest.raises(StoreUnavailable, match="[Hh]ostname mismatch.*the name that is on it"):
        store.check(2.0)
    store.close()


def test_verification_can_be_given_up(proxy: Proxy) -> None:
    store = RedisStore(RedisConfig(url(proxy, verify="no")))
    store.check(5.0)
    store.close()


def test_a_client_certificate_is_shown_where_it_is_asked_for(
    redis_url: str, redis_server: RedisServer, ours: Authority
) -> None:
    with Proxy(redis_server.port, tls=ours.context(client=True)) as proxy:
        without = RedisStore(RedisConfig(url(proxy, ca_file=ours.ca_pem)))
        with within(1.0), pytest.raises(StoreError) as caught:
            without.put([run(1)], "a", ACME, 2.0)
        assert isinstance(caught.value, StoreUnavailable)
        files = {"cert_file": ours.client_pem, "key_file": ours.client_key}
        store = RedisStore(RedisConfig(url(proxy, ca_file=ours.ca_pem, **files)))
        store.put([run(1)], "a", ACME, 5.0)
        assert store.contains([run(1)[0]], "a", ACME, 5.0) == [True]
        without.close()
        store.close()


def test_tls_on_a_plain_port_and_plain_on_a_tls_port(
    proxy: Proxy, redis_server: RedisServer, ours: Authority
) -> None:
    wrong = RedisStore(RedisConfig(f"rediss://127.0.0.1:{redis_server.port}", socket_timeout_s=1.0))
    with within(1.0), pytest.raises(StoreError):
        wrong.check(2.0)
    wrong.close()
    plain = RedisStore(RedisConfig(f"redis://127.0.0.1:{proxy.port}", socket_timeout_s=1.0))
    with within(1.0), pytest.raises(StoreError):
        plain.check(2.0)
    plain.close()


def test_a_deadline_in_mid_reply_and_a_slow_way_hold_over_tls_too(
    proxy: Proxy, ours: Authority
) -> None:
    store = RedisStore(RedisConfig(url(proxy, ca_file=ours.ca_pem), socket_timeout_s=0.3))
    large = run(1, geometry=HUGE)
    store.put([large, run(2)], "a", ACME, 20.0)
    proxy.pass_down = 100_000
    with within(0.3), pytest.raises(StoreTimeout):
        store.get([large[0]], "a", ACME, 20.0)
    proxy.pass_down = None
    proxy.rate = 2e6
    with within(0.5), pytest.raises(StoreTimeout, match="the operation's deadline passed"):
        store.get([large[0]], "a", ACME, 0.5)
    proxy.rate = None
    assert store.get([run(2)[0]], "a", ACME, 5.0) == [run(2)[1].join()]
    store.close()


def test_g13_a_connection_that_was_killed_is_replaced(
    proxy: Proxy, ours: Authority, redis_server: RedisServer
) -> None:
    store = RedisStore(RedisConfig(url(proxy, ca_file=ours.ca_pem)))
    with redis_server.client() as client:
        for fill in range(3):
            store.put([own("a", fill + 1, fill)], "a", ACME, 5.0)
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            assert store.get([own("a", fill + 1)[0]], "a", ACME, 5.0) == [
                own("a", fill + 1, fill)[1].join()
            ]
    store.close()
