"""A table that is being filled by a thread in the background (`Loading`)."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  its hook at the end of the interpreter must run after `_note_end`
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

from gear_loader.errors import SourceError
from gear_loader.utils.background import background_thread

_logger = logging.getLogger("gear_loader")


class Loading:
    """A thread that fills a table, or several: `Table.loading`, after ``load_dataset(..., wait=False)``.

    Trajectories can be drawn as soon as they are added, in pieces of about 16 MiB. After an error, or a `cancel`, the
    table keeps what was added; ``load_dataset(..., table, resume=True)`` goes on, in another process too.

    With ``refresh=`` it goes on over several epochs, and each trajectory takes the place of another one.

    Several tables have the same object. Closing one of them cancels it.

    Attributes:
        source: what is loaded. num_trajectories, num_steps: those of the source, or of the part of it that an epoch
            takes, all together; None of a generator.
        num_loaded: trajectories of it that the table has been given so far, of all epochs.
        epochs: how often the source is loaded: once, or as ``refresh=`` says; None: until it is stopped.
    """

    def __init__(
        self,
        source: str,
        num_trajectories: int | None,
        num_steps: int | None,
        pieces: Generator[int],
        *,
        num_loaded: int = 0,
        epochs: int | None = 1,
        update_priority: Callable[[Any, Any], int] | None = None,
    ) -> None:
        """`pieces` adds trajectories, and yields how many there are so far, also while it waits."""
        self.source, self.num_trajectories, self.num_steps = source, num_trajectories, num_steps
        self.num_loaded, self.epochs = num_loaded, epochs
        self._update_priority = update_priority
        self._stopped, self._ended = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._complete = False
        self._pid = os.getpid()
        self._thread = background_thread(self._run, "gear-loader-loading", args=(pieces,), stop=self._stop)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the thread has ended: all is loaded, it was cancelled, or it failed."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all is loaded, or cancelled.

        Args:
            timeout: seconds; None waits for ever.

        Raises:
            SourceError, TableFullError and others as `gear_loader.sources.load`: what ended the loading. It comes out
                here, and is logged when it occurs.
            TimeoutError: it goes on.
        """
        if os.getpid() != self._pid:
            raise SourceError("The table is loaded by another process; expected wait() in that one.")
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{self!r} is not complete after {timeout} seconds; it goes on.")
        if self._error is not None:
            raise self._error

    @property
    def epoch(self) -> int:
        """The pass over the source that goes on, from 0."""
        epoch = max(0, self.num_loaded - self.done) // (self.num_trajectories or sys.maxsize)
        return epoch if self.epochs is None else min(epoch, self.epochs - 1)

    def cancel(self, timeout: float | None = None) -> None:
        """Stop after the piece that is being added, and wait for that, at most `timeout` seconds; None waits for ever.

        So does `Table.close`, which waits ten seconds.
        """
        self._stop()
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            self._ended.wait(timeout)

    def update_priority(self, index: Any, priority: Any) -> int:
        """Set priorities of episodes of the source, whether they are in the table or not.

        For ``refresh=Refresh(sampler=Prioritized(...))``; takes effect from the next episode that is drawn on, also on
        rows of the table. Does not wait.

        Args:
            index: integers [n], numbers of episodes, as the column `Refresh.number` of a batch has them.
            priority: numbers [n], finite as float32 and not negative. Of equal numbers the last one counts.

        Returns:
            The number of rows that were skipped, because another rank fetches the episode; all once the loading has
            ended.

        Raises:
            PriorityError: a priority is invalid, or `alpha` raises it beyond float32's range. Nothing was changed.
            SourceError: there is no such episode; episodes are not fetched by priority, or by another process.
            SchemaError: another shape or dtype.
        """
        if self._update_priority is None or os.getpid() != self._pid:
            raise SourceError(
                "update_priority() was called; expected loading with refresh=Refresh(sampler=Prioritized(...)), "
                "of this process."
            )
        return self._update_priority(index, priority)

    def _stop(self) -> None:
        self._stopped.set()

    def __repr__(self) -> str:
        state, count = "loading", f"{self.num_loaded:,}"
        if self.done:
            state = "failed" if self._error is not None else "loaded" if self._complete else "cancelled"
        if self.num_trajectories is not None:
            count = f"{self.num_loaded - self.epoch * self.num_trajectories:,} of {self.num_trajectories:,}"
        of = "" if self.epochs is None else f" of {self.epochs:,}"
        epoch = "" if self.epochs == 1 else f" epoch {self.epoch:,}{of},"
        return f"<{self.source}: {state},{epoch} {count} trajectories>"

    def _run(self, pieces: Generator[int]) -> None:
        # Of the priority of the process: it holds what draws wait for, the table's lock and the interpreter.
        try:
            with contextlib.closing(pieces):
                for self.num_loaded in pieces:
                    if self._stopped.is_set():
                        break
                else:
                    self._complete = True
        except BaseException as error:
            # Else the table was closed, maybe in the middle of a piece, or the interpreter ends.
            if not (self._stopped.is_set() or _ending):
                self._error = error
                _logger.error(
                    "Loading ended after %s trajectories of %s: %s", self.num_loaded, self.source, error
                )
        finally:
            self._ended.set()


_ending = False


def _note_end() -> None:
    global _ending
    _ending = True


# Executors refuse work from their own hook on; the last one registered runs first.
threading._register_atexit(_note_end)  # type: ignore[attr-defined]
