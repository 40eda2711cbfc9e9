"""Writes figures to TensorBoard, if `log_dir` was given."""

from __future__ import annotations

from typing import Any

from hotrow.errors import OptionError


def open_writer(log_dir: str | None) -> Any:
    """A SummaryWriter for `log_dir`, or None without one."""
    if log_dir is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise OptionError(f"log_dir={log_dir!r} needs TensorBoard: pip install hotrow[tensorboard]") from None
    return SummaryWriter(log_dir)  # type: ignore[no-untyped-call]


def log(writer: Any, group: str, figures: dict[str, float], step: int) -> None:
    """Write some figures of a step; does nothing without a writer."""
    if writer is not None:
        for name, value in figures.items():
            writer.add_scalar(f"{group}/{name}", value, step)
