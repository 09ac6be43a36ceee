"""Greedy generation of a dialogue, over whatever runs the model."""

from __future__ import annotations

import json
from typing import Protocol

import torch
from chat import Json, encode_pieces
from model import Model, Past
from tokenizers import Tokenizer

END = 2
"""Id of <|im_end|>."""


class Generator(Protocol):
    """What runs the model."""

    def generate(self, ids: list[int], limit: int) -> list[int]:
        """The greedy continuation of `ids` up to END (not included), at most `limit` tokens."""
        ...


class PlainGenerator:
    """The training model with a KV cache; what a call has in common with the one before is kept."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._cache: list[Past] = []
        self._cached: list[int] = []

    @torch.no_grad()
    def _feed(self, ids: list[int]) -> int:
        hidden = self._model(torch.tensor([ids]), self._cache or None)
        self._cache = hidden.cache
        self._cached += ids
        return int(self._model.logits(hidden.states[:, -1]).argmax())

    def generate(self, ids: list[int], limit: int) -> list[int]:
        """See Generator."""
        common = common_len(self._cached, ids[:-1])
        self._cached = ids[:common]
        self._cache = [(k[:, :, :common], v[:, :, :common]) for k, v in self._cache]
        if common == 0:
            self._cache = []
        found: list[int] = []
        token = self._feed(ids[common:])
        while token != END and len(found) < limit:
            found.append(token)
            token = self._feed([token])
        return found


def common_len(first: list[int], second: list[int]) -> int:
    """Length of the common prefix."""
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return index
    return min(len(first), len(second))


class Session:
    """One dialogue: a token log that grows and is never written anew."""

    def __init__(self, generator: Generator, tokenizer: Tokenizer) -> None:
        self.generator, self.tokenizer = generator, tokenizer
        self._ids: list[int] = []

    def feed(self, pieces: list[tuple[str, bool]]) -> None:
        """Add pieces to the log."""
        self._ids += encode_pieces(self.tokenizer, pieces)

    def generate(self, limit: int = 200, *, keep: bool = False) -> str:
        """Greedy text up to the end of the message, or `limit` tokens.

        With `keep` the log holds the message and its end afterwards, otherwise it stays as it was.
        """
        ids = self.generator.generate(self._ids, limit)
        if keep:
            self._ids += ids
            self.feed([("<|im_end|>\n", False)])
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def parse_calls(text: str) -> list[Json] | None:
    """The calls of a message, [] when it makes none, None when the markup or JSON is broken."""
    calls: list[Json] = []
    head, *blocks = text.split("<tool_call>")
    if "</tool_call>" in head:
        return None
    for block in blocks:
        body, closed, after = block.partition("</tool_call>")
        if not closed or after.strip():
            return None
        try:
            call = json.loads(body)
        except ValueError:
            return None
        if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
            return None
        if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
            return None
        calls.append(call)
    return calls
