"""The owner's side of one-sided reads: registers tables with NIXL and describes their memory to readers."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from gear_loader.errors import TransportError
from gear_loader.storage.counters import RUNS
from gear_loader.transport.nixl_agent import Description, new_agent, register
from gear_loader.transport.table_cache import AttachedTable
from gear_loader.utils.background import background_thread
from gear_loader.utils.mutex import Event

_IDLE = 5e-3  # seconds between polls without readers
_BUSY = 2e-5  # seconds between polls after a read
_STAY = 1.0  # seconds of frequent polls after the last read
_IDENTITY = 0.1  # seconds between checks that the names still refer to the same tables
_WORDS = 1024  # most tables, including replaced ones


class NixlOwner:
    """Allows other nodes to read tables of this machine without involving its processor.

    **One-sided reads trust the network.** A process that has the description of a table, or can reach UCX's sockets,
    can read all memory of this process, and can crash it with an invalid address. It is meant for closed fabrics and
    must be enabled explicitly. Only authenticated requesters receive descriptions.

    Over InfiniBand the adapter answers reads. Over TCP, and to connect, UCX needs this process: a thread polls every
    5 ms, and continuously for a second after a read.

    Args:
        tables: names of the tables that may be read; each is attached by the first request for it.
        loopback: restrict UCX's sockets to the loopback device, unless the user has set UCX_NET_DEVICES.

    Raises:
        TransportError: NIXL is not installed, or cannot start.
    """

    def __init__(self, tables: Iterable[str], *, loopback: bool = True) -> None:
        self._tables = frozenset(tables)
        self._name = f"gear-loader-{os.getpid()}-{secrets.token_hex(8)}"
        self._agent: Any = new_agent(self._name, loopback=loopback)
        self._guard = threading.Lock()
        # Tables stay mapped: over TCP, UCX reads any address that a reader asks for.
        self._attached: list[AttachedTable] = []
        self._current: dict[str, int] = {}  # numbers in that list, and of words
        self._words = np.zeros(_WORDS, dtype=np.uint64)
        self._word_list = register(self._agent, self._words.ctypes.data, self._words.nbytes)
        self._stop = Event()
        self._thread = background_thread(self._run, "gear-loader-nixl", stop=self._stop.set)
        self._thread.start()

    def metadata(self, table: str) -> bytes:
        """The description of a table's memory; see `gear_loader.transport.nixl_agent`.

        Raises:
            TransportError: the table is not served or cannot be registered.
            RegionError: the table does not exist.
        """
        if table not in self._tables:
            raise TransportError(
                f"Table {table!r} is not served; tables here: {', '.join(sorted(self._tables)) or 'none'}."
            )
        with self._guard:
            if self._stop.is_set():
                raise TransportError("This server is closing.")
            self._forget_replaced()
            if table not in self._current:
                self._attach(table)
            word = self._current[table]
            region = self._attached[word].engine.region
            view = region.bytes
            assert view is not None
            layout = region.layout
            return Description(
                self._name,
                self._agent.get_agent_metadata(),
                layout.schema,
                tuple(layout.columns.values()),
                {
                    "base": view.ctypes.data,
                    "region_bytes": layout.region_bytes,
                    "block_steps": layout.block_steps,
                    "num_blocks": layout.num_blocks,
                    "num_slots": layout.max_trajectories,
                    "max_steps": layout.max_steps,
                    "generation": layout.arrays["generation"][0],
                    "state": layout.arrays["state"][0],
                    "extent": layout.arrays["extent"][0],
                    "block_ids": layout.arrays["block_ids"][0],
                    "half": layout.half,
                    "runs": layout.arrays["counters"][0] + 8 * RUNS,
                    "word": self._words.ctypes.data + 8 * word,
                    "value": int(self._words[word]),
                },
            ).to_bytes()

    def _attach(self, table: str) -> None:
        if len(self._attached) == _WORDS:
            raise TransportError(f"{_WORDS:,} tables have been served by this process; restart it.")
        attached = AttachedTable(table, timeout=1.0)  # which stores nothing
        region = attached.engine.region
        assert region.bytes is not None
        register(self._agent, region.bytes.ctypes.data, region.layout.region_bytes)
        word = self._current[table] = len(self._attached)
        self._attached.append(attached)
        self._words[word] = secrets.randbits(63) | 1

    def _forget_replaced(self) -> None:
        for table, word in list(self._current.items()):
            if not self._attached[word].is_current:
                self._words[word] = 0  # readers check it after each read
                del self._current[table]

    def _run(self) -> None:
        """Thread: make progress for UCX, and detect removed tables."""
        busy = looked = 0.0
        while not self._stop.is_set():
            now = time.monotonic()
            with self._guard:
                if self._stop.is_set():
                    return
                if self._agent.get_new_notifs():
                    busy = now
                if now - looked > _IDENTITY:
                    self._forget_replaced()
                    looked = now
            time.sleep(_BUSY if now - busy < _STAY else _IDLE)

    def close(self) -> None:
        """End all reads; idempotent."""
        self._stop.set()
        self._thread.join()
        with self._guard:
            self._agent = None  # closes its sockets, before the memory is unmapped
            self._current.clear()
            self._attached.clear()
