"""One NIXL agent of a reader with the memory it has registered, and single transfers of it."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections import OrderedDict
from typing import Any

import numpy as np

from gear_loader.errors import TransportError
from gear_loader.transport.nixl_agent import Description, new_agent, register
from gear_loader.utils.arrays import Array
from gear_loader.utils.forks import keep_for_ever

_REGISTERED = 8  # reply buffers that stay registered


class NixlSession:
    """An agent and its knowledge of the owner. It is not used again after a failure.

    Attributes:
        agent: the NIXL agent. owner: name of the owner's agent, or None. tables: descriptions by table name.
        runs: number of compactions of the block tables of each table, as it was read last.
        registered: handle and buffer by (address, bytes), least recently used first. users: fetches that use it.
    """

    def __init__(self, *, loopback: bool) -> None:
        self.agent: Any = new_agent(f"gear-loader-{os.getpid()}-{secrets.token_hex(8)}", loopback=loopback)
        self.owner: str | None = None
        self.tables: dict[str, Description] = {}
        self.runs: dict[str, int] = {}
        self.registered: OrderedDict[tuple[int, int], tuple[Any, Array]] = OrderedDict()
        self.users = 0
        self._free: list[Array] = []  # small registered buffers
        self._is_kept = False

    def keep(self) -> None:
        """Keep the agent and its memory until the process ends.

        UCX ends the process with a failed assertion (arbiter.c) if an agent is destroyed whose connection broke while
        something was still to be sent. So a session is kept after a read that failed or was given up.
        """
        if not self._is_kept:
            self._is_kept = True
            keep_for_ever(self)

    def borrow(self, count: int) -> Array:
        """Take a registered buffer of at least `count` bytes, uint8."""
        if fits := [i for i, buffer in enumerate(self._free) if len(buffer) >= count]:
            return self._free.pop(min(fits, key=lambda i: len(self._free[i])))
        buffer = np.empty(max(1 << 16, 1 << (count - 1).bit_length()), dtype=np.uint8)
        register(self.agent, buffer.ctypes.data, buffer.nbytes)
        return buffer

    def give_back(self, buffer: Array) -> None:
        """Return a buffer taken by `borrow`."""
        self._free.append(buffer)

    def learn(self, table: str, data: bytes) -> Description:
        """Parse and store the description of a table.

        Raises:
            TransportError: invalid description, or of another owner than before.
        """
        described = Description.from_bytes(data)
        if self.owner not in (None, described.agent):
            raise TransportError("The owner has been restarted.")
        # Repeated for each table: the metadata includes memory registered since then.
        name = self.agent.add_remote_agent(described.connection)
        name = name.decode() if isinstance(name, bytes) else name
        if name != described.agent:
            raise TransportError(f"The owner calls itself {described.agent!r} and its agent {name!r}.")
        self.owner = name
        self.tables[table] = described
        return described

    def hold(self, memory: Array) -> None:
        """Register a reply buffer unless it is registered. The last few stay registered and referenced."""
        key = memory.ctypes.data, memory.nbytes
        if key in self.registered:
            self.registered.move_to_end(key)
            return
        while len(self.registered) >= _REGISTERED and self.users <= 1:
            _, (listed, _) = self.registered.popitem(last=False)
            self.agent.deregister_memory(listed)
        self.registered[key] = register(self.agent, *key), memory


class NixlRead:
    """One NIXL transfer. It references all memory that the transfer uses.

    Args:
        remote, local: int64 [p, 5] each, from `pieces_of`. hold: buffers to reference.
    """

    def __init__(self, session: NixlSession, remote: Array, local: Array, *hold: Array) -> None:
        self.session = session
        self.hold = hold
        agent, places = session.agent, np.arange(len(remote), dtype=np.int32)
        self._lists = [
            agent.prep_xfer_dlist("NIXL_INIT_AGENT", local.astype(np.uint64), "DRAM"),
            agent.prep_xfer_dlist(session.owner, remote.astype(np.uint64), "DRAM"),
        ]
        self._handle = agent.make_prepped_xfer("READ", self._lists[0], places, self._lists[1], places)
        self._posted = False

    def is_done(self) -> bool:
        """Start or poll the transfer; returns whether it is complete.

        Raises:
            TransportError: it failed, and will not write any more.
        """
        agent = self.session.agent
        try:
            # The notification makes the owner poll frequently over TCP.
            state = (
                agent.check_xfer_state(self._handle) if self._posted else agent.transfer(self._handle, b"r")
            )
            self._posted = True
        except Exception as error:
            self._fail()
            raise TransportError(f"the read failed ({error or type(error).__name__})") from error
        if state == "ERR":
            self._fail()
            raise TransportError("the read failed")
        if state == "DONE":
            self.release()
        return bool(state == "DONE")

    def _fail(self) -> None:
        self.session.keep()
        self.release()

    def release(self) -> None:
        """Release the handles."""
        with contextlib.suppress(Exception):  # NIXL keeps handles that it cannot release
            self._handle.release()
        for each in self._lists:
            with contextlib.suppress(Exception):
                each.release()
