"""Designs of the front as points in SVG: loss against what they cost. Read by colour-blind people by their shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from depthlaw.platform.palette import COLOURS, MARKERS
from depthlaw.scaling.answer import Candidate
from depthlaw.scaling.units import format_quantity

WIDTH, HEIGHT = 380, 270
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 12, 44
RADIUS = 4.5
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
    x = _Log(min(costs), max(costs), LEFT, WIDTH - RIGHT)
    y = _Linear(min(c.loss for c in points), max(c.loss for c in points), HEIGHT - BOTTOM, TOP)
    middle, foot = (LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM
    drawn = []
    for tick in x.ticks(1024.0 if unit == "bytes" else 1000.0):
        at, label = x.place(tick), format_quantity(tick, unit)
        drawn.append(f'<path d="M{at:.1f},{TOP}V{foot}" class="grid"/>')
        drawn.append(f'<text x="{at:.1f}" y="{foot + 16}" class="middle">{label}</text>')
    for tick in y.ticks():
        at = y.place(tick)
        drawn.append(f'<path d="M{LEFT},{at:.1f}H{WIDTH - RIGHT}" class="grid"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" class="end">{tick:.{y.digits}f}</text>')
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


class _Linear:
    """A scale from `low` to `high` onto the pixels `start` to `end`, with room at both ends."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        self.low, self.high, self.start, self.end = low - room, high + room, start, end
        raw = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(raw))
        self.step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
        self.digits = max(0, -math.floor(math.log10(self.step) + 1e-9))

    def place(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        return [k * self.step for k in range(math.ceil(self.low / self.step), math.floor(self.high / self.step) + 1)]


class _Log:
    """The same in the logarithm; low and high positive."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.inner = _Linear(math.log(low), math.log(high), start, end)

    def place(self, value: float) -> float:
        return self.inner.place(math.log(value))

    def ticks(self, base: float) -> list[float]:
        """Round values, four or so: 1, 2, 5, 10 ... of each power of the base."""
        low, high = math.exp(self.inner.low), math.exp(self.inner.high)
        first = base ** math.floor(math.log(low, base))
        rounds = [first * base**p * m for p in range(5) for m in (1, 2, 5, 10, 20, 50, 100, 200, 500)]
        inside = [value for value in rounds if low <= value <= high]
        every = -(-len(inside) // 5)
        return inside[:: max(1, every)] or [math.sqrt(low * high)]
