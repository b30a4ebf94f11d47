"""One rank of ``multi-server``: a process with a shard, its node's server, and the yardsticks' receiving side.

    python -m benchmarks.nodes.ranks

Commands come as JSON lines: `join` the other ranks, `fill` a shard, connect to `bare` senders; then `prepare`,
`check`, `measure` and `drop` subjects, of `SUBJECTS`, all ranks at the same time.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import gear_loader as gear
from benchmarks.harness import Incorrect
from benchmarks.nodes import bare
from benchmarks.peers.serve import answer_commands
from benchmarks.workloads import W1, W2, Data, Rows, Workload, expect, poison
from gear_loader.collection.collector import collector_for
from gear_loader.collection.tier_rows import resolve
from gear_loader.collection.windows import reach_of
from gear_loader.distributed.records import record_dtype
from gear_loader.distributed.remote import MOST_RECEIVED_HERE, PART_BYTES
from gear_loader.distributed.shard_sampler import records_of
from gear_loader.distributed.shard_source import ShardRows, ShardSource
from gear_loader.distributed.shards import Shards
from gear_loader.transport.spec import WindowSpec

_LAST: Any = "last"  # other benchmarks have no use for it
TINY = Workload("tiny", (("value", ()),), 10_000, 1, gear.Window(length=1), _LAST)
"""Rows of 4 bytes: what a batch of them costs is selection."""
_WHOLE = dataclasses.replace(W1, window=gear.Window(W1.steps, 1 - W1.steps), anchor=_LAST)
WORKLOADS = {workload.name: workload for workload in (_WHOLE, W2, TINY)}
"""Whole trajectories are named by their last step, windows of 20 steps as well."""
_CPU = torch.device("cpu")

Array = np.ndarray[Any, Any]


def wire_pieces(spec: WindowSpec, rows: int) -> list[bare.Piece]:
    """What is asked of a node for so many rows, in the parts of `gear_loader.distributed.remote`."""
    size = max(1, PART_BYTES // spec.row_bytes)
    counts = [min(size, rows - first) for first in range(0, rows, size)]
    return [(spec.reply_bytes(count), 8 + 24 * count) for count in counts]


class Rank:
    """What the process has; see the module for the commands."""

    def __init__(self) -> None:
        self.rank, self.world = 0, 1
        self.workload: Workload = TINY
        self.data: dict[int, Data] = {}
        self.seed = 0
        self.table: gear.Table | None = None
        self.shards: Any = None
        self.senders: bare.Bare | None = None
        self.subjects: dict[str, Any] = {}
        self.traffic = Traffic()

    def join(self, rank: int, world: int, store: str) -> None:
        self.rank, self.world = rank, world
        meeting: Any = dist.FileStore(store, world)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world)
        self.traffic.follow()

    def fill(
        self, workload: str, trajectories: int, seed: int, table: str, options: Mapping[str, Any]
    ) -> None:
        """Make a shard with a workload's trajectories, and `Shards` of all ranks' in place of those before."""
        self.empty()
        self.workload, self.seed = WORKLOADS[workload].of(trajectories), seed
        source = self.data_of(self.rank)
        count, steps = self.workload.trajectories, self.workload.steps
        self.table = gear.Table.create(
            self.workload.schema,
            name=f"{table}-{self.rank}",
            max_steps=count * steps,
            max_trajectories=count,
            block_steps=steps,
            memory=gear.Memory(max_blocks=count),
        )
        lengths = np.full(count, steps)
        slots = np.asarray(self.table.extend(source.stacked, lengths=lengths, priority=priorities_of(count)))
        assert (slots == np.arange(count)).all()
        self.shards = Shards(self.table, **options)

    def bare(self, carrier: str, addresses: list[tuple[str, int]]) -> None:
        """Connect to the bare senders of the other nodes."""
        self.senders = bare.open_bare(carrier, addresses)

    def prepare(self, name: str, kind: str, **parameters: Any) -> None:
        self.subjects[name] = SUBJECTS[kind](self, **parameters)

    def check(self, name: str) -> dict[str, Any]:
        """Whether a subject's result is right; what is wrong with it, and figures about it."""
        subject = self.subjects[name]
        try:
            subject.check()
        except Incorrect as error:
            return {"wrong": str(error)}
        return {"figures": subject.figures}

    def measure(self, name: str, batches: int, together: bool) -> dict[str, Any]:
        """Seconds of each of so many batches, and of all of them; `together`: all ranks measure, and begin at once."""
        subject = self.subjects[name]
        inputs = [subject.draw() for _ in range(batches + 1)]
        subject.work(inputs[0])
        if together:
            dist.barrier()
        times = [time.perf_counter()]
        for one in inputs[1:]:
            subject.work(one)
            times.append(time.perf_counter())
        return {"each": np.diff(times).tolist(), "seconds": times[-1] - times[0]}

    def drop(self, name: str) -> None:
        self.subjects.pop(name).close()

    def empty(self) -> None:
        for name in list(self.subjects):
            self.drop(name)
        if self.shards is not None:
            self.shards.close()
        if self.table is not None:
            self.table.unlink()
            self.table.close()
        self.shards = self.table = None
        self.data.clear()

    def close(self) -> None:
        self.empty()
        if self.senders is not None:
            self.senders.close()

    def data_of(self, shard: int) -> Data:
        """A shard's values, which every rank can compute."""
        if shard not in self.data:
            self.data[shard] = Data(self.workload, seed=self.seed + shard)
            if self.workload.name == TINY.name:
                count = self.workload.trajectories
                self.data[shard].flat["value"].copy_(torch.arange(count) + 100_000.0 * shard)
        return self.data[shard]

    def windows(self) -> dict[str, gear.Window]:
        """Those of the workload, of every column."""
        return dict.fromkeys(self.workload.schema, self.workload.window)

    def spec(self) -> WindowSpec:
        """What is asked of other nodes."""
        assert self.table is not None
        return WindowSpec("bench", self.table.schema, self.windows())

    def expect(self, batch: Mapping[str, Any]) -> None:
        """Raise `Incorrect` unless every row of a batch is what its names say."""
        for shard in range(self.world):
            rows = torch.nonzero(batch["shard"] == shard).view(-1)
            names = Rows(batch["index"][rows], batch["anchor"][rows])
            there = {key: batch[key][rows] for key in (*self.workload.schema, "mask")}
            expect(there, self.data_of(shard).expected(names))


def priorities_of(count: int) -> Array:
    """Of a shard's trajectories, float32: all different, and positive."""
    return np.random.default_rng(11).permutation(count).astype(np.float32) + 1


class Traffic:
    """Bytes that collectives move between ranks, counted where torch.distributed is called."""

    def __init__(self) -> None:
        self.calls = self.sent = self.received = 0
        self.last: tuple[list[int], list[int]] = ([], [])

    def follow(self) -> None:
        call, rank = dist.all_to_all_single, dist.get_rank()

        def counted(output: Any, given: Any, ins: list[int], outs: list[int], **options: Any) -> Any:
            self.calls += 1
            self.sent += sum(outs) - outs[rank]
            self.received += sum(ins) - ins[rank]
            self.last = list(ins), list(outs)
            return call(output, given, ins, outs, **options)

        dist.all_to_all_single = counted  # type: ignore[assignment]


class Subject:
    """Something that is measured. figures: what else is known about it, once it has been checked."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.figures: dict[str, float] = {}

    def draw(self) -> Any:
        """Inputs of one batch, which take no time of it."""

    def work(self, inputs: Any) -> None:
        raise NotImplementedError

    def check(self) -> None:
        """Raise `Incorrect` unless the result is right."""
        raise NotImplementedError

    def close(self) -> None:
        """End it."""


class Collect(Subject):
    """Rows that are chosen here, by a collector of shards: so many of them of this node.

    A selection over all shards gives every rank as many rows of its own node as that has of all mass: 1 / nodes on
    average over the ranks. Other shares on all ranks at once can only be had past the selection. batch: rows. local:
    how many of them are of this rank's shard; the others are dealt over the other ranks'.
    """

    def __init__(self, rank: Rank, batch: int, local: int) -> None:
        super().__init__(rank)
        self._random = np.random.default_rng([3, rank.rank])
        others = [shard for shard in range(rank.world) if shard != rank.rank]
        self._shards = np.array([rank.rank] * local + [others[i % len(others)] for i in range(batch - local)])
        self._records = _all_records(rank)
        self._collector = collector_for(
            ShardSource(rank.shards), rank.windows(), batch_size=batch, device=_CPU, zero_copy=False
        )
        self._ring = [self._collector.buffers() for _ in range(4)]  # used in turn

    def draw(self) -> ShardRows:
        shards = self._random.permutation(self._shards)
        places = self._random.integers(self.rank.workload.trajectories, size=len(shards))
        return ShardRows(shards, self._records[shards, places], None, None)

    def work(self, inputs: ShardRows) -> None:
        self._ring.append(self._ring.pop(0))
        self._collector.gather(self._ring[-1], inputs)
        inputs.tickets.end()

    def check(self) -> None:
        for buffers in self._ring:
            poison(buffers.batch)
        rows = self.draw()
        self.work(rows)
        batch = self._ring[-1].batch
        if not np.array_equal(batch["shard"].numpy(), rows.shards):
            raise Incorrect("rows are of other shards")
        self.rank.expect(batch)


def _all_records(rank: Rank) -> Array:
    """Records of a window of every trajectory of all shards, [shards, trajectories]; windows lie at random."""
    table, workload = rank.table, rank.workload
    assert table is not None
    count = workload.trajectories
    slots, steps = np.arange(count), np.full(count, workload.steps - 1)
    if workload.anchor == "uniform":
        steps = np.random.default_rng([5, rank.rank]).integers(workload.steps, size=count)
    reach = reach_of(table.schema, rank.windows())
    one_sided = rank.shards.transport == "nixl" and rank.shards.remote
    width = (reach.last - reach.first) // workload.steps + 2 + reach.once
    mine: Array = np.zeros(count, dtype=record_dtype(width if one_sided else 0))
    plain = records_of(table, slots, steps)
    for name in plain.dtype.names or ():
        mine[name] = plain[name]
    if one_sided:
        width = mine["blocks"].shape[1]
        extent, ids = np.empty((count, 2), dtype=np.int64), np.zeros((count, width), dtype=np.int32)
        resolve(table, slots, steps, reach, extent, ids)
        mine["steps"], mine["blocks"] = extent[:, 0], ids
        mine["low"] = np.arange(count) * width - extent[:, 1]
    return np.stack(rank.shards.exchange.share_array(mine))


class BareExchange(Subject):
    """The same bytes without any of it: those of other nodes over the bare carrier, those of this one by one copy.

    The copy goes from a random place into one of four buffers in turn.
    """

    def __init__(self, rank: Rank, batch: int, local: int) -> None:
        super().__init__(rank)
        spec, others = rank.spec(), rank.world - 1
        counts = [(batch - local) // others + (i < (batch - local) % others) for i in range(others)]
        self._pieces = [wire_pieces(spec, count) for count in counts]
        self._source = rank.data_of(rank.rank).arena
        self._ring = [torch.empty(local * rank.workload.row_bytes // 4) for _ in range(4)]
        self._random = np.random.default_rng([7, rank.rank])
        self.figures = {"wire_bytes": sum(size for sizes in self._pieces for size, _ in sizes)}

    def work(self, inputs: Any) -> None:
        if self.rank.senders is None:
            self._copy()
        else:
            self.rank.senders.exchange(self._pieces, meanwhile=self._copy)

    def _copy(self) -> None:
        out = self._ring.pop(0)
        self._ring.append(out)
        first = 16 * int(self._random.integers((len(self._source) - len(out)) // 16 + 1))
        self._copied = self._source[first : first + len(out)]
        out.copy_(self._copied)

    def check(self) -> None:
        if self.rank.senders is not None:
            self.rank.senders.check(self._pieces)
        self._ring[0].fill_(float("nan"))
        self._copy()
        if not torch.equal(self._ring[-1], self._copied):
            raise Incorrect("the copy differs")


class Batches(Subject):
    """`ReplayDataset` over all shards: drawn, told to each other, fetched and put in place.

    With a cache enough batches come first to fill it, unmeasured.
    """

    def __init__(self, rank: Rank, batch: int, selector: str) -> None:
        super().__init__(rank)
        self._selector = selector
        self._data = gear.ReplayDataset(
            rank.shards,
            batch_size=batch,
            windows=rank.workload.window,
            draws=gear.Draws(anchor=rank.workload.anchor),
            sampler=SELECTORS[selector](),
            device="cpu",
            prefetch=gear.Prefetch(0, copy=False),
            batches_per_epoch=float("inf"),
        )
        self._batches: Iterator[Any] = iter(self._data)

    def work(self, inputs: Any) -> None:
        next(self._batches)

    def check(self) -> None:
        # The first batches exchange what there is, and how much each shard is likely to bring.
        found = [{key: value.clone() for key, value in next(self._batches).items()} for _ in range(4)]
        traffic, count = self.rank.traffic, 8
        traffic.calls = traffic.sent = traffic.received = 0
        shares = []
        for _ in range(count):
            batch = next(self._batches)
            shares.append(float((batch["shard"] == self.rank.rank).float().mean()))
        self.figures = {
            "sent_bytes": traffic.sent / count,
            "received_bytes": traffic.received / count,
            "exchanges": traffic.calls / count,
            "local_fraction": float(np.mean(shares)),
        }
        if self.rank.shards.cache is not None:
            self.figures |= self._cached()
        for batch in found:
            self.rank.expect(batch)
            names = batch["shard"] * self.rank.workload.trajectories + batch["index"]
            if self._selector == "prioritized, without replacement" and len(names.unique()) < len(names):
                raise Incorrect("rows come more than once")
            if self._selector == "top":
                self._expect_top(batch)

    def _cached(self) -> dict[str, float]:
        """Fill the cache; return its hit rate over batches after that, and the bytes that it holds and saves."""
        shards, count = self.rank.shards, 20
        most = 4 * self.rank.workload.trajectories * self.rank.world // self._data.batch_size
        for _ in range(most):
            next(self._batches)
        before = shards.cache_stats()
        for _ in range(count):
            self.rank.expect(next(self._batches))
        after = shards.cache_stats()
        hits, misses = after.num_hits - before.num_hits, after.num_misses - before.num_misses
        return {
            "cache_hit_rate": hits / max(1, hits + misses),
            "cache_resident_bytes": after.resident_bytes,
            "cache_saved_bytes": (after.saved_bytes - before.saved_bytes) / count,
        }

    def _expect_top(self, batch: Mapping[str, Any]) -> None:
        """All shards have the same priorities, so the highest of all are the highest ones of each."""
        count, rows = self.rank.workload.trajectories, len(batch["index"])
        order = np.argsort(-priorities_of(count), kind="stable")
        if not np.isin(batch["index"].numpy(), order[: rows + 1]).all():
            raise Incorrect("rows are not those with the highest priorities")

    def close(self) -> None:
        self._batches.close()  # type: ignore[attr-defined]


SELECTORS: dict[str, Callable[[], Any]] = {
    "uniform": gear.Uniform,
    "prioritized": lambda: gear.Prioritized(alpha=0.6, beta=0.4),
    "prioritized, without replacement": lambda: gear.Prioritized(alpha=0.6, beta=0.4, replacement=False),
    "top": gear.TopK,
}


class Fetch(Subject):
    """Requests of so many rows to one other node into staging memory, a few under way: `fetch` and nothing else."""

    def __init__(self, rank: Rank, rows: int, in_flight: int, requests: int) -> None:
        super().__init__(rank)
        self._source = rank.shards.source((rank.rank + 1) % rank.world)
        self._spec = self._source.spec(rank.windows())
        self._records = _all_records(rank)[(rank.rank + 1) % rank.world]
        self._requests = requests
        self._random = np.random.default_rng([13, rank.rank])
        self._staging = [np.zeros(self._spec.reply_bytes(rows), dtype=np.uint8) for _ in range(in_flight)]
        self._rows = rows
        under_way = in_flight * self._spec.reply_bytes(rows)
        self._options = {"here": not self._source.one_sided and under_way <= MOST_RECEIVED_HERE}
        self.figures = {"wire_bytes": requests * self._spec.reply_bytes(rows)}

    def draw(self) -> list[Any]:
        places = self._random.integers(len(self._records), size=(self._requests, self._rows))
        drawn = []
        for each in places:
            part = self._records[each]
            names = [np.ascontiguousarray(part[field]) for field in ("slot", "step", "generation")]
            drawn.append(
                (names, self._source._places(part) if self._source.one_sided else self._options, each)
            )
        return drawn

    def work(self, inputs: list[Any]) -> None:
        fetch, staging = self._source.peer.fetch, self._staging
        depth = len(staging)
        under_way: list[Any] = []
        for number, (names, places, _) in enumerate(inputs):
            if number >= depth:
                under_way[number - depth].result()
            under_way.append(fetch(self._spec, *names, out=staging[number % depth], **places))
        for future in under_way[-depth:]:
            future.result()

    def check(self) -> None:
        inputs = self.draw()
        for room in self._staging:
            room[:] = 255
        self.work(inputs)
        rank, count, shard = self.rank, self._rows, (self.rank.rank + 1) % self.rank.world
        depth = len(self._staging)
        for number in range(max(0, len(inputs) - depth), len(inputs)):
            out, which = self._staging[number % depth], inputs[number][2]
            if out[self._spec.data_bytes(count) :][:count].any():
                raise Incorrect("rows are gone")
            rows = Rows(torch.from_numpy(which), torch.from_numpy(self._records["step"][which].copy()))
            expected = rank.data_of(shard).expected(rows)
            for piece in self._spec.pieces(count):
                values = expected["mask" if piece.kind == "mask" else piece.name].contiguous()
                there = out[piece.offset : piece.offset + count * piece.row_bytes]
                if not np.array_equal(there, values.view(-1).view(torch.uint8).numpy()):
                    raise Incorrect(f"{piece.kind} {piece.name} differs")


class BareFetch(Subject):
    """The same requests as `Fetch` over the bare carrier."""

    def __init__(self, rank: Rank, rows: int, in_flight: int, requests: int) -> None:
        super().__init__(rank)
        piece = (rank.spec().reply_bytes(rows), 8 + 24 * rows)
        self._pieces = [[piece] * requests] + [[] for _ in range(rank.world - 2)]
        self._in_flight = in_flight
        self.figures = {"wire_bytes": requests * piece[0]}

    def work(self, inputs: Any) -> None:
        assert self.rank.senders is not None
        self.rank.senders.exchange(self._pieces, in_flight=self._in_flight)

    def check(self) -> None:
        assert self.rank.senders is not None
        self.rank.senders.check([sizes[:1] for sizes in self._pieces])


class AllToAll(Subject):
    """torch.distributed's collective alone; size: bytes from each to each.

    Without a size: as many bytes, as often, as the last batch of the `Batches` took that the rank has.
    """

    def __init__(self, rank: Rank, size: int | None = None) -> None:
        super().__init__(rank)
        self._size, self._times = size, 1
        self._group = dist.new_group(list(range(rank.world)), backend="gloo")

    def check(self) -> None:
        if self._size is None:
            self._sizes = self.rank.traffic.last
            (batches,) = (one for one in self.rank.subjects.values() if isinstance(one, Batches))
            self._times = max(1, round(batches.figures["exchanges"]))
        else:
            self._sizes = ([self._size] * self.rank.world,) * 2
        ins, outs = self._sizes
        mine = [(5 * self.rank.rank + target) % 251 for target in range(len(outs))]
        self._given = torch.tensor(mine, dtype=torch.uint8).repeat_interleave(torch.tensor(outs))
        self._out = torch.zeros(sum(ins), dtype=torch.uint8)
        self.work(None)
        for source, part in enumerate(self._out.split(ins)):
            if (part != (5 * source + self.rank.rank) % 251).any():
                raise Incorrect("what has arrived differs")

    def work(self, inputs: Any) -> None:
        for _ in range(self._times):
            dist.all_to_all_single(self._out, self._given, *self._sizes, group=self._group)

    def close(self) -> None:
        dist.destroy_process_group(self._group)


SUBJECTS: dict[str, Any] = {
    "collect": Collect,
    "bare exchange": BareExchange,
    "batches": Batches,
    "fetch": Fetch,
    "bare fetch": BareFetch,
    "all_to_all": AllToAll,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer_commands(dict, Rank)
    sys.stdout.flush()
    os._exit(0)  # gloo's and UCX's threads may wait for ranks that have ended
