"""Collectives between ranks over torch.distributed, with deadlines and errors that name the rank that failed."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import logging
import struct
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gear_loader.distributed.failure_search import FailureSearch
from gear_loader.distributed.liveness import BEAT, Liveness, back_off, default_store
from gear_loader.distributed.node_routes import AllToAll, NodeRoutes
from gear_loader.distributed.rendezvous import GlooGroup, StoreBarrier
from gear_loader.distributed.topology import check_alike
from gear_loader.errors import RankError
from gear_loader.native.exchange_loops import copy_ranges
from gear_loader.utils.arrays import Array

_STATE = struct.Struct("<qi")  # number of the exchange; state of the sender
_HEAD = struct.Struct(_STATE.format + "244s")  # and the text of its error
_OK, _FAILED = 0, 1
_SLICE = 0.5  # seconds between two checks of the other ranks while a collective runs
_BATCH, _CALL = "batch", "call"  # kinds of calls: collectives, and the barriers in the store before rare ones
_MADE: dict[tuple[int, ...], int] = {}  # number of exchanges that these ranks have made
_PART = "its part of a batch"
_logger = logging.getLogger("gear_loader")


class SingleProcess:
    """The collective channel of a process without other ranks; the interface of `Exchange`.

    Attributes:
        rank: this rank's number in the channel.
        size: number of ranks.
        ranks: their numbers in the default process group.
        doing: what this rank does: "draws a batch"; for errors of ranks that do different things.
    """

    doing = "communicates"
    rank = 0
    size = 1
    ranks: Sequence[int] = (0,)

    def all_to_all(self, data: Array, outs: Array, ins: Array, failure: BaseException | None = None) -> Array:
        """Send one part to each rank, and receive one part from each rank (all-to-all).

        Args:
            data: uint8, the parts for all ranks, one after another.
            outs, ins: int64 [W], bytes of the part for each rank, and of each rank's for this one; both sides know it.
            failure: error of this rank, which is sent to the others instead, and raised here afterwards.

        Returns:
            uint8, the parts of all ranks, one after another.

        Raises:
            RankError: another rank has failed, or did not answer before the deadline; the message names it.
        """
        if failure is not None:
            raise failure
        return data

    def send(self, values: Array, counts: Array) -> tuple[Array, Array]:
        """Send each rank its values, of which the others do not know the number (all-to-all, of numbers first).

        Args:
            values: [n], those for one rank after another; of the same dtype on all ranks. counts: int64 [W].

        Returns:
            The values received, those of one rank after another, and how many came from each, int64 [W].
        """
        eight: Array = np.full(self.size, 8, dtype=np.int64)
        received = self.all_to_all(counts.view(np.uint8), eight, eight).view(np.int64)
        data, unit = np.ascontiguousarray(values).reshape(-1).view(np.uint8), values.dtype.itemsize
        return self.all_to_all(data, counts * unit, received * unit).view(values.dtype), received

    def share(self, data: Mapping[str, Any]) -> list[Any]:
        """Share a JSON value with all ranks; return the values of all ranks, in their order (all-gather)."""
        return [json.loads(json.dumps(data))]

    def share_array(self, values: Array) -> list[Array]:
        """Share an array [n] with all ranks; return the arrays of all ranks, in their order.

        All arrays have the same dtype; their lengths may differ.
        """
        return [values]

    def barrier(self) -> None:
        """Wait for all ranks."""

    def compare(self, what: str, options: Mapping[str, Any]) -> None:
        """Check that all ranks have the same options.

        Args:
            what: name of the objects with these options, for errors.
            options: JSON values by name. An option may be given on some ranks alone.

        Raises:
            SchemaError: on all ranks, if options differ; the message names the options, the ranks and their values.
        """

    def leave(self, *, wait: bool) -> None:
        """Announce that this rank ends its use of the channel.

        Args:
            wait: whether to wait until all ranks have announced it; until the deadline, and not for ranks that died.
        """

    def close(self) -> None:
        """Close the channel."""


class Exchange(SingleProcess):
    """The collective channel of some ranks, over a process group of its own, apart from training's collectives.

    All ranks make it and call its methods in the same order. Messages are in host memory, so the group's backend is
    gloo, whatever backend the job trains with. While a call waits, it checks every half second whether a rank has died,
    or whether another rank has found one missing; so the error comes early, and is the same on all ranks.

    It is closed by `close`, or with the last reference to it.

    Args:
        ranks: numbers of the ranks in the default process group; the same list on all of them.
        timeout: deadline of each call, and of the construction, in seconds.
        node: name of this rank's node; None if it counts as one of its own.

    Attributes:
        ranks, timeout: as given.
        routes: by way of the ranks of a node; None if each rank sends to each.
        position: number of calls that this rank has begun, the kind of the last one, and what the rank does.
        key: of this exchange's keys in the store, and of its position in heartbeats.
        liveness: of the ranks' processes; None without a store.

    Raises:
        RankError: a rank did not join before the deadline, or died; the message names it.
    """

    def __init__(self, ranks: Sequence[int], *, timeout: float, node: str | None = None) -> None:
        self.ranks = list(ranks)
        self.timeout = timeout
        self.size = len(self.ranks)
        self.rank = self.ranks.index(dist.get_rank())
        self._number = 0
        self.position = (0, _CALL, self.doing)
        self._last_barrier: str | None = None
        self._broken: RankError | None = None
        self._calling = self._closed = False
        turn = _MADE[tuple(self.ranks)] = _MADE.get(tuple(self.ranks), 0) + 1
        self.key = f"gear_loader/exchange/{zlib.crc32(repr(self.ranks).encode()):08x}/{turn}"
        began = time.monotonic()
        self.liveness = self.announce()
        self._barrier: StoreBarrier | None = None
        search = FailureSearch(self, "did not join the others", began)
        if self.liveness is not None:
            self._barrier = StoreBarrier(self.liveness, self.key, self.rank, self.ranks)
            with search.blaming():
                self.put("node/" + str(self.rank), node or f"rank {self.rank}")
            # Before the group is made: the store can name missing ranks, and gloo cannot.
            self._barrier.wait("joined", FailureSearch(self, "did not join the others", began), named=True)
            with contextlib.suppress(RuntimeError):
                self.liveness.learn()
        self.routes = self._routes(search)
        self._groups: list[GlooGroup] = []
        self._finalizer = weakref.finalize(self, _end, self._groups, self.liveness, self.key)
        if self.routes is None:
            self._groups.append(GlooGroup(self.ranks, self.timeout, search))
        else:
            store = dist.distributed_c10d.PrefixStore(self.key, default_store())
            for group in (self.routes.near, self.routes.far):
                self._groups.append(GlooGroup(group.tolist(), self.timeout, search, own=(store, self.rank)))
        self._finalizer.atexit = False

    def _routes(self, search: FailureSearch) -> NodeRoutes | None:
        """The routes by nodes, by what all ranks have told the store; None without a store, or if they save little."""
        if self.liveness is None:
            return None
        keys = [f"{self.key}/node/{rank}" for rank in range(self.size)]
        with search.blaming():
            return NodeRoutes.of(self.rank, self.liveness.read_all(keys))

    @staticmethod
    def announce() -> Liveness | None:
        """Let the other ranks know this process, so that they learn at once if it ends; see `Liveness.of_job`.

        Raises:
            RankError: torch.distributed's store does not answer.
        """
        try:
            return Liveness.of_job()
        except RuntimeError as error:
            raise RankError(
                f"The store of torch.distributed, which rank 0 usually holds, does not answer: {error} Is that rank "
                "alive?"
            ) from error

    def missing(self, name: str) -> list[int]:
        """Return the ranks that have not arrived at a barrier, by their numbers in the default process group."""
        assert self._barrier is not None
        return self._barrier.missing(name)

    # ---------------------------------------------------------------- calls

    def all_to_all(self, data: Array, outs: Array, ins: Array, failure: BaseException | None = None) -> Array:
        # Writable, as the data is: else `copy_ranges` would be compiled twice.
        head = np.frombuffer(bytearray(_head(self._number, failure)), dtype=np.uint8)
        self._number += 1
        heads = np.full(self.size, _HEAD.size, dtype=np.int64)
        sent: Array = np.empty((heads + outs).sum(), dtype=np.uint8)
        starts, places = np.cumsum(outs) - outs, np.cumsum(heads + outs) - outs  # of the parts
        copy_ranges(sent, places - _HEAD.size, head, np.zeros_like(heads), heads)
        copy_ranges(sent, places, data, starts, outs)
        self._enter(_BATCH)
        if self.routes is None:
            received = self._in_group(0, _PART, sent, heads + outs, heads + ins)
        else:
            received = self.routes.exchange(sent, heads + outs, heads + ins, *self._near_and_far(_PART))
        if failure is not None:
            raise failure
        places = np.cumsum(heads + ins) - ins
        self._check(received, places - _HEAD.size)
        answer: Array = np.empty(ins.sum(), dtype=np.uint8)
        copy_ranges(answer, np.cumsum(ins) - ins, received, places, ins)
        return answer

    def _near_and_far(self, what: str) -> tuple[AllToAll, AllToAll]:
        near, far = (functools.partial(self._in_group, number, what) for number in (0, 1))
        return near, far

    def _in_group(self, number: int, what: str, data: Array, outs: Array, ins: Array) -> Array:
        """`all_to_all` in one of this rank's groups, without heads, as a part of a call.

        Args:
            what: object that a rank sends with it, for errors.
        """
        if len(outs) == 1:
            return data
        received: Array = np.empty(ins.sum(), dtype=np.uint8)
        tensors = torch.from_numpy(received), torch.from_numpy(data)
        sizes = ins.tolist(), outs.tolist()

        def start(group: Any) -> Any:
            if self.routes is not None:  # torch does not know these groups
                return group.alltoall_base(*tensors, *sizes)
            return dist.all_to_all_single(*tensors, *sizes, group=group, async_op=True)

        self._call(what, start, self._groups[number])
        return received

    def _check(self, data: Array, places: Array) -> None:
        """Raise the error of a rank that has failed, or is at another exchange; `places`: of the ranks' headers."""
        size = np.full_like(places, _STATE.size)
        states: Array = np.empty(len(places) * _STATE.size, dtype=np.uint8)
        copy_ranges(states, np.cumsum(size) - size, data, places, size)
        for rank, (number, failed) in enumerate(_STATE.iter_unpack(states.tobytes())):
            if failed == _FAILED:
                text = _HEAD.unpack(data[places[rank] :][: _HEAD.size].tobytes())[2]
                reason = text.rstrip(b"\0").decode(errors="replace")
                raise RankError(f"{self._names([rank])} could not do its part of a batch: {reason}")
            if number != self._number - 1:
                self._broken = RankError(
                    f"{self._names([rank])} is at exchange {number}, this rank at {self._number - 1}: the ranks have "
                    "drawn different numbers of batches. Let all ranks iterate alike (batches_per_epoch, the same "
                    "breaks), or make new Shards."
                )
                raise self._broken

    def share(self, data: Mapping[str, Any]) -> list[Any]:
        parts = self.share_array(np.frombuffer(json.dumps(data).encode(), dtype=np.uint8))
        return [json.loads(part.tobytes()) for part in parts]

    def share_array(self, values: Array) -> list[Array]:
        self._wait_for_all("what it has")
        own = np.ascontiguousarray(values)
        if self.routes is not None:
            self._enter(_BATCH)
            parts = self.routes.gather(own.reshape(-1).view(np.uint8), *self._near_and_far("what it has"))
            return [part.view(own.dtype) for part in parts]
        count = torch.tensor([own.nbytes], device="cpu")
        counts = [torch.zeros_like(count) for _ in self.ranks]
        self._call(
            "how much it has", lambda group: dist.all_gather(counts, count, group=group, async_op=True)
        )
        most = max(int(c) for c in counts)
        padded = torch.zeros(max(most, 1), dtype=torch.uint8, device="cpu")
        padded.numpy()[: own.nbytes] = own.reshape(-1).view(np.uint8)
        tensors = [torch.empty_like(padded) for _ in self.ranks]
        self._call("what it has", lambda group: dist.all_gather(tensors, padded, group=group, async_op=True))
        return [
            part.numpy()[: int(count)].view(own.dtype) for part, count in zip(tensors, counts, strict=True)
        ]

    def barrier(self) -> None:
        if self.liveness is None:
            self.share({})
        else:
            self._wait_for_all("that it is here")

    def compare(self, what: str, options: Mapping[str, Any]) -> None:
        check_alike(what, self.share(options), self.ranks)

    def leave(self, *, wait: bool) -> None:
        liveness, barrier = self.liveness, self._barrier
        if liveness is None or barrier is None or self._broken is not None or liveness.failed:
            return
        with contextlib.suppress(Exception):  # the store may have ended with the rank that held it
            barrier.arrive("left", named=True)
            began, turn = time.monotonic(), 0
            while wait and not barrier.complete("left"):
                if turn % 16 == 15:
                    missing = barrier.missing("left")
                    if len(liveness.ended(missing)) == len(missing) or self.failure() is not None:
                        return
                    if time.monotonic() - began > self.timeout:
                        _logger.warning(
                            "%s did not close the Shards within %g s after this rank; this rank ends without it.",
                            self.names(missing),
                            self.timeout,
                        )
                        return
                back_off(turn)
                turn += 1

    # ---------------------------------------------------------------- notes

    def put(self, key: str, value: str) -> None:
        """Publish a note, which any rank can read at any time."""
        if self.liveness is not None:
            self.liveness.write(f"{self.key}/{key}", value)

    def get(self, key: str) -> str | None:
        """Return the last note under a key; None without one, or if the store does not answer."""
        if self.liveness is not None:
            with contextlib.suppress(Exception):
                return self.liveness.read(f"{self.key}/{key}")
        return None

    # ---------------------------------------------------------------- failures

    def _call(self, what: str, start: Callable[[Any], Any], gloo: GlooGroup | None = None) -> None:
        """Run a collective, until the deadline or until a rank is known to be missing.

        Args:
            what: object that a rank sends with it, for errors.
            start: starts the collective in a group, and returns torch's `Work`.
            gloo: a group, for a part of a call that has begun; by default that of all ranks, for a call.
        """
        search = FailureSearch(self, f"did not send {what}")
        self._calling = True  # before `_enter`: then `close` leaves the group to this call
        try:
            self._enter(_BATCH, begins=gloo is None)
            gloo = gloo or self._groups[0]
            gloo.work = work = start(gloo.group)
            while not _done(work):
                search.check()
        except RankError:
            raise
        except RuntimeError as error:
            raise search.after(error) from error
        finally:
            self._calling = False
            if self._closed:
                self._finalizer()

    def _enter(self, kind: str, *, begins: bool = True) -> None:
        """Begin a call: count it, so that this rank's heartbeats carry its position. Or go on with one."""
        if self._broken is not None:
            raise self._broken
        if not begins:
            return
        self.position = (self.position[0] + 1, kind, self.doing)
        if self.liveness is not None:
            self.liveness.positions[self.key] = self.position

    def _wait_for_all(self, what: str) -> None:
        """Wait in the store until all ranks have begun this call, which is not one of each batch.

        This finds ranks that have left their loops at different places, or have called different methods: in gloo,
        messages of different sizes would meet, which ends the process.

        Args:
            what: object that a rank sends with the call, for errors.
        """
        self._enter(_CALL)
        if self._barrier is None:
            return
        name = f"call/{self.position[0]}"
        search = FailureSearch(self, f"did not send {what}")
        self._barrier.wait(name, search, named=False, doing=self.doing)
        last, self._last_barrier = self._last_barrier, name
        if self.rank == 0 and last is not None:  # all ranks have left it
            with contextlib.suppress(RuntimeError):
                self._barrier.delete(last)

    def give_up(self, error: RankError) -> RankError:
        """Let all further calls fail with this error; return it."""
        self._broken = error
        if self.liveness is not None:
            self.liveness.failed = True
            # It usually holds the store, which ends with it: others read it before.
            if self.ranks[self.rank] == 0:
                time.sleep(1.5 * BEAT)
        return error

    def tell_failure(self, ranks: Sequence[int], why: str) -> None:
        """Let the other ranks know which ranks have failed."""
        if self.liveness is not None:
            note = json.dumps({"ranks": ranks, "why": why})
            with contextlib.suppress(Exception):
                self.put("failed", note)
                self.liveness.tell_failure(self.key, note)

    def failure(self) -> dict[str, Any] | None:
        """Return the failure that another rank has found, or None: "ranks", and the reason under "why"."""
        note, known = self.get("failed"), self.liveness and self.liveness.failure
        if note is None and known and known[0] == self.key:
            note = known[1]
        return None if note is None else json.loads(note)

    def _names(self, ranks: Sequence[int]) -> str:
        """Format ranks of this exchange for errors, by their numbers in the default process group."""
        return self.names([self.ranks[rank] for rank in ranks])

    @staticmethod
    def names(ranks: Sequence[int]) -> str:
        """Format ranks of the default process group for errors."""
        numbers = [str(rank) for rank in ranks]
        return f"Rank {numbers[0]}" if len(numbers) == 1 else f"Ranks {', '.join(numbers)}"

    def close(self) -> None:
        """See `SingleProcess.close`; a call that runs in another thread ends before."""
        self._closed = True
        self._broken = RankError("The exchange between the ranks was closed, with its dataset or its Shards.")
        if not self._calling:
            self._finalizer()


def _end(groups: Sequence[GlooGroup], liveness: Liveness | None, key: str) -> None:
    """Close an exchange's groups, and tell the other ranks with the next heartbeat."""
    if liveness is not None:
        liveness.mark_closed(key)
    for group in groups:
        group.close()


def _head(number: int, failure: BaseException | None) -> bytes:
    """Return the header of a part."""
    if failure is None:
        return _HEAD.pack(number, _OK, b"")
    text = f"{type(failure).__name__}: {failure}".encode()[:244]
    return _HEAD.pack(number, _FAILED, text)


def _done(work: Any) -> bool:
    """Wait for a collective for half a second; return whether it has ended.

    Raises:
        RuntimeError: the collective has failed.
    """
    try:
        work.wait(datetime.timedelta(seconds=_SLICE))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises, unless it has ended just now
    return True
