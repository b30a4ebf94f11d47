"""What `test_interrupts` runs in a process of its own: calls that an exception interrupts, and what that leaves.

    python interrupts_loop.py opcodes CALLS COUNT SEED   raise at COUNT random opcodes of each call; 0: at every one
    python interrupts_loop.py signals COUNT SEED         raise COUNT times, from a signal's handler at a random time
    python interrupts_loop.py states CALLS COUNT SEED    ask for states and saves at COUNT random opcodes of each call

Several of these, with `then` between them, follow each other in one process. Each prints how often calls were
interrupted; it ends with 1 and a traceback if anything was left.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import functools
import gc
import itertools
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from options_common import nested, nested_table
from tier_common import NEVER, spill

import gear_loader as gear
from gear_loader import warmup
from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.tier_reader import THREADS, _File
from gear_loader.collection.buffers import Buffers
from gear_loader.storage.operations.view import PID, READING
from gear_loader.storage.states import WRITING
from gear_loader.utils.mutex import holds_any

warm_up = functools.cache(warmup.warm_up)
FILES = (str(Path(gear.__file__).parent), contextlib.__file__)
SCHEMA = {"x": gear.Column(torch.float32, (4,))}
PATIENCE = 60.0


class Interruption(KeyboardInterrupt):
    """Raised in the middle of a call."""


class Subject:
    """A table, and calls that change it or read it."""

    def __init__(self) -> None:
        sizes: dict[str, Any] = {"max_steps": 400, "max_trajectories": 40, "block_steps": 4}
        name = f"test.interrupts.{os.getpid()}"
        self.table = gear.Table.create(
            SCHEMA, **nested_table({**sizes, "name": name, "on_full": "evict_oldest"})
        )
        self.table.extend([self.rows(7) for _ in range(20)])
        self.other = _Other(self.table.name or "")
        options: dict[str, Any] = {"batch_size": 4, "windows": gear.Window(2), "device": "cpu"}
        options["batches_per_epoch"] = math.inf

        def dataset(prefetch: int, sampler: Any = None) -> gear.ReplayDataset:
            return gear.ReplayDataset(
                self.table,
                **nested({"prefetch": prefetch, "sampler": sampler or gear.Uniform(), **options}),
            )

        self.uniform, self.ahead = dataset(0), dataset(2)
        self.once, self.fifo = dataset(0, gear.Uniform(replacement=False)), dataset(0, gear.Fifo())
        self.prioritized = dataset(0, gear.Prioritized(unit="step"))
        self.prioritized_ahead = dataset(2, gear.Prioritized())
        self.folder = tempfile.mkdtemp(prefix="gear-loader-tests-")
        self.late = self._late_table()
        self.tiered = self._tiered_table()
        whole: dict[str, Any] = {"windows": gear.Whole(), "layout": "packed", "batches_per_epoch": math.inf}
        self.packed = gear.ReplayDataset(self.table, **nested({"batch_size": 4, "device": "cpu", **whole}))
        self.budget = gear.ReplayDataset(
            self.table, **nested({"max_steps": 30, "prefetch": 0, "device": "cpu", **whole})
        )
        self.from_disk = gear.ReplayDataset(
            self.tiered, **nested({"sampler": gear.Prioritized(unit="step"), **options})
        )
        self.packed_from_disk = gear.ReplayDataset(
            self.tiered, **nested({"batch_size": 4, "prefetch": 0, "device": "cpu", **whole})
        )
        self.mixture = gear.Mixture(
            {"one": (dataset(0), 0.5), "other": (dataset(0, gear.Prioritized()), 0.5)},
            batch_size=8,
            batches_per_epoch=1000,
        )
        fixed = gear.Table.create(SCHEMA, max_steps=10, max_trajectories=1)
        fixed.add(self.rows(10))
        self.features = gear.Features(fixed, "x")
        self.writers: list[Any] = []
        self.calls: dict[str, Callable[[], object]] = {
            "add": lambda: self.table.add(self.rows(5)),
            "extend": self.extend,
            "extend_in_three_steps": self.extend_in_three_steps,
            "read": lambda: self.table[int(self.table.indices()[0])],
            "remove": lambda: self.table.remove(self.table.indices()[10:11]),  # never the last ones
            "stats": lambda: (
                self.table.stats(),
                self.table._engine.reader().snapshot(),
                self.table.lengths(),
            ),
            "write": self.write,
            "write_chunks": lambda: self.write(chunk_steps=8, overlap_steps=4),
            "write_overlapping_chunks": lambda: self.write(chunk_steps=7, overlap_steps=3),
            "sample": self.uniform.sample,
            "sample_once": self.once.sample,
            "sample_fifo": self.fifo.sample,
            "sample_prioritized": lambda: self.update(self.prioritized, self.prioritized.sample()),
            "iterate": lambda: self.iterate(self.uniform),
            "iterate_ahead": lambda: self.iterate(self.ahead),
            "iterate_prioritized": lambda: self.iterate(self.prioritized_ahead),
            "break_off": lambda: self.break_off(self.ahead),
            "packed": lambda: self.iterate(self.packed),
            "budget": lambda: (self.budget.sample(), self.iterate(self.budget)),
            "mixture": lambda: self.break_off(self.mixture),
            "fill": self.fill,
            "features": lambda: self.features[[0, 5, 9]],
            "save": lambda: self.late.save(f"{self.folder}/saved"),
            "from_disk": lambda: (self.from_disk.sample(), self.break_off(self.from_disk)),
            "packed_from_disk": lambda: self.packed_from_disk.sample(),
            "add_on_disk": lambda: self.tiered.add(self.rows(5)),
            "state": lambda: self.prioritized_ahead.load_state_dict(self.prioritized_ahead.state_dict()),
        }

    def _late_table(self) -> gear.Table:
        schema = {**SCHEMA, "value": gear.Column(torch.float32, (2000,), late=True)}
        sizes: dict[str, Any] = {"max_steps": 100, "max_trajectories": 20, "block_steps": 4}
        return gear.Table.create(schema, **nested_table({**sizes, "on_full": "evict_oldest"}))

    def _tiered_table(self) -> gear.Table:
        """A table of which half lies on disk only."""
        disk = gear.Disk(f"{self.folder}/tier", sync_seconds=NEVER, size="1GiB", keep="newest")
        sizes: dict[str, Any] = {"max_steps": 400, "max_trajectories": 40, "block_steps": 4, "max_blocks": 60}
        table = gear.Table.create(SCHEMA, **nested_table({**sizes, "disk": disk, "on_full": "evict_oldest"}))
        slots = table.extend([self.rows(7) for _ in range(20)])
        table.save(f"{self.folder}/tier")
        spill(table, slots[:10])
        return table

    @staticmethod
    def rows(length: int) -> dict[str, Any]:
        return {"x": np.ones((length, 4), dtype=np.float32)}

    def extend(self) -> None:
        self.table.extend([self.rows(3), self.rows(9)], priority=2.0)

    def extend_in_three_steps(self) -> None:
        ids = np.arange(2) + (int(self.table.ids(self.table.indices()).max(initial=0)) + (1 << 16))
        self.table.extend_as([self.rows(3), self.rows(9)], ids=ids)

    def write(self, **options: Any) -> None:
        with self.table.writer(**options) as writer:
            self.writers.append(writer)
            for _ in range(10):
                writer.append(x=np.zeros(4, dtype=np.float32))
            writer.append(self.rows(6))
            writer.commit(priority=1.0)
        self.writers.clear()

    def update(self, dataset: gear.ReplayDataset, batch: Any) -> None:
        dataset.update_priority(batch, torch.rand(4) + 0.5)

    def fill(self) -> None:
        slots = self.late.extend([self.rows(7) for _ in range(4)])
        values = [np.ones((7, 2000), dtype=np.float32) for _ in slots]
        self.late.fill(slots, generation=self.late._engine.index.arrays.generation[slots], value=values)

    def break_off(self, dataset: Any) -> None:
        for number, _ in enumerate(dataset):
            if number:
                break

    def iterate(self, dataset: gear.ReplayDataset) -> None:
        batches = iter(dataset)
        with contextlib.closing(batches):  # type: ignore[type-var]
            for _ in range(2):
                batch = next(batches)
                if dataset is self.prioritized_ahead:
                    self.update(dataset, batch)

    def ask(self) -> None:
        """What a handler asks for in the middle of a call."""
        for dataset in (self.uniform, self.ahead, self.budget, self.mixture, *self.by_priority):
            state: dict[str, Any] = dataset.state_dict()
            if dataset in self.by_priority:
                leaves = state["priorities"]["leaves"]
                assert len(leaves) >= 10, len(leaves)  # `remove` leaves as many
                assert (leaves > 0).all(), leaves
        for table in (self.table, self.late):
            table.save(f"{self.folder}/{table.name or 'late'}")

    @property
    def by_priority(self) -> tuple[gear.ReplayDataset, ...]:
        return self.prioritized, self.prioritized_ahead

    # ---------------------------------------------------------------- what is left

    def look(self) -> None:
        """Note the threads and descriptors that may be there at the end."""
        # The two readers of the disk tier may start theirs, and a dataset may prefetch at the time.
        self.most_threads = len(os.listdir("/proc/self/task")) + 2 + 2 * THREADS
        self.before = descriptors()

    def check(self) -> None:
        """Nothing is held and nothing is taken, but what an open writer is writing."""
        assert not holds_any(), "this thread holds a lock"
        self._check_another_thread()
        self.other.check()
        self._check_tickets()
        index = self.table._engine.index
        for writer in self.writers:
            writer.discard()
        self.writers.clear()
        own = (index.arrays.state == WRITING) & (index.arrays.owner[:, PID] == os.getpid())
        assert not own.any(), f"slots {np.flatnonzero(own).tolist()} are being written by no writer"
        self.table.check_valid()

    def _check_another_thread(self) -> None:
        failures: list[BaseException] = []

        def work() -> None:
            try:
                index = self.table._engine.index
                index.recovery.lock.timeout = PATIENCE
                index.recovery.locked(int)
                for dataset in (self.prioritized, self.prioritized_ahead):
                    mutex = dataset._selected().priorities.mutex
                    assert mutex.acquire(timeout=PATIENCE), "a selection's mutex is held"
                    mutex.release()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if failures:
            raise failures[0]

    def _check_tickets(self) -> None:
        # A prefetch thread may still be at work if closing its iterator was interrupted.
        end = time.monotonic() + PATIENCE
        for table in (self.table, self.late, self.tiered):
            readers = table._engine.region.array("readers")
            while (
                taken := np.flatnonzero((readers[:, PID] == os.getpid()) & (readers[:, READING] > 0))
            ).size:
                assert time.monotonic() < end, f"the tickets in rows {taken.tolist()} are left"
                time.sleep(1e-3)

    def check_end(self) -> None:
        """No thread, also of those that Python does not list, no descriptor and no more buffers than are used."""
        end = time.monotonic() + PATIENCE
        while threads := [each.name for each in threading.enumerate() if "prefetch" in each.name]:
            assert time.monotonic() < end, f"{len(threads)} threads are left"
            gc.collect()
            time.sleep(1e-2)
        gc.collect()
        while (threads := len(os.listdir("/proc/self/task"))) > self.most_threads:
            assert time.monotonic() < end, f"{threads} threads; expected {self.most_threads} at most"
            time.sleep(1e-2)
        while left := self._left():
            assert time.monotonic() < end, f"descriptors are left: {left}"
            time.sleep(1e-2)
        held = sum(issubclass(type(each), Buffers) for each in gc.get_objects())
        assert held < 150, f"{held} buffers are left"
        for table in (self.late, self.tiered):
            table.check_valid()

    def _left(self) -> dict[int, str]:
        """Descriptors that are new, and that no object owns."""
        objects = [each for each in gc.get_objects() if issubclass(type(each), (Directory, _File))]
        files = [file for each in objects if (file := getattr(each, "_file", None)) is not None]
        files = [getattr(file, "_file", file) for file in files]
        owned = [file.fileno() for file in files if not file.closed]
        return {fd: path for fd, path in descriptors() - self.before if fd not in owned}

    def close(self) -> None:
        self.other.close()
        self.table.unlink()
        for table in (self.table, self.late, self.tiered):
            table.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def descriptors() -> set[tuple[int, str]]:
    """The descriptors of this process, and the files that they are of."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the directory itself
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found


class _Other:
    """Another process, which takes the table's lock when it is asked to."""

    def __init__(self, name: str) -> None:
        (self._hear, say), (hear, self._say) = os.pipe(), os.pipe()
        parent, self._pid = os.getpid(), os.fork()
        if self._pid:
            return
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
            while os.getppid() == parent and os.read(hear, 1):
                with gear.Table.attach(name) as table:
                    table._engine.region.lock.timeout = PATIENCE
                    table._engine.region.lock.run(int)
                os.write(say, b".")
        finally:
            os._exit(1)

    def check(self) -> None:
        """Raises AssertionError unless the other process gets the lock."""
        os.write(self._say, b"?")
        assert os.read(self._hear, 1) == b".", "another process cannot have the lock"

    def close(self) -> None:
        os.close(self._say)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


# ---------------------------------------------------------------- opcodes


@functools.cache
def never_interrupted(code: types.CodeType) -> frozenset[int]:
    """Offsets of ``try``, and of the end of a with-block before the call of ``__exit__``: CPython looks for no signal.

    It looks at the beginning of functions, at backward jumps and after calls; so ``with mutex:`` of a mutex in C always
    releases it. Everywhere else, also where CPython would look for none, the trace function does raise.
    """
    instructions = list(dis.get_instructions(code))
    nowhere = ("NOP", "PUSH_EXC_INFO", "WITH_EXCEPT_START")  # the last two: an exception ends a block
    found = {one.offset for one in instructions if one.opname in nowhere}
    for i in range(len(instructions) - 3):
        three = instructions[i : i + 3]
        nones = all(one.opname in ("LOAD_CONST", "DUP_TOP") and one.argval is None for one in three)
        if nones and three[0].opname == "LOAD_CONST":
            found.update(one.offset for one in three)
            if i and instructions[i - 1].opname == "SWAP":  # `return` of a value inside the block
                found.add(instructions[i - 1].offset)
            for one in instructions[i + 3 : i + 5]:
                if one.opname.startswith(("PRECALL", "CALL")):
                    found.add(one.offset)
    return frozenset(found)


@functools.cache
def interrupted_by_signals(code: types.CodeType) -> frozenset[int]:
    """Offsets before which CPython looks for a signal: after calls, backward jumps, and the beginning of functions."""
    instructions = list(dis.get_instructions(code))
    looking = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
    after = [two.offset for one, two in itertools.pairwise(instructions) if one.opname.startswith(looking)]
    return frozenset([instructions[0].offset, *after])


def traced(call: Callable[[], object], opcode: Callable[[types.FrameType], None]) -> None:
    """Call it, and tell of each opcode inside the package before it is executed."""

    def each(frame: types.FrameType, event: str, _: Any) -> Any:
        if event == "opcode" and frame.f_lasti not in never_interrupted(frame.f_code):
            opcode(frame)
        return each

    def function(frame: types.FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(FILES):
            return None
        frame.f_trace_opcodes = True
        return each

    sys.settrace(function)
    try:
        call()
    finally:
        sys.settrace(None)


def interrupt_at(
    call: Callable[[], object], number: int, *, as_signals: bool = False
) -> BaseException | None:
    """Call it, and raise at opcode `number` inside the package; None if it has fewer.

    Args:
        as_signals: count those alone before which CPython looks for a signal. An exception at others, as in the middle
            of an ``except``, may leave the interpreter itself references that it never drops.

    Returns:
        The exception, with its traceback, which keeps all frames of the call.
    """
    left, where = number, ""

    def opcode(frame: types.FrameType) -> None:
        nonlocal left, where
        if as_signals and frame.f_lasti not in interrupted_by_signals(frame.f_code):
            return
        left -= 1
        if left == 0:
            where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name} +{frame.f_lasti}"
            raise Interruption(where)

    try:
        traced(call, opcode)
    except BaseException as error:
        # What ends a generator or a with-block may be raised in place of it.
        if left > 0:
            raise
        return error
    return Interruption(f"swallowed: {where}") if left <= 0 else None  # in a finalizer


def opcodes_of(call: Callable[[], object]) -> int:
    """Opcodes inside the package that a call executes."""
    frames: list[int] = []
    traced(call, lambda frame: frames.append(0))
    return len(frames)


def at_opcodes(names: str, count: int, seed: int) -> int:
    """Interrupt calls at `count` random opcodes each, or at every one; how often they were interrupted."""
    generator = random.Random(seed)
    done = 0
    subject = Subject()
    try:
        warm_up()
        for name in list(subject.calls) if names == "all" else names.split(","):
            call = subject.calls[name]
            for _ in range(3):
                call()
            subject.check()
            if not hasattr(subject, "before"):
                for each in subject.calls.values():
                    each()
                subject.look()
            numbers = range(1, 1 + opcodes_of(call))
            for number in sorted(generator.sample(numbers, min(count, len(numbers)))) if count else numbers:
                error = interrupt_at(call, number)
                done += error is not None
                try:
                    subject.check()
                except BaseException as failure:
                    raise AssertionError(f"{name}, opcode {number}: {error}: {failure}") from failure
                error = None
            call()
            subject.check()
        subject.check_end()
        return done
    finally:
        subject.close()


def at_states(names: str, count: int, seed: int) -> int:
    """Ask for states at `count` random opcodes of each call, as a signal handler does; how often."""
    generator, subject, done = random.Random(seed), Subject(), 0
    try:
        warm_up()
        for name in list(subject.calls) if names == "all" else names.split(","):
            call = subject.calls[name]
            call()
            subject.ask()
            for number in generator.sample(range(opcodes_of(call)), count):
                left = number

                def opcode(frame: types.FrameType) -> None:
                    nonlocal left
                    left -= 1
                    if left == 0:
                        subject.ask()

                traced(call, opcode)
                done += left <= 0
                subject.check()
        return done
    finally:
        subject.close()


# ---------------------------------------------------------------- signals


@contextlib.contextmanager
def handler(call: Callable[[int, Any], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, call)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # else what has failed ends by the signal, and is not seen
        signal.signal(signal.SIGALRM, before)


def is_interruption(error: BaseException | None) -> bool:
    """Whether an error is an interruption or came of one: in `Thread.start` CPython makes a RuntimeError of it."""
    while error is not None and not isinstance(error, Interruption):
        error = error.__context__
    return error is not None


def at_signals(count: int, seed: int) -> int:
    """Interrupt calls by signals, each after a random time."""
    generator = random.Random(seed)
    subject = Subject()
    armed = False

    def interrupt(*_: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Interruption

    try:
        warm_up()  # numba does not bear an interruption while it loads machine code
        for call in subject.calls.values():
            call()
        subject.check()
        subject.look()
        names = list(subject.calls)
        with handler(interrupt):
            for turn in range(count):
                some = generator.choices(names, k=3)
                error: BaseException | None = None
                try:
                    armed = True
                    signal.setitimer(signal.ITIMER_REAL, math.exp(generator.uniform(-11, -5)))
                    while armed:
                        for name in some:
                            subject.calls[name]()
                except BaseException as caught:
                    error = caught
                    if not is_interruption(caught):
                        raise
                signal.setitimer(signal.ITIMER_REAL, 0)
                try:
                    subject.check()
                except BaseException as failure:
                    raise AssertionError(f"turn {turn} of {some}: {failure}") from error
                error = None
                if turn % 100 == 0:
                    gc.collect()
        for call in subject.calls.values():
            call()
        subject.check()
        subject.check_end()
        return count
    finally:
        subject.close()


def run(kind: str, *options: str) -> int:
    if kind == "signals":
        return at_signals(int(options[0]), int(options[1]))
    at = {"opcodes": at_opcodes, "states": at_states}[kind]
    return at(options[0], int(options[1]), int(options[2]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for then, told in itertools.groupby(sys.argv[1:], "then".__eq__):
        if not then:
            print(run(*told))
