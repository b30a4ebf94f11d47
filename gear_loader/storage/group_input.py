"""Trajectories that have the values per group of others with the same value of a column: `prefix` of `Table.extend`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gear_loader.errors import SchemaError, StaleIndexError
from gear_loader.storage.disk import LostRowsError
from gear_loader.storage.incoming import checked_priorities
from gear_loader.storage.ragged_input import copied_ragged
from gear_loader.storage.readers import Ticket
from gear_loader.storage.schema import as_mapping
from gear_loader.storage.states import READY
from gear_loader.utils.arrays import Array, on_host, shown

if TYPE_CHECKING:
    from gear_loader.storage.engine import Engine

_ATTEMPTS = 10
"""Times that others may evict what trajectories are stored with before it is an error."""

Store = Callable[[list[Any], Any, Array | None, Any], Array]
"""Stores trajectories, with their priorities, prefixes (None: of none) and the generations of these; their slots."""


class GroupColumn:
    """Finds trajectories of a table by their value of a column per trajectory.

    Args:
        engine: of the table. name: of the column.

    Raises:
        SchemaError: it is none, or the table has no columns per group, or shares nothing.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        schema = engine.schema
        column = schema.get(name)
        fits = column is not None and name in schema.per_trajectory and column.ragged is None
        if not fits or column is None or column.numpy_dtype is None or column.late:
            raise SchemaError(
                f"prefix is {name!r}; expected the index of a trajectory, or the name of a column with "
                "per='trajectory' of a fixed size, such as an int64."
            )
        if not schema.per_group or not engine.region.layout.prefixes:
            raise SchemaError(
                f"prefix is {name!r}, and the table has the columns per group {list(schema.per_group)}; expected some, "
                "and memory=gear_loader.Memory(prefixes=True)."
            )
        self.name, self._engine, self._column = name, engine, column
        self._known: dict[bytes, tuple[int, int]] = {}
        # Generations and values of trajectories that have lain on disk, by slot.
        self._away: tuple[Array, Array] | None = None

    def key_of(self, trajectory: Any) -> bytes | None:
        """The bytes of its value; None of one that does not fit."""
        rows = as_mapping(trajectory)
        value = rows.get(self.name) if isinstance(rows, Mapping) else None
        if value is None:
            return None
        dtype: Any = self._column.numpy_dtype
        try:
            (found,) = on_host({"value": value})
            array = np.asarray(found["value"])
            if array.shape == self._column.shape and np.can_cast(array.dtype, dtype, "same_kind"):
                return array.astype(dtype).tobytes()
            return None  # or it is refused when it is stored
        except (TypeError, ValueError, OverflowError):
            return None

    def find(self, keys: Sequence[bytes]) -> dict[bytes, tuple[int, int]]:
        """Slot and generation of a trajectory with each of the values, as far as there are any: before it is used, the
        generation has to be looked at under a read ticket."""
        arrays = self._engine.index.arrays
        found = {key: self._known[key] for key in set(keys) if key in self._known}
        for key, (slot, generation) in list(found.items()):
            if arrays.state[slot] != READY or arrays.generation[slot] != generation:
                del found[key], self._known[key]
        if missing := set(keys).difference(found):
            found |= self._search(missing)
        return found

    def _search(self, keys: set[bytes]) -> dict[bytes, tuple[int, int]]:
        arrays = self._engine.index.arrays
        slots = np.flatnonzero(arrays.state == READY)
        generations = arrays.generation[slots].copy()
        ticket = Ticket()
        if arrays.moves:  # else blocks of those that move may go to others meanwhile
            self._engine.reader().begin_read(ticket)
        values = ticket.during(lambda: self._values(slots, generations))
        still = (arrays.state[slots] == READY) & (arrays.generation[slots] == generations)
        kind = np.dtype((np.void, values.shape[1]))
        wanted = np.isin(values.view(kind)[:, 0], np.array([*keys], dtype=kind)) & still
        # The last that is found stays: one in memory, if there is one.
        order = np.argsort(arrays.extent[slots, 1] >= 0, kind="stable")
        found = {
            values[i].tobytes(): (int(slots[i]), int(generations[i])) for i in order[wanted[order]].tolist()
        }
        if len(self._known) > 2 * arrays.num_slots:
            self._known.clear()
        self._known.update(found)
        return found

    def _values(self, slots: Array, generations: Array) -> Array:
        """Values of trajectories, uint8 [n, bytes]; those of trajectories on disk are read there once."""
        arrays = self._engine.index.arrays
        places = arrays.extent[slots, 1]
        blocks = arrays.block_ids[np.clip(places, 0, len(arrays.block_ids) - 1)]
        data = self._engine.region.column(self.name)
        values: Array = np.ascontiguousarray(data[np.clip(blocks, 0, len(data) - 1), 0])
        away = places < 0
        if not away.any():
            return values
        size = values.shape[1]
        if self._away is None:
            self._away = (
                np.full(arrays.num_slots, -1, dtype=np.int64),
                np.empty((arrays.num_slots, size), np.uint8),
            )
        since, kept = self._away
        which = np.flatnonzero(away & (since[slots] != generations))
        while len(which):
            chosen, out = slots[which], np.empty(len(which) * size, dtype=np.uint8)
            zero = np.zeros_like(chosen)
            outs = {self.name: (out, np.arange(len(which)) * size)}
            try:
                self._engine.tier_reader().read(chosen, generations[which], zero, zero + 1, outs)
            except LostRowsError as error:
                self._engine.remove_lost(error)
                which = which[~np.isin(chosen, error.slots)]
                continue
            except StaleIndexError:
                which = which[arrays.generation[chosen] == generations[which]]
                continue
            kept[chosen], since[chosen] = out.reshape(-1, size), generations[which]
            break
        values[away] = np.where((since[slots] == generations)[away, None], kept[slots[away]], values[away])
        return values

    def forget(self) -> None:
        """Search anew."""
        self._known.clear()

    def store(self, trajectories: Any, priority: Any, store: Store) -> Array:
        """Store trajectories, each with the values per group of one with its value of the column, if there is one.

        Of those with a new value the first is stored with its own; the others after it.

        Args:
            trajectories: an iterable of mappings. priority: as of `Table.extend`.

        Raises:
            As `Table.extend`; those before, which were stored already, stay.
        """
        if isinstance(as_mapping(trajectories), Mapping):
            raise SchemaError(
                f"prefix is {self.name!r} with stacked arrays; expected a list of trajectories."
            )
        each = trajectories if isinstance(trajectories, (list, tuple)) else kept_trajectories(trajectories)
        keys, first = [self.key_of(rows) for rows in each], checked_priorities(priority, len(each))
        slots: Array = np.full(len(each), -1, dtype=np.int64)
        left, failed = np.arange(len(each)), 0
        while len(left):
            known = self.find([key for i in left.tolist() if (key := keys[i]) is not None])
            chosen, new = list[int](), set[bytes]()
            for i in left.tolist():
                key = keys[i]
                if key is not None and key not in known and key in new:
                    continue
                if key is not None and key not in known:
                    new.add(key)
                chosen.append(i)
            parents = np.array([known.get(keys[i] or b"", (-1, -1)) for i in chosen], dtype=np.int64)
            rows = [self._without(each[i]) if parents[at, 0] >= 0 else each[i] for at, i in enumerate(chosen)]
            begins = (parents[:, 0], parents[:, 1]) if (parents[:, 0] >= 0).any() else (None, None)
            try:
                slots[chosen] = store(rows, None if priority is None else first[chosen], *begins)
            except StaleIndexError:
                failed += 1
                self.forget()
                if failed == _ATTEMPTS:
                    raise
                continue
            except SchemaError as error:
                if len(chosen) == len(each):
                    raise
                raise SchemaError(
                    f"{error} (Counted among {len(chosen)} of {len(each)} trajectories: {shown(chosen)}.)"
                ) from error
            left = np.setdiff1d(left, chosen)
        return slots

    def _without(self, trajectory: Any) -> dict[str, Any]:
        """A trajectory without the values that it has in common with others."""
        rows: Any = as_mapping(trajectory)
        return {name: value for name, value in rows.items() if name not in self._engine.schema.per_group}


def kept_trajectories(trajectories: Any) -> list[Any]:
    """Copies of those of an iterable, whose owner may change them."""
    return [*map(_kept, trajectories)]


def _kept(trajectory: Any) -> Any:
    """A copy of one that its owner may change."""
    rows = as_mapping(trajectory)
    return {name: copied_ragged(value) for name, value in rows.items()} if isinstance(rows, Mapping) else rows
