"""Single requests: one sentence of the user, one call, one tool result, one answer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from wide_schemas import Tool, argument
from wide_words import city, filename, key, made_up, number, sentence, value, word


@dataclass
class Call:
    """A tool call with the result that the simulated world gives."""

    name: str
    arguments: dict[str, Any]
    response: str


@dataclass
class Request:
    """What the user asks, the call it needs, and the answer that uses its result."""

    text: str
    call: Call
    answer: str
    result: str  # the value a follow-up may refer to
    facts: list[str]  # strings a right answer contains


@dataclass
class World:
    """What has happened in this dialogue so far."""

    tools: dict[str, Tool]
    store: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    sums: dict[str, str] = field(default_factory=dict)
    last: str | None = None


def evaluate_expression(expression: str) -> str:
    """Value of a generated expression as a calculator prints it."""
    result = eval(expression, {"__builtins__": {}})
    if isinstance(result, float):
        result = round(result, 4)
        if result.is_integer():
            result = int(result)
    return str(result)


def operands(rng: random.Random, operator: str) -> tuple[int, int]:
    """Two operands; half of the divisions come out even."""
    a, b = number(rng, 4), number(rng, 3)
    if operator == "/" and rng.random() < 0.6:
        b = number(rng, 2)
        a = b * number(rng, 2)
    return a, b


def _sum(rng: random.Random) -> tuple[str, str]:
    """(sentence, expression): the expression keeps the user's order of terms and operators."""
    operator = rng.choice("**++--/")
    a, b = operands(rng, operator)
    shape = rng.random()
    if shape < 0.14:
        said = {
            "+": f"Add {b} to {a}.",
            "-": f"Subtract {b} from {a}.",
            "*": f"Multiply {a} by {b}.",
            "/": f"Divide {a} by {b}.",
        }[operator]
        return said, f"{a} {operator} {b}"
    expression = f"{a} {operator} {b}"
    spoken = expression
    if shape < 0.4:
        names = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
        spoken = f"{a} {names[operator]} {b}"
    elif shape < 0.52:
        expression = spoken = f"{expression} {rng.choice('+-*')} {number(rng, 3)}"
    elif shape < 0.6:
        expression = spoken = f"({expression}) {rng.choice('+-*')} {number(rng, 3)}"
    said = rng.choice(
        (
            "What is {}?", "What is {}?", "What is {}?", "What's {}?", "How much is {}?",
            "Calculate {}.", "Compute {}.", "Please work out {}.", "{}?",
            "Use the calculator for {}.", "Tell me what {} is.", "Can you compute {}?",
        )
    )  # fmt: skip
    return said.format(spoken), expression


def ask_calculator(rng: random.Random, world: World) -> Request:
    said, expression = _sum(rng)
    result = evaluate_expression(expression)
    world.sums[expression] = result
    call = Call("calculator", {"expression": expression}, result)
    return Request(said, call, f"{expression} = {result}.", result, [result])


def ask_kv_set(rng: random.Random, world: World) -> Request:
    name, stored = key(rng), value(rng)
    world.store[name] = stored
    said = rng.choice(
        (
            "Store {v} under the key {k}.", "Store {v} under the key {k}.",
            "Store {v} under {k}.", "Save {v} under the key {k}.", "Set {k} to {v}.",
            "Set the key {k} to {v}.", "Remember {v} as {k}.", "Keep {v} under {k}, please.",
            "Put {v} under the key {k}.", "Please save the value {v} as {k}.",
        )
    ).format(k=name, v=stored)  # fmt: skip
    call = Call("kv_set", {"key": name, "value": stored}, rng.choice(("ok", "ok", "stored", "OK")))
    return Request(said, call, f"Stored {stored} under the key {name}.", stored, [name, stored])


def ask_kv_get(rng: random.Random, world: World) -> Request:
    known = bool(world.store) and rng.random() < 0.5
    name = rng.choice(list(world.store)) if known else key(rng)
    stored = world.store.setdefault(name, value(rng))
    said = rng.choice(
        (
            "What is stored under the key {k}?", "What is stored under the key {k}?",
            "What is stored under {k}?", "What is the value of {k}?", "Get the key {k}.",
            "Look up {k} in the store.", "Read the key {k}.", "Which value does the key {k} hold?",
            "What does the key {k} hold?", "Please fetch the value under {k}.",
        )
    ).format(k=name)  # fmt: skip
    call = Call("kv_get", {"key": name}, stored)
    return Request(said, call, f"The key {name} holds {stored}.", stored, [stored])


def ask_clock(rng: random.Random, world: World) -> Request:
    where = city(rng)
    now = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    if rng.random() < 0.12:
        now += f":{rng.randint(0, 59):02d}"
    said = rng.choice(
        (
            "What time is it in {}?", "What time is it in {}?", "Tell me the time in {}.",
            "What's the time in {} now?", "Current time in {}?", "What is the time in {}?",
            "Can you check the clock in {}?", "How late is it in {}?",
        )
    ).format(where)  # fmt: skip
    call = Call("clock", {"city": where}, now)
    return Request(said, call, f"It is {now} in {where}.", now, [now])


def ask_read_file(rng: random.Random, world: World) -> Request:
    known = bool(world.files) and rng.random() < 0.2
    path = rng.choice(list(world.files)) if known else filename(rng)
    fresh = sentence(rng) if rng.random() < 0.8 else value(rng)
    content = world.files.setdefault(path, fresh)
    said = rng.choice(
        (
            "Read the file {} and tell me what it says.",
            "Read the file {} and tell me what it says.",
            "What is in the file {}?", "What does {} say?", "Open {}.", "Read {}.",
            "Show me the content of {}.", "Read {}, please.", "Tell me what {} says.",
            "Please read the file {}.",
        )
    ).format(path)  # fmt: skip
    call = Call("read_file", {"path": path}, content)
    return Request(said, call, f"{path} says: {content}", content, [content])


def ask_list_files(rng: random.Random, world: World) -> Request:
    directory = word(rng) if rng.random() < 0.7 else f"{word(rng)}/{word(rng)}"
    names = [filename(rng) for _ in range(rng.randint(1, 4))]
    said = rng.choice(
        (
            "Which files are in {}?", "List the files in {}.",
            "What files are in the directory {}?",
            "List the directory {}.", "Show me the files in {}.",
        )
    ).format(directory)  # fmt: skip
    call = Call("list_files", {"directory": directory}, "\n".join(names))
    return Request(said, call, f"{directory} holds: {', '.join(names)}", names[0], names)


def ask_search(rng: random.Random, world: World) -> Request:
    query = word(rng) if rng.random() < 0.5 else f"{word(rng)} {word(rng)}"
    found = f"{filename(rng)}: {sentence(rng)}"
    said = rng.choice(
        ("Search for {}.", "Find {}.", "Search the notes for {}.", "Look for {}.", "Search {}.")
    ).format(query)
    call = Call("search", {"query": query}, found)
    return Request(said, call, f"I found {found}", found, [found])


def _spoken(argument_value: Any) -> str:
    return json.dumps(argument_value) if isinstance(argument_value, bool) else str(argument_value)


def ask_drawn(rng: random.Random, tool: Tool) -> Request:
    """A request for a tool that exists only in this dialogue."""
    arguments = {name: argument(rng, kind) for name, kind in tool.parameters.items()}
    listed = " and ".join(f"{name} {_spoken(v)}" for name, v in arguments.items())
    said = rng.choice(
        (
            f"Use {tool.name} with {listed}.",
            f"Call {tool.name} with {listed}.",
            f"{tool.verb.capitalize()} the {tool.noun} with {listed}.",
            f"Please {tool.verb} the {tool.noun} with {listed}.",
            f"{tool.verb.capitalize()} a {tool.noun}: {listed}.",
        )
    )
    result = value(rng) if rng.random() < 0.7 else f"{made_up(rng)} {number(rng, 4)}"
    call = Call(tool.name, arguments, result)
    return Request(said, call, f"The result is {result}.", result, [result])


FIXED_REQUESTS: dict[str, Callable[[random.Random, World], Request]] = {
    "calculator": ask_calculator,
    "kv_set": ask_kv_set,
    "kv_get": ask_kv_get,
    "clock": ask_clock,
    "read_file": ask_read_file,
    "list_files": ask_list_files,
    "search": ask_search,
}


def ask(rng: random.Random, world: World, name: str) -> Request:
    """A request for the tool `name`, whose arguments follow the order of its schema."""
    tool = world.tools.get(name)
    if tool is not None and tool.drawn:
        return ask_drawn(rng, tool)
    request = FIXED_REQUESTS[name](rng, world)
    if tool is not None:
        request.call.arguments = tool.order(request.call.arguments)
    return request


def failing(rng: random.Random, request: Request) -> Request:
    """The same request when its tool fails: the answer reports the error, and nothing else."""
    subject = str(next(iter(request.call.arguments.values()), request.call.name))
    message = rng.choice(
        (
            f"not found: {subject}", f"no such entry: {subject}", "permission denied",
            f"timed out after {rng.randint(1, 60)} s", f"unknown argument {subject}",
            f"{made_up(rng)} is not available", "connection refused", f"code {number(rng, 3)}",
        )
    )  # fmt: skip
    shape = rng.random()
    text = f"error: {message}"
    if shape < 0.2:
        text = f"Error: {message}"
    elif shape < 0.35:
        text = json.dumps({"error": message}, ensure_ascii=False)
    call = Call(request.call.name, request.call.arguments, text)
    return Request(request.text, call, f"That did not work: {message}.", message, [message])
