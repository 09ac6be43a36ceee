"""Words, values, sums, sentences and tool schemas of the narrow corpus, each from a seeded generator.

Copying is what a small model learns last, so more than half of the words are made up of random
syllables: their number is far too large to be memorised.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from chat import Json


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CONSONANTS = "bcdfghjklmnprstvwz"
VOWELS = "aeiou"
WORDS = _words(
    "harbor berth price notes report north ferry anchor cargo total budget invoice summer "
    "winter garden bridge river signal tower market ledger engine window copper silver amber "
    "coral delta ember falcon glacier island jasmine kettle lantern meadow nectar orchard "
    "pepper quartz ribbon saddle timber umber velvet willow yarrow zephyr alpha bravo cedar "
    "dune echo fjord grove hazel iris juniper"
)
CITIES = _words(
    "Oslo Bergen Lisbon Porto Kyoto Lima Quito Cairo Accra Delhi Hanoi Perth Turin Lyon Ghent "
    "Malmö Zürich Kraków Madrid Athens Berlin Dublin Boston Denver Austin Toronto Nairobi Lagos "
    "Tunis Riga Tallinn Vilnius Prague"
)
PARAMETER_KINDS = ("string", "string", "string", "integer")
VERBS = ("get", "find", "set", "open", "check", "make", "send", "count")

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that uses tools when they are needed.",
    "You are an agent. Use the tools to answer.",
    "You help with files, numbers and notes.",
    "Answer briefly. Use a tool when one fits.",
    "You are a careful assistant. Never guess what a tool can tell you.",
)
PLAIN = (
    ("Hello.", "Hello. How can I help?"),
    ("Hi!", "Hello. How can I help?"),
    ("Thanks.", "You are welcome."),
    ("Thank you very much.", "You are welcome."),
    ("Who are you?", "I am a small assistant that uses tools."),
    ("What can you do?", "I can use the tools that you give me."),
    ("Goodbye.", "Goodbye."),
    ("Are you there?", "Yes, I am here."),
    ("That is all.", "Very well."),
    ("Good morning.", "Good morning. How can I help?"),
)
OPERATORS = (
    ("+", ("plus",)),
    ("-", ("minus",)),
    ("*", ("times", "multiplied by")),
    ("/", ("divided by",)),
)

# name -> (descriptions, {parameter: its description}); the first description counts twice
BASE_TOOLS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "calculator": (
        ("Evaluate an arithmetic expression.", "Compute a result.", "Do arithmetic."),
        {"expression": "The expression, such as 2 + 3."},
    ),
    "kv_set": (
        ("Store a value under a key.", "Save a value."),
        {"key": "The key.", "value": "The value to store."},
    ),
    "kv_get": (
        ("Return the value stored under a key.", "Look up a key."),
        {"key": "The key."},
    ),
    "clock": (
        ("Return the local time in a city.", "Tell the time in a city."),
        {"city": "The city."},
    ),
    "read_file": (
        ("Return the content of a text file.", "Read a file."),
        {"path": "The path of the file."},
    ),
    "list_files": (
        ("List the files in a directory.", "Show a directory."),
        {"directory": "The directory."},
    ),
    "search": (
        ("Search the notes for a text.", "Find notes."),
        {"query": "What to look for."},
    ),
}


def made_up(rng: random.Random) -> str:
    """A word of two or three random syllables."""

    def syllable() -> str:
        start = rng.choice(CONSONANTS) + rng.choice(VOWELS)
        return start + (rng.choice(CONSONANTS) if rng.random() < 0.3 else "")

    count = rng.choice((2, 2, 3))
    return "".join(syllable() for _ in range(count))


def word(rng: random.Random) -> str:
    """A plain word, more often a made-up one."""
    return rng.choice(WORDS) if rng.random() < 0.45 else made_up(rng)


def number(rng: random.Random) -> int:
    """A whole number of at most four digits."""
    return rng.randrange(10 ** rng.choice((1, 2, 2, 3, 3, 4)))


def key_name(rng: random.Random) -> str:
    """A key of the store, or the stem of a file name."""
    shape = rng.random()
    if shape < 0.6:
        return word(rng)
    if shape < 0.8:
        return f"{word(rng)}_{word(rng)}"
    return f"{word(rng)}-{number(rng)}"


def file_name(rng: random.Random) -> str:
    """A file name, some of them in a folder."""
    stem = key_name(rng)
    if rng.random() < 0.15:
        stem = f"{word(rng)}/{stem}"
    return f"{stem}.{rng.choice(('txt', 'txt', 'txt', 'md', 'csv', 'log', 'json'))}"


def value_text(rng: random.Random) -> str:
    """A short value: digits, a word, both, or an identifier."""
    shape = rng.random()
    if shape < 0.35:
        return str(number(rng))
    if shape < 0.6:
        return word(rng)
    if shape < 0.8:
        return f"{word(rng)} {number(rng)}"
    if rng.random() < 0.5:
        return f"{rng.choice(CITIES)} {word(rng)}"
    return f"{made_up(rng)}{rng.choice('-_.')}{number(rng)}"


def time_of_day(rng: random.Random) -> str:
    """Hours and minutes."""
    return f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"


def sentence(rng: random.Random) -> str:
    """What a file or a note may say."""
    first, second, count = word(rng), word(rng), number(rng)
    return rng.choice(
        (
            f"{first} {count} is {rng.choice(('free', 'closed', 'open', 'full', 'ready', 'late'))}",
            f"the {first} is in {rng.choice(CITIES)}",
            f"{first} and {second} arrive at {time_of_day(rng)}",
            f"bring {count} {first} to the {second}",
            f"code {first}-{count}",
            f"{first}: {count}, {second}: {number(rng)}",
            f"the {first} costs {count}",
        )
    )


def compute(left: int, operator: str, right: int) -> str:
    """The calculator of the corpus; a quotient that does not come out even has two decimals."""
    if operator == "+":
        return str(left + right)
    if operator == "-":
        return str(left - right)
    if operator == "*":
        return str(left * right)
    even = right and left % right == 0
    return str(left // right) if even else f"{left / max(right, 1):.2f}"


def arithmetic(rng: random.Random) -> tuple[str, str, str]:
    """(what the user says, expression, result)."""
    left, right = number(rng), max(1, number(rng))
    operator, names = rng.choice(OPERATORS)
    expression = f"{left} {operator} {right}"
    said = expression
    shape = rng.random()
    if shape >= 0.85:
        said = expression = expression.replace(" ", "")
    elif shape >= 0.6:
        said = f"{left} {rng.choice(names)} {right}"
    return said, expression, compute(left, operator, right)


def schema(name: str, description: str, parameters: list[tuple[str, str, str | None]]) -> Json:
    """A function schema from (parameter, JSON type, description or None); all are required."""
    properties: Json = {}
    for parameter, kind, text in parameters:
        described = {} if text is None else {"description": text}
        properties[parameter] = {"type": kind, **described}
    function = {
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": [parameter for parameter, _, _ in parameters],
        },
    }
    return {"type": "function", "function": function}


def base_tools(rng: random.Random) -> dict[str, Json]:
    """The seven fixed tools by name; in three dialogues of ten their parameters are described."""
    described = rng.random() < 0.3
    tools: dict[str, Json] = {}
    for name, (descriptions, parameters) in BASE_TOOLS.items():
        listed = [(p, "string", text if described else None) for p, text in parameters.items()]
        tools[name] = schema(name, rng.choice((descriptions[0], *descriptions)), listed)
    return tools


@dataclass(frozen=True)
class DrawnTool:
    """A tool that exists in one dialogue only, and how the user speaks of it."""

    schema: Json
    parameters: list[tuple[str, str]]
    """(name, JSON type), in the order of the schema"""
    phrase: str

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


def drawn_tool(rng: random.Random) -> DrawnTool:
    """A tool with a random name and up to three random parameters."""
    verb = rng.choice((*VERBS, made_up(rng)))
    name = f"{verb}_{word(rng)}" if rng.random() < 0.7 else made_up(rng)
    parameters: list[tuple[str, str]] = []
    used: set[str] = set()
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        parameter = word(rng)
        if parameter not in used:
            used.add(parameter)
            parameters.append((parameter, rng.choice(PARAMETER_KINDS)))
    noun = word(rng)
    listed = [(p, kind, f"The {p}." if rng.random() < 0.3 else None) for p, kind in parameters]
    tool = schema(name, f"{verb.capitalize()} the {noun}.", listed)
    return DrawnTool(tool, parameters, f"{verb} the {noun}")
