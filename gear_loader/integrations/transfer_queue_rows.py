"""Samples of TransferQueue in a table: a trajectory for each sample of a put, a step for each of its fields.

::

    row      per trajectory: the global index of the sample; -1 of a trajectory that describes a set of fields
    fields   per trajectory: number of the set of fields, see `transfer_queue_fields.described`
    value    ragged: step 0 has the name of the sample (partition, key, tag), step i the bytes of field i

Fields that come later are one more trajectory; of a field that is there twice, the newest counts. Every process follows
the table by itself, so nothing has to be told to others, and what is in the table is all that there is to recover.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gear_loader.errors import StaleIndexError
from gear_loader.integrations.transfer_queue_fields import (
    ROWS,
    SCALAR,
    FieldValues,
    Jagged,
    SampleField,
    described,
    read_description,
    value_of,
)
from gear_loader.storage.incoming import Steps, checked_priorities
from gear_loader.storage.ragged import Ragged
from gear_loader.storage.ragged_input import Payload
from gear_loader.storage.readers import Ticket
from gear_loader.storage.schema import Column, Window
from gear_loader.storage.snapshot import Snapshot
from gear_loader.storage.states import READY
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

SCHEMA = {
    "value": Column(torch.uint8, (None,)),
    "row": Column(torch.int64, per="trajectory"),
    "fields": Column(torch.int64, per="trajectory"),
}
BLOCK_STEPS = 8
_ATTEMPTS = 100
_AT_ONCE = 256  # samples that `Rows.samples` reads at a time
_WINDOW = {"value": Window(1)}


class Samples(NamedTuple):
    """Samples that are in the table, with the same set of fields.

    Attributes:
        fields: of the samples. rows: int64 [n], their global indexes. names: bytes of each.
        sizes: int64 [n, F], bytes of each value.
    """

    fields: tuple[SampleField, ...]
    rows: Array
    names: list[bytes]
    sizes: Array


class _Set(NamedTuple):
    fields: tuple[SampleField, ...]
    steps: dict[str, int]


class Rows:
    """Reads and writes samples of one table; every process has its own. Several threads can use it.

    Args:
        table: with the columns `SCHEMA`, all of it in memory.

    Attributes:
        value_bytes: mean bytes of a value in the last read; infinite before the first.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.value_bytes = float("inf")
        count = table._engine.index.arrays.num_slots
        self._lock = threading.RLock()
        self._sets: dict[int, _Set] = {}
        # Generation, row and set of fields of each slot.
        self._known: Array = np.full((3, count), -2, dtype=np.int64)
        self._snapshot: Snapshot | None = None
        self._numbers: Array = np.empty(0, dtype=np.int64)  # set of fields of each trajectory of the snapshot
        self._places: dict[int, Array] = {}  # set of fields -> trajectory of the snapshot, by row; -1

    # ---------------------------------------------------------------- following the table

    def _follow(self) -> Snapshot:
        """The trajectories that are there now."""
        reader, old = self.table._engine.reader(), self._snapshot
        snapshot = reader.snapshot()
        if old is not None and old.version == snapshot.version:
            return old
        self._snapshot = None  # until all of it is known
        while not self._read(snapshot):
            snapshot = reader.snapshot()
        self._place(snapshot, len(old) if old is not None and _is_longer(old, snapshot) else 0)
        self._snapshot = snapshot
        return snapshot

    def _read(self, snapshot: Snapshot) -> bool:
        """Read what is not known of the trajectories of a snapshot; return whether none was removed meanwhile."""
        arrays, (generations, rows, numbers) = self.table._engine.index.arrays, self._known
        fresh = np.flatnonzero(generations[snapshot.slots] != snapshot.generations)
        new, since = snapshot.slots[fresh], snapshot.generations[fresh]
        found, number = self._once("row", new), self._once("fields", new)
        there = (arrays.state[new] == READY) & (arrays.generation[new] == since)
        if not there.all():
            return False
        rows[new], numbers[new] = found, number
        for slot in new[found == -1].tolist():
            self._learn(int(numbers[slot]), slot)
        generations[new] = since
        return True

    def _once(self, name: str, slots: Array) -> Array:
        """Values of a column per trajectory, int64 [n]."""
        engine = self.table._engine
        data, arrays = engine.region.column(name), engine.index.arrays
        blocks = arrays.block_ids[np.clip(arrays.extent[slots, 1], 0, len(arrays.block_ids) - 1)]
        found = np.ascontiguousarray(data[np.clip(blocks, 0, len(data) - 1), 0])
        values: Array = found.view(np.int64).reshape(-1)
        return values

    def _learn(self, number: int, slot: int) -> None:
        if number not in self._sets:
            try:
                text = self.table[slot]["value"][0].numpy().tobytes()
            except StaleIndexError:
                return
            self._sets[number] = _set_of(read_description(text))

    def _place(self, snapshot: Snapshot, known: int) -> None:
        """Say where each row is, of the trajectories from `known` on."""
        if not known:
            self._places = {}
        slots = snapshot.slots[known:]
        rows, numbers = self._known[1, slots], self._known[2, slots]
        self._numbers = np.concatenate((self._numbers[:known], numbers))
        most = int(rows.max(initial=-1)) + 1
        for number in np.unique(numbers[rows >= 0]).tolist():
            place = self._places.get(number)
            if place is None or len(place) < most:
                longer: Array = np.full(2 * most, -1, dtype=np.int64)
                if place is not None:
                    longer[: len(place)] = place
                self._places[number] = place = longer
            at = np.flatnonzero((numbers == number) & (rows >= 0))
            place[rows[at]] = known + at  # oldest first, so that the newest counts

    def _newest(self, numbers: Sequence[int], rows: Array) -> Array:
        """Newest trajectory of the snapshot that has one of some sets of fields, of each row, int64 [n]; -1 if none."""
        found: Array = np.full(len(rows), -1, dtype=np.int64)
        for number in numbers:
            place = self._places[number]
            inside = rows < len(place)
            np.maximum(found, np.where(inside, place[np.where(inside, rows, 0)], -1), out=found)
        return found

    # ---------------------------------------------------------------- writing

    def put(self, rows: Array, values: Sequence[FieldValues], names: Sequence[bytes]) -> None:
        """Store fields of samples; when it returns, every process reads them.

        Args:
            rows: int64 [n], global indexes. values: of each field. names: of the samples.

        Raises:
            As `Table.extend`. Nothing was stored.
        """
        if not len(rows):
            return
        fields = tuple(each.field for each in values)
        number, text = described(fields)
        with self._lock:
            snapshot = self._follow()
            old = self._superseded(rows, {field.name for field in fields})
            if number not in self._sets:
                self._store(np.array([-1]), number, [text], ())
                self._sets[number] = _set_of(fields)
        self._store(rows, number, names, values)
        self._remove(snapshot, old)

    def _superseded(self, rows: Array, names: set[str]) -> Array:
        """Trajectories of the snapshot of which every field is to be stored anew."""
        found: list[Array] = [np.empty(0, dtype=np.int64)]
        for number, place in self._places.items():
            if number in self._sets and names.issuperset(self._sets[number].steps):
                found.append(place[rows[rows < len(place)]])
        old: Array = np.unique(np.concatenate(found))
        return old[old >= 0]

    def _store(self, rows: Array, number: int, names: Sequence[bytes], values: Sequence[FieldValues]) -> None:
        engine = self.table._engine
        count, width = len(rows), 1 + len(values)
        lengths = np.array([len(name) for name in names], dtype=np.int64)
        data: Array = np.frombuffer(b"".join(names), dtype=np.uint8)
        sizes, addresses = (np.empty((count, width), dtype=np.int64) for _ in range(2))
        sizes[:, 0], addresses[:, 0] = lengths, data.ctypes.data + np.cumsum(lengths) - lengths
        for i, each in enumerate(values, 1):
            sizes[:, i], addresses[:, i] = each.sizes, each.addresses
        records: Array = np.zeros((count, width, 2), dtype=np.int64)
        once = {"row": np.ascontiguousarray(rows, dtype=np.int64), "fields": np.full(count, number)}
        places = {name: (array.ctypes.data, 8) for name, array in once.items()}
        places["value"] = records.ctypes.data, 16 * width
        at = np.arange(count)
        where = np.stack([places[name][0] + at * places[name][1] for name in engine.schema], axis=1)
        runs = np.stack((at, at * width, (at + 1) * width), axis=1)
        flat = sizes.reshape(-1)
        payload = Payload(runs, flat, flat, addresses.reshape(-1), records.reshape(-1, 2), None)
        steps = Steps(where, np.full(count, width), (once, records, data, values), payload)
        engine.store_steps(steps, checked_priorities(None, count))

    def remove(self, rows: Array) -> None:
        """Remove samples, as far as they are there."""
        with self._lock:
            snapshot = self._follow()
            old = np.flatnonzero(np.isin(self._known[1, snapshot.slots], rows[rows >= 0]))
        self._remove(snapshot, old)

    def _remove(self, snapshot: Snapshot, at: Array) -> None:
        if len(at):
            self.table.remove(snapshot.slots[at], generation=snapshot.generations[at], stale="ignore")

    # ---------------------------------------------------------------- reading

    def get(self, rows: Array, names: Sequence[str]) -> dict[str, torch.Tensor | list[Any]]:
        """Copies of fields of samples; each value is that of one put.

        Args:
            rows: int64 [n], global indexes. names: of the fields.

        Returns:
            Name -> ``[n]`` of scalars, a jagged tensor of tensors with the same dtype and shape of a row, else a list.

        Raises:
            KeyError: a sample does not have a field.
        """
        if not len(rows):
            return {name: [] for name in names}
        for attempt in range(_ATTEMPTS):
            try:
                return self._try_to_get(rows, names)
            except StaleIndexError:  # somebody has put it again, or removed it
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError

    def _try_to_get(self, rows: Array, names: Sequence[str]) -> dict[str, Any]:
        with self._lock:
            snapshot = self._follow()
            wanted = self._find(names, rows)
        order = sorted(range(len(names)), key=lambda i: -wanted[i].item)  # so that all are aligned
        places = np.concatenate([wanted[i].places for i in order])
        steps = np.concatenate([wanted[i].steps for i in order])
        values, offsets = self._read_values(snapshot.slots[places], steps, snapshot.generations[places])
        self.value_bytes = len(values) / len(steps)
        count, jagged = len(rows), Jagged()
        return {
            names[i]: wanted[i].made(values, offsets[at * count : (at + 1) * count + 1], jagged)
            for at, i in enumerate(order)
        }

    def _read_values(self, slots: Array, steps: Array, generations: Array) -> tuple[torch.Tensor, Array]:
        """Copies of the values of some steps, one after another, and where each begins, int64 [n + 1].

        Raises:
            StaleIndexError: a trajectory is not there any longer.
        """
        engine, ticket = self.table._engine, Ticket()
        arrays = engine.index.arrays

        def read() -> Ragged:
            engine.reader().begin_read(ticket)
            if not ((arrays.state[slots] == READY) & (arrays.generation[slots] == generations)).all():
                raise StaleIndexError("Samples were removed before they were read.")
            blocks = arrays.block_ids[arrays.extent[slots, 1] + steps // BLOCK_STEPS]
            records = engine.region.column("value")[blocks, steps % BLOCK_STEPS].view(np.int64)
            found: Ragged = engine.payload.read(
                engine.schema.ragged["value"], records, (len(slots),), slots=slots
            )
            return found

        found = ticket.during(read)
        return found.values, found.offsets.numpy()

    def _find(self, names: Sequence[str], rows: Array) -> list[_Wanted]:
        """Where the fields of these names are. Those that lie in the same sets of fields are searched for once."""
        found: list[_Wanted] = []
        searched: dict[tuple[int, ...], tuple[Array, list[_Set], Array]] = {}
        for name in names:
            numbers = tuple(number for number in self._places if name in self._sets[number].steps)
            if numbers not in searched:
                places = self._newest(numbers, rows)
                if (places < 0).any():
                    raise KeyError(f"field {name!r} of the samples {rows[places < 0].tolist()}")
                which = self._numbers[places]
                used = sorted(each for each in numbers if (which == each).any())
                searched[numbers] = places, [self._sets[each] for each in used], np.searchsorted(used, which)
            places, sets, which = searched[numbers]
            steps = [each.steps[name] for each in sets]
            kinds = [each.fields[step - 1] for each, step in zip(sets, steps, strict=True)]
            found.append(_Wanted(kinds, which, places, np.array(steps, dtype=np.int64)[which]))
        return found

    def samples(self) -> Iterator[Samples]:
        """All that is there, oldest first: at a time samples with the same fields."""
        with self._lock:
            snapshot = self._follow()
            rows, numbers, sets = self._known[1, snapshot.slots], self._numbers, dict(self._sets)
        bounds = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1))
        runs = ((i, j) for i, end in itertools.pairwise(bounds.tolist()) for i, j in _pieces(i, end))
        for begin, end in runs:
            fields = sets[int(numbers[begin])].fields
            at = begin + np.flatnonzero(rows[begin:end] >= 0)
            width = 1 + len(fields)
            chosen, steps = np.repeat(snapshot.slots[at], width), np.tile(np.arange(width), len(at))
            if not len(at):
                continue
            found = self.table.gather(chosen, steps, windows=_WINDOW)["value"]
            sizes = found.lengths.numpy().reshape(len(at), width)
            data, ends = found.values.numpy(), found.offsets.numpy()[::width]
            begins = zip(ends[:-1].tolist(), sizes[:, 0].tolist(), strict=True)
            names = [data[first : first + size].tobytes() for first, size in begins]
            yield Samples(fields, rows[at], names, sizes[:, 1:])


def _pieces(begin: int, end: int) -> list[tuple[int, int]]:
    return [(i, min(i + _AT_ONCE, end)) for i in range(begin, end, _AT_ONCE)]


class _Wanted(NamedTuple):
    """Where the values of a field are.

    Attributes:
        kinds: what they are, one or several. which: int64 [n], of each sample.
        places: int64 [n], trajectories of the snapshot. steps: int64 [n], theirs.
    """

    kinds: list[SampleField]
    which: Array
    places: Array
    steps: Array

    @property
    def item(self) -> int:
        return self.kinds[0].item if self.alike else 1

    @property
    def alike(self) -> bool:
        """Whether they are delivered as one tensor."""
        return self.kinds[0].kind in (SCALAR, ROWS) and len(set(self.kinds)) == 1

    def made(self, data: torch.Tensor, offsets: Array, jagged: Jagged) -> torch.Tensor | list[Any]:
        if self.alike:
            return jagged.joined(self.kinds[0], data, offsets)
        bounds = zip(offsets[:-1].tolist(), offsets[1:].tolist(), self.which.tolist(), strict=True)
        return [value_of(self.kinds[kind], data[i:j]) for i, j, kind in bounds]


def _set_of(fields: tuple[SampleField, ...]) -> _Set:
    return _Set(fields, {field.name: i for i, field in enumerate(fields, 1)})


def _is_longer(old: Snapshot, new: Snapshot) -> bool:
    """Whether trajectories were added only."""
    count = len(old)
    return len(new) >= count and bool(
        (new.sequences[:count] == old.sequences).all() and (new.generations[:count] == old.generations).all()
    )
