"""Trajectories as Parquet, a row for each step, as `pyarrow`, pandas, polars and Hugging Face's `datasets` read it."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.exports.exported import (
    NEXT,
    Trajectory,
    chosen_columns,
    compression_of,
    images_of,
    most_bytes,
    new_place,
    trajectories,
)
from gear_loader.sources._optional import require
from gear_loader.sources.episodes import Columns
from gear_loader.storage.ragged import Ragged
from gear_loader.storage.schema import Column
from gear_loader.storage.table import Table

EPISODE, STEP = "episode_index", "frame_index"
"""The first two columns, named as in LeRobot's data sets."""

_FILE_BYTES = "256MiB"
_ROW_GROUP_BYTES = 32 << 20


def write_parquet(
    table: Table,
    place: str,
    *,
    columns: Columns = None,
    compression: str = "zstd",
    file_bytes: int | str = _FILE_BYTES,
) -> str:
    """Write one file, if `place` ends in ``.parquet``, or else a folder of files ``part-00000.parquet``.

    The rows of an episode follow one another, with ``episode_index`` (0, 1, ..., oldest first) and ``frame_index`` (the
    step in it). Values of shape ``[a, b]`` are lists of fixed size, ragged ones lists, text strings, and encoded images
    bytes as they are. bfloat16 becomes float32. Columns per trajectory or group have their value in each row. For a
    column with ``final=True`` there is ``next_<column>``: what follows each step, null where an episode was added
    without its final step.

    Args:
        compression: ``"zstd"``, ``"snappy"``, ``"gzip"``, ``"brotli"``, ``"lz4"`` or ``"none"``.
        file_bytes: uncompressed bytes after which the next file of a folder begins, at the end of an episode.

    Returns:
        The file or folder.

    Raises:
        SchemaError: as `Table.export`.
    """
    compression, chosen = compression_of(compression), chosen_columns(table, columns)
    schema = _ArrowRows(table, chosen, images=False)
    if not place.lower().endswith(".parquet"):
        return _write_files(
            table,
            place,
            chosen,
            schema,
            "part-{:05d}.parquet",
            compression,
            most_bytes("file_bytes", file_bytes),
        )
    with new_place(place) as partial:
        _write(partial, trajectories(table, chosen, encoded=schema.encoded), schema, compression)
    return place


def write_hugging_face(
    table: Table,
    place: str,
    *,
    columns: Columns = None,
    compression: str = "zstd",
    file_bytes: int | str = _FILE_BYTES,
    split: str = "train",
) -> str:
    """Write a folder that ``datasets.load_dataset(folder)`` reads: ``data/<split>-00000.parquet`` and so on.

    As ``parquet:``; columns of encoded images are the feature ``datasets.Image``, which decodes them.

    Args:
        compression, file_bytes: as for ``parquet:``. split: name of the split.

    Returns:
        The folder. It can be uploaded as it is.

    Raises:
        SchemaError: as `Table.export`.
    """
    if not isinstance(split, str) or not split.isidentifier():
        raise SchemaError(f"split={split!r} was received; expected a name such as 'train'.")
    compression, chosen = compression_of(compression), chosen_columns(table, columns)
    schema = _ArrowRows(table, chosen, images=True)
    names = os.path.join("data", f"{split}-{{:05d}}.parquet")
    return _write_files(
        table, place, chosen, schema, names, compression, most_bytes("file_bytes", file_bytes)
    )


class _ArrowRows:
    """The Arrow schema of a table's columns, and the record batch of a trajectory.

    Args:
        images: whether encoded images are Hugging Face's feature of them, and not plain bytes.
    """

    def __init__(self, table: Table, chosen: Mapping[str, str], *, images: bool) -> None:
        self._pa = pa = require("pyarrow", "Writing Parquet")
        self.columns = {role: table.schema[name] for role, name in chosen.items()}
        finals = {NEXT + role: column for role, column in self.columns.items() if column.final}
        taken = {EPISODE, STEP, *finals} & set(chosen)
        if taken:
            raise SchemaError(
                f"The columns {sorted(taken)} have names that are written beside them; give others: "
                "columns={name there: name in the table}."
            )
        self.encoded = self._images = images_of(table, chosen)
        self._image = pa.struct([("bytes", pa.binary()), ("path", pa.string())]) if images else pa.binary()
        self._features = images
        every = {**self.columns, **finals}
        fields = [pa.field(EPISODE, pa.int64()), pa.field(STEP, pa.int64())]
        fields += [pa.field(role, self._type(role, column)) for role, column in every.items()]
        metadata = _features(pa.schema(fields), self._images) if images and self._images else None
        self.arrow = pa.schema(fields, metadata=metadata)

    def batch(self, number: int, each: Trajectory) -> Any:
        """The rows of a trajectory, a record batch."""
        pa, length = self._pa, each.length
        arrays = [pa.array(np.full(length, number)), pa.array(np.arange(length))]
        for role, column in self.columns.items():
            arrays.append(self._array(role, column, each.values[role], length))
        for role, column in self.columns.items():
            if column.final and role in each.final:
                after = torch.cat([each.values[role][1:], each.final[role][None]])
                arrays.append(self._array(role, column, after, length))
            elif column.final:
                arrays.append(pa.nulls(length, self._type(role, column)))
        return pa.record_batch(arrays, schema=self.arrow)

    def _type(self, role: str, column: Column) -> Any:
        pa = self._pa
        if role in self._images:
            return self._image
        texts = {"str": pa.string(), "bytes": pa.binary()}
        ragged = column.ragged
        if ragged is not None and ragged.kind in texts:
            return texts[ragged.kind]
        if ragged is not None and ragged.coded is not None:
            return self._nested(ragged.coded.dtype_name, ragged.coded.shape)
        if ragged is not None:
            return pa.list_(self._nested(ragged.dtype_name, ragged.shape))
        return self._nested(column.dtype_name, column.shape)

    def _nested(self, dtype_name: str, shape: tuple[Any, ...]) -> Any:
        pa = self._pa
        kind = pa.from_numpy_dtype(np.dtype("float32" if dtype_name == "bfloat16" else dtype_name))
        for extent in reversed(shape):
            kind = pa.list_(kind) if extent is None else pa.list_(kind, extent)
        return kind

    def _array(self, role: str, column: Column, value: Any, length: int) -> Any:
        """The values of a column; those of columns per trajectory for each of `length` steps."""
        pa, kind = self._pa, self._type(role, column)
        if column.trajectory:
            value = _one(value, kind)
            return pa.repeat(pa.scalar(value, kind), length) if length else pa.nulls(0, kind)
        if isinstance(value, torch.Tensor):
            return self._fixed(value)
        if isinstance(value, Ragged):
            offsets = pa.array(value.offsets.numpy().astype(np.int32))
            return pa.ListArray.from_arrays(offsets, self._fixed(value.values), type=kind)
        if role in self._images and self._features:
            value = [{"bytes": each, "path": None} for each in value]
        if isinstance(value, list) and len(value) and isinstance(value[0], torch.Tensor):
            value = [each.tolist() for each in value]  # images of several sizes, decoded
        return pa.array(value, kind)

    def _fixed(self, values: torch.Tensor) -> Any:
        pa = self._pa
        values = values.float() if values.dtype == torch.bfloat16 else values
        array = pa.array(values.reshape(-1).numpy())
        for extent in reversed(values.shape[1:]):
            array = pa.FixedSizeListArray.from_arrays(array, extent)
        return array


def _one(value: Any, kind: Any) -> Any:
    """What `pyarrow.scalar` takes for one value of a column."""
    if isinstance(value, torch.Tensor):
        return (value.float() if value.dtype == torch.bfloat16 else value).tolist()
    if isinstance(value, bytes) and hasattr(kind, "num_fields") and kind.num_fields == 2:
        return {"bytes": value, "path": None}
    return value


def _features(schema: Any, images: Collection[str]) -> dict[str, str]:
    """The metadata that tells Hugging Face's `datasets` which columns are images."""
    datasets = require("datasets", "Writing images for Hugging Face")
    features = datasets.Features.from_arrow_schema(schema)
    for role in images:
        features[role] = datasets.Image()
    return {"huggingface": json.dumps({"info": {"features": features.to_dict()}})}


def _write(path: str, each: Iterator[Trajectory], schema: _ArrowRows, compression: str) -> None:
    """Write all trajectories into one file."""
    _fill(path, enumerate(each), schema, compression, None)


def _write_files(
    table: Table,
    place: str,
    chosen: dict[str, str],
    schema: _ArrowRows,
    names: str,
    compression: str,
    most: int,
) -> str:
    """Write all trajectories into files of a folder; `names` has their number."""
    with new_place(place) as partial:
        numbered = enumerate(trajectories(table, chosen, encoded=schema.encoded))
        number, more = 0, True
        while more:
            path = os.path.join(partial, names.format(number))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            more = _fill(path, numbered, schema, compression, most)
            number += 1
    return place


def _fill(
    path: str,
    numbered: Iterator[tuple[int, Trajectory]],
    schema: _ArrowRows,
    compression: str,
    most: int | None,
) -> bool:
    """Write trajectories into a file, up to about `most` bytes; whether some may be left."""
    parquet = require("pyarrow.parquet", "Writing Parquet")
    pa = require("pyarrow", "Writing Parquet")
    held: list[Any] = []
    group = written = 0

    with parquet.ParquetWriter(path, schema.arrow, compression=compression) as file:

        def flush() -> None:
            if held:
                file.write_table(pa.Table.from_batches(held, schema.arrow))
                held.clear()

        for number, each in numbered:
            batch = schema.batch(number, each)
            held.append(batch)
            group, written = group + batch.nbytes, written + batch.nbytes
            if group >= _ROW_GROUP_BYTES:
                flush()
                group = 0
            if most is not None and written >= most:
                flush()
                return True
        flush()
    return False
