"""What the tests of iteration share: rows that tell where they are from, what a batch must hold, statistics."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import oracle
import torch
from options_common import nested_table
from torch.utils.data import DataLoader

import gear_loader as gear

SCHEMA = {
    "observation": gear.Column(torch.float32, (3,)),
    "action": gear.Column(torch.int16, (2,)),
    "reward": gear.Column(torch.float64),
}
LENGTHS = (5, 1, 12, 8, 3, 20, 2, 7, 9, 4, 16, 6)  # 93 steps
ROW_KEYS = ("index", "anchor", "generation")


SAMPLERS = {
    "trajectories": gear.Uniform(),
    "steps": gear.Uniform(unit="step"),
    "trajectories once": gear.Uniform(replacement=False),
    "steps once": gear.Uniform(replacement=False, unit="step"),
}


class Failing(gear.Uniform):
    """Raises at one step."""

    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__()
        self.at, self.error = at, error

    def items(self, size: int, draw: Any) -> Any:
        if draw.step == self.at:
            raise self.error
        return super().items(size, draw)


def episode(number: int, length: int) -> dict[str, np.ndarray]:
    """Trajectory `number`: every value of every column tells number and step."""
    steps = np.arange(length)
    return {
        "observation": np.stack([np.full(length, number), steps, number + steps / 4096], 1).astype(
            np.float32
        ),
        "action": np.stack([np.full(length, number), -steps - 1], 1).astype(np.int16),
        "reward": number * 4096.0 + steps,
    }


def make_table(lengths: Iterable[int] = LENGTHS, **options: Any) -> gear.Table:
    """A table of `SCHEMA` in which trajectory number i, of lengths[i] steps, has sequence number i."""
    lengths = list(lengths)
    sizes = {
        "max_steps": max(sum(lengths), 64),
        "max_trajectories": max(len(lengths), 8),
        "block_steps": 4,
        **options,
    }
    table = gear.Table.create(SCHEMA, **nested_table(sizes))
    table.extend([episode(i, length) for i, length in enumerate(lengths)])
    return table


@contextlib.contextmanager
def named_table(name: str, lengths: Iterable[int] = LENGTHS, **options: Any) -> Iterator[gear.Table]:
    """`make_table` under a name of this process's own, which is gone afterwards."""
    table = make_table(lengths, name=f"{name}-{os.getpid()}", **options)
    try:
        yield table
    finally:
        table.unlink()
        table.close()


# ---------------------------------------------------------------- batches


def check_batch(
    batch: Mapping[str, Any],
    trajectories: Mapping[int, Mapping[str, torch.Tensor]],
    windows: Mapping[str, gear.Window],
) -> None:
    """Every column and mask of `batch` is what the trajectories (index -> columns [T, ...]) say, to the bit."""
    assert set(batch) == {*windows, "mask", *ROW_KEYS}
    numbers = {index: number for number, index in enumerate(trajectories)}
    columns = next(iter(trajectories.values())).items()
    schema = {name: gear.Column(values.dtype, tuple(values.shape[1:])) for name, values in columns}
    names = zip(batch["index"].tolist(), batch["anchor"].tolist(), strict=True)
    rows = [oracle.Row(numbers[index], anchor) for index, anchor in names]
    expected = oracle.batch(schema, list(trajectories.values()), rows, windows)
    for name in windows:
        assert batch[name].dtype == schema[name].dtype
        mask = batch["mask"][name] if isinstance(batch["mask"], dict) else batch["mask"]
        for found, right in ((batch[name], expected[name]), (mask, expected["masks"][name])):
            values = oracle.numpy_of(found)
            assert (values.dtype, values.shape) == (right.dtype, right.shape), name
            assert values.tobytes() == right.tobytes(), name


def contents(table: gear.Table) -> dict[int, dict[str, torch.Tensor]]:
    """Everything in the table, by index."""
    return {int(index): table[int(index)] for index in table.indices()}


def on_host(value: Any) -> Any:
    """A batch with its tensors in host memory."""
    if isinstance(value, dict):
        return {name: on_host(part) for name, part in value.items()}
    return value.to("cpu") if isinstance(value, (torch.Tensor, gear.Ragged)) else value


def snapshot(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a batch that nothing recycles."""
    return {
        key: snapshot(part) if isinstance(part, dict) else part.clone() if hasattr(part, "clone") else part
        for key, part in batch.items()
    }


def copies(batches: Iterable[Mapping[str, Any]], count: int | None = None) -> list[dict[str, Any]]:
    """Copies of the first `count` batches, or of all."""
    if count is None:
        return [snapshot(batch) for batch in batches]
    iterator = iter(batches)
    return [snapshot(next(iterator)) for _ in range(count)]


def append_all(batches: Iterable[Mapping[str, Any]], found: list[Any], limit: int = 1000) -> None:
    """Append copies of the batches as they come: what came before an error is there after it."""
    for batch in itertools.islice(batches, limit):
        found.append(snapshot(batch))


def equal(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Whether two batches are the same, to the bit."""
    return list(left) == list(right) and all(
        equal(left[key], right[key]) if isinstance(left[key], dict) else torch.equal(left[key], right[key])
        for key in left
    )


def same_batches(left: Sequence[Mapping[str, Any]], right: Sequence[Mapping[str, Any]]) -> None:
    """As many batches, in the same order, the same to the bit."""
    assert len(left) == len(right)
    differ = [i for i, (one, other) in enumerate(zip(left, right, strict=True)) if not equal(one, other)]
    assert not differ, f"batches {differ} of {len(left)} differ"


def drawn(batches: Iterable[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """(index, anchor) of every row of the batches."""
    rows: list[tuple[int, int]] = []
    for batch in batches:
        rows += zip(batch["index"].tolist(), batch["anchor"].tolist(), strict=True)
    return rows


# ---------------------------------------------------------------- what is left behind


@contextlib.contextmanager
def iterating(batches: DataLoader[Any]) -> Iterator[Iterator[Any]]:
    """An iterator whose workers end with it. After an error torch's own clean-up waits 5 s for each of them."""
    iterator: Any = iter(batches)
    try:
        yield iterator
    finally:
        iterator._shutdown_workers()


def prefetch_threads() -> list[threading.Thread]:
    """The threads that prepare batches ahead."""
    return [thread for thread in threading.enumerate() if thread.name == "gear-loader-prefetch"]


def open_tickets(table: gear.Table) -> int:
    """Reads of the table that have not been ended."""
    readers = table._engine.region.array("readers")
    return int((readers[:, 2] != 0).sum())


def nothing_left(table: gear.Table) -> None:
    """No prefetch thread runs and no read is open."""
    assert prefetch_threads() == []
    assert open_tickets(table) == 0


# ---------------------------------------------------------------- statistics


def chi_square(observed: Any, expected: Any) -> float:
    """The statistic: sum of (observed - expected)^2 / expected."""
    observed, expected = np.asarray(observed, dtype=float), np.asarray(expected, dtype=float)
    assert expected.min() >= 5, "too few draws for the statistic to be chi-square distributed"
    return float(((observed - expected) ** 2 / expected).sum())


def chi_square_limit(degrees: int) -> float:
    """What a chi-square variable exceeds with probability 1e-4 (Wilson and Hilferty, 1931).

    The seeds are fixed: a test passes always or never. 1e-4 says how unlucky a correct generator must be to fail.
    """
    return float(degrees * (1 - 2 / (9 * degrees) + 3.719 * np.sqrt(2 / (9 * degrees))) ** 3)
