"""What writers of data sets have in common: trajectories one by one, and a place that is whole or not there."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from gear_loader.errors import SchemaError, SourceError, StaleIndexError
from gear_loader.exports.uploads import uploaded_place
from gear_loader.sources.episodes import Columns, requested, select
from gear_loader.storage.codecs import CHANNELS
from gear_loader.storage.table import Table
from gear_loader.utils.checks import at_least, byte_count, one_of
from gear_loader.utils.paths import is_address, local_path

NEXT = "next_"
"""What the name of the observation after each step begins with."""


class Trajectory(NamedTuple):
    """What is written of a trajectory: its steps; values as those of `Table.__getitem__`, of columns that are kept
    encoded lists of bytes; and values after the last step, by the names of their columns."""

    length: int
    values: dict[str, Any]
    final: dict[str, Any]


def chosen_columns(table: Table, columns: Columns, *, video: bool = False) -> dict[str, str]:
    """The columns to be written: {name there: name in the table}; None takes all.

    Args:
        video: whether the format has columns of video.

    Raises:
        SchemaError: an unknown name, or a column of Python objects, or of video.
    """
    names = list(table.schema)
    try:
        chosen = select(requested(columns, names), names, "The table")
    except SourceError as error:
        raise SchemaError(str(error)) from None
    for name in chosen.values():
        column = table.schema[name]
        if column.ragged is not None and column.ragged.kind == "object":
            raise SchemaError(
                f"Column {name!r} has Python objects, which other formats do not have; name others: columns=[...]."
            )
        if not video and column.codec is not None and column.codec.name == "video":
            raise SchemaError(
                f"Column {name!r} is stored as video, which this format does not have; name others: columns=[...]."
            )
    return chosen


def images_of(table: Table, chosen: Mapping[str, str]) -> frozenset[str]:
    """The columns of encoded images, which are written as they are, by their names there."""
    codecs = {role: table.schema[name].codec for role, name in chosen.items()}
    return frozenset(role for role, codec in codecs.items() if codec is not None and codec.name in CHANNELS)


def most_bytes(name: str, given: int | str) -> int:
    """Check an option with the most bytes of a file."""
    return at_least(name, byte_count(name, given))


def compression_of(given: str) -> str:
    """Check an option with the compression of Parquet."""
    known: str = one_of("compression", given, ("zstd", "snappy", "gzip", "brotli", "lz4", "none"))
    return known


def trajectories(table: Table, chosen: dict[str, str], *, encoded: Collection[str]) -> Iterator[Trajectory]:
    """The table's trajectories, oldest first; those that are evicted or removed meanwhile are left out.

    Args:
        chosen: as of `chosen_columns`. encoded: of these, by their names there, those that stay encoded.

    Raises:
        SchemaError: a write-once column that a trajectory has no values of.
    """
    lengths = dict(zip(table.indices().tolist(), table.lengths().tolist(), strict=True))
    names = {chosen[role] for role in encoded}
    for index in lengths:
        try:
            rows, final = table._engine.rows_and_final(index, encoded=names)
        except StaleIndexError:
            continue
        if missing := [name for name in chosen.values() if name not in rows]:
            raise SchemaError(
                f"Trajectory {index} has no values of the write-once columns {missing}; fill them, or name other "
                "columns. Nothing was written."
            )
        stepped = [name for name in rows if not table.schema[name].trajectory]
        length = len(rows[stepped[0]]) if stepped else lengths[index]
        values = {role: rows[name] for role, name in chosen.items()}
        yield Trajectory(
            length, values, {role: final[name] for role, name in chosen.items() if name in final}
        )


@contextlib.contextmanager
def new_place(place: str) -> Iterator[str]:
    """A path beside `place` to write to, which is moved there in the end, or removed after an error.

    For an address a path in the temporary directory, which is uploaded: see `uploaded_place`.

    Raises:
        SchemaError: there is something at `place` already.
    """
    if is_address(place):
        with uploaded_place(place) as partial:
            yield partial
        return
    path = local_path(place, SchemaError)
    if os.path.lexists(path):
        raise SchemaError(f"{path!r} is there already; expected a place for a new data set. Remove it first.")
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    partial = f"{path.rstrip(os.sep)}.partial-{secrets.token_hex(4)}"
    try:
        yield partial
        if os.path.lexists(path):
            raise SchemaError(f"{path!r} was made meanwhile; expected a place for a new data set.")
        os.rename(partial, path)
    finally:
        if os.path.isdir(partial):
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
