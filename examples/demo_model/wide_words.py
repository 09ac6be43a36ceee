"""Stock of words and seeded makers of strings the model has never seen.

Copying is the skill that a small model learns last, so most values in the corpus are made up:
words of random syllables, random digits, file names that mix both. A few hundred plain English
words and real cities keep natural prompts within the distribution.
"""

from __future__ import annotations

import random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words(
    "harbor berth price anchor rope mast sail crew cargo ferry dock pier tide wave chart lamp "
    "bell crane boat ship port lock gate buoy reef cabin deck engine fuel water bread apple lemon "
    "garden table chair window door house street bridge tower river lake forest mountain valley "
    "letter parcel ticket invoice order budget report notes plan list menu recipe schedule agenda "
    "summary draft memo log config settings data table index archive backup photo song album "
    "color number code token name title label owner author version status level score weight "
    "height width length depth speed temperature pressure voltage battery sensor motor pump valve "
    "filter total count amount rate tax rent salary cost fee stock room floor seat shelf box crate "
    "pallet truck train plane station airport hotel museum library school office garage market "
    "bakery clinic farm mill mine quarry dog cat horse goat otter heron gull whale seal crab"
)

ADJECTIVES = _words(
    "free full open closed busy ready late early red blue green yellow white black grey small "
    "large old new broken clean dirty cold warm dry wet quiet loud safe empty heavy light north "
    "south east west main spare daily weekly final first last secret public private"
)

VERBS = _words(
    "check update measure scan rotate paint polish load unload weigh inspect repair book cancel "
    "confirm forward archive publish reserve release lift lower fill drain heat cool charge reset "
    "start stop move copy rename count track label sort mix pack ship print translate convert"
)

CITIES = _words(
    "Oslo Lima Paris London Berlin Madrid Rome Vienna Prague Warsaw Dublin Lisbon Athens Helsinki "
    "Stockholm Copenhagen Amsterdam Brussels Zurich Geneva Bergen Hamburg Munich Milan Naples "
    "Tokyo Osaka Kyoto Seoul Beijing Shanghai Delhi Mumbai Bangkok Hanoi Manila Jakarta Singapore "
    "Sydney Melbourne Perth Auckland Cairo Nairobi Lagos Accra Dakar Tunis Rabat Toronto Montreal "
    "Vancouver Boston Chicago Denver Dallas Seattle Miami Havana Bogota Quito Santiago Montevideo "
    "Istanbul Ankara Tbilisi Baku Tehran Dubai Doha Riyadh Karachi Kabul Kathmandu Reykjavik Riga"
)

EXTENSIONS = ("txt", "md", "csv", "log", "json", "dat", "ini", "cfg")
UNICODE = ("café", "naïve", "Zürich", "señor", "Ærø", "smørbrød", "東京", "Москва", "fjörð")

_ONSETS = _words("b c d f g h j k l m n p r s t v w z br ch cl dr fl gr kr pl pr sh sk sl st th tr")
_VOWELS = _words("a e i o u a e i o ai ea ou")
_CODAS = ("",) * 8 + _words("n r l s t m k x nd rk")


def made_up(rng: random.Random, low: int = 2, high: int = 3) -> str:
    """A word of `low` to `high` random syllables; the space is far too large to memorise."""
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        for _ in range(rng.randint(low, high))
    )


def word(rng: random.Random) -> str:
    """A value-like word: two in three times made up, else a plain noun."""
    return rng.choice(NOUNS) if rng.random() < 0.35 else made_up(rng)


def number(rng: random.Random, digits: int = 4) -> int:
    """An integer with a length of 1 to `digits` digits, every length equally likely."""
    length = rng.randint(1, digits)
    return rng.randint(10 ** (length - 1), 10**length - 1)


def key(rng: random.Random) -> str:
    """A key of the store: one word, sometimes two joined, sometimes with digits."""
    shape = rng.random()
    if shape < 0.6:
        return word(rng)
    if shape < 0.8:
        return word(rng) + rng.choice("_-.") + word(rng)
    return f"{word(rng)}{rng.choice(['', '_', '-'])}{number(rng, 3)}"


def value(rng: random.Random) -> str:
    """A short value: digits, a word, a few words, an identifier, now and then unicode."""
    shape = rng.random()
    if shape < 0.4:
        return str(number(rng, 5))
    if shape < 0.65:
        return word(rng)
    if shape < 0.82:
        return f"{word(rng)} {word(rng)}"
    if shape < 0.97:
        return f"{made_up(rng, 1, 2)}-{number(rng, 4)}"
    return rng.choice(UNICODE)


def filename(rng: random.Random) -> str:
    """A file name; half of them end in `.txt`, some sit in a folder."""
    ending = "txt" if rng.random() < 0.6 else rng.choice(EXTENSIONS)
    stem = key(rng).replace(".", "_")
    folder = f"{word(rng)}/" if rng.random() < 0.12 else ""
    return f"{folder}{stem}.{ending}"


def city(rng: random.Random) -> str:
    """A city, one in three made up so that the name has to be copied."""
    return made_up(rng).capitalize() if rng.random() < 0.35 else rng.choice(CITIES)


def sentence(rng: random.Random) -> str:
    """What a file may hold: a short statement without a full stop."""
    noun, other, adjective = word(rng), word(rng), rng.choice(ADJECTIVES)
    count = number(rng, 3)
    return rng.choice(
        (
            f"{noun} {count} is {adjective}",
            f"the {noun} is {adjective}",
            f"{noun}: {value(rng)}",
            f"{noun} {other} {made_up(rng)} {count}",
            f"the {adjective} {noun} belongs to {made_up(rng)}",
            f"{count} {noun} for {made_up(rng)} and {other}",
            f"{noun} {count} leaves at {rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}",
        )
    )
