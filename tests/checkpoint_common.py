"""What the tests of checkpoints share: everything a checkpoint holds, and files as they are on the disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from options_common import nested_table
from table_common import COLUMNS, RAGGED, Died, bits, number_of

import gear_loader as gear
from gear_loader.storage.counters import NEXT_SEQUENCE

SIZES: dict[str, Any] = {"max_steps": 400, "max_trajectories": 40, "block_steps": 4}
CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "close", "link")


def make(*, ragged: bool = False, **options: Any) -> gear.Table:
    """A private table of `COLUMNS`, or of `RAGGED`."""
    sizes = {**SIZES, "payload": 100_000} if ragged else SIZES
    return gear.Table.create(RAGGED if ragged else COLUMNS, **nested_table({**sizes, **options}))


def contents(table: gear.Table) -> dict[str, Any]:
    """Everything of a table that a checkpoint keeps, but for the ages: these go on."""
    table.check_valid()
    slots = table.indices()
    layout, stats = table._engine.region.layout, table.stats()
    return {
        "schema": table.schema.to_json(),
        "sizes": (layout.max_steps, layout.max_trajectories, layout.block_steps, layout.num_blocks),
        "rules": table.rules.to_json(),
        "counts": (stats.num_inserted, stats.num_sampled),
        "lengths": table.lengths().tolist(),
        "sequences": table._engine.region.array("sequence")[slots].tolist(),
        "priorities": table._engine.region.array("priority")[slots].tolist(),
        "times_sampled": table._engine.region.array("sampled")[slots].tolist(),
        "next_sequence": int(table._engine.region.array("counters")[NEXT_SEQUENCE]),
        "contents": [{name: bits(value) for name, value in table[int(slot)].items()} for slot in slots],
    }


def draw(table: gear.Table, count: int) -> None:
    """Draw the oldest `count` trajectories, as the sampler `Fifo` does."""
    ticket, _, times = table._engine.reader().take_ends(count, newest=False, samples=count)
    ticket.end()
    assert (times > 0).all()


def loaded(path: Path, **options: Any) -> dict[str, Any]:
    """`contents` of the table that a checkpoint holds."""
    with gear.Table.load(path, **options) as table:
        return contents(table)


def loaded_numbers(path: Path) -> list[int]:
    """The numbers of all trajectories of a checkpoint of `COLUMNS`, each of which has to be whole."""
    with gear.Table.load(path) as table:
        return [number_of(table[int(slot)]) for slot in table.indices()]


def files(path: Path) -> dict[str, tuple[int, int]]:
    """Every file of a checkpoint but the lock: relative path -> (inode, time of the last change)."""
    found = {}
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.name != ".gear-loader.lock":
            info = os.stat(file)
            found[str(file.relative_to(path))] = (info.st_ino, info.st_mtime_ns)
    return found


def everything(folder: Path) -> dict[str, Any]:
    """Every entry of a directory and what is in it; of a link, where it points to."""
    found: dict[str, Any] = {}
    for entry in sorted(folder.rglob("*")):
        name = str(entry.relative_to(folder))
        if entry.is_symlink():
            found[name] = os.readlink(entry)
        else:
            found[name] = entry.read_bytes() if entry.is_file() else "directory"
    return found


def link(place: Path, target: Path) -> None:
    """Put a link into the place of whatever is there."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.symlink_to(target)


def segments(path: Path) -> list[str]:
    """Names of the segments there are."""
    return sorted(entry.name for entry in (path / "segments").iterdir())


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    data = np.fromfile(path, dtype=np.uint8)
    data[place] ^= 1 << bit
    path.write_bytes(data.tobytes())


@contextlib.contextmanager
def small_disk(path: Path, kibibytes: int) -> Iterator[Path]:
    """A file system that is soon full; skips the test where none can be mounted."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "none", str(path)]
    if (done := subprocess.run(mount, capture_output=True)).returncode:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@contextlib.contextmanager
def dying(
    after: int, calls: Sequence[str], counts: Callable[[tuple[Any, ...]], bool] = lambda _: True
) -> Iterator[None]:
    """After so many calls of the system no other is made, also not to tidy up.

    Args:
        calls: names in `os`.
        counts: of a call's arguments: whether it is one of them.
    """
    left = after
    genuine = {name: getattr(os, name) for name in calls}

    def mortal(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal left
            if counts(args):
                left -= 1
                if left < 0:
                    if name == "close":  # or descriptors, and the lock, would outlive the simulation
                        genuine[name](*args, **options)
                    raise Died
            return genuine[name](*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch.setattr(os, name, mortal(name))
        yield
