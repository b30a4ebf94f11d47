"""The tables of a server: attached by name at their first use, and detached after their removal."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from gear_loader.errors import (
    LockTimeoutError,
    PriorityError,
    RateLimitError,
    RegionError,
    SchemaError,
    TableFullError,
)
from gear_loader.kernels.sum_tree import UNSET
from gear_loader.native.serving import serve
from gear_loader.storage.counters import DIRTY
from gear_loader.storage.ids import CLIENT_ORIGIN, LARGEST_ID, LARGEST_ORIGIN, check_ids
from gear_loader.storage.incoming import Steps
from gear_loader.storage.index import Index
from gear_loader.storage.late import fill_columns
from gear_loader.storage.readers import Ticket
from gear_loader.storage.schema import Schema
from gear_loader.storage.shared_memory import Key, region_path
from gear_loader.storage.states import READY
from gear_loader.storage.table import Table
from gear_loader.transport.advance_message import Advance, Advanced
from gear_loader.transport.fill_message import Fill
from gear_loader.transport.store_message import One, OneStore, Store
from gear_loader.transport.stored_once import StoredOnce
from gear_loader.transport.update_message import Update
from gear_loader.utils.arrays import Array, data_address, narrowed
from gear_loader.utils.waiting import limited

__all__ = ["AttachedTable", "TableCache"]


_LOCK_TIMEOUT = 10.0  # seconds; a change takes far less than a millisecond
_LARGEST_PRIORITY = float(np.finfo(np.float32).max)
_UNDER_LOCK = 1 << 17  # largest reply that is gathered while the lock is held


class AttachedTable:
    """An attached table, mapped until the last reference to it is released.

    Args:
        name: of the table. timeout: seconds that stores wait for free space.

    Attributes:
        table: the table.
        extent, block_ids, block_steps: its index, as the compiled gather takes it.
        is_dirty: whether the next lock holder must repair the index, which can take long.
    """

    def __init__(self, name: str, timeout: float) -> None:
        self.name = name
        self._path = region_path(name)
        self.table, self._key = _attach(name, self._path, timeout)
        region = self.table._engine.region
        self._waiting = Index(region, lock_timeout=_LOCK_TIMEOUT).reader
        self._at_once = Index(region, lock_timeout=0.0)
        self._at_once.admission.timeout = 0.0
        self._trying = self._at_once.reader
        self.block_steps = region.layout.block_steps
        self.extent, self.block_ids = self.table._engine.reader().index_arrays()
        self._state, self._generation, _ = self.table._engine.reader().slot_states()
        self._once = StoredOnce(self.table._engine.index.slots_of)
        # Values are compared where an earlier process may have written them.
        self._filled_once = StoredOnce(lambda ids: ids[:0])
        self._advanced_once = StoredOnce(lambda ids: ids[:0])
        self._memory = 1 + secrets.randbelow((1 << 64) - 1)  # number of what `StoredOnce` remembers
        self._fits: Schema | None = None

    @property
    def schema(self) -> Schema:
        return self.table.schema

    @property
    def is_dirty(self) -> bool:
        return bool(self._waiting.arrays.counters[DIRTY])

    @property
    def is_current(self) -> bool:
        """Whether the name still refers to this table."""
        return _key(self._path) == self._key

    def serve(
        self, columns: Array, rows: Array, most: int, out: Array, status: int, gaps: Array, *, at_once: bool
    ) -> int:
        """Fill a reply by `gear_loader.native.serving.serve`, which has the same arguments, and return its result.

        Small replies are gathered under the lock; else a read ticket keeps trajectories that are live from being
        overwritten.

        Args:
            at_once: do not wait for the lock.

        Raises:
            LockTimeoutError: the lock is held.
        """
        reader = self._trying if at_once else self._waiting
        index = self._state, READY, self._generation, self.extent, self.block_ids, self.block_steps
        if len(out) <= _UNDER_LOCK:
            return reader.under_lock(lambda: int(serve(columns, rows, most, *index, out, status, gaps)))
        ticket = Ticket()
        try:
            reader.begin_read(ticket)
            return int(serve(columns, rows, most, *index, out, status, gaps))
        finally:
            ticket.end()

    @contextlib.contextmanager
    def reading(self, *, at_once: bool) -> Iterator[None]:
        """Hold a read ticket: trajectories that are live now or later are not overwritten inside the block.

        Args:
            at_once: do not wait for the lock.

        Raises:
            LockTimeoutError: the lock is held.
        """
        reader = self._trying if at_once else self._waiting
        ticket = Ticket()
        try:
            reader.begin_read(ticket)
            yield
        finally:
            ticket.end()

    def live(self, slots: Array, generations: Array) -> Array:
        """Whether each slot holds a live trajectory of its generation; bool [n]. To be called inside `reading`."""
        served: Array = slots.view(np.uint64) < len(self._state)
        # In this order: a slot that is READY under a read ticket keeps its blocks and generation.
        served &= self._state.take(slots, mode="clip") == READY
        served &= self._generation.take(slots, mode="clip") == generations
        return served

    def check_schema(self, schema: Schema, *, added: bool = False) -> None:
        """Check that the requester expects the schema of the table.

        Args:
            added: whether it is that of the columns that are given when a trajectory is added.

        Raises:
            SchemaError: it does not; the message has both schemas.
        """
        if added and schema is self._fits:
            return
        mine = self.schema.added if added else self.schema
        if schema.to_json() != mine.to_json():
            raise SchemaError(
                f"Table {self.name!r} has the columns {_columns(mine)}; the requester expects "
                f"{_columns(schema)}. Create the tables of all nodes with the same schema."
            )
        if added:
            self._fits = schema  # messages with the same text have the same object

    def store(self, request: Store, data: Array) -> Array:
        """Add trajectories, all or none.

        Args:
            request: the small part of STORE. data: uint8, its bulk part.

        Returns:
            Their slots, int64 [n].

        Raises:
            As `Table.extend_as`. Nothing was changed.
        """
        self.check_schema(request.schema, added=True)
        with limited(request.wait / 1e3):
            return self._store_once(request, lambda: self._store(self.table._engine.index, request, data))

    def store_at_once(self, request: Store, data: Array) -> Array | None:
        """As `store`; None, having stored nothing, if it would wait for the lock, space or the rate limiter."""
        self.check_schema(request.schema, added=True)
        ids = request.ids
        if self.is_dirty or not len(ids) or self._once.may_wait(ids, again=request.again):
            return None
        try:
            return self._store_once(request, lambda: self._store(self._at_once, request, data))
        except (LockTimeoutError, RateLimitError, TableFullError):
            return None

    def store_one(self, kind: OneStore, one: One, data: Array, offsets: list[int]) -> int | None:
        """`store_at_once` of one trajectory.

        Args:
            kind, one: the small part of STORE. data: uint8, its bulk part. offsets: of each column in it.

        Returns:
            Its slot; None, having stored nothing, if it would have to wait.

        Raises:
            As `store`.
        """
        self.check_schema(kind.schema, added=True)
        slot = None
        if 0 <= one.id <= LARGEST_ID and one.id & LARGEST_ORIGIN == CLIENT_ORIGIN and _is_valid(one.priority):
            begin = data_address(data)
            addresses = [begin + offset for offset in offsets]
            try:
                slot = self._once.run_at_once(
                    one.id,
                    lambda: self.table._engine.store_one(self._at_once, one.rows, addresses, *one[1:4]),
                )
            except LockTimeoutError:
                return None
        if slot is None:  # there are rules, or writers with unfinished trajectories
            slots = self.store_at_once(kind.store(one), data)
            slot = None if slots is None else int(slots[0])
        return slot

    def _store_once(self, request: Store, store: Callable[[], Array]) -> Array:
        """Store, unless a client has sent these trajectories before."""
        ids = request.ids
        if not len(ids) or ids[0] < 0 or not _of_clients(ids):
            return store()
        return self._once.run(ids, store, again=request.again)

    def fill(self, request: Fill, data: Array) -> int:
        """Write late columns, once also if the request comes again; returns the number of stale rows.

        Args:
            request: the small part of FILL. data: uint8, its bulk part.

        Raises:
            As `Table.fill`. Nothing was changed.
        """
        self.check_schema(request.schema)

        def write() -> Array:
            rows, values = (request.slots, request.generations), request.values(data)
            return np.array(
                [fill_columns(self.table._engine, *rows, values, strict=request.strict, again=request.again)]
            )

        identity = np.array([request.identity], dtype=np.uint64)
        return int(self._filled_once.run(identity, write, again=request.again)[0])

    def advance(self, request: Advance) -> Advanced:
        """Raise the version of the policy by one if it is the expected one, once also if the request comes again.

        One that is sent again, and may have been executed by an earlier process, counts as executed if the version is
        no longer the expected one.

        Raises:
            As `Table.advance_version`. LockTimeoutError: the lock is held.
        """
        expected, remembered = request.expected, request.memory == self._memory
        if not remembered and not request.again:
            return Advanced(self.table.policy_version, self._memory, False)

        def work() -> Array:
            version = self.table._engine.index.admission.advance_version(expected)
            if version is not None:
                return np.array([version, True])
            version = self.table.policy_version
            executed = not remembered and version > expected
            return np.array([expected + 1 if executed else version, executed])

        identity = np.array([request.identity], dtype=np.uint64)
        version, done = self._advanced_once.run(identity, work, again=request.again).tolist()
        return Advanced(version, self._memory, bool(done))

    def revise(self, request: Update) -> int:
        """Set priorities; returns the number of rows of removed trajectories, which were skipped.

        Raises:
            As `Table.update_priority`. Nothing was changed. LockTimeoutError: the lock is held.
        """
        priorities = request.updates.priorities
        _, bad = narrowed(priorities)
        if bad >= 0:
            raise PriorityError(
                f"priority[{bad}] is {priorities[bad]}; expected a finite number that is not negative. Nothing was "
                "changed."
            )
        skipped, _ = self._waiting.revise(request.updates, strict=request.strict)
        return skipped

    def _store(self, index: Index, request: Store, data: Array) -> Array:
        priorities = _check_priorities(request.priorities)
        if not len(request.lengths):
            return np.empty(0, dtype=np.int64)
        given: Array | None = check_ids(request.ids, len(request.lengths))
        given = given if given is not None and (given >= 0).any() else None
        # Clients make up ids that no other trajectory has; one that is stored again may be there.
        unique = given is not None and not request.again and _of_clients(given)
        finals = request.finals if request.has_finals else None
        steps = _located(self.schema.added, request, data)
        return self.table._engine.store_steps(steps, priorities, given, finals, unique=unique, index=index)


def _is_valid(priority: float) -> bool:
    """Whether a float32 is a priority, or stands for none."""
    return 0 <= priority <= _LARGEST_PRIORITY or priority == UNSET


def _of_clients(ids: Array) -> bool:
    """Whether all ids are those that clients make up."""
    if len(ids) == 1:
        return int(ids[0]) & LARGEST_ORIGIN == CLIENT_ORIGIN
    return bool((ids & LARGEST_ORIGIN == CLIENT_ORIGIN).all())


def _located(schema: Schema, request: Store, data: Array) -> Steps:
    """The trajectories of a request in its bulk part, where those of a column follow each other."""
    lengths = np.array(request.lengths, dtype=np.int64)  # aligned
    n, start = len(lengths), data_address(data)
    if n == 1:
        return Steps(np.array([[start + at for at, _ in request.columns]], dtype=np.int64), lengths, data)
    begins = np.cumsum(lengths) - lengths
    addresses = np.empty((n, len(schema)), dtype=np.int64)
    for i, (column, (at, _)) in enumerate(zip(schema.values(), request.columns, strict=True)):
        addresses[:, i] = (np.arange(n) if column.trajectory else begins) * column.step_bytes
        addresses[:, i] += start + at
    return Steps(addresses, lengths, data)


def _attach(name: str, path: str, timeout: float) -> tuple[Table, Key]:
    """Attach a table; returns it and the identity of its file."""
    while True:
        before = _key(path)
        table = Table.attach(name, timeout=timeout)
        if before is not None and _key(path) == before:
            return table, before
        table.close()


def _key(path: str) -> Key | None:
    try:
        info = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return info.st_dev, info.st_ino


def _columns(schema: Schema) -> str:
    listed = [f"{name} {column.dtype_name}{list(column.shape)}" for name, column in schema.items()]
    more = [f"and {len(listed) - 40} more"] if len(listed) > 40 else []
    return "{" + ", ".join(listed[:40] + more) + "}"


def _check_priorities(priorities: Array) -> Array:
    values = np.ascontiguousarray(priorities, dtype=np.float32)
    given = values[values != UNSET]
    if not len(given):
        return values
    _, bad = narrowed(given.astype(np.float64))
    if bad >= 0:
        raise SchemaError(
            f"priority {given[bad]} was received; expected finite numbers that are not negative. Nothing was changed."
        )
    return values


class TableCache:
    """Attached tables by name; thread-safe. A table is attached by the first request for it.

    Args:
        tables: names of the tables that may be served.
        timeout: seconds that stores wait for free space.
    """

    def __init__(self, tables: Sequence[str], timeout: float) -> None:
        self._names = frozenset(tables)
        self._timeout = timeout
        self._attached: dict[str, AttachedTable] = {}
        self._attempts: dict[str, Future[AttachedTable]] = {}  # attaches in progress
        self._guard = threading.Lock()  # protects both dictionaries; never held while waiting for a table
        self._closed = False
        for name in tables:
            region_path(name)

    def check(self, name: str) -> None:
        """Raise RegionError if this table is not served."""
        if name not in self._names:
            raise RegionError(
                f"Table {name!r} is not served here; this server has {', '.join(sorted(self._names)) or 'none'}. "
                "Start it with that name too."
            )

    def get(self, name: str) -> AttachedTable:
        """Return the attached table. May wait for its lock; concurrent calls share one attach.

        Raises:
            RegionError: the table is not served or does not exist. LockTimeoutError: its lock is held.
        """
        self.check(name)
        with self._guard:
            attached = self._attached.get(name)
            if attached is not None and attached.is_current:
                return attached
            self._attached.pop(name, None)
            attached = None
            attempt = self._attempts.get(name)
            others = attempt is not None
            if attempt is None:
                attempt = self._attempts[name] = Future()
        return attempt.result() if others else self._attach(name, attempt)

    def attached(self, name: str) -> AttachedTable | None:
        """The attached table, without waiting; None if it is to be attached first."""
        with self._guard:
            found = self._attached.get(name)
        return found if found is not None and found.is_current else None

    def _attach(self, name: str, attempt: Future[AttachedTable]) -> AttachedTable:
        try:
            attached = AttachedTable(name, self._timeout)
        except BaseException as error:
            with self._guard:
                del self._attempts[name]
            attempt.set_exception(error)
            raise
        with self._guard:
            del self._attempts[name]
            if not self._closed:
                self._attached[name] = attached
        attempt.set_result(attached)
        return attached

    def sweep(self) -> list[str]:
        """Detach tables whose names were removed or replaced, so that their memory is freed; returns the names."""
        with self._guard:
            gone = [name for name, attached in self._attached.items() if not attached.is_current]
            for name in gone:
                del self._attached[name]
        return gone

    def close(self) -> None:
        """Detach all tables."""
        with self._guard:
            self._closed = True
            self._attached.clear()
