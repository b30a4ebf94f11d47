"""The quick check of a list of trajectories: what it passes, and that one value that does not fit is never passed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gear_loader as gear
from gear_loader.errors import SchemaError
from gear_loader.native import tensors
from gear_loader.storage.dtypes import torch_dtypes
from gear_loader.storage.schema import Schema

COLUMNS = {
    "x": gear.Column(torch.float32, (2,)),
    "n": gear.Column(torch.int64),
    "goal": gear.Column(torch.float32, (3,), per="trajectory"),
}


def shortened(values: torch.Tensor) -> torch.Tensor:
    values.untyped_storage().resize_(8)
    return values


BAD: dict[str, Any] = {
    "dtype": torch.zeros(3, 2, dtype=torch.float64),
    "shape": torch.zeros(3, 3),
    "length": torch.zeros(4, 2),
    "no steps": torch.zeros(0, 2),
    "scalar": torch.tensor(1.0),
    "not contiguous": torch.zeros(2, 3).t(),
    "negated view": torch._neg_view(torch.zeros(3, 2)),
    "short storage": shortened(torch.zeros(3, 2)),
    "no storage": torch.zeros(3, 2).to_sparse(),
    "meta": torch.zeros(3, 2, device="meta"),
    "zeros without memory": torch._efficientzerotensor((3, 2)),
    "parameter": torch.nn.Parameter(torch.zeros(3, 2)),
    "list": [[0.0, 0.0]] * 3,
    "array among tensors": np.zeros((3, 2), dtype=np.float32),
}
LOCATED_BY_VALIDATE = ("not contiguous", "negated view", "parameter", "array among tensors")


def trajectory(number: int, arrays: bool = False) -> dict[str, Any]:
    made = {
        "x": torch.full((3, 2), float(number)),
        "n": torch.full((3,), number),
        "goal": torch.ones(3) * number,
    }
    return {name: value.numpy() for name, value in made.items()} if arrays else made


@pytest.fixture(params=["by DLPack's function", "in Python"], autouse=True)
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How tensors are asked what they are."""
    if request.param == "in Python":
        monkeypatch.setattr(tensors, "can_describe", lambda: False)
    elif not tensors.can_describe():
        pytest.skip("this PyTorch has no table of DLPack's functions")
    return str(request.param)


def test_the_function_is_used(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[int] = []
    describe = tensors.describe

    def counting(values: Any, *args: Any, **options: Any) -> Any:
        described.append(len(values))
        return describe(values, *args, **options)

    monkeypatch.setattr(tensors, "describe", counting)
    assert Schema(COLUMNS).locate_list([trajectory(i) for i in range(4)]) is not None
    assert described == ([] if asked == "in Python" else [4, 4, 4])


@pytest.mark.parametrize("arrays", [False, True])
def test_it_finds_what_each_trajectory_alone_finds(arrays: bool) -> None:
    schema = Schema(COLUMNS)
    rows = [trajectory(i, arrays) for i in range(4)]
    found = schema.locate_list(rows)
    assert found is not None
    addresses, lengths, _ = found
    assert addresses.tolist() == [schema.locate(each)[1] for each in rows]
    assert lengths.tolist() == [3] * 4
    sliced = torch.arange(24.0).reshape(12, 2)
    rows = [{**trajectory(i), "x": sliced[3 * i : 3 * i + 3]} for i in range(4)]
    found = schema.locate_list(rows)
    assert found is not None
    assert found[0][:, 0].tolist() == [sliced.data_ptr() + 24 * i for i in range(4)]


@pytest.mark.parametrize("kind", BAD)
def test_one_that_does_not_fit_is_left_to_the_full_check(kind: str) -> None:
    rows = [trajectory(i) for i in range(4)]
    rows[2]["x"] = BAD[kind]
    assert Schema(COLUMNS).locate_list(rows) is None
    with gear.Table.create(COLUMNS, max_steps=40, max_trajectories=8, block_steps=4) as table:
        if kind in LOCATED_BY_VALIDATE:
            assert len(table.extend(rows)) == 4
        else:
            with pytest.raises(SchemaError, match="trajectory 2"):
                table.extend(rows)
            assert len(table) == 0


@pytest.mark.parametrize(
    "change", [{"goal": torch.ones(2)}, {"goal": torch.ones(3, 1)}, {"more": torch.ones(3)}]
)
def test_values_per_trajectory_and_names_are_checked_too(change: dict[str, Any]) -> None:
    schema = Schema(COLUMNS)
    assert schema.locate_list([trajectory(0), {**trajectory(1), **change}]) is None
    wrong = trajectory(1)
    wrong["y"] = wrong.pop("x")
    assert schema.locate_list([trajectory(0), wrong]) is None
    assert schema.locate_list([trajectory(0), [1]]) is None
    assert schema.locate_list([]) is None


@pytest.mark.parametrize("dtype", torch_dtypes().values(), ids=str)
def test_tensors_of_any_dtype_and_shape(dtype: torch.dtype) -> None:
    columns = {
        "flat": gear.Column(dtype),
        "deep": gear.Column(dtype, (2, 1, 3)),
        "one": gear.Column(dtype, per="trajectory"),
    }
    steps = torch.zeros(8, 2, 1, 3, dtype=dtype)
    rows = [
        {"flat": torch.zeros(2, dtype=dtype), "deep": steps[1:3], "one": torch.zeros((), dtype=dtype)},
        # Contiguous for all that can be seen, whatever the strides are.
        {"flat": torch.zeros(9, dtype=dtype)[::9], "deep": steps[::8], "one": torch.ones((), dtype=dtype)},
    ]
    found = Schema(columns).locate_list(rows)
    assert found is not None
    assert found[0].tolist() == [[value.data_ptr() for value in each.values()] for each in rows]
    assert found[1].tolist() == [2, 1]
    for wrong in (steps[:2, :1], steps[:2].transpose(1, 3), steps[::2][:2]):
        assert Schema(columns).locate_list([rows[0], {**rows[1], "deep": wrong}]) is None
