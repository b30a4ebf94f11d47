"""Where iteration stands: epoch, batches delivered, `DataLoader` workers; and the state that resumes there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import get_worker_info

from gear_loader.errors import SchemaError
from gear_loader.utils.arrays import outside_inference
from gear_loader.utils.checks import at_least

__all__ = ["MAX_WORKERS", "Position"]

MAX_WORKERS = 1024
_EPOCH, _BEFORE, _ROUND, _KEY, _ROUND_EPOCH, _ROUND_BEFORE, _JOINED = range(7)  # places in `_shared`
_ANY = -1
_STATE = ("epoch", "before", "step", "past", "workers", "samples", "sampled_items")


class Position:
    """Which batch comes next, in this process and in its `DataLoader` workers.

    Which epoch comes next is one number for this process and all workers, in shared memory, because workers may be new
    processes every epoch. The workers of one loader's iteration must start the same epoch, though any of them may come
    first, or not at all when the iteration is broken off: the first one opens a round under the seed that they have in
    common, the others join it.

    Attributes:
        current: the epoch; the batches of it that had been delivered before `DataLoader` workers shared the rest (0 in
            the main process); the batches that this process has delivered since.
        past: batches of the iterations before this one. open: batches of this one.
        samples, sampled_items: batches, and items, that `ReplayDataset.sample` has drawn.
    """

    def __init__(self) -> None:
        self.current = (0, 0, 0)
        with outside_inference():
            self._shared = torch.zeros(_JOINED + MAX_WORKERS, dtype=torch.int64, device="cpu")
            self._shared.share_memory_()
        self._restart: tuple[int, int, int] | None = None  # goes first: where a worker resumes
        self.past, self.open = 0, 0
        self.samples, self.sampled_items = 0, 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shared.share_memory_()  # a pickle or a copy brings plain memory

    # ---------------------------------------------------------------- one iteration

    def next(self) -> tuple[int, int, int]:
        """What `begin` would return now."""
        info = get_worker_info()
        epoch, before, _, _, round_epoch, round_before = self._shared[:_JOINED].tolist()
        if info is None:
            return epoch, 0, before
        if self._restart is not None:
            return self._restart
        return (round_epoch, round_before, 0) if self._can_join(info.id, info.seed) else (epoch, before, 0)

    def begin(
        self, alone: Callable[[Callable[[], tuple[int, int, int]]], tuple[int, int, int]]
    ) -> tuple[int, int, int]:
        """Start an iteration: `current` of its first batch.

        Args:
            alone: calls a function while no other worker is in it.
        """
        info = get_worker_info()
        if info is None:
            start = self.next()
            self._shared[_EPOCH], self._shared[_BEFORE] = start[0] + 1, 0
        else:
            start = alone(lambda: self._join(info.id, info.seed))
        self.current = start
        self.past, self.open = self.past + self.open, start[1] + start[2]
        return start

    def delivered(self, epoch: int, before: int, step: int) -> None:
        """Note that so many batches of the iteration have been delivered."""
        self.current, self.open = (epoch, before, step), before + step

    def end(self, epoch: int) -> None:
        """Note that an iteration has ended in the main process: the next epoch comes next."""
        self.current = (epoch + 1, 0, 0)
        self.past, self.open = self.past + self.open, 0

    def _can_join(self, worker: int, seed: int) -> bool:
        key, opened, joined = self._shared[[_KEY, _ROUND, _JOINED + worker]].tolist()
        return key in (_ANY, seed - worker) and joined != opened

    def _join(self, worker: int, seed: int) -> tuple[int, int, int]:
        start = self.next()
        if self._restart is None and not self._can_join(worker, seed):
            self._open_round(seed - worker)
        self._shared[_JOINED + worker] = self._shared[_ROUND]
        self._restart = None
        return start

    def _open_round(self, key: int) -> None:
        epoch, before, opened = self._shared[: _ROUND + 1].tolist()
        self._shared[:_JOINED] = torch.tensor([epoch + 1, 0, opened + 1, key, epoch, before], device="cpu")

    def start_workers(self) -> None:
        """Open a round for workers that are about to start, whatever their seed."""
        self.current = self.next()
        self._open_round(_ANY)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch number `epoch`, from its start."""
        self._shared[_EPOCH], self._shared[_BEFORE] = epoch, 0
        self.current, self._restart = (epoch, 0, 0), None

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, int]:
        """Integers that `load_state_dict` takes."""
        info = get_worker_info()
        workers = 0 if info is None else info.num_workers
        values = (*self.current, self.past, workers, self.samples, self.sampled_items)
        return dict(zip(_STATE, values, strict=True))

    @staticmethod
    def check_state(state: Mapping[str, Any]) -> dict[str, int]:
        """The integers of a state.

        Raises:
            SchemaError: one is missing or no integer of at least 0, or it belongs to a worker of another number.
        """
        missing = [key for key in _STATE if key not in state]
        if missing:
            raise SchemaError(
                f"The state has the keys {sorted(state)}; missing: {missing}. Give what state_dict() returned."
            )
        values = {key: at_least(f"{key!r} of the state", state[key], least=0) for key in _STATE}
        info = get_worker_info()
        workers = 0 if info is None else info.num_workers
        if values["workers"] != workers:
            raise SchemaError(
                f"The state belongs to one of {values['workers']} DataLoader workers (0: none); here are {workers}. "
                f"Make the loader with num_workers={values['workers']}."
            )
        return values

    def load_state_dict(self, values: Mapping[str, int]) -> None:
        """Go on where a state was taken: `check_state` has returned `values`."""
        epoch, before, step = values["epoch"], values["before"], values["step"]
        self.past, self.open = values["past"], 0
        if get_worker_info() is None:
            self._shared[_EPOCH], self._shared[_BEFORE] = epoch, before + step
            self.current, self._restart = (epoch, 0, before + step), None
        else:
            self._shared[_EPOCH], self._shared[_BEFORE] = epoch + 1, 0
            self.current = self._restart = (epoch, before, step)
        self.samples, self.sampled_items = values["samples"], values["sampled_items"]
