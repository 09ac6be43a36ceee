"""`moorage demo`: a real server, a real agent, and a check of what Moorage promises. Exit status 0
means all of it held.

Without Redis: an agent makes tool calls over a socket, one of them slow, with park policy `always`;
while that tool runs the session holds no device block and freed blocks are NaN; afterwards the
runner forwards the new tokens and one more. With `--redis URL` the same dialogue is run undisturbed
and then with the server killed by SIGKILL, once while the slow tool runs and once in mid-decode,
greedy and at temperature 0.8: all must give the same token ids.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moorage.sessions.client import Answer, Client, ClientSession, Sampling
from moorage.sessions.client_events import (
    Event,
    InputAccepted,
    Parked,
    Resumed,
    StretchUsage,
    TextDelta,
)
from moorage.sessions.server_process import ServerProcess

SLOW_TOOL_S = 2.0
FILES = {"price.txt": "37", "harbor.txt": "berth 17 is free"}
SYSTEM = "You are a helpful assistant that uses tools when they are needed."
TURN_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Prompt:
    """One user turn of the dialogue."""

    text: str
    expected: str
    """What the final answer must contain: it can only come from the tools."""


DIALOGUE = (
    Prompt("Read the file price.txt and multiply the number in it by 12.", "444"),
    Prompt("Store 444 under the key berth.", "444"),
    Prompt("What is stored under the key berth?", "444"),
    Prompt("Read the file harbor.txt and tell me what it says.", "berth 17 is free"),
)


@dataclass
class Checks:
    """What was claimed and whether it held."""

    console: Console
    failed: int = 0

    def that(self, claim: str, held: bool, seen: object = "") -> None:
        """Print one claim with what was seen."""
        self.failed += not held
        mark = "[green]ok  [/green]" if held else "[red]FAIL[/red]"
        self.console.print(f"  {mark} {claim}" + (f"  [dim]({seen})[/dim]" if seen != "" else ""))


@dataclass
class Run:
    """One whole dialogue on one server."""

    server: ServerProcess
    checks: Checks
    sampling: Sampling
    kill: str = ""
    """"tool": SIGKILL while the slow tool runs; "decode": in the middle of an answer."""
    check_answers: bool = True
    answers: list[Answer] = field(default_factory=list)
    token_ids: tuple[int, ...] = ()
    num_tool_calls: int = 0
    kills: int = 0
    session: ClientSession | None = None
    parked: asyncio.Event = field(default_factory=asyncio.Event)
    _restart: asyncio.Task[None] | None = None
    _texts: int = 0

    async def play(self) -> None:
        """All turns. Raises what the client raises."""
        store: dict[str, str] = {}
        slow = [True]

        async def read_file(path: str) -> str:
            """Return the content of a text file."""
            if slow[0]:
                slow[0] = False
                await self._while_the_slow_tool_runs()
            return FILES.get(path, f"error: no file {path}")

        def calculator(expression: str) -> str:
            """Evaluate an arithmetic expression."""
            return calculate(expression)

        def kv_set(key: str, value: str) -> str:
            """Store a value under a key."""
            store[key] = value
            return "ok"

        def kv_get(key: str) -> str:
            """Return the value stored under a key."""
            return store.get(key, f"error: no key {key}")

        tools: list[Callable[..., Any]] = [read_file, calculator, kv_set, kv_get]
        async with Client(self.server.address) as client:
            self.session = await client.create(
                system=SYSTEM, tools=tools, park_policy="always", sampling=self.sampling
            )
            for prompt in DIALOGUE:
                answer = await self.session.run(
                    prompt.text, on_event=self._on_event, timeout_s=TURN_TIMEOUT_S
                )
                self.answers.append(answer)
                self.num_tool_calls += answer.num_tool_calls
                if self.check_answers:
                    self.checks.that(
                        f"“{prompt.text}” → “{answer.text.strip()}”", prompt.expected in answer.text
                    )
            if self._restart is not None:
                await self._restart
            self.token_ids = (await self.session.get()).token_ids
            await self.session.close()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Parked):
            self.parked.set()
        if isinstance(event, TextDelta) and event.text and self.kill == "decode":
            self._texts += 1
            if self._texts == 4 and not self.kills:
                self._kill_and_restart()

    async def _while_the_slow_tool_runs(self) -> None:
        assert self.session is not None
        async with asyncio.timeout(30):
            await self.parked.wait()
        info = await self.session.get(inspect=True)
        seen = info.inspection
        assert seen is not None
        held = seen.session_locked_blocks + seen.session_in_use_blocks
        self.checks.that(
            "while the slow tool runs the session holds 0 device blocks", held == 0, held
        )
        self.checks.that(
            "every free block is filled with NaN",
            seen.HasField("free_blocks_not_nan") and seen.free_blocks_not_nan == 0,
            f"{seen.free_blocks} free of {seen.total_blocks}",
        )
        self.checks.that("free + evictable + locked + in use = total", seen.integrity_error == "")
        if self.kill == "tool":
            self._kill_and_restart()
        await asyncio.sleep(SLOW_TOOL_S)  # the tool's own work

    def _kill_and_restart(self) -> None:
        self.server.kill()
        self.kills += 1
        self._restart = asyncio.get_running_loop().create_task(asyncio.to_thread(self.server.start))


def calculate(expression: str) -> str:
    """Two numbers and an operator, as the demo model writes them."""
    parts = expression.split()
    if len(parts) != 3 or not all(part.isdigit() for part in (parts[0], parts[2])):
        return "error: expected NUMBER OPERATOR NUMBER"
    left, right = int(parts[0]), int(parts[2])
    match parts[1]:
        case "+":
            return str(left + right)
        case "-":
            return str(left - right)
        case "*":
            return str(left * right)
        case "/" if right and left % right == 0:
            return str(left // right)
        case "/" if right:
            return f"{left / right:.2f}"
    return "error: division by zero or unknown operator"


def run_demo(redis: str | None = None, model: Path | None = None) -> int:
    """The whole demo. The exit status: 0 where every check held."""
    console = Console(width=int(os.environ.get("COLUMNS", "118")), highlight=False)
    if redis is not None and (problem := _redis_problem(redis)):
        console.print(f"[red]{escape(problem)}[/red]")
        return 2
    return asyncio.run(_demo(console, redis, model))


def _redis_problem(url: str) -> str:
    """Why this Redis cannot be used; empty if it can."""
    try:
        with Redis.from_url(url, socket_connect_timeout=3, socket_timeout=3) as client:
            client.ping()
    except (RedisError, ValueError) as error:
        return f"Redis does not answer: {error}; start one, or leave --redis out"
    return ""


async def _demo(console: Console, redis: str | None, model: Path | None) -> int:
    checks = Checks(console)
    greedy = Sampling(temperature=0.0, max_tokens=256)
    with tempfile.TemporaryDirectory(prefix="moorage-demo-") as folder:
        where = Path(folder)
        console.rule("an agent on a parked and resumed session")
        run = await _play(where / "first", checks, greedy, redis, model)
        checks.that("at least three tool calls", run.num_tool_calls >= 3, run.num_tool_calls)
        _check_resumes(run, checks)
        console.print(_table(run.answers))
        if redis is not None:
            await _disturbed(console, where, checks, greedy, run, redis, model)
            warm = Sampling(temperature=0.8, seed=20_260_101, max_tokens=96)
            console.rule("the same at temperature 0.8, seeded")
            calm = await _play(where / "warm", checks, warm, redis, model, check_answers=False)
            await _disturbed(console, where, checks, warm, calm, redis, model)
    if checks.failed:
        console.print(f"[red]{checks.failed} checks failed[/red]")
        return 1
    console.print("[green]every check held[/green]")
    return 0


async def _play(
    folder: Path,
    checks: Checks,
    sampling: Sampling,
    redis: str | None,
    model: Path | None,
    *,
    kill: str = "",
    check_answers: bool = True,
) -> Run:
    """One dialogue on a server of its own."""
    server = ServerProcess(folder, redis=redis, model=model, fill_freed_with_nan=True)
    await asyncio.to_thread(server.start)
    try:
        run = Run(server, checks, sampling, kill, check_answers)
        await run.play()
        return run
    finally:
        await asyncio.to_thread(server.stop)


async def _disturbed(
    console: Console,
    where: Path,
    checks: Checks,
    sampling: Sampling,
    calm: Run,
    redis: str,
    model: Path | None,
) -> None:
    """The dialogue again, with kills; token ids must equal the calm run's."""
    label = f"t{sampling.temperature:g}"
    for kill in ("tool", "decode"):
        console.rule(f"server killed with SIGKILL: {kill}")
        run = await _play(
            where / f"{label}-{kill}",
            checks,
            sampling,
            redis,
            model,
            kill=kill,
            check_answers=False,
        )
        checks.that("the server was killed once", run.kills == 1, run.kills)
        checks.that(
            "the token ids of the whole dialogue equal those of the undisturbed run",
            run.token_ids == calm.token_ids,
            f"{len(run.token_ids)} tokens",
        )
        recomputed = sum(s.sources.recomputed for a in run.answers for s in a.usage.stretches)
        if kill == "tool":
            resumed = _first_resume(run)
            checks.that(
                "after the kill the session came back from Redis, nothing recomputed",
                resumed.sources.redis > 0 and resumed.sources.recomputed == 0,
                _sources(resumed.sources),
            )
            _check_resumes(run, checks)
        else:
            checks.that("what the kill lost was recomputed and counted", recomputed > 0, recomputed)


def _first_resume(run: Run) -> Resumed:
    return next(e for a in run.answers for e in a.events if isinstance(e, Resumed))


def _check_resumes(run: Run, checks: Checks) -> None:
    """After each resume: forwarded tokens = new input + the pending last token, by the runner's
    count.
    """
    differences = []
    resumes = 0
    for answer in run.answers:
        new = 0
        for event in answer.events:
            if isinstance(event, InputAccepted):
                new = event.num_tokens
            if isinstance(event, Resumed) and event.sources.recomputed == 0:
                resumes += 1
                differences.append(event.num_forwarded - new - 1)
    checks.that(
        "from each resume to its first token the runner forwarded the new tokens + 1",
        resumes > 0 and not any(differences),
        f"{resumes} resumes",
    )


def _sources(sources: Any) -> str:
    named = {
        name: getattr(sources, name)
        for name in ("device", "host", "disk", "redis", "recomputed", "new")
    }
    return ", ".join(f"{name} {count}" for name, count in named.items() if count)


def _table(answers: list[Answer]) -> Table:
    """One row per stretch of a turn: up to a tool call, and on from its result."""
    table = Table(title="turns (a turn goes on after each tool)", title_justify="left")
    for column in ("turn", "new tokens", "forwarded", "tokens by source", "TTFT ms", "tokens/s"):
        table.add_column(column, justify="left" if column == "tokens by source" else "right")
    for answer in answers:
        for stretch in answer.usage.stretches:
            table.add_row(
                str(answer.turn),
                str(stretch.sources.new),
                str(stretch.num_forwarded),
                _sources(stretch.sources),
                f"{1e3 * stretch.ttft_s:.0f}",
                _rate(stretch),
            )
    return table


def _rate(stretch: StretchUsage) -> str:
    return f"{(stretch.num_generated - 1) / stretch.decode_s:.0f}" if stretch.decode_s > 0 else "-"
