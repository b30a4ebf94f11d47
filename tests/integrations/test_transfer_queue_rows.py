"""Samples of TransferQueue in a table: fields of any kind, puts of others beside, stale rows, and what is recovered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import gear_loader as gear
from gear_loader.errors import SchemaError, TableFullError
from gear_loader.integrations.transfer_queue_fields import packed, unpacked, values_of
from gear_loader.integrations.transfer_queue_rows import BLOCK_STEPS, SCHEMA, Rows

pytest.importorskip("msgpack")

N = 8
JAGGED = torch.nested.as_nested_tensor([torch.arange(i) for i in range(1, N + 1)], layout=torch.jagged)
FIELDS: dict[str, Any] = {
    "dense": torch.arange(N * 5.0).view(N, 5),
    "jagged": JAGGED,
    "scalar": torch.arange(N) * 1.5,
    "shapes": [torch.full((i + 1, 3 + i % 2), float(i)) for i in range(N)],
    "ranks": [torch.ones((2,) * (i % 3)) for i in range(N)],
    "dtypes": [torch.ones(2, dtype=torch.int8 if i % 2 else torch.float64) for i in range(N)],
    "bfloat16": torch.ones(N, 2, 3, dtype=torch.bfloat16),
    "bool": torch.arange(N) % 2 == 0,
    "empty": torch.empty(N, 0),
    "no_bytes": torch.zeros(N, 3, 0),
    "text": ["é" * i for i in range(N)],
    "large": [2**70 - i for i in range(N)],
    "nested": [{"a": (1, [None, b"x"]), 3: torch.ones(3), "n": np.arange(4.0)} for _ in range(N)],
    "bytes": np.array([f"bs_{i}".encode() for i in range(N)], dtype="S10"),
    "objects": np.array([[f"a{i}"] for i in range(N)] + [None], dtype=object)[:N],
}


@pytest.fixture
def table() -> Iterator[gear.Table]:
    with gear.Table.create(
        SCHEMA,
        max_steps=1 << 14,
        max_trajectories=1 << 10,
        block_steps=BLOCK_STEPS,
        memory=gear.Memory(payload="16MiB"),
        name=f"samples-{np.random.default_rng().integers(1 << 40)}",
    ) as made:
        yield made
        made.check_valid()
        made.unlink()


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other, strict=True)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key])
    else:
        assert one == other


def put(rows: Rows, indexes: Any, fields: dict[str, Any], partition: str = "train") -> None:
    indexes = np.asarray(indexes, dtype=np.int64)
    names = [packed([partition, f"key{i}", {"n": i}], "tag") for i in indexes.tolist()]
    rows.put(indexes, [values_of(name, value) for name, value in fields.items()], names)


def listed(column: Any) -> list[Any]:
    return list(column.unbind()) if isinstance(column, torch.Tensor) else list(column)


def test_every_field_comes_back_to_another_reader_in_any_order(table: gear.Table) -> None:
    writer, indexes = Rows(table), np.arange(N) * 3
    with gear.Table.attach(table.name or "") as attached:
        reader, order = Rows(attached), np.array([5, 2, 2, 7, 0])
        put(writer, indexes, FIELDS)
        found = reader.get(indexes[order], [*FIELDS])
        for name, value in FIELDS.items():
            given = listed(value)
            assert len(listed(found[name])) == len(order)
            for place, one in zip(order, listed(found[name]), strict=True):
                same(given[place], one)
        dense: Any = found["dense"]
        dense.values()[:] = -1
        same(FIELDS["dense"][5], listed(reader.get(indexes[[5]], ["dense"])["dense"])[0])  # it was a copy


def test_fields_of_the_same_lengths_are_used_together(table: gear.Table) -> None:
    rows = Rows(table)
    put(rows, range(N), {"a": JAGGED, "b": [2 * each for each in JAGGED.unbind()], "c": torch.zeros(N, 4)})
    found: Any = rows.get(np.arange(N)[::-1], ["c", "b", "a"])
    assert (found["b"] - 2 * found["a"]).values().abs().sum() == 0


def test_later_fields_and_other_values_of_some_samples(table: gear.Table) -> None:
    one, other = Rows(table), Rows(table)
    put(one, range(6), {"a": torch.zeros(6, 2), "b": torch.zeros(6)})
    put(other, [4, 1], {"a": torch.tensor([[4.0] * 3, [1.0] * 3]), "late": torch.tensor([4, 1])})
    found = listed(one.get(np.arange(6), ["a"])["a"])
    assert [each.tolist() for each in found] == [[0, 0], [1, 1, 1], [0, 0], [0, 0], [4, 4, 4], [0, 0]]
    assert one.get(np.array([1, 4]), ["b", "late"])["late"].tolist() == [1, 4]  # type: ignore[union-attr]
    with pytest.raises(KeyError, match=r"field 'late' of the samples \[0, 2\]"):
        one.get(np.array([0, 1, 2]), ["late"])
    with pytest.raises(KeyError, match="'none'"):
        one.get(np.array([1]), ["none"])
    before = len(table)
    put(one, [1], {"a": torch.ones(1, 1), "late": torch.ones(1)})  # in place of the one before
    assert len(table) == before + 1  # a set of fields that is new: these have other dtypes
    put(other, range(6), {"a": torch.zeros(6, 2), "b": torch.zeros(6), "late": torch.zeros(6)})
    assert len(table) == 6 + 4, "nothing that is hidden stays, and four sets of fields are described"


def test_what_was_removed_is_gone_for_all_and_an_index_can_come_again(table: gear.Table) -> None:
    one, other = Rows(table), Rows(table)
    put(one, range(5), {"a": torch.arange(5)})
    put(one, [3], {"b": torch.ones(1)})
    other.get(np.arange(5), ["a"])
    one.remove(np.array([3, 4, 99]))
    for rows in (one, other):
        with pytest.raises(KeyError, match=r"\[3, 4\]"):
            rows.get(np.arange(5), ["a"])
    put(other, [3], {"a": torch.tensor([33])}, "test")
    assert one.get(np.array([3, 0]), ["a"])["a"].tolist() == [33, 0]  # type: ignore[union-attr]
    with pytest.raises(KeyError, match="'b'"):
        one.get(np.array([3]), ["b"])
    one.remove(np.arange(5))
    assert [len(each.rows) for each in one.samples()] == []


def test_names_and_sizes_for_a_new_controller(table: gear.Table) -> None:
    put(Rows(table), range(3), {"a": JAGGED.unbind()[:3], "b": ["x", "y", "z"]})
    put(Rows(table), [1], {"c": torch.ones(1)}, "test")
    first, second = Rows(table).samples()
    assert first.rows.tolist() == [0, 1, 2]
    assert unpacked(first.names[2]) == ["train", "key2", {"n": 2}]
    assert first.sizes[:, 0].tolist() == [8, 16, 24]
    assert unpacked(second.names[0])[0] == "test"
    assert second.fields[0][:3] == ("c", "scalar", "float32")


def test_errors_before_anything_changes(table: gear.Table) -> None:
    rows = Rows(table)
    with pytest.raises(SchemaError, match=r"Field 'a' has .*a set.*not pickled"):
        put(rows, [0], {"a": [{1, 2}]})
    with pytest.raises(SchemaError, match="Memory payload"):
        put(rows, [0], {"a": torch.zeros(1, 17 << 20, dtype=torch.uint8)})
    with pytest.raises(TableFullError):
        put(rows, range(1024), {"a": torch.zeros(1024)})
    assert [*rows.samples()] == []


def test_readers_beside_writers_see_whole_samples(table: gear.Table) -> None:
    """Two threads put and remove the same samples while another reads: each read has the fields of one put."""
    done, found = threading.Event(), list[int]()
    put(Rows(table), range(16), {"a": torch.zeros(16, 64), "b": torch.zeros(16)})

    def write(seed: int) -> None:
        rows, random = Rows(table), np.random.default_rng(seed)
        while not done.is_set():
            chosen = random.permutation(16)[:5]
            value = float(random.integers(1 << 20))
            put(rows, chosen, {"a": torch.full((5, 64), value), "b": torch.full((5,), value)})

    threads = [threading.Thread(target=write, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    try:
        rows = Rows(table)
        for _ in range(60):
            got: Any = rows.get(np.arange(16), ["a", "b"])
            values = got["a"].values().view(16, 64)
            assert (values == got["b"][:, None]).all()
            found.append(int(values[0, 0]))
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert len(set(found)) > 1
