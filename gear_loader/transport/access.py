"""What the clients of a server may do."""

from __future__ import annotations

from typing import Any, Literal, cast

from gear_loader.errors import TransportError
from gear_loader.transport.wire import Kind
from gear_loader.utils.arrays import shown

Allow = Literal["all", "read", "write"]

WRITES = frozenset({Kind.ADVANCE, Kind.FILL, Kind.PART, Kind.SET, Kind.STORE, Kind.UPDATE})
"""Requests that change a table."""
_READS = frozenset({Kind.OPEN, Kind.FETCH, Kind.LEARN})
_REFUSED: dict[str, frozenset[Kind]] = {"all": frozenset(), "read": WRITES, "write": _READS}


def check_allow(allow: Any) -> Allow:
    """Check the option `allow` of a server and return it.

    Raises:
        TransportError: another value.
    """
    if not isinstance(allow, str) or allow not in _REFUSED:
        raise TransportError(f"allow is {shown(allow)}; expected 'all', 'read' or 'write'.")
    return cast(Allow, allow)


def refusal(allow: str, kind: Kind) -> str | None:
    """Why a server refuses a kind of request, for errors; None if it does not."""
    if kind not in _REFUSED[allow]:
        return None
    one, other = ("read", "written to") if allow == "read" else ("written to", "read")
    return (
        f"The server lets its tables be {one}, and not {other}: it was started with allow={allow!r}. Nothing was "
        f"changed. Start it with allow='all'."
    )
