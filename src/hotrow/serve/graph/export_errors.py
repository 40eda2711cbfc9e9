"""Why torch.export refused a tower, with the line of the tower's source and the cure.

Depending on the kind of refusal, torch gives the user's frames in the traceback, in the exception's attribute
`real_stack`, or in a "User code" section of the message. `source_line` takes the innermost frame that is neither
torch's nor HotRow's. For a size that cannot be free, `line_of_guard` finds it by a second export.
"""

from __future__ import annotations

import logging
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

_OWN = str(Path(__file__).parent)
_HOTROW = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_STANDARD = sysconfig.get_paths()["stdlib"]
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\w+)')
_GUARD = re.compile(r"eval (?:\[guard suppressed\] )?(.*) \[guard added\]")
_EQUAL_SIZES = re.compile(r"Eq\(s\d+(?: \+ \d+)?, s\d+(?: \+ \d+)?\)")
_CURES = (
    (
        ("Constraints violated", "constraints violated", "was specialized", "ConstraintViolation"),
        "Declare the longest sequence: hr.Table(..., max_length=200), or hr.export(..., max_lengths={'seen': 200}); "
        "and let tables of positions have so many rows",
    ),
    (
        ("data-dependent", "DataDependent", "dynamic control flow", "unbacked", "Eq(u", "Ne(u"),
        "A tower must not branch on the values of tensors, nor take a size from them; use torch.where and masks",
    ),
)
_CURE = (
    "A tower must not branch on the values of tensors, and every size that depends on the batch must come from its "
    "inputs"
)


def is_about_sizes(error: BaseException) -> bool:
    """Whether torch.export could not prove a relation of sizes."""
    return any(mark in f"{type(error).__name__} {error}" for mark in _CURES[0][0])


def describe(tower: nn.Module, error: BaseException, retry: Callable[[], object]) -> str:
    """The message for a tower that torch.export does not take. `retry` exports it once more."""
    text = _reason(str(error).strip() or type(error).__name__)
    line = source_line(error) or (line_of_guard(retry) if is_about_sizes(error) else "")
    kind = f"{type(error).__name__} {error}"
    cure = next((cure for marks, cure in _CURES if any(mark in kind for mark in marks)), _CURE)
    at = f" at {line}" if line else ""
    return f"torch.export cannot take the tower {type(tower).__name__}{at}: {text}. {cure}"


def line_of_guard(export: Callable[[], object]) -> str:
    """The line of the user's code at which an export first limits a size, or an empty string.

    torch tells the sizes in its error, but not the line. It logs each guard when it adds it, and the export runs the
    tower's own Python code, so the line is on the stack at that moment.
    """
    log, found = logging.getLogger("torch.fx.experimental.symbolic_shapes"), _GuardLines()
    before = (log.handlers, log.propagate, log.level)
    log.handlers, log.propagate = [found], False
    log.setLevel(logging.INFO)
    try:
        with suppress(Exception):
            export()
    finally:
        log.handlers, log.propagate, _ = before
        log.setLevel(before[2])
    return found.first


class _GuardLines(logging.Handler):
    """Takes the user's line from the stack of the first guard that is not an equality of two free sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = ""

    def emit(self, record: logging.LogRecord) -> None:
        guard = _GUARD.search(record.getMessage())
        if self.first or guard is None or _EQUAL_SIZES.fullmatch(guard[1]):
            return
        stack = traceback.extract_stack()
        tower = max(
            (at for at, f in enumerate(stack) if f.filename.startswith(_OWN) and f.name == "forward"), default=0
        )
        users = [frame for frame in stack[tower + 1 :] if _is_users(frame.filename)]
        if tower and users:
            frame = users[-1]
            self.first = f"{frame.filename}:{frame.lineno}{_text(frame.filename, frame.lineno or 0)}"


def source_line(error: BaseException) -> str:
    """The file, line and text of the user's code that led to an error, or an empty string."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = [(file, number) for file, number in _frames(error) if _is_users(file)]
        if frames:
            file, number = frames[-1]
            return f"{file}:{number}{_text(file, number)}"
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return ""


def _frames(error: BaseException) -> Iterator[tuple[str, int]]:
    """Frames of an error, outermost first: those of the tower's forward, however torch gives them."""
    for frame in traceback.extract_tb(error.__traceback__):
        yield frame.filename, frame.lineno or 0
    for frame in getattr(error, "real_stack", None) or ():
        yield frame.filename, frame.lineno or 0
    for match in _FRAME.finditer(str(error)):
        yield match.group(1), int(match.group(2))


def _is_users(file: str) -> bool:
    if file.startswith("<"):
        return False
    path = str(Path(file).absolute())
    standard = path.startswith(_STANDARD) and "-packages" not in path
    return not path.startswith((_TORCH, _HOTROW)) and not standard and "/sympy/" not in path


def _text(file: str, number: int) -> str:
    try:
        line = Path(file).read_text(encoding="utf-8").splitlines()[number - 1].strip()
    except (OSError, IndexError, UnicodeDecodeError):
        return ""
    return f" ({line})"


def _reason(text: str) -> str:
    """The first lines of torch's message, without its stacks and its advice to call export otherwise."""
    text = re.split(
        r"\n\s*(?:User code:|Real stack|User Stack|\(snipped|Caused by:|Suggested fixes|The error above)", text
    )[0]
    text = re.sub(r"For more information, run with TORCH_LOGS=\S+", "", text)
    text = re.sub(r"L\['vectors'\]\['([^']*)'\]\.size\(\)\[\d\]", r"length(\1)", text)
    return " ".join(line.strip() for line in text.splitlines() if line.strip())[:600].rstrip(".")
