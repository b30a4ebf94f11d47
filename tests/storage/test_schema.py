"""`Column`, `Window` and `Schema`: what they accept, what they say about the rest."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import math
import pickle
import re
import types
from typing import Any

import numpy as np
import pytest
import torch
from options_common import nested
from table_common import DTYPES, bits, random_values

import gear_loader as gear
from gear_loader.errors import SchemaError
from gear_loader.storage.dtypes import NUMPY_DTYPES, torch_dtypes
from gear_loader.storage.schema import BATCH_KEYS, Schema

# Window ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "Window length is 0; expected an integer of at least 1."),
        ({"length": 2.0}, "Window length is 2.0; expected an integer of at least 1."),
        ({"length": True}, "Window length is True; expected an integer of at least 1."),
        ({"length": 4, "offset": 0.5}, "Window offset is 0.5; expected an integer."),
        ({"length": 4, "offset": False}, "Window offset is False; expected an integer."),
        ({"length": 4, "pad": "left"}, "Window pad is 'left'; expected 'keep', 'head', 'tail' or 'edge'."),
        (
            {"length": 4, "pad": ["keep"]},
            "Window pad is ['keep']; expected 'keep', 'head', 'tail' or 'edge'.",
        ),
        ({"length": 2**31}, f"Window(length={2**31}, offset=0, pad='keep') is out of range"),
        ({"length": 1, "offset": -(2**31)}, f"Window(length=1, offset={-(2**31)}, pad='keep') is out of r"),
    ],
)
def test_window_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        gear.Window(**options)
    assert str(caught.value).startswith(message)
    window = gear.Window(length=np.int64(20), offset=np.int32(-19), pad="tail")  # type: ignore[arg-type]
    assert (window, type(window.length), type(window.offset)) == (gear.Window(20, -19, "tail"), int, int)
    assert gear.Window(2**31 - 1, 1 - 2**31).pad == "keep"


def test_schemas_that_are_refused() -> None:
    column = gear.Column(torch.bool)
    expected: list[tuple[Any, str]] = [
        *(
            (none, f"A schema of {none!r} was received; expected a mapping of column")
            for none in ({}, [], None, "a")
        ),
        *(
            (
                {"fine": column, name: column},
                f"Column name {name!r} was received; expected a non-empty string.",
            )
            for name in ("", 1, None, b"a")
        ),
        *(
            ({name: column}, f"Column name {name!r} was received; expected one without control characters")
            for name in ("a\nb", "\x1b[2J", "nul\0", "\x7f", "\x85", "line\u2028", "paragraph\u2029")
        ),
        *(
            ({name: column}, f"Column name '{name}' is taken: batches have a key of that name")
            for name in BATCH_KEYS
        ),
        *(
            ({"reward": wrong}, f"Column 'reward' is {wrong!r}; expected gear_loader.Column(dtype, shape)")
            for wrong in (torch.float32, (torch.float32, (3,)), None, gear.Column)
        ),
    ]
    for columns, message in expected:
        with pytest.raises(SchemaError) as caught:
            Schema(columns)
        assert str(caught.value).startswith(message)


def same_bytes(schema: Schema, value: Any, expected: torch.Tensor, what: str = "") -> np.ndarray:
    """Fails unless `validate` and `locate` find exactly these bytes; those of `validate`."""
    length, arrays = schema.validate({"x": value})
    assert (length, arrays["x"].dtype) == (len(expected), np.uint8), what
    assert arrays["x"].shape == (length, schema.step_bytes), what
    assert arrays["x"].flags.c_contiguous, what
    assert arrays["x"].tobytes() == bits(expected), what
    length, (address,), hold = schema.locate({"x": value})
    assert length == len(expected), what
    assert ctypes.string_at(address, length * schema.step_bytes) == bits(expected), what
    del hold
    return arrays["x"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_validate_and_locate_find_the_bytes(dtype: torch.dtype) -> None:
    """Contiguous data is not copied; of strided data every step is found."""
    generator = torch.Generator().manual_seed(1)

    def both(values: torch.Tensor) -> list[Any]:
        return [values] if dtype is torch.bfloat16 else [values, values.numpy()]

    for shape, length in [((), 1), ((), 7), ((1,), 2), ((3, 5), 7)]:
        values = random_values(dtype, (length, *shape), generator)
        for value in both(values):
            found = same_bytes(Schema({"x": gear.Column(dtype, shape)}), value, values)
            assert np.shares_memory(found, values.view(torch.uint8).numpy()), "contiguous data was copied"
    base = random_values(dtype, (12, 6, 3), generator)
    views = {
        "every other step": base[::2, 0],
        "transposed": base[0].t()[:, :3],
        "one step of large stride": base[::12, 5],
        "a column, one step": base[:1, 0, ::2][:, :1].expand(1, 3),
        "broadcast": base[0, :1].expand(7, 3),
        "an offset": base[3:, 4],
    }
    for kind, view in views.items():
        for value in both(view):
            same_bytes(Schema({"x": gear.Column(dtype, (3,))}), value, view, kind)
    # torch calls a tensor of one element contiguous whatever its stride.
    line = random_values(dtype, (70,), generator)
    for shape in ((), (1,)):
        view = line[35::7][:1].reshape(1, *shape)
        assert view.stride()[0] == 7
        for value in both(view):
            same_bytes(Schema({"x": gear.Column(dtype, shape)}), value, line[35:36])


def test_tensors_and_mappings_of_special_kinds() -> None:
    schema = Schema({"x": gear.Column(torch.float32, (3,))})
    base = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))
    special: dict[str, Any] = {
        "requires grad": base.clone().requires_grad_(),
        "part of a graph": base.clone().requires_grad_() * 1,
        "parameter": torch.nn.Parameter(base.clone()),
        "negative bit": torch.complex(-base, -base).conj().imag,
        "read-only numpy": base.numpy().copy(),
        "numpy subclass": base.numpy().copy().view(np.recarray),
        "fortran order": np.asfortranarray(base.numpy()),
        "shared": base.clone().share_memory_(),
    }
    special["read-only numpy"].flags.writeable = False
    with torch.inference_mode():
        special["inference"] = base.clone()
    for kind, value in special.items():
        same_bytes(schema, value, base, kind)
    two = Schema({"a": gear.Column(torch.float32, (3,)), "b": gear.Column(torch.int8)})
    rows = {"b": np.zeros(5, np.int8), "a": base}  # in another order
    for given in (rows, types.MappingProxyType(rows), collections.OrderedDict(rows)):
        assert two.validate(given)[1]["a"].tobytes() == bits(base)
        _, addresses, hold = two.locate(given)
        assert ctypes.string_at(addresses[0], 60) == bits(base)
        del hold


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": None}, "it has the columns ['observation']; missing: ['reward'], unknown: []. Expecte"),
        ({"extra": torch.zeros(4)}, "missing: [], unknown: ['extra']. Expected exactly ['observation', 'r"),
        ({"reward": None, "rewards": torch.zeros(4)}, "missing: ['reward'], unknown: ['rewards']."),
        ({"reward": [0.0, 0.0]}, "Column 'reward' of it is a list; expected a numpy array or a torch tens"),
        ({"observation": 5}, "Column 'observation' of it is a int; expected a numpy array or a torch tens"),
        ({"reward": np.zeros(4)}, "has dtype float64; expected torch.float32. Convert it first (.astype(n"),
        ({"reward": np.zeros(4, dtype=">f4")}, "Column 'reward' of it has dtype >f4; expected torch.float"),
        ({"reward": np.zeros(4, dtype=object)}, "Column 'reward' of it has dtype object; expected torch.f"),
        ({"reward": np.zeros(4, dtype="f4,f4")}, "expected torch.float32."),
        ({"reward": torch.zeros(4, dtype=torch.float64)}, "Column 'reward' of it has dtype torch.float64;"),
        ({"reward": torch.zeros(4, 1)}, "Column 'reward' of it has shape [4, 1]; expected [T]."),
        ({"reward": torch.tensor(0.0)}, "Column 'reward' of it has shape []; expected [T]."),
        ({"reward": np.array(0.0, dtype=np.float32)}, "Column 'reward' of it has shape []; expected [T]."),
        ({"observation": torch.zeros(3, 5)}, "'observation' of it has shape [3, 5]; expected [T, 3, 5]."),
        ({"observation": torch.zeros(4, 5, 3)}, "'observation' of it has shape [4, 5, 3]; expected [T, 3,"),
        ({"observation": torch.zeros(4, 3, 0)}, "'observation' of it has shape [4, 3, 0]; expected [T, 3,"),
        ({"observation": torch.zeros(5, 3, 5)}, "it has columns of uneven lengths: "),
        ({"observation": torch.zeros(0, 3, 5)}, "it has columns of uneven lengths: "),
        ({"reward": torch.zeros(4).to_sparse()}, "Column 'reward' of it is a tensor of layout torch.spars"),
        ({"reward": torch.zeros(4, device="meta")}, "Column 'reward' of it is a meta tensor; expected a n"),
        ({"reward": np.ma.masked_array(np.zeros(4, np.float32))}, "Column 'reward' of it is a MaskedArray"),
        (dict.fromkeys(("observation", "reward")), "it has the columns []; missing: ['observation', 'rewa"),
        ({"observation": torch.zeros(0, 3, 5), "reward": torch.zeros(0)}, "it has zero steps; expected at"),
        (
            {"observation": np.zeros((0, 3, 5), "f4"), "reward": np.zeros(0, "f4")},
            "it has zero steps; expected at",
        ),
        (5, "it is a int; expected a mapping of column names to arrays [T, ...] with the columns ['observ"),
        (None, "it is a NoneType; expected a mapping of column names to arrays [T, ...] with the columns"),
        ([torch.zeros(4)], "it is a list; expected a mapping of column names"),
        (torch.zeros(4), "it is a Tensor; expected a mapping of column names"),
    ],
)
def test_validate_and_locate_refuse(schema: Schema, change: Any, message: str) -> None:
    given = change
    if isinstance(change, dict):
        given = {name: value for name, value in {**_good(), **change}.items() if value is not None}
    for check in (schema.validate, schema.locate):
        with pytest.raises(SchemaError) as caught:
            check(given, what="it")  # type: ignore[operator]
        assert message in str(caught.value)


def test_schema_is_a_mapping_in_the_given_order() -> None:
    columns = {
        "z": gear.Column(torch.float32, (11,)),
        "a": gear.Column(torch.bool),
        "m": gear.Column(torch.int16, 3),
    }
    schema = Schema(columns)
    assert list(schema) == ["z", "a", "m"]
    assert len(schema) == 3
    assert schema["m"].shape == (3,)
    assert schema == columns
    assert Schema(schema) == schema
    assert schema.step_bytes == 44 + 1 + 6
    assert repr(schema) == f"Schema({columns!r})"
    assert schema.to_json() == [["z", "float32", [11]], ["a", "bool", []], ["m", "int16", [3]]]
    assert list(Schema.from_json(schema.to_json())) == ["z", "a", "m"]
    with pytest.raises(KeyError, match="nothing"):
        schema["nothing"]


def test_batches_use_no_other_keys() -> None:
    """`BATCH_KEYS` are those of all kinds of batches together."""
    tables = [
        gear.Table.create({"reward": gear.Column(torch.float32)}, max_steps=20, max_trajectories=4)
        for _ in range(2)
    ]
    for table in tables:
        table.add({"reward": np.ones(5, np.float32)})
    options: dict[str, Any] = {"batch_size": 2, "windows": gear.Window(2), "sampler": gear.Prioritized()}
    keys: set[str] = set()
    keys |= set(gear.ReplayDataset(tables[0], **nested({**options, "sample_info": True})).sample())
    with gear.distributed.Shards(tables) as shards:
        keys |= set(gear.ReplayDataset(shards, **nested(options)).sample())
    for table in tables:
        table.close()
    assert keys == {"reward", *BATCH_KEYS}


# Rows ------------------------------------------------------------------------------------------------


@pytest.fixture
def schema() -> Schema:
    return Schema({"observation": gear.Column(torch.float32, (3, 5)), "reward": gear.Column(torch.float32)})


def _good(length: int = 4) -> dict[str, Any]:
    return {"observation": torch.zeros(length, 3, 5), "reward": np.zeros(length, dtype=np.float32)}


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype is not torch.bool], ids=str)
def test_no_numpy_dtype_passes_for_another(dtype: torch.dtype) -> None:
    """Each numpy dtype goes into the column of the same name and into no other; bfloat16 takes none."""
    schema, names = Schema({"x": gear.Column(dtype)}), "? u1 i1 u2 i2 u4 i4 u8 i8 f2 f4 f8 c8 S4 M8[s] V2"
    for check in (schema.validate, schema.locate):
        accepted = []
        for name in names.split():
            with contextlib.suppress(SchemaError):
                check({"x": np.zeros(4, dtype=name)})  # type: ignore[operator]
                accepted.append(np.dtype(name).name)
        assert accepted == ([] if dtype is torch.bfloat16 else [str(dtype).removeprefix("torch.")])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "Columns None were received; expected a list"),
        ([["x", "int8"]], "expected [name, dtype, shape]"),
        ([["x", "int8", []], ["x", "int8", []]], "Column name 'x' was received; expected each name once"),
        ([[1, "int8", []]], "Column name 1 was received"),
        ([["x", ["int8"], []]], "Column dtype ['int8'] was received; expected one of bool"),
        ([["x", "int8", 3]], "Column shape 3 was received"),
        ([["x", "int8", [True]]], "Column shape [True] was received"),
        ([["x", "int8", [2**37]]], "positive integers"),
        ([["x", "int8", [1] * 65]], "at most 64 positive integers"),
        ([], "with at least one column"),
    ],
)
def test_stored_columns_that_make_no_sense(rows: Any, message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        Schema.from_json(rows)
    assert message in str(caught.value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns(dtype: torch.dtype) -> None:
    assert set(torch_dtypes().values()) == set(DTYPES)
    given: Any
    for given, shape in [
        *(((), ()), ((1,), (1,)), ((3, 5), (3, 5)), ([3, 5], (3, 5)), (torch.Size((3, 5)), (3, 5))),
        *((np.array([3, 5]), (3, 5)), ((np.int64(3), 5), (3, 5)), (7, (7,)), (np.int32(7), (7,))),
    ]:
        column = gear.Column(dtype, given)
        assert (column.dtype, column.shape) == (dtype, shape)
        assert all(type(extent) is int for extent in column.shape)
        assert hash(column) == hash(gear.Column(dtype, shape))
        assert column.step_bytes == math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
        assert f"torch.{column.dtype_name}" == str(dtype)
        assert Schema.from_json(Schema({"x": column}).to_json()) == {"x": column}
        assert pickle.loads(pickle.dumps(column)) == column
    with pytest.raises(dataclasses.FrozenInstanceError):
        column.shape = (4,)  # type: ignore[misc]
    assert gear.Column(dtype) == gear.Column(dtype, ())


@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_dtypes_of_numpy(name: str) -> None:
    wanted = gear.Column(getattr(torch, name), (4,))
    for dtype in (np.dtype(name), np.dtype(name).type):
        column = gear.Column(dtype, (4,))
        assert (column, column.dtype, repr(column)) == (wanted, wanted.dtype, repr(wanted))
        assert pickle.loads(pickle.dumps(column)) == wanted


def test_columns_that_are_refused() -> None:
    wrong: Any
    for wrong in (
        *(
            torch.complex64,
            torch.float8_e4m3fn,
            torch.uint16,
            float,
            np.uint16,
            np.dtype("complex64"),
            np.generic,
        ),
        *("float32", None, [], {}),
    ):
        message = f"Column dtype {wrong!r} is not supported; expected one of torch.bool, "
        with pytest.raises(SchemaError, match=re.escape(message) + ".*torch.bfloat16"):
            gear.Column(wrong, (3,))
    for wrong in (
        *((0,), (-1,), (3, 0), 0, -2, (2.0,), "12", ("3",), None, (3, None), True, (True,), ((3,),), 2.0),
    ):
        message = f"Column shape {wrong!r} is not a sequence of positive integers; "
        with pytest.raises(SchemaError, match=re.escape(message)):
            gear.Column(torch.float32, wrong)
