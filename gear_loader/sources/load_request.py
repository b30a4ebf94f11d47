"""The options of `load`, and the tables that it fills; what does not fit is refused before anything is opened."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any, Literal

import torch

from gear_loader.errors import SourceError
from gear_loader.sources.episodes import Columns, check_count, describe
from gear_loader.sources.refresh_options import Refresh
from gear_loader.sources.source_opening import Named, Opening, is_hdf5
from gear_loader.storage.incoming import checked_priorities
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import byte_count, flag


@dataclasses.dataclass(frozen=True)
class Target:
    """The tables that are filled.

    Attributes:
        tables: of this process, of the same columns; none: one is made.
        part: (number, count): the part of the source that goes into them.
    """

    tables: tuple[Table, ...]
    part: tuple[int, int] = (0, 1)

    @classmethod
    def of(cls, given: Any, shard: Any) -> Target:
        """What `table` and `shard` of `load` say.

        Raises:
            SourceError: they are something else.
        """
        part = _checked_shard(shard)
        if given is None or isinstance(given, Table):
            return cls(() if given is None else (given,), part)
        own, count = getattr(given, "own", None), getattr(given, "num_shards", None)
        if isinstance(own, Mapping) and isinstance(count, int):
            if shard is not None:
                raise SourceError(f"shard={shard!r} was given with Shards; expected one of the two.")
            return cls._of_shards(own, count)
        tables = tuple(given) if isinstance(given, (list, tuple)) else ()
        if not tables or not all(isinstance(table, Table) for table in tables):
            raise SourceError(
                f"table is {shown(given)}; expected a gear_loader.Table, a list of them, "
                "gear_loader.distributed.Shards, or None. A table of another machine is loaded by a process there."
            )
        if len(set(map(id, tables))) < len(tables):
            raise SourceError("A list with the same table twice was given; expected each once.")
        for number, table in enumerate(tables):
            if table.schema != tables[0].schema:
                raise SourceError(
                    f"Table {number} has the columns {dict(table.schema)}; expected those of table 0, "
                    f"{dict(tables[0].schema)}."
                )
        return cls(tables, part)

    @classmethod
    def _of_shards(cls, own: Mapping[int, Table], count: int) -> Target:
        if len(own) == count:
            return cls(tuple(own[number] for number in range(count)))
        if len(own) != 1:
            raise SourceError(
                "Shards were given on a rank that holds the columns of a later stage; expected a table of this rank."
            )
        number, table = next(iter(own.items()))
        return cls((table,), (number, count))


@dataclasses.dataclass(frozen=True)
class LoadRequest:
    """The options of `load`, checked; see there.

    Raises:
        SourceError, SchemaError: an invalid value.
    """

    columns: Columns
    max_trajectories: int | None
    block_steps: int | Literal["auto"] | None
    name: str | None
    priority: float
    final: bool
    per_trajectory: Collection[str]
    keep_float64: bool
    allow_nonfinite: bool
    filter: Callable[[Mapping[str, Any]], bool] | None
    decode: bool
    statistics: bool
    max_bytes: int | str | None
    wait: bool
    resume: bool
    payload: int | str | None
    download: bool
    progress: bool
    refresh: Refresh | bool

    def __post_init__(self) -> None:
        _check_names(self.per_trajectory)
        for option in ("keep_float64", "allow_nonfinite", "final", "download", "progress", "statistics"):
            flag(option, getattr(self, option))
        for option in ("wait", "resume", "decode"):
            flag(option, getattr(self, option))
        if not isinstance(self.refresh, (bool, Refresh)):
            raise SourceError(
                f"refresh is {shown(self.refresh)}; expected True, False, or a gear_loader.sources.Refresh."
            )
        if self.filter is not None and not callable(self.filter):
            raise SourceError(f"filter= is {shown(self.filter)}; expected a function of an episode, or None.")
        for option in ("payload", "max_bytes"):
            if getattr(self, option) is not None:
                byte_count(option, getattr(self, option))
        checked_priorities(self.priority, 1)
        check_count("max_trajectories", self.max_trajectories)
        if not isinstance(self.block_steps, str):
            check_count("block_steps", self.block_steps)

    @property
    def renewal(self) -> Refresh | None:
        """How the tables are refreshed, if they are."""
        return Refresh() if self.refresh is True else self.refresh or None

    @property
    def most_bytes(self) -> int | None:
        """`max_bytes` as a number."""
        return None if self.max_bytes is None else byte_count("max_bytes", self.max_bytes)

    def check_target(self, target: Target) -> None:
        """Refuse options that do not go with tables that are given, or are not."""
        if target.tables and self.name is not None:
            raise SourceError(
                f"name={self.name!r} was given with a table; expected one of the two: a table keeps its name."
            )
        if target.tables and len(self.per_trajectory):
            raise SourceError(
                f"per_trajectory={list(self.per_trajectory)!r} was given with a table; expected one of the two: a "
                "table's columns tell it, by Column(per='trajectory')."
            )
        if self.resume and not target.tables:
            raise SourceError(
                "resume=True was given without a table; expected the one that was being filled."
            )
        if self.renewal is not None:
            self._check_refresh(target)

    def _check_refresh(self, target: Target) -> None:
        if self.statistics:
            raise SourceError(
                "statistics=True was given with refresh=; expected one of them: no table holds all at once."
            )
        if not target.tables and self.max_bytes is None:
            raise SourceError(
                "refresh= was given without a table or max_bytes=; expected one of them: a table of the source's size "
                "holds all at once."
            )
        if target.tables and self.max_bytes is not None:
            raise SourceError(
                "max_bytes= was given with refresh= and a table; expected one of the two: it has limits."
            )
        for table in target.tables:
            if table.loading is not None and not table.loading.done:
                raise SourceError(
                    f"refresh= was given with a table that is being loaded, {table.loading!r}; cancel() that first."
                )
            if table.on_full == "error":
                raise SourceError(
                    "refresh= was given with a table of on_full='error'; expected 'evict_oldest', "
                    "'evict_lowest_priority', or 'wait' with limits=gear.Limits(max_times_sampled=)."
                )
            for name, column in self.renewal.own_columns.items() if self.renewal else ():
                if table.schema.get(name) != column:
                    raise SourceError(
                        f"Refresh(sampler=) was given, and the table has {shown(table.schema.get(name))} as column "
                        f"{name!r}; expected {column}, for what is known of an episode."
                    )

    def check_source(self, source: Any) -> None:
        """Refuse `download` with what is not fetched."""
        if self.download and (not isinstance(source, (str, Named)) or is_hdf5(source)):
            given = repr(source) if isinstance(source, str) else describe(source)
            raise SourceError(
                f"download=True was given with {given}; expected the id of a Minari data set: nothing else is fetched."
            )

    def opening(self, target: Target) -> Opening:
        """How the source is opened."""
        schema, columns = None, self.columns
        wanted: list[str] | None = None if self.final else []
        keep_float64 = self.keep_float64
        if target.tables:
            table = target.tables[0]
            # Else what the table can hold would be rounded on the way.
            keep_float64 |= any(column.dtype == torch.float64 for column in table.schema.values())
            own = () if self.renewal is None else self.renewal.own_columns
            schema = {name: column for name, column in table.schema.added.items() if name not in own}
            wanted = list(table.schema.finals or ())
            columns = list(schema) if columns is None else columns
        reads_all = self.filter is not None or self.renewal is not None or self.max_bytes is not None
        reads_all |= self.wait or self.decode or self.resume
        one_table = len(target.tables) == 1 and target.part == (0, 1)
        return Opening(
            columns=columns,
            keep_float64=keep_float64,
            allow_nonfinite=self.allow_nonfinite,
            max_trajectories=self.max_trajectories,
            download=self.download,
            schema=schema,
            finals=wanted,
            once=frozenset(self.per_trajectory),
            lazy=one_table and not reads_all,
        )


def _checked_shard(shard: Any) -> tuple[int, int]:
    """Check `shard`."""
    if shard is None:
        return 0, 1
    plain = isinstance(shard, tuple) and len(shard) == 2
    if not (plain and all(isinstance(each, int) for each in shard) and 0 <= shard[0] < shard[1]):
        raise SourceError(f"shard is {shown(shard)}; expected (number, count), as (rank, world_size).")
    return int(shard[0]), int(shard[1])


def _check_names(names: Any) -> None:
    """Check `per_trajectory`."""
    plain = isinstance(names, (Sequence, Set)) and not isinstance(names, str)
    if not plain or not all(isinstance(name, str) for name in names):
        raise SourceError(f"per_trajectory= is {shown(names)}; expected a list of names of columns.")
