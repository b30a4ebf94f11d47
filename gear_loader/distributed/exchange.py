"""What the ranks tell each other: torch.distributed's collectives, with a deadline and the name of who failed."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import logging
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gear_loader.distributed.failure_search import Search
from gear_loader.distributed.liveness import Liveness, SilentStoreError, pause
from gear_loader.distributed.topology import check_alike
from gear_loader.errors import RankError
from gear_loader.utils.arrays import Array

__all__ = ["Exchange", "SingleProcess"]

_HEAD = struct.Struct("<qi244s")  # number of the exchange; whether the sender has failed; why
_OK, _FAILED = 0, 1
_SLICE = 0.5  # seconds between two looks at the other ranks while a collective runs
_BATCH, _CALL = "batch", "call"  # kinds of calls: collectives, and waiting in the store before the rare ones
_MADE: dict[tuple[int, ...], int] = {}  # exchanges of these ranks so far
_logger = logging.getLogger("gear_loader")


class SingleProcess:
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

    def compare(self, what: str, options: Mapping[str, Any]) -> None:
        """Check that all ranks have the same options.

        Args:
            what: has them, for errors.
            options: by name, as JSON holds them. An option may be there on some ranks alone.

        Raises:
            SchemaError: on all ranks: they differ; the message names the options, the ranks and their values.
        """

    def part(self, *, wait: bool) -> None:
        """Say that this rank needs the others no longer.

        Args:
            wait: for the others to say so too: until the deadline, and not for those that have died.
        """

    def put(self, key: str, value: str) -> None:
        """Leave a note that any rank may look up at any time."""
        _NOTES[key] = value

    def get(self, key: str) -> str | None:
        """The last note under a key, if there is one."""
        return _NOTES.get(key)

    def close(self) -> None:
        """Take part no more."""


_NOTES: dict[str, str] = {}


class Exchange(SingleProcess):
    """The exchange of the ranks of a process group, over one of its own, so that it does not mix with training's.

    Every rank makes it and calls its methods in the same order. Messages lie in host memory, so the group's backend is
    gloo, whatever the job trains with. While a call waits, it looks every half second whether a rank has died, or has
    been found missing by another rank; so the error comes early, and is the same on all ranks.

    Args:
        ranks: of the default process group; all of them make the exchange, with the same list.
        timeout: seconds that each call waits for the others, and that the exchange may take to be made.

    Attributes:
        position: how many calls this rank has begun, and the kind of the last one.

    Raises:
        RankError: a rank did not come, or died; it is named.
    """

    def __init__(self, ranks: Sequence[int], *, timeout: float) -> None:
        self.ranks = list(ranks)
        self.timeout = timeout
        self.size = len(self.ranks)
        self.rank = self.ranks.index(dist.get_rank())
        self._number = 0
        self.position = (0, _CALL)
        self._last_call: str | None = None
        self._broken: RankError | None = None
        self._group: Any = None
        turn = _MADE[tuple(self.ranks)] = _MADE.get(tuple(self.ranks), 0) + 1
        self._prefix = f"gear_loader/exchange/{zlib.crc32(repr(self.ranks).encode()):08x}/{turn}"
        began = time.monotonic()
        self._liveness: Liveness | None = None
        try:
            self._liveness = Liveness.of_job()
        except RuntimeError as error:
            raise RankError(
                f"The store of torch.distributed, which rank 0 usually holds, does not answer: {error} Is that rank "
                "alive?"
            ) from error
        self._join(began)
        self._group = self._new_group(began)

    # ---------------------------------------------------------------- being made

    def _join(self, began: float) -> None:
        """Wait in the store until all ranks are here: which ones are missing is known there, and in gloo it is not."""
        if self._liveness is None:
            return
        self._assemble("joined", Search(self, "did not join the others", began), named=True)
        with contextlib.suppress(RuntimeError):
            self._liveness.learn()

    def _assemble(self, what: str, search: Search, *, named: bool) -> None:
        """Leave a note in the store that this rank is here, and wait until all have.

        Args:
            what: under which name. named: with a note for each rank, for `missing`.
        """
        liveness, key = self._liveness, f"{self._prefix}/{what}"
        assert liveness is not None

        def arrive() -> None:
            if named:
                liveness.store.set(f"{key}/{self.rank}", "1")
            if liveness.store.add(key, 1) == self.size:
                liveness.store.set(f"{key}/all", "1")

        turn = 0
        with search.blaming():
            _unless_silent(lambda: liveness.ask(arrive))
            while _unless_silent(lambda: liveness.read(f"{key}/all")) is None:
                search.look()
                pause(turn)
                turn += 1

    def missing(self, what: str) -> list[int]:
        """Ranks, of the default group, that have not left such a note."""
        assert self._liveness is not None
        keys = [f"{self._prefix}/{what}/{rank}" for rank in range(self.size)]
        return [rank for rank, key in zip(self.ranks, keys, strict=True) if self._liveness.read(key) is None]

    def _new_group(self, began: float) -> Any:
        """The process group, made in a thread of its own: what torch and gloo wait for has deadlines of their own."""
        made: list[Any] = []

        def make() -> None:
            try:
                made.append(
                    dist.new_group(
                        self.ranks,
                        backend="gloo",
                        timeout=datetime.timedelta(seconds=2 * self.timeout + 10),  # ours comes first
                        use_local_synchronization=self.size < dist.get_world_size(),
                    )
                )
            except Exception as error:
                made.append(error)

        thread = threading.Thread(target=make, name="gear-loader-rendezvous", daemon=True)
        thread.start()
        search = Search(self, "did not join the others", began)
        while not made:
            thread.join(_SLICE)
            if not made:
                search.look()
        if isinstance(made[0], Exception):
            raise search.after(made[0])
        return made[0]

    # ---------------------------------------------------------------- calls

    def swap(
        self, parts: Sequence[Array], sizes: Sequence[int], failure: BaseException | None = None
    ) -> list[Array]:
        """See `SingleProcess.swap`."""
        head = np.frombuffer(_head(self._number, failure), dtype=np.uint8)
        self._number += 1
        sent = torch.from_numpy(np.concatenate([piece for part in parts for piece in (head, part)]))
        outs = [_HEAD.size + len(part) for part in parts]
        ins = [_HEAD.size + size for size in sizes]
        received = torch.empty(sum(ins), dtype=torch.uint8, device="cpu")
        self._call(
            "its part of a batch",
            lambda: dist.all_to_all_single(received, sent, ins, outs, group=self._group, async_op=True),
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
        """See `SingleProcess.share`."""
        parts = self.share_array(np.frombuffer(json.dumps(data).encode(), dtype=np.uint8))
        return [json.loads(part.tobytes()) for part in parts]

    def share_array(self, values: Array) -> list[Array]:
        """See `SingleProcess.share_array`."""
        self._line_up("what it has")
        mine = np.ascontiguousarray(values)
        count = torch.tensor([mine.nbytes], device="cpu")
        counts = [torch.zeros_like(count) for _ in self.ranks]
        self._call(
            "how much it has", lambda: dist.all_gather(counts, count, group=self._group, async_op=True)
        )
        most = max(int(c) for c in counts)
        padded = torch.zeros(max(most, 1), dtype=torch.uint8, device="cpu")
        padded.numpy()[: mine.nbytes] = mine.reshape(-1).view(np.uint8)
        parts = [torch.empty_like(padded) for _ in self.ranks]
        self._call("what it has", lambda: dist.all_gather(parts, padded, group=self._group, async_op=True))
        return [
            part.numpy()[: int(count)].view(mine.dtype) for part, count in zip(parts, counts, strict=True)
        ]

    def barrier(self) -> None:
        """See `SingleProcess.barrier`."""
        if self._liveness is None:
            self.share({})
        else:
            self._line_up("that it is here")

    def compare(self, what: str, options: Mapping[str, Any]) -> None:
        """See `SingleProcess.compare`."""
        self._line_up("its options")
        text = json.dumps(options, sort_keys=True)
        digest = hashlib.sha256(text.encode()).digest()
        mine = torch.tensor(list(digest), dtype=torch.uint8, device="cpu")
        digests = [torch.empty_like(mine) for _ in self.ranks]
        self._call("its options", lambda: dist.all_gather(digests, mine, group=self._group, async_op=True))
        if all(torch.equal(each, mine) for each in digests):
            return
        check_alike(what, self.share(options), self.ranks)

    def part(self, *, wait: bool) -> None:
        """See `SingleProcess.part`."""
        if self._liveness is None or self._broken is not None or self._liveness.failed:
            return
        liveness, key = self._liveness, f"{self._prefix}/parted"

        def arrive() -> None:
            liveness.store.set(f"{key}/{self.rank}", "1")
            if liveness.store.add(key, 1) == self.size:
                liveness.store.set(f"{key}/all", "1")

        with contextlib.suppress(Exception):  # the store may have gone with the rank that held it
            liveness.ask(arrive)
            began, turn = time.monotonic(), 0
            while wait and self._liveness.read(f"{self._prefix}/parted/all") is None:
                if turn % 16 == 15:
                    missing = self.missing("parted")
                    if len(self._liveness.ended(missing)) == len(missing):
                        return
                    if self.failure() is not None:
                        return
                    if time.monotonic() - began > self.timeout:
                        _logger.warning(
                            "%s did not close the Shards within %g s after this rank; it is waited for no longer.",
                            self.names(missing),
                            self.timeout,
                        )
                        return
                pause(turn)
                turn += 1

    # ---------------------------------------------------------------- notes

    def put(self, key: str, value: str) -> None:
        """See `SingleProcess.put`."""
        if self._liveness is not None:
            self._liveness.write(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> str | None:
        """See `SingleProcess.get`; None also if the store does not answer."""
        if self._liveness is not None:
            with contextlib.suppress(Exception):
                return self._liveness.read(f"{self._prefix}/{key}")
        return None

    # ---------------------------------------------------------------- failures

    def _call(self, what: str, start: Callable[[], Any]) -> None:
        """Run a collective, until the deadline or until it is known that it will not end.

        Args:
            what: it brings, for errors.
            start: starts it, and returns torch's `Work`.
        """
        self._enter(_BATCH)
        search = Search(self, f"did not send {what}", time.monotonic())
        try:
            work = start()
            while not _done(work):
                search.look()
        except RankError:
            raise
        except RuntimeError as error:
            raise search.after(error) from error

    def _enter(self, kind: str) -> None:
        """Begin a call; heartbeats tell that this rank is there."""
        if self._broken is not None:
            raise self._broken
        self.position = (self.position[0] + 1, kind)
        if self._liveness is not None:
            self._liveness.positions[self._prefix] = self.position

    def _line_up(self, what: str) -> None:
        """Wait in the store until all ranks have come to this call, which is not one of those for each batch.

        Ranks that have left their loops at different places are found out so: in gloo messages of different sizes would
        meet, which ends the process.
        """
        self._enter(_CALL)
        if self._liveness is None:
            return
        search = Search(self, f"did not send {what}", time.monotonic())
        call = f"call/{self.position[0]}"
        self._assemble(call, search, named=False)
        last, self._last_call = self._last_call, call
        if self.rank == 0 and last is not None:  # all ranks have left it
            store, keys = self._liveness.store, [f"{self._prefix}/{last}{end}" for end in ("", "/all")]
            with contextlib.suppress(RuntimeError):
                self._liveness.ask(lambda: [store.delete_key(key) for key in keys])

    def give_up(self, error: RankError) -> RankError:
        """Fail with this error from now on."""
        self._broken = error
        if self._liveness is not None:
            self._liveness.failed = True
        return error

    def failure(self) -> dict[str, Any] | None:
        """What another rank has found out about why this exchange cannot go on: "ranks" and "why"."""
        told = self.get("failed")
        return None if told is None else json.loads(told)

    @property
    def key(self) -> str:
        """Under which heartbeats tell this exchange's position."""
        return self._prefix

    @property
    def liveness(self) -> Liveness | None:
        """What is known of the processes of the ranks."""
        return self._liveness

    def _names(self, ranks: Sequence[int]) -> str:
        """How errors call ranks of this exchange: by their numbers in the default group."""
        return self.names([self.ranks[rank] for rank in ranks])

    @staticmethod
    def names(ranks: Sequence[int]) -> str:
        """How errors call ranks of the default group."""
        numbers = [str(rank) for rank in ranks]
        return f"Rank {numbers[0]}" if len(numbers) == 1 else f"Ranks {', '.join(numbers)}"

    def close(self) -> None:
        """See `SingleProcess.close`."""
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


def _unless_silent(call: Callable[[], Any]) -> Any:
    """What a call to the store returns; None if it does not answer."""
    try:
        return call()
    except SilentStoreError:
        return None


def _done(work: Any) -> bool:
    """Wait for a collective for a moment; whether it has ended.

    Raises:
        RuntimeError: it has failed.
    """
    try:
        work.wait(datetime.timedelta(seconds=_SLICE))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises, unless it has ended just now
    return True
