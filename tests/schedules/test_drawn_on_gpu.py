"""Uniform rows that the GPU draws: the batches that the host draws, and what the host does for them."""

from __future__ import annotations

import collections
import gc
import itertools
from typing import Any

import pytest
import torch
from cases import mostly_long
from options_common import nested
from scenarios import FIRST, cloned, compare, made_table, on_host, rows_of
from streams.cuda import Cuda

import gear_loader as gear
from gear_loader.selection import uniform_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real torch.cuda")
WINDOWS: dict[str, Any] = {"value": gear.Window(3, -1), "number": gear.Window(2), "task": None}
OPTIONS: dict[str, dict[str, Any]] = {
    "trajectories": {},
    "first": {"anchor": "first"},
    "last": {"anchor": "last"},
    "steps": {"sampler": gear.Uniform(unit="step")},
    "complete steps": {"sampler": gear.Uniform(unit="step"), "complete": True},
    "complete": {"complete": True},
    "sequences": {"stride": 2, "windows": {"value": gear.Window(3)}},
    "subset": {"subset": lambda sequences: sequences % 3 != 1},
    "converted": {"windows": {**WINDOWS, "half": gear.Window(2, column="value", dtype=torch.float16)}},
    "records": {"packed": True},
}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Are drawn by the GPU too."""
    monkeypatch.setattr(uniform_cuda, "LEAST_ROWS", 4)


def counted(cuda: Cuda, *names: str) -> list[int]:
    return [cuda.machine.counts[name] for name in names]


@pytest.mark.parametrize(
    ("case", "prefetch"),
    # A thread draws from a subset on the CPU, at other moments.
    mostly_long(
        [(case, prefetch) for case in OPTIONS for prefetch in (0, 2) if (case, prefetch) != ("subset", 2)],
        ("trajectories", 2),
        ("complete steps", 0),
        ("sequences", 2),
        ("subset", 0),
    ),
)
def test_batches_are_those_of_the_host_while_the_table_changes(case: str, prefetch: int) -> None:
    cuda = Cuda(0, "eager")
    given = {"windows": WINDOWS, "batches_per_epoch": 120, "batch_size": 4, "prefetch": prefetch}
    given |= OPTIONS[case]
    with cuda.installed(), made_table(packed=given.pop("packed", False)) as table:
        cuda.threads.frequency = 0.0
        data, host = (
            gear.ReplayDataset(table, **nested({**given, "device": each})) for each in ("cuda:1", "cpu")
        )
        for number, (batch, other) in enumerate(zip(data, host, strict=True)):
            compare(number, on_host(cloned(dict(batch))), dict(other))
            if number in (40, 43, 90):
                table.add(rows_of(FIRST + number))
        assert 40 < counted(cuda, "draw uniform")[0] < 110
        del data, host, batch, other
        gc.collect()
    cuda.check()
    assert cuda.machine.host_waits == 0


def test_a_change_sends_draws_back_to_the_host_until_the_table_stands_still() -> None:
    cuda, drawn = Cuda(0, "eager"), []
    with cuda.installed(), made_table() as table:
        cuda.threads.frequency = 0.0
        options: dict[str, Any] = {"batch_size": 4, "windows": WINDOWS, "prefetch": 0}
        data, host = (gear.ReplayDataset(table, device=each, **options) for each in ("cuda:1", "cpu"))
        for number in range(60):
            if number in (24, 45):
                table.add(rows_of(FIRST + number))
            before = counted(cuda, "draw uniform")
            batch = on_host(cloned(dict(data.sample())))
            compare(number, batch, dict(host.sample()))
            drawn.append(counted(cuda, "draw uniform") != before)
        kinds = [(kind, len(list(part))) for kind, part in itertools.groupby(drawn)]
        # The first three fill the buffers in steps, of which a graph is made.
        assert kinds[1:] == [(True, 24 - kinds[0][1]), (False, 8), (True, 13), (False, 8), (True, 7)]
        del data, host
        gc.collect()
    cuda.check()


def test_what_the_driver_is_asked_for_a_batch_that_the_gpu_draws() -> None:
    """One launch, without a copy; the same calls as for rows of the host."""
    names = ("cuGraphLaunch", "cuStreamWaitEvent", "cuEventRecord", "cuEventQuery", "copy to the device")
    calls: dict[int, list[float]] = {}
    for least in (1 << 30, 4):
        uniform_cuda.LEAST_ROWS = least
        cuda = Cuda(0, "eager")
        with cuda.installed(), made_table() as table:
            cuda.threads.frequency = 0.0
            options: dict[str, Any] = {"windows": WINDOWS, "prefetch": 0, "device": "cuda:1"}
            data = gear.ReplayDataset(table, batch_size=4, **options)
            for number in range(48):
                if number == 40:
                    before = counted(cuda, *names)
                data.sample()
            calls[least] = [(a - b) / 8 for a, b in zip(counted(cuda, *names), before, strict=True)]
            del data
            gc.collect()
        cuda.check()
    assert calls[4] == [*calls[1 << 30][:4], 0]
    assert calls[1 << 30][4] == 1


def test_another_anchor_is_another_graph() -> None:
    cuda = Cuda(0, "eager")
    with cuda.installed(), made_table() as table:
        cuda.threads.frequency = 0.0
        options: dict[str, Any] = {"batch_size": 4, "windows": WINDOWS, "prefetch": 0}
        data, host = (gear.ReplayDataset(table, device=each, **options) for each in ("cuda:1", "cpu"))
        for number in range(60):
            if number % 20 == 0:
                data.anchor = host.anchor = ("uniform", "first", "last")[number // 20]
            compare(number, on_host(cloned(dict(data.sample()))), dict(host.sample()))
        assert counted(cuda, "draw uniform")[0] > 30
        del data, host
        gc.collect()
    cuda.check()


def test_a_transform_that_asks_which_rows_were_drawn_keeps_draws_on_the_host() -> None:
    cuda, seen = Cuda(0, "eager"), collections.Counter[bool]()

    class Names:
        takes_names = True

        def __call__(self, batch: Any, *, generator: Any, names: Any) -> Any:
            seen[bool((on_host(batch["index"]).numpy() == names[0]).all())] += 1
            return batch

    with cuda.installed(), made_table() as table:
        cuda.threads.frequency = 0.0
        data = gear.ReplayDataset(
            table, batch_size=4, windows=WINDOWS, device="cuda:1", prefetch=0, transform=Names()
        )
        for _ in range(24):
            data.sample()
        assert counted(cuda, "draw uniform") == [0]
        assert seen[False] == 0
        del data
        gc.collect()
    cuda.check()
    assert cuda.machine.host_waits == 0
