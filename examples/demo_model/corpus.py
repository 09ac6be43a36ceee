"""The corpora by name, and endless seeded batches of their dialogues.

`narrow` has few sentence patterns, `wide` more wordings, tools and errors, `long` up to 4K tokens and
questions about what was far back. `mixed` draws each dialogue from the first two with equal chance,
`all` from all three.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal, get_args

import long
import narrow
import torch
import wide
from chat import Chat, Json, encode
from narrow_values import BASE_TOOLS
from tokenizers import Tokenizer
from torch import Tensor

CorpusName = Literal["narrow", "wide", "long", "mixed", "all"]
NAMES: tuple[CorpusName, ...] = get_args(CorpusName)
_SOURCES: tuple[CorpusName, ...] = ("narrow", "wide", "long")
ALL_SHARES = (0.45, 0.25, 0.3)
"""Of dialogues; the long ones hold two thirds of the tokens."""
DRAWN_SHARE = 0.6
"""Of the narrow dialogues in `all`: those that must have a tool of their own."""
POOL_SIZE = 200
"""Dialogues that are sorted by length together."""

Row = tuple[list[int], list[float]]


def turn_messages(turn: wide.Turn) -> list[Json]:
    """Messages of one turn of the wide corpus: user, rounds of calls and results, answer."""
    messages: list[Json] = [{"role": "user", "content": turn.text}]
    for calls in turn.rounds:
        functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
        tool_calls = [{"type": "function", "function": function} for function in functions]
        messages.append({"role": "assistant", "content": "", "tool_calls": tool_calls})
        messages += [{"role": "tool", "content": call.response} for call in calls]
    messages.append({"role": "assistant", "content": turn.answer})
    return messages


def wide_chat(talk: wide.Dialogue) -> Chat:
    """A dialogue of the wide corpus as messages."""
    messages: list[Json] = [{"role": "system", "content": talk.system}] if talk.system else []
    for turn in talk.turns:
        messages += turn_messages(turn)
    return Chat(messages, [tool.schema for tool in talk.tools])


def _with_own_tool(rng: random.Random) -> Chat:
    """A narrow dialogue that calls a tool known from its schema only."""
    while True:
        chat = narrow.dialogue(rng)
        calls = [call for message in chat.messages for call in message.get("tool_calls", [])]
        if any(call["function"]["name"] not in BASE_TOOLS for call in calls):
            return chat


def draw(name: CorpusName, rng: random.Random) -> Chat:
    """The next dialogue of a corpus."""
    if name == "mixed":
        name = "narrow" if rng.random() < 0.5 else "wide"
    elif name == "all":
        name = rng.choices(_SOURCES, ALL_SHARES)[0]
        if name == "narrow" and rng.random() < DRAWN_SHARE:
            return _with_own_tool(rng)
    if name == "narrow":
        return narrow.dialogue(rng)
    return wide_chat(long.dialogue(rng) if name == "long" else wide.dialogue(rng))


class Batches:
    """Batches of dialogues of similar length, endless.

    A row holds one dialogue from its start, so attention never sees a foreign one and positions
    start at zero as they do in use. Sorting a pool of dialogues by length before it is cut into
    batches keeps the padding to a few per cent. A batch is (ids, weights): int64 and float32
    [rows, length], padded at the right with id 0 and weight 0; `weights` is each token's loss
    weight as a target. Rows times length is at most `batch_tokens`; dialogues of more than
    `max_len` tokens are left out.
    """

    def __init__(
        self, tokenizer: Tokenizer, corpus: CorpusName, seed: int, batch_tokens: int, max_len: int
    ) -> None:
        self._tokenizer = tokenizer
        self._corpus: CorpusName = corpus
        self._rng = random.Random(seed)
        self._batch_tokens, self._max_len = batch_tokens, max_len

    def _pool(self) -> list[list[Row]]:
        rows: list[Row] = []
        while len(rows) < POOL_SIZE:
            row = encode(self._tokenizer, draw(self._corpus, self._rng))
            if len(row[0]) <= self._max_len:
                rows.append(row)
        rows.sort(key=lambda row: len(row[0]))
        batches: list[list[Row]] = []
        current: list[Row] = []
        for row in rows:  # ascending, so the newest row is the longest
            if current and (len(current) + 1) * len(row[0]) > self._batch_tokens:
                batches.append(current)
                current = []
            current.append(row)
        batches.append(current)
        self._rng.shuffle(batches)
        return batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            for rows in self._pool():
                length = max(len(ids) for ids, _ in rows)
                ids = torch.zeros(len(rows), length, dtype=torch.long)
                weights = torch.zeros(len(rows), length)
                for index, (tokens, targets) in enumerate(rows):
                    ids[index, : len(tokens)] = torch.tensor(tokens)
                    weights[index, : len(targets)] = torch.tensor(targets)
                yield ids, weights
