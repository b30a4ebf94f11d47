"""The GPU side of the benchmarks, rehearsed on the CPU: kernels, copies of the driver, work beside loads."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks_common import check_row, needs_no_gpu, rows_of, session
from cases import mostly_long

import gear_loader as gear
from benchmarks import batches, copies, engine, gather_rows, gpu_batches, harness, workloads
from benchmarks import selection as subjects
from benchmarks.experiments import overlap, select

pytestmark = needs_no_gpu
STREAM = 0x5EA  # the handle of the stream beside the default one


class Event:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Rehearsal:
    """An engine that is no GPU: kernels run on the CPU in Triton's interpreter, one after another.

    Attributes:
        counts: loads that were asked for beside a piece of work, of each time.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.counts: list[int] = []

    def timed(self, work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    def queue(self, launches: Sequence[Callable[[], None]]) -> Callable[[], None]:
        def replay() -> None:
            for launch in launches:
                launch()

        return replay

    @contextlib.contextmanager
    def aside(self) -> Iterator[int]:
        yield STREAM

    def beside(
        self, work: Callable[[], None], load: Callable[[], None], count: int
    ) -> tuple[float, list[float]]:
        """Pretends that six loads end while the work goes on."""
        self.counts.append(count)
        seconds = self.timed(work)
        load()
        return seconds, [i * seconds / 6 for i in range(count)]

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def event(self) -> Event:
        return Event()

    def synchronize(self) -> None:
        pass


_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t


class Library:
    """The driver's library, with copies by the CPU; what it is called with goes through C's types.

    Args:
        version: of CUDA: before 12.8 it has no copies in batches.
        wrong: copy one byte too few.
        code: what the calls return.

    Attributes:
        calls: arguments of each call that matter: copies, order of access, flags, hints, stream.
    """

    def __init__(self, version: float = 13.0, *, wrong: bool = False, code: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._wrong, self._code = wrong, code
        shared = (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE)
        if version >= 12.8:
            kind = ctypes.CFUNCTYPE(ctypes.c_int, *shared, _POINTER, _POINTER)
            self.cuMemcpyBatchAsync = kind(self._batched)

    def _move(self, target: int, source: int, count: int) -> None:
        ctypes.memmove(target, source, count - self._wrong)

    def _batched(
        self,
        targets: int,
        sources: int,
        sizes: int,
        count: int,
        attributes: int,
        firsts: int,
        kinds: int,
        failed: int,
        stream: int,
    ) -> int:
        ctypes.c_size_t.from_address(failed).value = 7
        order, *hints, flags = (ctypes.c_uint32 * 6).from_address(attributes)
        assert kinds == 1
        assert ctypes.c_size_t.from_address(firsts).value == 0
        self.calls.append((count, order, flags, hints, stream))
        if self._code == 0:
            numbers = ctypes.c_uint64 * count
            parts = (numbers.from_address(part) for part in (targets, sources, sizes))
            for target, source, length in zip(*parts, strict=True):
                self._move(target, source, length)
        return self._code


SIZES = gpu_batches.Sizes((2,), programs=(1, 3), queue_launches=2, copy_bytes=8192)
LOADS = overlap.Sizes(
    programs=(1, 3),
    batch=2,
    load_bytes=8_000,
    matrix=32,
    products=2,
    width=16,
    layers=1,
    heads=2,
    steps=1,
)
SHORT = dataclasses.replace(workloads.W1, steps=6, window=gear.Window(6))


def overlapped(path: Path, trajectories: int, rehearsal: Rehearsal) -> list[dict[str, Any]]:
    told = {"trajectories": trajectories, "sizes": LOADS, "workload": SHORT}
    overlap.measured_on_gpu(session(path, 2, "overlap"), rehearsal, **told)
    return rows_of(path)


# What is measured ------------------------------------------------------------------------------------


@pytest.mark.long
def test_batches_of_a_gpu_are_measured_beside_the_kernel_copies_and_a_ring(tmp_path: Path) -> None:
    library, out = Library(), tmp_path / "rows.jsonl"
    made = session(out, experiment="collect")
    gpu_batches.measured(made, Rehearsal(), 3, library, SIZES)
    rows = rows_of(out)
    for row in rows:
        check_row(row, "collect")
    assert {call[-1] for call in library.calls} == {STREAM}
    ways: dict[str, set[str]] = {}
    for row in rows:
        if not row["variant"].startswith("TorchRL"):  # which not every interpreter has
            ways.setdefault(row["workload"], set()).add(row["variant"])
    both = {
        "cudaMemcpyAsync",
        "kernel, default",
        "kernel, 1 programs",
        "kernel, 3 programs",
        gpu_batches.RING,
    }
    both |= {f"dataset, {how}" for how in ("prefetch 2", "prefetch 0", "by priority")}
    assert ways["W1"] == both | {"dataset, packed", "staged, index_select", "cuMemcpyBatchAsync"}
    assert ways["W2"] == both | {"staged, index_select"}
    assert ways["single steps"] == both
    if importlib.util.find_spec("torchrl") is None:
        assert "TorchRL on the device, W1, batch 2" in "\n".join(made.reasons)
    hosts = [row["extras"]["host_seconds"] for row in rows if row["variant"].startswith("dataset")]
    assert min(hosts) >= 0


def test_batches_are_measured_in_all_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "QUICK_DRAWS", 64)
    made = session(tmp_path / "rows.jsonl", experiment="single-server")
    kinds = [workloads.W1.of(40), workloads.W2.of(40)]
    batches.measured(made, kinds, (16,), engine=Rehearsal(), copy_bytes=8192, workers=(0,))
    rows = rows_of(tmp_path / "rows.jsonl")
    for row in rows:
        check_row(row, "single-server")
    both = {"cudaMemcpyAsync", "ours", "ours, prefetch 0", "plain torch"}
    alone = {"plain torch, x[idx]", "DataLoader, map-style"}
    assert {(row["workload"], row["variant"]) for row in rows} == {
        (kind, name) for kind, found in (("W1", both | alone), ("W2", both)) for name in found
    }
    assert {row["parameters"]["prefetch"] for row in rows if row["variant"] == "ours"} == {2}
    assert len(made.reasons) == len(batches.PEERS)
    assert "left out: TorchRL, W1: peers are measured on the CPU alone (--device cpu)" in made.reasons


@pytest.mark.long
def test_work_is_measured_beside_every_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rehearsal = Rehearsal()
    by_work: dict[str, set[str]] = {}
    loads = {"kernel, 1 programs", "kernel, 3 programs", "cudaMemcpyAsync"}
    for row in overlapped(tmp_path / "rows.jsonl", 5, rehearsal):
        check_row(row, "overlap")
        by_work.setdefault(row["parameters"]["work"], set()).add(row["variant"])
        assert row["extras"]["slowdown"] > 0
        assert row["variant"] != "alone" or row["extras"]["slowdown"] == 1.0
        if row["variant"] in loads:
            assert row["extras"]["gb_per_s"] > 0
            assert row["extras"]["gb_per_s_alone"] > 0
    fed = {"ours, prefetch 0", "ours, prefetch 2", "ours, prefetch 2, 1 programs", "staged, index_select"}
    assert by_work["bf16 products"] == by_work["transformer steps"] == {"alone", *loads}
    assert {"alone", *fed} <= by_work["fed transformer steps"]
    # Five loads end before the work does: more are queued until they last, and then as many at once.
    assert rehearsal.counts == ([4, 10] * 3 + [10] * 6) * 2
    assert "alone" in capsys.readouterr().out


@pytest.mark.long
def test_selection_is_measured_with_graphs_and_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert select.LIMITS == {1024: 40e-6}
    monkeypatch.setattr(select, "LIMITS", {32: 40e-6})
    kinds = select.cuda_kinds(Rehearsal(), launches=2)
    assert [kind.limit for kind in kinds[:3]] == [{32: 40e-6}, {32: 40e-6}, {}]
    made = session(tmp_path / "rows.jsonl", experiment="select")
    sizes = select.Sizes((1500,), (32,), seconds=1e-9, draws=1 << 9)
    select.measured(made, kinds, sizes)
    assert made.reasons == []
    rows = rows_of(tmp_path / "rows.jsonl")
    for row in rows:
        check_row(row, "select")
    assert {row["variant"] for row in rows} == {kind.name for kind in kinds}
    limits = {(row["variant"], row["workload"], row["rows"]) for row in rows if "limit" in row}
    assert limits == {("ours, graph", "cycle", 32), ("ours, eager", "cycle", 32)}
    made.finish()
    assert "at most" in capsys.readouterr().out


# What is found ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what", mostly_long(["kernel alone", "kernel beside work", "product"], "kernel alone", "product")
)
def test_nothing_wrong_is_timed(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, right = tmp_path / "rows.jsonl", gather_rows.kernel.gather
    wrong = lambda plan, slots, *others, **options: right(plan, slots.flip(0), *others, **options)  # noqa: E731
    if what == "product":
        monkeypatch.setattr(torch, "mm", lambda left, right, out: out.zero_())
        message = "alone, bf16 products, batch 2: a product is off by 1"
    else:
        monkeypatch.setattr(gather_rows.kernel, "gather", wrong)
        message = "kernel, 1 programs, " + ("W1" if what == "kernel alone" else "bf16 products, batch 2")
    measure = functools.partial(overlapped, out, 50, Rehearsal())
    if what == "kernel alone":
        told = {"library": Library(), "sizes": dataclasses.replace(SIZES, batches=(3,))}
        measure = functools.partial(
            gpu_batches.measured, session(out, experiment="collect"), Rehearsal(), 3, **told
        )
    with pytest.raises(harness.Incorrect, match=message):
        measure()
    assert not out.exists() or not rows_of(out)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("draw", "draws the same items at each replay"),
        ("update", "items do not weigh what they were given"),
    ],
)
def test_a_graph_that_does_something_else_is_found(
    fault: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsal = Rehearsal()
    tree = select.DeviceTree(subjects.Truth(300, 1), rehearsal)
    graph = select.Graph(rehearsal, tree, 2)
    assert graph.measure("cycle", 8, 3) > 0
    if fault == "draw":
        tree._step = torch.zeros(1, dtype=torch.int64)  # another counter than the kernel's
    else:
        monkeypatch.setattr(select.priority, "update", lambda *arguments, **options: None)
    with pytest.raises(harness.Incorrect, match=message):
        graph.measure("draw" if fault == "draw" else "cycle", 16, 3)


# Work beside loads -----------------------------------------------------------------------------------


def test_loads_are_counted_in_parts_and_make_the_rate_beside_the_work() -> None:
    for ends, seconds, loads in (
        ([0.0, 1.0, 2.0, 3.0], 2.0, 2.0),
        ([-1.0, 1.0, 3.0, 5.0], 4.0, 2.0),  # half of the second, the third, half of the fourth
        ([-0.5, 9.5, 19.5], 1.0, 0.1),
    ):
        assert overlap.moved(ends, seconds) == pytest.approx(loads)
    nothing = types.SimpleNamespace(launch=None, check=None, refresh=lambda: None, bytes=600)

    def pair(each: float) -> Any:
        timed = Rehearsal()
        timed.beside = lambda work, load, count: (3.0, [i * each for i in range(count)])  # type: ignore[method-assign]
        return overlap.Pair(timed, nothing, nothing)

    made = pair(0.5)
    assert (made.measure(), made.rates) == (3.0, [1200.0])
    with pytest.raises(
        harness.Unmeasured, match=r"4096 loads end after 0.00 s, before the work, which ends after 3.00 s"
    ):
        pair(0.0).measure()


# Copies of the driver --------------------------------------------------------------------------------


@pytest.fixture
def drawn() -> Iterator[tuple[Any, Any]]:
    """A table of trajectories of 6 steps, and rows of it for two batches of 3."""
    data = workloads.Data(SHORT.of(3))
    with data.table(6, packed=False) as table:
        rows = gather_rows.WorkloadRows(Rehearsal(), data, table, 3, 2)
        rows.refresh()
        yield table, rows


def test_copies_of_the_driver_give_the_kernels_batch(drawn: Any) -> None:
    assert ctypes.sizeof(copies.Attributes) == 24
    library, (table, rows) = Library(), drawn
    variant = copies.copies_of(Rehearsal(), copies.Driver(library), rows)
    variant.check()
    assert variant.measure() > 0
    targets, sources, sizes = copies.row_copies(rows, 1)
    column, out, row = (
        table._engine.region.blocks("action").numpy(),
        rows.buffers[1].batch["action"],
        6 * 8 * 4,
    )
    assert targets.tolist()[3:6] == [out.data_ptr() + row * i for i in range(3)]
    assert sizes.tolist()[3:6] == [row] * 3
    assert np.all(sources[3:6] >= column.ctypes.data)
    assert np.all(sources[3:6] + sizes[3:6] <= column.ctypes.data + column.nbytes)
    assert library.calls == [(9, copies.ORDER_ANY, 0, [0, 0, 0, 0], STREAM)] * 4


class Registered(Library):
    """A driver that copies from memory that was registered in pieces: not across two of them."""

    bound = 0

    def _move(self, target: int, source: int, count: int) -> None:
        assert not source < self.bound < source + count
        super()._move(target, source, count)


@pytest.mark.parametrize("inside", [0, 100])
def test_copies_of_the_driver_stop_where_a_registration_does(
    inside: int, drawn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, (table, rows) = Registered(), drawn
    whole = copies.row_copies(rows, 0)
    _, sources, sizes = whole
    library.bound = bound = int(sources[1]) + inside
    spanning = sum(a < bound < a + b for a, b in zip(sources.tolist(), sizes.tolist(), strict=True))
    assert spanning >= (inside > 0)
    base = table._engine.region.array("counters").ctypes.data
    monkeypatch.setattr(table._engine.region._mapping, "registered", [base, bound])
    assert table._engine.region.pinned_bounds == [bound]
    variant = copies.copies_of(Rehearsal(), copies.Driver(library), rows)
    variant.check()
    parts = copies.split(whole, [bound])
    assert {len(part) for part in parts} == {9 + spanning}
    assert parts[2].sum() == sizes.sum()
    assert variant.measure() > 0


def test_the_yardstick_s_copies_stop_there_too() -> None:
    source = torch.arange(4096)
    bounds = [source.data_ptr() + 8 * word for word in (512, 1000, 3000)]
    spans: list[tuple[int, int]] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(function, "__name__", "") == "copy_":
                spans.append((args[1].data_ptr(), args[1].data_ptr() + args[1].nbytes))
            return function(*args, **(kwargs or {}))

    made = engine.Copies(Rehearsal(), source, 8 * 2048, bounds=bounds)
    for _ in range(20):
        with Watch():
            made.copy()
        made.compare()
    assert len(spans) > 20
    assert not any(begin < bound < end for begin, end in spans for bound in bounds)


def test_copies_that_do_not_work_say_why(drawn: Any) -> None:
    for library, why in (
        (Library(code=801), "cuMemcpyBatchAsync returned 801 at copy 7"),
        (Library(wrong=True), "differ"),
    ):
        variant = copies.copies_of(Rehearsal(), copies.Driver(library), drawn[1])
        assert not variant.required
        with pytest.raises(harness.Incorrect, match=why):
            variant.check()
    for lacking in (Library(12.4), object()):
        with pytest.raises(copies.Unavailable, match=r"CUDA 12\.8 and later"):
            copies.Driver(lacking)
