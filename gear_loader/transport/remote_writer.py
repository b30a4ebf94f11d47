"""The writer of a remote table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gear_loader.errors import TableFullError
from gear_loader.storage.writer import Writer
from gear_loader.transport.spool import Spool

__all__ = ["RemoteWriter"]


class RemoteWriter(Writer):
    """Adds trajectories to the table of a server step by step: a `Writer`, made by `RemoteTable.writer`.

    `append` copies steps into a spool in this process's memory, and never waits for the network while the spool has
    room. `commit` hands the trajectory to a thread that sends it, together with what else is waiting.

    Args:
        spool: where steps go. owner: kept alive, because the spool ends with it.
        wait: whether `commit` waits until the trajectory can be drawn. timeout: seconds for it.
        options: of `Writer`.
    """

    def __init__(self, spool: Spool, owner: object, *, wait: bool, timeout: float, **options: Any) -> None:
        spool.check()
        super().__init__(spool.table, **options)
        self._spool = spool
        self._owner = owner
        self._wait = wait
        self._timeout = timeout

    def append(self, steps: Mapping[str, Any] | None = None, /, **columns: Any) -> tuple[int, ...]:
        """As `Writer.append`; returns ().

        Raises:
            PeerTimeoutError: the spool is full, and the server took nothing before the deadline. Nothing was appended.
            GearError: the server refused an earlier trajectory.
        """
        self._spool.check()
        try:
            if super().append(steps, **columns):
                self._spool.wake()
        except TableFullError as error:
            raise self._spool.full(error) from None
        return ()

    def commit(
        self,
        priority: float | None = None,
        *,
        final: Mapping[str, Any] | None = None,
        trajectory: Mapping[str, Any] | None = None,
    ) -> int:
        """As `Writer.commit`.

        Returns:
            With ``wait``: the index in the server's table, or -1 if it was evicted since or was cut into chunks.
            Otherwise -1.

        Raises:
            PeerTimeoutError: not stored before the deadline; it stays in the spool and will be, so do not repeat it.
            GearError: the server refused it, or an earlier trajectory.
        """
        self._spool.check()
        key = None
        generations = self._open[-1].generations if self._wait and self._open and not self._cuts else None
        if generations is not None:
            key = int(self._open[-1].slots[0]), int(generations[0])
            self._spool.wanted[key] = -1
        try:
            try:
                super().commit(priority, final=final, trajectory=trajectory)
            except TableFullError as error:
                raise self._spool.full(error) from None
            self._spool.wake()
            if self._wait:
                self._spool.flush(self._timeout)
            return -1 if key is None else self._spool.wanted[key]
        finally:
            if key is not None:
                del self._spool.wanted[key]
