"""pytest plugin: prints how long each test folder took, against its budget."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

# Seconds on 2 cores; `make test` has 40 minutes in all.
BUDGETS_S = {
    "kernels": 300,
    "prefix_cache": 400,
    "engine": 400,
    "tools_bridge": 120,
    "sessions": 300,
    "product": 600,
}
_seconds: dict[str, float] = defaultdict(float)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    parts = Path(report.nodeid.split("::")[0]).parts
    _seconds[parts[1] if len(parts) > 2 else "other"] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("time per folder")
    for folder, seconds in sorted(_seconds.items(), key=lambda item: -item[1]):
        budget = BUDGETS_S.get(folder)
        over = "  OVER BUDGET" if budget is not None and seconds > budget else ""
        terminalreporter.write_line(
            f"{folder:14} {seconds:7.1f} s of {budget if budget is not None else '-'} s{over}"
        )
