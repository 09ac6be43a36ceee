"""Measure a model folder on held-out dialogues, or run the demo prompts in one session.

The dialogues come from seeds that training never uses. Each message of the assistant is generated
greedily after the right history (tool results included), then replaced by the right message.

wellformed   a message that has to call holds calls in valid markup and JSON, and nothing else
exact_call   name and all arguments of the one call are right (a fixed tool)
unseen_tool  the same for a tool that exists in this dialogue only, with its schema in the prompt
parallel     all calls of a message with several are right, in any order
answer       narrow: the message is the corpus' own, character by character; wide: it has every
             fact (the result, or what was stored) and no call
no_call      no call where none is due
recall_1500  the answer holds a fact stated, stored or read 1,500 tokens before and not since
recall_3500  the same at 3,500 tokens
equal        with --against: the text is the same, character by character, in another runtime
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import long
import narrow
import torch
import wide
from chat import (
    GENERATION_PROMPT,
    Chat,
    Json,
    assistant_text,
    encode,
    encode_pieces,
    message_pieces,
    opening_pieces,
    split_system,
)
from corpus import turn_messages, wide_chat
from demo import run_demo
from export import load
from generate import Generator, Session, parse_calls
from model import Model
from narrow_values import BASE_TOOLS
from runtimes import RUNTIMES, open_runtime
from tokenizers import Tokenizer

FIGURES = ("wellformed", "exact_call", "answer", "unseen_tool", "parallel", "no_call")
DISTANCES = {"recall_1500": 1500, "recall_3500": 3500}
"""Tokens between a fact and its question."""
Facts = list[list[str]]
"""What each answer of a dialogue has to contain, in order."""


def held_out(corpus: str, seed: int, number: int) -> tuple[Chat, Facts | None]:
    """A dialogue that training does not draw (its seeds are integers, these are strings).

    The narrow corpus has no facts: its answers are compared as a whole.
    """
    rng = random.Random(f"held-out/{corpus}/{seed}/{number}")
    if corpus == "narrow":
        return narrow.dialogue(rng), None
    talk = long.dialogue(rng) if corpus == "long" else wide.dialogue(rng)
    return wide_chat(talk), [turn.facts for turn in talk.turns]


def interval(hits: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z, share = 1.96, hits / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * (share * (1 - share) / count + z * z / 4 / count**2) ** 0.5
    return max(0.0, centre - half), min(1.0, centre + half)


class Tally:
    """Hits and counts by figure; a figure that has its `wanted` items takes no more."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.hits: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.misses: list[tuple[str, str, str]] = []

    def is_open(self, figure: str) -> bool:
        return self.counts[figure] < self.wanted

    def complete(self) -> bool:
        return not any(self.is_open(figure) for figure in FIGURES)

    def add(self, figure: str, hit: bool, expected: str, got: str) -> None:
        """Count one item unless the figure has all it needs."""
        if self.is_open(figure):
            self.count(figure, hit, expected, got)

    def count(self, figure: str, hit: bool, expected: str, got: str) -> None:
        """Count one item."""
        self.hits[figure] += hit
        self.counts[figure] += 1
        if not hit:
            self.misses.append((figure, expected, got))

    def figures(self) -> dict[str, Any]:
        """value, n and the ends of the 95 % interval by figure."""
        result: dict[str, Any] = {}
        for figure in self.counts:
            hits, count = self.hits[figure], self.counts[figure]
            low, high = interval(hits, count)
            result[figure] = {"value": hits / count, "n": count, "low": low, "high": high}
        return result


def _figures_of(own: Json, called: bool) -> list[str]:
    """The figures that a message counts for; `called` when its turn has made calls before it."""
    calls = own.get("tool_calls", [])
    if not calls:
        return ["answer"] if called else ["answer", "no_call"]
    if len(calls) > 1:
        return ["wellformed", "parallel"]
    fixed = calls[0]["function"]["name"] in BASE_TOOLS
    return ["wellformed", "exact_call" if fixed else "unseen_tool"]


def _is_hit(figure: str, own: Json, facts: list[str] | None, text: str) -> bool:
    calls = parse_calls(text)
    if figure == "wellformed":
        return bool(calls) and text.startswith("<tool_call>")
    quiet = "<tool_call>" not in text
    if figure == "no_call":
        return quiet
    if figure == "answer":
        exact = text == own["content"]
        return exact if facts is None else quiet and all(fact in text for fact in facts)
    wanted = [call["function"] for call in own["tool_calls"]]
    right = sorted(json.dumps(call, sort_keys=True) for call in wanted)
    return sorted(json.dumps(call, sort_keys=True) for call in calls or []) == right


class Speaker:
    """Generates in one runtime and, where there is another, notes whether its text is equal."""

    def __init__(self, tokenizer: Tokenizer, first: Generator, second: Generator | None) -> None:
        self._generators = [first] if second is None else [first, second]
        self.tokenizer = tokenizer
        self.sessions: list[Session] = []

    def begin(self) -> None:
        """A new dialogue."""
        self.sessions = [Session(generator, self.tokenizer) for generator in self._generators]

    def feed(self, pieces: list[tuple[str, bool]]) -> None:
        for session in self.sessions:
            session.feed(pieces)

    def generate(self, tally: Tally) -> str:
        first, *others = [session.generate() for session in self.sessions]
        for other in others:
            tally.count("equal", first == other, first, other)
        return first


def run_dialogue(speaker: Speaker, chat: Chat, facts: Facts | None, tally: Tally) -> None:
    """Score every message of the assistant that some figure still needs."""
    system, messages = split_system(chat)
    pending = opening_pieces(system, chat.tools)
    since: list[Json] = []  # users and tools since the assistant last spoke
    answers = 0
    for own in messages:
        if own["role"] != "assistant":
            since.append(own)
            continue
        pending += message_pieces(since)
        figures = _figures_of(own, called=since[0]["role"] == "tool")
        since = []
        ending = message_pieces([own])
        if any(tally.is_open(figure) for figure in figures):
            speaker.feed([*pending, (GENERATION_PROMPT, False)])
            text = speaker.generate(tally)
            wanted = facts[answers] if facts and "answer" in figures else None
            for figure in figures:
                hit = _is_hit(figure, own, wanted, text)
                tally.add(figure, hit, assistant_text(own), text)
            pending = ending[1:]
        else:
            pending += ending
        answers += "answer" in figures


def far_recall(
    tokenizer: Tokenizer, distance: int, seed: int, number: int
) -> tuple[Chat, Json, str]:
    """A dialogue without its last answer, that answer, and the fact that it must hold."""

    def count(turns: list[wide.Turn]) -> int:
        messages = [message for turn in turns for message in turn_messages(turn)]
        return len(encode_pieces(tokenizer, message_pieces(messages)))

    rng = random.Random(f"held-out/recall/{distance}/{seed}/{number}")
    talk, fact = long.far_recall(rng, distance, count)
    chat = wide_chat(talk)
    return Chat(chat.messages[:-1], chat.tools), chat.messages[-1], fact


def run_recall(speaker: Speaker, figure: str, seed: int, tally: Tally) -> None:
    """Dialogues that ask for one fact far back, until the figure has its items."""
    number = 0
    while tally.is_open(figure):
        chat, own, fact = far_recall(speaker.tokenizer, DISTANCES[figure], seed, number)
        number += 1
        system, messages = split_system(chat)
        speaker.begin()
        speaker.feed([*opening_pieces(system, chat.tools), *message_pieces(messages)])
        speaker.feed([(GENERATION_PROMPT, False)])
        text = speaker.generate(tally)
        hit = "<tool_call>" not in text and fact in text
        tally.add(figure, hit, assistant_text(own), text)


def evaluate(speaker: Speaker, corpus: str, wanted: int, seed: int, only: str = "") -> Tally:
    """Dialogues until every figure has `wanted` items; a line of progress for five hundred.

    `only`: "dialogues" or "recall"; empty takes both.
    """
    tally = Tally(wanted)
    number = 0
    while only != "recall" and not tally.complete():
        chat, facts = held_out(corpus, seed, number)
        speaker.begin()
        run_dialogue(speaker, chat, facts, tally)
        number += 1
        if number % 500 == 0:
            print(f"{number} dialogues, {dict(tally.counts)}", file=sys.stderr, flush=True)
    for figure in DISTANCES if only != "dialogues" else ():
        run_recall(speaker, figure, seed, tally)
    return tally


@torch.no_grad()
def expert_load(
    model: Model, tokenizer: Tokenizer, corpus: str, seed: int, num_dialogues: int = 50
) -> list[list[float]]:
    """Each expert's share of the choices, [layers][experts], over whole dialogues."""
    total = torch.zeros(model.shape.layers, model.shape.experts)
    for number in range(num_dialogues):
        ids, _ = encode(tokenizer, held_out(corpus, seed, number)[0])
        total += model(torch.tensor([ids])).loads * len(ids)
    share = total / total.sum(-1, keepdim=True)
    return [[round(float(value), 4) for value in row] for row in share]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "weights")
    parser.add_argument("--corpus", choices=("narrow", "wide", "long"), default="narrow")
    parser.add_argument("--runtime", choices=RUNTIMES, default="plain")
    parser.add_argument("--against", choices=RUNTIMES, help="compare the texts with this runtime's")
    parser.add_argument("--only", choices=("dialogues", "recall"), default="")
    parser.add_argument("-n", type=int, default=200, help="items a figure")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--demo", action="store_true", help="the demo prompts in one session")
    parser.add_argument("--shuffle", type=int, help="with --demo: seed of another order")
    parser.add_argument("--show", type=int, default=0, help="print this many misses a figure")
    parser.add_argument("--json", choices=["-"], help="a JSON object as the last line")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    model = load(options.model)
    first = open_runtime(options.runtime, options.model, options.threads)
    if options.demo:
        sys.exit(0 if run_demo(first, tokenizer, options.shuffle) else 1)
    second = (
        open_runtime(options.against, options.model, options.threads) if options.against else None
    )
    start = time.monotonic()
    tally = evaluate(
        Speaker(tokenizer, first, second), options.corpus, options.n, options.seed, options.only
    )
    seconds = time.monotonic() - start
    figures = tally.figures()
    for figure, item in figures.items():
        print(
            f"{figure:12} {item['value']:6.1%}  n {item['n']}  "
            f"95 % interval {item['low']:.1%} to {item['high']:.1%}"
        )
        for _, expected, got in [m for m in tally.misses if m[0] == figure][: options.show]:
            print(f"  expected {expected!r}\n  got      {got!r}")
    load_shares = expert_load(model, tokenizer, options.corpus, options.seed)
    for layer, row in enumerate(load_shares):
        print(f"expert load, layer {layer}: " + " ".join(f"{value:.3f}" for value in row))
    if options.json:
        conditions = {
            "model": options.model.name,
            "corpus": options.corpus,
            "seed": options.seed,
            "decoding": "greedy",
            "runtime": options.runtime,
            "against": options.against,
            "dtype": "float32",
            "torch": torch.__version__,
            "seconds": round(seconds, 1),
        }
        found = {"figures": figures, "expert_load": load_shares, "conditions": conditions}
        print(json.dumps(found))


if __name__ == "__main__":
    main()
