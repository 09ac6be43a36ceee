"""Cost of the prefix cache's bookkeeping: match, commit, evict over trees of growing size. No KV, no model.

    benchmarks/prefix_tree.py [--blocks N] [--repeats N] [--json -]

`match_100k_ms` matches a prompt of 100K tokens (6,250 blocks) that stands in a tree of `--blocks` blocks; tokens are
compared, nothing needs hashing. Commit and evict are per 1,000 blocks. Fork is not there yet (null).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / ".src"))

from moorage.prefix_cache.block import Lineage, Namespace, pack_tokens
from moorage.prefix_cache.cache import CacheConfig, GroupConfig, PrefixCache

BLOCK = 16
PROMPT_TOKENS = 100_000
CONTEXT_BLOCKS = 2_000
"""Blocks of each context that fills the tree."""
LINEAGE = Lineage(Namespace("benchmark", "default"), b"model")


def filled(num_blocks: int, seed: int) -> tuple[PrefixCache, bytes, float]:
    """A cache whose tree holds about `num_blocks` blocks, a 100K-token log in it, and Python bytes per block."""
    draw = random.Random(seed)
    pool = num_blocks + PROMPT_TOKENS // BLOCK + 4_000
    cache = PrefixCache(CacheConfig(BLOCK, (GroupConfig("full", pool),), 16))
    shared = draw.randbytes(4 * BLOCK * 64)  # contexts share a system prompt of 1,024 tokens
    shared = bytes(byte & 0x7F if index % 4 == 3 else byte for index, byte in enumerate(shared))
    prompt = shared + pack_tokens(draw.randrange(1 << 17) for _ in range(PROMPT_TOKENS - 1_024))
    tracemalloc.start()
    for number in range(max(0, num_blocks // CONTEXT_BLOCKS)):
        own = random.Random(seed + 1 + number)
        insert(
            cache,
            shared
            + pack_tokens(own.randrange(1 << 17) for _ in range((CONTEXT_BLOCKS - 64) * BLOCK)),
        )
    insert(cache, prompt)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return cache, prompt, held / max(1, cache.statistics().evictable)


def insert(cache: PrefixCache, log: bytes) -> None:
    """Commit a whole log and let go of it."""
    table = cache.open(cache.match(LINEAGE, log))
    cache.grow(table, len(log) // 4)
    cache.commit(table, log, len(log) // 4)
    cache.release(table)


def median_ms(repeats: int, action: Callable[[int], Any]) -> float:
    """Median of `repeats` timed calls, in milliseconds."""
    times = []
    for number in range(repeats):
        started = time.perf_counter()
        action(number)
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times)


def measure(num_blocks: int, repeats: int) -> dict[str, float]:
    """The figures over one size of tree."""
    cache, prompt, bytes_per_block = filled(num_blocks, seed=num_blocks)
    figures = {
        "match_100k_ms": median_ms(repeats, lambda _: cache.match(LINEAGE, prompt)),
        "bytes_per_block": bytes_per_block,
    }
    logs = [
        pack_tokens(random.Random(-1 - n).randrange(1 << 17) for _ in range(1_000 * BLOCK))
        for n in range(repeats)
    ]
    tables = [cache.open(LINEAGE) for _ in range(repeats)]

    def commit(number: int) -> None:
        cache.commit(tables[number], logs[number], 1_000 * BLOCK)

    times = []
    for number in range(repeats):
        cache.grow(tables[number], 1_000 * BLOCK)
        started = time.perf_counter()
        commit(number)
        times.append(time.perf_counter() - started)
        cache.release(tables[number])
    log = pack_tokens(random.Random(-99).randrange(1 << 17) for _ in range(1_000 * BLOCK + 5))
    parent = cache.open(LINEAGE)
    cache.grow(parent, 1_000 * BLOCK + 5)
    cache.commit(parent, log, 1_000 * BLOCK)
    forks = []
    figures["fork_1k_blocks_ms"] = median_ms(
        repeats, lambda _: forks.append(cache.fork(parent, 1_000 * BLOCK + 5)[0])
    )
    for table in (*forks, parent):
        cache.release(table)
    figures["commit_1k_blocks_ms"] = 1e3 * statistics.median(times)
    figures["evict_1k_blocks_ms"] = median_ms(repeats, lambda _: cache.evict(1_000))
    return figures


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--blocks", type=int, default=100_000, help="blocks in the tree")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", choices=["-"], help="print one JSON object as the last line")
    arguments = parser.parse_args()
    small = measure(1_000, arguments.repeats)
    large = measure(arguments.blocks, arguments.repeats)
    figures: dict[str, float | None] = {name: round(value, 4) for name, value in large.items()}
    figures["match_100k_hashed_ms"] = figures["match_100k_ms"]
    conditions = {
        "blocks": arguments.blocks,
        "block_size": BLOCK,
        "repeats": arguments.repeats,
        "at_1000_blocks": {name: round(value, 4) for name, value in small.items()},
        "hashing": "a match compares tokens and hashes nothing, so held hashes make no difference",
    }
    for name, value in figures.items():
        print(f"{name:24} {'null' if value is None else value}")
    if arguments.json:
        print(json.dumps({"figures": figures, "conditions": conditions}))


if __name__ == "__main__":
    main()
