"""What the tests of concurrency share: rows that describe themselves, who writes and reads them, processes to kill.

**Rows.** Every step of every column follows from the number of its trajectory or stream, the step in it, how long it
is, and into which chunks it is cut. Where chunks overlap, a step belongs to two trajectories; both begin at a multiple
of the distance of the chunks. So any part of a trajectory tells what the whole must be.

**Processes.** A nursery is a process that has imported everything and has no threads; it forks the children, each in
some milliseconds. Children, and what they fork, die with the nursery, and the nursery dies with the tests.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import mmap
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from options_common import nested, nested_table

import gear_loader as gear
from gear_loader.errors import StaleIndexError
from gear_loader.storage.index_arrays import ranges
from gear_loader.storage.states import READY
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
    given = batch["mask"]
    masks = {name: (given[name] if isinstance(given, dict) else given).numpy() for name in windows}
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
        of_rows = (values[:, None] for values in (own["length"], chunk, overlap))
        expected = columns_of(own["number"][:, None], first[:, None] + steps, *of_rows)
        for name in (name for name in windows if windows[name] == each):
            assert (masks[name] == exists).all(), f"the mask of {name!r} is wrong"
            right = expected[name]
            right[~exists] = 0
            assert found[name].dtype == right.dtype
            wrong = np.argwhere(found[name] != right)
            assert not len(wrong), f"column {name!r} is wrong at {wrong[:3].tolist()}, index {batch['index']}"
    return own["number"], first


# Reading a table -------------------------------------------------------------------------------------


class Look:
    """Everything in a table at a moment, read under a ticket, without the lock, and checked.

    Attributes:
        slots, generations, numbers, firsts: int64 [n], oldest first.
    """

    def __init__(self, table: gear.Table) -> None:
        self._table = table
        self.ticket, snapshot = table._engine.reader().begin_snapshot()
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
        table, block_steps = self._table, self._table._engine.region.layout.block_steps
        extent, block_ids = table._engine.reader().index_arrays()
        starts = extent[self.slots, 1]
        assert (extent[self.slots, 0] == self._lengths).all(), "a trajectory's length has changed"
        steps = ranges(np.zeros_like(self._lengths), self._lengths)
        blocks = block_ids[np.repeat(starts, self._lengths) + steps // block_steps]
        assert ((blocks >= 0) & (blocks < table._engine.region.layout.num_blocks)).all(), "no block"
        found = {}
        for name, column in table.schema.items():
            data = table._engine.region.column(name)[blocks, steps % block_steps]
            found[name] = data.view(_DTYPES[name]).reshape(-1, *column.shape)
        return found

    def _check(self) -> None:
        _, generation, _ = self._table._engine.reader().slot_states()
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
        of_steps = (np.repeat(values, lengths) for values in (own["length"], chunk, overlap))
        whole = columns_of(np.repeat(self.numbers, lengths), steps, *of_steps)
        slots = np.repeat(self.slots, lengths)
        for name, right in whole.items():
            wrong = np.unique(slots[(found[name] != right).any(tuple(range(1, right.ndim)))])
            assert not len(wrong), f"column {name!r} is torn in the slots {wrong.tolist()}"
        assert len(self.names()) == len(self.slots), "a trajectory is there twice"
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


def look(table: gear.Table) -> Look:
    """A `Look` that is over."""
    seen = Look(table)
    seen.close()
    return seen


def check_named(table: gear.Table, batch: Mapping[str, Any], numbers: Array) -> int:
    """Index and generation of a batch name what is in the table, as far as it is still there.

    Returns:
        How many rows are.
    """
    slots, generations = batch["index"].numpy().copy(), batch["generation"].numpy().copy()
    ticket = table._engine.index.reader.begin_read()
    try:
        state, generation, _ = table._engine.reader().slot_states()
        there = (state[slots] == READY) & (generation[slots] == generations)
        slots, numbers = slots[there], numbers[there]
        extent, block_ids = table._engine.reader().index_arrays()
        starts = extent[slots, 1].copy()
        found = table._engine.region.column("number")[block_ids[starts], 0].copy().view(np.int64).reshape(-1)
        # Retired and given out again before the ticket was had: then the generation tells.
        still = table._engine.reader().slot_states()[1][slots] == generations[there]
        assert still.all(), "a slot was given away while it was read"
        assert (found == numbers).all(), "index and generation name another trajectory than the rows"
    finally:
        ticket.end()
    return int(there.sum())


@contextlib.contextmanager
def waiting(table: gear.Table, seconds: float) -> Iterator[None]:
    """Other deadlines, of the lock and of room, for a while."""
    live = table._engine.index
    before = table._engine.region.lock.timeout, live.admission.timeout
    table._engine.region.lock.timeout = live.admission.timeout = seconds
    try:
        yield
    finally:
        table._engine.region.lock.timeout, live.admission.timeout = before


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


WAYS = ("add", "extend", "pieces", "streams", "remove")


class Author:
    """Writes in every way there is, what a generator of random numbers decides.

    Args:
        first: numbers begin here.
        journal: where it is reported; then only trajectories of its own are removed.
        longest: steps of a trajectory.
    """

    def __init__(
        self, table: gear.Table, seed: int, first: int, *, journal: Journal | None = None, longest: int = 40
    ) -> None:
        self.table = table
        self.random = random.Random(seed)
        self.next = first
        self.committed = self.removed = 0
        self.actions: set[str] = set()
        self._journal = journal
        self._longest = longest
        self._mine: dict[int, tuple[int, int]] = {}  # slot -> what is there

    def act(self) -> None:
        """Do one thing."""
        way = self.random.choices(WAYS, weights=(6, 6, 5, 5, 3))[0]
        if self._journal is not None:
            self._journal.extending(0, 0)
        getattr(self, way)()
        self.actions.add(way)
        if self._journal is not None:
            self._journal.head[6] += 1

    def take(self, count: int = 1) -> int:
        """Numbers that no other trajectory has: the first of them."""
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
        number = self.take()
        self._report(self.table.add(rows(number, self._length()), priority=self._priority()), number)

    def extend(self) -> None:
        """A list, a generator, or stacked arrays."""
        count = self.random.randint(1, 5)
        number, lengths = self.take(count), [self._length() for _ in range(count)]
        if self._journal is not None:
            self._journal.extending(number, count)
        given: Any = (rows(number + i, n) for i, n in enumerate(lengths))
        options: dict[str, Any] = {"priority": self._priority()}
        how = self.random.randrange(3)
        if how == 1:
            given = list(given)
        elif how == 2:
            numbers, steps = number + np.arange(count)[:, None], np.arange(max(lengths))
            given = columns_of(numbers, steps, np.array(lengths)[:, None], 0, 0)
            options["lengths"] = lengths
        for i, index in enumerate(self.table.extend(given, **options).tolist()):
            self._report(index, number + i)

    def pieces(self) -> None:
        """A writer, one step or several at once; several trajectories, some of which are discarded."""
        with self.table.writer() as writer:
            for _ in range(self.random.randint(1, 3)):
                number, length = self.take(), self._length()
                for piece in self._pieces(number, length, (0, 0)):
                    writer.append(piece)
                if self.random.random() < 0.2:
                    writer.discard()
                else:
                    self._report(writer.commit(self._priority()), number)

    def _pieces(self, number: int, length: int, cut: tuple[int, int]) -> Iterator[dict[str, Array]]:
        done = 0
        while done < length:
            last = min(done + self.random.choice((1, 1, 2, 5, 11, 30)), length)
            piece = rows(number, length, first=done, last=last, cut=cut)
            if last == done + 1 and self.random.random() < 0.7:
                piece = {name: column[0] for name, column in piece.items()}
            yield piece
            done = last

    def _stream(self) -> Iterator[None]:
        """A stream that is cut into chunks; pauses after every piece."""
        cuts = ((16, 8), (15, 6), (24, 20), (10, 0), (9, 8), (4, 3), (3, 0))
        chunk, overlap = self.random.choice([cut for cut in cuts if cut[0] <= self._longest])
        stride = chunk - overlap
        number, length = self.take(), self.random.randint(1, 4 * chunk)
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
        index = writer.commit(self._priority())
        if not chunks or chunk + (chunks - 1) * stride < length:
            self._report(index, number, chunks * stride)
        writer.close()

    def streams(self) -> None:
        """One stream, or two at once, whose block tables get into each other's way."""
        streams = [self._stream() for _ in range(self.random.randint(1, 2))]
        while streams:
            stream = self.random.choice(streams)
            if next(stream, self) is self:
                streams.remove(stream)

    def remove(self) -> None:
        if self._journal is not None:
            slots = self.random.sample(sorted(self._mine), min(len(self._mine), self.random.randint(1, 4)))
            self._journal.removing([self._mine[slot] for slot in slots])
            self.table.remove(slots)
            for slot in slots:
                del self._mine[slot]
            self._journal.head[4] = self._journal.head[1]
        elif len(there := self.table.indices()):
            chosen = np.unique(self.random.choices(there.tolist(), k=self.random.randint(1, 3)))
            with contextlib.suppress(StaleIndexError):  # another one was faster
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


def serve(fd: int, parent: int) -> NoReturn:
    """The nursery: forks a child for each request, until the other end is closed."""
    die_with_parent(parent)
    torch.set_num_threads(1)
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

        def work(fds: list[int] = fds, given: list[Any] = given) -> None:
            control.close()
            answer(Connection(fds[0]), *given)

        pid = fork(work)
        os.close(fds[0])
        control.send(pickle.dumps(pid))


def _load_compiled() -> None:
    """Use every compiled loop once, so that children need not load them."""
    sizes: dict[str, Any] = {"max_steps": 400, "max_trajectories": 40, "block_steps": 4}
    with gear.Table.create(COLUMNS, **nested_table({**sizes, "on_full": "evict_oldest"})) as table:
        author = Author(table, 0, 0, longest=24)
        for _ in range(40):
            author.act()
        options: dict[str, Any] = {"windows": gear.Window(4, offset=-1), "device": "cpu", "sample_info": True}
        for sampler in (gear.Uniform(), gear.Prioritized(), gear.TopK(), gear.Fifo()):
            dataset = gear.ReplayDataset(table, **nested({"batch_size": 4, "sampler": sampler, **options}))
            batch = dataset.sample()
            if isinstance(sampler, gear.Prioritized):
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
    """Forks children; one for all tests of this process, made when the first is wanted."""

    _current: ClassVar[Nursery | None] = None

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(filter(None, sys.path))  # on which the tests' modules are
        code = f"import concurrency_common as c; c.serve({theirs.fileno()}, {os.getpid()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": path}
        )
        theirs.close()
        self._control.settimeout(PATIENCE)
        assert self._control.recv(16) == b"ready", "the nursery did not come up"
        self.children: list[Child] = []
        atexit.register(self.close)

    @classmethod
    def shared(cls) -> Nursery:
        if cls._current is None:
            cls._current = cls()
        return cls._current

    def ask(self, *request: Any, fds: list[int] | None = None) -> Any:
        socket.send_fds(self._control, [pickle.dumps(request)], fds or [])
        return pickle.loads(self._control.recv(1 << 16))

    def clear(self) -> None:
        """Kill the children that are left."""
        while self.children:
            self.children.pop().close()

    def close(self) -> None:
        self.clear()
        self._control.close()
        self._process.wait(PATIENCE)


class Child:
    """`target(voice, *args)` in another process; what it returns, or its traceback, comes back."""

    def __init__(self, target: Callable[..., Any], *args: Any) -> None:
        self._nursery = Nursery.shared()
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
        try:
            self.pipe.send(value)
        except BrokenPipeError:
            self.hear()  # why it has ended
            raise

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

    def close(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)  # not reaped yet, so it is no other process
            self.reap()
        self.pipe.close()


def drop_the_dead(table: gear.Table) -> None:
    """What an addition that needs room does: repair the index, take back what dead processes had."""
    index = table._engine.index

    def work() -> None:
        index.allocator.reclaim_writers(every=float("-inf"))
        index.readers.drop_dead()
        index.arrays.ops.reclaim(index.arrays.where)

    index.recovery.locked(work)
