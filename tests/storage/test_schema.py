"""`Column`, `Window` and `Schema`: what they accept, what they say about the rest."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from table_common import DTYPES, bits, random_values

import gear_loader as gear
from gear_loader.errors import GearError, SchemaError
from gear_loader.storage import schema as schema_module
from gear_loader.storage.schema import BATCH_KEYS, Schema

# Column ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "count"), [((), 1), ((1,), 1), ((3, 5), 15)])
def test_column_of_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...], count: int) -> None:
    column = gear.Column(dtype, shape)
    assert (column.dtype, column.shape) == (dtype, shape)
    assert column.step_bytes == count * torch.empty(0, dtype=dtype).element_size()
    assert f"torch.{column.dtype_name}" == str(dtype)
    assert Schema.from_json(Schema({"x": column}).to_json()) == {"x": column}


def test_the_ten_dtypes_and_no_other() -> None:
    assert set(schema_module.DTYPES.values()) == set(DTYPES)


def test_column_defaults_to_a_scalar() -> None:
    assert gear.Column(torch.float32) == gear.Column(torch.float32, ())


@pytest.mark.parametrize("shape", [(3, 5), [3, 5], torch.Size((3, 5)), np.array([3, 5]), (np.int64(3), 5)])
def test_column_shape_becomes_a_tuple_of_ints(shape: Any) -> None:
    column = gear.Column(torch.int8, shape)
    assert column.shape == (3, 5)
    assert [type(extent) for extent in column.shape] == [int, int]
    assert hash(column) == hash(gear.Column(torch.int8, (3, 5)))


@pytest.mark.parametrize("shape", [7, np.int32(7), (7,)])
def test_column_of_one_extent(shape: Any) -> None:
    assert gear.Column(torch.int8, shape).shape == (7,)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.complex64,
        torch.float8_e4m3fn,
        torch.uint16,
        torch.uint64,
        float,
        np.float32,
        np.dtype("float32"),
        "float32",
        None,
        [],
        {},
    ],
    ids=repr,
)
def test_column_refuses_a_dtype(dtype: Any) -> None:
    with pytest.raises(SchemaError) as caught:
        gear.Column(dtype, (3,))
    message = str(caught.value)
    assert message.startswith(f"Column dtype {dtype!r} is not supported; expected one of torch.bool, ")
    assert "torch.bfloat16" in message


@pytest.mark.parametrize(
    "shape",
    [(0,), (-1,), (3, 0), 0, -2, (2.0,), (2.5,), "12", ("3",), None, (None,), True, (True,), ((3,),), 2.0],
)
def test_column_refuses_a_shape(shape: Any) -> None:
    with pytest.raises(SchemaError) as caught:
        gear.Column(torch.float32, shape)
    assert str(caught.value).startswith(f"Column shape {shape!r} is not a sequence of positive integers; ")


def test_column_is_frozen() -> None:
    column = gear.Column(torch.float32, (3,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        column.shape = (4,)  # type: ignore[misc]


def test_column_survives_pickling() -> None:
    column = gear.Column(torch.bfloat16, (3, 5))
    assert pickle.loads(pickle.dumps(column)) == column


# Window ----------------------------------------------------------------------------------------------


def test_window_takes_whole_numbers_of_any_kind() -> None:
    window = gear.Window(length=np.int64(20), offset=np.int32(-19))  # type: ignore[arg-type]
    assert window == gear.Window(20, -19, "keep")
    assert type(window.length) is int
    assert type(window.offset) is int


@pytest.mark.parametrize("pad", ["keep", "head", "tail"])
def test_window_pads(pad: Any) -> None:
    assert gear.Window(1, pad=pad).pad == pad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "Window length is 0; expected at least 1 step."),
        ({"length": -3}, "Window length is -3; expected at least 1 step."),
        ({"length": 2.0}, "Window length is 2.0; expected an integer number of steps."),
        ({"length": True}, "Window length is True; expected an integer number of steps."),
        ({"length": "4"}, "Window length is '4'; expected an integer number of steps."),
        ({"length": None}, "Window length is None; expected an integer number of steps."),
        ({"length": 4, "offset": 0.5}, "Window offset is 0.5; expected an integer number of steps."),
        ({"length": 4, "offset": False}, "Window offset is False; expected an integer number of steps."),
        ({"length": 4, "pad": "left"}, "Window pad is 'left'; expected 'keep', 'head' or 'tail'."),
        ({"length": 4, "pad": None}, "Window pad is None; expected 'keep', 'head' or 'tail'."),
        ({"length": 4, "pad": ["keep"]}, "Window pad is ['keep']; expected 'keep', 'head' or 'tail'."),
        ({"length": 2**31}, f"Window(length={2**31}, offset=0, pad='keep') is out of range"),
        (
            {"length": 1, "offset": -(2**31)},
            f"Window(length=1, offset={-(2**31)}, pad='keep') is out of range",
        ),
    ],
)
def test_window_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        gear.Window(**options)
    assert str(caught.value).startswith(message)


# Schema ----------------------------------------------------------------------------------------------


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


def test_schema_does_not_follow_later_changes_of_its_argument() -> None:
    columns = {"a": gear.Column(torch.bool)}
    schema = Schema(columns)
    columns["b"] = gear.Column(torch.bool)
    assert list(schema) == ["a"]


@pytest.mark.parametrize("columns", [{}, [], None, "a", [("a", gear.Column(torch.bool))]])
def test_schema_refuses_what_is_no_mapping_or_empty(columns: Any) -> None:
    with pytest.raises(SchemaError) as caught:
        Schema(columns)
    assert str(caught.value).startswith(
        f"A schema of {columns!r} was received; expected a mapping of column names"
    )


@pytest.mark.parametrize("name", ["", 1, None, ("a",), b"a"])
def test_schema_refuses_a_name(name: Any) -> None:
    with pytest.raises(SchemaError) as caught:
        Schema({"fine": gear.Column(torch.bool), name: gear.Column(torch.bool)})
    assert str(caught.value) == f"Column name {name!r} was received; expected a non-empty string."


def test_batches_use_no_other_keys() -> None:
    """`BATCH_KEYS` are those of all kinds of batches together."""
    tables = [
        gear.Table.create({"reward": gear.Column(torch.float32)}, max_steps=20, max_trajectories=4)
        for _ in range(2)
    ]
    for table in tables:
        table.add({"reward": np.ones(5, np.float32)})
    options: dict[str, Any] = {"batch_size": 2, "windows": gear.Window(2), "selector": gear.Prioritized()}
    keys: set[str] = set()
    keys |= set(gear.ReplayDataset(tables[0], **options, sample_info=True).sample())
    with gear.distributed.Shards(tables) as shards:
        keys |= set(gear.ReplayDataset(shards, **options).sample())
    for table in tables:
        table.close()
    assert keys == {"reward", *BATCH_KEYS}


@pytest.mark.parametrize("name", BATCH_KEYS)
def test_schema_refuses_the_keys_of_a_batch(name: str) -> None:
    with pytest.raises(SchemaError, match=f"Column name '{name}' is taken: batches have a key of that name"):
        Schema({name: gear.Column(torch.bool)})


@pytest.mark.parametrize("column", [torch.float32, (torch.float32, (3,)), None, gear.Column])
def test_schema_refuses_what_is_no_column(column: Any) -> None:
    with pytest.raises(SchemaError) as caught:
        Schema({"reward": column})
    assert str(caught.value).startswith(
        f"Column 'reward' is {column!r}; expected gear_loader.Column(dtype, shape)"
    )


def test_schema_errors_are_value_errors_too() -> None:
    assert issubclass(SchemaError, GearError)
    assert issubclass(SchemaError, ValueError)


# Rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5)], ids=str)
@pytest.mark.parametrize("length", [1, 2, 7])
def test_validate_gives_the_bytes(dtype: torch.dtype, shape: tuple[int, ...], length: int) -> None:
    values = random_values(dtype, (length, *shape), torch.Generator().manual_seed(length))
    schema = Schema({"x": gear.Column(dtype, shape)})
    inputs = [values]
    if dtype is not torch.bfloat16:
        inputs.append(values.numpy())
    for value in inputs:
        found, arrays = schema.validate({"x": value})
        assert found == length
        assert arrays["x"].dtype == np.uint8
        assert arrays["x"].shape == (length, schema.step_bytes)
        assert arrays["x"].flags.c_contiguous
        assert arrays["x"].tobytes() == bits(values)
        assert np.shares_memory(arrays["x"], values.view(torch.uint8).numpy()), "contiguous data was copied"


def _views(base: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views [n, 3] of a tensor [12, 6, 3] that lie in memory in awkward ways."""
    return {
        "every other step": base[::2, 0],
        "transposed": base[0].t()[:, :3],
        "one step of large stride": base[::12, 5],
        "a column, one step": base[:1, 0, ::2][:, :1].expand(1, 3),
        "broadcast": base[0, :1].expand(7, 3),
        "an offset": base[3:, 4],
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", list(_views(torch.zeros(12, 6, 3))))
def test_validate_takes_any_strides(dtype: torch.dtype, kind: str) -> None:
    base = random_values(dtype, (12, 6, 3), torch.Generator().manual_seed(1))
    view = _views(base)[kind]
    schema = Schema({"x": gear.Column(dtype, (3,))})
    inputs: list[Any] = [view] if dtype is torch.bfloat16 else [view, view.numpy()]
    for value in inputs:
        length, arrays = schema.validate({"x": value})
        assert length == len(view)
        assert arrays["x"].tobytes() == bits(view)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_validate_takes_one_scalar_step_cut_out_of_a_larger_array(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """torch calls a tensor of one element contiguous whatever its stride."""
    base = random_values(dtype, (70,), torch.Generator().manual_seed(2))
    view = base[35::7][:1].reshape(1, *shape)
    assert view.stride()[0] == 7
    schema = Schema({"x": gear.Column(dtype, shape)})
    inputs: list[Any] = [view] if dtype is torch.bfloat16 else [view, view.numpy()]
    for value in inputs:
        assert schema.validate({"x": value})[1]["x"].tobytes() == bits(base[35:36])


def test_validate_takes_tensors_of_special_kinds() -> None:
    schema = Schema({"x": gear.Column(torch.float32, (3,))})
    base = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))
    special = {
        "requires grad": base.clone().requires_grad_(),
        "part of a graph": base.clone().requires_grad_() * 1,
        "parameter": torch.nn.Parameter(base.clone()),
        "negative bit": torch.complex(-base, -base).conj().imag,
        "read-only numpy": base.numpy().copy(),
        "numpy subclass": base.numpy().copy().view(np.recarray),
        "fortran order": np.asfortranarray(base.numpy()),
        "shared": base.clone().share_memory_(),
    }
    special["read-only numpy"].flags.writeable = False  # type: ignore[attr-defined]
    with torch.inference_mode():
        special["inference"] = base.clone()
    for kind, value in special.items():
        assert schema.validate({"x": value})[1]["x"].tobytes() == bits(base), kind


@pytest.fixture
def schema() -> Schema:
    return Schema({"observation": gear.Column(torch.float32, (3, 5)), "reward": gear.Column(torch.float32)})


def _good(length: int = 4) -> dict[str, Any]:
    return {"observation": torch.zeros(length, 3, 5), "reward": np.zeros(length, dtype=np.float32)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"reward": None},
            "it has the columns ['observation']; missing: ['reward'], unknown: []. Expected exactly",
        ),
        (
            {"extra": torch.zeros(4)},
            "missing: [], unknown: ['extra']. Expected exactly ['observation', 'reward'].",
        ),
        (
            {"reward": None, "rewards": torch.zeros(4)},
            "it has the columns ['observation', 'rewards']; missing: ['reward'], unknown: ['rewards'].",
        ),
        (
            {"reward": [0.0, 0.0]},
            "Column 'reward' of it is a list; expected a numpy array or a torch tensor of torch.float32 and shape [T].",
        ),
        (
            {"observation": 5},
            "Column 'observation' of it is a int; expected a numpy array or a torch tensor of torch.float32 and "
            "shape [T, 3, 5].",
        ),
        (
            {"reward": np.zeros(4)},
            "Column 'reward' of it has dtype float64; expected torch.float32. Convert it first (.astype(np.float32)).",
        ),
        (
            {"reward": np.zeros(4, dtype=">f4")},
            "Column 'reward' of it has dtype >f4; expected torch.float32. Convert it first (.astype(np.float32)).",
        ),
        (
            {"reward": np.zeros(4, dtype=object)},
            "Column 'reward' of it has dtype object; expected torch.float32.",
        ),
        ({"reward": np.zeros(4, dtype="f4,f4")}, "expected torch.float32."),
        (
            {"reward": torch.zeros(4, dtype=torch.float64)},
            "Column 'reward' of it has dtype torch.float64; expected torch.float32. "
            "Convert it first (torch.as_tensor(values).to(torch.float32)).",
        ),
        (
            {"reward": torch.zeros(4, dtype=torch.complex64)},
            "has dtype torch.complex64; expected torch.float32.",
        ),
        ({"reward": torch.zeros(4, 1)}, "Column 'reward' of it has shape [4, 1]; expected [T]."),
        ({"reward": torch.tensor(0.0)}, "Column 'reward' of it has shape []; expected [T]."),
        ({"reward": np.array(0.0, dtype=np.float32)}, "Column 'reward' of it has shape []; expected [T]."),
        (
            {"observation": torch.zeros(3, 5)},
            "Column 'observation' of it has shape [3, 5]; expected [T, 3, 5].",
        ),
        (
            {"observation": torch.zeros(4, 5, 3)},
            "Column 'observation' of it has shape [4, 5, 3]; expected [T, 3, 5].",
        ),
        (
            {"observation": torch.zeros(4, 3, 0)},
            "Column 'observation' of it has shape [4, 3, 0]; expected [T, 3, 5].",
        ),
        (
            {"observation": torch.zeros(5, 3, 5)},
            "it has columns of uneven lengths: {'observation': 5, 'reward': 4}. Expected as many steps in each.",
        ),
        (
            {"observation": torch.zeros(0, 3, 5)},
            "it has columns of uneven lengths: {'observation': 0, 'reward': 4}. Expected as many steps in each.",
        ),
        (
            {"reward": torch.zeros(4).to_sparse()},
            "Column 'reward' of it is a tensor of layout torch.sparse_coo; ",
        ),
        (
            {"reward": torch.zeros(4, device="meta")},
            "Column 'reward' of it is a meta tensor; expected a numpy array",
        ),
        (
            {"reward": np.ma.masked_array(np.zeros(4, dtype=np.float32), [0, 1, 0, 0])},
            "Column 'reward' of it is a MaskedArray; expected a numpy array or a torch tensor",
        ),
    ],
)
def test_validate_refuses(schema: Schema, change: dict[str, Any], message: str) -> None:
    given = {name: value for name, value in {**_good(), **change}.items() if value is not None}
    with pytest.raises(SchemaError) as caught:
        schema.validate(given, what="it")
    assert message in str(caught.value)


@pytest.mark.parametrize("zero", ["torch", "numpy"])
def test_validate_refuses_zero_steps(schema: Schema, zero: str) -> None:
    given = {name: torch.zeros(0, *column.shape) for name, column in schema.items()}
    rows = given if zero == "torch" else {name: value.numpy() for name, value in given.items()}
    with pytest.raises(SchemaError, match=r"^it has zero steps; expected at least one.$"):
        schema.validate(rows, what="it")


@pytest.mark.parametrize("rows", [None, 5, [torch.zeros(4)], torch.zeros(4), "reward"])
def test_validate_refuses_what_is_no_mapping(schema: Schema, rows: Any) -> None:
    with pytest.raises(SchemaError) as caught:
        schema.validate(rows, what="it")
    assert str(caught.value).startswith(
        f"it is a {type(rows).__name__}; expected a mapping of column names to arrays [T, ...] with the columns "
        "['observation', 'reward']."
    )


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype is not torch.bool], ids=str)
def test_no_numpy_dtype_passes_for_another(dtype: torch.dtype) -> None:
    """Each numpy dtype goes into the column of the same name and into no other; bfloat16 takes none."""
    schema = Schema({"x": gear.Column(dtype)})
    accepted = []
    for name in (
        "?",
        "u1",
        "i1",
        "u2",
        "i2",
        "u4",
        "i4",
        "u8",
        "i8",
        "f2",
        "f4",
        "f8",
        "c8",
        "S4",
        "M8[s]",
        "V2",
    ):
        try:
            schema.validate({"x": np.zeros(4, dtype=name)})
        except SchemaError:
            continue
        accepted.append(np.dtype(name).name)
    assert accepted == ([] if dtype is torch.bfloat16 else [str(dtype).removeprefix("torch.")])


@pytest.mark.parametrize(
    "name", ["a\nb", "\x1b[2J", "nul\0", "\x7f", "\x85", "line\u2028", "paragraph\u2029"]
)
def test_column_names_without_control_characters(name: str) -> None:
    with pytest.raises(SchemaError) as caught:
        Schema({name: gear.Column(torch.int8)})
    assert str(caught.value) == (
        f"Column name {name!r} was received; expected one without control characters and line breaks. "
        "Rename the column."
    )


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
