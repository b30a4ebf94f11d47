"""Pngs that are decoded without Pillow have the pixels that Pillow decodes; all others are left to it."""

from __future__ import annotations

import contextlib
import io
import itertools
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch

import gear_loader as gear
from gear_loader.storage import coders

PIL = pytest.importorskip("PIL.Image")
COLOURS = {1: 0, 3: 2, 4: 6}
OTHER = "of another kind"


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(
    random: Any, size: tuple[int, int, int], *, first: list[bytes] | None = None, interlaced: int = 0
) -> bytes:
    """An image of random filters of random bytes, in up to 3 chunks."""
    height, width, channels = size
    rows = random.integers(0, 256, (height, 1 + width * channels), dtype=np.uint8)
    rows[:, 0] = random.integers(0, 5, height)
    data = zlib.compress(rows.tobytes(), int(random.integers(0, 10)))
    ends = [0, *sorted(random.integers(0, len(data) + 1, int(random.integers(0, 3))).tolist()), len(data)]
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, COLOURS[channels], 0, 0, interlaced))
    body = [chunk(b"IDAT", data[a:b]) for a, b in itertools.pairwise(ends)]
    return b"".join([b"\x89PNG\r\n\x1a\n", head, *(first or []), *body, chunk(b"IEND", b"")])


def by_pillow(blob: bytes) -> Any:
    return np.asarray(PIL.open(io.BytesIO(blob)))


def coder(channels: int) -> Any:
    ragged = gear.Column(torch.uint8, (None, None, channels), codec="png").ragged
    assert ragged is not None
    assert ragged.coded is not None
    return coders.coder_of(ragged.coded)


def decode(blob: bytes, size: tuple[int, int, int]) -> Any:
    out = np.full(size, 77, np.uint8)
    coder(size[2]).decode(memoryview(blob), out)
    return out


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_all_filters_are_undone(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coders._Pillow, "decode", None)
    random = np.random.default_rng(channels)
    for size in ((1, 1), (1, 7), (9, 1), (40, 33)):
        for _ in range(6):
            blob = png(random, (*size, channels), first=[chunk(b"tEXt", b"a\0b"), chunk(b"gAMA", bytes(4))])
            assert (decode(blob, (*size, channels)) == by_pillow(blob).reshape(*size, channels)).all()


def test_what_is_unusual_is_left_to_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    random, size = np.random.default_rng(0), (6, 5, 3)
    whole = png(random, size)
    again = chunk(b"IHDR", struct.pack(">IIBBBBB", *size[1::-1], 8, 2, 0, 0, 0))
    others = {
        "interlaced": png(random, size, interlaced=1),
        "animated": png(random, size, first=[chunk(b"acTL", struct.pack(">II", 1, 0))]),
        "two headers": png(random, size, first=[again]),
        "truncated": whole[:-20],
        "no end": whole[:-12],
        "too few rows": png(random, (5, 5, 3)),
        "too many rows": png(random, (7, 5, 3)),
        "another filter": whole[:33] + chunk(b"IDAT", zlib.compress(b"\5" + bytes(95))) + whole[-12:],
        "no zlib": whole[:33] + chunk(b"IDAT", b"\0\0" + bytes(95)) + whole[-12:],
        "damaged": whole[:33] + chunk(b"IDAT", b"\x78\x01\xff") + whole[-12:],
        "a wrong checksum": whole[:45] + bytes([whole[45] ^ 1]) + whole[46:],
        "no pixels": whole[:33] + whole[-12:],
    }

    def refuse(self: Any, blob: memoryview, out: Any) -> None:
        raise ValueError(OTHER)

    decode(whole, size)
    monkeypatch.setattr(coders._Pillow, "decode", refuse)
    for blob in others.values():
        with pytest.raises(ValueError, match=OTHER):
            decode(blob, size)


def test_mutated_files_with_right_checksums_are_as_pillow_has_them() -> None:
    random, size, seen = np.random.default_rng(1), (6, 5, 3), {"equal": 0, "refused": 0}
    whole = png(random, size)
    for i in range(400):
        rows = random.integers(0, 256, (6, 16), dtype=np.uint8)
        rows[:, 0] = random.integers(0, 5, 6)
        data = bytearray(zlib.compress(rows.tobytes(), i % 3))
        if i % 4:
            data[(0, 0, 1, int(random.integers(len(data))))[i % 4]] ^= int(random.integers(1, 256))
        else:
            data += random.bytes(3)
        blob = whole[:33] + chunk(b"IDAT", bytes(data)) + whole[-12:]
        try:
            expected = by_pillow(blob)
        except (OSError, SyntaxError, ValueError):
            with contextlib.suppress(OSError, SyntaxError, ValueError):
                decode(blob, size)
            seen["refused"] += 1
            continue
        assert (decode(blob, size) == expected).all()
        seen["equal"] += 1
    assert min(seen.values()) > 5, seen
