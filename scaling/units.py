"""Quantities as people write them: 400M, 1.5B, 2GiB, 15ms, 1e20, 100h, 32k."""

from __future__ import annotations

import re

# What one unit is worth, by the kind of quantity. Values inside the program are counts, bytes, seconds, FLOPs, hours.
COUNT = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
BYTES = {"": 1.0, "B": 1.0} | {
    prefix + suffix: float(base**power)
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", 1)
}
SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
FLOPS = {"": 1.0, "FLOPs": 1.0} | {f"{p}FLOPs": 1000.0**power for power, p in enumerate("KMGTPEZY", 1)}
HOURS = {"": 1.0, "h": 1.0, "hours": 1.0, "min": 1 / 60, "days": 24.0}
KINDS = {"count": COUNT, "bytes": BYTES, "seconds": SECONDS, "FLOPs": FLOPS, "hours": HOURS}
EXAMPLES = {"count": "400M", "bytes": "2GiB", "seconds": "15ms", "FLOPs": "1e20", "hours": "100h"}

NUMBER = re.compile(r"\s*([0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([^\s\d]*)\s*")


class UnitError(ValueError):
    """A quantity that cannot be read: one line with the text and what is allowed."""


def parse_quantity(text: str, kind: str) -> float:
    """The value in the kind's own unit; for a kind not in KINDS a plain number, followed by that kind or by nothing.

    Upper and lower case mean the same. A time in seconds always needs its unit; a bare number of bytes is bytes, of
    FLOPs FLOPs, of hours hours. Raises UnitError.
    """
    units = KINDS.get(kind, {"": 1.0, kind: 1.0})
    match = NUMBER.fullmatch(text)
    listed = ", ".join(u for u in units if u)
    if not match:
        raise UnitError(f"{text.strip()!r} is not a quantity; write a positive number and a unit of {kind} ({listed})")
    number, unit = match.groups()
    # The Greek mu of some keyboards is another character than the micro sign.
    folded = {u.lower(): worth for u, worth in units.items()}
    worth = folded.get(unit.replace("μ", "µ").lower())
    if worth is None:
        found = f"unit {unit!r}" if unit else "no unit"
        example = f", for example {EXAMPLES[kind]}" if kind in EXAMPLES else ""
        raise UnitError(f"{text.strip()!r} has {found}; {kind} take {listed}{example}")
    value = float(re.sub("[_,]", "", number)) * worth
    if not 0.0 < value < float("inf"):
        raise UnitError(f"{text.strip()!r} must be positive and finite")
    return value


def parse_context(text: str | int) -> int:
    """Tokens of context: 4096, or 32k and 1M in powers of 1024, as context lengths are named. Raises UnitError."""
    match = re.fullmatch(r"\s*([0-9]+)\s*([kKmM]?)\s*", str(text))
    value = int(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()] if match else 0
    if value < 1:
        raise UnitError(f"{str(text).strip()!r} is not a context length; write tokens such as 4096, 32k or 1M")
    return value


def counted(number: int, noun: str, several: str = "") -> str:
    """1 layer, 2 layers, 1,200 layers; `several` where it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else several or noun + 's'}"


def format_quantity(value: float, kind: str) -> str:
    """The value in its largest unit that leaves at least 1, to three digits: 399M, 1.98 GiB, 14.2 ms.

    FLOPs in powers of ten, and hours in hours, as they are usually given.
    """
    units = KINDS.get(kind)
    if kind == "FLOPs":
        return f"{value:.3g} FLOPs"
    if kind == "hours":
        return f"{value:.3g} h" if abs(value) < 999.5 else f"{value:,.0f} h"
    if units is None:
        return f"{value:.4g} {kind}"
    # Bytes are shown in powers of 1024, and each size has one name.
    hidden = {"", "µs", *(f"{p}B" for p in "KMGT")} if kind != "count" else set()
    shown = {u: worth for u, worth in units.items() if u not in hidden}
    # Judged after rounding: 999.7M is 1B and not 1000M.
    fitting = [u for u, w in shown.items() if abs(float(f"{value / w:.3g}")) >= 1] or [
        min(shown, key=lambda u: shown[u])
    ]
    unit = max(fitting, key=lambda u: shown[u])
    number = float(f"{value / shown[unit]:.3g}")
    text = f"{number:.0f}" if 1000 <= abs(number) < 1e6 else f"{number:.3g}"
    return f"{text}{'' if kind == 'count' else ' '}{unit}".rstrip()
