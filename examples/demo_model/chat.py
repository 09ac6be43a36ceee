"""A dialogue as messages, as text in the chat format, and as tokens with loss weights.

`pieces` is the plain Python twin of `chat_template.jinja`: joined, its pieces are the template's
output. Two things need the cuts. The loss weighs what the assistant wrote above the rest. And the
server encodes what users and tools wrote apart from the template's own text, so that it stays
plain text whatever it holds; training has to cut at the same places, or a content that starts
with punctuation would be joined with the template's line break into a token never seen in use.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

Json = dict[str, Any]
CONTEXT_WEIGHT = 0.2
"""Loss weight of a token that the assistant did not write; its own tokens weigh 1."""
GENERATION_PROMPT = "<|im_start|>assistant\n"
_TOOLS_HEAD = "# Tools\nYou may call these tools:\n<tools>\n"
_TOOLS_FOOT = (
    '\n</tools>\nTo call a tool, answer with a JSON object that has "name" and "arguments" '
    "inside tool_call tags."
)


@dataclass
class Chat:
    """A whole dialogue in the OpenAI shape.

    A system message, where there is one, comes first and is not empty.
    """

    messages: list[Json]
    tools: list[Json]


def call_text(call: Json) -> str:
    """One call as the assistant writes it; a JSON string of arguments is taken as it is."""
    function = call["function"]
    arguments = function["arguments"]
    body = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {body}}}\n</tool_call>'


def assistant_text(message: Json) -> str:
    """Content and calls of an assistant message, one below the other."""
    parts = [message["content"]] if message["content"] else []
    parts += [call_text(call) for call in message.get("tool_calls", [])]
    return "\n".join(parts)


def opening_pieces(system: str, tools: list[Json]) -> list[tuple[str, bool]]:
    """What stands before the first user message; empty without a system text and tools."""
    if not system and not tools:
        return []
    text = ""
    if tools:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = ("\n\n" if system else "") + _TOOLS_HEAD + lines + _TOOLS_FOOT
    return [("<|im_start|>system\n", False), (system, False), (text + "<|im_end|>\n", False)]


def message_pieces(messages: list[Json]) -> list[tuple[str, bool]]:
    """Messages other than the system's; the results of one round of calls share one turn."""
    found: list[tuple[str, bool]] = []
    for index, message in enumerate(messages):
        role = message["role"]
        if role == "user":
            found += [
                ("<|im_start|>user\n", False),
                (message["content"], False),
                ("<|im_end|>\n", False),
            ]
        elif role == "tool":
            first = index == 0 or messages[index - 1]["role"] != "tool"
            last = index + 1 == len(messages) or messages[index + 1]["role"] != "tool"
            if first:
                found.append(("<|im_start|>user\n", False))
            found += [
                ("<tool_response>\n" if first else "\n<tool_response>\n", False),
                (message["content"], False),
                ("\n</tool_response>", False),
            ]
            if last:
                found.append(("<|im_end|>\n", False))
        else:
            found += [
                (GENERATION_PROMPT, False),
                (assistant_text(message) + "<|im_end|>", True),
                ("\n", False),
            ]
    return found


def pieces(chat: Chat) -> list[tuple[str, bool]]:
    """(text, whether the assistant wrote it) in order."""
    system, rest = split_system(chat)
    return opening_pieces(system, chat.tools) + message_pieces(rest)


def split_system(chat: Chat) -> tuple[str, list[Json]]:
    """The system text, empty where there is none, and the other messages."""
    if chat.messages and chat.messages[0]["role"] == "system":
        return chat.messages[0]["content"], chat.messages[1:]
    return "", chat.messages


def encode_pieces(tokenizer: Tokenizer, found: list[tuple[str, bool]]) -> list[int]:
    """Token ids of pieces, each encoded by itself."""
    encodings = tokenizer.encode_batch([text for text, _ in found], add_special_tokens=False)
    return [token for encoding in encodings for token in encoding.ids]


def encode(tokenizer: Tokenizer, chat: Chat) -> tuple[list[int], list[float]]:
    """Token ids of a dialogue and the loss weight of each token as a target."""
    found = pieces(chat)
    encodings = tokenizer.encode_batch([text for text, _ in found], add_special_tokens=False)
    ids: list[int] = []
    weights: list[float] = []
    for (_, own), encoding in zip(found, encodings, strict=True):
        ids += encoding.ids
        weights += [1.0 if own else CONTEXT_WEIGHT] * len(encoding.ids)
    return ids, weights
