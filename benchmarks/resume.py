"""What a resume costs: TTFT of a parked session against one that never left the device, and against recomputation.

    benchmarks/resume.py [--model demo|DIR] [--context N] [--new N] [--repeats N] [--redis URL] [--json -]

All in one process and one run on the real engine: per repeat a fresh context is computed once, then continued
with `new` tokens four times: hot (never parked), parked to host, parked to Redis, and dropped and recomputed.
Ratios are medians over repeats. `*_excess` is the engine's own restore time over the time that copying and
checksumming the same bytes out of that tier takes, measured beside it. Without a Redis URL one is started for
the run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / ".src"), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import xxhash  # noqa: E402
from driver import Driver  # noqa: E402

from moorage.engine import Engine, EngineConfig, TierConfig  # noqa: E402

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


def copy_and_checksum_s(num_bytes: int, redis_url: str | None) -> float:
    """Seconds to bring `num_bytes` out of a tier, checksummed and copied into place: the least any restore needs."""
    destination = bytearray(num_bytes)
    source = bytes(num_bytes)
    times = []
    if redis_url is None:
        for _ in range(7):
            started = time.perf_counter()
            xxhash.xxh3_128_digest(source)
            memoryview(destination)[:] = source
            times.append(time.perf_counter() - started)
        return statistics.median(times)
    import redis

    with redis.Redis.from_url(redis_url) as client:
        pieces = [source[at : at + (1 << 20)] for at in range(0, num_bytes, 1 << 20)]
        for index, piece in enumerate(pieces):
            client.set(f"benchmark:{index}", piece)
        for _ in range(7):
            started = time.perf_counter()
            pipeline = client.pipeline(transaction=False)
            for index in range(len(pieces)):
                pipeline.get(f"benchmark:{index}")
            at = 0
            for piece in pipeline.execute():
                xxhash.xxh3_128_digest(piece)
                memoryview(destination)[at : at + len(piece)] = piece
                at += len(piece)
            times.append(time.perf_counter() - started)
        client.delete(*(f"benchmark:{index}" for index in range(len(pieces))))
    return statistics.median(times)


def measure(arguments: argparse.Namespace, redis_url: str) -> dict[str, Any]:
    """All figures and the conditions they were measured under."""
    model_dir = (
        ROOT / "examples" / "demo_model" / "weights"
        if arguments.model == "demo"
        else Path(arguments.model)
    )
    engine = Engine(
        EngineConfig(model_dir=model_dir, kv_bytes=256 << 20, tiers=TierConfig(redis_url=redis_url))
    )
    info = engine.model_info
    length, new = arguments.context, arguments.new
    if length + 4 * (new + 1) + 1 > info.context_len:
        raise SystemExit(f"--context {length} with 4 × {new} new tokens exceeds {info.context_len}")
    bench = Driver(engine)
    ttft: dict[str, list[float]] = defaultdict(list)
    restore: dict[str, list[float]] = defaultdict(list)
    excess_tokens: list[int] = []
    park_unpark: list[float] = []
    num_bytes = 0
    for repeat in range(arguments.repeats + 1):  # the first one warms up and is not counted
        draw = random.Random(repeat)
        log = [draw.randrange(300, info.vocab_size) for _ in range(length)]
        session = f"s{repeat}"
        log.append(int(bench.ask(session, log, 0).output.token_id or 0))
        manifest: bytes | None = None
        for generation, kind in enumerate(("hot", "host", "redis", "recompute"), start=1):
            known = len(log) - 1
            parked_s = 0.0
            if kind in ("host", "redis"):
                prepared, parked_s = bench.park(session, generation, kind)
                manifest, num_bytes = prepared.manifest, prepared.num_bytes
            if kind == "recompute":
                bench.park(session, generation, "host")
                bench.release(session, None)
                manifest = None
            log += [draw.randrange(300, info.vocab_size) for _ in range(new)]
            result = bench.ask(session, log, known, manifest)
            log.append(int(result.output.token_id or 0))
            sources = result.output.sources
            assert sources is not None
            if kind != "recompute" and sources.recomputed:
                raise SystemExit(f"{kind}: {sources.recomputed_reason}")
            if repeat:
                ttft[kind].append(result.ttft_s)
                restore[kind].append(result.output.restore_s)
                if kind != "recompute":
                    excess_tokens.append(result.output.num_forwarded - new - 1)
                if kind == "host":
                    park_unpark.append(parked_s + result.output.restore_s)
        bench.release(session, manifest)
    engine.close()
    middle = {kind: statistics.median(values) for kind, values in ttft.items()}
    figures: dict[str, float | int | None] = dict.fromkeys(FIGURES)
    figures |= {
        "host_ratio": middle["host"] / middle["hot"],
        "redis_ratio": middle["redis"] / middle["hot"],
        "recompute_ratio": middle["recompute"] / middle["hot"],
        "host_vs_recompute": middle["host"] / middle["recompute"],
        "host_excess": statistics.median(restore["host"]) / copy_and_checksum_s(num_bytes, None),
        "redis_excess": statistics.median(restore["redis"])
        / copy_and_checksum_s(num_bytes, redis_url),
        "forward_tokens_excess": max(excess_tokens, key=abs),
        "park_unpark_ms": 1e3 * statistics.median(park_unpark),
    }
    return {
        "figures": {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()},
        "conditions": {
            "model": info.name,
            "dtype": info.dtype,
            "context_tokens": length,
            "new_tokens": new,
            "repeats": arguments.repeats,
            "parked_bytes": num_bytes,
            "threads": torch.get_num_threads(),
            "ttft_ms": {kind: round(1e3 * value, 2) for kind, value in middle.items()},
            "restore_ms": {
                kind: round(1e3 * statistics.median(restore[kind]), 3) for kind in ("host", "redis")
            },
            "peers": "not run; disk tier not there yet",
        },
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="demo", help="demo, or a folder with a checkpoint")
    parser.add_argument("--context", type=int, default=2048, help="tokens of context")
    parser.add_argument("--new", type=int, default=64, help="new tokens per continuation")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--redis", help="URL of a Redis; one is started if not given")
    parser.add_argument("--json", choices=["-"], help="print one JSON object as the last line")
    arguments = parser.parse_args()
    if arguments.redis:
        result = measure(arguments, arguments.redis)
    else:
        from redis_server import RedisServer

        with RedisServer() as server:
            result = measure(arguments, server.url)
    for name, value in result["figures"].items():
        print(f"{name:24} {'null' if value is None else value}")
    print(json.dumps(result["conditions"], indent=2))
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
