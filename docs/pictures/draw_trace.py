"""Draws a part of a trace as an SVG: a line for each track and a curve for each counter, rank after rank.

hotrow train job.toml --ranks 2 --trace run.json
python docs/pictures/draw_trace.py run.json docs/pictures/trace.svg --begin 1.2 --seconds 0.4

Tracks and curves on which nothing happened meanwhile are left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

LEFT, WIDTH, LINE, CURVE, GAP = 150, 900, 22, 34, 6
COLOURS = ["#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#79706e"]
ORDER = ["read", "route", "exchange route", "fetch", "stage", "compute (fetch)", "compute", "exchange rows"]
STYLE = "text{font:12px sans-serif;fill:#333}.small{font-size:10px;fill:#fff}.axis{font-size:10px;fill:#777}"

Event = dict[str, Any]


def events(path: Path) -> list[Event]:
    """The events of a trace, whether it was ended or not."""
    text = path.read_text().rstrip().rstrip(",")
    return list(json.loads(text if text.endswith("]") else text + "]"))


def draw(found: list[Event], begin: float, seconds: float) -> str:
    """What happened from `begin` on, for so long."""
    parts, y = [], 20
    for process in sorted({event["pid"] for event in found}):
        of_process = [event for event in found if event["pid"] == process]
        title = next(event["args"]["name"] for event in of_process if event["name"] == "process_name")
        parts.append(f'<text x="4" y="{y + 14}" font-weight="bold">{title}</text>')
        y += 20
        for part in (_tracks, _curves):
            drawn, y = part(of_process, begin, seconds, y)
            parts += drawn
        y += 2 * GAP
    for tick in range(5):
        x = LEFT + WIDTH * tick / 4
        where = f'x="{x:.0f}" y="12" text-anchor="{"start" if tick < 4 else "end"}"'
        parts.append(f'<text class="axis" {where}>{1000 * seconds * tick / 4:.0f} ms</text>')
    size = f'viewBox="0 0 {LEFT + WIDTH + 40} {y + 10}" width="{LEFT + WIDTH + 40}" height="{y + 10}"'
    paper = '<rect width="100%" height="100%" fill="#fff"/>'
    inner = "\n".join([f"<style>{STYLE}</style>", paper, *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{inner}\n</svg>\n'


def _tracks(found: list[Event], begin: float, seconds: float, y: int) -> tuple[list[str], int]:
    """The spans of one process; and how far down they go."""
    scale, parts = WIDTH / (seconds * 1e6), []
    names = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    tracks = sorted(names.values(), key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    for track in tracks:
        spans = []
        for event in found:
            if event["ph"] == "X" and names[event["tid"]] == track:
                start = (event["ts"] - begin * 1e6) * scale
                left, right = max(0.0, start), min(float(WIDTH), start + event["dur"] * scale)
                if right - left >= 0.3:
                    spans.append((left, right, event["name"]))
        if not spans:
            continue
        colour = COLOURS[tracks.index(track) % len(COLOURS)]
        parts.append(f'<text x="14" y="{y + 14}">{track}</text>')
        for left, right, name in spans:
            parts.append(
                f'<rect x="{LEFT + left:.1f}" y="{y}" width="{right - left:.1f}" height="{LINE - 4}" rx="2" '
                f'fill="{colour}"/>'
            )
            if right - left > 7 * len(name):
                parts.append(f'<text class="small" x="{LEFT + left + 4:.1f}" y="{y + 13}">{name}</text>')
        y += LINE
    return parts, y


def _curves(found: list[Event], begin: float, seconds: float, y: int) -> tuple[list[str], int]:
    """The counters of one process; and how far down they go."""
    parts = []
    for name in sorted({event["name"] for event in found if event["ph"] == "C"}):
        points = [(e["ts"] / 1e6 - begin, next(iter(e["args"].values()))) for e in found if e["name"] == name]
        # A point says what was since the one before it.
        steps = [(max(0.0, a), min(seconds, b), value) for (a, _), (b, value) in itertools.pairwise(points)]
        inside = [(at, value) for a, b, value in steps if a < b for at in (a, b)]
        top = max((value for _, value in inside), default=0)
        if not top:
            continue
        y += GAP
        unit = "" if "used" in name else " /s"
        parts.append(
            f'<text x="14" y="{y + 14}">{name}</text><text class="axis" x="14" y="{y + 27}">{top:,.0f}{unit}</text>'
        )
        line = " ".join(
            f"{LEFT + at / seconds * WIDTH:.1f},{y + CURVE - value / top * (CURVE - 4):.1f}" for at, value in inside
        )
        parts.append(f'<polyline points="{line}" fill="none" stroke="#555"/>')
        y += CURVE
    return parts, y


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--begin", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=0.5)
    options = parser.parse_args()
    options.picture.write_text(draw(events(options.trace), options.begin, options.seconds))


if __name__ == "__main__":
    main()
