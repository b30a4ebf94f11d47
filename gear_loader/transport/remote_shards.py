"""Several tables with the same columns as one to write to and to draw from, each of this machine or of a server."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from gear_loader.errors import SchemaError
from gear_loader.storage.schema import Schema
from gear_loader.storage.stats import TableStats
from gear_loader.storage.table import Table
from gear_loader.storage.table_rules import Rules, check_seconds
from gear_loader.storage.vector_writer import VectorWriter
from gear_loader.storage.writer import Writer
from gear_loader.transport.remote_table import RemoteTable
from gear_loader.utils.arrays import Array, shown
from gear_loader.utils.provided import provided


class RemoteShards:
    """Several tables as one, such as the shards of `gear_loader.integrations.ray.ReplayShards`.

    Each `add`, `extend`, `writer` and `writers` takes the next table of this machine, or the next of all where none is
    of this machine. ``gear_loader.ReplayDataset(shards, ...)`` draws from all of them. What else a table can do, its
    `tables` do.

    Args:
        tables: with the same columns. They are closed by `close`.
        timeout: seconds that a draw waits for trajectories.

    Attributes:
        tables: as given. schema: the columns.

    Raises:
        SchemaError: no tables, or tables with different columns.
    """

    rules = Rules()
    name: str | None = None

    def __init__(self, tables: Sequence[Table | RemoteTable], *, timeout: float = 60.0) -> None:
        self.tables = tuple(tables)
        self.timeout = check_seconds("timeout", timeout)
        if not self.tables or not all(isinstance(each, (Table, RemoteTable)) for each in self.tables):
            raise SchemaError(
                f"tables is {shown(tables)}; expected one or more of gear_loader.Table and RemoteTable."
            )
        self.schema: Schema = self.tables[0].schema
        for number, table in enumerate(self.tables):
            if table.schema.to_json() != self.schema.to_json():
                raise SchemaError(
                    f"Table {number} has the columns {table.schema}, and table 0 {self.schema}; expected the same."
                )
        local = [number for number, table in enumerate(self.tables) if isinstance(table, Table)]
        numbers = local or list(range(len(self.tables)))
        # So that processes with one writer each do not all take the same.
        start = secrets.randbelow(len(numbers))
        self._numbers = itertools.cycle(numbers[start:] + numbers[:start])
        self._sampled: Any = None

    @staticmethod
    def dataset_class() -> Any:
        """The class of a `ReplayDataset` over it."""
        return provided("ShardsDataset")

    def origin(self, ranks: Any) -> Any:
        """What it hands to such a dataset."""
        return provided("ShardsOrigin")(self, ranks)

    # ---------------------------------------------------------------- adding

    def add(self, trajectory: Mapping[str, Any], **options: Any) -> tuple[int, int]:
        """Store one trajectory in one of the tables; options and errors as for its `add`.

        Returns:
            Number of the table, and the trajectory's index in it.
        """
        number = next(self._numbers)
        return number, self.tables[number].add(trajectory, **options)

    def extend(
        self, trajectories: Iterable[Mapping[str, Any]] | Mapping[str, Any], **options: Any
    ) -> tuple[int, Array]:
        """Store trajectories in one of the tables; options and errors as for its `extend`.

        Returns:
            Number of the table, and their indices in it, int64 [n].
        """
        number = next(self._numbers)
        return number, self.tables[number].extend(trajectories, **options)

    def writer(self, **options: Any) -> Writer:
        """A writer to one of the tables; options and errors as for its `writer`."""
        return self.tables[next(self._numbers)].writer(**options)

    def writers(self, n: int, **options: Any) -> VectorWriter:
        """Writers to one of the tables; options and errors as for its `writers`."""
        return self.tables[next(self._numbers)].writers(n, **options)

    # ---------------------------------------------------------------- reading

    def sample(
        self, batch_size: int, *, windows: Any = None, seed: int = 0, device: str | torch.device = "auto"
    ) -> dict[str, Any]:
        """Draw one batch over all tables; see `Table.sample`, and ``batch["shard"]`` for each row's table."""
        options = {"windows": windows, "seed": seed, "device": device}
        if self._sampled is None:
            self._sampled = provided("Sampled")()
        batch: dict[str, Any] = provided("sample")(self, batch_size, options, self._sampled)
        return batch

    def stats(self) -> list[TableStats]:
        """As `Table.stats`, of each table."""
        return [table.stats() for table in self.tables]

    def __len__(self) -> int:
        """Number of trajectories in all tables."""
        return sum(len(table) for table in self.tables)

    @property
    def num_steps(self) -> int:
        """Number of steps in all tables."""
        return sum(table.num_steps for table in self.tables)

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        """Close the tables, those of servers after what was committed has been stored.

        Raises:
            As `RemoteTable.close` and `Table.close` of a table; the others are closed all the same.
        """
        kept, self._sampled = self._sampled, None
        for _, dataset in [] if kept is None else kept.datasets:
            dataset.close()
        with contextlib.ExitStack() as tables:
            for table in self.tables:
                tables.callback(table.close)

    def __enter__(self) -> RemoteShards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        local = sum(isinstance(table, Table) for table in self.tables)
        return f"<RemoteShards of {len(self.tables)} tables, {local} of this machine>"
