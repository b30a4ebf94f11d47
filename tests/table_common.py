"""What the tests of the table share: rows that describe themselves, and a look at everything a table shows."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

import gear_loader as gear

COLUMNS = {
    "number": gear.Column(torch.int64),
    "step": gear.Column(torch.int32),
    "length": gear.Column(torch.int32),
    "value": gear.Column(torch.float32, (3,)),
    "check": gear.Column(torch.int64),
}
"""Each step tells its trajectory's number and length and its place in it; `check` is computed from these."""

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)

_names = itertools.count()


def fresh_name() -> str:
    """A table name that no other test, and no other run at the same time, has."""
    return f"test.{os.getpid()}.{next(_names)}"


def rows(number: int, length: int) -> dict[str, np.ndarray]:
    """The trajectory `number` of `length` steps, in the columns of `COLUMNS`."""
    step = np.arange(length, dtype=np.int64)
    with np.errstate(over="ignore"):
        check = (step + 1) * np.int64(-7046029254386353131) ^ np.int64(number) * np.int64(6364136223846793005)
    check ^= length << 17
    return {
        "number": np.full(length, number, dtype=np.int64),
        "step": step.astype(np.int32),
        "length": np.full(length, length, dtype=np.int32),
        "value": (check[:, None] >> np.array([0, 20, 40]) & 0xFFFFF).astype(np.float32),
        "check": check,
    }


def number_of(trajectory: Mapping[str, torch.Tensor]) -> int:
    """The number of a trajectory read from a table; fails unless every bit is as `rows` made it."""
    number = int(trajectory["number"][0])
    expected = rows(number, len(trajectory["number"]))
    assert list(trajectory) == list(expected)
    for name, values in expected.items():
        found = trajectory[name].numpy()
        assert found.dtype == values.dtype, name
        assert found.tobytes() == values.tobytes(), f"column {name!r} of trajectory {number} is torn"
    return number


def numbers_of(table: gear.Table) -> list[int]:
    """The numbers of all trajectories, oldest first."""
    return [number_of(table[int(index)]) for index in table.indices()]


def bits(value: Any) -> bytes:
    """A tensor's or an array's elements as bytes, in C order."""
    tensor = torch.as_tensor(np.array(value)) if isinstance(value, np.ndarray) else value.detach()
    return tensor.contiguous().clone().reshape(-1).view(torch.uint8).numpy().tobytes()


def state(table: gear.Table) -> dict[str, Any]:
    """Everything that a table shows of itself."""
    table.check_valid()
    indices = table.indices().tolist()
    slots = np.array(indices, dtype=np.int64)
    return {
        "len": len(table),
        "num_steps": table.num_steps,
        "indices": indices,
        "lengths": table.lengths().tolist(),
        "stats": table.stats(),
        "priorities": table.region.array("priority")[slots].tolist(),
        "generations": table.region.array("generation")[slots].tolist(),
        "contents": [{name: bits(value) for name, value in table[i].items()} for i in indices],
    }


@contextlib.contextmanager
def unchanged(table: gear.Table) -> Iterator[None]:
    """Fails if the block changes anything that the table shows."""
    before = state(table)
    yield
    assert state(table) == before


@contextlib.contextmanager
def named(**options: Any) -> Iterator[gear.Table]:
    """A small named table of `COLUMNS` that is unlinked at the end."""
    settings: dict[str, Any] = {
        "max_steps": 200,
        "max_trajectories": 16,
        "block_steps": 4,
        "name": fresh_name(),
    }
    with gear.Table.create(COLUMNS, **{**settings, **options}) as table:
        try:
            yield table
        finally:
            with contextlib.suppress(gear.errors.RegionError):
                table.unlink()


def random_values(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A tensor of random bits; of a float dtype so too, NaNs and all."""
    count = int(np.prod(shape)) * dtype.itemsize
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape)


Rows = Callable[[int, int], Mapping[str, Any]]
