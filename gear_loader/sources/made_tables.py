"""Tables of the size of a source, or of so many bytes of it."""

from __future__ import annotations

import dataclasses

import numpy as np

from gear_loader.errors import SchemaError, SourceError
from gear_loader.sources.episodes import EpisodeReader
from gear_loader.sources.filling import advancing, in_source
from gear_loader.sources.fitting import fitted
from gear_loader.sources.load_request import LoadRequest
from gear_loader.storage.block_sizes import resolved_block_steps, resolved_packing
from gear_loader.storage.memory_options import Memory
from gear_loader.storage.operations.extents import FIRST, GRAIN, HEADER
from gear_loader.storage.payload import needed_bytes
from gear_loader.storage.ragged_input import with_records
from gear_loader.storage.schema import Schema
from gear_loader.storage.table import Table
from gear_loader.utils.checks import byte_count
from gear_loader.utils.progress import progress_bar

_BLOCK_STEPS = 64
"""Steps of a block, unless episodes are shorter."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes that a reader's first episodes take in a table.

    Attributes:
        lengths: int64 [n], of these episodes. progress: whether to show a bar while they are read for it.
    """

    reader: EpisodeReader
    lengths: np.ndarray
    progress: bool

    def payload(self, schema: Schema) -> int:
        """Bytes of the values of any length of all, with what the table adds."""
        # What the first ones of them take the reader does not tell.
        told = len(self.lengths) == len(self.reader)
        return FIRST + int(self._payloads(schema, told=told).sum())

    def within(self, most: int) -> np.ndarray:
        """The lengths of the first episodes that take so many bytes at most.

        Raises:
            SourceError: the first one takes more.
        """
        taken = self._taken()
        if self.reader.payload is not None and taken.sum() > most:  # how they share it is not known
            taken = self._taken(told=False, most=most)
        count = int(np.searchsorted(np.cumsum(taken), most, side="right"))
        if not count:
            raise SourceError(
                f"max_bytes={most:,} was given, and the first episode of {self.reader.source} takes {taken[0]:,}; "
                "expected room for one at least."
            )
        return self.lengths[:count]

    def share(self, most: int, payload: int | str | None) -> float:
        """The share of the episodes that so many bytes hold, `payload` among them.

        Raises:
            SourceError: they do not hold two of the longest.
        """
        if payload is None:
            taken = self._taken()
        else:
            taken = self.lengths * Schema(self.reader.schema).step_bytes
            most -= byte_count("payload", payload)
        if most < 2 * taken.max() and most < taken.sum():
            raise SourceError(
                f"max_bytes= leaves {most:,} bytes for the steps, and the longest episode of {self.reader.source} "
                f"takes {int(taken.max()):,}; expected room for two at least."
            )
        return most / float(taken.sum())

    def _taken(self, *, told: bool = True, most: int | None = None) -> np.ndarray:
        """Bytes of each episode, int64 [n]; as `_payloads`."""
        schema = Schema(self.reader.schema)
        fixed = self.lengths * schema.step_bytes + schema.trajectory_bytes
        return np.asarray(fixed + self._payloads(schema, told=told, fixed=fixed, most=most))

    def _payloads(
        self,
        schema: Schema,
        *,
        told: bool = True,
        fixed: np.ndarray | None = None,
        most: int | None = None,
    ) -> np.ndarray:
        """Bytes of the values of any length of each, int64 [n]; in proportion to steps if the reader has `told` all.

        Args:
            most: bytes of the first episodes after which the others are not measured. fixed: what each takes besides.
        """
        reader, lengths = self.reader, self.lengths
        columns = {name: column for name, column in schema.items() if column.ragged is not None}
        if (told and reader.payload is not None) or not columns:
            share = -(-(reader.payload or 0) * lengths // max(reader.num_steps, 1))
            return np.asarray(share + bool(columns) * (HEADER + GRAIN * len(columns)))
        taken = np.zeros(len(lengths), dtype=np.int64)
        bar = progress_bar("Measuring", int(lengths.sum()), unit="steps", enabled=self.progress)
        with bar as (advance, _):
            for number, episode in enumerate(advancing(iter(reader), lengths, advance)):
                where = f"{reader.source}, episode {number}{{}}: column "
                values = {n: fitted(episode[n], c, f"{where}{n!r}", finite=False) for n, c in columns.items()}
                with in_source(reader, number):
                    taken[number] = needed_bytes(with_records(schema, [values])[1]) - FIRST
                if most is not None and fixed is not None:
                    most -= int(fixed[number] + taken[number])
                    if most < 0:
                        break
        return taken


def made_table(
    reader: EpisodeReader, lengths: np.ndarray, request: LoadRequest, share: float, *, evicts: bool
) -> Table:
    """A table of exactly the size of a reader's first episodes, of these lengths; or of a share of it.

    Raises:
        SourceError: no table can have the columns. SchemaError: it refuses options.
    """
    count = len(lengths)
    steps = max(int(lengths.sum() * share), int(lengths.max()))
    finals = reader.finals if request.final else frozenset()
    columns = {n: dataclasses.replace(c, final=True) if n in finals else c for n, c in reader.schema.items()}
    try:
        schema = Schema(columns)
    except SchemaError as error:  # such as a name with control characters
        raise SourceError(f"{reader.source}: {error}") from error
    payload = request.payload
    if schema.ragged and payload is None:
        taken = Sizes(reader, lengths, request.progress).payload(schema)
        payload = int(taken * max(share, 2 * lengths.max() / lengths.sum()))
    packed = resolved_packing(schema, "auto")
    wanted = request.block_steps
    if wanted is None:
        wanted = "auto" if lengths.mean() < _BLOCK_STEPS else _BLOCK_STEPS
    in_blocks: int = resolved_block_steps(
        schema, wanted, None, max_steps=steps, max_trajectories=count, packed=packed
    )
    blocks = Table.required_blocks(lengths + bool(finals), in_blocks)
    blocks = max(int(blocks * share), -(-(int(lengths.max()) + bool(finals)) // in_blocks))
    return Table.create(
        schema,
        max_steps=steps,
        max_trajectories=count,
        memory=Memory(max_blocks=blocks, packed=packed, payload=payload),
        block_steps=in_blocks,
        name=request.name,
        on_full="evict_oldest" if evicts else "error",
    )
