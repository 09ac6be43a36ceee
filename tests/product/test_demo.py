"""The demo is the product's own proof; here it must hold, with and without Redis and kills."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run_demo(*options: str) -> tuple[int, str]:
    finished = subprocess.run(
        [sys.executable, "-m", "moorage.sessions.cli", "demo", *options],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | {"COLUMNS": "200"},
    )
    print(finished.stdout, finished.stderr)
    return finished.returncode, finished.stdout


@pytest.mark.timeout(300)
def test_the_demo_holds_with_nothing_but_the_package() -> None:
    status, output = run_demo()
    assert status == 0
    assert "FAIL" not in output
    assert "0 device blocks" in output and "every free block is filled with NaN" in output
    assert "the runner forwarded the new tokens + 1" in output


@pytest.mark.timeout(300)
def test_the_demo_holds_with_redis_and_sigkill(redis_url: str) -> None:
    status, output = run_demo("--redis", redis_url)
    assert status == 0
    assert output.count("the server was killed once") == 4  # tool and decode, greedy and seeded
    assert output.count("token ids of the whole dialogue equal those of the undisturbed run") == 4
    assert output.count("came back from Redis, nothing recomputed") == 2
