"""Adding by several processes to a table in shared memory, or to another library's store: `online`, `single-server`.

An item of adding is a trajectory or a step; its seconds are the window of a measurement divided by what all writers of
the variant have added in it. So rates are totals over all writers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import gear_loader as gear
from benchmarks.harness import Incorrect, Session, Variant
from benchmarks.peers.catalog import library_of, peers_of
from benchmarks.peers.gear import PATIENCE
from benchmarks.peers.online import item_of, trajectories_of
from benchmarks.peers.process import PeerFailed, PeerProcess, Undo, receive_all, start
from benchmarks.workloads import Workload
from gear_loader.errors import RegionError
from gear_loader.storage.limiters import RateLimiter
from gear_loader.storage.shared_memory import region_path

GOALS = {"whole": 40_000, "steps": 100_000}
"""Items a second that one process should reach."""
SHARE_OF_MEMCPY = 0.7
"""Of batches, in one process."""
SOURCES = 128
PEERS = peers_of("online")
_OWN = {"memcpy": "gear", "torch": "plain", "ours": "gear"}
_LEAD = 0.03  # seconds between telling writers to start and their start


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is measured.

    workload: what is added, and how much a table holds of it. modes: of `peers.online.MODES`. writers: how many at a
    time when adding; readers_writers: while reading. batch: trajectories of a call of `extend`. rows: of a batch that
    is read. items: of tables whose priorities are set. window: seconds of a measurement.
    """

    workload: Workload
    block_steps: int = 100
    modes: tuple[str, ...] = ("whole", "batches", "steps", "chunks 10", "chunks 50")
    writers: tuple[int, ...] = (1, 2, 4, 8)
    readers_writers: tuple[int, ...] = (0, 1, 2)
    batch: int = 64
    rows: int = 256
    items: tuple[int, ...] = (10**5, 10**6)
    window: float = 0.4
    seed: int = 3

    @property
    def spec(self) -> dict[str, Any]:
        return specify(self.workload, batch=self.batch, seed=self.seed)

    @property
    def step_bytes(self) -> int:
        """Bytes of a step in all columns."""
        return sum(column.step_bytes for column in self.workload.schema.values())

    def parameters(self, workload: Workload | None = None) -> dict[str, Any]:
        """What rows say of all of it."""
        workload = workload or self.workload
        return {
            "window": self.window,
            "trajectories": workload.trajectories,
            "steps": workload.steps,
            "block_steps": self.block_steps,
        }


def specify(workload: Workload, *, batch: int, seed: int) -> dict[str, Any]:
    """What writers are told about what they write; see `peers.online.Subject`."""
    return {
        "columns": {name: list(shape) for name, shape in workload.columns},
        "steps": workload.steps,
        "trajectories": workload.trajectories,
        "sources": min(SOURCES, workload.trajectories // 2),
        "batch": min(batch, workload.trajectories // 4),
        "seed": seed,
    }


class TableCache(Undo):
    """Tables in shared memory, whose names are gone afterwards, even if this process is killed."""

    @contextlib.contextmanager
    def table(
        self, workload: Workload, *, block_steps: int, limiter: RateLimiter | None = None
    ) -> Iterator[gear.Table]:
        """An empty table that evicts the oldest trajectories, for so many of the workload's.

        A tenth more blocks and places than these need lets writers go on while a reader keeps evicted ones.
        """
        name = f"bench-online-{os.getpid()}-{secrets.token_hex(4)}"
        self.add("rm", "-f", region_path(name))
        places = workload.trajectories + workload.trajectories // 10
        lengths = np.full(places, workload.steps)
        table = gear.Table.create(
            workload.schema,
            max_steps=workload.trajectories * workload.steps,
            max_trajectories=places,
            block_steps=block_steps,
            memory=gear.Memory(max_blocks=gear.Table.required_blocks(lengths, block_steps)),
            name=name,
            on_full="evict_oldest",
            rate_limiter=limiter,
            timeout=10.0 if limiter is None else PATIENCE,
        )
        try:
            yield table
        finally:
            with contextlib.suppress(RegionError):
                table.unlink()
            table.close()


class Crew:
    """Processes of one kind, started when they are needed and kept for everything that follows.

    task: module of `benchmarks.peers`. prefix: words before their commands, which run them elsewhere.
    """

    def __init__(
        self,
        name: str,
        folder: Path | None = None,
        *,
        library: str | None = None,
        task: str = "online",
        prefix: Sequence[str] = (),
    ) -> None:
        library = library or _OWN.get(name) or library_of(task, name)
        self._make = functools.partial(start, folder, task, library, name, prefix=prefix)
        self._processes: list[PeerProcess] = []

    def start(self, count: int = 1) -> Sequence[PeerProcess]:
        while len(self._processes) < count:
            self._processes.append(self._make())
        return self._processes[:count]

    def close(self) -> None:
        while self._processes:
            self._processes.pop().close()


@contextlib.contextmanager
def crews_of(
    session: Session, what: str = "", *, others: bool = True
) -> Iterator[tuple[dict[str, Crew], TableCache]]:
    """The yardsticks, ours, and the peers that there are; and tables."""
    with contextlib.ExitStack() as stack:
        crews = {name: Crew(name) for name in _OWN}
        for name in PEERS if others else ():
            crew = Crew(name, session.peers)
            if session.attempt(f"{name}{what}", crew.start) is not None:
                crews[name] = crew
        for crew in crews.values():
            stack.callback(crew.close)
        yield crews, stack.enter_context(TableCache())


class Group:
    """Writers that add at the same time, each in its process.

    table: where to, if they are this project's; others make their own store. target: the table that yardsticks copy
    into. fill: make the store full first. address: where the store is; by default the name of the table. store: a
    process that makes the store and fills it, but does not write. answers: of the writers, to the last measurement.
    """

    def __init__(
        self,
        crew: Crew,
        spec: Mapping[str, Any],
        mode: str,
        writers: int,
        *,
        table: gear.Table | None = None,
        target: gear.Table | None = None,
        fill: bool = True,
        address: Any = None,
        store: PeerProcess | None = None,
    ) -> None:
        self._crew, self._spec, self._mode, self._table = crew, spec, mode, table
        self._processes = crew.start(writers)
        self._all = [*([] if store is None else [store]), *self._processes]
        place = table if table is not None else target
        if address is None and place is not None:
            address = place.name
        self.answers: list[dict[str, Any]] = []
        for number, process in enumerate(self._all):
            arguments = {"spec": spec, "mode": mode, "number": number, "of": writers, "address": address}
            address = process.ask("build", **arguments)["address"]
        if fill:
            self._together("fill")

    def start(self, seconds: float) -> float:
        """Tell all of them to add for so many seconds, and return when they start, on the monotonic clock."""
        begin = time.monotonic() + _LEAD
        for process in self._processes:
            process.send("run", begin=begin, seconds=seconds)
        return begin

    def rate(self) -> float:
        """Wait until they are ready: items a second, of all of them together."""
        return _rate(receive_all(self._processes))

    def measure(self, seconds: float) -> float:
        """Seconds that an item takes, of those that all of them add in so many seconds."""
        before = self._inserted()
        self.start(seconds)
        answers = self.answers = receive_all(self._processes)
        items = sum(answer["items"] for answer in answers)
        if self._table is not None:
            expected = items // (1 if item_of(self._mode) == "trajectory" else self._spec["steps"])
            arrived = self._inserted() - before
            if arrived != expected:
                raise Incorrect(f"{arrived} trajectories have arrived, of {expected}")
        return 1 / _rate(answers)

    def check(self) -> None:
        """Raise `Incorrect` unless what they add is what the store has."""
        if self._table is None:
            try:
                for process in self._processes:  # in turn: each counts what arrives
                    process.ask("check")
            except PeerFailed as error:
                raise Incorrect(str(error)) from error
            return
        self.measure(0.05)
        table, spec = self._table, self._spec
        table.check_valid()
        if len(table) < spec["trajectories"] - len(self._processes):  # each writer may hold a place
            raise Incorrect(f"the table holds {len(table)} trajectories instead of {spec['trajectories']}")
        newest = table.indices()[-4 * SOURCES :]
        rows = [table[int(index)] for index in newest]
        try:
            trajectories_of(spec).verify(
                {n: np.stack([row[n].numpy() for row in rows]) for n in spec["columns"]}
            )
        except ValueError as error:
            raise Incorrect(str(error)) from error

    def close(self) -> None:
        """Give back what they hold; the processes stay."""
        with contextlib.suppress(PeerFailed):
            self._together("close")

    def _inserted(self) -> int:
        return 0 if self._table is None else self._table.stats().num_inserted

    def _together(self, what: str) -> None:
        for process in self._all:
            process.send(what)
        receive_all(self._all)


def _rate(answers: Sequence[Mapping[str, Any]]) -> float:
    return float(sum(answer["items"] / answer["seconds"] for answer in answers))


_LABELS = {
    "whole": "whole trajectories one by one",
    "batches": "whole trajectories in batches",
    "steps": "single steps",
    "chunks 10": "10 steps at a time",
    "chunks 50": "50 steps at a time",
}


def inserting(
    session: Session, setting: Setting, crews: Mapping[str, Crew], tables: TableCache, part: str = ""
) -> None:
    """Adding in every mode by so many writers; `part` is its name where it belongs to another experiment."""
    pairs = list(itertools.product(setting.modes, setting.writers))
    with contextlib.ExitStack() as stack:
        places = [tables.table(setting.workload, block_steps=setting.block_steps) for _ in range(2)]
        table, target = map(stack.enter_context, places)
        given = {"ours": {"table": table}, "memcpy": {"target": target}}
        for mode, writers in session.each("adding", pairs, _label):
            with contextlib.ExitStack() as groups:
                label = _label((mode, writers))
                variants = _adding(session, setting, crews, mode, writers, label, given, groups)
                batch = setting.spec["batch"] if mode == "batches" else None
                told = {"writers": writers, "item": item_of(mode), **setting.parameters(), "batch": batch}
                if part:
                    told, label = {**told, "part": part, "mode": mode}, f"adding, {label}"
                session.compare(part or mode, label, variants, "memcpy", told)


def _label(pair: tuple[str, int]) -> str:
    mode, writers = pair
    return f"{_LABELS.get(mode, mode)}, {writers} {'writer' if writers == 1 else 'writers'}"


def _adding(
    session: Session,
    setting: Setting,
    crews: Mapping[str, Crew],
    mode: str,
    writers: int,
    label: str,
    places: Mapping[str, Any],
    groups: contextlib.ExitStack,
) -> list[Variant]:
    item, variants = item_of(mode), []
    amount = setting.step_bytes * (1 if item == "step" else setting.workload.steps)
    for name, crew in crews.items():
        kind = PEERS.get(name)
        alone = name == "torch" or (kind is not None and not kind.several)
        if (alone and writers > 1) or (kind is not None and mode not in kind.modes):
            continue  # it has no call for that; the docstring of `online` says so
        made = functools.partial(Group, crew, setting.spec, mode, writers, **places.get(name, {}))
        group = session.attempt(f"{name}, {label}", made, required=kind is None)
        if group is None:
            continue
        groups.callback(group.close)
        measure = functools.partial(group.measure, setting.window)
        about = {} if kind is None else {"peer": crew.start()[0].about}
        variant = Variant(name, measure, group.check, amount, 1, about, required=kind is None)
        if name == "ours" and writers == 1:
            variant.limit = 1 / GOALS[mode] if mode in GOALS else None
            variant.targets = {"memcpy": SHARE_OF_MEMCPY} if mode == "batches" else {}
        variants.append(variant)
    return variants
