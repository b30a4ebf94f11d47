"""Columns with ``cast=True``: what they convert, what they refuse, and that they stay so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from options_common import nested_table

import gear_loader as gear
from gear_loader.errors import SchemaError
from gear_loader.storage.dtypes import torch_dtypes
from gear_loader.storage.schema import Schema

DTYPES = torch_dtypes()
NUMPY = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
NUMPY += ("float16", "float32", "float64", ">f8")


def table_of(dtype: torch.dtype, shape: tuple[int, ...] = (), **options: Any) -> gear.Table:
    schema = {"x": gear.Column(dtype, shape, cast=True)}
    return gear.Table.create(
        schema, **nested_table({"max_steps": 64, "max_trajectories": 16, "block_steps": 4, **options})
    )


def added(table: gear.Table, value: Any) -> list[torch.Tensor]:
    """What each way of adding stores: one, a list, an iterator, stacked; step by step, and all steps at once."""
    table.clear()
    stacked = np.stack([value] * 2) if isinstance(value, np.ndarray) else [value] * 2
    if isinstance(value, torch.Tensor):
        stacked = torch.stack([value] * 2)
    indices = [table.add({"x": value})]
    indices += table.extend([{"x": value}]).tolist()
    indices += table.extend(iter([{"x": value}])).tolist()
    indices += table.extend({"x": stacked}, lengths=[len(value)] * 2).tolist()
    with table.writer() as writer:
        for step in value:
            writer.append(x=step)
        indices.append(writer.commit())
        writer.append(x=value)
        indices.append(writer.commit())
    return [table[index]["x"] for index in indices]


@pytest.mark.parametrize("name", DTYPES)
def test_numpy_s_rule_decides(name: str) -> None:
    """Every dtype of numpy and torch into every dtype of a column."""
    dtype = DTYPES[name]
    numpy_name = "float32" if name == "bfloat16" else name
    with table_of(dtype) as table:
        for given in NUMPY:
            value = np.array([0, 1, 1], dtype=given)
            if np.can_cast(given, numpy_name, "same_kind"):
                expected = torch.tensor([0, 1, 1]).to(dtype)
                assert all(torch.equal(found, expected) for found in added(table, value)), given
            else:
                with pytest.raises(
                    SchemaError, match=f"has dtype {value.dtype}; a column of {dtype} with cast"
                ):
                    table.add({"x": value})
                with pytest.raises(SchemaError, match="Column 'x' of the step has dtype"):
                    table.writer().append(x=value)
        for source in DTYPES.values():
            other = "float32" if source is torch.bfloat16 else str(source)[6:]
            tensor = torch.tensor([0, 1, 1]).to(source)
            if np.can_cast(other, numpy_name, "same_kind"):
                assert all(torch.equal(found, tensor.to(dtype)) for found in added(table, tensor)), source
            elif source is not dtype:
                with pytest.raises(SchemaError, match=f"has dtype {source}; "):
                    table.add({"x": tensor})


def test_numbers_and_lists() -> None:
    with table_of(torch.float32, (2,)) as table:
        for rows in (
            [[1, 2.5], [3, 4]],
            ([np.float64(1), 2.5], [3, 4]),
            [np.array([1, 2.5]), np.array([3.0, 4])],
        ):
            expected = torch.tensor([[1, 2.5], [3, 4]])
            assert all(torch.equal(found, expected) for found in added(table, rows))
        graph = torch.tensor([[1.0, 2.5]], dtype=torch.float64, requires_grad=True) * 2
        assert table[table.add({"x": graph})]["x"].tolist() == [[2.0, 5.0]]
        # A generator that fills the same list again.
        buffer = [[0.0, 0.0]]

        def refilled() -> Any:
            for number in (1, 2):
                buffer[0][:] = [number, number]
                yield {"x": buffer}

        assert [table[i]["x"].tolist() for i in table.extend(refilled())] == [[[1, 1]], [[2, 2]]]
    with table_of(torch.uint8) as table:  # integers of Python have no dtype: those that fit are taken
        assert all(found.tolist() == [0, 255] for found in added(table, [0, 255]))
    with table_of(torch.bfloat16) as table:
        assert all(found.tolist() == [1.0, 2.0**70] for found in added(table, [True, 2**70]))
        for special in (float("inf"), float("-inf"), float("nan")):
            for value in ([special], np.array([special])):
                found = table[table.add({"x": value})]["x"]
                assert torch.equal(found.float(), torch.tensor([special])) or special != special


@pytest.mark.parametrize(
    ("dtype", "value", "number"),
    [
        (torch.int32, np.array([1, 2**31]), "2147483648"),
        (torch.int32, np.array([0, -(2**31) - 1]), "-2147483649"),
        (torch.int32, torch.tensor([1, 2**31]), "2147483648"),
        (torch.int64, np.array([1, 2**63], dtype=np.uint64), "9223372036854775808"),
        (torch.int64, [1, 2**70], "1180591620717411303424"),
        (torch.uint8, [1, -1], "-1"),
        (torch.uint8, [1, 256], "256"),
        (torch.float32, np.array([1, -1e39]), "-1e\\+39"),
        (torch.float16, np.array([1, 65520]), "65520"),
        (torch.float16, torch.tensor([1, 1e6], dtype=torch.bfloat16), "999424"),
        (torch.bfloat16, np.array([1, 3.4e39]), "3.4e\\+39"),
        (torch.bfloat16, np.array([np.inf, 1e300]), "1e\\+300"),
    ],
)
def test_numbers_that_overflow_change_nothing(dtype: torch.dtype, value: Any, number: str) -> None:
    with table_of(dtype) as table:
        table.add({"x": [1]})
        match = rf"has the value {number}(\.0)?, which {dtype} cannot hold"
        for call in (
            lambda _: table.add({"x": value}),
            lambda _: table.extend([{"x": [1]}, {"x": value}]),
            lambda writer: writer.append(x=value),
            lambda writer: writer.append(x=value[1]),
        ):
            writer = table.writer()
            writer.append(x=1)
            with pytest.raises(SchemaError, match=match):
                call(writer)
            assert writer.num_steps == 1
            assert writer.commit() >= 0
            assert table.num_steps == len(table)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1.0], [1.0, 2.0]], "expected numbers of torch.float32"),
        (["a", "b"], "has dtype <U1"),
        ([None], "has dtype object"),
        (np.ma.masked_array(np.zeros(3)), "is a MaskedArray"),
        (np.zeros(3, complex), "has dtype complex128"),
        (torch.zeros(3, dtype=torch.float8_e4m3fn), "has dtype torch.float8_e4m3fn"),
        (torch.zeros(3, device="meta", dtype=torch.float64), "is a meta tensor"),
        (np.zeros((3, 1)), "has shape [3, 1]; expected [T]"),
        ([], "has zero steps"),
        (5.0, "has shape []; expected [T]"),
        ("text", "is a str"),
    ],
)
def test_what_cannot_be_converted(value: Any, message: str) -> None:
    with table_of(torch.float32) as table:
        with pytest.raises(SchemaError) as caught:
            table.add({"x": value})
        assert message in str(caught.value)
        assert len(table) == 0


def test_without_cast_nothing_is_converted_and_the_error_names_it() -> None:
    with gear.Table.create({"x": gear.Column(torch.float32)}, max_steps=64, max_trajectories=8) as table:
        for value in (np.zeros(3), torch.zeros(3, dtype=torch.bfloat16), np.zeros(3, np.int64), [0.0]):
            for call in (lambda v=value: table.add({"x": v}), lambda v=value: table.writer().append(x=v)):
                with pytest.raises(SchemaError, match="cast=True"):
                    call()
        with pytest.raises(SchemaError) as caught:
            table.add({"x": np.zeros(3, complex)})
        assert "cast=True" not in str(caught.value)
    with pytest.raises(SchemaError, match="cast is 1; expected True or False"):
        gear.Column(torch.float32, cast=1)  # type: ignore[arg-type]


def test_it_stays_with_the_table_and_its_checkpoints(tmp_path: Path) -> None:
    schema = Schema({"x": gear.Column(torch.float32, cast=True), "y": gear.Column(torch.int8, (2,))})
    rows = [["x", "float32", [], "cast"], ["y", "int8", [2]]]
    assert schema.to_json() == rows
    assert Schema.from_json(rows) == schema
    named = Schema({name: gear.Column(torch.int64, **{name: True}) for name in ("cast", "final")})
    assert Schema.from_json(named.to_json()) == named
    assert repr(schema["x"]) == "Column(dtype=torch.float32, shape=(), cast=True)"
    for wrong in (["x", "float32", [], True], ["x", "float32", [], "cast", "cast"]):
        with pytest.raises(SchemaError, match="expected \\[name, dtype, shape\\], and its options"):
            Schema.from_json([wrong])
    with table_of(torch.float32, name="test-casting", if_exists="replace") as table:
        try:
            with gear.Table.attach("test-casting") as other:
                other.add({"x": [1, 2.5]})
            table.save(tmp_path)
            with gear.Table.load(tmp_path) as loaded:
                loaded.add({"x": np.array([3.5])})
                assert [loaded[i]["x"].tolist() for i in loaded.indices()] == [[1, 2.5], [3.5]]
        finally:
            table.unlink()
