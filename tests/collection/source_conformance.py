"""What every source of trajectories has to do, against the oracle: inherit `SourceConformance` and make one."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import oracle
import pytest
import torch

import gear_loader as gear
from gear_loader.collection.chosen import RowGather
from gear_loader.collection.sources import Place, read_packed
from gear_loader.collection.windows import windows_of
from gear_loader.storage.schema import Schema

SCHEMA = {
    "obs": gear.Column(torch.float32, (3,)),
    "wide": gear.Column(torch.int16, (80,)),
    "reward": gear.Column(torch.float64),
    "task": gear.Column(torch.int32, (2,), per="trajectory"),
}
LENGTHS = (1, 7, 20, 8, 133, 64, 65)


def trajectory(seed: int, length: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "obs": rng.standard_normal((length, 3), dtype=np.float32),
        "wide": rng.integers(-99, 99, (length, 80), dtype=np.int16),
        "reward": rng.standard_normal(length),
        "task": rng.integers(0, 9, 2, dtype=np.int32),
    }


TRAJECTORIES = [trajectory(seed, length) for seed, length in enumerate(LENGTHS)]
STEPS = ("obs", "wide", "reward")
WINDOWS: list[dict[str, Any]] = [
    *(dict.fromkeys(STEPS, gear.Window(5, -3, pad=pad)) | {"task": None} for pad in ("keep", "head", "tail", "edge")),
    {"obs": gear.Window(1), "next": gear.Window(1, 1, column="obs"), "reward": gear.Window(9)},
    {"wide": gear.Window(200, -100, pad="edge"), "task": None},
]  # fmt: skip


class SourceConformance:
    """Tests of a source. A subclass makes it, of the trajectories given, by `make`."""

    def make(self, trajectories: list[dict[str, Any]], stack: contextlib.ExitStack) -> tuple[Any, np.ndarray]:
        """The source; and the slot of each trajectory, int64 [n]. `stack` ends what it needs."""
        raise NotImplementedError

    @pytest.fixture
    def made(self, tmp_path: Any) -> Any:
        self.path = tmp_path
        with contextlib.ExitStack() as stack:
            yield self.make(TRAJECTORIES, stack)

    @staticmethod
    def drawn(count: int) -> list[oracle.Row]:
        rng = np.random.default_rng(count)
        numbers = rng.integers(len(LENGTHS), size=count).tolist()
        return [oracle.Row(number, int(rng.integers(LENGTHS[number]))) for number in numbers]

    def test_sizes(self, made: tuple[Any, np.ndarray]) -> None:
        source, slots = made
        order = [4, 0, 3]
        assert source.sizes(slots[order]).tolist() == [[LENGTHS[number], 0] for number in order]

    @pytest.mark.parametrize("windows", WINDOWS)
    @pytest.mark.parametrize("count", [1, 40])
    def test_windows(self, made: tuple[Any, np.ndarray], windows: dict[str, Any], count: int) -> None:
        source, slots = made
        rows, plain = self.drawn(count), windows_of(Schema(SCHEMA), windows, None)
        gather = RowGather(source, plain)
        names = list(plain)
        outs = []
        for name, window in plain.items():
            column = SCHEMA[name if window.column is None else window.column]
            outs.append(torch.full((count, window.length, *column.shape), 7, dtype=column.dtype))
        masks = {i: torch.empty(count, plain[name].length, dtype=torch.bool) for i, name in enumerate(names)}
        places = slots[[row.trajectory for row in rows]], np.array([row.anchor for row in rows])
        gather.gather(*places, lambda: np.zeros_like(places[0]), outs, masks)
        expected = oracle.batch(SCHEMA, TRAJECTORIES, rows, {name: windows[name] for name in names})
        for i, name in enumerate(names):
            found = outs[i][:, 0] if plain[name].squeeze else outs[i]
            assert np.array_equal(found.numpy(), expected[name]), name
            if name in expected["masks"]:
                assert np.array_equal(masks[i].numpy(), expected["masks"][name]), name

    @pytest.mark.parametrize("window", [(30, -10), (4, 10)])  # the second has no steps of some rows
    def test_packed_rows(self, made: tuple[Any, np.ndarray], window: tuple[int, int]) -> None:
        source, slots = made
        windows: dict[str, Any] = dict.fromkeys(STEPS, gear.Window(*window)) | {"task": None}
        windows["again"] = gear.Window(*window, column="obs")
        rows = self.drawn(12)
        expected = oracle.batch(SCHEMA, TRAJECTORIES, rows, windows, layout="packed")
        places = slots[[row.trajectory for row in rows]], np.array([row.anchor for row in rows])
        lengths = source.sizes(places[0])[:, 0]
        begin = places[1] + window[1]
        first = np.clip(begin, 0, lengths)
        spans = np.stack((first, np.minimum(begin + window[0], lengths) - first))
        starts = expected["cu_seqlens"][:-1].astype(np.int64)
        outs = {name: np.full_like(expected[name], 7) for name in windows}
        where = []
        for name, out in outs.items():
            column = "obs" if name == "again" else name
            size = Schema(SCHEMA)[column].step_bytes
            where.append(Place(column, out.reshape(-1).view(np.uint8), 0, size, column == "task"))
        which = np.arange(len(rows))
        read_packed(source, where, places[0], np.zeros_like(places[0]), spans, starts, which)
        for name, out in outs.items():
            assert np.array_equal(out, expected[name]), name
