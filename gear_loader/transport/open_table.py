"""The table of a query that a requester has opened."""

from __future__ import annotations

import abc

from gear_loader.errors import StaleIndexError
from gear_loader.transport.table_cache import AttachedTable, TableCache

__all__ = ["OpenTable"]


class OpenTable(abc.ABC):
    """Holds the attached table of one query.

    Args:
        name: of the table. tables: of the server.
    """

    def __init__(self, name: str, tables: TableCache) -> None:
        self._name = name
        self._tables = tables
        self._attached: AttachedTable | None = self._attach()

    @abc.abstractmethod
    def _attach(self) -> AttachedTable:
        """Attach the table, and prepare to read it."""

    @property
    def is_attached(self) -> bool:
        """Whether `table` returns without attaching, and so without waiting for a lock."""
        return self._attached is not None

    @property
    def attached(self) -> AttachedTable | None:
        """The attached table if its name still refers to it; else None, and `table` knows what to do."""
        found = self._attached
        return found if found is not None and found.is_current else None

    def release(self) -> None:
        """Detach the table if its name was removed or replaced; the next request attaches again."""
        if self._attached is not None and not self._attached.is_current:
            self._attached = None

    def table(self) -> AttachedTable:
        """Return the attached table; attach it if necessary, which may wait for its lock (see `is_attached`).

        Raises:
            StaleIndexError: the table was removed or replaced. The next call attaches the table of that name.
        """
        attached = self._attached
        if attached is None:
            attached = self._attached = self._attach()
        elif not attached.is_current:
            self._attached = None
            raise StaleIndexError(
                f"Table {self._name!r} has been removed since the first request; slots and generations drawn "
                "before are invalid. Draw again: the next request attaches to the table that has the name then."
            )
        return attached
