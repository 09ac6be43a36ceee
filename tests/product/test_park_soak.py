"""The soak of parks and resumes, short: `benchmarks/park_soak.py --cycles 10000` is the long one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "park_soak.py"


def test_six_hundred_parks_and_resumes_leak_nothing_and_change_no_token() -> None:
    command = [sys.executable, str(SCRIPT), "--cycles", "600", "--sessions", "60", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert figures["cycles"] == 600
    for name in ("token_mismatches", "tokens_recomputed", "leaked_blocks", "freed_blocks_not_nan",
                 "integrity_errors", "leaked_threads", "leaked_connections"):  # fmt: skip
        assert figures[name] == 0, name
