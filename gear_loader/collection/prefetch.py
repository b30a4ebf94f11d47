"""Prefetching of batches in a ring of buffers, which are recycled when nothing refers to their batch."""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from gear_loader.collection.batches import Batch
from gear_loader.collection.batches_ahead import BatchesAhead, Fills
from gear_loader.collection.buffers import Buffers, clone_batch
from gear_loader.collection.collector import Collector
from gear_loader.collection.references import can_count
from gear_loader.collection.ticket_releaser import TicketReleaser, failure_of, keep_reserved
from gear_loader.collection.windows import ROW_KEYS
from gear_loader.errors import GearError, LockTimeoutError
from gear_loader.kernels.devices import on_device
from gear_loader.storage.lock import LOCK_TIMEOUT
from gear_loader.storage.queue_loops import MOST_ASKED
from gear_loader.storage.queued import QueuedSeveral
from gear_loader.storage.ragged import Ragged
from gear_loader.utils.arrays import Array, outside_inference
from gear_loader.utils.background import background_thread, is_ending, stop_at_end
from gear_loader.utils.captures import beside_captures, consumer_of
from gear_loader.utils.mutex import holds_any
from gear_loader.utils.streams import on_stream, own_stream
from gear_loader.utils.waiting import Interrupted, interruptible

Item = TypeVar("Item")
_BATCH, _STOP, _END = object(), object(), object()
_LOOK = 1.0  # seconds between the looks of an idle thread at whether its consumer is still there
_AMID_TIMEOUT = (
    0.5  # seconds that a signal handler waits for a thread that may be waiting for what it interrupted
)
_MOST_HELD = 8
"""Buffers of batches that the consumer holds for longer, which a prefetcher looks after; older ones are left to it."""


class _Order(NamedTuple):
    """Buffers for the prefetch thread to fill.

    An order holds everything that its batch needs: between orders the thread refers to no dataset, so that an unused
    one is garbage-collected and closed.
    """

    buffers: Buffers
    fill: Callable[[Buffers, Any], int]
    items: Iterator[Any]


class Pool:
    """The buffers of one collector, which outlive its iterators, with the stream and releaser of a GPU.

    Attributes:
        free: unused buffers.
        delivered: the last batches of an ended iterator, oldest first.
        stream: side stream that fills the buffers, on a GPU.
        releaser: releases read tickets, if the GPU reads the region, or will when it is pinned.
    """

    def __init__(self, collector: Collector, *, shared: Any = False) -> None:
        self.collector = collector
        self.shared = shared
        self.free: list[Buffers] = []
        self.delivered: collections.deque[Buffers] = collections.deque()
        self.stream: torch.cuda.Stream | None = None
        self.releaser: TicketReleaser | None = None
        if collector.device.type == "cuda":
            with beside_captures(collector.device):
                self.stream = own_stream(collector.device, collector.stream_priority, self)
        if collector.zero_copy or collector.awaits_pinning:
            self.releaser = TicketReleaser(collector)
            weakref.finalize(self, self.releaser.stop)


class Prefetcher:
    """Fills buffers ahead of one consumer and recycles them after use.

    On the CPU, and for a GPU that cannot read the region when the iteration begins, a thread fills them. Otherwise the
    consumer's request for batch i queues the work of batch i + prefetch on a side stream, which costs the host some
    tens of microseconds; on the CPU it fills small batches, for which a thread takes longer.

    Args:
        pool: pool of the buffers.
        prefetch: batches filled ahead; 0 fills on request.
        keep: a batch's buffers are recycled when this many more have been requested.
        copy: True delivers each batch in new memory: new buffers on the CPU; on a GPU a copy, which the side stream
            makes when the batch is complete. None leaves a batch that is still referred to its memory, and takes other
            buffers instead. False recycles it all the same.
        complete: finish requested draws after `close`, because they precede calls of `between`.
        consumer: what lives as long as the iteration and is referred to weakly: when it is gone the thread ends, also
            if an interruption has come before `close`.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        prefetch: int,
        keep: int,
        copy: bool | None,
        complete: bool = False,
        consumer: Callable[..., object] | None = None,
    ) -> None:
        self.collector = pool.collector
        self._pool = pool
        self._prefetch = prefetch
        self._keep = keep
        self._lends = copy is None and can_count()
        copy = copy or (copy is None and not self._lends)
        self._copies = copy and pool.stream is not None
        self._fresh = copy and not self._copies
        self._complete = complete
        self._delivered, pool.delivered = pool.delivered, collections.deque()
        self._stream = pool.stream
        self._releaser = pool.releaser
        self._pid = os.getpid()
        # A plain flag: an Event's lock would stay taken if a signal handler raised inside `set`.
        self._stopped = False
        self._consumer = None if consumer is None else weakref.ref(consumer)
        self._thread: threading.Thread | None = None
        self._starts = 0  # ident of the thread that is about to start it
        # Requests to the thread, in order: fill buffers, call a function, or None to stop.
        self._orders: queue.SimpleQueue[_Order | Callable[[], object] | None] = queue.SimpleQueue()
        self._accepting = False
        # Guards `_accepting`; a signal handler may find it taken by what it interrupted.
        self._turn: Any = threading.RLock()
        self._ready: collections.deque[tuple[Buffers, int]] = collections.deque()  # filled, not yet delivered
        self._last: Buffers | None = None  # of the last delivered batch, on a GPU
        self._names_stream: torch.cuda.Stream | None = None

    # ---------------------------------------------------------------- delivering

    def one(
        self, fill: Callable[[Buffers, Item], int], item: Item, queue: Callable[..., bool] | None = None
    ) -> Batch:
        """Fill and deliver one batch now. Arguments as of `batches`."""
        consumer = None if self._stream is None else self._begin()
        self._recycle(consumer)
        buffers = self._take()
        return self._deliver(buffers, self._run(fill, buffers, item, queue), consumer)

    def batches(
        self,
        fill: Callable[[Buffers, Item], int],
        items: Iterator[Item],
        queue: Callable[..., bool] | None = None,
        *,
        alone: bool = False,
        several: Fills | None = None,
    ) -> Iterator[Batch]:
        """Yield a batch for each of `items`, in order.

        Args:
            fill: draws a batch, gathers it into the buffers and returns its number of rows.
            queue: as `Filler.queue`, tried first if the buffers can be filled so.
            items: second arguments of `fill`. A generator is closed if this ends, and no thread uses it.
            alone: fill them in the calling thread; which are filled at a request is the same.
            several: what `queue` is of; it can queue several batches at a time.
        """
        if self._prefetch and self.collector.waits and not alone:
            yield from self._ahead_in_thread(fill, items)
            return
        try:
            if self._prefetch:
                yield from self._ahead_on_stream(fill, items, queue, several)
            else:
                for item in items:
                    yield self.one(fill, item, queue)
        finally:
            if isinstance(items, Generator):
                items.close()  # what it holds for an item ends, also while a traceback refers to it

    def _ahead_on_stream(
        self,
        fill: Callable[[Buffers, Item], int],
        items: Iterator[Item],
        queue: Callable[..., bool] | None = None,
        several: Fills | None = None,
    ) -> Iterator[Batch]:
        ready, more = self._ready, True
        failure: Exception | None = None
        ahead = self._batches_ahead(several, items)
        if ahead is not None:
            items = ahead.items
        try:
            while ready or more:
                consumer = self._begin()
                self._recycle(consumer)  # who has asked for one more
                try:
                    while more and len(ready) <= self._prefetch:
                        item: Any = next(items, _END)
                        if item is _END:
                            more = False
                            break
                        found = None if ahead is None else ahead.next(item)
                        if found is None:
                            buffers = self._take()
                            found = buffers, self._run(fill, buffers, item, queue)
                        ready.append(found)
                except Exception as error:  # raised after the ready batches
                    more, failure = False, error
                if ready:
                    yield self._deliver(*ready.popleft(), consumer)
        finally:
            if ahead is not None and os.getpid() == self._pid:
                ahead.close()
        if failure is not None:
            raise failure

    def _batches_ahead(self, several: Fills | None, items: Iterator[Any]) -> BatchesAhead | None:
        """What queues several batches at a time; None if nothing can."""
        if several is None or self._stream is None or self._releaser is None or self._copies:
            return None
        options: dict[str, Any] = {"free": self._pool.free, "make": self._make, "stream": self._stream}
        return BatchesAhead(several, items, queue=self._queue_several, **options)

    def _ahead_in_thread(
        self, fill: Callable[[Buffers, Item], int], items: Iterator[Item]
    ) -> Iterator[Batch]:
        signals: queue.SimpleQueue[BaseException | object] = queue.SimpleQueue()
        for _ in range(self._prefetch):
            self._orders.put(_Order(self._take(), fill, items))
        self._starts, self._accepting = threading.get_ident(), True
        self._thread = background_thread(
            self._work, "gear-loader-prefetch", args=(signals,), stop=self._ask_to_end
        )
        self._thread.start()
        self._starts = 0
        while True:
            consumer = self._begin()
            signal = signals.get()
            stop_at_end()
            if signal is _STOP or self._stopped:
                return
            if isinstance(signal, BaseException):
                raise signal
            # The consumer has requested one more batch: recycle the oldest and order the next.
            self._recycle(consumer)
            self._orders.put(_Order(self._take(), fill, items))
            yield self._deliver(*self._ready.popleft(), consumer)

    def _begin(self) -> torch.cuda.Stream | None:
        """The stream of the consumer, who asks for a batch; None on the CPU. An error if there can be none."""
        if os.getpid() != self._pid:
            raise GearError(
                f"An iterator of process {self._pid} was continued in process {os.getpid()}, a forked child without "
                "the thread that prefetches its batches, and without its GPU. Make a new iterator in the child, with "
                "device='cpu', or start the child with spawn."
            )
        device = self.collector.device
        return consumer_of(device, "a batch") if device.type == "cuda" else None

    def _work(self, signals: queue.SimpleQueue[BaseException | object]) -> None:
        """Main function of the thread."""
        signal: BaseException | object = _STOP
        try:
            with interruptible(lambda: self.closed):
                while self._execute(self._next_order(), signals):
                    pass
        except Interrupted:
            pass  # closed while waiting: the batch is no longer wanted
        except BaseException as error:
            signal = error
        try:
            self._finish_orders()
        except BaseException as error:
            signal = error
        if self.closed and not is_ending():
            self._give_back()
        signals.put(signal)

    def _next_order(self) -> _Order | Callable[[], object] | None:
        """Wait for a request; None also if the consumer is gone, and was interrupted before it could say so."""
        while True:
            try:
                return self._orders.get(timeout=_LOOK)
            except queue.Empty:
                if self.closed:
                    return None

    def _execute(
        self,
        order: _Order | Callable[[], object] | None,
        signals: queue.SimpleQueue[BaseException | object],
    ) -> bool:
        """Carry out a request; return whether more may follow."""
        if not isinstance(order, _Order):
            if order is not None:
                order()
            return order is not None
        item = _END
        if not self.closed or self._complete:
            item = next(order.items, _END)
        if item is _END:
            self._pool.free.append(order.buffers)
            return False
        self._ready.append((order.buffers, self._run(order.fill, order.buffers, item)))
        signals.put(_BATCH)
        return True

    def _finish_orders(self) -> None:
        """Carry out the remaining requests at the thread's end: return unfilled buffers, call functions."""
        while True:
            with self._turn:  # so that `between` keeps the order of requests
                self._accepting = not self._orders.empty()
                if not self._accepting:
                    return
                order = self._orders.get()
            if isinstance(order, _Order):
                self._pool.free.append(order.buffers)
            elif order is not None:
                order()

    def between(self, call: Callable[[], object]) -> None:
        """Call a function between two draws: after all requested draws, before all later ones.

        The prefetch thread calls it; without one it is called now. So draws depend only on the order in which the
        consumer requests batches and calls this.
        """
        with self._turn:
            if self._accepting:
                self._orders.put(call)
                return
        with outside_inference(), self._on_stream():
            call()

    def settle(self) -> None:
        """Wait until the thread, if any, has finished all requests.

        A signal handler that has interrupted a call under a lock, for which the thread may be waiting, waits at most
        `_AMID_TIMEOUT` seconds; one that has interrupted the thread's start does not wait. Then some requests are not
        finished.

        Raises:
            LockTimeoutError: timed out.
        """
        amid = holds_any() or self._turn._is_owned()
        patience = _AMID_TIMEOUT if amid else LOCK_TIMEOUT
        deadline = time.monotonic() + patience
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.between(lambda: done.put(None))
        while True:
            try:
                done.get(timeout=min(0.1, patience))
                return
            except queue.Empty:
                pass
            if self._starts and not self.closed:  # the requests are left to the thread
                if self._starts == threading.get_ident():
                    return
            elif self._thread is None or not self._thread.is_alive():
                self._finish_orders()  # it has ended, or this interrupts what joins it
                continue
            if time.monotonic() > deadline:
                if amid:
                    return
                raise LockTimeoutError(
                    f"Timed out after {patience:g} s waiting for batches being prefetched. Is the table's lock held?"
                )

    def _run(
        self,
        fill: Callable[[Buffers, Item], int],
        buffers: Buffers,
        item: Item,
        queue: Callable[..., bool] | None = None,
    ) -> int:
        try:
            if self._stream is None and not torch.is_inference_mode_enabled():
                return fill(buffers, item)
            if queue is not None and (count := self._queue(queue, buffers, item)):
                return count
            with outside_inference(), self._on_stream(), contextlib.ExitStack() as used:
                for region in self.collector.regions if self._stream is not None else ():
                    used.enter_context(region.using())
                reading = []
                if self._releaser is not None:
                    self._releaser.check()
                    reading = self._releaser.readings(buffers)[0]
                count = fill(buffers, item)
                if reading and self._releaser is not None:
                    self._releaser.end(reading)
                if self._copies and buffers.gpu is not None:
                    buffers.gpu.copy = clone_batch(buffers.rows(count))
                    buffers.gpu.filled.record(self._stream)
                return count
        except BaseException:
            self._pool.free.append(buffers)
            raise

    def _queue(self, queue: Callable[..., bool], buffers: Buffers, item: Any) -> int:
        """Let `queue` fill buffers, and return their number of rows; 0 if it cannot.

        Neither PyTorch's current stream nor its modes matter: no tensor is made, and the driver is told the stream.
        Captures of other threads go on: the call asks for events in the mode that allows it.
        """
        releaser = self._releaser
        if releaser is None or self._stream is None or self._copies:
            return 0
        batch, region = buffers.queued(self._stream), self.collector.region
        if batch is None:
            return 0
        with region.using() as device_memory, on_device(self.collector.device):
            if device_memory is not None:  # which has work of its own to come after
                return 0
            reading, earlier, own = releaser.readings(buffers)
            batch.ask([each.event for each in earlier[:MOST_ASKED]], own=own)
            if not queue(buffers, item, batch):
                return 0
            buffers.was_queued()
            releaser.end(reading + earlier[: batch.num_read])
        return batch.count

    def _queue_several(
        self, fills: Fills, members: Sequence[Buffers], items: Sequence[Any], batches: QueuedSeveral
    ) -> bool:
        """`_queue` for several buffers."""
        releaser, region = self._releaser, self.collector.region
        if releaser is None or region.device_memory is not None:
            return False
        with region.using(), on_device(self.collector.device):
            reading, earlier, own = releaser.readings(*members)
            batches.ask([each.event for each in earlier[:MOST_ASKED]], own=own)
            if not fills.queue_several(members, items, batches):
                return False
            releaser.end(reading + earlier[: batches.num_read])
        return True

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
        else:
            device = self.collector.device
            with beside_captures(device), on_stream(device, self._stream):
                yield

    # ---------------------------------------------------------------- buffers

    def _take(self) -> Buffers:
        if self.collector.awaits_pinning:
            with beside_captures(self.collector.device):
                self.collector.look()
        try:
            while (buffers := self._pool.free.pop()).mover is not self.collector.mover:
                pass  # freed: the allocators wait for the streams that use them
            return buffers
        except IndexError:
            return self._make()

    def _make(self) -> Buffers:
        # Allocated on the stream that fills them: the allocator then reuses freed memory only after the work queued
        # there.
        with outside_inference(), self._on_stream():
            made: Buffers = self.collector.buffers(shared=self._pool.shared)
            return made

    def _deliver(self, buffers: Buffers, count: int, consumer: torch.cuda.Stream | None) -> Batch:
        gpu = buffers.gpu
        self._last = None if gpu is None else buffers
        ragged = buffers.ragged
        if gpu is not None and consumer is not None:
            consumer.wait_event(gpu.filled)
            if ragged:
                _record(ragged, consumer)
            copy, gpu.copy = gpu.copy, None
            if copy is not None:
                _record(copy, consumer)
                copy.update(ragged)
                buffers.ragged = {}
                self._delivered.append(buffers)
                return copy
            if consumer.cuda_stream not in gpu.consumers:
                # The allocator must not reuse the buffers before the consumer's work either.
                _record(buffers.batch, consumer)
                gpu.consumers.add(consumer.cuda_stream)
        if not self._fresh:
            self._delivered.append(buffers)
        batch = buffers.lend(count) if self._lends else buffers.rows(count)
        if ragged:
            batch.update(ragged)
            buffers.ragged = {}
        return batch

    def names(self, batch: Batch) -> tuple[Array, ...]:
        """`ROW_KEYS` of the batch that was delivered last, int64 [B] each, on the host.

        Waits for nothing if the host has drawn the rows; else until the GPU has gathered them, not for the consumer.
        """
        gpu = None if self._last is None else self._last.gpu
        count = len(batch["index"])
        if self._last is not None and gpu is not None:
            known = self._last.names_on_host(count)
            if known is not None:
                return known
            gpu.filled.synchronize()
            device = self.collector.device
            if self._names_stream is None:
                self._names_stream = own_stream(device, self.collector.stream_priority, self)
            with beside_captures(device), on_stream(device, self._names_stream):
                found = torch.stack([self._last.batch[key][:count] for key in ROW_KEYS]).cpu()
            return tuple(found.numpy())
        return tuple(batch[key].cpu().numpy() for key in ROW_KEYS)

    def _recycle(self, consumer: torch.cuda.Stream | None) -> None:
        delivered, free = self._delivered, self._pool.free
        if free and len(delivered) == 1 and self._stream is None:
            return  # the last batch, which a loop mostly holds until it has the next
        held: list[Buffers] = []
        for _ in range(len(delivered) - self._keep + 1):
            if free and len(delivered) == 1 and self._stream is None:
                break
            buffers = delivered.popleft()
            if self._lends and buffers.references is not None and buffers.references.held:
                held.append(buffers)
                continue
            gpu = buffers.gpu
            if gpu is not None and gpu.consumers:  # else only copies were delivered
                gpu.released.record(consumer)
            free.append(buffers)
        if held:  # the memory of the oldest is freed when nothing refers to it any longer
            most = getattr(self._pool.shared, "most_held", _MOST_HELD)
            delivered.extendleft(reversed(held[-most:]))

    # ---------------------------------------------------------------- tickets and closing

    def release(self, buffers: Buffers, ticket: Any, kept: Sequence[Buffers] = ()) -> None:
        """Release a read ticket after its gather, which has been done, or queued on a GPU.

        Args:
            kept: buffers of earlier gathers under it.
        """
        if self._releaser is None or buffers.gpu is None:
            ticket.end()
        else:
            self._releaser.put(buffers, ticket, kept)

    def abandon(self, buffers: Sequence[Buffers], undo: Callable[[], None], ticket: Any) -> None:
        """Undo the draw of a failed batch after the GPU work queued for it.

        Args:
            buffers: of the batch, or of several.
            undo: releases `ticket` and uncounts the draw.
            ticket: read ticket of the batch.
        """
        if self._stream is not None and self._releaser is not None:
            with beside_captures(self.collector.device):
                failure = failure_of(self._stream.synchronize)
            if failure is not None:  # a failed GPU may still be reading
                keep_reserved(buffers, ticket)
                return
        undo()

    @property
    def closed(self) -> bool:
        """Whether the iteration has ended: by `close`, or because its consumer is gone."""
        return self._stopped or (self._consumer is not None and self._consumer() is None)

    def close(self) -> bool:
        """Stop the thread and return the buffers; the last delivered batches are recycled by the next iterator.

        The garbage collector may call it at any point. If the calling thread holds a lock, for which the prefetch
        thread may be waiting, it does not wait for that thread, which ends by itself.

        Returns:
            Whether the thread has ended; else call `join`.
        """
        if os.getpid() != self._pid:
            return True  # a forked child: the thread, its orders and its locks are the parent's
        self._ask_to_end()
        if not self._pool.delivered:
            self._pool.delivered = self._delivered
        # Daemon threads do not run during interpreter shutdown.
        if self._thread is threading.current_thread() or sys.is_finalizing() or holds_any():
            return False
        return self.join()

    def _ask_to_end(self) -> None:
        self._stopped = True
        self._orders.put(None)

    def join(self) -> bool:
        """Wait at most `LOCK_TIMEOUT` seconds for a closed prefetcher's thread; return whether it has ended."""
        self._ask_to_end()  # again: `close` may have been interrupted
        thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join(LOCK_TIMEOUT)
            if thread.is_alive():
                return False
        self._finish_orders()
        self._give_back()
        return True

    def _give_back(self) -> None:
        """Return filled buffers that will not be delivered to the pool."""
        while self._ready:
            with contextlib.suppress(IndexError):  # the thread and `join` may both be here
                self._pool.free.append(self._ready.popleft()[0])


def _record(batch: Mapping[str, Any], stream: torch.cuda.Stream) -> None:
    for value in batch.values():
        if isinstance(value, dict):
            _record(value, stream)
        elif isinstance(value, Ragged):
            _record({"values": value.values, "offsets": value.offsets}, stream)
        elif isinstance(value, torch.Tensor):
            value.record_stream(stream)
