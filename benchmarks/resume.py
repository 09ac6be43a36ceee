"""What a resume costs: TTFT of a parked session against one that never left the device, and against recomputation.

    benchmarks/resume.py [--model demo|DIR] [--context N] [--new N] [--repeats N] [--redis URL] [--peers] [--json -]

All in one process and one run on the real engine: per repeat a fresh context is computed once, then continued
with `new` tokens: hot (never parked), parked to each tier, and dropped and recomputed. Ratios are medians over
repeats. `*_excess` is the engine's own restore time over the time that copying and checksumming the same bytes
out of that tier takes, measured beside it. `sessions_kept_alive`: sessions that were parked and all came back
with nothing recomputed, over what the device pool of that run holds. Without a Redis URL one is started for the
run. `--peers` measures llama.cpp in the same run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".src"), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import xxhash  # noqa: E402
from driver import Driver  # noqa: E402
from peers import DEFAULT_SCRIPTS, llamacpp_turn  # noqa: E402

from moorage.engine import Engine, EngineConfig, TierConfig  # noqa: E402

DEMO = ROOT / "examples" / "demo_model" / "weights"
FIGURES = [
    "host_ratio",
    "redis_ratio",
    "disk_ratio",
    "recompute_ratio",
    "host_excess",
    "redis_excess",
    "disk_excess",
    "forward_tokens_excess",
    "host_vs_recompute",
    "hot_vs_vllm",
    "hot_vs_llamacpp",
    "restore_vs_llamacpp",
    "park_unpark_ms",
    "sessions_kept_alive",
]


TIERS = ("host", "disk", "redis")
COLD_BYTES = 128 << 20
"""Written between two measurements of a floor; more than any processor's cache."""
KEPT_CONTEXT = 512
"""Tokens of each session of `sessions_kept_alive`."""
KEPT_HELD = 2
"""Sessions that the device pool of that run holds."""


def host_floor_s(num_bytes: int) -> float:
    """Seconds to checksum and copy so many bytes in memory: the least that any restore needs."""
    source, destination = random.randbytes(num_bytes), bytearray(num_bytes)

    def once() -> None:
        xxhash.xxh3_128_digest(source)
        memoryview(destination)[:] = source

    return _median_s(once)


def disk_floor_s(num_bytes: int, folder: Path) -> float:
    """The same out of a file that the system has just written, read in pieces of 4 MiB."""
    path = folder / "floor"
    path.write_bytes(random.randbytes(num_bytes))
    destination = memoryview(bytearray(num_bytes))

    def once() -> None:
        with path.open("rb", buffering=0) as file:
            at = 0
            while at < num_bytes:
                at += file.readinto(destination[at : at + (4 << 20)]) or 0
        xxhash.xxh3_128_digest(destination)

    return _median_s(once)


def redis_floor_s(num_bytes: int, url: str) -> float:
    """The same out of Redis, pipelined in pieces of 1 MiB."""
    import redis

    destination = memoryview(bytearray(num_bytes))
    with redis.Redis.from_url(url) as client:
        sizes = [min(1 << 20, num_bytes - at) for at in range(0, num_bytes, 1 << 20)]
        for index, size in enumerate(sizes):
            client.set(f"benchmark:{index}", random.randbytes(size))

        def once() -> None:
            pipeline = client.pipeline(transaction=False)
            for index in range(len(sizes)):
                pipeline.get(f"benchmark:{index}")
            at = 0
            for piece in pipeline.execute():
                xxhash.xxh3_128_digest(piece)
                destination[at : at + len(piece)] = piece
                at += len(piece)

        seconds = _median_s(once)
        client.delete(*(f"benchmark:{index}" for index in range(len(sizes))))
    return seconds


def _median_s(once: Callable[[], None]) -> float:
    """Each time from memory, not from the processor's cache: what a restore reads was written long before."""
    elsewhere = bytearray(COLD_BYTES)
    times = []
    for number in range(9):
        elsewhere[:] = bytes([number]) * COLD_BYTES
        started = time.perf_counter()
        once()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


@dataclass
class Measured:
    """What the repeats gave, by kind of continuation."""

    ttft_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    restore_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    park_unpark_s: list[float] = field(default_factory=list)
    excess_tokens: list[int] = field(default_factory=list)
    num_bytes: int = 0


def continuations(bench: Driver, options: argparse.Namespace, tiers: Sequence[str]) -> Measured:
    """The repeats; the first one warms up and is not counted."""
    found = Measured()
    vocab_size = bench.engine.model_info.vocab_size
    for repeat in range(options.repeats + 1):
        draw = random.Random(repeat)
        log = [draw.randrange(300, vocab_size) for _ in range(options.context)]
        session = f"s{repeat}"
        log.append(int(bench.ask(session, log, 0).output.token_id or 0))
        manifest: bytes | None = None
        for generation, kind in enumerate(("hot", *tiers, "recompute"), start=1):
            known = len(log) - 1
            parked_s = 0.0
            if kind in tiers:
                prepared, parked_s = bench.park(session, generation, kind)
                manifest, found.num_bytes = prepared.manifest, prepared.num_bytes
            if kind == "recompute":
                bench.park(session, generation, "host")
                bench.release(session, None)
                manifest = None
            log += [draw.randrange(300, vocab_size) for _ in range(options.new)]
            result = bench.ask(session, log, known, manifest)
            log.append(int(result.output.token_id or 0))
            sources = result.output.sources
            assert sources is not None
            if kind != "recompute" and sources.recomputed:
                raise SystemExit(f"{kind}: {sources.recomputed_reason}")
            if repeat:
                found.ttft_s[kind].append(result.ttft_s)
                found.restore_s[kind].append(result.output.restore_s)
                if kind != "recompute":
                    found.excess_tokens.append(result.output.num_forwarded - options.new - 1)
                if kind == "host":
                    found.park_unpark_s.append(parked_s + result.output.restore_s)
        bench.release(session, manifest)
    return found


def sessions_kept_alive(model_dir: Path, num_sessions: int) -> float:
    """Sessions that came back whole, over those that the device pool holds."""
    held_blocks = KEPT_HELD * -(-(KEPT_CONTEXT + 32) // 16)
    bench = Driver(Engine(EngineConfig(model_dir, num_blocks=held_blocks)))
    draw = random.Random(7)
    logs: list[list[int]] = []
    manifests: list[bytes] = []
    for number in range(num_sessions):
        log = [draw.randrange(300, bench.engine.model_info.vocab_size) for _ in range(KEPT_CONTEXT)]
        log.append(int(bench.ask(f"k{number}", log, 0).output.token_id or 0))
        manifests.append(bench.park(f"k{number}", 1, "host")[0].manifest)
        logs.append(log)
    whole = 0
    for number, (log, manifest) in enumerate(zip(logs, manifests, strict=True)):
        sources = bench.ask(f"k{number}", log, len(log) - 1, manifest).output.sources
        whole += sources is not None and sources.recomputed == 0
        bench.release(f"k{number}", manifest)
    bench.engine.close()
    return whole / KEPT_HELD


def measure(options: argparse.Namespace, redis_url: str, folder: Path) -> dict[str, Any]:
    """All figures and the conditions they were measured under."""
    model_dir = DEMO if options.model == "demo" else Path(options.model)
    config = EngineConfig(
        model_dir=model_dir,
        kv_bytes=256 << 20,
        num_threads=options.threads,
        tiers=TierConfig(
            redis_url=redis_url, disk_dir=folder / "kv", host_copies=False, warm_bytes=64 << 20
        ),
    )
    engine = Engine(config)
    info = engine.model_info
    length, new = options.context, options.new
    most = length + (len(TIERS) + 2) * (new + 1) + 1
    if most > info.context_len:
        raise SystemExit(
            f"--context {length} and --new {new} need {most} tokens, the model has {info.context_len}"
        )
    found = continuations(Driver(engine), options, TIERS)
    engine.close()
    middle = {kind: statistics.median(values) for kind, values in found.ttft_s.items()}
    restore = {kind: statistics.median(found.restore_s[kind]) for kind in TIERS}
    floor = {
        "host": host_floor_s(found.num_bytes),
        "disk": disk_floor_s(found.num_bytes, folder),
        "redis": redis_floor_s(found.num_bytes, redis_url),
    }
    figures: dict[str, float | int | None] = dict.fromkeys(FIGURES)
    for tier in TIERS:
        figures[f"{tier}_ratio"] = middle[tier] / middle["hot"]
        figures[f"{tier}_excess"] = restore[tier] / floor[tier]
    figures |= {
        "recompute_ratio": middle["recompute"] / middle["hot"],
        "host_vs_recompute": middle["host"] / middle["recompute"],
        "forward_tokens_excess": max(found.excess_tokens, key=abs),
        "park_unpark_ms": 1e3 * statistics.median(found.park_unpark_s),
        "sessions_kept_alive": sessions_kept_alive(model_dir, options.sessions),
    }
    peer = None
    if options.peers:
        peer = llamacpp_turn(model_dir, options.peer_scripts, length, new, options.threads or 2)
    if peer is not None:
        ours = 1e3 * middle["host"]
        figures["hot_vs_llamacpp"] = peer["hot_resume_ttft_ms"] / (1e3 * middle["hot"])
        figures["restore_vs_llamacpp"] = peer["restore_plus_ttft_ms"] / ours
    return {
        "figures": {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()},
        "conditions": {
            "model": info.name,
            "dtype": info.dtype,
            "context_tokens": length,
            "new_tokens": new,
            "repeats": options.repeats,
            "parked_bytes": found.num_bytes,
            "warm_bytes": config.tiers.warm_bytes,
            "threads": torch.get_num_threads(),
            "ttft_ms": _milliseconds(middle),
            "restore_ms": _milliseconds(restore),
            "floor_ms": _milliseconds(floor),
            "restore_gb_s": {t: round(found.num_bytes / restore[t] / 1e9, 2) for t in TIERS},
            "floor_gb_s": {t: round(found.num_bytes / floor[t] / 1e9, 2) for t in TIERS},
            "llamacpp_ms": peer,
        },
    }


def _milliseconds(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(1e3 * value, 3) for name, value in seconds.items()}


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="demo", help="demo, or a folder with a checkpoint")
    parser.add_argument("--context", type=int, default=2048, help="tokens of context")
    parser.add_argument("--new", type=int, default=64, help="new tokens per continuation")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sessions", type=int, default=120, help="of sessions_kept_alive")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's choice")
    parser.add_argument("--redis", help="URL of a Redis; one is started if not given")
    parser.add_argument("--peers", action="store_true", help="measure llama.cpp too")
    parser.add_argument("--peer-scripts", type=Path, default=DEFAULT_SCRIPTS)
    parser.add_argument("--json", choices=["-"], help="print one JSON object as the last line")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        url = options.redis
        if not url:
            from redis_server import RedisServer

            url = stack.enter_context(RedisServer()).url
        result = measure(options, url, Path(folder))
    for name, value in result["figures"].items():
        print(f"{name:24} {'null' if value is None else value}")
    print(json.dumps(result["conditions"], indent=2))
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
