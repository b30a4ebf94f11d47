"""Encoders and decoders of values, each by a package that is imported on first use. All release the GIL as they work.

A header is read before anything is decoded: a value whose decoded size is not the column's is refused without memory
being allocated for it.
"""

from __future__ import annotations

import functools
import importlib
import io
import struct
import threading
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from gear_loader.storage.codecs import Coded
from gear_loader.storage.ragged import Values
from gear_loader.storage.video import Video
from gear_loader.utils.arrays import Array

_PACKAGES = {
    "video": "av",
    "jpeg": "simplejpeg",
    "png": "PIL.PngImagePlugin",
    "webp": "PIL.WebPImagePlugin",
    "zstd": "zstandard",
    "lz4": "lz4.frame",
}
_INSTALL = "Install it: pip install '.[{}]' (in a clone of Gear Loader)"
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


class Coder(Protocol):
    """Encodes and decodes the values of a column; several threads may do so at once."""

    def encode(self, array: Array) -> bytes:
        """An encoded value of a contiguous array of the column's dtype, or of its bytes."""

    def shape(self, blob: memoryview) -> tuple[int, ...]:
        """The shape of an encoded value, by its header; ValueError if it is none."""

    def decode(self, blob: memoryview, out: Array) -> None:
        """Decode a value of the shape of `out`, contiguous; raises an error of any class if it is damaged."""


@functools.cache
def coder_of(coded: Coded) -> Coder:
    """The coder of a column's values, which is no video.

    Raises:
        ImportError: the package of the codec is not installed; the message names what to install.
    """
    name, package = coded.codec.name, _package(coded)
    kinds: dict[str, Any] = {"jpeg": _Jpeg, "zstd": _Zstd, "lz4": _Lz4}
    made: Coder = kinds.get(name, _Pillow)(package, coded)
    return made


@functools.cache
def video_of(coded: Coded) -> Video:
    """The coder of a column of video; ImportError as `coder_of`."""
    return Video(_package(coded), coded)


def _package(coded: Coded) -> Any:
    name, extra = coded.codec.name, "video" if coded.codec.name == "video" else "codecs"
    try:
        return importlib.import_module(_PACKAGES[name])
    except ImportError as error:
        raise ImportError(
            f"codec={name!r} needs the package {_PACKAGES[name].partition('.')[0]!r}, which cannot be imported "
            f"({error}). {_INSTALL.format(extra)}",
            name=_PACKAGES[name],
        ) from error


def check_packages(columns: Iterable[Values]) -> None:
    """Raise ImportError, as `coder_of`, if ragged columns have a codec whose package is not installed."""
    for values in columns:
        if values.coded is not None:
            _package(values.coded)


class _Jpeg:
    def __init__(self, package: Any, coded: Coded) -> None:
        self._package, self._quality = package, coded.codec.quality or 90
        self._colours = "GRAY" if coded.shape[2] == 1 else "RGB"

    def encode(self, array: Array) -> bytes:
        options = {
            "colorspace": self._colours,
            "colorsubsampling": "Gray" if self._colours == "GRAY" else "420",
        }
        encoded: bytes = self._package.encode_jpeg(array, self._quality, **options)
        return encoded

    def shape(self, blob: memoryview) -> tuple[int, ...]:
        height, width, colours, _ = self._package.decode_jpeg_header(blob)
        if colours not in ("Gray", "YCbCr", "RGB"):
            raise ValueError(f"a jpeg of the colours {colours}; expected Gray, YCbCr or RGB")
        return height, width, 1 if colours == "Gray" and self._colours == "GRAY" else 3

    def decode(self, blob: memoryview, out: Array) -> None:
        self._package.decode_jpeg(blob, self._colours, buffer=out)


class _Pillow:
    def __init__(self, package: Any, coded: Coded) -> None:
        self._package, self._codec = package, coded.codec
        assert coded.shape[2] is not None
        self._channels = coded.shape[2]
        self._mode = _MODES[self._channels]
        # In place of `Image.open`, which has a limit of pixels of its own.
        self._open = package.PngImageFile if self._codec.name == "png" else package.WebPImageFile

    def encode(self, array: Array) -> bytes:
        memory = io.BytesIO()
        options: dict[str, Any] = {"compress_level": 1 if self._codec.level is None else self._codec.level}
        if self._codec.name == "webp":
            options = {"quality": self._codec.quality}
            if self._codec.quality is None:
                options = {"lossless": True, "exact": True, "quality": 0, "method": 0}
        image = self._package.Image.fromarray(array[:, :, 0] if self._channels == 1 else array)
        image.save(memory, self._codec.name, **options)
        return memory.getvalue()

    def shape(self, blob: memoryview) -> tuple[int, ...]:
        height, width, channels = (_png_shape if self._codec.name == "png" else _webp_shape)(bytes(blob[:33]))
        if self._codec.name == "webp" and self._channels == 4:
            channels = 4  # an encoder leaves opaque alpha away
        return height, width, channels

    def decode(self, blob: memoryview, out: Array) -> None:
        with self._open(io.BytesIO(blob)) as image:
            if (image.height, image.width) != out.shape[:2]:
                raise ValueError(f"an image of {image.height} x {image.width}")
            found = np.asarray(image if image.mode == self._mode else image.convert(self._mode))
        out[:] = found.reshape(out.shape)


def _png_shape(head: bytes) -> tuple[int, int, int]:
    if len(head) < 33 or head[:8] != b"\x89PNG\r\n\x1a\n" or head[12:16] != b"IHDR":
        raise ValueError("no png")
    width, height, depth, colours = struct.unpack(">IIBB", head[16:26])
    channels = {0: 1, 2: 3, 6: 4}.get(colours)
    if depth != 8 or channels is None:
        raise ValueError(
            f"a png of {depth} bits and colour type {colours}; expected 8 bits, and gray, RGB or RGBA"
        )
    return height, width, channels


def _webp_shape(head: bytes) -> tuple[int, int, int]:
    if len(head) < 30 or head[:4] != b"RIFF" or head[8:12] != b"WEBP":
        raise ValueError("no webp")
    kind = head[12:16]
    if kind == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack("<HH", head[26:30])
        return height & 0x3FFF, width & 0x3FFF, 3
    if kind == b"VP8L" and head[20] == 0x2F:
        bits = int.from_bytes(head[21:25], "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1, 4 if bits >> 28 & 1 else 3
    if kind == b"VP8X" and not head[20] & 0x02:
        width, height = (int.from_bytes(head[place : place + 3], "little") + 1 for place in (24, 27))
        return height, width, 4 if head[20] & 0x10 else 3
    raise ValueError("no webp of one image")


class _Bytes:
    """What compresses bytes of any dtype: the header has their number."""

    def __init__(self, package: Any, coded: Coded) -> None:
        self._package, self._coded, self._local = package, coded, threading.local()

    def shape(self, blob: memoryview) -> tuple[int, ...]:
        count, coded = self._count(blob), self._coded
        if coded.fixed:
            if count != coded.row_bytes:
                raise ValueError(f"{count:,} bytes; expected {coded.row_bytes:,}")
            return coded.row_shape
        if count % coded.row_bytes:
            raise ValueError(f"{count:,} bytes; expected a multiple of {coded.row_bytes:,}")
        return (count // coded.row_bytes, *coded.row_shape)

    def _count(self, blob: memoryview) -> int:
        raise NotImplementedError


class _Zstd(_Bytes):
    def encode(self, array: Array) -> bytes:
        if not hasattr(self._local, "compressor"):
            level = 3 if self._coded.codec.level is None else self._coded.codec.level
            self._local.compressor = self._package.ZstdCompressor(level)
        encoded: bytes = self._local.compressor.compress(array)
        return encoded

    def _count(self, blob: memoryview) -> int:
        try:
            count = int(self._package.frame_content_size(blob))
        except self._package.ZstdError as error:
            raise ValueError(f"no zstd frame: {error}") from None
        if count < 0:
            raise ValueError("a zstd frame whose header lacks the decoded size")
        return count

    def decode(self, blob: memoryview, out: Array) -> None:
        if not hasattr(self._local, "decompressor"):
            self._local.decompressor = self._package.ZstdDecompressor(max_window_size=1 << 27)
        into, count = out.reshape(-1).view(np.uint8), 0
        with self._local.decompressor.stream_reader(blob) as reader:
            while count < len(into) and (more := reader.readinto(into[count:])):
                count += more
            if count < len(into) or reader.read(1):
                raise ValueError(f"{count:,} bytes or more; expected {len(into):,}")


class _Lz4(_Bytes):
    def encode(self, array: Array) -> bytes:
        encoded: bytes = self._package.compress(array, compression_level=self._coded.codec.level or 0)
        return encoded

    def _count(self, blob: memoryview) -> int:
        try:
            count = int(self._package.get_frame_info(blob)["content_size"])
        except RuntimeError as error:
            raise ValueError(f"no lz4 frame: {error}") from None
        # A bit of the descriptor tells whether it has the size, which an empty frame (an end mark alone) does without.
        if not blob[4] & 0x08 and blob[7:11] != bytes(4):
            raise ValueError("an lz4 frame whose header lacks the decoded size")
        return count

    def decode(self, blob: memoryview, out: Array) -> None:
        into, reader = out.reshape(-1).view(np.uint8), self._package.LZ4FrameDecompressor()
        found = reader.decompress(blob, max_length=len(into) + 1)
        if len(found) != len(into) or not reader.eof:
            raise ValueError(f"{len(found):,} bytes; expected {len(into):,} in a whole frame")
        into[:] = np.frombuffer(found, dtype=np.uint8)
