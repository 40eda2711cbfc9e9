"""Draws a part of a trace as an SVG: a line for each track, a curve for each counter.

hotrow train job.toml --trace run.json
python docs/pictures/draw_trace.py run.json docs/pictures/trace.svg --begin 1.2 --seconds 0.4
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

LEFT, WIDTH, LINE, CURVE, GAP = 150, 900, 26, 34, 6
COLOURS = ["#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2"]
STYLE = "text{font:12px sans-serif;fill:#333}.small{font-size:10px;fill:#fff}.axis{font-size:10px;fill:#777}"


def events(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, whether it was ended or not."""
    text = path.read_text().rstrip().rstrip(",")
    return list(json.loads(text if text.endswith("]") else text + "]"))


def draw(found: list[dict[str, Any]], begin: float, seconds: float) -> str:
    """What happened from `begin` on, for so long."""
    scale = WIDTH / (seconds * 1e6)
    names = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    order = {name: i for i, name in enumerate(["read", "route", "fetch", "stage", "compute (fetch)", "compute"])}
    tracks = sorted(names.values(), key=lambda name: order.get(name, 99))
    parts, y = [], 20
    for number, track in enumerate(tracks):
        parts.append(f'<text x="4" y="{y + 17}">{track}</text>')
        for event in found:
            if event["ph"] != "X" or names[event["tid"]] != track:
                continue
            start, length = (event["ts"] - begin * 1e6) * scale, event["dur"] * scale
            start, end = max(0.0, start), min(float(WIDTH), start + length)
            if end - start < 0.3:
                continue
            colour = COLOURS[number % len(COLOURS)]
            parts.append(
                f'<rect x="{LEFT + start:.1f}" y="{y}" width="{end - start:.1f}" height="{LINE - 4}" rx="2" '
                f'fill="{colour}"/>'
            )
            if end - start > 50:
                parts.append(f'<text class="small" x="{LEFT + start + 4:.1f}" y="{y + 15}">{event["name"]}</text>')
        y += LINE
    for name in sorted({event["name"] for event in found if event["ph"] == "C"}):
        y += GAP
        points = [(e["ts"] / 1e6 - begin, next(iter(e["args"].values()))) for e in found if e["name"] == name]
        inside = [(at, value) for at, value in points if 0 <= at <= seconds]
        top = max((value for _, value in inside), default=1) or 1
        unit = "" if "used" in name else " /s"
        parts.append(
            f'<text x="4" y="{y + 14}">{name}</text><text class="axis" x="4" y="{y + 27}">{top:,.0f}{unit}</text>'
        )
        line = " ".join(
            f"{LEFT + at * 1e6 * scale:.1f},{y + CURVE - value / top * (CURVE - 4):.1f}" for at, value in inside
        )
        parts.append(f'<polyline points="{line}" fill="none" stroke="#555"/>')
        y += CURVE
    for tick in range(5):
        x = LEFT + WIDTH * tick / 4
        parts.append(f'<text class="axis" x="{x:.0f}" y="12">{1000 * seconds * tick / 4:.0f} ms</text>')
    size = f'viewBox="0 0 {LEFT + WIDTH + 40} {y + 10}" width="{LEFT + WIDTH + 40}" height="{y + 10}"'
    paper = '<rect width="100%" height="100%" fill="#fff"/>'
    inner = "\n".join([f"<style>{STYLE}</style>", paper, *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{inner}\n</svg>\n'


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
