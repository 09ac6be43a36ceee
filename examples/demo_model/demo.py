"""The demo prompts in one session, on the model's own history, with tools that answer."""

from __future__ import annotations

import random
import re

from chat import GENERATION_PROMPT, Json, message_pieces, opening_pieces
from generate import Generator, Session, parse_calls
from narrow_values import base_tools, compute
from tokenizers import Tokenizer

SYSTEM = "You are a helpful assistant that uses tools when they are needed."
TOOLS = ("calculator", "clock", "kv_get", "kv_set", "read_file")
"""In the order of their names, as the server lists them."""
FILES = {"harbor.txt": "berth 17 is free", "price.txt": "37"}
CLOCKS = {"Oslo": "14:05"}
MAX_CALLS = 4
"""Calls of one turn; a model that goes on calling has failed it."""

PROMPTS: tuple[tuple[str, list[tuple[str, Json]], str], ...] = (
    (
        "Read the file harbor.txt and tell me what it says.",
        [("read_file", {"path": "harbor.txt"})],
        "berth 17 is free",
    ),
    ("What is 17 * 23?", [("calculator", {"expression": "17 * 23"})], "391"),
    ("Store 391 under the key berth.", [("kv_set", {"key": "berth", "value": "391"})], "berth"),
    ("What is stored under the key berth?", [("kv_get", {"key": "berth"})], "391"),
    (
        "Read the file price.txt and multiply the number in it by 12.",
        [("read_file", {"path": "price.txt"}), ("calculator", {"expression": "37 * 12"})],
        "444",
    ),
    ("What time is it in Oslo?", [("clock", {"city": "Oslo"})], "14:05"),
)
"""(user, calls that must be made, what the answer must contain)"""


def _calculate(expression: str) -> str:
    found = re.fullmatch(r"(\d+) ?([-+*/]) ?(\d+)", expression)
    return compute(int(found[1]), found[2], int(found[3])) if found else "error: not an expression"


def answer(name: str, arguments: Json, store: dict[str, str]) -> str:
    """The result of a call; a wrong call gets an error, as it would in use."""
    values = {key: str(value) for key, value in arguments.items()}
    try:
        if name == "read_file":
            return FILES[values["path"]]
        if name == "clock":
            return CLOCKS[values["city"]]
        if name == "kv_set":
            store[values["key"]] = values["value"]
            return "ok"
        if name == "kv_get":
            return store[values["key"]]
        if name == "calculator":
            return _calculate(values["expression"])
    except KeyError as error:
        return f"error: no {error}"
    return f"error: no tool {name}"


def run_demo(generator: Generator, tokenizer: Tokenizer, order_seed: int | None = None) -> bool:
    """Print pass or fail for each prompt; true when all passed.

    With `order_seed` the prompts come in another order; the key berth then holds 391 already.
    """
    tools = base_tools(random.Random(5))
    session, store = Session(generator, tokenizer), dict[str, str]()
    session.feed(opening_pieces(SYSTEM, [tools[name] for name in TOOLS]))
    prompts = list(PROMPTS)
    if order_seed is not None:
        store["berth"] = "391"
        random.Random(order_seed).shuffle(prompts)
    passed = True
    for text, wanted, fact in prompts:
        made: list[tuple[str, Json]] = []
        messages: list[Json] = [{"role": "user", "content": text}]
        while True:
            session.feed([*message_pieces(messages), (GENERATION_PROMPT, False)])
            reply = session.generate(keep=True)
            calls = parse_calls(reply)
            if not calls or len(made) >= MAX_CALLS:
                break
            made += [(call["name"], call["arguments"]) for call in calls]
            results = [answer(call["name"], call["arguments"], store) for call in calls]
            messages = [{"role": "tool", "content": result} for result in results]
        good = made == wanted and fact in reply
        passed &= good
        print(f"{'pass' if good else 'FAIL'}  {text}\n      calls {made}\n      answer {reply!r}")
    return passed
