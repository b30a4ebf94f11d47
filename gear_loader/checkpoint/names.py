"""Names of a checkpoint's files, and the header of a column's file."""

from __future__ import annotations

import functools
import re
import urllib.parse

import numpy as np
import xxhash

MANIFEST_NAME = "manifest.json"
PREVIOUS_NAME = "manifest.previous.json"
SHARDS_NAME = "shards.json"
SEGMENTS_NAME = "segments"
LOCK_NAME = ".gear-loader.lock"
CHECKSUMS_NAME = "checksums.xxh3"
INDEX_NAME = re.compile(r"index\.([0-9]{6,12})(?:-([0-9a-f]{16}))?\.(?:records|safetensors)")
ARCHIVED = re.compile(r"([a-z0-9]+)://.+/segments/([0-9]{6,12})-[0-9a-f]{16}")
"""The address of a segment in an archive."""
WRITABLE = ("abfs", "abfss", "az", "gcs", "gs", "hf", "memory", "oci", "oss", "s3", "s3a")
"""Schemes of stores that replace an object at once. Others, such as SFTP, show a reader half of a manifest."""
SEGMENT_NAME = re.compile(r"[0-9]{6,12}(?:-[0-9a-f]{16})?")
PART = ".part"
"""Suffix of an unfinished file or segment."""

_VALUES = "\0values"  # no column's name has control characters
_NAME_LIMIT = 100
_HEADER_MULTIPLE = 4096  # so that the data begin at a disk sector
_COLUMN_NAME = re.compile(r"[A-Za-z0-9_.~%-]+\.npy")


def numbered(number: int, token: str = "") -> str:
    """A number in a name, with the random token of the save, if it has one: 16 hexadecimal digits."""
    return f"{number:06d}-{token}" if token else f"{number:06d}"


def segment_folder(number: int, token: str = "") -> str:
    """Path of segment `number`, relative to the checkpoint."""
    return f"{SEGMENTS_NAME}/{numbered(number, token)}"


def index_file(number: int, token: str = "") -> str:
    """The name of the index that save `number` began."""
    return f"index.{numbered(number, token)}.records"


def values_of(column: str) -> str:
    """What the values of a ragged column are called, beside the names of columns."""
    return column + _VALUES


def column_of(name: str) -> str:
    """The inverse of `values_of`."""
    return name.removesuffix(_VALUES)


@functools.lru_cache(1 << 12)
def column_file(column: str) -> str:
    """File name of a column: its name, percent-encoded; a long name is cut and a digest appended.

    That of the values of a ragged column ends with ``%values``, as no encoded name does.
    """
    if column.endswith(_VALUES):
        return column_file(column_of(column)).removesuffix(".npy") + "%values.npy"
    quoted = urllib.parse.quote(column, safe="", errors="surrogatepass")
    if len(quoted) > _NAME_LIMIT:
        digest = xxhash.xxh3_128_hexdigest(column.encode("utf-8", "surrogatepass"))
        quoted = f"{quoted[:_NAME_LIMIT]}-{digest}"
    return quoted + ".npy"


def is_segment_file(name: str) -> bool:
    """Whether a save writes files of this name into a segment."""
    return name == CHECKSUMS_NAME or _COLUMN_NAME.fullmatch(name) is not None


def npy_header(dtype: str, steps: int, shape: tuple[int, ...]) -> bytes:
    """Header of a column's file: version 1.0 of numpy's format, padded to whole disk sectors.

    Args:
        dtype: name of the column's dtype.
    """
    descr = np.dtype("uint16" if dtype == "bfloat16" else dtype).str
    text = repr({"descr": descr, "fortran_order": False, "shape": (steps, *shape)}).encode()
    total = -(-(10 + len(text) + 1) // _HEADER_MULTIPLE) * _HEADER_MULTIPLE
    return b"\x93NUMPY\x01\x00" + (total - 10).to_bytes(2, "little") + text.ljust(total - 11) + b"\n"
