"""TFRecord files of ``tf.train.Example``, read without TensorFlow.

::

    file      length u64 | CRC u32 | record [length] | CRC u32 | ...         CRC-32C, rotated and shifted
    record    Example { features { feature: map<string, Feature> } }         protocol buffers
    Feature   bytes_list | float_list | int64_list
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

import numpy as np

from gear_loader.errors import SourceError
from gear_loader.sources._optional import require
from gear_loader.sources.source_files import SourceFolder

_HEAD = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_LISTS = {1: "bytes", 2: "float", 3: "int64"}
_MOST_BITS = 70


class Feature(NamedTuple):
    """A list of values of one kind.

    Attributes:
        kind: ``"bytes"``, ``"float"`` or ``"int64"``. data: the encoded list.
    """

    kind: str
    data: memoryview

    def blobs(self) -> list[memoryview]:
        """The values of a list of bytes, where they lie."""
        return [
            value for number, value in _fields(self.data) if number == 1 and isinstance(value, memoryview)
        ]

    def numbers(self) -> np.ndarray:
        """The values of a list of numbers: float32 or int64 [n]."""
        parts: list[np.ndarray] = []
        single: list[Any] = []
        for number, value in _fields(self.data):
            if number != 1:
                continue
            if not isinstance(value, memoryview):
                single.append(value)
            elif self.kind == "float":
                parts.append(np.frombuffer(value, dtype="<f4"))
            else:
                parts.append(_varints(np.frombuffer(value, dtype=np.uint8)))
        if single:  # not packed
            bits = np.array(single, dtype=np.uint64)
            alone = bits.astype("<u4").view("<f4") if self.kind == "float" else bits.view(np.int64)
            parts.append(alone)
        if not parts:
            return np.empty(0, dtype=np.float32 if self.kind == "float" else np.int64)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def length(self) -> int:
        """How many values it has, without decoding them."""
        if self.kind == "bytes":
            return len(self.blobs())
        total = 0
        for number, value in _fields(self.data):
            if number == 1 and isinstance(value, memoryview):
                if self.kind == "float":
                    total += len(value) // 4
                else:
                    total += int((np.frombuffer(value, dtype=np.uint8) < 128).sum())
            else:
                total += number == 1
        return total


def _varints(data: np.ndarray) -> np.ndarray:
    """Decode packed varints, int64 [n]."""
    if not len(data):
        return np.empty(0, dtype=np.int64)
    ends = np.flatnonzero(data < 128)
    if not len(ends) or ends[-1] != len(data) - 1:
        raise ValueError("a number is cut off")
    if len(ends) == len(data):  # numbers below 128
        return data.astype(np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends + 1 - starts
    if lengths.max() > _MOST_BITS // 7:
        raise ValueError("a number has more than 64 bits")
    places = np.arange(len(data)) - np.repeat(starts, lengths)
    bits = (data & 127).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.add.reduceat(bits, starts).view(np.int64)


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]  # IndexError: cut off
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (2**64 - 1), place
        shift += 7
        if shift >= _MOST_BITS:
            raise ValueError("a number has more than 64 bits")


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a message: number, and value: an integer of 64 or 32 bits, or bytes."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, place = _varint(data, place)
            yield number, value
            continue
        if wire == 2:
            size, place = _varint(data, place)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"a field has the wire type {wire}")
        if size > len(data) - place:
            raise ValueError(f"a field has {size:,} bytes, of which {len(data) - place:,} are there")
        piece = data[place : place + size]
        place += size
        yield number, piece if wire == 2 else int.from_bytes(piece, "little")


def _message(data: memoryview, number: int) -> memoryview:
    """The last field of bytes with a number; empty if there is none."""
    found = data[:0]
    for each, value in _fields(data):
        if each == number and isinstance(value, memoryview):
            found = value
    return found


def features_of(record: memoryview) -> dict[str, Feature]:
    """The features of an Example, by name; lists are not decoded.

    Raises:
        ValueError, IndexError: the record is damaged.
    """
    found: dict[str, Feature] = {}
    for number, entry in _fields(_message(record, 1)):
        if number != 1 or not isinstance(entry, memoryview):
            continue
        name = bytes(_message(entry, 1)).decode()
        for kind, data in _fields(_message(entry, 2)):
            if kind in _LISTS and isinstance(data, memoryview):
                found[name] = Feature(_LISTS[kind], data)
    return found


class Records:
    """The records of a TFRecord file.

    Args:
        folder: of the file. name: of the file in it.
    """

    def __init__(self, folder: SourceFolder, name: str) -> None:
        self._folder, self._name = folder, name
        self._path = folder.at(name)

    @contextlib.contextmanager
    def opened(self, *, check: bool) -> Iterator[Iterator[memoryview]]:
        """The records, one after another: valid until the next one, and in this context.

        Args:
            check: whether to compare the CRC of records; that of their lengths is compared anyway.

        Raises:
            SourceError: the file is damaged, or ends in a record.
        """
        crc = require("google_crc32c", "Reading a TFRecord file")
        try:
            file = self._folder.open(self._name)
        except SourceError:
            raise
        except OSError as error:
            raise SourceError(f"The file {self._path!r} cannot be read: {error}.") from error
        with file:
            size = file.seek(0, os.SEEK_END)
            if not size:
                yield iter(())
                return
            if self._folder.remote:
                yield self._walk(functools.partial(_read, file), size, crc, check)
                return
            memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
            whole = memoryview(memory)
            try:
                yield self._walk(lambda begin, end: whole[begin:end], size, crc, check)
            finally:
                whole.release()
                with contextlib.suppress(BufferError):  # a caller keeps a view: it goes with the last one
                    memory.close()

    def _walk(
        self, piece: Callable[[int, int], memoryview], size: int, crc: Any, check: bool
    ) -> Iterator[memoryview]:
        """The records of a file of `size` bytes, of which `piece` returns those from one to another."""
        place, number = 0, 0
        while place < size:
            if place + _HEAD.size > size:
                raise self._damaged(number, place, "it ends in a length")
            head = piece(place, place + _HEAD.size)
            length, expected = _HEAD.unpack(head)
            if _masked(crc, head[:8]) != expected:
                raise self._damaged(number, place, "the CRC of its length is wrong")
            place += _HEAD.size
            if length + _CRC.size > size - place:
                raise self._damaged(
                    number, place, f"it has {length:,} bytes, of which {size - place:,} are there"
                )
            with piece(place, place + length + _CRC.size) as framed, framed[:length] as record:
                if check and _masked(crc, record) != _CRC.unpack(framed[length:])[0]:
                    raise self._damaged(number, place, "its CRC is wrong")
                yield record
            place += length + _CRC.size
            number += 1

    def _damaged(self, number: int, place: int, problem: str) -> SourceError:
        return SourceError(
            f"The file {self._path!r} is damaged at record {number}, byte {place:,}: {problem}. Fetch or write it "
            "again."
        )


def _read(file: IO[bytes], begin: int, end: int) -> memoryview:
    file.seek(begin)
    return memoryview(file.read(end - begin))


def _masked(crc: Any, data: memoryview) -> int:
    value = int(crc.value(bytes(data)))
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF
