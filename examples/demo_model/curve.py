"""Draw `loss.csv` as a picture: loss of the assistant's own tokens, and the share of them that is wrong."""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 30, 40
LOW, HIGH = 0.001, 10.0
"""Ends of the vertical axis, logarithmic: nats, and share of tokens."""
STAGES = ((9.94, "2: mixed"), (15.20, "3: long rows"), (18.61, "4: facts"))
"""(million tokens at which a stage began, its name)"""
WINDOW = 5
"""Rows of the file that a point averages."""

Row = tuple[float, float, float]
"""(million tokens, loss of own tokens in nats, share of own tokens that is wrong)"""


def read(path: Path) -> list[Row]:
    """Rows of the file, averaged over WINDOW."""
    with path.open(encoding="utf-8") as file:
        cells = [[float(cell) for cell in row] for row in csv.reader(file)]
    rows = [(row[1] / 1e6, row[3], 1.0 - row[4]) for row in cells]
    return [
        (part[-1][0], sum(r[1] for r in part) / len(part), sum(r[2] for r in part) / len(part))
        for part in (rows[i : i + WINDOW] for i in range(0, len(rows), WINDOW))
    ]


def draw(rows: list[Row]) -> str:
    """The SVG text."""
    most = math.ceil(rows[-1][0])

    def x(tokens: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * tokens / most

    def y(value: float) -> float:
        share = math.log(max(LOW, value) / LOW) / math.log(HIGH / LOW)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    lines: list[str] = []
    for power in range(round(math.log10(LOW)), round(math.log10(HIGH)) + 1):
        at = y(10.0**power)
        lines.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        label = f"{10.0**power:g}"
        lines.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for tokens in range(0, most + 1, 5):
        lines.append(
            f'<text x="{x(tokens):.1f}" y="{HEIGHT - 18}" text-anchor="middle">{tokens} M</text>'
        )
    for tokens, name in STAGES:
        if tokens < most:
            lines.append(
                f'<path d="M{x(tokens):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#999" stroke-dasharray="4"/>'
            )
            lines.append(f'<text x="{x(tokens) + 4:.1f}" y="{TOP + 12}" fill="#666">{name}</text>')
    for column, colour in ((1, "#1f5fa8"), (2, "#b5482a")):
        points = " ".join(f"{x(row[0]):.1f},{y(row[column]):.1f}" for row in rows)
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
    lines.append(
        f'<text x="{LEFT}" y="18" fill="#1f5fa8">loss of the assistant\'s tokens, nats</text>'
    )
    lines.append(f'<text x="{LEFT + 260}" y="18" fill="#b5482a">share of them that is wrong</text>')
    lines.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">tokens seen</text>')
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n'
        f"{body}\n</svg>\n"
    )


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--curve", type=Path, default=here / "loss.csv")
    parser.add_argument("--out", type=Path, default=here / "loss.svg")
    options = parser.parse_args()
    options.out.write_text(draw(read(options.curve)), encoding="utf-8")


if __name__ == "__main__":
    main()
