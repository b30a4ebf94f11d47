"""Specs, headers, fields and addresses: what is written is read again, and nothing else is believed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from table_common import COLUMNS
from transport_common import WINDOWS

import gear_loader as gear
from gear_loader.collection.n_step import ReturnWindows
from gear_loader.errors import HandshakeError, SchemaError, TableFullError, TransportError
from gear_loader.storage.schema import Schema, Window
from gear_loader.transport import Address, Limits, WindowSpec, carrier
from gear_loader.transport.channel import family
from gear_loader.transport.spec import PackedSpec, read_spec
from gear_loader.transport.store_message import Store, step_places
from gear_loader.transport.wire import (
    HEADER,
    Fields,
    Header,
    Kind,
    PartsMissingError,
    ProtocolError,
    VersionError,
    failure,
    pack_error,
    pack_text,
    read_error,
)

SPEC = WindowSpec("replay", Schema(COLUMNS), WINDOWS)
PACKED = PackedSpec("replay", Schema(COLUMNS), {"a": "step", "b": "value"})


def test_a_spec_lays_out_columns_then_masks() -> None:
    pieces = SPEC.pieces(3)
    columns = [("number", 24), ("step", 20), ("length", 12), ("value", 60), ("check", 32)]
    expected = [(name, "column", size) for name, size in columns]
    expected += [(name, "mask", size) for name, size in (("number", 3), ("step", 5), ("check", 4))]
    assert [(each.name, each.kind, each.row_bytes) for each in pieces] == expected
    assert [each.offset for each in pieces] == [128 * i for i in (0, 1, 2, 3, 5, 6, 7, 8)]
    assert (SPEC.row_bytes, SPEC.data_bytes(3)) == (160, 128 * 9)
    assert (SPEC.reply_bytes(3), SPEC.reply_bytes(0)) == (128 * 10, 0)
    turned = WindowSpec("t", Schema(COLUMNS), dict(reversed(WINDOWS.items())))
    assert list(turned.windows) == list(COLUMNS)
    assert turned.pieces(5) == SPEC.pieces(5)
    again = read_spec(SPEC.to_bytes())
    assert isinstance(again, WindowSpec)
    assert (again.table, again.windows) == (SPEC.table, SPEC.windows)
    assert again.schema.to_json() == SPEC.schema.to_json()
    assert again.pieces(7) == SPEC.pieces(7)
    for windows in ({}, {"nothing": Window(1)}):
        with pytest.raises(SchemaError, match=r"expected at least one of the columns \['number'"):
            WindowSpec("t", Schema(COLUMNS), windows)
    with pytest.raises(SchemaError, match="bytes a row; expected less"):
        WindowSpec("t", Schema({"a": gear.Column(torch.float64, (2**12,))}), {"a": Window(2**30)})


def changed(**fields: Any) -> bytes:
    spec = PACKED if "packed" in fields else SPEC
    return json.dumps({**json.loads(spec.to_bytes()), **fields}).encode()


def window(*values: Any) -> bytes:
    return changed(windows=[["step", *values]])


SPECS: list[tuple[bytes, str]] = [
    (b"", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b"1" * 10_000, "not JSON|a spec|A spec"),
    (b" " * (2 << 20), "expected at most 1,048,576"),
    (b"[]", "a list of 0; expected table, columns and windows"),
    (b'{"table": "a"}', "a dict of 1; expected table, columns"),
    (changed(more=1), "a dict of 4"),
    (changed(table=5), "5 as table"),
    (changed(table=""), "as table"),
    (changed(table="x" * 200), "as table"),
    (changed(columns=5), "5 as columns"),
    (changed(columns=[]), "list of 0 as columns"),
    (changed(columns=[["a", "float32", []]] * 5000), "list of 5000 as columns"),
    (changed(columns=[["a", "float32"]]), r"A schema's columns: .*expected \[name, dtype, shape\]"),
    (changed(columns=[[1, "float32", []]]), "Column name 1 was received"),
    (changed(columns=[["x" * 2000, "float32", []]]), "a name of at most 1,024 characters"),
    (changed(columns=[["a", "float32", [2**30, 2**30]]]), r"less than 1,099,511,627,776 bytes"),
    (changed(columns=[["mask", "float32", []]]), "A schema's columns"),
    (changed(windows={}), "as windows; expected a list"),
    (changed(windows=[]), "list of 0 as windows"),
    (window(1, 0), r"as windows\[0\]; expected \[name"),
    (changed(windows=[["step", 1, 0, "keep"]] * 2), r"as windows\[1\]"),
    (window(0, 0, "keep"), r"windows\[0\] of a spec: Window length is 0"),
    (window(1.5, 0, "keep"), "expected an integer"),
    (window(1, 2**40, "keep"), "out of range"),
    (window(1, 0, "left"), "expected 'keep'"),
    (window(1, 0, {}), "expected 'keep'"),
    (changed(windows=[["nothing", 1, 0, "keep"]]), "at least one of the columns"),
    (changed(packed=[]), "list of 0 as packed"),
    (changed(packed=[["a", "step"]] * 2), r"as packed\[1\]; expected \[name, column\], each name once"),
    (changed(packed=[["a"]]), r"as packed\[0\]"),
    (changed(packed=[["a", 5]]), r"as packed\[0\]"),
    (changed(packed=[["a", "nothing"]]), "at least one of them with steps"),
    (changed(packed=[["a", "step"]], windows=[]), "a dict of 4"),
]


def test_a_spec_is_checked_field_by_field() -> None:
    for data, message in SPECS:
        with pytest.raises(TransportError, match=message) as caught:
            read_spec(data)
        assert len(str(caught.value)) < 2000


# ---------------------------------------------------------------- headers and fields


@given(st.sampled_from(Kind), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_a_header_survives_the_wire(kind: Kind, request: int, small: int, bulk: int) -> None:
    header = Header(kind, request, small, bulk)
    data = header.pack()
    assert len(data) == HEADER
    assert Header.parse(memoryview(data)) == header


@given(st.binary(min_size=HEADER, max_size=HEADER), st.integers(0, HEADER * 8 - 1))
def test_a_header_with_one_wrong_bit_is_refused(noise: bytes, bit: int) -> None:
    for data in (noise, Header(Kind.FETCH, 5, 80, 0).pack()):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            Header.parse(memoryview(broken))


def test_returns_in_a_spec() -> None:
    schema = Schema({
        "reward": gear.Column(torch.float32),
        "done": gear.Column(torch.bool),
        "obs": gear.Column(torch.uint8, (300,)),
        "goal": gear.Column(torch.uint8, per="trajectory"),
    })  # fmt: skip
    windows = {
        name: gear.Window(3 if name in ("reward", "done") else 1) for name in ("reward", "done", "obs")
    }
    returns = [ReturnWindows("reward", "done", 0.5, ("obs",))]
    spec = WindowSpec("t", schema, windows, returns)
    read = read_spec(spec.to_bytes())
    assert isinstance(read, WindowSpec)
    assert (read.returns, read.windows) == (tuple(returns), spec.windows)
    assert [piece.row_bytes for piece in read.pieces(2)] == [4, 4, 300, 1, 8]
    fields = json.loads(spec.to_bytes())
    for wrong in (
        ["reward", "done", 0.5],
        ["reward", "done", 2.0, ["obs"]],
        ["reward", "done", float("nan"), ["obs"]],
        ["reward", "done", True, []],
        ["reward", "reward", 0.5, []],
        ["obs", "done", 0.5, []],
        ["reward", "obs", 0.5, []],
        ["reward", "done", 0.5, ["reward"]],
        ["reward", "done", 0.5, ["goal"]],
        ["reward", "done", 0.5, [3]],
        ["reward", "done", 0.5, "obs"],
        "reward",
    ):
        with pytest.raises(
            TransportError, match=r"A spec's windows: .*(returns|gamma)|A spec's windows: Returns"
        ):
            read_spec(json.dumps({**fields, "returns": [wrong]}).encode())
    for wrong in ("all", [returns[0]] * 2):
        with pytest.raises(TransportError, match="A spec's windows"):
            read_spec(json.dumps({**fields, "returns": wrong}).encode())


def test_versions_and_kinds_of_headers() -> None:
    """The first bytes are the same in every version."""
    assert Header(Kind.HELLO, 0, 1, 2).pack()[:16] == b"GEARWIRE" + bytes([8, 0, 1, 0, 0, 0, 0, 0])
    with pytest.raises(VersionError, match="version 9; this side speaks version 8"):
        Header.parse(memoryview(Header(Kind.HELLO, 0, 1, 2).pack(version=9)))
    with pytest.raises(ProtocolError, match="kind 99; expected 1 to 30"):
        Header.parse(memoryview(Header(99, 0, 0, 0).pack()))  # type: ignore[arg-type]


def test_fields_are_read_one_after_another() -> None:
    values = np.arange(3, dtype="<i8")
    fields = Fields((5).to_bytes(4, "little") + pack_text("grün") + values.tobytes() + b"rest", "TEST")
    assert fields.number(4, "n") == 5
    assert fields.text("name") == "grün"
    assert fields.array(3, "<i8", "values").tolist() == [0, 1, 2]
    with pytest.raises(ProtocolError, match="A message TEST has 4 bytes too many"):
        fields.end()
    with pytest.raises(ProtocolError, match="more of a message TEST takes 40 bytes; 4 are left"):
        fields.array(5, "<i8", "more")
    assert bytes(fields.rest()) == b"rest"
    fields.end()


def test_texts_are_checked() -> None:
    with pytest.raises(ProtocolError, match="name of a message TEST has 9 bytes; expected at most 8"):
        Fields(pack_text("123456789"), "TEST").text("name", 8)
    with pytest.raises(ProtocolError, match="name of a message TEST is not UTF-8"):
        Fields(b"\x02\x00\xff\xff", "TEST").text("name")
    cut = pack_text("ü" * 5000)
    assert len(cut) <= 2 + 4096
    assert Fields(cut, "TEST").text("name").endswith("...")
    assert Fields(pack_text("a\ud800"), "TEST").text("name") == "a\\ud800"


def test_errors_keep_their_class_and_text() -> None:
    for error in (TableFullError("a"), SchemaError("b"), HandshakeError("c"), TransportError("d")):
        again = read_error(pack_error(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
        made = failure(again, "node b was asked")
        assert isinstance(made, HandshakeError) == isinstance(error, HandshakeError)
        assert made.__cause__ is again
        assert str(error) in str(made)
    assert issubclass(HandshakeError, TransportError)
    assert (
        str(read_error(pack_error(KeyError("x")))) == "KeyError: 'x'"
    )  # others become errors of the transport
    assert type(read_error(b"\xff\xff" + pack_text("from the future"))) is TransportError
    assert str(read_error(b"\x00\x00" + pack_text("a\nb\x1b[31m"))) == "a?b?[31m"


def store_of(**changes: Any) -> Store:
    fields: dict[str, Any] = {
        "table": "t",
        "schema": Schema(COLUMNS),
        "lengths": np.array([3, 1]),
        "ids": np.array([-1, 4]),
        "priorities": np.array([1, -1], dtype=np.float32),
        "finals": np.array([1, 0]),
    }
    return Store(**{**fields, **changes})


def test_a_store_survives_the_wire() -> None:
    store = store_of()
    assert store.columns == [(0, 32), (128, 16), (256, 16), (384, 48), (512, 32)]
    assert store.bulk_bytes == 640
    again = Store.parse(store.pack(), store.bulk_bytes, Limits())
    assert again.table == "t"
    assert again.schema.to_json() == store.schema.to_json()
    for name in ("lengths", "ids", "priorities"):
        assert getattr(again, name).tolist() == getattr(store, name).tolist()


def with_parts(**changes: Any) -> Store:
    """Nine rows, the first six of which have come in two parts."""
    one = {"lengths": np.array([9]), "ids": np.array([4]), "finals": np.array([0])}
    one["priorities"] = np.array([1], dtype=np.float32)
    return store_of(**{**one, "parts": 2, "before": 6, **changes})


def test_a_store_with_parts_survives_the_wire_and_is_joined() -> None:
    store = with_parts()
    again = Store.parse(store.pack(), store.bulk_bytes, Limits())
    assert (again.parts, again.before) == (2, 6)
    whole = with_parts(parts=0, before=0)
    data = np.arange(whole.bulk_bytes).astype(np.uint8)

    def rows(begin: int, end: int, places: dict[str, tuple[int, int]], size: int) -> np.ndarray:
        part = np.zeros(size, dtype=np.uint8)
        for (name, column), (at, _) in zip(COLUMNS.items(), whole.columns, strict=True):
            to, count = places[name]
            part[to : to + count] = data[at + begin * column.step_bytes : at + end * column.step_bytes]
        return part

    schema = Schema(COLUMNS)
    parts = [(4, rows(0, 4, *step_places(schema, 4))), (2, rows(4, 6, *step_places(schema, 2)))]
    rest = rows(6, 9, dict(zip(COLUMNS, store.columns, strict=True)), store.bulk_bytes)
    made, joined = store.joined(parts, rest)
    assert made.pack() == whole.pack()
    for at, size in whole.columns:
        assert joined[at : at + size].tolist() == data[at : at + size].tolist()
    for wrong in ([], parts[:1], [parts[0], (3, parts[1][1])], [parts[0], (2, parts[1][1][:-1])]):
        with pytest.raises(PartsMissingError, match="does not have 2 parts with 6 steps"):
            store.joined(wrong, rest)


LENGTHS = "lengths of a message STORE"
MANY = ("lengths", "ids", "priorities", "finals")
STORES: list[tuple[bytes, int, str]] = [
    (b"", 0, "n of a message STORE takes 4 bytes"),
    (b"\xff" * 8, 0, "n of a message STORE is 4,294,967,295; expected at most 65,536"),
    (b"\x01\x00\x00\x00\x10\x00\x00\x00", 0, "flags of a message STORE is 16; expected at most 15"),
    (b"\x02\x00\x00\x00\x04\x00\x00\x00", 0, "lengths of a message STORE takes 16 bytes"),
    (b"\x01\x00\x00\x00\x00\x00\x00\x00", 0, "lengths of a message STORE takes 8 bytes"),
    (store_of(lengths=np.array([3, 0])).pack(), 640, LENGTHS),
    (store_of(finals=np.array([0, 1])).pack(), 640, "finals of a message STORE"),
    (store_of(finals=np.array([2, 0])).pack(), 640, "finals of a message STORE"),
    (store_of(lengths=np.array([3, -(2**63)])).pack(), 640, LENGTHS),
    (store_of(lengths=np.array([3, 2**63 - 1])).pack(), 640, LENGTHS),
    (store_of(lengths=np.array([600, 600])).pack(), 640, "which is not what 2 trajectories"),
    (with_parts(before=10).pack(), 640, f"{LENGTHS} has a number outside of 10 to 650"),
    (with_parts(lengths=np.array([700])).pack(), 640, f"{LENGTHS} has a number outside of 6 to 646"),
    (with_parts(before=0).pack(), 640, "0 rows in 2 parts"),
    (with_parts(before=2**63).pack(), 640, "9,223,372,036,854,775,808 rows in 2 parts"),
    (with_parts(before=2**27, lengths=np.array([2**27])).pack(), 640, "at most 268,435,456 bytes are taken"),
    (store_of().pack(), 641, "which is not what 2 trajectories"),
    (store_of().pack(), 512, "which is not what 2 trajectories"),
    (
        store_of().pack().replace(pack_text("t"), pack_text("x" * 200)),
        640,
        "table of a message STORE has 200 bytes",
    ),
    (
        with_parts(**{n: getattr(store_of(), n) for n in MANY}).pack(),
        640,
        "STORE of 2 trajectories has parts",
    ),
    (store_of().pack()[:-1], 640, "schema of a message STORE is not JSON"),
    (store_of().pack() + b"]", 640, "schema of a message STORE is not JSON"),
]


def test_a_store_is_checked_field_by_field() -> None:
    for data, bulk, message in STORES:
        with pytest.raises(TransportError, match=message):
            Store.parse(data, bulk, Limits())


# ---------------------------------------------------------------- limits, addresses, carriers


def test_limits_are_checked() -> None:
    wrong: list[tuple[str, Any]] = [("rows", 0), ("rows", 2**24), ("reply_bytes", -1), ("specs", 1.5)]
    for name, value in [*wrong, ("handshake", 0), ("patience", "1")]:
        with pytest.raises(ValueError, match=f"^{name} is "):
            Limits(**{name: value})


def test_addresses() -> None:
    for text, parts in (
        ("socket://127.0.0.1:5555", ("socket", "127.0.0.1", 5555, "")),
        ("ucx://node-7:1?library=ucxx-0.52.0", ("ucx", "node-7", 1, "ucxx-0.52.0")),
        ("socket://[::1]:80", ("socket", "::1", 80, "")),
    ):
        address = Address.parse(text)
        assert (address.carrier, address.host, address.port, address.library) == parts
        assert str(address) == text
    assert Address.parse("socket://a:1?library=").library == ""
    places = ("", "a", "a:0", "a:99999", "a:b", "u@a:1", "a:1/path", "a:1?x=1", "a:1#x", "[::1:5")
    for text in ("", "127.0.0.1:5", "x" * 5000, *(f"socket://{place}" for place in places)):
        with pytest.raises(TransportError, match="expected <carrier>://<host>:<port>"):
            Address.parse(text)
    with pytest.raises(TransportError, match=r"expected a library with its version"):
        Address.parse("ucx://a:1?library=a%0Ab")


def test_carriers_and_families_of_libraries() -> None:
    libraries = ("socket", "ucxx-0.52.0", "ucx-py-0.45.0")
    assert [family(each) for each in libraries] == ["socket", "ucxx", "ucx-py"]
    with pytest.raises(TransportError, match="Carrier 'pigeon' was received; expected one of socket, ucx"):
        carrier("pigeon")
    assert carrier("socket").library == "socket"
