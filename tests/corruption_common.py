"""Tables whose index another process has written into by mistake, and a process that uses them.

Run as a program, it reads lines of JSON (a `Case`), uses the table and answers each with a line: the foreign errors.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from options_common import nested_table
from table_common import COLUMNS, fresh_name, rows

import gear_loader as gear
from gear_loader.errors import GearError
from gear_loader.storage.counters import DIRTY
from gear_loader.storage.layout import Layout
from gear_loader.storage.shared_memory import region_path

PATIENCE = 60.0
"""Seconds for one table: it takes a small part of a second on a quiet machine."""
SIZES: dict[str, Any] = {"max_steps": 400, "max_trajectories": 40, "block_steps": 4}


@dataclasses.dataclass
class Case:
    """A table of shared memory, and the word of its index that is replaced: before it is attached, or after."""

    name: str
    array: str
    place: int
    value: int
    live: bool
    seed: int


def image(seed: int, *, dirty: bool = False) -> bytes:
    """The bytes of a table with trajectories in all states: ready, being written, cut from one stream, retired."""
    random = np.random.default_rng(seed)
    policy: Any = ("evict_oldest", "evict_lowest_priority", "error", "wait")[seed % 4]
    with gear.Table.create(
        COLUMNS, **nested_table({**SIZES, "name": fresh_name(), "on_full": policy, "timeout": 0.05})
    ) as table:
        try:
            for number in range(18):
                table.add(rows(number, int(random.integers(1, 16))), priority=float(random.integers(0, 5)))
            table.remove(table.indices()[[2, 5, 6]])
            stream, other = table.writer(chunk_steps=8, overlap_steps=4), table.writer()
            for value in range(22):
                stream.append({name: column[0] for name, column in rows(100 + value, 1).items()})
            other.append(rows(99, 7))
            ticket = table._engine.reader().begin_read()
            table.remove(table.indices()[[1, 3]])
            if dirty:
                table._engine.region.array("counters")[DIRTY] = 1
            data = Path(region_path(table.name or "")).read_bytes()
            table._engine.region.array("counters")[DIRTY] = 0
            ticket.end()
            return data
        finally:
            table.unlink()


def corruption(layout: Layout, data: bytes, name: str, seed: int, *, live: bool) -> Case:
    """Some word of the index, and what to write there."""
    random = np.random.default_rng(seed)
    array = str(
        random.choice([each for each, (_, _, shape) in layout.arrays.items() if each != "ident" and shape[0]])
    )
    offset, dtype, shape = layout.arrays[array]
    count = int(np.prod(shape))
    # Half of the words are among those that are surely used.
    place = int(
        random.integers(0, min(count, 55 if array == "counters" else 12) if random.random() < 0.5 else count)
    )
    size = dtype.itemsize
    before = int.from_bytes(data[offset + place * size : offset + (place + 1) * size], "little", signed=True)
    value = [
        int(random.integers(-(2**63), 2**63 - 1)),
        *(-1, 0, 1, 2, layout.max_trajectories, layout.num_blocks, 2**31 - 1, -(2**31), 2**40, 2**62),
        *(before + 1, before - 1, before ^ 1 << int(random.integers(0, 8 * size)), before + 2**20),
    ][random.integers(0, 15)]
    return Case(name, array, place, int(np.int64(value & 2**63 - 1)) * (1 if value >= 0 else -1), live, seed)


def write(words: np.ndarray[Any, Any], case: Case) -> None:
    """Replace the word: the lowest bytes of the value."""
    size = words.dtype.itemsize
    value = (case.value & 2**64 - 1).to_bytes(8, "little")[:size]
    words.reshape(-1)[case.place] = np.frombuffer(value, dtype=words.dtype)[0]


@contextlib.contextmanager
def region(data: bytes, case: Case, layout: Layout) -> Iterator[None]:
    """The case's file in shared memory."""
    changed = bytearray(data)
    if not case.live:
        offset, dtype, shape = layout.arrays[case.array]
        write(np.frombuffer(changed, dtype=dtype, count=int(np.prod(shape)), offset=offset), case)
    path = region_path(case.name)
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(changed)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


# The process that uses the table ---------------------------------------------------------------------


def use(case: Case) -> list[str]:
    """Attach, read, draw, add, write, remove, close; what was raised that is no error of Gear Loader."""
    foreign: list[str] = []

    def attempt(what: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except GearError:
            return None
        except BaseException as error:
            foreign.append(f"{what}: {type(error).__name__}: {error}")
            return None

    policy: Any = ("error", "evict_oldest", "evict_lowest_priority", "wait")[case.seed // 4 % 4]
    table = attempt("attach", lambda: gear.Table.attach(case.name, on_full=policy, timeout=0.02))
    if table is None:
        return foreign
    sampler = SAMPLERS[case.seed % 6]

    def dataset() -> Any:
        return gear.ReplayDataset(table, batch_size=16, windows=gear.Window(9, -4), sampler=sampler, seed=1)

    drawn = attempt("dataset", dataset) if case.live else None
    if drawn is not None:
        attempt("sample before", drawn.sample)
    if case.live:
        write(table._engine.region.array(case.array), case)
    if drawn is None:
        drawn = attempt("dataset", dataset)
    batch = attempt("sample", drawn.sample) if drawn is not None else None
    if batch is not None and sampler.__class__ is gear.Prioritized:
        attempt("update", lambda: drawn.update_priority(batch, torch.ones(16)))
    for what, action in {
        "look": lambda: (len(table), table.stats(), repr(table)),
        "get": lambda: [table[int(index)] for index in table.indices()],
        "add": lambda: table.add(rows(1, 13), priority=2.0),
        "extend": lambda: table.extend([rows(2, 5), rows(3, 90)]),
        "write": lambda: _write(table),
        "remove": lambda: table.remove(table.indices()[:3]),
        "sample again": lambda: drawn.sample() if drawn is not None else None,
        "fill": lambda: [table.add(rows(4, 30)) for _ in range(20)],
        "sample last": lambda: drawn.sample() if drawn is not None else None,
        "close": table.close,
    }.items():
        attempt(what, action)
    return foreign


def _write(table: gear.Table) -> None:
    with table.writer(chunk_steps=8, overlap_steps=4) as writer:
        for _ in range(5):
            writer.append(rows(5, 3))
        writer.commit(1.0)


def main() -> None:
    """Serve cases until the input ends."""
    for line in sys.stdin:
        print(json.dumps(use(Case(**json.loads(line)))), flush=True)


# The one that starts it ------------------------------------------------------------------------------


class User:
    """A process that uses tables; started again when it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def use(self, case: Case) -> list[str]:
        """What was raised that is no error of Gear Loader, or how the process died."""
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(dataclasses.asdict(case)).encode() + b"\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        line = self._process.stdout.readline() if ready else b""
        if line:
            found: list[str] = json.loads(line)
            return found
        self.close()
        return ["the process died" if ready else f"no answer in {PATIENCE:g} s"]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


SAMPLERS: tuple[Any, ...] = (
    *(gear.Uniform(), gear.Prioritized(unit="step"), gear.Prioritized()),
    *(gear.Uniform(unit="step"), gear.Fifo(), gear.TopK()),
)


def storm(count: int, first: int = 0) -> dict[str, list[Case]]:
    """Use so many corrupt tables: what happened that must not, and to which cases."""
    images = [image(seed, dirty=seed % 4 == 3) for seed in range(8)]
    user, found = User(), collections.defaultdict(list)
    try:
        for seed in range(first, first + count):
            data = images[seed % len(images)]
            layout = Layout.read(data[: 1 << 20], len(data), "an image")
            case = corruption(layout, data, fresh_name(), seed, live=seed % 2 == 1)
            with region(data, case, layout):
                for what in user.use(case):
                    found[what].append(case)
    finally:
        user.close()
    return dict(found)


if __name__ == "__main__":
    main()
