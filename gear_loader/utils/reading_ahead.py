"""Iterators that a thread of low priority reads ahead."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

from gear_loader.utils.background import background_thread, lower_priority

_T = TypeVar("_T")


def read_ahead(items: Iterator[_T]) -> Generator[_T]:
    """The items of an iterator; a thread of low priority takes the next one while the caller uses one.

    Closing it waits for the item that is being taken.
    """
    reading = _ReadingThread(items)
    try:
        while True:
            item = reading.found.get()
            if item is None:
                break
            reading.wanted.release()
            yield item
    finally:
        reading.stop()
        reading.thread.join()
    if reading.error is not None:
        raise reading.error


class _ReadingThread(Generic[_T]):
    """The thread."""

    def __init__(self, items: Iterator[_T]) -> None:
        self._items, self._stopped = items, False
        self.wanted = threading.Semaphore(1)
        self.found: queue.SimpleQueue[_T | None] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self.thread = background_thread(self._run, "gear-loader-reading", stop=self.stop)
        self.thread.start()

    def stop(self) -> None:
        self._stopped = True
        self.wanted.release()

    def _run(self) -> None:
        lower_priority()
        try:
            while self.wanted.acquire() and not self._stopped:
                self.found.put(next(self._items))
        except StopIteration:
            pass
        except BaseException as error:
            self.error = error
        self.found.put(None)
