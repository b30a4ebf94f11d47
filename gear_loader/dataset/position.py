"""Position of iteration: epoch, delivered batches, `DataLoader` workers, and the state to resume from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import get_worker_info

from gear_loader.errors import SchemaError
from gear_loader.utils.arrays import outside_inference
from gear_loader.utils.checks import at_least

MAX_WORKERS = 1024
_EPOCH, _BEFORE, _ROUND, _KEY, _ROUND_EPOCH, _ROUND_BEFORE, _JOINED = range(7)  # places in `_shared`
_ANY = -1
_STATE = ("epoch", "before", "step", "past", "workers", "samples", "sampled_items")


class Position:
    """Position of the next batch, in this process and in its `DataLoader` workers.

    The next epoch's number lies in shared memory, because workers may be new processes every epoch. All workers of a
    loader's iteration must start the same epoch; any of them may start first, or not at all if the iteration is broken
    off. The first one opens a round, identified by the workers' common seed; the others join it.

    Attributes:
        current: epoch; its batches delivered before `DataLoader` workers shared the rest (0 in the main process); its
            batches delivered by this process since.
        past: batches of earlier iterations. open: batches of the current one.
        samples, sampled_items: batches and items drawn by `ReplayDataset.sample`.
    """

    def __init__(self) -> None:
        self.current = (0, 0, 0)
        with outside_inference():
            self._shared = torch.zeros(_JOINED + MAX_WORKERS, dtype=torch.int64, device="cpu")
            self._shared.share_memory_()
        self._restart: tuple[int, int, int] | None = None  # resume position of a worker; takes precedence
        self.past, self.open = 0, 0
        self.samples, self.sampled_items = 0, 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shared.share_memory_()  # pickling and copying yield ordinary memory

    # ---------------------------------------------------------------- one iteration

    def next(self) -> tuple[int, int, int]:
        """The position that `begin` would return now."""
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
        """Start an iteration; return its first position.

        Args:
            alone: calls a function under mutual exclusion with other workers.
        """
        info = get_worker_info()
        if info is None:
            start = self.next()
            self._shared[_EPOCH], self._shared[_BEFORE] = start[0] + 1, 0
        else:
            start = alone(lambda: self._join(info.id, info.seed))
        self._set(current=start, past=self.past + self.open, open=start[1] + start[2])
        return start

    def _set(self, **values: Any) -> None:
        """Set attributes in one step, so that a signal handler that asks for the state sees all of them or none."""
        self.__dict__.update(values)

    def delivered(self, epoch: int, before: int, step: int) -> None:
        """Record the number of delivered batches of the iteration."""
        self.__dict__.update(current=(epoch, before, step), open=before + step)  # as `_set`

    def end(self, epoch: int) -> None:
        """Record the end of an iteration in the main process: the next epoch follows."""
        self._set(current=(epoch + 1, 0, 0), past=self.past + self.open, open=0)

    def sampled(self, items: int) -> None:
        """Record a batch of `ReplayDataset.sample`, of so many drawn items."""
        self.__dict__.update(samples=self.samples + 1, sampled_items=self.sampled_items + items)  # as `_set`

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
        """Open a round for workers about to start, with any seed."""
        self.current = self.next()
        self._open_round(_ANY)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch number `epoch`, from its start."""
        self._shared[_EPOCH], self._shared[_BEFORE] = epoch, 0
        self.current, self._restart = (epoch, 0, 0), None

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, int]:
        """Integers for `load_state_dict`."""
        info = get_worker_info()
        workers = 0 if info is None else info.num_workers
        values = (*self.current, self.past, workers, self.samples, self.sampled_items)
        return dict(zip(_STATE, values, strict=True))

    @staticmethod
    def check_state(state: Mapping[str, Any]) -> dict[str, int]:
        """Validate a state and return its integers.

        Raises:
            SchemaError: a value is missing or not an integer of at least 0, or the number of workers differs.
        """
        missing = [key for key in _STATE if key not in state]
        if missing:
            raise SchemaError(
                f"The state has the keys {sorted(state)}; missing: {missing}. Expected a state_dict()."
            )
        values = {key: at_least(f"{key!r} of the state", state[key], least=0) for key in _STATE}
        info = get_worker_info()
        workers = 0 if info is None else info.num_workers
        if values["workers"] != workers:
            raise SchemaError(
                f"The state belongs to one of {values['workers']} DataLoader workers (0: main process); here are "
                f"{workers}. Make the loader with num_workers={values['workers']}."
            )
        return values

    def load_state_dict(self, values: Mapping[str, int]) -> None:
        """Resume from `values` of `check_state`."""
        epoch, before, step = values["epoch"], values["before"], values["step"]
        self.past, self.open = values["past"], 0
        if get_worker_info() is None:
            self._shared[_EPOCH], self._shared[_BEFORE] = epoch, before + step
            self.current, self._restart = (epoch, 0, before + step), None
        else:
            self._shared[_EPOCH], self._shared[_BEFORE] = epoch + 1, 0
            self.current = self._restart = (epoch, before, step)
        self.samples, self.sampled_items = values["samples"], values["sampled_items"]
