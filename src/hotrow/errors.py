"""Every error that HotRow raises on purpose.

All derive from one base class. Each subclass also derives from the built-in class that a Python programmer would
expect, so that `except ValueError` keeps working. A message gives the fact, the value and the
cure: ``table 'user' has dim 128 but the checkpoint has 64; pass dim=64 or map it with rename=``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HotRowError(Exception):
    """Base of all errors raised by HotRow."""


class OptionError(HotRowError, ValueError):
    """An option that does not exist, or a value that it cannot take."""


class ClosedError(OptionError):
    """A call on an object that has been closed."""


class DataError(HotRowError, ValueError):
    """Input data that is malformed: names the file, the line and the column where there is one."""


class BatchError(HotRowError, ValueError):
    """A batch with wrong or inconsistent shapes, types or offsets."""


class GradientError(HotRowError, ValueError):
    """A gradient that is NaN or infinite. No row was changed."""


class MemoryBudgetError(HotRowError, MemoryError):
    """Rows would outgrow the memory budget. The table is unchanged and usable."""


class CheckpointError(HotRowError, RuntimeError):
    """A checkpoint that is missing, corrupt, or does not match the model it is loaded into."""


class RepositoryError(CheckpointError):
    """An exported model or version that is missing, corrupt, or not for this release. Names the file."""


class StorageError(HotRowError, OSError):
    """A disk operation failed: the disk is full, read-only or broken. Data committed earlier is unchanged."""


class LateError(StorageError):
    """Rows that did not arrive before the deadline. The same call may succeed later."""


class LeftError(LateError):
    """Rows that were evicted between lookup and read. The same call succeeds if it is repeated at once."""


class RankError(HotRowError, RuntimeError):
    """A rank of a job died, hangs, or cannot be reached. Names the rank."""


class ClusterError(HotRowError, RuntimeError):
    """A Ray cluster cannot be reached, or it lost work that cannot be repeated. Committed data is unchanged."""


class PublishError(HotRowError, RuntimeError):
    """A publication that cannot be created, found or verified. Training and serving continue without it."""


class BusError(HotRowError, OSError):
    """A bus cannot be reached, or it rejected a call. Its contents are unchanged; the same call may succeed later."""


def choices(value: object, options: Iterable[str]) -> str:
    """The tail of an error message about a wrong name: the nearest option first, then all of them.

    >>> choices("adm", ["adam", "sgd"])
    "did you mean 'adam'? Choose one of: adam, sgd"
    """
    names = list(options)
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}Choose one of: {', '.join(names)}"
