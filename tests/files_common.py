"""Contents of files that tests of readers share: encoded images, tar archives, and damaged copies of a file."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Iterator, Mapping

import numpy as np
import pytest


def pngs(count: int, height: int, width: int) -> list[bytes]:
    """Images of one value each, that of their number; skips the test without Pillow."""
    image = pytest.importorskip("PIL.Image")
    found = []
    for number in range(count):
        memory = io.BytesIO()
        image.fromarray(np.full((height, width, 3), number, np.uint8)).save(memory, "png")
        found.append(memory.getvalue())
    return found


def tarred(members: Mapping[str, bytes]) -> bytes:
    """A tar archive of files, name -> content."""
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return memory.getvalue()


def damaged(whole: bytes, count: int) -> Iterator[bytes]:
    """So many copies: of each three one is cut, and of the others up to four bytes are changed."""
    made = random.Random(0)
    for number in range(count):
        data = bytearray(whole)
        if number % 3:
            for _ in range(made.randint(1, 4)):
                data[made.randrange(len(data))] = made.randrange(256)
        else:
            del data[made.randrange(len(data)) :]
        yield bytes(data)
