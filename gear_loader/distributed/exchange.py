"""What the ranks tell each other: torch.distributed's collectives, with a deadline and the name of who failed."""

from __future__ import annotations

import contextlib
import datetime
import json
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gear_loader.errors import RankError
from gear_loader.slots import Array

__all__ = ["Exchange", "Solo"]

_HEAD = struct.Struct("<qi244s")  # number of the exchange; whether the sender has failed; why
_OK, _FAILED = 0, 1
_GRACE = 5.0  # seconds in which ranks that see a failure tell each other that they are there


class Solo:
    """The exchange of a process that is alone.

    Attributes:
        rank, size: of the ranks that take part.
    """

    rank = 0
    size = 1

    def swap(
        self, parts: Sequence[Array], sizes: Sequence[int], failure: BaseException | None = None
    ) -> list[Array]:
        """Give each rank its part, and get one from each.

        Args:
            parts: uint8, one a rank.
            sizes: bytes that each rank sends here, which both sides know.
            failure: what went wrong here; the others learn of it, and here it is raised once they know.

        Returns:
            uint8, one a rank.

        Raises:
            RankError: another rank has failed, or has not come before the deadline; the message names it.
        """
        if failure is not None:
            raise failure
        return list(parts)

    def share(self, data: Mapping[str, Any]) -> list[Any]:
        """Tell all ranks something that JSON holds; what each has told, in the order of ranks."""
        return [json.loads(json.dumps(data))]

    def share_array(self, values: Array) -> list[Array]:
        """Tell all ranks an array [n] of one dtype, n of each rank's own; the arrays in the order of ranks."""
        return [values]

    def barrier(self) -> None:
        """Wait for all ranks."""

    def put(self, key: str, value: str) -> None:
        """Leave a note that any rank may look up at any time."""
        _NOTES[key] = value

    def get(self, key: str) -> str | None:
        """The last note under a key, if there is one."""
        return _NOTES.get(key)

    def close(self) -> None:
        """Take part no more."""


_NOTES: dict[str, str] = {}


class Exchange(Solo):
    """The exchange of the ranks of a process group, over one of its own, so that it does not mix with training's.

    Every rank makes it and calls its methods in the same order. Messages lie in host memory, so the group's backend is
    gloo, whatever the job trains with.

    Args:
        ranks: of the default process group; all of them make the exchange, with the same list.
        timeout: seconds that each call waits for the others.
    """

    def __init__(self, ranks: Sequence[int], *, timeout: float) -> None:
        self.ranks = list(ranks)
        self.timeout = timeout
        self.size = len(self.ranks)
        self.rank = self.ranks.index(dist.get_rank())
        self._number = 0
        self._broken: RankError | None = None
        self._group: Any = dist.new_group(
            self.ranks,
            backend="gloo",
            timeout=datetime.timedelta(seconds=timeout),
            use_local_synchronization=self.size < dist.get_world_size(),
        )
        self._store: Any = _store()
        self._prefix = f"gear_loader/{getattr(self._group, 'group_name', '0')}"

    def swap(
        self, parts: Sequence[Array], sizes: Sequence[int], failure: BaseException | None = None
    ) -> list[Array]:
        """See `Solo.swap`."""
        head = np.frombuffer(_head(self._number, failure), dtype=np.uint8)
        self._number += 1
        sent = torch.from_numpy(np.concatenate([piece for part in parts for piece in (head, part)]))
        outs = [_HEAD.size + len(part) for part in parts]
        ins = [_HEAD.size + size for size in sizes]
        received = torch.empty(sum(ins), dtype=torch.uint8, device="cpu")
        self._call(
            "its part of a batch",
            lambda: dist.all_to_all_single(received, sent, ins, outs, group=self._group),
        )
        if failure is not None:
            raise failure
        ends = np.cumsum(ins)
        answers = [received.numpy()[end - size : end] for size, end in zip(ins, ends.tolist(), strict=True)]
        self._check(answers)
        return [answer[_HEAD.size :] for answer in answers]

    def _check(self, answers: Sequence[Array]) -> None:
        for rank, answer in enumerate(answers):
            number, failed, text = _HEAD.unpack(answer[: _HEAD.size].tobytes())
            if failed == _FAILED:
                said = text.rstrip(b"\0").decode(errors="replace")
                raise RankError(f"{self._names([rank])} could not do its part of a batch: {said}")
            if number != self._number - 1:
                self._broken = RankError(
                    f"{self._names([rank])} is at exchange {number}, this rank at {self._number - 1}: the ranks have "
                    "asked for different numbers of batches. Let all ranks iterate alike (batches_per_epoch, the same "
                    "breaks), or make the Shards anew."
                )
                raise self._broken

    def share(self, data: Mapping[str, Any]) -> list[Any]:
        """See `Solo.share`."""
        parts = self.share_array(np.frombuffer(json.dumps(data).encode(), dtype=np.uint8))
        return [json.loads(part.tobytes()) for part in parts]

    def share_array(self, values: Array) -> list[Array]:
        """See `Solo.share_array`."""
        mine = np.ascontiguousarray(values)
        count = torch.tensor([mine.nbytes], device="cpu")
        counts = [torch.zeros_like(count) for _ in self.ranks]
        self._call("how much it has", lambda: dist.all_gather(counts, count, group=self._group))
        most = max(int(c) for c in counts)
        padded = torch.zeros(max(most, 1), dtype=torch.uint8, device="cpu")
        padded.numpy()[: mine.nbytes] = mine.reshape(-1).view(np.uint8)
        parts = [torch.empty_like(padded) for _ in self.ranks]
        self._call("what it has", lambda: dist.all_gather(parts, padded, group=self._group))
        return [
            part.numpy()[: int(count)].view(mine.dtype) for part, count in zip(parts, counts, strict=True)
        ]

    def barrier(self) -> None:
        """See `Solo.barrier`."""
        self.share({})

    # ---------------------------------------------------------------- notes

    def put(self, key: str, value: str) -> None:
        """See `Solo.put`."""
        if self._store is not None:
            self._store.set(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> str | None:
        """See `Solo.get`."""
        name = f"{self._prefix}/{key}"
        if self._store is None or not self._store.check([name]):
            return None
        value: str = self._store.get(name).decode()
        return value

    # ---------------------------------------------------------------- failures

    def _call(self, what: str, call: Any) -> None:
        if self._broken is not None:
            raise self._broken
        began = time.monotonic()
        try:
            call()
        except RuntimeError as error:
            self._broken = self._blame(what, error, time.monotonic() - began)
            raise self._broken from error

    def _blame(self, what: str, error: RuntimeError, waited: float) -> RankError:
        """The error for a collective that has failed. Ranks that see it say so: the others are to blame."""
        silent: list[int] | None = None
        with contextlib.suppress(Exception):  # the store may be gone with the rank that holds it
            self.put(f"here/{self.rank}", str(self._number))
            end = time.monotonic() + min(_GRACE, self.timeout)
            while True:
                silent = [r for r in range(self.size) if self.get(f"here/{r}") is None]
                if not silent or time.monotonic() > end:
                    break
                time.sleep(0.02)
        if silent is None:
            who = "The rank that holds torch.distributed's store (usually rank 0) does not answer either: it"
        elif silent:
            who = self._names(silent)
        else:
            who = "A rank that was late, and has given up by now,"
        late = waited >= 0.9 * self.timeout
        why = (
            f"was waited for {waited:.3g} s (timeout={self.timeout:g})"
            if late
            else "has closed its connection"
        )
        return RankError(
            f"{who} did not send {what}: {why}. It was killed, stopped, or has failed; look at its log. Start the job "
            f"anew from its last checkpoint, or give a longer timeout. ({str(error).splitlines()[0][:200]})"
        )

    def _names(self, ranks: Sequence[int]) -> str:
        """How errors call ranks of this exchange: by their numbers in the default group."""
        numbers = [str(self.ranks[rank]) for rank in ranks]
        return f"Rank {numbers[0]}" if len(numbers) == 1 else f"Ranks {', '.join(numbers)}"

    def close(self) -> None:
        """See `Solo.close`."""
        group, self._group = self._group, None
        self._broken = RankError("The exchange between the ranks was closed.")
        if group is not None and dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group(group)


def _head(number: int, failure: BaseException | None) -> bytes:
    if failure is None:
        return _HEAD.pack(number, _OK, b"")
    text = f"{type(failure).__name__}: {failure}".encode()[:244]
    return _HEAD.pack(number, _FAILED, text)


def _store() -> Any:
    """The store of the default process group, which torch has no public name for."""
    get = getattr(dist.distributed_c10d, "_get_default_store", None)
    return None if get is None else get()
