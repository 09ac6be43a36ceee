"""Thousands of parks and resumes on a device pool that holds a handful of the sessions: what leaks?

    benchmarks/park_soak.py [--cycles 10000] [--sessions 200] [--held 4] [--redis URL] [--json -]

A cycle takes a session at random, resumes it for one greedy token and parks it again, to a tier drawn at
random; after some tokens the session goes back to its beginning and must give the same ones again. Freed device
blocks are filled with NaN. At the end every session's tokens are computed afresh on a pool that holds it:
`token_mismatches`. `rss_growth_kb` is the least-squares growth of the process's memory
over the last half of the cycles.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".src"), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from driver import Driver  # noqa: E402
from redis_server import RedisServer  # noqa: E402

from moorage.engine import Engine, EngineConfig, TierConfig  # noqa: E402

MODEL = ROOT / "examples" / "demo_model" / "weights"
SHARED, OWN = 32, 48
"""Tokens of the common prefix and of each session's own beginning."""
ROUND = 8
"""Tokens after which a session goes back to its beginning."""
SAMPLES = 40
"""Memory readings over the run."""


def rss_kb() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def growth(samples: list[int]) -> float:
    """Least-squares growth over all samples, in their unit."""
    count = len(samples)
    middle = (count - 1) / 2
    mean = sum(samples) / count
    slope = sum((i - middle) * (s - mean) for i, s in enumerate(samples))
    return slope / sum((i - middle) ** 2 for i in range(count)) * (count - 1)


@dataclasses.dataclass
class Session:
    """What its owner knows of a parked session."""

    name: str
    log: list[int]
    start: int
    made: list[int] = dataclasses.field(default_factory=list)
    """The first tokens that followed; later rounds must give the same."""
    manifest: bytes | None = None
    generation: int = 0


def soak(options: argparse.Namespace, redis_url: str, num_clients: Any) -> dict[str, Any]:
    """Run, and count what is left."""
    draw = random.Random(options.seed)
    held_blocks = options.held * -(-(SHARED + OWN + ROUND + 16) // 16)
    config = EngineConfig(
        MODEL,
        num_blocks=held_blocks + 2,
        num_threads=options.threads,
        fill_freed_with_nan=True,
        tiers=TierConfig(redis_url=redis_url, host_bytes=256 << 20),
    )
    driver = Driver(Engine(config))
    shared = [draw.randrange(300, 2500) for _ in range(SHARED)]
    sessions = []
    for number in range(options.sessions):
        log = shared + [draw.randrange(300, 2500) for _ in range(OWN)]
        sessions.append(Session(f"s{number}", log, len(log)))
    samples: list[int] = []
    recomputed = wrong = 0
    started = time.perf_counter()
    for cycle in range(options.cycles):
        session = draw.choice(sessions)
        place = len(session.log) - session.start
        if place == ROUND:  # back to the beginning, as a rewind: memory has no reason to grow
            del session.log[session.start :]
            place = 0
        known = len(session.log) - 1 if place else 0
        manifest = session.manifest if place else None
        answer = driver.ask(session.name, session.log, known, manifest)
        assert answer.output.sources is not None
        recomputed += answer.output.sources.recomputed
        token = int(answer.output.token_id or 0)
        if place == len(session.made):
            session.made.append(token)
        wrong += token != session.made[place]
        session.log.append(token)
        session.generation += 1
        tier = draw.choice(("host", "redis"))
        session.manifest = driver.park(session.name, session.generation, tier)[0].manifest
        if cycle == options.cycles // 2:
            first_threads, first_clients = threading.active_count(), num_clients()
        if cycle % max(1, options.cycles // SAMPLES) == 0:
            samples.append(rss_kb())
            print(f"{cycle} cycles, {samples[-1]} KB", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - started
    inspection = driver.inspect()
    threads, clients = threading.active_count() - first_threads, num_clients() - first_clients
    for session in sessions:
        driver.release(session.name, session.manifest)
    after = driver.inspect()
    leaked = after.total_blocks - after.free_blocks - after.evictable_blocks
    driver.engine.close()
    mismatches = wrong + _mismatches(sessions, options)
    return {
        "figures": {
            "cycles": options.cycles,
            "token_mismatches": mismatches,
            "tokens_recomputed": recomputed,
            "leaked_blocks": leaked,
            "freed_blocks_not_nan": after.free_blocks_not_nan,
            "integrity_errors": int(bool(inspection.integrity_error or after.integrity_error)),
            "leaked_threads": threads,
            "leaked_connections": clients,
            "rss_growth_kb": round(growth(samples[len(samples) // 2 :])),
            "cycle_ms": round(1e3 * seconds / options.cycles, 3),
        },
        "conditions": {
            "sessions": options.sessions,
            "device_blocks": after.total_blocks,
            "rss_kb": [samples[0], samples[len(samples) // 2], samples[-1]],
            "seed": options.seed,
            "seconds": round(seconds, 1),
            "torch": torch.__version__,
        },
    }


def _mismatches(sessions: list[Session], options: argparse.Namespace) -> int:
    """Tokens that differ from those of an undisturbed run."""
    config = EngineConfig(MODEL, kv_bytes=64 << 20, num_threads=options.threads)
    driver = Driver(Engine(config))
    wrong = 0
    for session in sessions:
        log = session.log[: session.start] + session.made
        for end in range(session.start, len(log)):
            answer = driver.ask(session.name, log[:end], max(0, end - 1))
            wrong += answer.output.token_id != log[end]
        driver.release(session.name, None)
    driver.engine.close()
    return wrong


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cycles", type=int, default=10_000)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--held", type=int, default=4, help="sessions that the device pool holds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", choices=["-"], help="print one JSON object as the last line")
    options = parser.parse_args()
    with RedisServer() as server:
        import redis

        with redis.Redis.from_url(server.url) as client:
            result = soak(options, server.url, lambda: len(client.client_list()))
    for name, value in {**result["figures"], **result["conditions"]}.items():
        print(f"{name:22} {value}")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
