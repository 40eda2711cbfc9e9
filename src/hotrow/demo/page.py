"""The demo's report: one HTML file with its plots as inline SVG, which any browser opens from disk. No scripts.

A plot is a list of lines (name, colour, points); axis ticks are round numbers. Colours have enough contrast on white,
lines are labelled at their ends, and every plot has a description in words.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 230, 56, 96, 16, 34
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2530; max-width: 1180px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.05em; margin: 0 0 .2em } p { margin: .2em 0 1em; color: #4a5563 }
.cards { display: flex; flex-wrap: wrap; gap: .8em; margin: 1.2em 0 }
.card { border: 1px solid #d8dee6; border-radius: 8px; padding: .6em 1em } .card b { display: block; font-size: 1.35em }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(520px, 1fr)); gap: 1.6em }
svg text { font: 11px system-ui, sans-serif; fill: #4a5563 } svg { width: 100%; height: auto }
table { border-collapse: collapse } td { padding: .15em 1em .15em 0 }
"""


@dataclass(frozen=True)
class Line:
    """A curve: a name, a colour, points (x, y)."""

    name: str
    color: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Plot:
    """A titled plot; `text` describes it."""

    title: str
    text: str
    lines: Sequence[Line]
    x: str = "seconds"
    floor: float | None = None  # the y axis begins here


def page(title: str, lead: str, cards: Sequence[tuple[str, str]], plots: Sequence[Plot]) -> str:
    """The whole file."""
    shown = "".join(f'<div class="card">{html.escape(name)}<b>{html.escape(value)}</b></div>' for name, value in cards)
    drawn = "".join(
        f"<section><h2>{html.escape(plot.title)}</h2><p>{html.escape(plot.text)}</p>{svg(plot)}</section>"
        for plot in plots
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1><p>{html.escape(lead)}</p>"
        f'<div class="cards">{shown}</div><div class="plots">{drawn}</div></body></html>\n'
    )


def svg(plot: Plot) -> str:
    """One plot."""
    lines = [Line(one.name, one.color, [p for p in one.points if math.isfinite(p[1])]) for one in plot.lines]
    points = [point for line in lines for point in line.points]
    if not points:
        return "<p>nothing was measured</p>"
    xs = ticks(min(x for x, _ in points), max(x for x, _ in points))
    low = min(y for _, y in points) if plot.floor is None else plot.floor
    ys = ticks(low, max(y for _, y in points))
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - xs[0]) / (xs[-1] - xs[0])
        up = (min(max(y, ys[0]), ys[-1]) - ys[0]) / (ys[-1] - ys[0])
        return LEFT + wide * across, TOP + high * (1 - up)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(plot.title)}">']
    for y in ys:
        _, down = at(xs[0], y)
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + wide}" y1="{down:.1f}" y2="{down:.1f}" stroke="#e6eaef"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{number(y)}</text>')
    for x in xs:
        across, _ = at(x, ys[0])
        parts.append(f'<text x="{across:.1f}" y="{HEIGHT - 16}" text-anchor="middle">{number(x)}</text>')
    parts.append(f'<text x="{LEFT + wide / 2}" y="{HEIGHT - 2}" text-anchor="middle">{html.escape(plot.x)}</text>')
    taken: list[float] = []
    for line in lines:
        if not line.points:
            continue
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (at(*point) for point in line.points))
        parts.append(f'<polyline fill="none" stroke="{line.color}" stroke-width="2" points="{path}"/>')
        _, down = at(*line.points[-1])
        while any(abs(down - other) < 12 for other in taken):
            down += 12
        taken.append(down)
        name = html.escape(line.name)
        parts.append(
            f'<text x="{LEFT + wide + 6}" y="{down + 4:.1f}" style="fill: {line.color}; font-weight: 600">{name}</text>'
        )
    return "".join([*parts, "</svg>"])


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`.

    >>> ticks(0.68, 0.77)
    [0.68, 0.7, 0.72, 0.74, 0.76, 0.78]
    """
    span = (high - low) or max(abs(high), 1.0)
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil((low + span) / step - 1e-9)
    return [round(step * i, 10) for i in range(first, last + 1)]


def number(value: float) -> str:
    """A tick's label.

    >>> number(25000.0), number(0.72)
    ('25k', '0.72')
    """
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:g}"
