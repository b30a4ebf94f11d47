"""All errors raised by Gear Loader.

Each class also derives from the built-in exception that a caller would expect (`ValueError`, `TimeoutError`, ...).
Messages say what was received, what was expected and what to do.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CodecError",
    "CorruptTableError",
    "FilledError",
    "GearError",
    "GpuError",
    "HandshakeError",
    "LockTimeoutError",
    "OverloadError",
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
    "UnknownNodeError",
]


class GearError(Exception):
    """Base class of all errors of this library."""


class SchemaError(GearError, ValueError):
    """Columns, windows or rows that do not fit the schema; nothing was changed."""


class RegionError(GearError, OSError):
    """A region cannot be created or attached: it exists, is missing, is too large, or is not a table."""


class CorruptTableError(RegionError):
    """The index of a table holds an impossible value; the message names the table and the value."""


class CodecError(GearError, ValueError):
    """An encoded value that cannot be decoded; the message names its column, trajectory and step."""


class TableFullError(GearError):
    """The table is full and its policy does not allow eviction; nothing was changed."""


class TableEmptyError(GearError):
    """A draw from a table without trajectories."""


class FilledError(GearError, ValueError):
    """A write-once column was filled already; nothing was changed."""


class TableClosedError(GearError, ValueError):
    """The table was used after `Table.close`."""


class PriorityError(GearError, ValueError):
    """Invalid priorities, or a draw from a table without positive priorities; nothing was changed."""


class PrivateTableError(GearError, ValueError):
    """Use of a table without a name by another process, or by a child forked after the table was pinned."""


class StaleIndexError(GearError, IndexError):
    """An index without a live trajectory (never used, removed or evicted)."""


class LockTimeoutError(GearError, TimeoutError):
    """Timed out waiting for a lock or for readers."""


class RateLimitError(GearError, TimeoutError):
    """Timed out waiting for the table's rate limiter; nothing was changed."""


class SourceError(GearError, ValueError):
    """A data source is damaged or does not fit the table; nothing was added."""


class CheckpointError(GearError, OSError):
    """A checkpoint cannot be written, or it is damaged, of another version or of another schema.

    A failed save leaves the previous checkpoint unchanged; a failed load leaves no table.
    """


class TransportError(GearError, ConnectionError):
    """A request to another node failed; the message names the node, the request and the remedy."""


class HandshakeError(TransportError):
    """One of two nodes refused the other: different version, schema, library or secret. The message names both."""


class PeerTimeoutError(TransportError, TimeoutError):
    """Timed out waiting for another node."""


class RankError(GearError, RuntimeError):
    """Another rank failed or did not answer before the deadline; the message names it."""


class UnknownNodeError(GearError, IndexError):
    """A node id that a graph, or a table of features, does not have; the message names the ids."""


class OverloadError(GearError, RuntimeError):
    """A request was refused because too many wait; nothing was changed.

    Attributes:
        retry_after: seconds after which a request is likely to be accepted.
    """

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class GpuError(GearError, RuntimeError):
    """The GPU failed while reading a table: start the process again. Or a call cannot be part of a CUDA graph."""
