"""`hotrow inspect`: what is inside a saved model, without a trainer."""

from __future__ import annotations

import heapq
import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as View

from hotrow.config import format_size
from hotrow.errors import OptionError, choices
from hotrow.train.saving import read_manifest, read_rows, verify


def inspect(path: str | os.PathLike[str], table: str | None, top: int, console: Console) -> None:
    """Print a saved model's tables, or one table's rows and hottest keys."""
    folder = Path(path)
    manifest = read_manifest(folder)
    verify(folder, manifest)
    if table is None:
        _overview(manifest, folder, console)
        return
    by_name = {saved["name"]: saved for saved in manifest["tables"]}
    if table not in by_name:
        raise OptionError(f"{folder} has no table {table!r}; {choices(table, by_name)}")
    _one_table(folder, by_name[table], top, console)


def _overview(manifest: dict[str, Any], folder: Path, console: Console) -> None:
    rows = sum(saved["rows"] for saved in manifest["tables"])
    size = sum(file["bytes"] for file in manifest["files"].values())
    console.print(
        f"[bold]{folder}[/]: {manifest['tower']} after {manifest['step']:,} steps, {rows:,} rows in "
        f"{len(manifest['tables'])} tables, {format_size(size)}; every file's checksum is right",
        highlight=False,
    )
    view = View("table", "features", "optimizer")
    for column in ("dim", "rows", "bytes a row", "memory"):
        view.add_column(column, justify="right")
    for saved in manifest["tables"]:
        width = saved["width"] * 4
        features = ", ".join(f"{f} ({p})" if p != "sum" else f for f, p in saved["features"].items())
        memory = format_size(saved["rows"] * width)
        view.add_row(
            saved["name"],
            features,
            saved["optimizer"]["kind"],
            str(saved["dim"]),
            f"{saved['rows']:,}",
            str(width),
            memory,
        )
    console.print(view)
    for split, figures in (manifest["notes"].get("metrics") or {}).items():
        if figures:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in figures.items() if name != "examples")
            console.print(f"{split}: {shown}", highlight=False)


def _one_table(folder: Path, saved: dict[str, Any], top: int, console: Console) -> None:
    hottest: list[tuple[int, int, int, float]] = []
    norms, counts, last = 0.0, 0, 0
    for rows in read_rows(folder, saved):
        norm = rows.values[:, : saved["dim"]].norm(dim=1)
        norms += float(norm.sum())
        counts += int(rows.counts.sum())
        last = max(last, int(rows.last_steps.max()))
        best = torch.topk(rows.counts, min(top, rows.counts.numel())).indices
        parts = (rows.counts[best], rows.keys[best], rows.last_steps[best], norm[best])
        hottest = heapq.nlargest(top, [*hottest, *zip(*(part.tolist() for part in parts), strict=True)])
    count = max(1, saved["rows"])
    console.print(
        f"[bold]{saved['name']}[/]: {saved['rows']:,} rows of dim {saved['dim']} ({saved['width'] * 4} bytes with "
        f"{saved['optimizer']['kind']} state), seen {counts:,} times, mean norm {norms / count:.4f}, "
        f"last step {last:,}",
        highlight=False,
    )
    view = View(title=f"hottest {len(hottest)} keys")
    for column in ("key", "seen", "share", "last step", "norm"):
        view.add_column(column, justify="right")
    for seen, key, step, norm_value in hottest:
        view.add_row(str(key), f"{seen:,}", f"{seen / max(1, counts):.2%}", f"{step:,}", f"{norm_value:.4f}")
    console.print(view)
