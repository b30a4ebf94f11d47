"""Windows fetched from a server, and trajectories stored through one: every byte, and what is refused."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cases import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from table_common import COLUMNS, DTYPES, bits, fresh_name, named, number_of, numbers_of, random_values, rows
from transport_common import (
    PATIENCE,
    WINDOWS,
    Serving,
    check_fetch,
    expected,
    generations_of,
    pieces_of,
    poisoned,
    serving,
    spec_of,
)
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.errors import (
    PriorityError,
    RegionError,
    SchemaError,
    StaleIndexError,
    TableFullError,
    TransportError,
)
from gear_loader.kernels.sum_tree import UNSET
from gear_loader.storage.schema import Schema, Window
from gear_loader.transport import Limits, Peer, WindowSpec
from gear_loader.transport.store_message import Rows

LENGTHS = (1, 7, 4, 13, 2, 8, 30, 5)
Shelf = tuple[gear.Table, Serving, Peer]


def filled(table: gear.Table, first: int = 0) -> gear.Table:
    for i, length in enumerate(LENGTHS):
        table.add(rows(first + i, length))
    return table


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    """A table, its server, and a peer."""
    with named() as table, serving(str(table.name)) as server:
        yield filled(table), server, server.peer()


def refused(peer: Peer, spec: WindowSpec, message: str, n: int = 0) -> BaseException:
    """The error of fetching n rows."""
    zeros = np.zeros(n, dtype=np.int64)
    with pytest.raises(TransportError, match=message) as found:
        peer.fetch(spec, zeros, zeros, zeros, out=poisoned(spec, n)).result(PATIENCE)
    return found.value


# ---------------------------------------------------------------- fetching


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_windows_of_any_rows(shelf: Shelf, data: st.DataObject) -> None:
    table, _, peer = shelf
    pads = st.sampled_from(["keep", "head", "tail", "edge"])
    window = st.builds(Window, st.integers(1, 9), st.integers(-9, 9), pads)
    windows = data.draw(st.dictionaries(st.sampled_from(list(COLUMNS)), window, min_size=1))
    chosen = data.draw(st.lists(st.tuples(st.integers(0, 7), st.integers(-5, 40)), max_size=12))
    check_fetch(peer, table, spec_of(table, windows), [row[0] for row in chosen], [row[1] for row in chosen])


def test_every_dtype() -> None:
    generator = torch.Generator().manual_seed(5)
    columns = {f"{t} {shape}": gear.Column(t, shape) for t in DTYPES for shape in ((), (3,))}
    columns["c"] = gear.Column(torch.uint8, (130,))
    sizes = {"max_steps": 60, "max_trajectories": 8, "block_steps": 4}

    def made(length: int) -> dict[str, Any]:
        return {n: random_values(c.dtype, (length, *c.shape), generator) for n, c in columns.items()}

    with gear.Table.create(columns, name=fresh_name(), **sizes) as table:
        try:
            table.extend([made(length) for length in (1, 9, 4, 6)])
            with serving(str(table.name)) as server:
                peer = server.peer()
                spec = spec_of(
                    table, {n: Window(5, -2) if c.shape else Window(3) for n, c in columns.items()}
                )
                check_fetch(peer, table, spec, [3, 1, 0, 2, 1], [0, 8, 0, 3, 4])
                copies = [made(5)] * 2
                slots = peer.store(*storing(table, *copies)).result(PATIENCE)
                for slot in slots.tolist():
                    found = {n: bits(v) for n, v in table[slot].items()}
                    assert found == {n: bits(v) for n, v in copies[0].items()}
        finally:
            table.unlink()


def test_every_byte_also_of_rows_outside_and_of_rows_that_are_gone(shelf: Shelf) -> None:
    table, _, peer = shelf
    spec = spec_of(table)
    check_fetch(peer, table, spec, range(8), [0, 3, 3, 12, 1, 0, 29, 2])
    check_fetch(peer, table, spec, [3, 3, 3, 3], [-50, 2**40, -(2**40), 14])  # padding
    check_fetch(peer, table, spec, [], [])
    for slot in (-1, 16, 10**6, 2**62, -(2**63), 2**63 - 1):
        check_fetch(peer, table, spec, [3, slot, 0], [2, 0, 0], gone=(1,))
        check_fetch(peer, table, spec, [slot], [0], gone=(0,))
    with table.writer() as writer:  # one that is being written
        writer.append({name: values[0] for name, values in rows(5, 3).items()})
        check_fetch(peer, table, spec, range(9), [0] * 9, gone=(8,))
    old = generations_of(table, range(8))
    table.remove([1, 6])
    table.add(rows(99, 3))  # takes one of their slots: another generation
    out, anchors = poisoned(spec, 8), np.zeros(8, dtype=np.int64)
    status = peer.fetch(spec, np.arange(8), anchors, old, out=out).result(PATIENCE)
    assert status.tolist() == [0, 1, 0, 0, 0, 0, 1, 0]
    assert pieces_of(spec, out, 8) == expected(table, WINDOWS, range(8), anchors, old, gone=(1, 6))[0]


def test_many_threads_two_peers_many_specs(shelf: Shelf) -> None:
    table, server, peer = shelf
    peers = [peer, server.peer()]
    specs = [spec_of(table, {"check": Window(i + 1), "step": Window(2, -i)}) for i in range(5)]

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(20):
            n = int(random.integers(0, 40))
            spec = specs[int(random.integers(5))]
            check_fetch(peers[seed % 2], table, spec, random.integers(0, 8, n), random.integers(-3, 30, n))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, seed) for seed in range(8)]:
            future.result(PATIENCE)


def test_more_specs_than_a_connection_may_have_opened() -> None:
    with named() as table, serving(str(table.name), limits=Limits(specs=2)) as server:
        filled(table)
        peer = server.peer()
        specs = [spec_of(table, {"check": Window(i + 1)}) for i in range(5)]
        for i in (0, 1, 0, 2, 3, 0, 4, 1, 1, 0):
            check_fetch(peer, table, specs[i], [3, 6], [1, 2])


def test_a_trajectory_is_never_torn_while_others_come_and_go() -> None:
    sizes: dict[str, Any] = {"max_steps": 60, "max_trajectories": 6, "on_full": "evict_oldest"}
    with named(**sizes) as table, serving(str(table.name)) as server:
        peer = server.peer()
        spec = spec_of(table, {name: Window(12) for name in COLUMNS})
        over = threading.Event()

        def write() -> None:
            number = 0
            while not over.is_set():
                table.add(rows(number, 8 + number % 4))
                number += 1

        writer = threading.Thread(target=write)
        writer.start()
        served, zeros = 0, np.zeros(6, dtype=np.int64)
        pieces = {p.name: p for p in spec.pieces(6) if p.kind == "column"}
        try:
            while served < 60:
                slots = np.arange(6)
                out = poisoned(spec, 6)
                status = peer.fetch(spec, slots, zeros, generations_of(table, slots), out=out).result(
                    PATIENCE
                )
                for i in np.flatnonzero(status == 0).tolist():
                    found = {}
                    for name, piece in pieces.items():
                        begin, column = piece.offset + i * piece.row_bytes, table.schema[name]
                        values = torch.from_numpy(out[begin : begin + piece.row_bytes].copy())
                        found[name] = values.view(column.dtype).reshape(12, *column.shape)
                    length = int(found["length"][0])
                    number_of({name: values[:length] for name, values in found.items()})
                    served += 1
        finally:
            over.set()
            writer.join(PATIENCE)


# ---------------------------------------------------------------- what is refused


def test_arguments_are_checked_before_anything_is_sent(shelf: Shelf) -> None:
    table, _, peer = shelf
    spec, slots = spec_of(table), np.arange(3)
    out = poisoned(spec, 3)
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((slots.astype(np.int32), slots, slots, out), r"slots is int32 \[3\]; expected int64 \[3\]"),
        ((slots, slots[:2], slots, out), r"anchors is int64 \[2\]; expected int64 \[3\]"),
        ((slots, slots, [0, 1, 2], out), "generations is a list"),
        ((slots, slots, slots, out[:-1]), f"out has {len(out) - 1:,} bytes; expected {len(out):,}"),
        ((slots, slots, slots, out.view(np.int8)), "out is int8"),
        ((slots, slots, slots, np.repeat(out, 2)[::2]), "expected contiguous uint8"),
        ((slots, slots, slots, np.frombuffer(bytes(len(out)), dtype=np.uint8)), "that cannot be written"),
    ]
    for arguments, message in cases:
        with pytest.raises(SchemaError, match=message):
            peer.fetch(spec, *arguments[:-1], out=arguments[-1])
    assert (out == 0xA5).all()


def test_what_the_server_does_not_take_is_an_error_of_that_request_alone() -> None:
    limits = Limits(rows=100, reply_bytes=4096, store_bytes=1024)
    with named() as table, serving(str(table.name), limits=limits) as server:
        filled(table)
        peer, spec = server.peer(), spec_of(table)
        for n in (101, 30):
            refused(peer, spec, f"{n} rows .*: the server sends at most 100 rows and 4,096 bytes", n)
        with pytest.raises(TransportError, match="takes at most 100 rows and 1,024 bytes"):
            peer.store(*storing(table, rows(1, 50))).result(PATIENCE)
        wild = np.array([0]), np.array([2**41]), generations_of(table, [0])
        with pytest.raises(TransportError, match=r"anchors\[0\] is 2199023255552; expected a step"):
            peer.fetch(spec, *wild, out=poisoned(spec, 1)).result(PATIENCE)
        check_fetch(peer, table, spec, [3, 6], [1, 2])
        assert server.server.num_connections == 1


def test_tables_and_schemas_that_are_not_served(shelf: Shelf) -> None:
    table, _, peer = shelf
    with named() as other:
        for _ in range(2):
            message = f"0 rows .*{other.name}' is not served here; .*{table.name}"
            assert isinstance(refused(peer, spec_of(other), message).__cause__, RegionError)
    schema = Schema({**COLUMNS, "value": gear.Column(torch.float32, (4,))})
    message = r"value float32\[3\].*the requester expects .*value float32\[4\]"
    refused(peer, WindowSpec(str(table.name), schema, WINDOWS), message)
    check_fetch(peer, table, spec_of(table), [3], [1])
    name = fresh_name()  # a table that is not there yet
    spec = WindowSpec(name, Schema(COLUMNS), WINDOWS)
    with serving(name) as server:
        peer = server.peer()
        refused(peer, spec, f"There is no table named '{name}'")
        with named(name=name) as table:
            check_fetch(peer, filled(table), spec, [3], [1])


def test_a_table_that_was_removed_and_made_again(shelf: Shelf) -> None:
    table, server, peer = shelf
    spec = spec_of(table)
    check_fetch(peer, table, spec, [3], [1])
    table.unlink()
    cause = refused(peer, spec, f"Table '{table.name}' has been removed since", 1).__cause__
    assert isinstance(cause, StaleIndexError)
    refused(peer, spec, f"There is no table named '{table.name}'", 1)
    sizes = {"max_steps": 300, "max_trajectories": 20, "block_steps": 2}
    with gear.Table.create(COLUMNS, name=str(table.name), **sizes) as again:
        filled(again, 50)
        check_fetch(peer, again, spec, [3, 5], [1, 2])
        again.unlink()
    # It is not asked for any more, and still its memory is given back.
    wait_until(
        lambda: not server.server.resources.tables.sweep() and not server.server.resources.tables._attached
    )


# ---------------------------------------------------------------- storing


def storing(table: gear.Table, *trajectories: dict[str, Any], **more: Any) -> tuple[Any, ...]:
    """Arguments of `Peer.store`."""
    n = len(trajectories)
    priorities = np.asarray(more.get("priorities", [UNSET] * n), dtype=np.float32)
    ids = np.asarray(more.get("ids", [-1] * n), dtype=np.int64)
    checked = [Rows.of(table.schema, each, f"trajectory {i}") for i, each in enumerate(trajectories)]
    return str(table.name), table.schema, checked, priorities, ids


def test_storing(shelf: Shelf) -> None:
    table, _, peer = shelf
    slots = peer.store(*storing(table, rows(50, 3), rows(51, 20))).result(PATIENCE)
    assert slots.dtype == np.int64
    assert slots.tolist() == table.indices()[-2:].tolist()
    assert numbers_of(table) == [*range(8), 50, 51]
    assert (table._engine.reader().arrays.priority[slots] == UNSET).all()
    assert peer.store(*storing(table)).result(PATIENCE).tolist() == []
    for priorities, ids in (
        ([0.5, 0, 7], [-1] * 3),
        ([UNSET] * 3, [700, -1, 1 << 40]),
        ([2, UNSET, 0], [-1, 5, -1]),
    ):
        trajectories = [rows(50 + i, 1 + i) for i in range(3)]
        slots = peer.store(*storing(table, *trajectories, priorities=priorities, ids=ids)).result(PATIENCE)
        assert table._engine.reader().arrays.priority[slots].tolist() == np.float32(priorities).tolist()
        assert all(one in (found, -1) for found, one in zip(table.ids(slots).tolist(), ids, strict=True))
        assert numbers_of(table)[-3:] == [50, 51, 52]
        table.remove(slots)
    table.check_valid()


def test_what_cannot_be_stored_changes_nothing(shelf: Shelf) -> None:
    table, _, peer = shelf
    good = rows(50, 3)

    def not_stored(message: str, *arguments: Any) -> BaseException | None:
        with pytest.raises(TransportError, match=message) as found:
            peer.store(*arguments).result(PATIENCE)
        return found.value.__cause__

    with pytest.raises(SchemaError, match=r"ids is int32"):
        peer.store(*storing(table, good)[:4], np.zeros(1, dtype=np.int32))
    for priority in (-2.0, np.nan, np.inf):
        for other in (UNSET, 1.0):
            both = storing(table, good, good, priorities=[other, priority])
            cause = not_stored("expected finite numbers that are not negative", *both)
            assert isinstance(cause, (SchemaError, PriorityError))
    not_stored("expected different ids", *storing(table, good, good, ids=[5, 5]))
    one, name, schema = storing(table, good), str(table.name), Schema({"a": gear.Column(torch.int8)})
    small = [Rows.of(schema, {"a": np.zeros(3, dtype=np.int8)}, "one")]
    not_stored(r"the requester expects \{a int8\[\]\}", name, schema, small, *one[3:])
    not_stored("'other' is not served", "other", *one[1:])
    not_stored("this table holds at most 200", *storing(table, rows(1, 201)))
    cause = not_stored("to be stored into", *storing(table, *[rows(1, 90)] * 2))
    assert isinstance(cause, TableFullError)
    assert len(table) == 8
    table.check_valid()


def test_metadata(shelf: Shelf) -> None:
    table, server, peer = shelf
    name, answers = str(table.name), server.server.resources.metadata
    answers |= {"test": lambda name: name.encode() * 1000, "empty": lambda name: b""}
    answers["broken"] = lambda name: [][1]
    assert peer.metadata("test", name).result(PATIENCE) == name.encode() * 1000
    assert peer.metadata("empty", name).result(PATIENCE) == b""
    for what, which, message in (
        ("pigeon", name, "has no metadata called 'pigeon'; it has broken, capacity, empty"),
        ("test", "other", "'other' is not served"),
        ("broken", name, "IndexError"),
    ):
        with pytest.raises(TransportError, match=message):
            peer.metadata(what, which).result(PATIENCE)
    check_fetch(peer, table, spec_of(table), [3], [1])
