"""What the tests of concurrency share: rows that describe themselves, who writes and reads them, processes to kill.

**Rows.** Every step of every column follows from the number of its trajectory or stream, the step in it, how long it
is, and into which chunks it is cut. Where chunks overlap, a step belongs to two trajectories; both begin at a multiple
of the distance of the chunks. So any part of a trajectory tells what the whole must be.

**Processes.** A nursery is a process that has imported everything and has no threads; it forks the children, each in
some milliseconds. Children, and what they fork, die with the nursery, and the nursery dies with the tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch

import gear_loader as gear
from gear_loader.errors import StaleIndexError
from gear_loader.storage.counters import INITIALIZED
from gear_loader.storage.index_arrays import ranges
from gear_loader.storage.operations import READY
from gear_loader.storage.recovery import Recovery
from gear_loader.utils.arrays import Array

PATIENCE = 120.0  # seconds for what takes milliseconds: the machine may be busy with other things
COLUMNS = {
    "number": gear.Column(torch.int64),
    "step": gear.Column(torch.int32),
    "length": gear.Column(torch.int32),
    "cut": gear.Column(torch.int16, (2,)),
    "value": gear.Column(torch.float32, (3,)),
    "tag": gear.Column(torch.uint8),
    "half": gear.Column(torch.float16),
    "check": gear.Column(torch.int64),
}
"""`length` is that of the trajectory, or of the whole stream; `cut` is the steps of a chunk, or 0, and the overlap."""
_NAMES = ("number", "step", "length", "cut")
_DTYPES = {name: torch.empty(0, dtype=column.dtype).numpy().dtype for name, column in COLUMNS.items()}


# Rows ------------------------------------------------------------------------------------------------


def columns_of(number: Any, step: Any, length: Any, chunk: Any, overlap: Any) -> dict[str, Array]:
    """What all columns hold, for arrays that fit each other."""
    number, step, length, chunk, overlap = np.broadcast_arrays(
        *(np.asarray(values, dtype=np.int64) for values in (number, step, length, chunk, overlap))
    )
    with np.errstate(over="ignore"):
        check = (step + 1) * np.int64(-7046029254386353131) ^ (number + 1) * np.int64(6364136223846793005)
    check ^= (length << 20) ^ (chunk << 40) ^ (overlap << 50)
    check ^= check >> 31
    return {
        "number": number.copy(),
        "step": step.astype(np.int32),
        "length": length.astype(np.int32),
        "cut": np.stack((chunk, overlap), axis=-1).astype(np.int16),
        "value": (check[..., None] >> np.array([0, 20, 40]) & 0xFFFFF).astype(np.float32),
        "tag": (check >> 7 & 0xFF).astype(np.uint8),
        "half": ((check >> 11 & 0x3FF) + 1).astype(np.float16),
        "check": check,
    }


def rows(
    number: int, length: int, *, first: int = 0, last: int | None = None, cut: tuple[int, int] = (0, 0)
) -> dict[str, Array]:
    """Steps `first` to `last` - 1 (all by default) of a trajectory, or of a stream that is cut so."""
    steps = np.arange(first, length if last is None else last)
    return columns_of(number, steps, length, *cut)


def starts_and_lengths(first: Array, length: Array, chunk: Array, overlap: Array) -> Array:
    """The lengths of trajectories that begin at these steps; fails if none can begin there."""
    stride = np.where(chunk > 0, chunk - overlap, 1)
    assert (first % stride == 0).all(), "a chunk begins where none does"
    assert ((chunk > 0) | (first == 0)).all(), "a trajectory does not begin with its first step"
    return np.where(chunk > 0, np.minimum(chunk, length - first), length)


def check_batch(batch: Mapping[str, Any], windows: Mapping[str, gear.Window]) -> tuple[Array, Array]:
    """Every row of a batch is whole; what `_NAMES` have for a window contains the anchor.

    Returns:
        The rows' numbers and the first steps of their trajectories.
    """
    found = {name: batch[name].numpy() for name in windows}
    anchor = batch["anchor"].numpy()
    masks = {name: _mask(batch, name).numpy() for name in windows}
    window, mask = windows["number"], masks["number"]
    everywhere = np.arange(len(anchor))
    place = mask.argmax(1)
    assert mask[everywhere, place].all(), "the anchor's step does not exist"
    own = {name: found[name][everywhere, place].astype(np.int64) for name in _NAMES}
    first = own["step"] - np.maximum(anchor + window.offset, 0)
    chunk, overlap = own["cut"].T
    lengths = starts_and_lengths(first, own["length"], chunk, overlap)
    assert ((anchor >= 0) & (anchor < lengths)).all(), "an anchor lies outside of its trajectory"
    for each in set(windows.values()):
        steps = (anchor + each.offset)[:, None] + np.arange(each.length)
        exists = (steps >= 0) & (steps < lengths[:, None])
        if each.pad != "keep":
            count = exists.sum(1)
            place = np.zeros_like(count) if each.pad == "tail" else each.length - count
            begin = np.maximum(anchor + each.offset, 0) - place
            steps = begin[:, None] + np.arange(each.length)
            places = np.arange(each.length) - place[:, None]
            exists = (places >= 0) & (places < count[:, None])
        expected = columns_of(
            own["number"][:, None],
            first[:, None] + steps,
            own["length"][:, None],
            chunk[:, None],
            overlap[:, None],
        )
        for name in (name for name in windows if windows[name] == each):
            assert (masks[name] == exists).all(), f"the mask of {name!r} is wrong"
            right = expected[name]
            right[~exists] = 0
            assert found[name].dtype == right.dtype
            assert (found[name] == right).all(), _difference(name, found[name], right, batch)
    return own["number"], first


def _mask(batch: Mapping[str, Any], name: str) -> torch.Tensor:
    return batch["mask"][name] if isinstance(batch["mask"], dict) else batch["mask"]


def _difference(name: str, found: Array, right: Array, batch: Mapping[str, Any]) -> str:
    wrong = np.argwhere(found != right)
    row, place = wrong[0][:2]
    return (
        f"{len(wrong)} values of column {name!r} are wrong; the first, of row {row} at {place}, is {found[row, place]} "
        f"instead of {right[row, place]}; index {int(batch['index'][row])}, anchor {int(batch['anchor'][row])}, "
        f"generation {int(batch['generation'][row])}"
    )


# Reading a table -------------------------------------------------------------------------------------


class Look:
    """Everything in a table at a moment, read under a ticket, without the lock, and checked.

    Attributes:
        slots, generations, numbers, firsts: int64 [n], oldest first.
    """

    def __init__(self, table: gear.Table) -> None:
        self._table = table
        self.ticket, snapshot = table.reader().begin_snapshot()
        try:
            self.slots, self.generations = snapshot.slots, snapshot.generations
            self._sequences, self._lengths = snapshot.sequences, snapshot.lengths
            self._read = self._steps()
            self._check()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.ticket.end()

    def _steps(self) -> dict[str, Array]:
        """All steps of all trajectories, one after another."""
        table, block_steps = self._table, self._table.region.layout.block_steps
        extent, block_ids = table.reader().index_arrays()
        starts = extent[self.slots, 1]
        assert (extent[self.slots, 0] == self._lengths).all(), "a trajectory's length has changed"
        steps = ranges(np.zeros_like(self._lengths), self._lengths)
        blocks = block_ids[np.repeat(starts, self._lengths) + steps // block_steps]
        assert ((blocks >= 0) & (blocks < table.region.layout.num_blocks)).all(), "no block"
        found = {}
        for name, column in table.schema.items():
            data = table.region.column(name)[:, : block_steps * column.step_bytes]
            data = data.reshape(len(data), block_steps, column.step_bytes)[blocks, steps % block_steps]
            found[name] = data.view(_DTYPES[name]).reshape(-1, *column.shape)
        return found

    def _check(self) -> None:
        _, generation, _ = self._table.reader().slot_states()
        assert (generation[self.slots] == self.generations).all(), "a slot was given away while it was read"
        assert (np.diff(self._sequences) > 0).all()
        found, lengths = self._read, self._lengths
        begins = np.cumsum(lengths) - lengths
        own = {name: found[name][begins].astype(np.int64) for name in _NAMES}
        self.numbers, self.firsts = own["number"], own["step"]
        chunk, overlap = own["cut"].T
        expected = starts_and_lengths(self.firsts, own["length"], chunk, overlap)
        assert (lengths == expected).all(), "a trajectory is too short or too long"
        steps = np.repeat(self.firsts - begins, lengths) + np.arange(lengths.sum())
        whole = columns_of(
            np.repeat(self.numbers, lengths),
            steps,
            *(np.repeat(values, lengths) for values in (own["length"], chunk, overlap)),
        )
        for name, right in whole.items():
            wrong = np.unique(
                np.repeat(np.arange(len(lengths)), lengths)[_rows_that_differ(found[name], right)]
            )
            assert not len(wrong), f"column {name!r} is torn in the slots {self.slots[wrong].tolist()}"
        names = list(zip(self.numbers.tolist(), self.firsts.tolist(), strict=True))
        assert len(set(names)) == len(names), "a trajectory is there twice"
        order = np.lexsort((self.firsts, self.numbers))
        same = self.numbers[order][1:] == self.numbers[order][:-1]
        assert (np.diff(self._sequences[order])[same] > 0).all(), "the chunks of a stream are out of order"

    def check_again(self) -> None:
        """All of it is still there."""
        again = self._steps()
        for name, values in self._read.items():
            assert (again[name] == values).all(), f"column {name!r} has changed under a ticket"
        self._check()

    def names(self) -> set[tuple[int, int]]:
        """Numbers and first steps."""
        return set(zip(self.numbers.tolist(), self.firsts.tolist(), strict=True))


def _rows_that_differ(found: Array, right: Array) -> Array:
    differ: Array = (found != right).any(tuple(range(1, found.ndim)))
    return differ


def look(table: gear.Table) -> Look:
    """A `Look` that is over."""
    seen = Look(table)
    seen.close()
    return seen


class Memory:
    """What a reader has seen in each slot: a generation of a slot is one trajectory for ever."""

    def __init__(self, slots: int) -> None:
        self._generation = np.full(slots, -1, dtype=np.int64)
        self._number = np.zeros(slots, dtype=np.int64)
        self._first = np.zeros(slots, dtype=np.int64)

    def check(self, slots: Array, generations: Array, numbers: Array, firsts: Array) -> None:
        same = self._generation[slots] == generations
        for known, seen in ((self._number, numbers), (self._first, firsts)):
            assert (known[slots][same] == seen[same]).all(), "a slot's generation is two trajectories"
        newer = self._generation[slots] < generations
        slots, generations, numbers, firsts = (a[newer] for a in (slots, generations, numbers, firsts))
        for known, seen in ((self._generation, generations), (self._number, numbers), (self._first, firsts)):
            known[slots] = seen
        same = self._generation[slots] == generations
        for known, seen in ((self._number, numbers), (self._first, firsts)):
            assert (known[slots][same] == seen[same]).all(), (
                "a slot's generation is two trajectories in one batch"
            )


def check_named(table: gear.Table, batch: Mapping[str, Any], numbers: Array) -> int:
    """Index and generation of a batch name what is in the table, as far as it is still there.

    Returns:
        How many rows are.
    """
    slots, generations = batch["index"].numpy().copy(), batch["generation"].numpy().copy()
    ticket = table.index.reader.begin_read()
    try:
        state, generation, _ = table.reader().slot_states()
        there = (state[slots] == READY) & (generation[slots] == generations)
        slots, numbers = slots[there], numbers[there]
        extent, block_ids = table.reader().index_arrays()
        starts = extent[slots, 1].copy()
        found = table.region.column("number")[block_ids[starts], :8].copy().view(np.int64).reshape(-1)
        # Retired and given out again before the ticket was had: then the generation tells.
        still = table.reader().slot_states()[1][slots] == generations[there]
        assert still.all(), "a slot was given away while it was read"
        assert (found == numbers).all(), "index and generation name another trajectory than the rows"
    finally:
        ticket.end()
    return int(there.sum())


# Writing ---------------------------------------------------------------------------------------------


class Journal:
    """What a process has done, in memory that survives it. All entries are (number, first step).

    Attributes:
        head: 0, 1: entries of `done` and of `going`; 2, 3: first number and count of the `extend` in flight; 4: where
            in `going` the `remove` in flight begins; 6: operations begun or done, so that it is seen to be at work.
        done: what has been committed. going: what was, or was about to be, removed.
    """

    def __init__(self, size: int = 8192) -> None:
        self._memory = mmap.mmap(-1, (8 + 4 * size) * 8)
        numbers = np.frombuffer(self._memory, dtype=np.int64)
        self.head = numbers[:8]
        self.done = numbers[8 : 8 + 2 * size].reshape(-1, 2)
        self.going = numbers[8 + 2 * size :].reshape(-1, 2)

    def clear(self) -> None:
        self.head[:] = 0

    @property
    def is_full(self) -> bool:
        return bool(self.head[:2].max() > len(self.done) - 256)

    def committed(self, number: int, first: int) -> None:
        self.done[self.head[0]] = number, first
        self.head[0] += 1

    def removing(self, names: list[tuple[int, int]]) -> None:
        self.head[4] = self.head[1]
        for name in names:
            self.going[self.head[1]] = name
            self.head[1] += 1

    def extending(self, number: int, count: int) -> None:
        self.head[3] = 0
        self.head[2] = number
        self.head[3] = count

    def check(self, found: set[tuple[int, int]], low: int, high: int) -> set[tuple[int, int]]:
        """Compare what is there, of those with numbers from `low` to `high` - 1, with what was reported.

        Returns:
            What is there.
        """
        mine = {name for name in found if low <= name[0] < high}
        done = set(map(tuple, self.done[: self.head[0]].tolist()))
        going = set(map(tuple, self.going[: self.head[1]].tolist()))
        missing = done - going - mine
        assert not missing, f"committed and gone: {sorted(missing)[:5]}"
        removed = set(map(tuple, self.going[: self.head[4]].tolist()))
        assert not removed & mine, "removed and there"
        last = set(map(tuple, self.going[self.head[4] : self.head[1]].tolist()))
        assert last <= mine or not last & mine, "a part of what was to be removed together is gone"
        number, count = self.head[2:4].tolist()
        extended = {(number + i, 0) for i in range(count)} - going
        assert extended <= mine or not extended & mine, "a part of what was to be added together is there"
        unreported = mine - done - extended
        assert len({number for number, _ in unreported}) <= 1, f"of more than one call: {sorted(unreported)}"
        return mine


WAYS = ("add", "listed", "generated", "stacked", "steps", "pieces", "chunks", "two", "remove")
"""What an author does."""
_WEIGHTS = (6, 2, 1, 3, 2, 3, 4, 1, 3)


class Author:
    """Writes in every way there is, what a generator of random numbers decides.

    Args:
        first: numbers begin here.
        journal: where it is reported; then only trajectories of its own are removed.
        longest: steps of a trajectory. batch: trajectories of one `extend`.
    """

    def __init__(
        self,
        table: gear.Table,
        seed: int,
        first: int,
        *,
        journal: Journal | None = None,
        longest: int = 40,
        batch: int = 5,
    ) -> None:
        self.table = table
        self.random = random.Random(seed)
        self.next = first
        self.committed = 0
        self.removed = 0
        self.actions: dict[str, int] = {}
        self._journal = journal
        self._longest = longest
        self._batch = batch
        self._mine: dict[int, tuple[int, int]] = {}  # slot -> what is there

    def act(self) -> None:
        """Do one thing."""
        way = self.random.choices(WAYS, weights=_WEIGHTS)[0]
        if self._journal is not None:
            self._journal.extending(0, 0)
        getattr(self, way)()
        self.actions[way] = self.actions.get(way, 0) + 1
        if self._journal is not None:
            self._journal.head[6] += 1

    def _take(self, count: int = 1) -> int:
        self.next += count
        return self.next - count

    def _length(self) -> int:
        return self.random.randint(1, self._longest)

    def _priority(self) -> float | None:
        return self.random.choice((None, self.random.random() + 0.01, 3 * self.random.random() + 0.01))

    def _report(self, index: int, number: int, first: int = 0) -> None:
        self.committed += 1
        if self._journal is not None:
            self._journal.committed(number, first)
            self._mine[int(index)] = (number, first)

    def add(self) -> None:
        number = self._take()
        self._report(self.table.add(rows(number, self._length()), priority=self._priority()), number)

    def _extend(self, make: Callable[[int, list[int]], tuple[Any, dict[str, Any]]]) -> None:
        count = self.random.randint(1, self._batch)
        number, lengths = self._take(count), [self._length() for _ in range(count)]
        if self._journal is not None:
            self._journal.extending(number, count)
        given, options = make(number, lengths)
        indices = self.table.extend(given, priority=self._priority(), **options)
        for i, index in enumerate(indices.tolist()):
            self._report(index, number + i)

    def listed(self) -> None:
        self._extend(lambda number, lengths: ([rows(number + i, n) for i, n in enumerate(lengths)], {}))

    def generated(self) -> None:
        self._extend(lambda number, lengths: ((rows(number + i, n) for i, n in enumerate(lengths)), {}))

    def stacked(self) -> None:
        def make(number: int, lengths: list[int]) -> tuple[Any, dict[str, Any]]:
            count = np.array(lengths)[:, None]
            numbers = number + np.arange(len(lengths))[:, None]
            return columns_of(numbers, np.arange(max(lengths)), count, 0, 0), {"lengths": lengths}

        self._extend(make)

    def steps(self) -> None:
        """A writer, step by step."""
        number, length = self._take(), self.random.randint(1, max(self._longest // 2, 1))
        values = rows(number, length)
        with self.table.writer() as writer:
            for i in range(length):
                writer.append({name: column[i] for name, column in values.items()})
                if self.random.random() < 0.01:
                    writer.discard()
                    return
            self._report(writer.commit(self._priority()), number)

    def pieces(self) -> None:
        """A writer, several steps at once; several trajectories, some of which are discarded."""
        with self.table.writer() as writer:
            for _ in range(self.random.randint(1, 3)):
                number, length = self._take(), self._length()
                for piece in self._pieces(number, length, (0, 0)):
                    writer.append(piece)
                if self.random.random() < 0.2:
                    writer.discard()
                else:
                    self._report(writer.commit(self._priority()), number)

    def _pieces(self, number: int, length: int, cut: tuple[int, int]) -> Iterator[dict[str, Array]]:
        done = 0
        while done < length:
            last = min(done + self.random.choice((1, 2, 5, 11, 30)), length)
            piece = rows(number, length, first=done, last=last, cut=cut)
            if last == done + 1 and self.random.random() < 0.7:
                piece = {name: column[0] for name, column in piece.items()}
            yield piece
            done = last

    def _stream(self) -> Iterator[None]:
        """A stream that is cut into chunks; pauses after every piece."""
        chunk, overlap = self.random.choice(
            [
                cut
                for cut in ((16, 8), (15, 6), (24, 20), (10, 0), (9, 8), (4, 3), (3, 0))
                if cut[0] <= self._longest
            ]
        )
        stride = chunk - overlap
        number, length = self._take(), self.random.randint(1, 4 * chunk)
        writer = self.table.writer(chunk_steps=chunk, overlap_steps=overlap)
        chunks = 0
        for piece in self._pieces(number, length, (chunk, overlap)):
            writer.priority = self._priority()
            for index in writer.append(piece):
                self._report(index, number, chunks * stride)
                chunks += 1
            if self.random.random() < 0.03:
                writer.discard()
                return
            yield
        covered = chunk + (chunks - 1) * stride if chunks else 0
        index = writer.commit(self._priority())
        if covered < length:
            self._report(index, number, chunks * stride)
        writer.close()

    def chunks(self) -> None:
        for _ in self._stream():
            pass

    def two(self) -> None:
        """Two streams at once, whose block tables get into each other's way."""
        streams = [self._stream(), self._stream()]
        while streams:
            stream = self.random.choice(streams)
            try:
                next(stream)
            except StopIteration:
                streams.remove(stream)

    def remove(self) -> None:
        if self._journal is not None:
            slots = self.random.sample(sorted(self._mine), min(len(self._mine), self.random.randint(1, 4)))
            self._journal.removing([self._mine[slot] for slot in slots])
            self.table.remove(slots)
            for slot in slots:
                del self._mine[slot]
            self._journal.head[4] = self._journal.head[1]
            return
        there = self.table.indices()
        if not len(there):
            return
        chosen = np.unique(self.random.choices(there.tolist(), k=self.random.randint(1, 3)))
        with contextlib.suppress(StaleIndexError):  # somebody was faster
            self.table.remove(chosen)
            self.removed += len(chosen)


# Processes -------------------------------------------------------------------------------------------

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """This process is killed when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def fork(work: Callable[[], object]) -> int:
    """A child that does this and ends; it dies with this process."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(parent)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def serve(fd: int, parent: int, module: str) -> NoReturn:
    """The nursery: forks a child for each request, until the other end is closed."""
    die_with_parent(parent)
    torch.set_num_threads(1)
    rebuilds = _count_rebuilds()
    importlib.import_module(module)
    _load_compiled()
    control = socket.socket(fileno=fd)
    control.send(b"ready")
    while True:
        message, fds, *_ = socket.recv_fds(control, 1 << 16, 1)
        if not message:
            os._exit(0)
        what, *given = pickle.loads(message)
        if what == "reap":
            control.send(pickle.dumps(os.waitpid(given[0], 0)[1]))
            continue
        if what == "rebuilds":
            control.send(pickle.dumps(int(rebuilds.sum())))
            continue

        def work(fds: list[int] = fds, given: list[Any] = given) -> None:
            control.close()
            answer(Connection(fds[0]), *given)

        pid = fork(work)
        os.close(fds[0])
        control.send(pickle.dumps(pid))


def _count_rebuilds() -> Array:
    """Let all processes that are forked from here count how often they derive an index anew; int64, shared."""
    counts = np.frombuffer(mmap.mmap(-1, 8 * 4096), dtype=np.int64)
    genuine = Recovery.rebuild

    def rebuild(recovery: Recovery) -> None:
        counts[os.getpid() % len(counts)] += bool(recovery.arrays.counters[INITIALIZED])
        genuine(recovery)

    Recovery.rebuild = rebuild  # type: ignore[method-assign]
    return counts


def _load_compiled() -> None:
    """Use every compiled loop once, so that children need not load them."""
    with gear.Table.create(
        COLUMNS, max_steps=400, max_trajectories=40, block_steps=4, on_full="evict_oldest"
    ) as table:
        author = Author(table, 0, 0, longest=24)
        ways = (
            author.add,
            author.listed,
            author.stacked,
            author.steps,
            author.pieces,
            author.chunks,
            author.two,
        )
        for way in ways * 3:
            way()
        author.remove()
        windows = {"windows": gear.Window(4, offset=-1)}
        for selector in (gear.Uniform(), gear.Prioritized(), gear.TopK(), gear.Fifo()):
            dataset = gear.ReplayDataset(
                table, batch_size=4, selector=selector, device="cpu", sample_info=True, **windows
            )
            batch = dataset.sample()
            if isinstance(selector, gear.Prioritized):
                dataset.update_priority(batch, torch.ones(4))


def answer(pipe: Connection, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        value = target(Voice(pipe), *args)
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
    else:
        pipe.send(("said", value))


class Voice:
    """The child's end of the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def say(self, value: Any = None) -> None:
        self._pipe.send(("said", value))

    def hear(self) -> Any:
        assert self._pipe.poll(PATIENCE)
        return self._pipe.recv()

    @property
    def is_called(self) -> bool:
        """Whether there is something to hear."""
        return self._pipe.poll(0)


class Nursery:
    """Forks children; made when the first is wanted."""

    current: ClassVar[Nursery | None] = None

    def __init__(self, module: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(filter(None, sys.path))  # on which the tests' modules are
        code = f"import concurrency_common as c; c.serve({theirs.fileno()}, {os.getpid()}, {module!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": path},
        )
        theirs.close()
        self._control.settimeout(PATIENCE)
        assert self._control.recv(16) == b"ready", "the nursery did not come up"
        self.children: list[Child] = []
        Nursery.current = self

    def ask(self, *request: Any, fds: list[int] | None = None) -> Any:
        socket.send_fds(self._control, [pickle.dumps(request)], fds or [])
        return pickle.loads(self._control.recv(1 << 16))

    def rebuilds(self) -> int:
        """How often children have found an index half changed."""
        count: int = self.ask("rebuilds")
        return count

    def clear(self) -> None:
        """Kill the children that are left."""
        while self.children:
            self.children.pop().close()

    def close(self) -> None:
        self.clear()
        self._control.close()
        try:
            self._process.wait(PATIENCE)
        finally:
            self._process.kill()
            Nursery.current = None


class Child:
    """`target(voice, *args)` in another process; what it returns, or its traceback, comes back."""

    def __init__(self, target: Callable[..., Any], *args: Any) -> None:
        assert Nursery.current is not None
        self._nursery = Nursery.current
        ours, theirs = socket.socketpair()
        self.pid: int = self._nursery.ask("fork", target, args, fds=[theirs.fileno()])
        theirs.close()
        self.pipe = Connection(ours.detach())
        self.status: int | None = None
        self._nursery.children.append(self)

    def hear(self, patience: float = PATIENCE) -> Any:
        """The next thing it says."""
        assert self.pipe.poll(patience), f"process {self.pid} says nothing"
        kind, value = self.pipe.recv()
        assert kind == "said", f"in process {self.pid}:\n{value}"
        return value

    @property
    def has_spoken(self) -> bool:
        return self.pipe.poll(0)

    def say(self, value: Any = None) -> None:
        self.pipe.send(value)

    def result(self, patience: float = PATIENCE) -> Any:
        value = self.hear(patience)
        assert self.reap() == 0
        return value

    def reap(self) -> int:
        """Wait for its end; the status of it."""
        if self.status is None:
            self.status = self._nursery.ask("reap", self.pid)
        return self.status

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert os.WTERMSIG(self.reap()) == signal.SIGKILL

    def stop(self) -> None:
        """Stop it, and wait until it has."""
        os.kill(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "Tt":
            assert time.monotonic() < deadline
            time.sleep(1e-3)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)  # not reaped yet, so it is no other process
            self.reap()
        self.pipe.close()


def drop_the_dead(table: gear.Table) -> None:
    """What whoever needs room does: repair the index, take back what dead processes had."""
    index = table.index

    def work() -> None:
        index.allocator.reclaim_writers(every=float("-inf"))
        index.readers.drop_dead()
        index.arrays.ops.reclaim(index.arrays.where)

    index.recovery.locked(work)
