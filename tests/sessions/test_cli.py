"""The command line: what is wrong is said in one line, with status 2."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

import moorage.engine
from moorage.sessions import cli, log
from moorage.sessions.sqlite_store import SqliteStore


@pytest.fixture(autouse=True)
def no_log_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner's stderr is gone after the test; the process's logging must not point at it."""
    monkeypatch.setattr(log, "configure", lambda **options: None)


def invoke(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(args))
    return result.exit_code, result.output + result.stderr


def test_a_model_that_is_not_there_names_its_folder(tmp_path: Path) -> None:
    status, output = invoke("serve", "--model", str(tmp_path / "none"), "--data-dir", str(tmp_path))
    assert status == cli.EXIT_USAGE
    assert str(tmp_path / "none") in output.replace("\n", "")


def test_an_unknown_durability_is_refused() -> None:
    status, output = invoke("serve", "--durability", "hope")
    assert status == cli.EXIT_USAGE
    assert "'process', 'power'" in output


def test_a_busy_address_or_data_directory_is_refused_before_the_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(config: object) -> None:
        raise AssertionError("the model was read")

    monkeypatch.setattr(moorage.engine, "Engine", load)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        status, output = invoke("serve", "--listen", address, "--data-dir", str(tmp_path / "a"))
    assert (status, address in output, "--listen" in output) == (cli.EXIT_USAGE, True, True)
    store = SqliteStore(tmp_path / "b")
    status, output = invoke("serve", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "b"))
    store.close()
    assert (status, "--data-dir" in output) == (cli.EXIT_USAGE, True)


def test_the_default_model_is_looked_for_beside_the_source_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "examples" / "demo_model" / "weights"
    weights.mkdir(parents=True)
    (tmp_path / "sessions").mkdir()
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "sessions" / "cli.py"))

    def missing(name: str) -> Path:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(cli.resources, "files", missing)
    with pytest.raises(FileNotFoundError, match="--model"):
        cli.default_model_dir()
    (weights / "config.json").write_text("{}")
    assert cli.default_model_dir() == weights


def test_help_names_the_commands() -> None:
    status, output = invoke("--help")
    assert status == 0
    assert "serve" in output
    assert "demo" in output


@pytest.mark.parametrize("listen", ["50051", "127.0.0.1", "127.0.0.1:99999", "127.0.0.1:x", ":1"])
def test_an_address_that_is_none_is_refused_before_anything_is_loaded(listen: str) -> None:
    status, output = invoke("serve", "--listen", listen, "--model", "never-looked-at")
    assert status == cli.EXIT_USAGE
    assert "expected HOST:PORT" in " ".join(output.split())


@pytest.mark.parametrize("url", ["nonsense", "127.0.0.1:6379"])
def test_a_redis_url_that_is_none_is_one_line_and_no_traceback(tmp_path: Path, url: str) -> None:
    status, output = invoke("serve", "--redis", url, "--data-dir", str(tmp_path))
    assert status == cli.EXIT_USAGE
    assert "redis://" in output
    assert "[/db]" in output  # brackets in a message are text, not markup
    status, output = invoke("demo", "--redis", url)
    assert status == cli.EXIT_USAGE
    assert "Redis does not answer" in output


def test_the_demo_says_at_once_that_redis_is_away() -> None:
    status, output = invoke("demo", "--redis", "redis://127.0.0.1:1/0")
    assert status == cli.EXIT_USAGE
    assert "Redis does not answer" in output
