"""Writing a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from gear_loader.checkpoint import manifest as manifest_module
from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.files import Pipeline, Rows, check_size, copy_pieces, write_small
from gear_loader.checkpoint.index import Entries, read_entries
from gear_loader.checkpoint.manifest import (
    INDEX_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    PART,
    SEGMENT_NAME,
    SEGMENTS_NAME,
    FileRecord,
    Manifest,
    Segment,
    check_cost,
    column_file,
    index_file,
    is_column_file,
    npy_header,
    read_manifest,
    segment_folder,
)
from gear_loader.errors import CheckpointError, GearError
from gear_loader.storage.counters import FIRST_SEQUENCE, IDENTITY, NEXT_SEQUENCE, NUM_SAMPLED
from gear_loader.storage.ids import origin_of
from gear_loader.storage.index import Index, Ticket
from gear_loader.storage.lock import process_start
from gear_loader.storage.recovery import READY
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array
from gear_loader.utils.notices import notice
from gear_loader.utils.progress import progress_bar

__all__ = [
    "check_owned",
    "descended",
    "identity",
    "locked",
    "refuse_links",
    "remove_checkpoint",
    "reporting",
    "save",
    "save_into",
]

# While a trajectory is being copied, nothing that was retired meanwhile can be used again, so a writer of a full table
# waits. Saving is therefore done in rounds: what there is to write is written piece by piece, each under a ticket of
# its own, and what has been evicted before its turn came is left out; then what has been added meanwhile is written;
# until so little is left that the last round can be written under one ticket. That moment is the cut.
HOLD_BYTES = 128 << 20
"""What is written under one ticket, the cut's."""
MAX_ROUNDS = 6
"""If writers are as fast as the disk the rest never gets small: the last round is then written under one ticket."""

MAX_SEGMENTS = 16
"""With more, the smallest are written anew as one, until half as many are left."""


def save(table: Table, path: str | os.PathLike[str], *, progress: bool = False) -> None:
    """Bring the checkpoint in directory `path` up to date with a table. See `Table.save`."""
    table._live()
    where = os.path.abspath(os.fspath(path))
    with reporting(where), Directory.make(where) as directory:
        save_into(table, directory, progress=progress)


def save_into(table: Table, directory: Directory, *, progress: bool = False) -> None:
    """Bring the checkpoint in an open directory up to date with a table.

    Raises:
        CheckpointError, OSError: it could not be written. The previous checkpoint is as it was.
    """
    index = table._live()
    _check_directory(directory)
    with locked(directory):
        old = _previous(directory)
        _Save(table, index, directory, old).run(progress)


@contextlib.contextmanager
def reporting(directory: str) -> Iterator[None]:
    """What the system refuses becomes an error that says what to do."""
    try:
        yield
    except OSError as error:
        if isinstance(error, GearError):
            raise
        where = error.filename or directory
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "Free some space there, or save to another disk."
        else:
            remedy = "Make the directory writable, or save to another one."
        raise CheckpointError(
            f"{where} cannot be written: {error.strerror or error}. The checkpoint in {directory} is as it was before. "
            f"{remedy}"
        ) from error


def _check_directory(directory: Directory) -> None:
    check_owned(directory, MANIFEST_NAME, _is_rest, what="checkpoint")
    refuse_links(directory)


def _is_rest(name: str) -> bool:
    """Whether a first save that was killed may have left an entry of this name."""
    known = (LOCK_NAME, SEGMENTS_NAME, MANIFEST_NAME + PART)
    return name in known or INDEX_NAME.fullmatch(name.removesuffix(PART)) is not None


def _is_segment(name: str) -> bool:
    """Whether a segment, finished or not, may be called so."""
    return SEGMENT_NAME.fullmatch(name.removesuffix(PART)) is not None


def refuse_links(directory: Directory) -> None:
    """Refuse to write into a checkpoint of which a directory or a file is a symbolic link.

    Raises:
        CheckpointError: one is; the message names it.
    """
    directory.refuse_links(lambda name: name == MANIFEST_NAME or _is_rest(name))
    with (
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
        directory.child(SEGMENTS_NAME) as segments,
    ):
        segments.refuse_links(_is_segment)
        for name in filter(_is_segment, segments.names()):
            with contextlib.suppress(NotADirectoryError), segments.child(name) as segment:
                segment.refuse_links(is_column_file)


def check_owned(directory: Directory, manifest: str, ours: Callable[[str], bool], *, what: str) -> None:
    """Refuse to write into a directory that holds anything but a checkpoint, or the rest of a first save.

    Args:
        manifest: the name of the file that a complete one has.
        ours: whether a file of this name may be the rest of a first save.
        what: the error calls such a checkpoint.

    Raises:
        CheckpointError: it holds something else.
    """
    names = directory.names()
    if manifest in names or not names:
        return
    if LOCK_NAME not in names or not all(ours(name) for name in names):
        raise CheckpointError(
            f"{directory.path} holds {sorted(names)[0]!r} and no {manifest}: it is no {what}, and nothing was "
            "written. Choose an empty directory or a new one."
        )


@contextlib.contextmanager
def locked(directory: Directory) -> Iterator[None]:
    """Nobody else saves into this directory meanwhile."""
    path = directory.at(LOCK_NAME)
    fd = directory.open_lock(LOCK_NAME)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{path} is locked: another save into this directory is going on. Wait for it, or save elsewhere."
            ) from error
        yield
    finally:
        os.close(fd)


def _previous(directory: Directory) -> Manifest | None:
    """The manifest there is; removes what it does not name."""
    manifest = read_manifest(directory) if directory.has(MANIFEST_NAME) else None
    directory.sync()  # who wrote it may have died before; it must be durable before others go
    _sweep(directory, manifest)
    return manifest


def _sweep(directory: Directory, manifest: Manifest | None) -> None:
    """Remove files of earlier and of unfinished saves. What cannot be removed is left to the next save."""
    keep = {f"{segment.number:06d}" for segment in manifest.segments} if manifest else set()
    index = index_file(manifest.saves) if manifest else ""

    def old(name: str) -> bool:
        is_index = INDEX_NAME.fullmatch(name.removesuffix(PART)) is not None
        return name == MANIFEST_NAME + PART or (is_index and name != index)

    directory.remove_files(old)
    with contextlib.suppress(OSError), directory.child(SEGMENTS_NAME) as segments:
        _remove_segments(segments, keep)


def _remove_segments(segments: Directory, keep: Collection[str]) -> None:
    """Remove segments with all files that a save can have written there; what else there is stays."""
    for name in segments.names():
        if _is_segment(name) and name not in keep:
            with contextlib.suppress(OSError):
                with segments.child(name) as segment:
                    segment.remove_files(is_column_file)
                segments.rmdir(name)


def remove_checkpoint(parent: Directory, name: str) -> None:
    """Remove a directory with a checkpoint, or a part of one, in it; of anything else as much as stands in its way.

    Raises:
        OSError: something could not be removed, or is no part of a checkpoint.
    """
    with parent.child(name) as directory:
        with contextlib.suppress(FileNotFoundError):
            with directory.child(SEGMENTS_NAME) as segments:
                _remove_segments(segments, ())
            directory.rmdir(SEGMENTS_NAME)
        directory.remove_files(lambda name: name == MANIFEST_NAME or _is_rest(name))
    parent.rmdir(name)


# Identity --------------------------------------------------------------------------------------------


def identity(table: Table, index: Index) -> tuple[str, str]:
    """The table's name and the save it was loaded from, 16 hexadecimal digits each."""
    here = _process(table)

    def look() -> tuple[str, str]:
        name, parent, pid, start = index.counters[IDENTITY].tolist()
        if name == 0 or (pid, start) not in ((0, 0), here):
            name, parent = 1 + secrets.randbelow(2**63 - 1), 0
            index.counters[IDENTITY] = name, parent, *here
        return f"{name:016x}", f"{parent:016x}"

    return table.region.lock.run(look)


def _process(table: Table) -> tuple[int, int]:
    return (0, 0) if table.name is not None else (os.getpid(), process_start(os.getpid()))


def descended(table: Table, index: Index, save: str) -> None:
    """Note that a table has just been loaded from the save called `save`."""

    def note() -> None:
        index.counters[IDENTITY] = 1 + secrets.randbelow(2**63 - 1), int(save, 16), *_process(table)

    table.region.lock.run(note)


# Saving ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Cut:
    """The table at one moment: the live trajectories, oldest first, and what has been counted; all arrays [n]."""

    slots: Array
    sequences: Array
    lengths: Array
    priorities: Array
    times_sampled: Array
    ages: Array
    idents: Array
    origin: int | None
    next_sequence: int
    num_inserted: int
    num_sampled: int

    def take(self, chosen: Array) -> _Cut:
        """Those where the boolean array `chosen` is True, or that the integer array `chosen` names."""
        arrays = ("slots", "sequences", "lengths", "priorities", "times_sampled", "ages", "idents")
        return dataclasses.replace(self, **{name: getattr(self, name)[chosen] for name in arrays})


def _cut(index: Index, ticket: Ticket) -> _Cut:
    """Begin to read under a new ticket; what is there."""

    def look() -> _Cut:
        now = time.monotonic_ns()  # before what is too old goes: nothing that stays is older than it may be
        index._expire()
        slots = np.flatnonzero(index.state == READY)
        next_sequence = int(index.counters[NEXT_SEQUENCE])
        cut = _Cut(
            slots=slots,
            sequences=index.sequence[slots],
            lengths=index.extent[slots, 0],
            priorities=index.priority[slots],
            times_sampled=index.sampled[slots].astype(np.int64),
            ages=np.maximum(now - index.created[slots], 0),
            idents=index.ident[slots],
            origin=origin_of(index._view),
            next_sequence=next_sequence,
            num_inserted=next_sequence - int(index.counters[FIRST_SEQUENCE]),
            num_sampled=int(index.counters[NUM_SAMPLED]),
        )
        ticket.begin(index)
        return cut

    cut = index._locked(look)
    return cut.take(np.argsort(cut.sequences, kind="stable"))


class _Save:
    """One save: what is there already, what it adds, and the steps from one to the other."""

    def __init__(self, table: Table, index: Index, directory: Directory, old: Manifest | None) -> None:
        self.index, self.directory, self.old = index, directory, old
        self.schema, self.layout = table.schema, table.region.layout
        self.rules = table.rules
        # Held, so that nothing is unmapped if the table is closed meanwhile.
        self.columns = {name: table.region.column(name) for name in table.schema}
        self.name, parent = identity(table, index)
        self.stored = _no_entries()
        self.segments: dict[int, Segment] = {}
        self.next_segment = old.next_segment if old else 1
        if old is None:
            return
        if old.schema.to_json() != table.schema.to_json():
            raise CheckpointError(
                f"{directory.at(MANIFEST_NAME)} is of a table with the schema {old.schema}; this table has "
                f"{table.schema}. Nothing was written. Choose another directory, or remove that checkpoint."
            )
        if old.table != self.name and old.save != parent:
            notice(
                f"checkpoint {directory.path} of {old.table}",
                f"The checkpoint in {directory.path} is of another table; saving replaces it.",
            )
            return
        self._reuse(old)

    def _reuse(self, old: Manifest) -> None:
        """Take what the previous save wrote, but for files that have been lost or cut since."""
        try:
            self.stored = read_entries(self.directory, old)
        except CheckpointError as error:
            notice(f"checkpoint {error}", f"{error} This table is saved anew as a whole.")
            return
        for segment in old.segments:
            try:
                with self.directory.child_to_load(segment_folder(segment.number)) as folder:
                    for name, record in segment.files.items():
                        check_size(folder, column_file(name), record.bytes)
            except CheckpointError as error:
                notice(f"checkpoint {error}", f"{error} Its trajectories are saved anew.")
            else:
                self.segments[segment.number] = segment
        self._forget_others()

    def _forget_others(self) -> None:
        """Entries whose segment is not to be used any more have to be written again."""
        self.stored = self.stored.take(np.isin(self.stored.segment, list(self.segments)))

    def run(self, progress: bool) -> None:
        """Write everything; on failure the previous checkpoint is as it was."""
        committing = False
        ticket = Ticket()
        with contextlib.ExitStack() as stack:
            try:
                cut = _cut(self.index, ticket)
                self._choose_segments(cut)
                fresh = cut.take(~self._is_stored(cut))
                advance, extend = stack.enter_context(
                    progress_bar("Saving", self._bytes(fresh), enabled=progress)
                )
                largest = max(column.step_bytes for column in self.schema.values())
                pipeline = stack.enter_context(Pipeline(largest, advance))
                segments = stack.enter_context(self.directory.made(SEGMENTS_NAME))
                for turn in range(MAX_ROUNDS):
                    if self._bytes(fresh) <= HOLD_BYTES or turn == MAX_ROUNDS - 1:
                        self._write_segment(segments, pipeline, fresh, held=True)
                        break
                    ticket.end()
                    self._write_segment(segments, pipeline, fresh, held=False)
                    ticket = Ticket()
                    cut = _cut(self.index, ticket)
                    fresh = cut.take(~self._is_stored(cut))
                    extend(self._bytes(fresh))
                ticket.end()
                data = self._finish(cut)
                committing = True
                self._commit(segments, data)
            except BaseException:
                ticket.end()
                if not committing:  # else nobody knows which of the two manifests is there
                    with contextlib.suppress(OSError):
                        _sweep(self.directory, self.old)
                raise
        with contextlib.suppress(CheckpointError, OSError):
            _sweep(self.directory, read_manifest(self.directory))

    def _bytes(self, cut: _Cut) -> int:
        return int(cut.lengths.sum()) * self.schema.step_bytes

    # ---------------------------------------------------------------- what is there

    def _places(self, cut: _Cut) -> Array:
        """Where each trajectory is in `stored`, or -1; int64 [n]."""
        place = np.searchsorted(self.stored.sequence, cut.sequences)
        place[place == len(self.stored.sequence)] = 0
        if not len(self.stored.sequence):
            return np.full(len(cut.sequences), -1)
        found = self.stored.sequence[place] == cut.sequences
        return np.where(found & (self.stored.length[place] == cut.lengths), place, -1)

    def _is_stored(self, cut: _Cut) -> Array:
        found: Array = self._places(cut) >= 0
        return found

    def _live_steps(self, cut: _Cut) -> dict[int, int]:
        """Segment number -> steps of live trajectories there."""
        places = self._places(cut)
        places = places[places >= 0]
        live = dict.fromkeys(self.segments, 0)
        numbers, inverse = np.unique(self.stored.segment[places], return_inverse=True)
        steps = np.zeros(len(numbers), dtype=np.int64)
        np.add.at(steps, inverse, self.stored.length[places])
        live.update(zip(numbers.tolist(), steps.tolist(), strict=True))
        return live

    def _choose_segments(self, cut: _Cut) -> None:
        """Keep the segments that are worth it: at least half of the steps live, and not too many of them."""
        live = self._live_steps(cut)
        self.segments = {
            number: segment for number, segment in self.segments.items() if 2 * live[number] >= segment.steps
        }
        if len(self.segments) >= MAX_SEGMENTS:
            by_size = sorted(self.segments, key=lambda number: self.segments[number].steps, reverse=True)
            self.segments = {number: self.segments[number] for number in sorted(by_size[: MAX_SEGMENTS // 2])}
        self._forget_others()

    # ---------------------------------------------------------------- segments

    def _write_segment(self, segments: Directory, pipeline: Pipeline, fresh: _Cut, *, held: bool) -> None:
        """Write trajectories as a new segment.

        Args:
            segments: the directory of all of them.
            held: the caller holds the ticket of the cut. Otherwise some may be gone before their turn comes: what is
                written in their place is never used.
        """
        if not len(fresh.slots):
            return
        number = self._free_number(segments)
        name = f"{number:06d}"
        ends = np.cumsum(fresh.lengths)
        first, steps = ends - fresh.lengths, int(ends[-1])
        rows = Rows(first, fresh.lengths, self.layout.block_steps)
        segments.mkdir(name + PART)
        files = {}
        with segments.child(name + PART) as folder:
            for key, column in self.schema.items():
                files[key] = pipeline.write(
                    folder,
                    column_file(key),
                    npy_header(column.dtype_name, steps, column.shape),
                    steps,
                    column.step_bytes,
                    self._filler(key, fresh, rows, held),
                    chunk_bytes=manifest_module.CHUNK_BYTES,
                )
            folder.sync()
        segments.rename(name + PART, name)
        self.next_segment = number + 1
        self.segments[number] = Segment(number, steps, files, manifest_module.CHUNK_BYTES)
        count = len(fresh.slots)
        written = Entries(
            sequence=fresh.sequences,
            length=fresh.lengths,
            priority=fresh.priorities,
            times_sampled=fresh.times_sampled,
            age=fresh.ages,
            ident=fresh.idents,
            segment=np.full(count, number, dtype=np.int64),
            first=first,
        )
        everything = zip(self.stored.arrays().values(), written.arrays().values(), strict=True)
        joined = Entries(*(np.concatenate(pair) for pair in everything))
        self.stored = joined.take(np.argsort(joined.sequence, kind="stable"))

    def _free_number(self, segments: Directory) -> int:
        """The number of the next segment: what could not be removed may have taken some."""
        number = self.next_segment
        while segments.has(f"{number:06d}") or segments.has(f"{number:06d}{PART}"):
            number += 1
        return number

    def _filler(self, name: str, fresh: _Cut, rows: Rows, held: bool) -> Callable[[Array, int, int], None]:
        """A function that copies rows of the segment out of the blocks of one column."""
        index, data = self.index, self.columns[name]
        column = self.layout.columns[name]

        def fill(buffer: Array, begin: int, end: int) -> None:
            which, block, inside, steps, row = rows.pieces(begin, end)
            ticket = Ticket()
            try:
                if not held:
                    index.begin_read(ticket)
                    here = np.arange(which[0], which[-1] + 1)
                    slots = fresh.slots[here]
                    gone = (index.state[slots] != READY) | (index.sequence[slots] != fresh.sequences[here])
                    if gone.any():
                        buffer[:] = 0
                        left = ~gone[which - which[0]]
                        which, block, inside, steps, row = (
                            array[left] for array in (which, block, inside, steps, row)
                        )
                place = index.extent[fresh.slots[which], 1] + block
                ids = index.ids_at(place).astype(np.int64)
                sources = data.ctypes.data + ids * column.block_stride + inside * column.step_bytes
                targets = buffer.ctypes.data + row * column.step_bytes
                copy_pieces(targets, sources, steps * column.step_bytes)
                ticket.end()
            finally:
                ticket.end()  # again: an exception may arrive anywhere

        return fill

    # ---------------------------------------------------------------- index and manifest

    def _finish(self, cut: _Cut) -> bytes:
        """Write the index; the manifest's bytes."""
        import safetensors.numpy

        entries = self.stored.take(self._places(cut))
        # As they are now: this is what changes while a trajectory stays as it is.
        entries = dataclasses.replace(
            entries,
            priority=cut.priorities,
            times_sampled=cut.times_sampled,
            age=cut.ages,
            ident=cut.idents,
        )
        used = np.unique(entries.segment).tolist()
        saves = self.old.saves + 1 if self.old else 1
        name = index_file(saves)
        arrays = {key: np.ascontiguousarray(array) for key, array in entries.arrays().items()}
        record: FileRecord = write_small(self.directory, name + PART, safetensors.numpy.save(arrays))
        self.directory.rename(name + PART, name)
        manifest = Manifest(
            schema=self.schema,
            save=f"{1 + secrets.randbelow(2**63 - 1):016x}",
            table=self.name,
            saves=saves,
            next_segment=self.next_segment,
            block_steps=self.layout.block_steps,
            max_steps=self.layout.max_steps,
            max_trajectories=self.layout.max_trajectories,
            num_blocks=self.layout.num_blocks,
            rules=self.rules,
            origin=cut.origin,
            next_sequence=cut.next_sequence,
            num_inserted=cut.num_inserted,
            num_sampled=cut.num_sampled,
            num_trajectories=len(entries.sequence),
            num_steps=int(entries.length.sum()),
            index=record,
            segments=tuple(self.segments[number] for number in used),
        )
        return manifest.to_bytes()

    def _commit(self, segments: Directory, data: bytes) -> None:
        """Make what has been written durable, and then the checkpoint."""
        check_cost(self.directory, MANIFEST_NAME, data)  # what is written can be read
        write_small(self.directory, MANIFEST_NAME + PART, data)
        segments.sync()
        self.directory.sync()
        self.directory.replace(MANIFEST_NAME + PART, MANIFEST_NAME)
        self.directory.sync()
        self.directory.sync_parent()  # the directory's own name, if it is new


def _no_entries() -> Entries:
    empty: Any = np.empty(0, dtype=np.int64)
    return Entries(empty, empty, np.empty(0, dtype=np.float32), empty, empty, empty, empty, empty)
