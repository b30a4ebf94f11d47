"""What the host does for a batch on a GPU, counted: copies, kernels, waits. The table of docs/gpu.md."""

from __future__ import annotations

import collections
import gc
import itertools
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import mostly_long
from distributed_common import filled
from options_common import nested
from played_peer import PlayedPeer
from scenarios import FIRST, cloned, compare, made_table, on_host, rows_of
from streams import graphs
from streams.cuda import Cuda

import gear_loader as gear
from gear_loader.collection.batches_ahead import MANY, BatchesAhead
from gear_loader.collection.ticket_releaser import TicketReleaser
from gear_loader.dataset.batch_filler import Filler
from gear_loader.distributed.remote import RemoteShard
from gear_loader.distributed.shards import Shards
from gear_loader.errors import GpuError, PriorityError, SchemaError
from gear_loader.selection.cuda_leaves import _SLOTS
from gear_loader.selection.prioritized_cuda import CudaPrioritizedSelection
from gear_loader.selection.snapshot_selection import SnapshotSelection
from gear_loader.storage.counters import NUM_SAMPLED
from gear_loader.storage.operations.view import READING
from gear_loader.storage.queue_loops import LAST_ON
from gear_loader.utils import driver

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real torch.cuda")
WINDOWS = {"value": gear.Window(3), "number": gear.Window(3)}
COPIES = ("copy to the device", "copy to the host")
WAITS = ("blocking copies", "stream.synchronize", "synchronize")


def work(cuda: Cuda, data: gear.ReplayDataset, *, updates: bool = False) -> dict[str, float]:
    """Counts a batch, of eight batches when all buffers exist."""
    cuda.threads.frequency = 0.0
    before: collections.Counter[str] = collections.Counter()
    for number, batch in enumerate(data):
        if number == 40:
            before = collections.Counter(cuda.machine.counts)
        if number == 48:
            break
        if updates:
            data.update_priority(batch, torch.ones(4, device="cuda:1"))
    after = cuda.machine.counts
    return {name: (after[name] - before[name]) / 8 for name in after if after[name] != before[name]}


def of_table(sampler: Any, updates: bool, **options: Any) -> dict[str, float]:
    cuda = Cuda(0, "eager")
    cuda.refuse_pinning = options.pop("staged", False)
    with cuda.installed(), made_table(packed=options.pop("packed", False)) as table:
        options = {"windows": WINDOWS, "batches_per_epoch": 72, "sampler": sampler} | options
        data = gear.ReplayDataset(table, **nested({"batch_size": 4, "device": "cuda:1", **options}))
        found = work(cuda, data, updates=updates)
        del data
        gc.collect()
    cuda.check()
    assert cuda.machine.host_waits == 0
    return found


def check(found: dict[str, float], copies: tuple[float, float], kernels: dict[str, float]) -> None:
    assert tuple(found.get(name, 0) for name in COPIES) == copies
    assert not any(name in found for name in WAITS)
    assert {name: found.get(name, 0) for name in kernels} == kernels


@pytest.mark.parametrize(
    ("options", "copies", "kernels"),
    [
        ({}, 1, {"gather": 1, "clone": 0, "replays": 1 / 8}),
        ({"packed": True}, 1, {"gather": 1, "split": 1, "clone": 0}),
        ({"sample_info": True}, 1, {"gather": 1}),
        ({"windows": {**WINDOWS, "task": None}}, 1, {"gather": 2}),
        ({"copy": True}, 1, {"gather": 1, "clone": 6}),
        ({"staged": True}, 6, {"gather": 0}),  # a copy of each tensor of the batch
    ],
    ids=["uniform", "packed", "sample_info", "per trajectory", "copies", "staged"],
)
def test_a_batch_drawn_by_the_host(options: dict[str, Any], copies: float, kernels: dict[str, float]) -> None:
    check(of_table(gear.Uniform(), False, **options), (copies, 0), kernels)


@pytest.mark.parametrize(
    ("options", "copies", "kernels"),
    [
        ({}, 1, {"gather packed": 1, "split": 0, "cast": 0}),
        ({"packed": True, "windows": {"value": gear.Whole(), "number": gear.Whole(), "task": None}},
         1, {"gather packed": 1, "split": 1}),
        ({"windows": {"value": gear.Whole(dtype=torch.float16, scale=0.5), "number": gear.Whole()}},
         1, {"gather packed": 1, "cast": 1}),
        ({"staged": True}, 7, {"gather packed": 0}),  # a copy of each tensor of the batch
    ],
    ids=["columns", "records", "converted", "staged"],
)  # fmt: skip
def test_a_packed_batch(options: dict[str, Any], copies: float, kernels: dict[str, float]) -> None:
    """One copy, and one launch for all columns, those per trajectory among them."""
    options = {"windows": dict.fromkeys(WINDOWS, gear.Whole()), "layout": "packed", **options}
    check(of_table(gear.Uniform(), False, **options), (copies, 0), kernels)


def test_a_packed_batch_of_a_disk_tier(tmp_path: Path) -> None:
    """One copy all the same; and one launch more, for rows that were read from disk."""
    cuda = Cuda(0, "eager")
    with cuda.installed(), made_table(packed=True, tier=str(tmp_path)) as table:
        data = gear.ReplayDataset(
            table,
            batch_size=12,
            device="cuda:1",
            windows=gear.Window(2),  # of about as many steps, so that the memory does not grow
            layout="packed",
            batches_per_epoch=60,
        )
        found = work(cuda, data)
        del data
        gc.collect()
    cuda.check()
    assert cuda.machine.host_waits == 0
    check(found, (1, 0), {"gather packed": 2, "split": 1, "clone": 0})


def test_lightning_leaves_a_packed_batch_where_it_is() -> None:
    utilities = pytest.importorskip("lightning.fabric.utilities")
    cuda = Cuda(0, "eager")
    with cuda.installed(), made_table() as table:
        data = gear.ReplayDataset(table, batch_size=4, device="cuda:1", windows=gear.Whole(), layout="packed")
        batch = next(iter(data))
        before = collections.Counter(cuda.machine.counts)
        moved = utilities.move_data_to_device(batch, torch.device("cuda:1"))
        assert cuda.machine.counts == before
        assert all(moved[name] is batch[name] for name in batch)
        del data, batch, moved
        gc.collect()
    cuda.check()


def test_a_converted_batch_is_one_launch_more_for_each_pair_of_dtypes() -> None:
    windows = {**WINDOWS, "half": gear.Window(2, column="value", dtype=torch.float16)}
    windows["other"] = gear.Window(1, column="value", dtype=torch.float16)
    check(of_table(gear.Uniform(), False, windows=windows), (1, 0), {"gather": 1, "cast": 1})


@pytest.mark.parametrize("unit", ["trajectory", "step"])
@pytest.mark.parametrize("updates", [False, True])
def test_a_batch_drawn_by_priority_on_the_gpu(unit: Any, updates: bool) -> None:
    """The copies to the host are the status of the tree, 32 bytes. An update and the next draw are one graph."""
    kernels = {"draw": 1, "weigh": 1, "resolve": 1, "gather": 1, "clone": 0, "replays": 1}
    kernels |= {"locate": int(updates), "update": int(updates), "joined": int(updates)}
    # An update's names are one copy, and its priorities. The driver is asked for errors only where there is one.
    kernels |= {
        "cuMemcpyDtoDAsync_v2": 1 + 2 * updates,
        "cuEventQuery": 1,
        "cuStreamIsCapturing": int(updates),
    }
    # For the consumer, and the update's tensors; that the batch is filled, and these copied. Nobody asks for more.
    kernels |= {"cuStreamWaitEvent": 1 + updates, "cuEventRecord": 1 + updates}
    check(of_table(gear.Prioritized(unit=unit), updates), (0, 1 + updates), kernels)


@pytest.mark.parametrize("unit", ["trajectory", "step"])
def test_names_that_do_not_lie_in_one_batch_are_copied_one_by_one(unit: Any) -> None:
    """And are those that count: here of rows in another order than the batch's."""
    cuda = Cuda(0, "eager")
    sampler, names = gear.Prioritized(1.0, unit=unit), ["index", "generation"] + ["anchor"] * (unit == "step")
    with cuda.installed(), made_table() as table:
        cuda.threads.frequency = 0.0
        options: dict[str, Any] = {"batch_size": 4, "windows": WINDOWS, "sampler": sampler, "prefetch": 0}
        data, host = (gear.ReplayDataset(table, device=each, **options) for each in ("cuda:1", "cpu"))
        for number in range(24):
            batch, other = data.sample(), host.sample()
            compare(number, on_host(cloned(dict(batch))), dict(other))
            name = names[number % len(names)]
            given = [{key: each[key] for key in names} for each in (batch, other)]
            if number >= 16:  # the index of a batch, with a part that lies elsewhere
                for each in given:
                    each[name] = each[name].clone()
            if number >= 20:
                given = [{key: each[key].flip(0) for key in names} for each in given]
            before = cuda.machine.counts["cuMemcpyDtoDAsync_v2"]
            for each, rows, device in zip((data, host), given, ("cuda:1", "cpu"), strict=True):
                each.update_priority(rows.pop("index"), torch.arange(1.0, 5, device=device), **rows)
            copies = cuda.machine.counts["cuMemcpyDtoDAsync_v2"] - before
            if number >= 14:
                with pytest.raises(SchemaError, match="priority is None; expected numbers"):
                    data.update_priority(batch, None)
                assert copies == (2 if number < 16 else 1 + len(names))
        del data, host
        gc.collect()
    cuda.check()


def test_an_update_in_a_capture_is_refused_where_one_call_queues_it() -> None:
    cuda = Cuda(0, "eager")
    with cuda.installed(), made_table() as table:
        cuda.threads.frequency = 0.0
        options: dict[str, Any] = {"windows": WINDOWS, "sampler": gear.Prioritized(), "prefetch": 0}
        data = gear.ReplayDataset(table, batch_size=4, device="cuda:1", **options)
        priority = torch.ones(4, device="cuda:1")
        for _ in range(16):
            batch = data.sample()
            data.update_priority(batch, priority)
        before = cuda.machine.counts["cuMemcpyDtoDAsync_v2"]
        with (
            cuda.capturing(cuda.current_stream("cuda:1")),
            pytest.raises(GpuError, match="and an update cannot be part of one"),
        ):
            data.update_priority(batch, priority)
        assert cuda.machine.counts["cuMemcpyDtoDAsync_v2"] == before > 0
        del data, batch
        gc.collect()
    cuda.check()


def test_a_draw_comes_after_what_another_stream_has_done_to_the_priorities() -> None:
    """There an error of the GPU is taken back; draws on one stream wait for nothing else."""
    cuda = Cuda(0, "eager")
    with cuda.installed(), made_table() as table:
        cuda.threads.frequency = 0.0
        options: dict[str, Any] = {"windows": WINDOWS, "sampler": gear.Prioritized(), "prefetch": 0}
        data = gear.ReplayDataset(table, batch_size=4, device="cuda:1", **options)
        priority = torch.ones(4, device="cuda:1")
        waits = []
        for number in range(32):
            batch = data.sample()
            if number == 25:
                with pytest.raises(PriorityError, match="was NaN, infinite or negative"):
                    data.update_priority(batch, priority)
                assert data._selected()._leaves._state[LAST_ON] == 0  # type: ignore[attr-defined]
            else:
                data.update_priority(batch, priority * (math.nan if number == 24 else 1))
            waits.append(cuda.machine.counts["cuStreamWaitEvent"])
        each = [after - before for before, after in itertools.pairwise(waits)]
        # Of a draw and an update: for the consumer, and the update's tensors.
        assert (each[21], each[-1]) == (2, 2)
        assert each[25] == 2  # for the consumer, and the other stream: there is no update before it
        del data, batch
        gc.collect()
    cuda.check()


CHANGING: dict[str, tuple[Any, Any]] = {
    "annealed": (gear.Prioritized(beta=gear.LinearSchedule(0.4, 1.0, batches=12)), None),
    "distinct": (gear.Prioritized(replacement=False), None),
    "large alpha": (gear.Prioritized(2.0), None),
    "top": (gear.TopK(), None),
    "half precision": (gear.Prioritized(), lambda number: (4, torch.float16)),
    "float64": (gear.Prioritized(), lambda number: (4, torch.float64)),
    "alternating sizes": (gear.Prioritized(), lambda number: (2 + number % 3, torch.float32)),
}


@pytest.mark.parametrize("case", mostly_long(list(CHANGING), "annealed", "alternating sizes"))
def test_what_changes_from_batch_to_batch_is_no_reason_to_record_again(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All batches are replayed but the first of each set of buffers, and are those that are queued call by call."""
    sampler, updates = CHANGING[case]
    count = 40 if updates else 16

    def batches(cuda: Cuda) -> list[dict[str, Any]]:
        cuda.threads.frequency = 0.0
        with made_table() as table:
            data = gear.ReplayDataset(
                table,
                batch_size=4,
                windows=WINDOWS,
                device="cuda:1",
                batches_per_epoch=count,
                sampler=sampler,
            )
            found = []
            for number, batch in enumerate(data):
                found.append(cloned(dict(batch)))
                if updates is not None:
                    size, dtype = updates(number)
                    priority = torch.full((size,), 1.0 + number % 5, dtype=dtype, device="cuda:1")
                    index, generation = (batch[name][:size] for name in ("index", "generation"))
                    data.update_priority(index, priority, generation=generation)
            del data, batch
            gc.collect()
        return [on_host(each) for each in found]

    cuda, plain = Cuda(0, "eager"), Cuda(0, "eager")
    with cuda.installed():
        recorded = batches(cuda)
    cuda.check()
    with plain.installed(), monkeypatch.context() as patch:
        patch.setattr(driver, "library", lambda: None)
        queued = batches(plain)
    sets, slots = 4, 0 if updates is None else _SLOTS * len({updates(number) for number in range(count)})
    # A draw and an update of float32 before it are one; the last update waits for a draw.
    replays, joined = (cuda.machine.counts[name] for name in ("replays", "joined"))
    assert bool(joined) == (case == "alternating sizes")
    assert replays + joined + bool(joined) == count - sets + bool(updates) * (count - slots) >= count - 4
    assert plain.machine.counts["replays"] == 0
    for number, (one, other) in enumerate(zip(recorded, queued, strict=True)):
        compare(number, one, other)


def queued_dataset(table: gear.Table) -> tuple[gear.ReplayDataset, Any]:
    """A dataset, and its iterator, whose next batches are queued in one call."""
    data = gear.ReplayDataset(table, batch_size=4, windows=WINDOWS, device="cuda:1", batches_per_epoch=40)
    batches = iter(data)
    for _ in range(12):
        next(batches)
    return data, batches


def test_draws_are_queued_in_one_call_again_after_the_batches_of_a_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in buffers that have repeated rows, or whose draws have changed: their new graphs have old handles."""
    cuda, done = Cuda(0, "eager"), []
    queue_here = CudaPrioritizedSelection.queue

    def queue(self: Any, *given: Any) -> bool:
        done.append(queue_here(self, *given))
        return done[-1]

    monkeypatch.setattr(CudaPrioritizedSelection, "queue", queue)
    with cuda.installed(), made_table() as table:
        cuda.threads.frequency = 0.0
        options: dict[str, Any] = {"batch_size": 4, "windows": WINDOWS, "device": "cuda:1"}
        options |= {"batches_per_epoch": 24, "sampler": gear.Prioritized()}
        before = gear.ReplayDataset(table, prefetch=7, **options)
        found: list[Any] = []
        for batch in before:
            found.append(on_host(cloned(dict(batch))))
            if len(found) == 12:
                state = before.state_dict()
        data = gear.ReplayDataset(table, prefetch=0, **options)
        for number, batch in enumerate(itertools.islice(data, 12)):
            compare(number, on_host(cloned(dict(batch))), found[number])
        assert done[-1]
        data.load_state_dict(state)
        for number, batch in enumerate(data):
            compare(number, on_host(cloned(dict(batch))), found[12 + number])
        assert done[-1]
        assert not data._selected().history.pending  # type: ignore[attr-defined]
        data.sampler = gear.Prioritized(0.9)  # draws by other graphs, in the same buffers
        for _ in itertools.islice(data, 16):
            pass
        assert done[-1]
        del data, before, batch
        gc.collect()
    cuda.check()


def test_a_uniform_batch_of_a_table_that_has_changed_is_queued_in_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the trajectories that are there by then."""
    cuda, done = Cuda(0, "eager"), list[bool]()
    queue_here = SnapshotSelection.queue

    def queue(self: Any, *given: Any) -> bool:
        done.append(queue_here(self, *given))
        return done[-1]

    monkeypatch.setattr(SnapshotSelection, "queue", queue)
    with cuda.installed(), made_table() as table:
        cuda.threads.frequency = 0.0
        options: dict[str, Any] = {"batch_size": 4, "windows": WINDOWS, "prefetch": 0}
        data, host = (gear.ReplayDataset(table, device=each, **options) for each in ("cuda:1", "cpu"))
        for number in range(20):
            if number >= 12:
                table.add(rows_of(FIRST + number))
            batch = on_host(cloned(dict(data.sample())))
            compare(number, batch, dict(host.sample()))
        assert done[-8:] == [True] * 8
        del data, host
        gc.collect()
    cuda.check()


def num_sampled(table: gear.Table) -> int:
    return int(table._engine.index.arrays.counters[NUM_SAMPLED])


def test_batches_queued_ahead_are_those_of_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the table, the anchor or the iteration's end comes between; as many rows count as sampled."""
    cuda, found = Cuda(0, "eager"), collections.Counter[Any]()
    next_here, discard_here, several_here = BatchesAhead.next, BatchesAhead.discard, Filler.queue_several

    def following(self: BatchesAhead, item: Any) -> Any:
        batch = next_here(self, item)
        found["ahead"] += batch is not None
        return batch

    def discard(self: BatchesAhead) -> None:
        found["discarded"] += len(self._ready)
        discard_here(self)

    def several(self: Filler, members: Any, *given: Any) -> bool:
        found[len(members)] += 1
        return several_here(self, members, *given)

    monkeypatch.setattr(BatchesAhead, "next", following)
    monkeypatch.setattr(BatchesAhead, "discard", discard)
    monkeypatch.setattr(Filler, "queue_several", several)
    with cuda.installed(), made_table() as table:
        cuda.threads.frequency = 0.0
        options: dict[str, Any] = {"batch_size": 4, "windows": WINDOWS, "batches_per_epoch": 200}
        data, host = (gear.ReplayDataset(table, device=each, **options) for each in ("cuda:1", "cpu"))
        first = num_sampled(table)
        for number, (batch, other) in enumerate(zip(data, host, strict=True)):
            compare(number, on_host(cloned(dict(batch))), dict(other))
            if number in (22, 80, 103):
                table.add(rows_of(FIRST + number))
            if number == 69:
                data.anchor = host.anchor = "first"
            if number == 118:
                break
        assert found["ahead"] > 30
        assert found["discarded"] > 2
        assert found[MANY] > 1  # at a time, since nothing has changed for long
        del batch, other
        gc.collect()
        assert num_sampled(table) - first == 2 * (119 + data.prefetch) * 4
        del data, host
        gc.collect()
    cuda.check()


def test_an_interrupt_between_batches_queued_ahead_leaves_no_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, put = Cuda(0, "eager"), TicketReleaser.put

    def interrupted(self: TicketReleaser, buffers: Any, ticket: Any, kept: Any = ()) -> None:
        if kept:
            monkeypatch.setattr(TicketReleaser, "put", put)
            raise KeyboardInterrupt
        put(self, buffers, ticket, kept)

    with cuda.installed(), made_table() as table:
        cuda.threads.frequency = 0.0
        options: dict[str, Any] = {"batch_size": 4, "windows": WINDOWS, "batches_per_epoch": 40}
        data = gear.ReplayDataset(table, device="cuda:1", **options)
        monkeypatch.setattr(TicketReleaser, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            collections.deque(data, maxlen=1)
        assert len(list(data)) == 40
        del data
        gc.collect()
        cuda.threads.finish()
        assert not (table._engine.region.array("readers")[:, READING] > 0).any()
    cuda.check()


@pytest.mark.parametrize("relaxed", [True, False])
def test_what_one_call_queues_disturbs_no_capture_of_another_thread(
    relaxed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And would, if it asked for events in the mode that a thread has."""
    if not relaxed:
        monkeypatch.setitem(graphs._COMPILED, "cuThreadExchangeStreamCaptureMode", lambda *given: 0)
    cuda = Cuda(0, "latest")
    with cuda.installed(), made_table() as table:
        cuda.threads.frequency = 0.0
        data, batches = queued_dataset(table)
        with cuda.capturing():
            cuda._captures[-1].thread = 0
            for _ in range(3):
                next(batches)
        del data, batches
        gc.collect()
    assert any("ended the capture" in str(each) for each in cuda.machine.failures) != relaxed
    if relaxed:
        cuda.check()


def test_buffers_that_one_call_fills_are_freed_with_the_dataset() -> None:
    """No cycle keeps memory of the GPU until the garbage collector runs."""
    cuda = Cuda(0, "eager")
    with cuda.installed(), made_table() as table:
        data, batches = queued_dataset(table)
        (pool,) = data._buffers.pools.values()
        batches.close()
        kept = [weakref.ref(each) for each in (*pool.free, *pool.delivered)]
        gc.collect()
        gc.disable()
        try:
            del data, batches, pool
            cuda.threads.finish()
            assert kept
            assert not any(each() for each in kept)
        finally:
            gc.enable()
        gc.collect()
    cuda.check()


def test_a_change_of_the_table_is_one_copy() -> None:
    cuda = Cuda(0, "eager")
    with cuda.installed(), made_table() as table:
        data = gear.ReplayDataset(
            table,
            batch_size=4,
            device="cuda:1",
            windows=WINDOWS,
            sampler=gear.Prioritized(unit="step"),
            prefetch=0,
        )
        for _ in range(5):
            data.sample()
        before = cuda.machine.counts["copy to the device"]
        table.add(rows_of(FIRST))
        data.sample()
        assert cuda.machine.counts["copy to the device"] == before + 1
        del data
        gc.collect()
    cuda.check()


def test_rows_of_a_vector_environment_on_the_gpu_are_copied_in_one_piece_a_column() -> None:
    cuda, n = Cuda(0, "eager"), 32
    schema = {
        "value": gear.Column(torch.float32, (3,), final=True),
        "task": gear.Column(torch.int64, per="trajectory"),
    }
    with (
        cuda.installed(),
        gear.Table.create(schema, max_steps=4000, max_trajectories=64, block_steps=4) as table,
    ):
        value = torch.arange(3.0 * n, device="cuda:1").view(n, 3)
        done = torch.ones(n, dtype=torch.bool)
        with table.writers(n) as writer:
            writer.trajectory = {"task": torch.arange(n, device="cuda:1")}
            writer.append(value=value, done=done, final={"value": value + 1000})
            assert cuda.machine.counts["copy to the host"] == 3
        for slot in table.indices().tolist():
            found = table[slot]
            row = 3.0 * int(found["task"]) + torch.arange(3)
            assert torch.equal(found["value"], row[None])
            assert torch.equal(table.final(slot)["value"], row + 1000)
    cuda.check()


def over_shards(remote: tuple[int, ...], packed: tuple[bool, ...], **options: Any) -> dict[str, float]:
    """Counts a batch, of three tables; those of `remote` are of other nodes."""
    cuda = Cuda(0, "eager")
    tables: list[gear.Table] = []
    with cuda.installed():
        tables += [
            filled(f"host-work-{shard}", shard, [20, 15, 10], packed=each)
            for shard, each in enumerate(packed)
        ]
        shards = Shards(tables)
        for shard in remote:
            peer: Any = PlayedPeer(tables[shard], set())
            shards._sources[shard] = RemoteShard(peer, "played", tables[0].schema)
        told = {"device": "cuda:1", "prefetch": 0, "batches_per_epoch": 60}
        data = gear.ReplayDataset(shards, **nested({**told, **options}))
        found = work(cuda, data)
        del data
        gc.collect()
        for table in tables:
            table.unlink()
            table.close()
    cuda.check()
    return found


def test_a_batch_over_shards() -> None:
    """One copy for the rows of this node, one for the keys, one for each part from another node."""
    found = over_shards((1,), (False,) * 3, batch_size=24, windows=gear.Window(5))
    check(found, (3, 0), {"place": 1})
    # The steps, and the values per trajectory, of each shard that was drawn from.
    assert 3 < found["gather"] <= 4


@pytest.mark.parametrize("remote", [(), (1,), (1, 2)])
def test_a_packed_batch_over_shards(remote: tuple[int, ...]) -> None:
    """One graph: a copy, a launch for the records of all tables, their split, and a launch for all other rows."""
    found = over_shards(remote, (True, True, False), batch_size=45, windows=gear.Window(2), layout="packed")
    check(found, (1, 0), {"replays": 1, "gather packed": 2, "split": 1, "place": 0, "clone": 0})


def test_the_side_stream_is_its_own_and_has_the_priority_that_was_asked_for() -> None:
    """PyTorch's pool hands out each of its streams to many; the next dataset gets that of one that is gone."""
    cuda, seen = Cuda(0, "eager"), []
    with cuda.installed(), made_table() as table:
        for _ in range(2):
            data = gear.ReplayDataset(
                table, batch_size=4, device=gear.Gpu("cuda:1", stream_priority=-1), windows=WINDOWS
            )
            data.sample()
            (pool,) = data._buffers.pools.values()
            seen.append(pool.stream)
            assert pool.stream not in [torch.cuda.Stream("cuda:1", priority=-1) for _ in range(40)]
            del data, pool
            gc.collect()
    assert seen[0] is seen[1]
    assert seen[0].priority == -1  # type: ignore[union-attr]


@pytest.mark.parametrize("agents", [None, ["a", "b"]])
def test_adding_what_a_gpu_holds_waits_once(agents: list[str] | None) -> None:
    cuda = Cuda(0, "latest")
    with cuda.installed():
        buffer = gear.ReplayBuffer(100, agents=agents, device="cpu")

        def on_gpu(number: float) -> dict[str, torch.Tensor]:
            return {name: torch.tensor(number + i, device="cuda:1") for i, name in enumerate("ab")}

        for step in range(4):
            flags = {name: torch.tensor(step == 2, device="cuda:1") for name in "ab"}
            numbers = on_gpu(-step)
            reward, flag = (numbers, flags) if agents else (numbers["a"], flags["a"])
            values = (on_gpu(step), on_gpu(2 * step), reward, on_gpu(step + 1), flag, flag)
            before = collections.Counter(cuda.machine.counts)
            buffer.add(*values)
            waits = sum(cuda.machine.counts[name] - before[name] for name in WAITS)
            assert waits == 1 or step == 0  # which creates the table
        batch = buffer.sample(64)
    cuda.check()
    obs, following = batch["obs"]["a"], batch["next_obs"]["b"]
    assert set(obs.tolist()) == {0, 1, 2, 3}
    assert torch.equal(following, obs + 2)
    assert torch.equal(batch["action"]["b"], 2 * obs + 1)
    reward, discount = (batch[name]["a"] if agents else batch[name] for name in ("reward", "discount"))
    assert torch.equal(reward, -obs)
    assert torch.equal(discount == 0, obs == 2)
