"""The C++ core's exceptions, as HotRow's."""

from __future__ import annotations

from hotrow import _core
from hotrow.errors import BatchError, CheckpointError, GradientError, MemoryBudgetError, StorageError


class core_errors:  # noqa: N801 - it reads as a verb, and a generator would cost a microsecond a call
    """The core's exceptions as HotRow's, inside a `with`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        for core_kind, ours in _ERRORS:
            if isinstance(error, core_kind):
                raise ours(str(error)) from None


_ERRORS: list[tuple[type[BaseException], type[Exception]]] = [
    (_core.BudgetExceeded, MemoryBudgetError),
    (_core.CorruptFile, CheckpointError),
    (_core.IoError, StorageError),
    (_core.GradientNotFinite, GradientError),
    (ValueError, BatchError),
]
