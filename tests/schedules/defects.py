"""Known kinds of defects, to be put back into the code one by one."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from scenarios import Scenario, Shrinkable
from shard_scenarios import ShardScenario
from streams import cuda
from streams.machine import Event, Stream
from streams.tensors import DeviceTensor

from gear_loader.collection import prefetch, ticket_releaser
from gear_loader.collection.batches_ahead import BatchesAhead
from gear_loader.collection.packed import PackedBuffers
from gear_loader.collection.packed_cuda import PackedCuda, PackedDeviceBuffers
from gear_loader.collection.padded_cuda import PaddedCuda
from gear_loader.collection.references import BatchReferences
from gear_loader.selection import cuda_leaves, prioritized_cuda, uniform_cuda
from gear_loader.selection.budget_planner import PlannedBatch
from gear_loader.selection.snapshot_selection import SnapshotSelection
from gear_loader.selection.uniform_cuda import CudaUniform
from gear_loader.storage import queue_loops, queued
from gear_loader.storage.reader import TableReader
from gear_loader.utils import launch_graph

PutBack = Callable[[pytest.MonkeyPatch], None]


class Defect(NamedTuple):
    """A defect.

    Attributes:
        put_back: puts it back, until the patch is undone.
        of: scenarios that find it, of a seed.
        first: the seed where the search begins, to save time; from there it goes on, and then from 0.
    """

    put_back: PutBack
    of: Callable[[int], Shrinkable] = Scenario.of
    first: int = 0


@contextlib.contextmanager
def put_back(name: str) -> Iterator[None]:
    """Put a defect back until the end of the block."""
    with pytest.MonkeyPatch.context() as patch:
        DEFECTS[name].put_back(patch)
        yield


def _left_out(kind: type, method: str, *callers: str) -> PutBack:
    """Calls of a method from these functions of the package do nothing."""

    def put_back(patch: pytest.MonkeyPatch) -> None:
        whole = getattr(kind, method)

        def partly(self: Any, *args: Any, **options: Any) -> Any:
            if sys._getframe(1).f_code.co_name in callers:
                return None
            return whole(self, *args, **options)

        patch.setattr(kind, method, partly)

    return put_back


def _early_ticket(patch: pytest.MonkeyPatch) -> None:
    release = prefetch.Prefetcher.release

    def end_too(self: Any, buffers: Any, ticket: Any, kept: Any = ()) -> None:
        ticket.end()
        release(self, buffers, ticket, kept)

    patch.setattr(prefetch.Prefetcher, "release", end_too)


def _no_lifetime(patch: pytest.MonkeyPatch) -> None:
    put = ticket_releaser.TicketReleaser.put

    def event_only(self: Any, buffers: Any, ticket: Any, kept: Any = ()) -> None:
        gpu: Any = types.SimpleNamespace(filled=buffers.gpu.filled)
        put(self, types.SimpleNamespace(gpu=gpu), ticket)  # type: ignore[arg-type]

    patch.setattr(ticket_releaser.TicketReleaser, "put", event_only)


def _beside(patch: pytest.MonkeyPatch) -> None:
    nowhere = property(lambda self: None, lambda self, stream: None)
    patch.setattr(prioritized_cuda.CudaPrioritizedSelection, "_stream", nowhere, raising=False)
    _left_out(Stream, "wait_event", "enter")(patch)


def _no_ticket(patch: pytest.MonkeyPatch) -> None:
    begin = TableReader._begin_unchanged

    def at_once(self: Any, ticket: Any, *given: Any) -> bool:
        done = begin(self, ticket, *given)
        if sys._getframe(1).f_code.co_name == "queue_inline":
            ticket.end()
        return done

    patch.setattr(TableReader, "_begin_unchanged", at_once)


def _unread(patch: pytest.MonkeyPatch) -> None:
    everything = property(lambda self: int(self.words[queue_loops.ASKED]))
    patch.setattr(queued.QueuedBatch, "num_read", everything)


def _callers_memory(patch: pytest.MonkeyPatch) -> None:
    def keep(self: Any, parts: Any) -> None:
        self.parts = tuple(None if part is None else part.detach() for part in parts)

    patch.setattr(cuda_leaves.UpdateSlot, "copy", keep)


def _one_slot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda_leaves, "_SLOTS", 1)
    _left_out(Stream, "wait_event", "fill")(patch)


def _consumers_pool(patch: pytest.MonkeyPatch) -> None:
    def take(self: Any) -> Any:
        try:
            return self._pool.free.pop()
        except IndexError:
            return self.collector.buffers(shared=self._pool.shared)

    patch.setattr(prefetch.Prefetcher, "_take", take)


def _one_early(patch: pytest.MonkeyPatch) -> None:
    begin = prefetch.Prefetcher.__init__

    def less(self: Any, pool: Any, **options: Any) -> None:
        begin(self, pool, **{**options, "keep": max(options["keep"] - 1, 1)})

    patch.setattr(prefetch.Prefetcher, "__init__", less)


def _scratch_of_the_call(patch: pytest.MonkeyPatch) -> None:
    """Each draw allocates what only its kernels use, and the graph does not keep that of its own."""
    scratch = prioritized_cuda.CudaPrioritizedSelection._scratch

    def fresh(self: Any, kept: dict[Any, Any], count: int) -> tuple[torch.Tensor, ...]:
        return *scratch(self, kept, count)[:2], *scratch(self, {}, count)[2:]

    patch.setattr(prioritized_cuda.CudaPrioritizedSelection, "_scratch", fresh)
    _kept_by_nobody(patch)


def _kept_by_nobody(patch: pytest.MonkeyPatch) -> None:
    """A graph does not keep the tensors that its nodes use."""
    begin = launch_graph.LaunchGraph.__init__
    patch.setattr(launch_graph.LaunchGraph, "__init__", lambda self, *given: begin(self, *given[:3], []))


def _freed_scratch(patch: pytest.MonkeyPatch) -> None:
    """What a draw uses ends with the draw."""
    _kept_by_nobody(patch)
    draw = prioritized_cuda.CudaPrioritizedSelection._draw_into

    def free(self: Any, drawn: Any, places: Any, stream: Any) -> None:
        draw(self, drawn, places, stream)
        places.work.scratch.clear()

    patch.setattr(prioritized_cuda.CudaPrioritizedSelection, "_draw_into", free)


def _key_without_memory(patch: pytest.MonkeyPatch) -> None:
    """A packed batch's key does not tell that its memory has grown."""
    run = launch_graph.RepeatedWork.run

    def shorter(self: Any, key: Any, *args: Any) -> None:
        run(self, key[1:] if isinstance(key, tuple) else key, *args)

    patch.setattr(launch_graph.RepeatedWork, "run", shorter)


def _exponent_of_the_call(patch: pytest.MonkeyPatch) -> None:
    """The exponent of weights is told to the launch, as it is then."""
    launch = prioritized_cuda.CudaPrioritizedSelection._launch_draw
    kept: list[torch.Tensor] = []

    def by_value(self: Any, draw: Any, places: Any) -> None:
        kept.append(torch.tensor(places.beta.tolist(), device="cpu", pin_memory=True))
        launch(self, draw, dataclasses.replace(places, beta=kept[-1]))

    patch.setattr(prioritized_cuda.CudaPrioritizedSelection, "_launch_draw", by_value)


def _early_parts(kind: type, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Staging memory is given back when the work that reads it is queued."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        queue = getattr(kind, name)

        def early(self: Any, buffers: Any, *args: Any) -> None:
            queue(self, buffers, *args)
            while buffers.gpu.parts:
                self.staging.give(buffers.gpu.parts.pop())

        patch.setattr(kind, name, early)

    return apply


def _early_plan(patch: pytest.MonkeyPatch) -> None:
    run = PackedCuda.run

    def end_too(self: Any, buffers: Any, rows: Any, read: Any) -> None:
        run(self, buffers, rows, read)
        for plan in gc.get_objects():
            if type(plan) is PlannedBatch and plan.rows is rows:
                for ticket in plan.tickets:
                    ticket.end()

    patch.setattr(PackedCuda, "run", end_too)


def _unknown_memory(patch: pytest.MonkeyPatch) -> None:
    reserve = PackedBuffers.reserve

    def grow(self: Any, *args: Any) -> None:
        consumers = set(self.gpu.consumers)
        reserve(self, *args)
        self.gpu.consumers |= consumers

    patch.setattr(PackedBuffers, "reserve", grow)


def _no_keeper(patch: pytest.MonkeyPatch) -> None:
    """Staging memory is freed when the gather is queued."""
    finish = PackedCuda.finish

    def give_up(self: Any, buffers: Any, rows: Any) -> None:
        finish(self, buffers, rows)
        buffers.gpu.parts.clear()
        buffers.sources.clear()

    patch.setattr(PackedCuda, "finish", give_up)


def _launches_of_old_memory(patch: pytest.MonkeyPatch) -> None:
    """New memory counts as having the launches of the old one, which are then made without what one of them needs."""
    replace = PackedDeviceBuffers._replace

    def keep(self: Any, **made: Any) -> None:
        had = self.has_records, self.has_others
        replace(self, **made)
        self.has_records, self.has_others = had

    patch.setattr(PackedDeviceBuffers, "_replace", keep)


def _first_joined(patch: pytest.MonkeyPatch) -> None:
    """Of each set of buffers there is one graph with an update, whichever that is."""
    joined = queued.QueuedDraw.joined

    def first(self: Any, update: Any) -> int:
        return self._joined[0][1].handle if self._joined else joined(self, update)

    patch.setattr(queued.QueuedDraw, "joined", first)


def _no_tensors(patch: pytest.MonkeyPatch) -> None:
    """Compiled calls record no event on streams of the consumer, where an update's tensors are copied."""
    launch, record, ours = cuda.Cuda.cuGraphLaunch, cuda.Cuda.cuEventRecord, set[int]()

    def launched(self: Any, graph: int, stream: int) -> int:
        ours.add(stream)
        return launch(self, graph, stream)

    patch.setattr(cuda.Cuda, "cuGraphLaunch", launched)
    patch.setattr(
        cuda.Cuda, "cuEventRecord", lambda self, *given: record(self, *given) if given[1] in ours else 0
    )


def _planned_for_old_memory(patch: pytest.MonkeyPatch) -> None:
    """What a compiled call knows of a packed batch is made once, but for the graph."""
    made_here = PackedDeviceBuffers._made_queued

    def once(self: Any, graph: Any, *given: Any) -> Any:
        made = made_here(self, graph, *given)
        old = vars(self).setdefault("first_queued", made)
        old.words[queue_loops.GRAPH], old.graph, old.key = graph.handle, graph, made.key
        return old if old.count == made.count else made

    patch.setattr(PackedDeviceBuffers, "_made_queued", once)


def _several(method: str, result: int = 0) -> PutBack:
    """While several batches are queued in one call, a function of the driver does nothing."""

    def put_back(patch: pytest.MonkeyPatch) -> None:
        whole, queue, inside = getattr(cuda.Cuda, method), TableReader.queue_inline, [False]

        def queued_here(self: Any, loop: Any, batch: Any, *given: Any) -> bool:
            inside[0] = isinstance(batch, queued.QueuedSeveral)
            try:
                return queue(self, loop, batch, *given)
            finally:
                inside[0] = False

        def partly(self: Any, *given: Any) -> int:
            return result if inside[0] else whole(self, *given)

        patch.setattr(TableReader, "queue_inline", queued_here)
        patch.setattr(cuda.Cuda, method, partly)

    return put_back


def _early_ticket_of_several(patch: pytest.MonkeyPatch) -> None:
    release = prefetch.Prefetcher.release

    def end_too(self: Any, buffers: Any, ticket: Any, kept: Any = ()) -> None:
        if kept:
            ticket.end()
        release(self, buffers, ticket, kept)

    patch.setattr(prefetch.Prefetcher, "release", end_too)


def _one_graph_of_several(patch: pytest.MonkeyPatch) -> None:
    """Of each set of buffers there is one graph with others, whichever these are."""
    several, kept = BatchesAhead._several, dict[int, Any]()

    def first(self: Any, members: Any) -> Any:
        made = several(self, members)
        if made is None:
            return None
        old = kept.setdefault(id(made.batches[0]), made)
        graphs = slice(1 + len(made.batches), None)
        made.members[graphs], made.drawn[graphs] = old.members[graphs], old.drawn[graphs]
        return made

    patch.setattr(BatchesAhead, "_several", first)


def _drawn_from_before(patch: pytest.MonkeyPatch) -> None:
    """What the GPU draws from is copied once."""
    held = CudaUniform.held

    def first(self: Any, items: Any, *given: Any) -> Any:
        kept = vars(self).setdefault("first", items)
        return held(self, kept, *given)

    patch.setattr(CudaUniform, "held", first)


def _complete_at_once(patch: pytest.MonkeyPatch) -> None:
    """The GPU counts as being through with every update that is launched."""
    begin = cuda_leaves.CudaLeaves.__init__

    def optimistic(self: Any, *given: Any) -> None:
        begin(self, *given)
        self._state[queue_loops.COMPLETE] = 1 << 61

    patch.setattr(cuda_leaves.CudaLeaves, "__init__", optimistic)


DEFECTS: dict[str, Defect] = {
    "an update's tensors are copied over those that the last one in that memory still reads": Defect(
        # Of fewer batches ahead the consumer has waited for one that was drawn after that update.
        _complete_at_once,
        lambda seed: dataclasses.replace(Scenario.queued_draws(seed), prefetch=9, batches=64, writes=0),
    ),
    "other streams do not wait for draws and updates of compiled calls": Defect(
        lambda patch: patch.setattr(cuda_leaves.CudaLeaves, "_ended", lambda self: self._last),
        Scenario.queued_draws,
    ),
    "uniform rows are drawn from what was there before a change": Defect(_drawn_from_before, Scenario.drawn),
    "uniform rows are drawn before what is drawn from has been copied": Defect(
        lambda patch: patch.setattr(uniform_cuda, "on_stream", lambda *_: contextlib.nullcontext()),
        Scenario.drawn,
    ),
    "one call writes the words of a uniform draw while the GPU still reads them": Defect(
        lambda patch: patch.setattr(cuda.Cuda, "cuEventQuery", lambda self, event: 0), Scenario.drawn
    ),
    "batches that were queued ahead are delivered although the table has changed": Defect(
        lambda patch: patch.setattr(
            SnapshotSelection, "standing", property(lambda self: self._items and self._items[1])
        ),
        Scenario.queued_ahead,
    ),
    "one call writes the arguments of several batches while copies still read them": Defect(
        _several("cuEventQuery"), Scenario.queued_ahead
    ),
    "one call queues several batches without waiting for the consumer": Defect(
        _several("cuStreamWaitEvent"), Scenario.queued_ahead
    ),
    "one call does not say when several batches are filled": Defect(
        _several("cuEventRecord"), Scenario.queued_ahead
    ),
    "the ticket of several batches is given back when they are queued": Defect(
        _early_ticket_of_several, Scenario.queued_ahead
    ),
    "several batches are queued as the graph of others": Defect(_one_graph_of_several, Scenario.queued_ahead),
    "a draw that is launched as a graph allocates its scratch": Defect(
        _scratch_of_the_call, Scenario.queued_draws
    ),
    "scratch is freed while a graph lives": Defect(_freed_scratch, Scenario.queued_draws),
    "an argument changes without a new key: the memory of a packed batch": Defect(
        _key_without_memory, Scenario.flat
    ),
    "an argument changes without a new key: the exponent of weights": Defect(_exponent_of_the_call),
    "one compiled call writes a batch's arguments while a copy still reads them": Defect(
        lambda patch: patch.setattr(cuda.Cuda, "cuEventQuery", lambda self, event: 0), Scenario.queued
    ),
    "one compiled call queues a batch without waiting for the consumer": Defect(
        _left_out(Stream, "wait_event", "cuStreamWaitEvent"), Scenario.queued
    ),
    "one compiled call does not say when a batch is filled": Defect(
        _left_out(Event, "record", "cuEventRecord"), Scenario.queued
    ),
    "one compiled call reads without a ticket": Defect(_no_ticket, Scenario.queued),
    "one compiled call releases the tickets of earlier batches that a GPU still reads": Defect(
        _unread, Scenario.queued
    ),
    "one compiled call plans a packed batch while a copy still reads the last one": Defect(
        lambda patch: patch.setattr(cuda.Cuda, "cuEventQuery", lambda self, event: 0), Scenario.queued_packed
    ),
    "one compiled call queues a packed batch without waiting for the consumer": Defect(
        _left_out(Stream, "wait_event", "cuStreamWaitEvent"), Scenario.queued_packed
    ),
    "one compiled call does not say when a packed batch is filled": Defect(
        _left_out(Event, "record", "cuEventRecord"), Scenario.queued_packed
    ),
    "one compiled call plans a packed batch without a ticket": Defect(_no_ticket, Scenario.queued_packed),
    "a packed batch that one call queues has the steps of the last one": Defect(
        lambda patch: patch.setattr(PackedDeviceBuffers, "was_queued", lambda self: None),
        Scenario.queued_packed,
    ),
    "one compiled call plans a packed batch for memory that has grown since": Defect(
        _planned_for_old_memory, Scenario.queued_packed
    ),
    "draws and updates that are queued in one call do not wait for each other": Defect(
        _left_out(Stream, "wait_event", "cuStreamWaitEvent"), Scenario.queued_draws
    ),
    "draws and updates that are queued in one call do not say when they end": Defect(
        _left_out(Event, "record", "cuEventRecord"), Scenario.queued_draws
    ),
    "an update that waits for the next draw is not launched before another one": Defect(
        lambda patch: patch.setattr(cuda_leaves.CudaLeaves, "launch_update", lambda self: None),
        Scenario.queued_draws,
    ),
    "a draw is launched with an earlier update": Defect(_first_joined, Scenario.queued_draws),
    "a draw and an update do not wait for the update's tensors": Defect(_no_tensors, Scenario.queued_draws),
    "one compiled call draws with numbers of an earlier batch": Defect(
        lambda patch: patch.setattr(cuda.Cuda, "cuEventQuery", lambda self, event: 0), Scenario.queued_draws
    ),
    "one compiled call keeps no copy of the rows": Defect(
        lambda patch: patch.setattr(cuda.Cuda, "cuMemcpyDtoDAsync_v2", lambda self, *given: 0),
        Scenario.queued_draws,
    ),
    "a batch is delivered without waiting for the stream that fills it": Defect(
        _left_out(Stream, "wait_event", "_deliver")
    ),
    "buffers are filled again without waiting for the consumer": Defect(
        _left_out(Stream, "wait_event", "begin", "run")
    ),
    "the end of the consumer's work is not recorded": Defect(_left_out(Event, "record", "_recycle")),
    "the allocator is not told that the consumer uses a batch": Defect(
        lambda patch: patch.setattr(prefetch, "_record", lambda *_: None)
    ),
    "buffers are allocated from the consumer's pool": Defect(_consumers_pool),
    "a batch that is still referred to is filled again": Defect(
        lambda patch: patch.setattr(BatchReferences, "held", property(lambda self: False)), first=6
    ),
    "buffers are filled again one request early": Defect(_one_early, first=26),
    "a copy is delivered before it is complete": Defect(_left_out(Event, "record", "_run"), first=8),
    "a read ticket is given back when the gather is queued": Defect(_early_ticket),
    "a read ticket is given back without waiting for the gather": Defect(
        _left_out(Event, "synchronize", "look")
    ),
    "pinned buffers end with their batch": Defect(_no_lifetime, first=16),
    "the host writes pinned buffers that a copy still reads": Defect(_left_out(Event, "synchronize", "run")),
    "an update runs beside a draw": Defect(_beside),
    "streams that use the tree do not wait for each other": Defect(_left_out(Stream, "wait_event", "enter")),
    "an update reads priorities before they are computed": Defect(
        _left_out(Stream, "wait_event", "_queue_update")
    ),
    "an update's memory is used again before it has run": Defect(_one_slot),
    "an update reads the caller's own tensors": Defect(_callers_memory),
    "the tree is freed under the stream that draws": Defect(
        _left_out(DeviceTensor, "record_stream", "enter"), first=15
    ),
    "staging memory is used again while rows are placed out of it": Defect(
        _early_parts(PaddedCuda, "_put"), ShardScenario.of, 10
    ),
    "the host writes a batch's arguments while kernels still read them": Defect(
        _left_out(Event, "synchronize", "run"), ShardScenario.of
    ),
    "buffers over shards are filled again without waiting for the consumer": Defect(
        _left_out(Stream, "wait_event", "begin", "run"), ShardScenario.of
    ),
    "tickets of several shards are given back when the gather is queued": Defect(
        _early_ticket, ShardScenario.of
    ),
    "a packed batch is delivered without waiting for the stream that fills it": Defect(
        _left_out(Stream, "wait_event", "_deliver"), Scenario.flat
    ),
    "packed buffers are filled again without waiting for the consumer": Defect(
        _left_out(Stream, "wait_event", "_queue", "run"), Scenario.flat
    ),
    "the tickets of a planned batch are given back when the gather is queued": Defect(
        _early_plan, Scenario.flat, 26
    ),
    "the allocator is not told that the consumer uses memory that has grown": Defect(
        _unknown_memory, Scenario.flat, 6
    ),
    "the host writes the lists of a packed batch that a copy still reads": Defect(
        _left_out(Event, "synchronize", "run"), Scenario.flat
    ),
    "rows on disk are read into memory that a packed gather still reads": Defect(
        _early_parts(PackedCuda, "finish"), Scenario.flat_tier
    ),
    "memory of rows on disk is freed when the packed gather is queued": Defect(
        _no_keeper, Scenario.flat_tier
    ),
    "the host reads rows on disk while the last batch is still gathered": Defect(
        _left_out(Event, "synchronize", "run"), Scenario.flat_tier
    ),
    "memory of a packed batch that has grown is filled by launches that were made for the old one": Defect(
        _launches_of_old_memory, Scenario.flat_tier, 19
    ),
    "the tickets of packed rows are given back when the gather is queued": Defect(
        _early_ticket, Scenario.flat_tier, 15
    ),
    "answers of other nodes arrive in memory that a packed gather still reads": Defect(
        _early_parts(PackedCuda, "finish"), ShardScenario.flat, 8
    ),
    "the host writes the lists of a packed batch over shards that a copy still reads": Defect(
        _left_out(Event, "synchronize", "run"), ShardScenario.flat
    ),
    "packed buffers over shards are filled again without waiting for the consumer": Defect(
        _left_out(Stream, "wait_event", "_queue", "run"), ShardScenario.flat
    ),
    "tickets of packed rows of several shards are given back when the gather is queued": Defect(
        _early_ticket, ShardScenario.flat
    ),
}
"""Those of batches of a table, over shards, packed, and with a disk tier."""
