"""What every composition of source, mover and layout has to deliver, against the oracle: inherit `BatchConformance`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from cuda_common import played_on_cpu
from dataset_common import on_host
from source_conformance import LENGTHS, SCHEMA, TRAJECTORIES

import gear_loader as gear
from gear_loader.collection.collector import RowSource, collector_for
from gear_loader.collection.windows import has_whole, windows_of
from gear_loader.storage.schema import Schema

STEPS = ("obs", "wide", "reward")
MOVERS = ["cpu", "gpu", "staged"]
_EDGE = {"obs": gear.Window(200, -100, pad="edge"), "task": None}
_CONVERTED = {
    "obs": gear.Window(3, -1, dtype=torch.float16, scale=1 / 3),
    "other": gear.Window(3, -1, column="obs", dtype=torch.float64),
    "wide": gear.Window(2, dtype=torch.float32),
    "task": gear.Window(1, dtype=torch.float32, scale=0.5),
}
_CHOSEN = {
    "obs": gear.Window(3, -8, every=4, pad="edge", dtype=torch.float64),
    "wide": gear.Window(at=[2, -9, 2]),
    "reward": gear.Window(at=[2, -9, 2]),
    "last": gear.Window(1, 2, column="reward", squeeze=True),
    "task": None,
}
PADDED: list[dict[str, Any]] = [
    *({**dict.fromkeys(STEPS, gear.Window(5, -3, pad)), "task": None} for pad in ("keep", "head", "tail", "edge")),
    {"obs": gear.Window(1, squeeze=True), "next": gear.Window(1, 1, column="obs", squeeze=True)},
    _EDGE,
    _CONVERTED,
    _CHOSEN,
]  # fmt: skip
PACKED: list[dict[str, Any]] = [
    {**dict.fromkeys(STEPS, gear.Whole()), "task": None},
    {"obs": gear.Window(30, -10), "again": gear.Window(30, -10, column="obs")},
    {
        "obs": gear.Whole(dtype=torch.float16, scale=1 / 3),
        "other": gear.Whole("obs", torch.float64),
        "plain": gear.Whole("obs"),
        "task": gear.Window(1, dtype=torch.float32, scale=0.5),
    },
]
LAYOUTS = [("padded", case) for case in PADDED] + [("packed", case) for case in PACKED]
CASES = [
    # Each with tables of one kind, and in `make test-all` with those of the other.
    pytest.param(
        *(layout, case, records),
        marks=[pytest.mark.long, pytest.mark.exhaustive] if (number + records) % 2 else (),
    )
    for number, (layout, case) in enumerate(LAYOUTS)
    for records in (False, True)
]


@dataclasses.dataclass
class Made:
    """A source with the trajectories of `source_conformance`.

    Attributes:
        source: has them. rows: makes what a selection draws, of `oracle.Row`s and weights.
        shards: of each trajectory, if batches tell.
    """

    source: RowSource
    rows: Any
    shards: list[int] | None = None


def mover_fixture(*long: str) -> Any:
    """The movers of a class of tests, of which those in `long` are marked so. The device plays on the CPU."""

    @pytest.fixture(
        params=[pytest.param(each, marks=pytest.mark.long if each in long else ()) for each in MOVERS]
    )
    def mover(self: BatchConformance, request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        if request.param not in self.movers:
            pytest.skip("not for this source")
        if request.param == "cpu":
            yield "cpu"
        elif torch.cuda.is_available():
            pytest.skip("there is a real torch.cuda")
        else:
            for _ in played_on_cpu(monkeypatch):
                yield request.param

    return mover


class BatchConformance:
    """Tests of a source with every mover and layout. A subclass makes it by `make`."""

    movers = MOVERS

    def make(self, stack: contextlib.ExitStack, *, packed: bool) -> Made:
        """Make the source; `stack` ends what it needs. `packed`: whether narrow columns lie in records."""
        raise NotImplementedError

    @pytest.fixture
    def stack(self, tmp_path: Any) -> Iterator[contextlib.ExitStack]:
        self.path = tmp_path
        with contextlib.ExitStack() as stack:
            yield stack

    mover = mover_fixture()

    @pytest.mark.parametrize(("layout", "windows", "records"), CASES)
    def test_batches(self, stack: Any, mover: str, layout: str, windows: Any, records: bool) -> None:
        whole = 8 if mover == "gpu" else 24  # interpreted kernels are slow
        made, plain = self.make(stack, packed=records), windows_of(Schema(SCHEMA), windows, None)
        collector = collector_for(
            made.source,
            plain,
            batch_size=whole,
            device=torch.device("cpu" if mover == "cpu" else "cuda:1"),
            packed=layout == "packed",
            weighs=True,
            zero_copy=mover == "gpu",
        )
        buffers = collector.buffers()
        for count in (whole, 5, 1, whole):  # whole batches, smaller ones, and memory that was used before
            rng = np.random.default_rng(count)
            numbers = rng.integers(len(LENGTHS), size=count).tolist()
            rows = [
                oracle.Row(n, int(rng.integers(1 if has_whole(windows) else LENGTHS[n]))) for n in numbers
            ]
            weights = rng.random(count, dtype=np.float32)
            collector.gather(buffers, made.rows(rows, weights))
            batch = on_host(buffers.rows(count))
            self.check(batch, made, rows, {name: windows[name] for name in plain}, layout)
            assert np.array_equal(batch["priority_weight"].numpy(), weights)

    def check(self, batch: Any, made: Made, rows: list[oracle.Row], windows: Any, layout: str) -> None:
        expected = oracle.batch(SCHEMA, TRAJECTORIES, rows, windows, layout=layout)
        masks = expected.pop("masks", {})
        for name, values in expected.items():
            assert np.array_equal(np.asarray(batch[name]), values), name
        for name, values in masks.items():
            mask = batch["mask"][name] if isinstance(batch["mask"], dict) else batch["mask"]
            assert np.array_equal(mask.numpy(), values), name
        assert batch["anchor"].tolist() == [row.anchor for row in rows]
        if made.shards is not None:
            assert batch["shard"].tolist() == [made.shards[row.trajectory] for row in rows]
