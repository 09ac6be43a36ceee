"""Tool schemas: the seven fixed tools and tools whose names and parameters are drawn at random.

Descriptions, parameter descriptions and parameter order vary, so that the model has to read the
schema in its system prompt instead of remembering seven names.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from wide_words import ADJECTIVES, NOUNS, VERBS, made_up, number, word

Schema = dict[str, Any]

# name -> (descriptions, {parameter: parameter descriptions})
FIXED: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "calculator": (
        ("Evaluate an arithmetic expression.", "Do arithmetic.", "Compute the value of a formula."),
        {"expression": ("The expression, such as 2 + 3.", "What to compute.")},
    ),
    "kv_set": (
        ("Store a value under a key.", "Save a value in the key-value store.", "Set a key."),
        {"key": ("The key.", "Name to store under."), "value": ("The value.", "What to store.")},
    ),
    "kv_get": (
        ("Read the value of a key.", "Look up a key in the store.", "Get the value under a key."),
        {"key": ("The key.", "Name to look up.")},
    ),
    "clock": (
        ("Tell the local time of a city.", "Current time in a city.", "Time of day in a city."),
        {"city": ("Name of the city.", "The city.")},
    ),
    "read_file": (
        ("Read a text file.", "Return the content of a file.", "Read a file and return its text."),
        {"path": ("Path of the file.", "The file to read.")},
    ),
    "list_files": (
        ("List the files in a directory.", "Names of the files in a directory.", "List files."),
        {"directory": ("The directory.", "Directory to list.")},
    ),
    "search": (
        ("Search the notes.", "Find text by a query.", "Search for a phrase."),
        {"query": ("What to look for.", "The query.")},
    ),
}


@dataclass
class Tool:
    """A schema with what the corpus needs to know to ask for the tool in words."""

    schema: Schema
    verb: str = ""
    noun: str = ""
    parameters: dict[str, str] = field(default_factory=dict)  # name -> JSON type, in schema order

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    @property
    def drawn(self) -> bool:
        """Whether the tool was drawn at random (not one of the fixed seven)."""
        return bool(self.verb)

    def order(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments in the order of the schema, so that the right order is predictable."""
        return {name: arguments[name] for name in self.parameters if name in arguments}


def _wrap(
    rng: random.Random, name: str, description: str, properties: dict[str, Any], required: list[str]
) -> Schema:
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "required": required,
    }
    if rng.random() < 0.12:
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def fixed_tool(rng: random.Random, name: str) -> Tool:
    """One of the seven fixed tools, with varied wording."""
    descriptions, parameters = FIXED[name]
    names = list(parameters)
    if rng.random() < 0.15:
        rng.shuffle(names)
    described = rng.random() < 0.25
    properties: dict[str, Any] = {}
    for parameter in names:
        properties[parameter] = {"type": "string"}
        if described:
            properties[parameter]["description"] = rng.choice(parameters[parameter])
    description = descriptions[0] if rng.random() < 0.5 else rng.choice(descriptions)
    schema = _wrap(rng, name, description, properties, list(names))
    return Tool(schema, parameters=dict.fromkeys(names, "string"))


def drawn_tool(rng: random.Random) -> Tool:
    """A tool with a random verb, noun and one to three random parameters."""
    verb = rng.choice(VERBS) if rng.random() < 0.4 else made_up(rng)
    noun = word(rng)
    snake = f"{verb}_{noun}"
    name = rng.choice((snake, snake, f"{noun}_{verb}", f"{verb}{noun.title()}"))
    names: list[str] = []
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        candidate = rng.choice(NOUNS + ADJECTIVES) if rng.random() < 0.5 else made_up(rng)
        if candidate not in names and candidate != noun:
            names.append(candidate)
    described = rng.random() < 0.25
    types: dict[str, str] = {}
    properties: dict[str, Any] = {}
    for parameter in names:
        types[parameter] = rng.choice(
            ("string", "string", "string", "integer", "integer", "number", "boolean")
        )
        properties[parameter] = {"type": types[parameter]}
        if described:
            properties[parameter]["description"] = f"The {parameter} of the {noun}."
    description = rng.choice((f"{verb.capitalize()} the {noun}.", f"{verb.capitalize()} a {noun}."))
    schema = _wrap(rng, name, description, properties, list(names))
    return Tool(schema, verb=verb, noun=noun, parameters=types)


def argument(rng: random.Random, kind: str) -> Any:
    """A random argument of a JSON type."""
    if kind == "integer":
        return number(rng, 4)
    if kind == "number":
        return round(number(rng, 3) + rng.randint(1, 9) / 10, 1)
    if kind == "boolean":
        return rng.random() < 0.5
    return f"{word(rng)} {word(rng)}" if rng.random() < 0.2 else word(rng)


def toolbox(rng: random.Random, low: int = 1, high: int = 7) -> list[Tool]:
    """A random subset of the tools, in random order; four in ten boxes hold drawn tools."""
    names = list(FIXED)
    rng.shuffle(names)
    drawn = rng.randint(1, 3) if rng.random() < 0.45 else 0
    count = max(0 if drawn else 1, rng.randint(low, high) - drawn)
    tools = [fixed_tool(rng, name) for name in names[: min(count, 6 if drawn == 0 else 3)]]
    tools += [drawn_tool(rng) for _ in range(drawn)]
    rng.shuffle(tools)
    return tools
