"""Designs of the front as points in SVG: loss against what they cost, both even in the logarithm. Each topology has a
shape of its own besides its colour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from depthlaw.platform.palette import COLOURS, MARKERS
from depthlaw.scaling.answer import Candidate
from depthlaw.scaling.units import format_quantity

WIDTH, HEIGHT = 380, 270
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 12, 44
LABEL = 42  # pixels that the label of a tick takes
RADIUS = 4.5
MOST_TICKS = 5
NARROW = 6.0  # a scale whose ends are within this factor has even steps
# Corners of a marker and the turn of the first, in degrees clockwise from the top.
POLYGONS = {
    "s": (4, 45),
    "^": (3, 0),
    "D": (4, 0),
    "v": (3, 180),
    "<": (3, 270),
    ">": (3, 90),
    "p": (5, 0),
    "h": (6, 0),
}


def marker(kind: int, x: float, y: float, title: str = "") -> str:
    """The sign of the kind-th topology at a point."""
    shape = MARKERS[kind % len(MARKERS)]
    colour = COLOURS[kind % len(COLOURS)].replace("#000000", "currentColor")
    if shape == "o":
        half = f"a{RADIUS},{RADIUS} 0 1 0"
        path = f"M{x - RADIUS:.1f},{y:.1f}{half} {2 * RADIUS},0{half} {-2 * RADIUS},0z"
    elif shape in "PX":
        path = _cross(x, y, 45 if shape == "X" else 0)
    else:
        corners, turn = POLYGONS[shape]
        path = _ring(x, y, [(1.2 * RADIUS, turn + 360 * k / corners) for k in range(corners)])
    return f'<path d="{path}" fill="{colour}"><title>{escape(title)}</title></path>'


def _ring(x: float, y: float, polar: Sequence[tuple[float, float]]) -> str:
    points = ((x + r * math.sin(math.radians(a)), y - r * math.cos(math.radians(a))) for r, a in polar)
    return "M" + "L".join(f"{px:.1f},{py:.1f}" for px, py in points) + "z"


def _cross(x: float, y: float, turn: int) -> str:
    arm, inner = math.hypot(1.2, 0.4) * RADIUS, math.hypot(0.4, 0.4) * RADIUS
    half = math.degrees(math.atan2(0.4, 1.2))
    turns = [turn + 90 * k for k in range(4)]
    return _ring(x, y, [p for a in turns for p in ((arm, a - half), (arm, a + half), (inner, a + 45))])


def chart(
    points: Sequence[Candidate], best: Candidate, topologies: Sequence[str], value: str, unit: str, name: str
) -> str:
    """Loss over one property `value` of the designs, which has this unit and, on the axis, this name."""
    costs = [getattr(c, value) for c in points]
    x = _Scale(min(costs), max(costs), LEFT, WIDTH - RIGHT)
    y = _Scale(min(c.loss for c in points), max(c.loss for c in points), HEIGHT - BOTTOM, TOP)
    middle, foot = (LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM
    drawn = []
    written = -LABEL
    for tick in x.ticks(1024.0 if unit == "bytes" else 1000.0):
        at, label = x.place(tick), format_quantity(tick, unit)
        drawn.append(f'<path d="M{at:.1f},{TOP}V{foot}" class="grid"/>')
        if at - written >= LABEL and at <= WIDTH - LABEL / 2:
            written = at
            drawn.append(f'<text x="{at:.1f}" y="{foot + 16}" class="middle">{label}</text>')
    for tick in y.ticks(1000.0):
        at = y.place(tick)
        drawn.append(f'<path d="M{LEFT},{at:.1f}H{WIDTH - RIGHT}" class="grid"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" class="end">{tick:.4g}</text>')
    for c, cost in zip(points, costs, strict=True):
        title = f"{c.topology}, L {c.n_layers}, d {c.d_model}: {c.loss:.4f}, {format_quantity(cost, unit)}"
        drawn.append(marker(topologies.index(c.topology), x.place(cost), y.place(c.loss), title))
    ring = f'cx="{x.place(getattr(best, value)):.1f}" cy="{y.place(best.loss):.1f}" r="{2 * RADIUS}"'
    turned = f'transform="translate(12 {foot / 2}) rotate(-90)"'
    label = f"{len(points)} designs of the front, loss against {name}; the table below has the same figures"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(drawn)}'
        f'<circle {ring} class="best"/><text x="{middle}" y="{HEIGHT - 8}" class="middle">{escape(name)}</text>'
        f'<text {turned} class="middle">loss, nats a token</text></svg>'
    )


class _Scale:
    """From `low` to `high`, both positive, onto the pixels `start` to `end`, even in the logarithm, with some room."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        room = (high / low) ** 0.05 if high > low else 1.1
        self.low, self.high, self.start, self.end = low / room, high * room, start, end

    def place(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, base: float) -> list[float]:
        """A few round values, in powers of the base: 1, 2, 5, 10 ... over a wide range, even steps over less."""
        if self.high < NARROW * self.low:
            unit = base ** math.floor(math.log(self.low, base))
            low, high = self.low / unit, self.high / unit
            power = 10.0 ** math.floor(math.log10(high - low))
            step = next(m * power for m in (0.2, 0.5, 1, 2, 5, 10) if (high - low) / (m * power) <= MOST_TICKS)
            return [k * step * unit for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
        first = base ** math.floor(math.log(self.low, base))
        rounds = [first * base**p * m for p in range(5) for m in (1, 2, 5, 10, 20, 50, 100, 200, 500)]
        inside = [value for value in rounds if self.low <= value <= self.high]
        return inside[:: -(-len(inside) // MOST_TICKS)]
