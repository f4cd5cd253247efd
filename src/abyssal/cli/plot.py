"""Memory against context length as an SVG, both axes in powers of two."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 80, 230, 40, 60
COLOURS = (
    "#0b6e99",
    "#d9730d",
    "#448361",
    "#9f6b53",
    "#c14c8a",
    "#787774",
    "#9065b0",
    "#cb912f",
    "#d44c47",
    "#2b59c3",
    "#5f7d1f",
)


@dataclass(frozen=True, slots=True)
class Line:
    """One curve; y in bytes at each x in tokens."""

    label: str
    points: list[tuple[int, float]]
    dashed: bool = False


def draw(title: str, lines: list[Line]) -> str:
    """An SVG document with all `lines`, each labelled in a legend."""
    xs = [math.log2(x) for line in lines for x, _ in line.points]
    ys = [math.log2(y) for line in lines for _, y in line.points]
    x_low, x_high, y_low, y_high = min(xs), max(xs), math.floor(min(ys)), math.ceil(max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        """Pixels of a point given by its logarithms."""
        right, down = (x - x_low) / max(x_high - x_low, 1), (y_high - y) / max(y_high - y_low, 1)
        return LEFT + right * (WIDTH - LEFT - RIGHT), TOP + down * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for exponent in range(math.ceil(x_low), math.floor(x_high) + 1):
        x, bottom = place(exponent, y_low)
        parts.append(f'<path d="M{x:.1f} {TOP}V{bottom:.1f}" stroke="#eee"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18:.1f}" text-anchor="middle">{_short(2**exponent, 1024, " kM")}</text>')
    for exponent in range(y_low, y_high + 1, 2):
        left, y = place(x_low, exponent)
        parts.append(f'<path d="M{left:.1f} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{_short(2.0**exponent, 1024, " KMGT")}iB</text>'
        )
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 14}" text-anchor="middle">tokens of one sequence</text>')
    for index, line in enumerate(lines):
        style = f'stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="2" fill="none"' + ' stroke-dasharray="6 4"' * line.dashed
        pixels = " ".join("{:.1f},{:.1f}".format(*place(math.log2(x), math.log2(y))) for x, y in line.points)
        parts.append(f'<polyline points="{pixels}" {style}/>')
        y = TOP + 10 + 20 * index
        parts.append(f'<path d="M{WIDTH - RIGHT + 12} {y}h24" {style}/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 42}" y="{y + 4}">{escape(line.label)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _short(value: float, base: int, units: str) -> str:
    """`value` with a unit: 262144 -> 256k."""
    power = max(0, min(int(math.log(value, base) + 1e-9), len(units) - 1)) if value >= 1 else 0
    return f"{value / base**power:g}{units[power].strip()}"
