"""What a server does for each kind of request: a table from the kind to a plain function of tables and message."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gear_loader.errors import LockTimeoutError, PriorityError, SchemaError
from gear_loader.kernels.sum_tree import UNSET
from gear_loader.storage.edits import set_columns
from gear_loader.storage.ids import CLIENT_ORIGIN, LARGEST_ID, LARGEST_ORIGIN, check_ids
from gear_loader.storage.incoming import Steps
from gear_loader.storage.late import fill_columns
from gear_loader.storage.prefix_input import Beginning
from gear_loader.storage.prefixes import AwayError
from gear_loader.storage.priority_updates import PriorityUpdates
from gear_loader.storage.schema import Schema
from gear_loader.transport import wire_messages as messages
from gear_loader.transport.change_messages import Advance, Advanced, Fill, Overwrite, Unfilled, Update
from gear_loader.transport.channel import Bytes
from gear_loader.transport.ragged_rows import payload_of
from gear_loader.transport.store_message import One, OneStore, Store
from gear_loader.transport.stored_once import StoredOnce
from gear_loader.transport.table_cache import AttachedTable, TableCache
from gear_loader.transport.wire import Kind, Limits
from gear_loader.utils.arrays import Array, data_address, narrowed
from gear_loader.utils.waiting import limited

_LARGEST_PRIORITY = float(np.finfo(np.float32).max)


class Reply(NamedTuple):
    """An answer: its kind, small part and bulk part."""

    kind: Kind
    small: bytes = b""
    bulk: Array | None = None


@dataclasses.dataclass(frozen=True)
class Handler:
    """How requests of one kind are answered.

    Attributes:
        parse: takes the small part, the bytes of the bulk part and the limits; returns the message, which has `table`.
            Raises ProtocolError.
        answer: takes the tables, the message, its bulk part (uint8), and whether it must not wait; then it raises
            LockTimeoutError, TableFullError or RateLimitError, having done nothing, where it would wait.
        what: it does, for log lines.
        at_once: most bytes of the message for which it is tried without a wait, in the event loop.
        changes: whether it changes the table.
        overlaps: whether the next requests of the connection are served meanwhile.
    """

    parse: Callable[[Bytes, int, Limits], Any]
    answer: Callable[[TableCache, Any, Array, bool], Reply]
    what: str
    at_once: int = 0
    changes: bool = True
    overlaps: bool = False


# ---------------------------------------------------------------- STORE


def _store(tables: TableCache, request: Store, data: Array, at_once: bool) -> Reply:
    """Add trajectories, all or none, and once also if a client sends them again.

    Raises:
        As `Table.extend_as`. Nothing was changed.
    """
    table = tables.open(request.table, at_once=at_once)
    table.check_schema(request.schema, added=True)
    ids, once = request.ids, table.stored_once
    slow = any(values.kind in ("object", "coded") for values in request.schema.ragged.values())  # to check
    slow = slow or request.prefixes is not None
    if at_once and (slow or not len(ids) or once.may_wait(ids, again=request.again)):
        raise LockTimeoutError("This may have to wait for another request.")

    def store() -> Array:
        return _add(table, request, data, at_once)

    with contextlib.nullcontext() if at_once else limited(request.wait / 1e3):
        is_known = len(ids) and ids[0] >= 0 and _of_clients(ids)
        slots = once.run(ids, store, again=request.again) if is_known else store()
    return Reply(Kind.STORED, slots.astype("<i8").tobytes())


def _add(table: AttachedTable, request: Store, data: Array, at_once: bool) -> Array:
    priorities = _checked_priorities(request.priorities)
    if not len(request.lengths):
        return np.empty(0, dtype=np.int64)
    given: Array | None = check_ids(request.ids, len(request.lengths))
    given = given if given is not None and (given >= 0).any() else None
    # Clients make up ids that no other trajectory has; one that is stored again may be there.
    unique = given is not None and not request.again and _of_clients(given)
    finals = request.finals if request.has_finals else None
    begins = _beginning(table, request)
    index = table.at_once if at_once else table.engine.index

    def store() -> Array:
        common = () if begins is None else begins.records(len(request.lengths))
        steps = _located(table.schema.added, request, data, common)
        prefixes = None if begins is None else begins.located(steps)
        options: Any = {"unique": unique, "index": index, "prefixes": prefixes}
        return table.engine.store_steps(steps, priorities, given, finals, **options)

    try:
        return store() if at_once or begins is None else begins.store(store)
    except AwayError:
        raise LockTimeoutError("This has to wait for trajectories on disk.") from None


def _beginning(table: AttachedTable, request: Store) -> Beginning | None:
    """What trajectories begin with, as it was given to a client."""
    if request.prefixes is None:
        return None
    given = request.prefix_steps, request.prefix_generations
    steps, generations = (each if each is not None and (each >= 0).any() else None for each in given)
    return Beginning(table.engine, request.prefixes, steps, generations)


def store_one(tables: TableCache, kind: OneStore, one: One, data: Array, offsets: list[int]) -> bytes:
    """`_store` of one trajectory, without a wait: the commonest request.

    Args:
        kind, one: the small part of STORE. data: uint8, its bulk part. offsets: of each column in it.

    Returns:
        The small part of STORED.

    Raises:
        As `Handler.answer`.
    """
    table, slot = tables.open(kind.table, at_once=True), None
    table.check_schema(kind.schema, added=True)
    is_valid = 0 <= one.priority <= _LARGEST_PRIORITY or one.priority == UNSET
    if is_valid and 0 <= one.id <= LARGEST_ID and one.id & LARGEST_ORIGIN == CLIENT_ORIGIN:
        begin = data_address(data)
        addresses = [begin + offset for offset in offsets]
        slot = table.stored_once.run_at_once(
            one.id, lambda: table.engine.store_one(table.at_once, one.rows, addresses, *one[1:4])
        )
    if slot is None:  # there are rules, or writers with unfinished trajectories
        return _store(tables, kind.store(one), data, True).small
    return slot.to_bytes(8, "little", signed=True)


def _of_clients(ids: Array) -> bool:
    """Whether all ids are those that clients make up."""
    if len(ids) == 1:
        return int(ids[0]) & LARGEST_ORIGIN == CLIENT_ORIGIN
    return bool((ids & LARGEST_ORIGIN == CLIENT_ORIGIN).all())


def _located(
    schema: Schema, request: Store, data: Array, common: Sequence[Mapping[str, Array]] = ()
) -> Steps:
    """The trajectories of a request in its bulk part, where those of a column follow each other.

    Args:
        common: as for `payload_of`.

    Raises:
        TransportError, SchemaError: ragged values, as of `payload_of`.
    """
    lengths, start = request.lengths, data_address(data)
    hold, payload = list[object]([data]), None
    starts = [start + at for at, _ in request.columns]
    if schema.ragged:
        places = dict(zip(schema, request.columns, strict=True))
        records = {name: data[places[name][0] :][: places[name][1]] for name in schema.ragged}
        size = request.bulk_bytes
        made, payload = payload_of(schema, lengths, records, data[size - request.payload : size], common)
        starts = [
            made[name].ctypes.data if name in made else at for name, at in zip(schema, starts, strict=True)
        ]
        hold.append(made)
    if (n := len(lengths)) == 1:
        return Steps(np.array([starts], dtype=np.int64), lengths, hold, payload)
    begins = np.cumsum(lengths) - lengths
    addresses = np.empty((n, len(schema)), dtype=np.int64)
    for i, (column, at) in enumerate(zip(schema.values(), starts, strict=True)):
        addresses[:, i] = (np.arange(n) if column.trajectory else begins) * column.step_bytes
        addresses[:, i] += at
    return Steps(addresses, lengths, hold, payload)


def _checked_priorities(priorities: Array) -> Array:
    values = np.ascontiguousarray(priorities, dtype=np.float32)
    given = values[values != UNSET]
    _, bad = narrowed(given.astype(np.float64)) if len(given) else (given, -1)
    if bad >= 0:
        raise SchemaError(
            f"priority {given[bad]} was received; expected finite numbers that are not negative. Nothing was changed."
        )
    return values


# ---------------------------------------------------------------- other changes


def _once(done: StoredOnce, request: Fill | Overwrite, write: Callable[[], Array]) -> int:
    """Call `write`, unless this process has executed the request before; the number of stale rows."""
    identity = np.array([request.identity], dtype=np.uint64)
    (stale,) = done.run(identity, write, again=request.again).tolist()
    return int(stale)


def _fill(tables: TableCache, request: Fill, data: Array, at_once: bool) -> Reply:
    """Write late columns, once also if the request comes again.

    Raises:
        As `Table.fill`. Nothing was changed.
    """
    table = tables.open(request.table, at_once=at_once)
    table.check_schema(request.schema)

    def write() -> Array:
        rows, values = (request.slots, request.generations), request.values(data)
        stale = fill_columns(table.engine, *rows, values, strict=request.strict, again=request.again)
        return np.array([stale])

    return Reply(Kind.FILLED, messages.FILLED.pack(stale=_once(table.filled_once, request, write)))


def _set(tables: TableCache, request: Overwrite, data: Array, at_once: bool) -> Reply:
    """Overwrite values of rows, once also if the request comes again to this process.

    Raises:
        As `Table.set`. Nothing was changed.
    """
    table = tables.open(request.table, at_once=at_once)
    table.check_schema(request.schema)

    def write() -> Array:
        mask, values = request.values(data)
        rows = request.slots, request.anchors, request.generations
        return np.array([set_columns(table.engine, *rows, mask, values, strict=request.strict)])

    return Reply(Kind.WRITTEN, messages.WRITTEN.pack(stale=_once(table.set_once, request, write)))


def _update(tables: TableCache, request: Update, _: Array, at_once: bool) -> Reply:
    """Set priorities.

    Raises:
        As `Table.update_priority`. Nothing was changed.
    """
    table = tables.open(request.table, at_once=at_once)
    slots, priorities = request.slots, request.priorities
    _, bad = narrowed(priorities)
    if bad >= 0:
        raise PriorityError(
            f"priority[{bad}] is {priorities[bad]}; expected a finite number that is not negative. Nothing was changed."
        )
    updates = PriorityUpdates(slots, np.zeros_like(slots), request.generations, priorities)
    skipped, _changed = table.reader(at_once).revise(updates, strict=request.strict)
    return Reply(Kind.UPDATED, messages.UPDATED.pack(stale=skipped))


def _advance(tables: TableCache, request: Advance, _: Array, at_once: bool) -> Reply:
    """Raise the version of the policy by one if it is the expected one, once also if the request comes again.

    One that is sent again, and may have been executed by an earlier process, counts as executed if the version is no
    longer the expected one.

    Raises:
        As `Table.advance_version`.
    """
    attached = tables.open(request.table, at_once=at_once)
    table, memory = attached.table, attached.memory
    expected, remembered = request.version, request.memory == memory

    def work() -> Array:
        version = attached.engine.index.admission.advance_version(expected)
        if version is not None:
            return np.array([version, True])
        executed = not remembered and table.policy_version > expected
        return np.array([expected + 1 if executed else table.policy_version, executed])

    if remembered or request.again:
        identity = np.array([request.identity], dtype=np.uint64)
        version, done = attached.advanced_once.run(identity, work, again=request.again).tolist()
    else:
        version, done = table.policy_version, False
    return Reply(Kind.ADVANCED, Advanced(version, memory, bool(done)).pack())


def _unfilled(tables: TableCache, request: Unfilled, _: Array, at_once: bool) -> Reply:
    """Slots and generations of trajectories that wait for late columns."""
    found = tables.open(request.table, at_once=at_once).table.unfilled(*request.names)
    return Reply(Kind.DESCRIBED, bulk=np.stack(found).astype("<i8"))


HANDLERS = {
    Kind.STORE: Handler(Store.parse, _store, "storing into", 1 << 20, overlaps=True),
    Kind.FILL: Handler(Fill.parse, _fill, "filling columns of"),
    Kind.SET: Handler(Overwrite.parse, _set, "overwriting values of"),
    Kind.UPDATE: Handler(Update.parse, _update, "setting priorities in", 1 << 14),
    Kind.ADVANCE: Handler(Advance.parse, _advance, "advancing the version of"),
    Kind.UNFILLED: Handler(Unfilled.parse, _unfilled, "unfilled trajectories of", changes=False),
}
"""The kinds that need nothing but their table; a connection answers the others itself."""
