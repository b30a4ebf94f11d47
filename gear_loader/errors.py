"""Every error that Gear Loader raises on purpose.

Each class also derives from the built-in exception a caller would expect (`ValueError`, `KeyError`,
`TimeoutError`, ...), so that code which knows nothing of this library still catches it. A message
says what was received, what was expected and what to do.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CorruptTableError",
    "GearError",
    "GpuError",
    "HandshakeError",
    "LockTimeoutError",
    "PeerTimeoutError",
    "PriorityError",
    "PrivateTableError",
    "RankError",
    "RateLimitError",
    "RegionError",
    "SchemaError",
    "SourceError",
    "StaleIndexError",
    "TableClosedError",
    "TableEmptyError",
    "TableFullError",
    "TransportError",
]


class GearError(Exception):
    """Base of all errors of this library."""


class SchemaError(GearError, ValueError):
    """Columns, windows or rows that do not fit the schema; nothing was changed."""


class RegionError(GearError, OSError):
    """A region cannot be created or attached: it exists, is missing, too large, or no table."""


class CorruptTableError(RegionError):
    """The index of a table holds an impossible value; the message names the table and the value."""


class TableFullError(GearError):
    """There is no room and the policy does not allow making any; nothing was changed."""


class TableEmptyError(GearError):
    """Something was to be drawn from a table that holds no trajectory."""


class TableClosedError(GearError, ValueError):
    """The table was used after `Table.close`."""


class PriorityError(GearError, ValueError):
    """Priorities that are no priorities, or a table in which none is positive; nothing was changed."""


class PrivateTableError(GearError, ValueError):
    """A table without a name was to be used by another process, or by a child forked after it was pinned."""


class StaleIndexError(GearError, IndexError):
    """An index that names no live trajectory (never used, removed or evicted)."""


class LockTimeoutError(GearError, TimeoutError):
    """A lock or a reader was waited for until the deadline."""


class RateLimitError(GearError, TimeoutError):
    """The table's rate limiter was waited for until the deadline; nothing was changed."""


class SourceError(GearError, ValueError):
    """A data source is damaged or does not fit; nothing was added."""


class CheckpointError(GearError, OSError):
    """A checkpoint that cannot be written, or that is damaged, of another version or of another schema.

    What was to be written did not change the checkpoint that was there before; what was to be loaded left no table.
    """


class TransportError(GearError, ConnectionError):
    """Another node did not give what it was asked for; the message names it, what was asked, and what to do."""


class HandshakeError(TransportError):
    """Another node was refused, or refuses this one: another version, schema or secret. Both sides are named."""


class PeerTimeoutError(TransportError, TimeoutError):
    """Another node was waited for until the deadline."""


class RankError(GearError, RuntimeError):
    """Another rank has failed, or was waited for until the deadline; the message names it."""


class GpuError(GearError, RuntimeError):
    """The GPU failed while it read a table; the process has to be started again."""
