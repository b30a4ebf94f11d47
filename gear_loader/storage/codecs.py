"""Codecs of columns: how values are encoded (`Codec`), and what a column with one holds (`Coded`).

The packages that encode and decode are imported by `gear_loader.storage.coders` on first use.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, Literal

from gear_loader.errors import SchemaError
from gear_loader.storage.dtypes import ITEM_BYTES, torch_dtypes
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import byte_count, flag, integer, one_of
from gear_loader.utils.lazy_torch import torch

CHANNELS = {"jpeg": (1, 3), "png": (1, 3, 4), "webp": (3, 4)}
"""The codecs of images, and how many channels these may have."""
_BEGINNINGS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp"}
_QUALITY = ("jpeg", "webp")
_LEVELS = {"png": (0, 9), "zstd": (-7, 22), "lz4": (0, 16)}


def image_codec(data: bytes | memoryview) -> str:
    """The codec of an encoded image, by its first bytes; an empty text of others."""
    head = bytes(data[:4])
    return next((name for begin, name in _BEGINNINGS.items() if head.startswith(begin)), "")


@dataclasses.dataclass(frozen=True)
class Codec:
    """How the values of a column are encoded: ``Column(torch.uint8, (224, 224, 3), codec=Codec("jpeg", quality=85))``.

    =========== ============================== ============================ ===================
    name        values                         decoded values               package
    =========== ============================== ============================ ===================
    ``"jpeg"``  uint8 [h, w, 1 or 3]           close to those added (lossy) simplejpeg
    ``"png"``   uint8 [h, w, 1, 3 or 4]        equal, bit for bit           Pillow
    ``"webp"``  uint8 [h, w, 3 or 4]           equal; lossy with a quality  Pillow
    ``"zstd"``  any dtype and shape            equal, bit for bit           zstandard
    ``"lz4"``   any dtype and shape            equal, bit for bit           lz4
    ``"video"`` uint8 [h, w, 3], h, w even     close to those added (lossy) av (PyAV)
    =========== ============================== ============================ ===================

    ``"video"`` is H.264 over the steps of a trajectory, without references to later frames: a frame is decoded from the
    last key frame on, frames of one group that a batch delivers in one pass.

    Args:
        name: of the table above.
        quality: of ``"jpeg"`` (by default 90) and of ``"webp"``, which is lossless without one; 1 to 100. Colours of
            jpeg have half the resolution (4:2:0).
        level: effort of ``"png"`` (0 to 9, by default 1), ``"zstd"`` (-7 to 22, by default 3) and ``"lz4"`` (0 to 16,
            by default 0).
        crf: of ``"video"``: the constant rate factor, 0 to 51; smaller is better and larger; by default 23.
        key_frames: of ``"video"``: a frame of that many, 1 to 65,535, stands for itself; by default one in 10. To
            decode a frame takes half as many others on average.
        cache: of ``"video"``: bytes of decoded frames that each process keeps, an int or a text; by default none.
        verify: whether values that are given encoded are decoded when they are added. Otherwise their header is read,
            and the format and the decoded size in it must be the column's.
        max_bytes: most bytes of a decoded value, an int or a text, where the column's shape has None.

    Raises:
        SchemaError: an unknown name, or an option that the codec does not have, or out of its range.
    """

    name: Literal["jpeg", "png", "webp", "zstd", "lz4", "video"]
    quality: int | None = dataclasses.field(default=None, kw_only=True)
    level: int | None = dataclasses.field(default=None, kw_only=True)
    crf: int | None = dataclasses.field(default=None, kw_only=True)
    key_frames: int | None = dataclasses.field(default=None, kw_only=True)
    cache: int | str | None = dataclasses.field(default=None, kw_only=True)
    verify: bool = dataclasses.field(default=False, kw_only=True)
    max_bytes: int | str = dataclasses.field(default=1 << 28, kw_only=True)

    def __post_init__(self) -> None:
        one_of("Codec name", self.name, (*CHANNELS, "zstd", "lz4", "video"))
        self._check("quality", (1, 100) if self.name in _QUALITY else None)
        self._check("level", _LEVELS.get(self.name))
        self._check("crf", (0, 51) if self.name == "video" else None)
        self._check("key_frames", (1, 65_535) if self.name == "video" else None)
        if self.cache is not None:
            size = byte_count("Codec cache", self.cache)
            object.__setattr__(self, "cache", size)
            self._check("cache", (1, size) if self.name == "video" else None)
        flag("Codec verify", self.verify)
        object.__setattr__(self, "max_bytes", byte_count("Codec max_bytes", self.max_bytes))

    def _check(self, option: str, bounds: tuple[int, int] | None) -> None:
        value = getattr(self, option)
        if value is None:
            return
        if bounds is None:
            raise SchemaError(f"Codec {self.name!r} was given {option}={shown(value)}; it has no {option}.")
        value = integer(f"Codec {option}", value)
        if not bounds[0] <= value <= bounds[1]:
            raise SchemaError(
                f"Codec {option} is {value}; expected {bounds[0]} to {bounds[1]} for {self.name!r}."
            )
        object.__setattr__(self, option, value)

    @classmethod
    def of(cls, given: Any) -> Codec:
        """A codec that was given as one, or by its name."""
        return given if isinstance(given, Codec) else cls(given)

    def to_text(self) -> str:
        """The codec as it is stored with a table."""
        return json.dumps(self._options(), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Codec:
        """The inverse of `to_text`. Checks every value, because the source may be untrusted."""
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError, RecursionError) as error:
            raise SchemaError(f"Codec {shown(text)} was received, which is not valid: {error}") from None

    def _options(self) -> dict[str, Any]:
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        return {
            name: getattr(self, name) for name, default in fields.items() if getattr(self, name) != default
        }

    def __repr__(self) -> str:
        first, *others = self._options().items()
        return f"Codec({first[1]!r}{''.join(f', {name}={value!r}' for name, value in others)})"


@dataclasses.dataclass(frozen=True)
class Coded:
    """The decoded values of a column with a codec.

    Attributes:
        codec: encodes them. dtype_name: of an element. shape: of a value; None for extents that vary.
    """

    codec: Codec
    dtype_name: str
    shape: tuple[int | None, ...]

    def __post_init__(self) -> None:
        if self.codec.name == "video":
            fits = self.dtype_name == "uint8" and len(self.shape) == 3 and self.shape[2] == 3 and self.fixed
            if not fits or any(extent % 2 for extent in self.row_shape[:2]):
                raise SchemaError(
                    f"A column of {self!r} was asked for; expected uint8 of shape (h, w, 3), with even h and w."
                )
            return
        channels = CHANNELS.get(self.codec.name)
        varying = [place for place, extent in enumerate(self.shape) if extent is None]
        if channels is None:
            if varying not in ([], [0]):
                raise SchemaError(
                    f"A column of {self!r} has None as extent {varying[-1]}; expected it as the first one only."
                )
            return
        expected = [f"(h, w, {count})" for count in channels]
        fits = self.dtype_name == "uint8" and len(self.shape) == 3 and self.shape[2] in channels
        if not fits:
            raise SchemaError(
                f"A column of {self!r} was asked for; expected uint8 of shape {' or '.join(expected)}, whose h and w "
                "may be None."
            )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of an element."""
        return torch_dtypes()[self.dtype_name]

    @property
    def fixed(self) -> bool:
        """Whether all values have the same shape."""
        return None not in self.shape

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The extents that do not vary: of a value, or of a row of one."""
        return tuple(extent for extent in self.shape if extent is not None)

    @property
    def row_bytes(self) -> int:
        """Bytes of `row_shape`."""
        return math.prod(self.row_shape) * ITEM_BYTES[self.dtype_name]

    def check_shape(self, found: tuple[int, ...]) -> None:
        """Raise ValueError unless a value of this shape belongs to the column."""
        if found == self.shape and all(found):  # at once: this is asked for each image
            return
        fits = len(found) == len(self.shape)
        if not fits or any(
            wanted not in (None, extent) for wanted, extent in zip(self.shape, found, strict=True)
        ):
            raise ValueError(f"shape {list(found)}; expected {list(self.shape)}")
        if 0 in found and self.codec.name in CHANNELS:
            raise ValueError(f"shape {list(found)}; expected an image of at least one pixel")
        size = math.prod(found) * ITEM_BYTES[self.dtype_name]
        if not self.fixed and size > int(self.codec.max_bytes):
            raise ValueError(
                f"shape {list(found)}, {size:,} bytes; expected at most {self.codec.max_bytes:,}, the codec's max_bytes"
            )

    def __repr__(self) -> str:
        plain = self.codec == Codec(self.codec.name)
        codec = repr(self.codec.name) if plain else repr(self.codec)
        return f"dtype=torch.{self.dtype_name}, shape={self.shape!r}, codec={codec}"
