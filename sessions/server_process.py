"""A `moorage serve` process of one's own: start, kill, start again on the same port and data. For
demos and tests.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from moorage.sessions.errors import DeadlineExceeded

READY = "moorage ready on "
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 40.0


class ServerProcess:
    """Not thread-safe; `start` and `stop` block, `kill` does not wait for more than the process's
    end.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        redis: str | None = None,
        model: Path | None = None,
        fill_freed_with_nan: bool = False,
        options: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self._data_dir = data_dir
        self._options = [
            *(["--redis", redis] if redis else []),
            *(["--model", str(model)] if model else []),
            *(["--nan-fill"] if fill_freed_with_nan else []),
            *options,
        ]
        self._environment = environment or {}
        self._process: subprocess.Popen[str] | None = None
        self.address = "127.0.0.1:0"
        """HOST:PORT once started; kept over a restart."""

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start and wait until calls are answered. Raises DeadlineExceeded with the end of the
        server's log.
        """
        self._data_dir.mkdir(parents=True, exist_ok=True)
        log_path = self._data_dir / "server.log"
        with log_path.open("a") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "moorage.sessions.cli", "serve"),
                    *("--listen", self.address, "--data-dir", str(self._data_dir)),
                    *self._options,
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | self._environment,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        assert self._process.stdout is not None
        while (left := deadline - time.monotonic()) > 0:
            readable, _, _ = select.select([self._process.stdout], [], [], left)
            line = self._process.stdout.readline() if readable else ""
            if line.startswith(READY):
                self.address = line.removeprefix(READY).strip()
                return
            if not line and self._process.poll() is not None:
                break
        tail = "\n".join(log_path.read_text().splitlines()[-15:])
        raise DeadlineExceeded(f"the server did not start within {START_TIMEOUT_S:g} s:\n{tail}")

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._end()

    def stop(self) -> int | None:
        """SIGTERM and wait for the drain; the exit status, None where it was not running or had to
        be killed.
        """
        if self._process is None:
            return None
        self._process.terminate()
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return None
        finally:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.wait(STOP_TIMEOUT_S)
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None
