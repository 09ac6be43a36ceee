"""The wide corpus: single and parallel calls, chains, follow-ups, talk, recall, refusals."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from wide_asks import (
    FIXED_REQUESTS,
    Call,
    World,
    ask,
    evaluate_expression,
    failing,
)
from wide_schemas import Tool, toolbox
from wide_words import NOUNS, filename, key, made_up, number, value, word

W = TypeVar("W", bound=World)
REFUSAL = "I have no tool for that."


@dataclass
class Turn:
    """A user turn: rounds of parallel calls, then an answer."""

    text: str
    answer: str
    facts: list[str]
    """strings that a right answer contains"""
    rounds: list[list[Call]] = field(default_factory=list)


@dataclass
class Dialogue:
    """A system prompt (may be empty), tools and turns."""

    system: str
    tools: list[Tool]
    turns: list[Turn]


def single(rng: random.Random, world: World) -> Turn | None:
    if not world.tools:
        return None
    drawn = [name for name, tool in world.tools.items() if tool.drawn]
    name = rng.choice(drawn if drawn and rng.random() < 0.4 else list(world.tools))
    request = ask(rng, world, name)
    if rng.random() < 0.07:
        world.store.pop(str(request.call.arguments.get("key")), None)
        world.files.pop(str(request.call.arguments.get("path")), None)
        request = failing(rng, request)
    else:
        world.last = request.result
    return Turn(request.text, request.answer, request.facts, [[request.call]])


def parallel(rng: random.Random, world: World) -> Turn | None:
    if not world.tools:
        return None
    count = 3 if rng.random() < 0.1 else 2
    same = rng.choice(list(world.tools))
    names = [same if rng.random() < 0.5 else rng.choice(list(world.tools)) for _ in range(count)]
    requests = [ask(rng, world, name) for name in names]
    if len({str(request.call.arguments) for request in requests}) < count:
        return None
    texts = [request.text for request in requests]
    joint = rng.choice((" ", " ", " Also: ", " And: ", " "))
    text = joint.join(texts)
    if rng.random() < 0.35 and all(text.endswith("?") for text in texts):
        text = ", and ".join([texts[0][:-1], *(t[0].lower() + t[1:-1] for t in texts[1:])]) + "?"
    answer = "\n".join(request.answer for request in requests)
    facts = [fact for request in requests for fact in request.facts]
    world.last = None
    return Turn(text, answer, facts, [[request.call for request in requests]])


_ARITHMETIC = {
    "*": ("multiply {it} by {n}", "{it} times {n}"),
    "+": ("add {n} to {it}", "{it} plus {n}"),
    "-": ("subtract {n} from {it}", "{it} minus {n}"),
    "/": ("divide {it} by {n}", "{it} divided by {n}"),
}


def _calculation(rng: random.Random, left: str, world: World) -> tuple[str, str, Call]:
    """(command with a hole `{it}`, question with the hole, call) for `left op n`."""
    operator = rng.choice("**++-/")
    n = number(rng, 3)
    expression = f"{left} {operator} {n}"
    result = evaluate_expression(expression)
    world.sums[expression] = result
    command, question = (text.replace("{n}", str(n)) for text in _ARITHMETIC[operator])
    return command, question, Call("calculator", {"expression": expression}, result)


def _sum_answer(call: Call) -> str:
    return f"{call.arguments['expression']} = {call.response}."


def chain(rng: random.Random, world: World) -> Turn | None:
    """Two calls in a row, the second one with the result of the first."""
    have = world.tools.keys()
    options: list[str] = []
    if {"read_file", "calculator"} <= have:
        options += ["file_sum"] * 3
    if {"kv_get", "calculator"} <= have:
        options += ["key_sum"] * 2
    if {"read_file", "kv_set"} <= have:
        options += ["file_store"] * 2
    if {"calculator", "kv_set"} <= have:
        options.append("sum_store")
    if {"kv_get", "read_file"} <= have:
        options.append("key_file")
    if {"clock", "kv_set"} <= have:
        options.append("clock_store")
    if not options:
        return None
    return _CHAINS[rng.choice(options)](rng, world)


def _file_sum(rng: random.Random, world: World) -> Turn:
    path, n = filename(rng), number(rng, 4)
    noun = word(rng)
    content = str(n) if rng.random() < 0.5 else rng.choice((f"{noun}: {n}", f"the {noun} is {n}"))
    world.files[path] = content
    command, question, call = _calculation(rng, str(n), world)
    text = rng.choice(
        (
            f"Read the file {path} and {command.format(it='the number in it')}.",
            f"Read the file {path} and {command.format(it='the number in it')}.",
            f"Read {path} and {command.format(it='its number')}.",
            f"What is {question.format(it=f'the number in {path}')}?",
            f"Open {path}, then {command.format(it='the number you find')}.",
        )
    )
    world.last = call.response
    rounds = [[Call("read_file", {"path": path}, content)], [call]]
    return Turn(text, _sum_answer(call), [call.response], rounds)


def _key_sum(rng: random.Random, world: World) -> Turn:
    name, n = key(rng), str(number(rng, 4))
    world.store[name] = n
    command, question, call = _calculation(rng, n, world)
    text = rng.choice(
        (
            f"Take the value under the key {name} and {command.format(it='it')}.",
            f"What is {question.format(it=f'the value of {name}')}?",
            f"Get the key {name} and {command.format(it='its value')}.",
            f"Look up {name} and {command.format(it='the number stored there')}.",
        )
    )
    world.last = call.response
    rounds = [[Call("kv_get", {"key": name}, n)], [call]]
    return Turn(text, _sum_answer(call), [call.response], rounds)


def _stored(rng: random.Random, world: World, text: str, first: Call, stored: str) -> Turn:
    name = key(rng)
    world.store[name], world.last = stored, stored
    arguments = world.tools["kv_set"].order({"key": name, "value": stored})
    rounds = [[first], [Call("kv_set", arguments, rng.choice(("ok", "ok", "stored")))]]
    answer = f"Stored {stored} under the key {name}."
    return Turn(text.format(k=name), answer, [name, stored], rounds)


def _file_store(rng: random.Random, world: World) -> Turn:
    path = filename(rng)
    content = value(rng) if rng.random() < 0.7 else f"{word(rng)} {word(rng)} {number(rng, 3)}"
    world.files[path] = content
    text = rng.choice(
        (
            f"Read {path} and store what it says under the key {{k}}.",
            f"Store the content of {path} under the key {{k}}.",
            f"Read the file {path} and save its content as {{k}}.",
        )
    )
    return _stored(rng, world, text, Call("read_file", {"path": path}, content), content)


def _sum_store(rng: random.Random, world: World) -> Turn:
    _, _, call = _calculation(rng, str(number(rng, 3)), world)
    expression = call.arguments["expression"]
    text = rng.choice(
        (
            f"What is {expression}? Store the result under the key {{k}}.",
            f"Calculate {expression} and store the result under {{k}}.",
        )
    )
    return _stored(rng, world, text, call, call.response)


def _clock_store(rng: random.Random, world: World) -> Turn:
    request = ask(rng, world, "clock")
    where = request.call.arguments["city"]
    text = f"Store the time in {where} under the key {{k}}."
    return _stored(rng, world, text, request.call, request.result)


def _key_file(rng: random.Random, world: World) -> Turn:
    name, path = key(rng), filename(rng)
    world.store[name] = path
    content = world.last = f"{word(rng)} {word(rng)} {number(rng, 3)}"
    world.files[path] = content
    text = f"Read the file whose name is stored under the key {name}."
    rounds = [[Call("kv_get", {"key": name}, path)], [Call("read_file", {"path": path}, content)]]
    return Turn(text, f"{path} says: {content}", [content], rounds)


_CHAINS: dict[str, Callable[[random.Random, World], Turn]] = {
    "file_sum": _file_sum,
    "key_sum": _key_sum,
    "file_store": _file_store,
    "sum_store": _sum_store,
    "clock_store": _clock_store,
    "key_file": _key_file,
}


def follow_up(rng: random.Random, world: World) -> Turn | None:
    """A call whose argument is the result of the turn before."""
    last = world.last
    if last is None:
        return None
    if "calculator" in world.tools and last.lstrip("-").isdigit() and rng.random() < 0.7:
        command, question, call = _calculation(rng, last, world)
        text = rng.choice(
            (f"Now {command.format(it='that')}.", f"What is {question.format(it='that')}?")
        )
        world.last = call.response
        return Turn(text, _sum_answer(call), [call.response], [[call]])
    if "kv_set" not in world.tools:
        return None
    name = key(rng)
    world.store[name] = last
    text = rng.choice(("Store that under the key {}.", "Save that as {}.", "Keep it under {}."))
    arguments = world.tools["kv_set"].order({"key": name, "value": last})
    call = Call("kv_set", arguments, "ok")
    answer = f"Stored {last} under the key {name}."
    return Turn(text.format(name), answer, [name, last], [[call]])


def recall(rng: random.Random, world: World) -> Turn | None:
    """A question about an earlier result: answered from the context, without a call."""
    options: list[tuple[str, str, str]] = []
    for expression, result in world.sums.items():
        options.append((f"Remind me: what was {expression}?", f"{expression} = {result}.", result))
    for path, content in world.files.items():
        options.append((f"What did {path} say again?", f"{path} says: {content}", content))
    for name, stored in world.store.items():
        text = f"Remind me: what did {name} hold?"
        options.append((text, f"The key {name} holds {stored}.", stored))
    if not options:
        return None
    text, answer, fact = rng.choice(options)
    return Turn(text, answer, [fact])


def talk(rng: random.Random, world: World) -> Turn:
    """Plain talk; half of it repeats unknown strings, the purest form of copying."""
    if rng.random() < 0.5:
        words = " ".join(value(rng) for _ in range(rng.randint(1, 6)))
        text = rng.choice(("Repeat after me: {}", "Say: {}", "Say exactly: {}")).format(words)
        return Turn(text, words, [words])
    name = made_up(rng).capitalize()
    tools = ", ".join(world.tools)
    can = f"I can use these tools: {tools}." if tools else "I have no tools, but we can talk."
    noun = rng.choice(NOUNS)
    text, answer = rng.choice(
        (
            ("Hello!", "Hello! How can I help?"),
            ("Hi there.", "Hello! How can I help?"),
            ("Good morning.", "Good morning! How can I help?"),
            ("Thanks!", "You are welcome."),
            ("Thank you, that is all.", "You are welcome."),
            ("How are you?", "I am well, thank you."),
            ("Who are you?", "I am a small assistant that can use tools."),
            ("What can you do?", can),
            ("Which tools do you have?", can),
            (f"My name is {name}.", f"Nice to meet you, {name}."),
            (f"I am {name}, hello.", f"Nice to meet you, {name}."),
            (f"I like my {noun}.", f"It is good to hear about your {noun}."),
            ("Never mind.", "All right."),
            ("Okay.", "All right."),
            ("Goodbye.", "Goodbye!"),
        )
    )
    return Turn(text, answer, [answer])


def refuse(rng: random.Random, world: World) -> Turn:
    """A request that no tool of this dialogue serves."""
    missing = [name for name in FIXED_REQUESTS if name not in world.tools]
    if missing and rng.random() < 0.75:
        scratch = World(tools={})
        return Turn(ask(rng, scratch, rng.choice(missing)).text, REFUSAL, [REFUSAL])
    text = rng.choice(
        (
            f"Send a message to {made_up(rng).capitalize()}.",
            f"Book a flight to {made_up(rng).capitalize()}.",
            f"Call {made_up(rng).capitalize()} on the phone.",
            f"Play the song {word(rng)}.",
            f"Delete the file {filename(rng)}.",
            f"Draw a picture of a {word(rng)}.",
            f"What will the weather be in {made_up(rng).capitalize()}?",
        )
    )
    return Turn(text, REFUSAL, [REFUSAL])


Skill = Callable[[random.Random, W], Turn | None]


def attempt(skill: Skill[W], rng: random.Random, world: W) -> Turn | None:
    """A turn of this kind; where there is none, the world is as if nobody had tried."""
    before = {name: copy.copy(value) for name, value in vars(world).items()}
    turn = skill(rng, world)
    if turn is None:
        vars(world).update(before)
    return turn


_MIX: tuple[tuple[Skill[World], float], ...] = (
    (single, 0.44),
    (parallel, 0.14),
    (chain, 0.16),
    (follow_up, 0.07),
    (recall, 0.05),
    (talk, 0.08),
    (refuse, 0.06),
)
_SKILLS = [skill for skill, _ in _MIX]
_WEIGHTS = [weight for _, weight in _MIX]


def system_prompt(rng: random.Random) -> str:
    """One of many phrasings; a third of them hold made-up names."""
    name, place = made_up(rng).capitalize(), made_up(rng).capitalize()
    return rng.choice(
        (
            "You are a helpful assistant.",
            "You are a helpful assistant. Use the tools when they help.",
            "You are a careful agent. Answer with the values that the tools return.",
            "You are a small assistant that can use tools.",
            "You are an agent. Call a tool when one fits; otherwise answer in plain words.",
            "You help with files, keys, sums and clocks.",
            "Answer briefly. Use a tool where one is needed.",
            "You are the assistant of a harbor office. Be brief and exact.",
            "Be brief and exact.",
            f"You are {name}, an assistant. Use the tools when they help.",
            f"You are {name}, the agent of the {place} office. Be brief.",
            f"You are {name}. Today you work for {place}.",
        )
    )


def dialogue(rng: random.Random) -> Dialogue:
    """A whole dialogue of one to six turns."""
    tools = [] if rng.random() < 0.03 else toolbox(rng)
    world = World({tool.name: tool for tool in tools})
    system = "" if rng.random() < 0.12 else system_prompt(rng)
    wanted = rng.choice((1, 2, 3, 3, 4, 4, 5, 5, 6))
    done: list[Turn] = []
    while len(done) < wanted:
        turn = attempt(rng.choices(_SKILLS, _WEIGHTS)[0], rng, world)
        if turn is not None:
            done.append(turn)
    return Dialogue(system, list(world.tools.values()), done)
