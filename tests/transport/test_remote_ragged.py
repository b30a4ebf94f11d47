"""Ragged columns of a table behind a server: every way to add, lost answers, and requests that lie."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import struct
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_remote_table import connected, named, url_of
from tier_common import spill, tier_at
from transport_common import SECRET, Proxy, serving

import gear_loader as gear
from gear_loader.errors import CodecError, FilledError, SchemaError, StaleIndexError, TransportError
from gear_loader.storage.late import fill_columns
from gear_loader.storage.schema import Schema
from gear_loader.transport import ragged_rows
from gear_loader.transport.delivery import Delivery
from gear_loader.transport.spec import ValueSpec
from gear_loader.transport.store_message import Rows, Store, bulk_parts
from gear_loader.transport.wire import Kind, Limits

COLUMNS = {
    "step": gear.Column(torch.int64),
    "tokens": gear.Column(torch.int32, (None,)),
    "points": gear.Column(torch.bfloat16, (None, 2)),
    "text": gear.Column(str),
    "blob": gear.Column(bytes),
    "meta": gear.Column(object),
    "image": gear.Column(torch.uint8, (4, 4, 3), codec="png"),
    "frame": gear.Column(torch.uint8, (16, 16, 3), codec="video"),
    "task": gear.Column(str, per="trajectory"),
    "scores": gear.Column(torch.float32, (None,), late=True),
    "verdict": gear.Column(object, per="trajectory", late=True),
}
SIZES = {"max_steps": 2000, "max_trajectories": 200, "memory": gear.Memory(payload="8MiB")}
LATE = ("scores", "verdict")


def values(number: int, length: int = 3) -> dict[str, Any]:
    chance = np.random.default_rng(number)
    sizes = chance.integers(0, 30, length).tolist()
    return {
        "step": number * 100 + np.arange(length),
        "tokens": [chance.integers(0, 99, n).astype(np.int32) for n in sizes],
        "points": [torch.full((n, 2), float(number)).bfloat16() for n in sizes],
        "text": ["é" * n + str(number) for n in sizes],
        "blob": [chance.bytes(n) for n in sizes],
        "meta": [{"number": number, "sizes": [n, None]} for n in sizes],
        "image": chance.integers(0, 255, (length, 4, 4, 3)).astype(np.uint8),
        "frame": np.full((length, 16, 16, 3), number % 200, dtype=np.uint8),
        "task": f"task {number}",
    }


def late(number: int, length: int = 3) -> dict[str, Any]:
    scores = [np.arange(number % 7 + n, dtype=np.float32) for n in range(length)]
    return {"scores": scores, "verdict": {"of": number}}


def check(table: gear.Table, slot: int, number: int, length: int = 3, *, filled: bool = False) -> None:
    row, expected = table[slot], values(number, length) | (late(number, length) if filled else {})
    assert set(row) == set(expected)
    for name, wanted in expected.items():
        found = row[name].tolist() if isinstance(row[name], gear.Ragged) else row[name]
        if name == "frame":
            assert (found.float() - torch.from_numpy(wanted).float()).abs().max() < 12
        elif name in ("tokens", "points", "scores"):
            assert all(
                np.array_equal(torch.as_tensor(a).float(), torch.as_tensor(b).float())
                for a, b in zip(found, wanted, strict=True)
            )
        elif isinstance(wanted, np.ndarray):
            assert np.array_equal(found, wanted)
        else:
            assert found == wanted


def step(rows: dict[str, Any], i: int) -> dict[str, Any]:
    return {name: value[i] for name, value in rows.items() if name != "task"}


@pytest.fixture(scope="module")
def codecs() -> None:
    for package in ("PIL", "av", "msgpack"):
        pytest.importorskip(package)


@pytest.mark.usefixtures("codecs")
def test_every_way_to_add_stores_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Delivery, "request_bytes", 6000)  # several requests
    with named(COLUMNS, **SIZES) as table, connected(table) as remote:
        check(table, remote.add(values(1)), 1)
        for slot, number in zip(
            remote.extend([values(n) for n in range(2, 9)]).tolist(), range(2, 9), strict=True
        ):
            check(table, slot, number)
        (slot,) = remote.extend(values(n, 2) for n in (9,)).tolist()
        check(table, slot, 9, 2)
        some = [values(n) for n in (10, 11)]
        stacked = {name: [each[name] for each in some] for name in some[0]}
        stacked |= {name: np.stack(stacked[name]) for name in ("step", "image", "frame")}
        for slot, number in zip(remote.extend(stacked, lengths=[3, 2]).tolist(), (10, 11), strict=True):
            assert table[slot]["text"] == values(number)["text"][: len(table[slot]["step"])]
        rows = values(12, 5)
        writer = remote.writer(wait=True)
        writer.append(step(rows, 0))
        writer.append({name: value[1:4] for name, value in rows.items() if name != "task"})
        with pytest.raises(SchemaError):
            writer.append({**step(rows, 4), "tokens": np.zeros(3, np.int64)})
        writer.append(step(rows, 4))
        slot = writer.commit(trajectory={"task": rows["task"]})
        # Frames that are appended one by one are key frames.
        check(table, slot, 12, 5)
        chunks = remote.writer(chunk_steps=2)
        chunks.trajectory = {"task": "chunk"}
        for i in range(5):
            chunks.append(step(rows, i))
        chunks.commit()
        remote.flush()
        found = [table[i]["text"] for i in range(len(table)) if table[i]["task"] == "chunk"]
        assert found == [rows["text"][:2], rows["text"][2:4], rows["text"][4:]]
        with remote.writers(3) as many:
            each = [values(n, 4) for n in (20, 21, 22)]
            many.trajectory = {"task": [rows["task"] for rows in each]}
            for i in range(4):
                given = {name: [rows[name][i] for rows in each] for name in each[0] if name != "task"}
                given |= {name: np.stack(given[name]) for name in ("step", "image", "frame")}
                many.append(given, active=np.array([True, True, i < 2]))
            many.commit()
            remote.flush()
        lengths = {table[i]["task"]: i for i in range(len(table))}
        for number, length in ((20, 4), (21, 4)):
            check(table, lengths[f"task {number}"], number, length)
        assert table[lengths["task 22"]]["text"] == each[2]["text"][:2]
        with pytest.raises(SchemaError, match="are ragged; writers with overlap_steps take"):
            remote.writer(chunk_steps=4, overlap_steps=2)
        assert remote._spool._held == 0
        table.check_valid()


@pytest.mark.usefixtures("codecs")
def test_late_values_are_filled_once_though_answers_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Delivery, "request_bytes", 4000)
    with (
        named(COLUMNS, **SIZES) as table,
        serving(table.name) as server,
        Proxy(server.address) as proxy,
        gear.connect(url_of(proxy.address, table), secret=SECRET, timeout=30.0) as remote,
    ):
        for number in range(24):
            if number % 4 == 1:
                proxy.swallow.set()
            elif number % 4 == 2:
                proxy.cut()
            slot = remote.add(values(number))
            if number % 4 == 3:
                proxy.swallow.set()
            assert remote.fill(slot, **late(number)) == 0
            check(table, slot, number, filled=True)
        assert len(table) == 24
        pair = [table.add(values(number)) for number in (30, 31)]
        each = [late(number) for number in (30, 31)]
        remote.fill(pair, **{name: [part[name] for part in each] for name in LATE})
        check(table, pair[1], 31, filled=True)
        with pytest.raises(FilledError):
            remote.fill(pair[:1], **{name: [each[0][name]] for name in LATE})
        table.check_valid()


def test_a_fill_that_a_dead_server_has_executed_is_recognised() -> None:
    columns = {"x": gear.Column(torch.int64), "late": gear.Column(torch.int32, (None,), late=True)}
    with gear.Table.create(
        columns, max_steps=99, max_trajectories=9, memory=gear.Memory(payload="64KiB")
    ) as table:
        slots = [table.add({"x": np.arange(3)}) for _ in range(3)]
        given = [[np.full(i + n, i, np.int32) for n in range(3)] for i in range(3)]
        table.fill(slots[:2], late=given[:2])
        before = table.stats()
        assert fill_columns(table._engine, slots[:2], None, {"late": given[:2]}, strict=True, again=True) == 0
        assert table.stats().payload_bytes == before.payload_bytes
        assert fill_columns(table._engine, slots, None, {"late": given}, strict=True, again=True) == 0
        assert [each.tolist() for each in table[slots[2]]["late"].tolist()] == [v.tolist() for v in given[2]]
        for other in (np.full(2, 9, np.int32), np.full(3, 1, np.int32)):
            wrong = [given[1][0], other, given[1][2]]
            with pytest.raises(FilledError):
                fill_columns(table._engine, slots[1:2], None, {"late": [wrong]}, strict=True, again=True)
        table.check_valid()


# ---------------------------------------------------------------- prefixes

GROUPED = {
    "token": gear.Column(torch.int64),
    "turn": gear.Column(str, per="trajectory"),
    "note": gear.Column(bytes, per="group"),
    "picture": gear.Column(torch.uint8, (4, 4, 3), codec="png", per="group"),
}


def tokens(number: int, length: int = 9) -> dict[str, Any]:
    return {"token": number * 100 + np.arange(length), "turn": f"turn {number}"}


@pytest.mark.usefixtures("codecs")
def test_what_trajectories_begin_with_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Delivery, "request_bytes", 300)  # several requests
    options = {**SIZES, "max_steps": 9000, "memory": gear.Memory(payload="1MiB", prefixes=True)}
    picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    with (
        named(GROUPED, **options) as table,
        serving(table.name) as server,
        Proxy(server.address) as proxy,
        gear.connect(url_of(proxy.address, table), secret=SECRET, timeout=30.0) as remote,
    ):
        first = remote.add({**tokens(1, 300), "note": b"n" * 50_000, "picture": picture})
        generation = int(table._engine.reader().slot_states()[1][first])
        before = len(proxy.heard)
        members = [remote.add(tokens(2), prefix=first, prefix_steps=290)]
        proxy.swallow.set()
        members += remote.extend(
            [tokens(number) for number in range(3, 9)],
            prefix=first,
            prefix_steps=290,
            prefix_generation=generation,
        ).tolist()
        assert len(proxy.heard) - before < 30_000
        assert table.stats().resident_bytes < 130_000
        for number, slot in enumerate(members, start=2):
            row = table[slot]
            assert row["token"].tolist() == [*(100 + np.arange(290)), *tokens(number)["token"]]
            assert (row["turn"], row["note"]) == (f"turn {number}", b"n" * 50_000)
            assert np.array_equal(row["picture"], picture)
        assert len(table) == 8
        alone, member = remote.extend(
            [{**tokens(10), "note": b"own", "picture": picture}, tokens(11)], prefix=[-1, members[0]]
        ).tolist()
        assert table[alone]["note"] == b"own"
        assert len(table[member]["token"]) == 308
        for wrong, error in (
            ({"prefix": first, "prefix_steps": 301}, SchemaError),
            ({"prefix": first, "prefix_generation": generation + 1}, StaleIndexError),
            ({"prefix": 150}, StaleIndexError),
            ({"prefix_steps": 3}, SchemaError),
            ({"prefix": [first, first]}, SchemaError),
        ):
            with pytest.raises(error):
                remote.add(tokens(12), **wrong)
        with pytest.raises(SchemaError, match="per group, and a prefix, whose values it has in common"):
            remote.add({**tokens(12), "note": b"", "picture": picture}, prefix=first)
        assert len(table) == 10
        table.check_valid()


@pytest.mark.parametrize("tier", [False, True])
def test_stacked_steps_of_a_fixed_shape_have_prefixes_too(tier: bool, tmp_path: Path) -> None:
    columns = {"token": gear.Column(torch.int64, final=True)}
    options = {
        **SIZES,
        "memory": gear.Memory(prefixes=True, max_blocks=100),
        **tier_at(tmp_path if tier else None),
    }
    with named(columns, **options) as table, connected(table) as remote:
        first = remote.add({"token": np.arange(50)})
        if tier:
            table.save(tmp_path)
            assert spill(table, [first]) == 1
        stacked = {"token": np.arange(24).reshape(3, 8)}
        for i, slot in enumerate(remote.extend(stacked, lengths=[8, 8, 5], prefix=first).tolist()):
            assert table[slot]["token"].tolist() == [*range(50), *stacked["token"][i][: 5 if i == 2 else 8]]
        slot = remote.add({"token": np.arange(3)}, final={"token": 7}, prefix=first, prefix_steps=4)
        assert table[slot]["token"].tolist() == [0, 1, 2, 3, 0, 1, 2]
        found = table.gather([slot], [6], windows={"token": gear.Window(2)})
        assert found["token"][0].tolist() == [2, 7]
        table.check_valid()
    with named(columns, **{**SIZES, "memory": None}) as table, connected(table) as remote:
        slot = remote.add({"token": np.arange(5)})
        with pytest.raises(SchemaError, match="the table shares no blocks"):
            remote.add({"token": np.arange(5)}, prefix=slot)


# ---------------------------------------------------------------- requests that lie

PLAIN = {
    "step": gear.Column(torch.int64),
    "tokens": gear.Column(torch.int32, (None,)),
    "text": gear.Column(str),
    "meta": gear.Column(object, per="trajectory"),
    "image": gear.Column(torch.uint8, (4, 4, 3), codec="png", per="trajectory"),
}


def plain(number: int = 1) -> dict[str, Any]:
    rows = values(number)
    return {name: rows[name] for name in ("step", "tokens")} | {
        "text": ["aé", "", "ü"],
        "meta": {"a": [1]},
        "image": rows["image"][0],
    }


def stored(table: gear.Table, payload: int | None = None, count: int = 2) -> tuple[bytes, bytearray, Store]:
    """A STORE of trajectories in its parts, to be changed, and what its columns are."""
    rows = Rows.listed(table.schema, [plain()] * count)
    size = sum(each.value_bytes for each in rows)
    lengths, given = np.full(count, 3), -np.ones(count, np.int64)
    request = Store(
        str(table.name),
        table.schema,
        lengths,
        given,
        np.full(count, -1, np.float32),
        np.zeros(count, np.int64),
        payload=size,
    )
    return request.pack(), bytearray(b"".join(bytes(part) for part in bulk_parts(request, rows))), request


@pytest.mark.usefixtures("codecs")
def test_records_that_lie_change_nothing() -> None:
    with named(PLAIN, **SIZES) as table, serving(table.name) as server:
        small, bulk, request = stored(table)
        places = dict(zip(table.schema, request.columns, strict=True))
        tokens, text, meta = places["tokens"][0], places["text"][0], places["meta"][0]
        values_at = len(bulk) - request.payload
        token_bytes = sum(4 * len(each) for each in plain()["tokens"]) * 2

        def changed(at: int, new: bytes, more: bytes = b"", cut: int = 0) -> bytes:
            data = bytearray(bulk)
            data[at : at + len(new)] = new
            return bytes(data[: len(data) - cut]) + more

        number = struct.Struct("<q").pack
        lies = [
            (changed(tokens + 8, number(-1)), "do not describe its values"),
            (changed(tokens + 8, number(1 << 62)), "do not describe its values"),
            (changed(tokens + 8, number(-(1 << 63))), "do not describe its values"),
            (changed(tokens, number(8)), "do not describe its values"),
            (changed(tokens + 8, number(0)), "Column 'text' of trajectory 0, step 0, is not text|msgpack"),
            (changed(0, b"", more=b"x"), "of which its records describe"),
            (changed(0, b"", cut=1), "do not describe its values"),
            (changed(0, b"", cut=request.payload), "do not describe its values"),
            (
                changed(values_at + token_bytes + 1, b"\xff"),
                "Column 'text' of trajectory 0, step 0, is not text",
            ),
            (
                changed(text + 8, number(2) + number(0) + number(1)),
                "Column 'text' of trajectory 0, step 1, is not text",
            ),
            (
                changed(values_at + token_bytes + 10, b"\xc1"),
                "Column 'meta' of trajectory 0 is not of msgpack",
            ),
            (changed(meta + 8, number(0)), "describe|msgpack|png"),
        ]
        with server.proven() as raw:
            for data, message in lies:
                raw.send(Kind.STORE, small, data)
                found = raw.error()
                assert re.search(message, found), (message, found)
            assert len(table) == 0
            one = dataclasses.replace(stored(table, count=1)[2], parts=1, before=1)
            with pytest.raises(TransportError, match="of ragged columns has parts"):
                Store.parse(one.pack(), one.bulk_bytes, Limits())
            raw.send(Kind.STORE, small, bytes(bulk))
            assert raw.receive()[0].kind is Kind.STORED
        assert len(table) == 2
        table.check_valid()


@pytest.mark.usefixtures("codecs")
def test_objects_and_images_that_readers_could_not_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged_rows, "MOST_OBJECT", 60)
    count = np.ones(1, np.int64)

    def take(name: str, data: bytes) -> None:
        record = np.array([[0, len(data)]], dtype=np.int64).view(np.uint8).reshape(-1)
        ragged_rows.taken({name: Schema(PLAIN)[name]}, [record], [count], np.frombuffer(data, np.uint8))

    for data in (
        b"\x81\x90\x01",
        b"\xc1",
        b"\x92\x01",
        b"\xa2\xff\xff",
        b"\x01\x01",
        b"\x91" * 2000,
        msgpack.packb([0] * 61),
    ):
        with pytest.raises(SchemaError, match=r"not of msgpack's format|is an object of"):
            take("meta", data)
    take("meta", msgpack.packb({"a": None, 3: [1.5, "x"]}))
    for data in (b"", b"no png", b"\x89PNG\r\n\x1a\n" + bytes(40)):
        with pytest.raises(SchemaError, match="that are no png"):
            take("image", data)


@settings(max_examples=30, deadline=None)
@given(st.data())
@pytest.mark.long
def test_mutated_requests_leave_a_whole_table(data: st.DataObject) -> None:
    """Any bytes of the small and of the bulk part may be changed: values are stored as they came, or not at all."""
    with named(PLAIN, **SIZES) as table, serving(table.name) as server:
        small, bulk, request = stored(table)
        parts = [*request.columns, (len(bulk) - request.payload, request.payload)]
        with server.proven() as raw:
            for _ in range(12):
                given = bytearray(bulk)
                for _ in range(data.draw(st.integers(1, 4))):
                    begin, size = data.draw(st.sampled_from(parts))
                    given[begin + data.draw(st.integers(0, size - 1))] = data.draw(st.integers(0, 255))
                end = len(given) - data.draw(st.sampled_from([0, 0, 0, 1, 64]))
                raw.send(Kind.STORE, small, bytes(given[:end]))
                assert raw.receive()[0].kind in (Kind.STORED, Kind.ERROR)
        for slot in range(len(table)):
            with contextlib.suppress(CodecError):  # without Codec(verify=True) only headers are checked
                table[slot]
        table.check_valid()


def test_requests_for_values_are_checked() -> None:
    columns = {"step": gear.Column(torch.int64), "tokens": gear.Column(torch.int32, (None,))}
    with named(columns, **SIZES) as table, serving(table.name) as server:
        given = [np.arange(n, dtype=np.int32) for n in (5, 0, 9)]
        slots = [table.add({"step": np.arange(3), "tokens": given}) for _ in range(3)]
        table.remove(slots[1])
        records = [
            np.array(table._engine.region.column("tokens")[table._engine.index.arrays.row(s)])
            .reshape(-1, 16)
            .view(np.int64)[:3]
            for s in slots
        ]
        spec, peer = ValueSpec(str(table.name), table.schema, {"tokens": None}), server.peer()
        generations = table._engine.reader().slot_states()[1]

        def fetch(rows: list[tuple[int, ...]]) -> tuple[np.ndarray[Any, Any], list[int]]:
            parts = [np.array(part, dtype=np.int64) for part in zip(*rows, strict=True)]
            total = int(parts[3].sum())
            out = np.full(spec.reply_bytes(len(rows), total), 7, np.uint8)
            status = peer.fetch(spec, *parts, out=out).result()
            return out[: 4 * total].view(np.int32), status.tolist()

        def row(slot: int, value: int, first: int = 0, count: int | None = None) -> tuple[int, ...]:
            place, rows = records[slots.index(slot)][value].tolist()
            return slot, first, int(generations[slot]), rows - first if count is None else count, place, rows

        found, status = fetch(
            [
                row(slots[0], 0, 2),
                row(slots[1], 2),
                row(slots[2], 2, 0, 4),
            ]
        )
        assert status == [0, 1, 0]
        assert found.tolist() == [2, 3, 4, *[0] * 9, 0, 1, 2, 3]
        whole = row(slots[0], 2)
        assert fetch([whole, row(slots[0], 1)])[1] == [0, 0]
        for wrong in (
            (*whole[:4], 1 << 50, 9),
            (*whole[:4], -whole[4], 9),
            (*whole[:4], 0, 9),
            (*whole[:3], 1 << 22, whole[4], 1 << 22),
            (*whole[:4], whole[4], -(1 << 63)),
            (whole[0], 1, *whole[2:]),
            (whole[0], -1, *whole[2:]),
        ):
            with pytest.raises(TransportError):
                fetch([wrong])
        with contextlib.suppress(
            TransportError
        ):  # what lies there is no extent, or other bytes of the payload
            fetch([(*whole[:4], whole[4], -9)])
        with pytest.raises(TransportError, match="neither its first nor its last"):
            fetch([row(slots[0], 0), row(slots[0], 0, 2), row(slots[2], 0)])
        with pytest.raises(SchemaError):
            ValueSpec("a", table.schema, {"step": None})
        assert fetch([whole])[0].tolist() == list(range(9))
        table.check_valid()


def test_values_larger_than_the_payload_memory_are_refused() -> None:
    columns = {"tokens": gear.Column(torch.int32, (None,))}
    options = {**SIZES, "memory": gear.Memory(payload=4096), "on_full": "evict_oldest"}
    with named(columns, **options) as table, connected(table) as remote:
        with pytest.raises(SchemaError, match="Create it with a larger Memory payload"):
            remote.add({"tokens": [np.zeros(2000, np.int32)]})
        for number in range(40):
            slot = remote.add({"tokens": [np.full(300, number, np.int32)] * 2})
            assert table[slot]["tokens"][1].unique().tolist() == [number]
        assert len(table) == 1
        table.check_valid()
