"""Replay of real agent and chat traces: prompt tokens computed under our order of eviction, LRU and Belady's.

    benchmarks/trace_replay.py [--traces DIR] [--sizes 0.1 0.25 0.5] [--concurrency 16] [--json -]

Capacity is a share of the working set: the most blocks that were used and will be used again, over time. Time is the
trace's own; agent sessions start at seeded times, so that about `--concurrency` of them are under way at once. Blocks
are 1,024 tokens in the agent trace and 512 in the chat trace. `gap_closed` is (LRU - ours) / (LRU - Belady), the
smallest over sizes of the agent trace; `vs_lru` is LRU's computed tokens over ours.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "benchmarks")]

from belady import Belady  # noqa: E402
from trace_policies import ExpectedWait, LeastRecentlyUsed  # noqa: E402
from trace_sim import Policy, TraceRequest, live_blocks, replay  # noqa: E402

AGENT, CHAT = "agent_sessions_58.delta.jsonl.gz", "mooncake_conversation.jsonl.gz"
COARSE = 16
"""Blocks of 64 tokens that are taken as one."""


def agent_requests(path: Path, concurrency: int, seed: int) -> tuple[list[TraceRequest], int]:
    """Requests in order of time, and the number of blocks."""
    with gzip.open(path, "rt") as file:
        sessions = [json.loads(line) for line in file]
    draw = random.Random(seed)
    window_s = sum(session["requests"][-1].get("t") or 0.0 for session in sessions) / concurrency
    names: dict[tuple[object, ...], int] = {}
    found: list[TraceRequest] = []

    def add(requests: list[dict[str, Any]], name: str, number: int, start_s: float) -> None:
        blocks: list[int] = []
        for request in requests:
            if "requests" in request:  # a sub-agent has a context of its own
                add(request["requests"], f"{name}/sub", number, start_s)
                continue
            blocks = blocks[: request["common"]]
            for first, count in request["runs"]:
                blocks = blocks + list(range(first, first + count))
            whole = [
                names.setdefault((name, end, tuple(blocks[end - COARSE : end])), len(names))
                for end in range(COARSE, len(blocks) + 1, COARSE)
            ]
            stop = request["stop"] or "tool_use"
            session = number if "/" not in name else -1
            found.append(TraceRequest(start_s + request["t"], session, tuple(whole), stop))

    for number, session in enumerate(sessions):
        add(session["requests"], str(number), number, draw.uniform(0.0, window_s))
    found.sort(key=lambda request: request.at_s)
    return found, len(names)


def chat_requests(path: Path) -> tuple[list[TraceRequest], int]:
    """The same for the chat trace, whose hashes are global."""
    found: list[TraceRequest] = []
    with gzip.open(path, "rt") as file:
        for line in file:
            row = json.loads(line)
            found.append(
                TraceRequest(row["timestamp"] / 1e3, -1, tuple(row["hash_ids"]), "end_turn")
            )
    return found, 1 + max(max(request.path, default=0) for request in found)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures and conditions."""
    traces: dict[str, tuple[list[TraceRequest], int]] = {}
    if (options.traces / AGENT).is_file():
        traces["agent"] = agent_requests(options.traces / AGENT, options.concurrency, options.seed)
    if (options.traces / CHAT).is_file():
        traces["chat"] = chat_requests(options.traces / CHAT)
    figures: dict[str, float | None] = {"gap_closed": None, "gap_closed_chat": None}
    conditions: dict[str, Any] = {"sizes": options.sizes, "seed": options.seed}
    policies: dict[str, Callable[[], Policy]] = {
        "lru": LeastRecentlyUsed, "ours": ExpectedWait, "belady": Belady,
    }  # fmt: skip
    for name, (requests, num_blocks) in traces.items():
        working_set = live_blocks(requests)
        longest = max(len(request.path) for request in requests)
        gaps = []
        for size in options.sizes:
            capacity = max(longest, round(size * working_set))
            computed = {}
            for policy, make in policies.items():
                started = time.perf_counter()
                computed[policy] = replay(requests, num_blocks, capacity, make()).computed
                print(
                    f"{name} {size:.0%} {policy}: {computed[policy]} blocks,"
                    f" {time.perf_counter() - started:.1f} s",
                    file=sys.stderr,
                )
            gap = computed["lru"] - computed["belady"]
            gaps.append((computed["lru"] - computed["ours"]) / gap if gap else 0.0)
            figures[f"vs_lru_{name}_{round(100 * size)}"] = round(
                computed["lru"] / computed["ours"], 4
            )
            conditions[f"{name}_{round(100 * size)}"] = {"capacity": capacity, **computed}
        figures["gap_closed" if name == "agent" else "gap_closed_chat"] = round(min(gaps), 4)
        conditions[f"{name}_gaps"] = [round(gap, 4) for gap in gaps]
        conditions[f"{name}_working_set_blocks"] = working_set
        conditions[f"{name}_compulsory_blocks"] = num_blocks
    return {"figures": figures, "conditions": conditions}


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=Path, default=ROOT.parent / "shared" / "traces")
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.1, 0.25, 0.5])
    parser.add_argument("--concurrency", type=int, default=16, help="agent sessions at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", choices=["-"], help="print one JSON object as the last line")
    options = parser.parse_args()
    result = measure(options)
    if result["figures"]["gap_closed"] is None:
        print(f"no traces in {options.traces}: name their folder with --traces")
    for name, value in result["figures"].items():
        print(f"{name:24} {'null' if value is None else value}")
    print(json.dumps(result["conditions"], indent=2))
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
