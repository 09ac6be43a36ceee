"""The narrow corpus: seeded, endless tool dialogues, every value drawn fresh.

This is what the shipped model was trained on. The order of the calls to the random generator is
part of the data: a change of it, even one without effect on the meaning, draws other dialogues
from the same seed. `wide.py` has more wordings, kinds of errors and argument types.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from chat import Chat, Json
from narrow_values import (
    CITIES,
    PLAIN,
    SYSTEMS,
    DrawnTool,
    arithmetic,
    base_tools,
    compute,
    drawn_tool,
    file_name,
    key_name,
    made_up,
    number,
    sentence,
    time_of_day,
    value_text,
    word,
)

CHANGES = (
    ("multiply the number in it by {n}", "*"),
    ("multiply the number in it by {n}", "*"),
    ("add {n} to the number in it", "+"),
    ("subtract {n} from the number in it", "-"),
    ("divide the number in it by {n}", "/"),
)


@dataclass
class World:
    """A dialogue while it is written."""

    rng: random.Random
    store: dict[str, str] = field(default_factory=dict)
    messages: list[Json] = field(default_factory=list)
    last_value: str = ""
    """what "that" refers to, empty where it refers to nothing"""

    def user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def ask(self, forms: tuple[str, ...], *values: str, **named: str) -> None:
        """The user speaks in one of `forms`."""
        self.user(self.rng.choice(forms).format(*values, **named))

    def call(self, *calls: tuple[str, Json]) -> None:
        """The assistant makes calls of (name, arguments), all in one message."""
        functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
        tool_calls = [{"type": "function", "function": function} for function in functions]
        self.messages.append({"role": "assistant", "content": "", "tool_calls": tool_calls})

    def result(self, *texts: str) -> None:
        self.messages += [{"role": "tool", "content": text} for text in texts]

    def say(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})


def turn_calculate(world: World) -> None:
    said, expression, result = arithmetic(world.rng)
    world.ask(
        (
            "What is {}?", "What is {}?", "Calculate {}.", "Compute {}.", "How much is {}?",
            "{} = ?", "Please work out {}.", "Tell me {}.",
        ),
        said,
    )  # fmt: skip
    world.call(("calculator", {"expression": expression}))
    if world.rng.random() < 0.05:
        world.result("error: division by zero")
        world.say("The calculator reports an error: division by zero.")
        return
    world.result(result)
    world.say(f"{expression} = {result}.")
    world.last_value = result


def turn_set(world: World) -> None:
    rng = world.rng
    key, value = key_name(rng), value_text(rng)
    if world.last_value and rng.random() < 0.3:
        value = world.last_value
        if rng.random() < 0.5:
            forms = ("Store that under the key {}.", "Save the result as {}.", "Keep it under {}.")
            world.ask(forms, key)
        else:
            world.user(f"Store {value} under the key {key}.")
    else:
        world.ask(
            (
                "Store {v} under the key {k}.", "Store {v} under the key {k}.", "Save {v} as {k}.",
                "Remember {v} under {k}.", "Set {k} to {v}.", "Put {v} into {k}.",
            ),
            k=key,
            v=value,
        )  # fmt: skip
    world.call(("kv_set", {"key": key, "value": value}))
    world.result("ok")
    world.say(f"Stored {value} under {key}.")
    world.store[key] = value


def turn_get(world: World) -> None:
    rng = world.rng
    value: str | None
    if world.store and rng.random() < 0.6:
        key = rng.choice(list(world.store))
        value = world.store[key]
    else:
        key = key_name(rng)
        value = world.store.get(key) or (value_text(rng) if rng.random() < 0.85 else None)
    world.ask(
        (
            "What is stored under the key {}?", "What is stored under the key {}?", "Look up {}.",
            "What is the value of {}?", "Get {}.", "Which value has the key {}?",
        ),
        key,
    )  # fmt: skip
    world.call(("kv_get", {"key": key}))
    if value is None:
        world.result(f"error: no key {key}")
        world.say(f"There is no value under {key}.")
    else:
        world.result(value)
        world.say(f"The value of {key} is {value}.")
        world.last_value = value


def turn_clock(world: World) -> None:
    rng = world.rng
    city = rng.choice(CITIES) if rng.random() < 0.7 else made_up(rng).capitalize()
    world.ask(
        (
            "What time is it in {}?", "What time is it in {}?", "Tell me the time in {}.",
            "How late is it in {} now?", "Time in {}?",
        ),
        city,
    )  # fmt: skip
    world.call(("clock", {"city": city}))
    now = time_of_day(rng)
    world.result(now)
    world.say(f"It is {now} in {city}.")
    world.last_value = now


def turn_read(world: World) -> None:
    rng = world.rng
    path = file_name(rng)
    world.ask(
        (
            "Read the file {} and tell me what it says.",
            "Read the file {} and tell me what it says.",
            "What is in {}?", "Open {}.", "Show me the file {}.", "What does {} say?", "Read {}.",
        ),
        path,
    )  # fmt: skip
    world.call(("read_file", {"path": path}))
    if rng.random() < 0.1:
        world.result(f"error: no file {path}")
        world.say(f"There is no file {path}.")
        return
    content = sentence(rng) if rng.random() < 0.8 else value_text(rng)
    world.result(content)
    world.say(f"The file {path} says: {content}")
    world.last_value = ""


def turn_read_calculate(world: World) -> None:
    """Two calls in a row: the second one uses the result of the first."""
    rng = world.rng
    left, right = number(rng), max(1, number(rng))
    change, operator = rng.choice(CHANGES)
    change = change.format(n=right)
    if rng.random() < 0.7:
        path = file_name(rng)
        forms = (
            "Read the file {p} and {c}.", "Read the file {p} and {c}.", "Open {p} and {c}.",
            "Take {p} and {c}.",
        )  # fmt: skip
        world.ask(forms, p=path, c=change)
        world.call(("read_file", {"path": path}))
    else:
        key = key_name(rng)
        change = change.replace(" in it", "").replace("number", "value")
        world.user(f"Look up {key} and {change}.")
        world.call(("kv_get", {"key": key}))
    world.result(str(left))
    expression = f"{left} {operator} {right}"
    world.call(("calculator", {"expression": expression}))
    result = compute(left, operator, right)
    world.result(result)
    world.say(f"{expression} = {result}.")
    world.last_value = result


def turn_read_store(world: World) -> None:
    rng = world.rng
    path, key = file_name(rng), key_name(rng)
    value = value_text(rng)
    forms = (
        "Read the file {p} and store what it says under the key {k}.",
        "Copy the content of {p} to the key {k}.",
        "Read {p} and save it as {k}.",
    )
    world.ask(forms, p=path, k=key)
    world.call(("read_file", {"path": path}))
    world.result(value)
    world.call(("kv_set", {"key": key, "value": value}))
    world.result("ok")
    world.say(f"Stored {value} under {key}.")
    world.store[key] = value


def turn_list(world: World) -> None:
    rng = world.rng
    directory = word(rng)
    files = [file_name(rng).split("/")[-1] for _ in range(rng.randrange(1, 4))]
    forms = ("Which files are in {}?", "List the files in {}.", "Show the directory {}.")
    world.ask(forms, directory)
    world.call(("list_files", {"directory": directory}))
    world.result("\n".join(files))
    world.say(f"The directory {directory} holds {', '.join(files)}.")


def turn_search(world: World) -> None:
    rng = world.rng
    query = word(rng) if rng.random() < 0.6 else f"{word(rng)} {word(rng)}"
    forms = ("Search for {}.", "Find notes about {}.", "Search the notes for {}.", "Look for {}.")
    world.ask(forms, query)
    world.call(("search", {"query": query}))
    found = sentence(rng)
    world.result(found)
    world.say(f"I found this about {query}: {found}")


def turn_parallel(world: World) -> None:
    """Two calls of one tool in one message."""
    rng = world.rng
    kind = rng.randrange(3)
    if kind == 0:
        a, b = rng.sample(CITIES, 2)
        forms = ("What time is it in {} and in {}?", "Tell me the time in {} and {}.")
        world.ask(forms, a, b)
        world.call(("clock", {"city": a}), ("clock", {"city": b}))
        time_a, time_b = time_of_day(rng), time_of_day(rng)
        world.result(time_a, time_b)
        world.say(f"It is {time_a} in {a} and {time_b} in {b}.")
    elif kind == 1:
        a, b = key_name(rng), key_name(rng)
        value_a, value_b = value_text(rng), value_text(rng)
        world.ask(("What is stored under {} and under {}?", "Look up {} and {}."), a, b)
        world.call(("kv_get", {"key": a}), ("kv_get", {"key": b}))
        world.result(value_a, value_b)
        world.say(f"The value of {a} is {value_a} and the value of {b} is {value_b}.")
    else:
        said_a, a, result_a = arithmetic(rng)
        said_b, b, result_b = arithmetic(rng)
        world.ask(("What is {} and what is {}?", "Calculate {} and {}."), said_a, said_b)
        world.call(("calculator", {"expression": a}), ("calculator", {"expression": b}))
        world.result(result_a, result_b)
        world.say(f"{a} = {result_a} and {b} = {result_b}.")


def turn_plain(world: World) -> None:
    said, answer = world.rng.choice(PLAIN)
    world.user(said)
    world.say(answer)


def turn_refuse(world: World) -> None:
    rng = world.rng
    wishes = (
        "send a mail to {}", "book a flight to {}", "call {}", "print {}", "order a {}", "play {}",
        "translate {}",
    )  # fmt: skip
    wish = rng.choice(wishes).format(word(rng))
    world.ask(("Please {}.", "Can you {}?", "I want you to {}."), wish)
    world.say("I have no tool for that.")


def turn_echo(world: World) -> None:
    """Pure copying, the plainest lesson in it."""
    rng = world.rng
    text = sentence(rng) if rng.random() < 0.5 else f"{made_up(rng)} {number(rng)} {made_up(rng)}"
    world.ask(("Repeat: {}", "Say this: {}", "Write exactly this: {}"), text)
    world.say(text)


def turn_recall(world: World) -> None:
    """A fact of the user's, asked for a little later."""
    rng = world.rng
    name, value = word(rng), value_text(rng)
    forms = ("My {k} is {v}.", "Note that my {k} is {v}.", "The {k} is called {v}.")
    world.ask(forms, k=name, v=value)
    world.say(f"I will remember that: {value}.")
    if rng.random() < 0.5:
        between = turn_calculate if rng.random() < 0.5 else turn_plain
        between(world)
    world.user(f"What is my {name}?")
    world.say(f"Your {name} is {value}.")


def turn_drawn(world: World, tool: DrawnTool) -> None:
    """A call of a tool that the model can only know from its schema."""
    rng = world.rng
    arguments: Json = {}
    for name, kind in tool.parameters:
        arguments[name] = number(rng) if kind == "integer" else value_text(rng)
    listed = " and ".join(f"{name} {value}" for name, value in arguments.items())
    forms = ("{c} with {a}.", "Please {p} with {a}.", "Use {n} with {a}.", "Call {n} with {a}.")
    world.ask(forms, c=tool.phrase.capitalize(), p=tool.phrase, n=tool.name, a=listed)
    world.call((tool.name, arguments))
    value = value_text(rng)
    world.result(value)
    world.say(f"The result is {value}.")


@dataclass(frozen=True)
class Skill:
    """A kind of turn, how often it comes, and the tools that a dialogue needs for it."""

    turn: Callable[[World], None]
    weight: int
    needs: tuple[str, ...]


SKILLS = (
    Skill(turn_calculate, 16, ("calculator",)),
    Skill(turn_set, 12, ("kv_set",)),
    Skill(turn_get, 12, ("kv_get",)),
    Skill(turn_clock, 8, ("clock",)),
    Skill(turn_read, 14, ("read_file",)),
    Skill(turn_read_calculate, 14, ("read_file", "calculator", "kv_get")),
    Skill(turn_read_store, 5, ("read_file", "kv_set")),
    Skill(turn_list, 4, ("list_files",)),
    Skill(turn_search, 4, ("search",)),
    Skill(turn_parallel, 6, ("clock", "kv_get", "calculator")),
    Skill(turn_plain, 4, ()),
    Skill(turn_refuse, 3, ()),
    Skill(turn_echo, 8, ()),
    Skill(turn_recall, 5, ("calculator",)),
)


def dialogue(rng: random.Random) -> Chat:
    """A dialogue of one to seven turns."""
    tools = base_tools(rng)
    names: list[str] = []
    if rng.random() >= 0.1:
        if rng.random() < 0.35:
            names = rng.sample(list(tools), rng.randrange(1, 4))
        else:
            others = rng.sample(["clock", "list_files", "search"], rng.randrange(0, 3))
            names = ["calculator", "read_file", "kv_set", "kv_get", *others]
    rng.shuffle(names)
    chosen = [tools[name] for name in names]
    world = World(rng)
    if rng.random() < 0.92 or chosen:
        world.messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    drawn: list[DrawnTool] = []
    if names or rng.random() < 0.5:
        drawn = [drawn_tool(rng) for _ in range(rng.choice((0, 0, 0, 1, 1, 2)))]
    for tool in drawn:
        chosen.insert(rng.randrange(len(chosen) + 1), tool.schema)
    skills = [skill for skill in SKILLS if all(name in names for name in skill.needs)]
    for _ in range(rng.choice((1, 2, 3, 3, 4, 4, 5, 5, 6, 7))):
        if drawn and rng.random() < 0.4:
            turn_drawn(world, rng.choice(drawn))
        else:
            rng.choices(skills, [skill.weight for skill in skills])[0].turn(world)
    return Chat(world.messages, chosen)
