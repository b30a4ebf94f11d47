"""What the tests of the table share: rows that describe themselves, and a look at everything a table shows."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from options_common import nested_table

import gear_loader as gear
from gear_loader.storage.incoming import Steps
from gear_loader.storage.index import Index

COLUMNS = {
    "number": gear.Column(torch.int64),
    "step": gear.Column(torch.int32),
    "length": gear.Column(torch.int32),
    "value": gear.Column(torch.float32, (3,)),
    "check": gear.Column(torch.int64),
}
"""Each step tells its trajectory's number and length and its place in it; `check` is computed from these."""
RAGGED = {
    **COLUMNS,
    "words": gear.Column(torch.int16, (None, 2)),
    "name": gear.Column(str, per="trajectory"),
}
"""With values of any length, which are computed from `check` too."""

_DTYPES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64"
DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in _DTYPES.split())

_names = itertools.count()


def fresh_name() -> str:
    """A table name that no other test, and no other run at the same time, has."""
    return f"test.{os.getpid()}.{next(_names)}"


def rows(number: int, length: int, *, ragged: bool = False) -> dict[str, Any]:
    """The trajectory `number` of `length` steps, in the columns of `COLUMNS`, or of `RAGGED`."""
    step = np.arange(length, dtype=np.int64)
    with np.errstate(over="ignore"):
        check = (step + 1) * np.int64(-7046029254386353131) ^ np.int64(number) * np.int64(6364136223846793005)
    check ^= length << 17
    more: dict[str, Any] = {}
    if ragged:
        counts = np.where(check % 7 == 0, check % 400, check % 4)
        words = [
            (each & 0x7FFF) + np.arange(2 * n).reshape(-1, 2) for each, n in zip(check, counts, strict=True)
        ]
        more = {"words": [each.astype(np.int16) for each in words], "name": "ä" * int(check[0] % 50)}
    return {
        "number": np.full(length, number, dtype=np.int64),
        "step": step.astype(np.int32),
        "length": np.full(length, length, dtype=np.int32),
        "value": (check[:, None] >> np.array([0, 20, 40]) & 0xFFFFF).astype(np.float32),
        "check": check,
        **more,
    }


def number_of(trajectory: Mapping[str, torch.Tensor]) -> int:
    """The number of a trajectory read from a table; fails unless every bit is as `rows` made it."""
    number = int(trajectory["number"][0])
    expected = rows(number, len(trajectory["number"]), ragged="words" in trajectory)
    assert list(trajectory) == list(expected)
    for name, values in expected.items():
        if isinstance(values, str):
            assert trajectory[name] == values
            continue
        if isinstance(values, list):
            lengths, values = [len(value) for value in values], np.concatenate(values)
            assert trajectory[name].lengths.tolist() == lengths
        found = (trajectory[name].values if name == "words" else trajectory[name]).numpy()
        assert found.dtype == values.dtype, name
        assert found.tobytes() == values.tobytes(), f"column {name!r} of trajectory {number} is torn"
    return number


def numbers_of(table: gear.Table) -> list[int]:
    """The numbers of all trajectories, oldest first."""
    return [number_of(table[int(index)]) for index in table.indices()]


def bits(value: Any) -> bytes:
    """A tensor's or an array's elements as bytes, in C order; those of ragged values with their lengths."""
    if isinstance(value, gear.Ragged):
        return bits(value.values) + bits(value.offsets)
    if isinstance(value, (str, bytes, list)):
        return repr(value).encode()
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
        "stats": dataclasses.replace(table.stats(), insert_wait=0, sample_wait=0),
        "priorities": table._engine.region.array("priority")[slots].tolist(),
        "generations": table._engine.region.array("generation")[slots].tolist(),
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
    with gear.Table.create(COLUMNS, **nested_table({**settings, **options})) as table:
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


# Dying in the middle ---------------------------------------------------------------------------------


class Died(BaseException):
    """The process was killed: nothing of it runs any more."""


class Fragile(np.ndarray[Any, Any]):
    """An index array in which one of the next stores is the process's last.

    The fatal store happens not at all or, where it is of many elements, by half. A store of several slots' states is
    taken to be indivisible.
    """

    stores_left: ClassVar[float] = float("inf")
    torn: ClassVar[bool] = False

    def __setitem__(self, key: Any, value: Any) -> None:
        Fragile.stores_left -= 1
        if Fragile.stores_left >= 0:
            super().__setitem__(key, value)
            return
        if Fragile.torn and not getattr(self, "whole", False):
            flat, before = self.reshape(-1).view(np.ndarray), self.reshape(-1).copy().view(np.ndarray)
            super().__setitem__(key, value)
            changed = np.flatnonzero(flat != before)
            lost = changed[len(changed) // 2 :]
            flat[lost] = before[lost]
        Fragile.die()

    @staticmethod
    def die() -> None:
        """A test may put a real death in its place."""
        raise Died


_ARRAYS = (
    "counters readers extent generation sequence ident epoch owner priority state links block_ids free_slots retired "
    "touched free_blocks stream created moved sampled uses lowest parked filled stored prefix"
)
_dead = itertools.count(2**30)  # ids that no process has


@contextlib.contextmanager
def mortal(
    table: gear.Table, stores: float, *, torn: bool = False, disguised: bool = True
) -> Iterator[Index]:
    """The index as another process has it, which dies once it has stored `stores` times.

    Disguised: it signs as a process that does not exist, instead of as this one.
    """
    index = Index(table._engine.region)
    for name in _ARRAYS.split():
        setattr(index.arrays, name, getattr(index.arrays, name).view(Fragile))
    index.arrays.state.whole = True  # type: ignore[attr-defined]
    index.arrays.operate(compiled=False)
    Fragile.stores_left, Fragile.torn = stores, torn
    identity = (next(_dead), 1)
    if disguised:
        index.readers.here = lambda: identity  # type: ignore[method-assign]
    try:
        yield index
    finally:
        Fragile.stores_left = float("inf")


def bury(table: gear.Table) -> None:
    """What the next one in need of room does: repair the index, take back the slots of dead writers."""
    index = table._engine.index
    index.recovery.locked(lambda: index.allocator.reclaim_writers(every=float("-inf")))


def write(table: gear.Table, ids: np.ndarray, number: int, length: int) -> None:
    """The data of a trajectory into its blocks, as `Table.add` does between begin and commit."""
    length, addresses, hold = table.schema.locate(rows(number, length))
    table._engine._write(
        np.array(ids), Steps(np.array([addresses]), np.array([length], dtype=np.int64), hold)
    )


def in_three_steps(table: gear.Table) -> None:
    """From now on what is added takes slots, copies and commits one after another, however small it is."""
    table._engine.index.arrays.stores_at_once = False


@dataclasses.dataclass
class Reading:
    """What a reader without the lock may have seen of a trajectory: its length and where its block table was."""

    number: int
    length: int
    start: int

    @staticmethod
    def of(table: gear.Table, slot: int) -> Reading:
        length, start, _ = table._engine.region.array("extent")[slot].tolist()
        return Reading(number_of(table[slot]), length, start)

    def check(self, table: gear.Table) -> None:
        """It is all still there."""
        layout = table._engine.region.layout
        block_ids = table._engine.region.array("block_ids").reshape(-1)
        ids = block_ids[self.start : self.start - (-self.length // layout.block_steps)]
        found = {}
        for name, column in table.schema.items():
            data = table._engine.region.column(name)[ids].reshape(-1)[: self.length * column.step_bytes]
            values = torch.from_numpy(data.copy()).view(column.dtype)
            found[name] = values.reshape(self.length, *column.shape)
        assert number_of(found) == self.number


# Forked children -------------------------------------------------------------------------------------

forks = pytest.mark.filterwarnings("ignore:.*use of fork.*may lead to deadlocks:DeprecationWarning")


def forked(work: Callable[[], None]) -> None:
    """Run `work` in a forked child; fails with its traceback."""
    pipe, theirs = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            work()
            theirs.send(None)
        except BaseException:
            theirs.send(traceback.format_exc())
        finally:
            os._exit(0)
    theirs.close()
    failure = pipe.recv() if pipe.poll(60.0) else "no answer"
    if failure is not None:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert failure is None, failure
