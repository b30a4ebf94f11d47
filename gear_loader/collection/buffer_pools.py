"""The buffers of a dataset: pools by batch size, and prefetchers for iterations and single batches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from gear_loader.collection.collector import Collector
from gear_loader.collection.prefetch import Pool, Prefetcher
from gear_loader.utils.mutex import holds_any


class BufferPools:
    """Buffers and prefetchers of one dataset in one process.

    Holds no reference to the dataset, which would delay its garbage collection; the function that makes collectors is
    an argument of each call.

    Attributes:
        pools: (rows, shared) -> pool of such buffers.
        active: the prefetcher of the running iteration.
        sampler: rows and prefetcher of the last single batch.
        turn: of the threads that draw single batches; the same thread, in a signal handler, may take it again.
    """

    def __init__(self) -> None:
        self.pools: dict[tuple[int, Any], Pool] = {}
        self.active: Prefetcher | None = None
        self.sampler: tuple[int, Prefetcher] | None = None
        self.turn = threading.RLock()

    def __reduce__(self) -> Any:
        return BufferPools, ()  # another process makes buffers of its own

    @property
    def collectors(self) -> list[Collector]:
        """The collectors of all pools."""
        return [pool.collector for pool in self.pools.values()]

    def prefetcher(
        self, size: int, make: Callable[[int], Collector], *, shared: Any = False, **options: Any
    ) -> Prefetcher:
        """A prefetcher of batches of `size` rows; makes the pool if necessary.

        Args:
            size: rows of a batch.
            make: makes a collector from the number of rows.
            shared: whether batches are sent to another process; see `TensorMemory`.
            options: options of `Prefetcher`.
        """
        pool = self.pools.get((size, shared))
        if pool is None:
            pool = self.pools[size, shared] = Pool(make(size), shared=shared)
        return Prefetcher(pool, **options)

    # ---------------------------------------------------------------- one iteration

    def open(self, size: int, make: Callable[[int], Collector], **options: Any) -> Prefetcher:
        """The prefetcher of a new iteration, active until `close`; see `prefetcher`."""
        self.finish_closed()
        self.active = self.prefetcher(size, make, **options)
        return self.active

    def close(self, prefetcher: Prefetcher) -> None:
        """End an iteration; its prefetcher stays active until its thread has ended."""
        if prefetcher.close() and self.active is prefetcher:
            self.active = None

    def finish_closed(self) -> None:
        """Wait for the thread of an iteration that has ended, if `close` could not, or was interrupted."""
        active = self.active
        if active is not None and active.closed and not holds_any() and active.join():
            self.active = None

    def between(self, call: Callable[[], object]) -> None:
        """Call a function between two batches of the running iteration; see `Prefetcher.between`."""
        self.finish_closed()
        active = self.active
        if active is None:
            call()
        else:
            active.between(call)

    def settle(self) -> None:
        """Wait until the running iteration has finished all requests; see `Prefetcher.settle`."""
        self.finish_closed()
        active = self.active
        if active is not None:
            active.settle()

    # ---------------------------------------------------------------- single batches

    def single(self, size: int, usual: int, make: Callable[[int], Collector], **options: Any) -> Prefetcher:
        """The prefetcher of single batches of `size` rows; see `prefetcher`.

        Args:
            usual: rows of the dataset's batches; buffers of another size are freed when the size changes.
        """
        if self.sampler is None or self.sampler[0] != size:
            if self.sampler is not None:
                self.sampler[1].close()
                if self.sampler[0] != usual:
                    del self.pools[self.sampler[0], options.get("shared", False)]
            self.sampler = (size, self.prefetcher(size, make, prefetch=0, **options))
        prefetcher = self.sampler[1]
        self.finish_closed()
        return prefetcher
