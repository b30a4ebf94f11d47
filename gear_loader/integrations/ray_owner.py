"""The Ray actor that owns a table, its disk and its server, and goes on with them when Ray restarts it."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
import warnings
from typing import Any

import ray
import ray.util

from gear_loader.errors import CheckpointError, RegionError, TableClosedError
from gear_loader.storage.disk import Disk
from gear_loader.storage.schema import Column
from gear_loader.storage.shared_memory import region_path
from gear_loader.storage.stats import TableStats
from gear_loader.storage.table import Table
from gear_loader.utils.provided import provided

_PAUSE = 0.1  # seconds until a disk that is in use is tried again
_WATCH = """
import os, sys, time
raylet, began, path, inode, mark = sys.argv[1:]
def start():
    try:
        with open(f"/proc/{raylet}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return None
if os.fork() == 0:
    os.setsid()
    while os.path.exists(mark) and start() == began:
        time.sleep(1)
    if os.path.exists(path) and os.stat(path).st_ino == int(inode):
        os.unlink(path)
    if os.path.exists(mark):
        os.unlink(mark)
"""
"""Program that removes a table when Ray has ended on its node, which kills the actor without notice; no child of it."""

_log = logging.getLogger("gear_loader")


class Owner:
    """Owns a table and its server. Started again with the same arguments, it goes on with the table.

    On the same node the table is in shared memory still, whoever died. On another one it is on the disk, if it has one
    that this node has, too. A mark, an empty file that bears the node's id, tells the two apart where several nodes are
    on one machine.

    Args:
        schema, options: of `Table.create`. secret: of the server. timeout: seconds to wait for a disk that is in use.
    """

    def __init__(
        self, schema: dict[str, Column], options: dict[str, Any], secret: bytes, timeout: float
    ) -> None:
        context = ray.get_runtime_context()
        self._node, self._secret = context.get_node_id(), secret
        # The actor's id stays when Ray starts it again.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own: this property calls a method that Ray has deprecated
            again = context.was_current_actor_reconstructed
        name = f"ray-{context.get_actor_id()}"
        path = region_path(name)
        self._mark = os.path.join(os.path.dirname(path), f"{name}-{self._node}")
        if not os.path.exists(self._mark):  # what another node's actor has left, or a start that was cut off
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        is_here = os.path.lexists(path)
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._table = _opened(schema, name, options, is_here=is_here)
                break
            except CheckpointError as error:  # the process before may take a moment to end
                if not again or time.monotonic() > deadline:
                    raise RuntimeError(str(error)) from None
                time.sleep(_PAUSE)
        with open(self._mark, "a"):
            pass
        try:
            _unlink_after_ray(path, self._mark)
            self._server = self._table.serve(host=ray.util.get_node_ip_address(), secret=secret, allow="all")
        except BaseException:
            if not again:
                self._unlink()
            raise
        if again and not is_here:
            _log.warning(
                "%s was started again on node %s with %d trajectories%s",
                name,
                self._node,
                len(self._table),
                "" if "disk" in options else "; without a disk what the node before had is lost",
            )

    def where(self) -> dict[str, Any]:
        """How workers reach the table."""
        return {
            "node": self._node,
            "name": self._table.name,
            "url": self._server.url,
            "secret": self._secret,
        }

    def stats(self) -> TableStats:
        """As `Table.stats`."""
        return self._table.stats()

    def __len__(self) -> int:
        return len(self._table)

    def close(self) -> None:
        """Stop the server, write the rest to the disk, and remove the table's name. Workers that have attached may go
        on with its memory."""
        self._server.stop()
        self._unlink()
        self._table.close()

    def _unlink(self) -> None:
        with contextlib.suppress(RegionError, TableClosedError):
            self._table.unlink()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._mark)

    def __ray_shutdown__(self) -> None:
        """Ray calls it where the actor ends for good, and not by force."""
        self.close()


def _opened(schema: dict[str, Column], name: str, options: dict[str, Any], *, is_here: bool) -> Table:
    """The table of this node, or that of the disk, or a new one.

    Raises:
        CheckpointError: the disk is in use or damaged.
    """
    disk = options.get("disk")
    if not is_here:
        if isinstance(disk, Disk) and disk.exists():
            return Table.recover(disk, name=name, schema=schema)
        return Table.create(schema, name=name, **options)
    if disk is None:
        return Table.attach(name)
    # Not by `Table.create`: of one that was recovered the sizes may be others than the options.
    table: Table
    table, writer = provided("create_on_disk")(lambda: (Table.attach(name), False), disk, name, exist_ok=True)
    if writer is None:
        table.close()
        raise CheckpointError(f"The process before writes {name} to {disk.path} still.")
    table._engine.disk = writer
    return table


def _unlink_after_ray(path: str, mark: str) -> None:
    """Let a process wait until Ray has ended on this node, and then remove a table."""
    pid = os.getppid()
    while pid > 1:
        with open(f"/proc/{pid}/stat") as file:
            head, _, tail = file.read().rpartition(")")
        if head.endswith("(raylet"):
            command = [sys.executable, "-I", "-S", "-c", _WATCH]
            arguments = [str(pid), tail.split()[19], path, str(os.stat(path).st_ino), mark]
            none = subprocess.DEVNULL
            subprocess.run(command + arguments, check=True, stdin=none, stdout=none, stderr=none)
            return
        pid = int(tail.split()[1])
