"""Greedy generation with a KV cache that grows turn by turn and can be cut back."""

from __future__ import annotations

import json

import torch
from chat import Json, encode_pieces
from model import Model, Past
from tokenizers import Tokenizer

END = 2
"""Id of <|im_end|>."""


class Session:
    """One dialogue: a token log and its cache; only new tokens are computed."""

    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._cache: list[Past] = []
        self._num_tokens = 0
        self._next = 0  # the greedy choice after the last token

    @torch.no_grad()
    def _feed_ids(self, ids: list[int]) -> None:
        hidden = self.model(torch.tensor([ids]), self._cache or None)
        self._cache = hidden.cache
        self._next = int(self.model.logits(hidden.states[:, -1]).argmax())
        self._num_tokens += len(ids)

    def feed(self, pieces: list[tuple[str, bool]]) -> None:
        """Compute pieces after what is there already."""
        self._feed_ids(encode_pieces(self.tokenizer, pieces))

    def generate(self, limit: int = 200, *, keep: bool = False) -> str:
        """Greedy text up to the end of the message, or `limit` tokens.

        The log is cut back afterwards; with `keep` it holds the message and its end.
        """
        start, first = self._num_tokens, self._next
        ids: list[int] = []
        while self._next != END and len(ids) < limit:
            ids.append(self._next)
            self._feed_ids([self._next])
        if keep:
            self.feed([("<|im_end|>\n", False)])
        else:
            self._cache = [(k[:, :, :start], v[:, :, :start]) for k, v in self._cache]
            self._num_tokens, self._next = start, first
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
