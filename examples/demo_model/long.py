"""The long corpus: dialogues of up to 4K tokens that ask for what was said or found far back.

It is made of the wide corpus' turns and of what those lack: facts that the user states and asks for
much later, a value that was changed meanwhile, three or four calls in a row or at once, and letters
beyond ASCII. Every dialogue asks several times, so that one long row teaches many distances.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import wide
from wide import Turn
from wide_asks import FIXED_REQUESTS, Call, World, ask, evaluate_expression
from wide_schemas import fixed_tool, toolbox
from wide_words import filename, key, number, sentence, value, word

CHARS_PER_TOKEN = 2.35
"""`num_chars` a token of the shipped tokenizer, low enough that no dialogue exceeds 4096 tokens."""
DRILL_SHARE = 0.5
"""Of dialogues that are mostly facts and questions."""
_LETTERS = "äöüßéèêñçøåæžšłńğıαβγδεθλμπσбвгдежзиклмнопрстья京東山川海水火木日月"


@dataclass
class LongWorld(World):
    """The wide corpus' world and the facts that the user stated."""

    notes: dict[str, str] = field(default_factory=dict)


def foreign(rng: random.Random) -> str:
    """Two to six letters, most of them beyond ASCII."""
    letters = _LETTERS + "aeiounrst"
    return "".join(rng.choice(letters) for _ in range(rng.randint(2, 6)))


def fact_value(rng: random.Random) -> str:
    return foreign(rng) if rng.random() < 0.1 else value(rng)


def note(rng: random.Random, world: LongWorld) -> Turn:
    """The user states a fact; now and then another value for one that is known."""
    known = list(world.notes)
    name = rng.choice(known) if known and rng.random() < 0.08 else word(rng)
    stated = world.notes[name] = fact_value(rng)
    text = rng.choice(
        ("My {k} is {v}.", "Note that my {k} is {v}.", "The {k} is called {v}.",
         "Remember: my {k} is {v}.", "For later: the {k} is {v}.")
    ).format(k=name, v=stated)  # fmt: skip
    return Turn(text, f"I will remember that: {stated}.", [stated])


def question(rng: random.Random, world: LongWorld, kind: str, name: str) -> Turn:
    """The user asks for what the context holds; the answer needs no call."""
    if kind == "note":
        found = world.notes[name]
        text = rng.choice(("What is my {}?", "What is my {}?", "Remind me: what is my {}?"))
        return Turn(text.format(name), f"Your {name} is {found}.", [found])
    if kind == "file":
        found = world.files[name]
        text = rng.choice(("What did {} say again?", "Remind me: what did {} say?"))
        return Turn(text.format(name), f"{name} says: {found}", [found])
    if kind == "key":
        found = world.store[name]
        text = rng.choice(("Remind me: what did {} hold?", "What did the key {} hold again?"))
        return Turn(text.format(name), f"The key {name} holds {found}.", [found])
    found = world.sums[name]
    return Turn(f"Remind me: what was {name}?", f"{name} = {found}.", [found])


def recall(rng: random.Random, world: LongWorld) -> Turn | None:
    """A question about an earlier fact, in half of the cases one of the oldest; facts that were
    stated come oftener.
    """
    kinds = {"note": world.notes, "file": world.files, "key": world.store, "sum": world.sums}
    part = 0.2 if rng.random() < 0.5 else 1.0
    places: list[tuple[str, str]] = []
    for kind, facts in kinds.items():
        names = list(facts)[: max(1, round(part * len(facts)))]
        places += [(kind, name) for name in names for _ in range(2 if kind == "note" else 1)]
    return question(rng, world, *rng.choice(places)) if places else None


def row_of_calls(rng: random.Random, world: LongWorld) -> Turn | None:
    """Two to four calls, each after the result of the one before."""
    have = world.tools.keys()
    options: list[Callable[[random.Random, LongWorld], Turn]] = []
    if {"read_file", "calculator"} <= have:
        options.append(_two_files)
    if {"list_files", "read_file"} <= have:
        options.append(_list_and_read)
    if {"search", "read_file"} <= have:
        options.append(_search_and_read)
    return rng.choice(options)(rng, world) if options else None


def _two_files(rng: random.Random, world: LongWorld) -> Turn:
    paths, numbers = [filename(rng), filename(rng)], [number(rng, 3), number(rng, 3)]
    rounds: list[list[Call]] = []
    for path, content in zip(paths, numbers, strict=True):
        world.files[path] = str(content)
        rounds.append([Call("read_file", {"path": path}, str(content))])
    verb, sign = rng.choice((("add", "+"), ("multiply", "*")))
    expression = f"{numbers[0]} {sign} {numbers[1]}"
    total = world.sums[expression] = evaluate_expression(expression)
    rounds.append([Call("calculator", {"expression": expression}, total)])
    text = f"Read {paths[0]}, then read {paths[1]}, and {verb} their numbers"
    if "kv_set" not in world.tools or rng.random() < 0.4:
        world.last = total
        return Turn(f"{text}.", f"{expression} = {total}.", [total], rounds)
    name = key(rng)
    world.store[name] = world.last = total
    arguments = world.tools["kv_set"].order({"key": name, "value": total})
    rounds.append([Call("kv_set", arguments, "ok")])
    text = f"{text}; store the result under the key {name}."
    return Turn(text, f"Stored {total} under the key {name}.", [name, total], rounds)


def _list_and_read(rng: random.Random, world: LongWorld) -> Turn:
    directory = word(rng)
    names = [filename(rng).split("/")[-1] for _ in range(rng.randint(2, 4))]
    which, index = rng.choice((("first", 0), ("last", -1), ("second", 1)))
    content = world.files[names[index]] = sentence(rng)
    text = f"List the files in {directory} and read the {which} one."
    rounds = [
        [Call("list_files", {"directory": directory}, "\n".join(names))],
        [Call("read_file", {"path": names[index]}, content)],
    ]
    world.last = None
    return Turn(text, f"{names[index]} says: {content}", [content], rounds)


def _search_and_read(rng: random.Random, world: LongWorld) -> Turn:
    query, path = word(rng), filename(rng)
    content = world.files[path] = sentence(rng)
    text = rng.choice(("Search for {} and read the file.", "Find {} and open the file it is in."))
    rounds = [
        [Call("search", {"query": query}, f"{path}: {sentence(rng)}")],
        [Call("read_file", {"path": path}, content)],
    ]
    world.last = None
    return Turn(text.format(query), f"{path} says: {content}", [content], rounds)


def many_at_once(rng: random.Random, world: LongWorld) -> Turn | None:
    """Three or four calls in one message."""
    if not world.tools:
        return None
    names = [rng.choice(list(world.tools)) for _ in range(rng.choice((3, 3, 4)))]
    requests = [ask(rng, world, name) for name in names]
    if len({str(request.call.arguments) for request in requests}) < len(requests):
        return None
    world.last = None
    return Turn(
        " ".join(request.text for request in requests),
        "\n".join(request.answer for request in requests),
        [fact for request in requests for fact in request.facts],
        [[request.call for request in requests]],
    )


_MIX: tuple[tuple[wide.Skill[LongWorld], float], ...] = (
    (note, 0.15),
    (recall, 0.27),
    (row_of_calls, 0.08),
    (many_at_once, 0.04),
    (wide.single, 0.22),
    (wide.parallel, 0.06),
    (wide.chain, 0.06),
    (wide.follow_up, 0.03),
    (wide.talk, 0.05),
    (wide.refuse, 0.04),
)
_DRILL: tuple[tuple[wide.Skill[LongWorld], float], ...] = (
    (note, 0.33),
    (recall, 0.47),
    (wide.single, 0.16),
    (wide.talk, 0.04),
)
"""Mostly facts and questions: ten times as many questions a token."""


def num_chars(turn: Turn) -> int:
    """Characters of a turn with its markup, near enough."""
    total = len(turn.text) + len(turn.answer) + 40
    for calls in turn.rounds:
        for call in calls:
            total += len(json.dumps(call.arguments)) + len(call.name) + len(call.response) + 70
    return total


def new_world(rng: random.Random) -> LongWorld:
    """Up to four tools: the room is for turns."""
    if rng.random() < 0.3:
        names = rng.sample(list(FIXED_REQUESTS), rng.randint(3, 4))
        tools = [fixed_tool(rng, name) for name in names]
    else:
        tools = toolbox(rng, 1, 4)
    return LongWorld({tool.name: tool for tool in tools})


def draw_turn(rng: random.Random, world: LongWorld, *, drill: bool = False) -> Turn:
    """The next turn of any kind."""
    mix = _DRILL if drill else _MIX
    while True:
        skill = rng.choices([skill for skill, _ in mix], [weight for _, weight in mix])[0]
        turn = wide.attempt(skill, rng, world)
        if turn is not None:
            return turn


def dialogue(rng: random.Random) -> wide.Dialogue:
    """A dialogue of 0.5K to 4K tokens."""
    world = new_world(rng)
    system = "" if rng.random() < 0.1 else wide.system_prompt(rng)
    tools = list(world.tools.values())
    kind = rng.random()
    budget = rng.uniform(500, 1000) if kind < 0.3 else rng.uniform(1000, 1700)
    if kind > 0.75:
        budget = rng.uniform(2000, 3900)
    left = budget * CHARS_PER_TOKEN - len(system)
    left -= sum(len(json.dumps(tool.schema)) for tool in tools)
    turns = [note(rng, world)]
    drill = rng.random() < DRILL_SHARE
    while left > 0:
        turns.append(draw_turn(rng, world, drill=drill))
        left -= num_chars(turns[-1])
    return wide.Dialogue(system, tools, turns)


def _facts(world: LongWorld, kind: str) -> dict[str, str]:
    return {"note": world.notes, "key": world.store, "file": world.files}[kind]


def far_recall(
    rng: random.Random, distance: int, count: Callable[[list[Turn]], int]
) -> tuple[wide.Dialogue, str]:
    """A dialogue whose last turn asks for a fact of its first, `distance` tokens before, and the
    fact. `count` gives the tokens of turns.
    """
    world = new_world(rng)
    tools = list(world.tools.values())[:3]
    world.tools = {tool.name: tool for tool in tools}
    kind = rng.choice(("note", "note", "key", "file"))
    if kind == "note":
        first = note(rng, world)
        name = next(iter(world.notes))
    else:
        world.tools["kv_get" if kind == "key" else "read_file"] = fixed_tool(
            rng, "kv_get" if kind == "key" else "read_file"
        )
        request = ask(rng, world, "kv_get" if kind == "key" else "read_file")
        first = Turn(request.text, request.answer, request.facts, [[request.call]])
        name = next(iter(_facts(world, kind)))
    fact = _facts(world, kind)[name]
    if len(fact) < 3:
        return far_recall(rng, distance, count)  # a digit would be right by chance

    def skill(rng: random.Random, world: LongWorld) -> Turn | None:
        turn = draw_turn(rng, world)
        unchanged = _facts(world, kind).get(name) == fact
        return turn if unchanged and fact not in turn.answer else None  # said again, it is near

    turns: list[Turn] = []
    length = 0
    while length < distance:
        turn = wide.attempt(skill, rng, world)
        if turn is not None:
            turns.append(turn)
            length += count([turn])
    last = question(rng, world, kind, name)
    return wide.Dialogue(
        "Be brief and exact.", list(world.tools.values()), [first, *turns, last]
    ), fact
