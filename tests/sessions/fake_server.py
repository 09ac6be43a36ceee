"""A server process with the fake engine: `fake_server.py DATA_DIR HOST:PORT`. Killed and restarted
by tests.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fake_engine import FakeEngine

from moorage.engine import StepOutput
from moorage.sessions import log
from moorage.sessions.limits import Limits
from moorage.sessions.server import ServerConfig, serve


def agent(prompt: str) -> str:
    """Calls `slow` once, then counts to forty with the tool's result at the end."""
    turn = prompt.rsplit("<|im_start|>user", 1)[1]
    if "<tool_response>" not in turn:
        return 'One moment.\n<tool_call>\n{"name": "slow", "arguments": {"n": 4}}\n</tool_call>'
    result = turn.split("<tool_response>\n")[1].partition("\n")[0]
    return " ".join(str(i) for i in range(40)) + f" and {result}."


class PacedEngine(FakeEngine):
    """Some milliseconds a step, so that a kill can fall into the middle of a turn; can end by
    itself.
    """

    def start(self, on_step: Callable[[StepOutput], None]) -> None:
        pause = float(os.environ.get("FAKE_STEP_S", "0"))

        def paced(output: StepOutput) -> None:
            time.sleep(pause)
            on_step(output)

        super().start(paced)
        if os.environ.get("FAKE_DIES"):
            threading.Timer(0.2, self.fail).start()

    def fail(self) -> None:
        with self._gate:
            self.die = True
            self._gate.notify_all()


if __name__ == "__main__":
    log.configure(json_lines=True)
    config = ServerConfig(
        listen=sys.argv[2], data_dir=Path(sys.argv[1]), limits=Limits(drain_s=1.0)
    )
    sys.exit(
        asyncio.run(
            serve(
                lambda: PacedEngine(agent),
                config,
                announce=lambda a: print(f"ready {a}", flush=True),
            )
        )
    )
