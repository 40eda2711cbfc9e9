"""ReadOnlyStore: the writing half of RemoteStore for stores that are only read. Every call raises."""

from __future__ import annotations

from typing import NoReturn

from hotrow.errors import OptionError
from hotrow.tiers.remote.store import Keys, TableFormat, Values


class ReadOnlyStore:
    """The writing methods of RemoteStore, which raise."""

    def create(self, table: str, form: TableFormat) -> None:
        """Raise."""
        _refuse()

    def write(self, table: str, keys: Keys, values: Values, version: int, filling: bool = False) -> int:
        """Raise."""
        _refuse()

    def stamp(self, table: str) -> None:
        """Raise."""
        _refuse()

    def erase(self, table: str, keys: Keys, version: int) -> int:
        """Raise."""
        _refuse()

    def purge(self, table: str, version: int) -> int:
        """Raise."""
        _refuse()

    def begin(self, number: int, after: int) -> bool:
        """Raise."""
        _refuse()

    def finish(self, number: int) -> None:
        """Raise."""
        _refuse()


def _refuse() -> NoReturn:
    raise OptionError(
        "an export and a list of stores are only read; write each Redis by itself: hotrow publish-remote BUS URL"
    )
