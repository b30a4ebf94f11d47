"""Ragged values in messages: how those of trajectories become bytes, and how a server takes them out of a request.

The columns of a message hold records, as those of a table do, int64 [2] a value: 0, and its rows. The values follow the
last column, from a multiple of 128 bytes on: column after column in the order of the schema, in each the values in the
order of their records, without gaps.
"""

from __future__ import annotations

import codecs
import ctypes
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError, TransportError
from gear_loader.storage.coders import coder_of, video_of
from gear_loader.storage.decoding import check_encoded
from gear_loader.storage.ragged import Values, msgpack
from gear_loader.storage.ragged_input import Common, Payload, StepValues, with_records
from gear_loader.storage.schema import Column, Schema
from gear_loader.utils.arrays import Array, data_address

MOST_OBJECT = 1 << 22
"""Most bytes of a Python object that a server takes: it unpacks them, into many times as much memory, to check them."""
_CHUNK = 1 << 20  # bytes of text that are decoded at a time

ValueBytes = Mapping[str, Sequence[Array]]
"""Ragged column -> its values one after another, uint8 [bytes], in pieces."""


# ---------------------------------------------------------------- of a client


def copied_values(addresses: Array, sizes: Array) -> Array:
    """A copy of values, one after another, uint8 [bytes], of their addresses and bytes, int64 [n] each."""
    out: Array = np.empty(int(sizes.sum()), dtype=np.uint8)
    there = sizes > 0
    addresses, sizes = addresses[there], sizes[there]
    ends = np.cumsum(sizes)
    follows = addresses[1:] == addresses[:-1] + sizes[:-1]
    firsts = np.flatnonzero(np.concatenate(([True], ~follows))) if len(sizes) else ends
    begins = (ends - sizes)[firsts]
    counts = np.diff(np.append(begins, out.nbytes))
    for begin, source, count in zip(
        begins.tolist(), addresses[firsts].tolist(), counts.tolist(), strict=True
    ):
        ctypes.memmove(out.ctypes.data + begin, source, count)
    return out


def with_values(
    schema: Schema, trajectories: Sequence[Any], common: Common | None = None
) -> tuple[list[Any], list[dict[str, list[Array]]]]:
    """Trajectories with the records of a message in place of ragged values, and copies of these.

    Args:
        common: as of `with_records`.

    Raises:
        SchemaError: values that do not fit; the message names the first trajectory.
    """
    given, payload = with_records(schema, trajectories, common)
    in_common: Any = [{}] * len(given) if common is None else common(len(given))
    names = [
        name
        for rows, known in zip(given, in_common, strict=True)
        if isinstance(rows, Mapping)
        for name in schema.ragged
        if name in rows and name not in known
    ]
    values: list[dict[str, list[Array]]] = [{} for _ in given]
    for name, (number, begin, end), records in zip(
        names, payload.runs.tolist(), payload.records, strict=True
    ):
        records[:, 1] = payload.rows[begin:end]
        values[number][name] = [copied_values(payload.addresses[begin:end], payload.sizes[begin:end])]
    return given, values


def measured(values: StepValues) -> StepValues:
    """The same values, with the records of a message."""
    values.records[:, :, 1] = values.parts[1]
    return values


# ---------------------------------------------------------------- of a server


def taken(
    names: Mapping[str, Column], records: Sequence[Array], counts: Sequence[Array], payload: Array
) -> list[Array]:
    """Check the ragged values of a request from an untrusted source.

    Args:
        names: ragged columns. records: of each column, uint8 [16 * values], as the message has them.
        counts: of each column, the values of each trajectory, int64 [n]. payload: uint8, the values.

    Returns:
        Of each column int64 [3, values]: bytes, rows, and address of each value.

    Raises:
        TransportError: records that do not describe these bytes. SchemaError: text that is not UTF-8, an object that is
            not of msgpack's format, or larger than `MOST_OBJECT`, or a value that its codec has not made.
    """
    at, found = 0, []
    for (name, column), part, count in zip(names.items(), records, counts, strict=True):
        values = column.ragged
        assert values is not None
        zeros, rows = part.view("<i8").reshape(-1, 2).astype(np.int64).T
        left = len(payload) - at
        most = left // values.row_bytes
        # Each is compared first, so that the sum cannot overflow.
        if zeros.any() or (len(rows) and (rows.min() < 0 or rows.max() > most)) or int(rows.sum()) > most:
            raise TransportError(
                f"The records of column {name!r} of a message do not describe its values, of which {left:,} bytes are "
                "left: expected 0 and the rows of each value. Nothing was changed."
            )
        sizes = rows * values.row_bytes
        ends = np.cumsum(sizes)
        _check_values(name, column, values, payload[at : at + int(sizes.sum())], ends, count)
        found.append(np.stack((sizes, rows, data_address(payload) + at + ends - sizes)))
        at += int(sizes.sum())
    if at != len(payload):
        raise TransportError(
            f"The ragged values of a message have {len(payload):,} bytes, of which its records describe {at:,}. "
            "Nothing was changed."
        )
    return found


def payload_of(
    schema: Schema,
    lengths: Array,
    records: Mapping[str, Array],
    payload: Array,
    common: Sequence[Mapping[str, Array]] = (),
) -> tuple[dict[str, Array], Payload]:
    """The ragged values of trajectories, to be stored.

    Args:
        lengths: int64 [n], steps of each. records, payload: as for `taken`.
        common: of each trajectory, the records of values that it has in common with others; in place of its own, which
            are empty.

    Returns:
        Column -> records that will be completed, int64 [values, 2]; and the values.

    Raises:
        As `taken`.
    """
    names, n = {name: schema[name] for name in schema.ragged}, len(lengths)
    counts = [np.ones(n, np.int64) if column.trajectory else lengths for column in names.values()]
    parts = taken(names, [records[name] for name in names], counts, payload)
    ends = np.cumsum(np.stack(counts, axis=1))  # of the values of a trajectory in a column, among all
    numbers = np.concatenate([np.repeat(np.arange(n), count) for count in counts])
    order = np.argsort(numbers, kind="stable")
    sizes, rows, addresses = np.concatenate(parts, axis=1)[:, order]
    begins = np.concatenate(([0], ends[:-1]))
    runs = np.stack((np.repeat(np.arange(n), len(names)), begins, ends), axis=1)
    made = {
        name: np.zeros((len(part[0]), 2), dtype=np.int64) for name, part in zip(names, parts, strict=True)
    }
    bounds = [np.concatenate(([0], np.cumsum(count))).tolist() for count in counts]
    targets = [
        whole[bound[i] : bound[i + 1]]
        for i in range(n)
        for whole, bound in zip(made.values(), bounds, strict=True)
    ]
    kept = np.ones(len(runs), dtype=bool)
    for i, known in enumerate(common):
        for name, record in known.items():
            run = i * len(names) + list(names).index(name)
            if rows[begins[run] : ends[run]].any():
                raise SchemaError(
                    f"Trajectory {i} has the column {name!r}, which is per group, and a prefix, whose values it has in "
                    "common; leave it out. Nothing was changed."
                )
            targets[run][:], kept[run] = record, False
    targets = [target for target, mine in zip(targets, kept, strict=True) if mine]
    return made, Payload(runs[kept], sizes, rows, addresses, targets, payload)


def _check_values(
    name: str, column: Column, values: Values, memory: Array, ends: Array, counts: Array
) -> None:
    """Check what values of a column hold, as they are checked when they are added to a table of this process."""
    bounds = np.cumsum(counts)

    def what(i: int) -> str:
        number = int(np.searchsorted(bounds, i, side="right"))
        step = "" if column.trajectory else f", step {i - int(bounds[number] - counts[number])},"
        return f"Column {name!r} of trajectory {number}{step}"

    if values.kind == "str":
        _check_text(memory, ends, what)
    elif values.kind == "object":
        _check_objects(memory, ends, what)
    elif values.coded is not None and values.coded.codec.name == "video":
        _check_frames(video_of(values.coded), memory, ends, counts, what)
    elif values.coded is not None:
        coder = coder_of(values.coded)
        for i, blob in enumerate(_pieces(memory, ends)):
            if not len(blob) and column.group:
                continue  # of a trajectory with a prefix
            check_encoded(values.coded, coder, blob, what(i))


def _pieces(memory: Array, ends: Array) -> list[memoryview]:
    view = memory.data
    return [view[begin:end] for begin, end in itertools.pairwise([0, *ends.tolist()])]


def _check_text(memory: Array, ends: Array, what: Callable[[int], str]) -> None:
    decoder, at = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        for at in range(0, len(memory), _CHUNK):
            decoder.decode(memory[at : at + _CHUNK].tobytes())
        decoder.decode(b"", True)
    except UnicodeDecodeError as error:
        near = min(at + error.start, len(memory) - 1)
        raise _no_text(what(int(np.searchsorted(ends, near, side="right")))) from None
    starts = ends[:-1][ends[:-1] < len(memory)]
    cut = np.flatnonzero((memory[starts] & 0xC0) == 0x80)  # the text of all is valid, but a letter is cut
    if len(cut):
        raise _no_text(what(int(np.searchsorted(ends, starts[cut[0]], side="right"))))


def _no_text(what: str) -> SchemaError:
    return SchemaError(f"{what} is not text in UTF-8. Nothing was changed.")


def _check_objects(memory: Array, ends: Array, what: Callable[[int], str]) -> None:
    unpack = msgpack().unpackb
    for i, blob in enumerate(_pieces(memory, ends)):
        if len(blob) > MOST_OBJECT:
            raise SchemaError(
                f"{what(i)} is an object of {len(blob):,} bytes; servers take at most {MOST_OBJECT:,}. Store large data"
                " in a column of arrays or bytes. Nothing was changed."
            )
        try:
            unpack(blob, strict_map_key=False)
        except Exception as error:
            raise SchemaError(
                f"{what(i)} is not of msgpack's format ({type(error).__name__}). Nothing was changed."
            ) from None


def _check_frames(video: Any, memory: Array, ends: Array, counts: Array, what: Callable[[int], str]) -> None:
    """Check that each frame of a video follows the one before it, or begins a group."""
    begins, before = set((np.cumsum(counts) - counts).tolist()), -1
    for i, blob in enumerate(_pieces(memory, ends)):
        try:
            number = video.distance(blob)
        except ValueError as error:
            raise SchemaError(f"{what(i)} is {error}. Nothing was changed.") from None
        if number and (i in begins or number != before + 1):
            raise SchemaError(
                f"{what(i)} is a frame of a video whose key frame is not there. Nothing was changed."
            )
        before = number
