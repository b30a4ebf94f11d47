"""Saves the tables of all ranks as one checkpoint; `gear_loader.checkpoint.sharded` describes the directory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import secrets
from typing import Any

from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.housekeeping import (
    check_unchanged,
    convert_errors,
    identity,
    lock,
    remove_checkpoint,
    unlock,
)
from gear_loader.checkpoint.names import SHARDS_NAME
from gear_loader.checkpoint.opening import make_directory, open_directory, place_of
from gear_loader.checkpoint.saving import save_into as save_table
from gear_loader.checkpoint.sharded import (
    Shard,
    ShardsManifest,
    check_shard_links,
    check_shards_directory,
    link_shard,
    next_number,
    read_shards,
    remove_shard,
    shard_folder,
    shard_of,
    sweep_saves,
    write_shards,
)
from gear_loader.distributed.checkpoint_ranks import CheckpointRanks
from gear_loader.errors import CheckpointError
from gear_loader.storage.schema import Schema
from gear_loader.storage.table import Table
from gear_loader.utils.notices import notice
from gear_loader.utils.paths import path_or_address


def save(
    table: Table, path: str | os.PathLike[str], ranks: CheckpointRanks, *, progress: bool = False
) -> None:
    """Save the table of this rank, and on rank 0 the manifest of all; see `gear_loader.distributed.save`."""
    with contextlib.ExitStack() as stack:
        part = _Part(table, path, ranks, stack, progress=progress)
        answers = ranks.run("begin to save", part.begin)
        _check_alike(answers)
        number, replaces = answers[0]["number"], answers[0]["replaces"]
        try:
            written = ranks.run("save its table", lambda: part.write(number, replaces))
        except Exception:
            if not ranks.lost:  # else rank 0 may have all answers, and a manifest that names these files
                part.remove(number)
            raise
        shards = ShardsManifest(
            table.schema,
            f"{1 + secrets.randbelow(2**63 - 1):016x}",
            number,
            tuple(Shard(**shard) for shard in written),
        )
        ranks.run("complete the checkpoint", lambda: part.commit(shards))
        part.sweep(shards)
        ranks.barrier()


class _Part:
    """This rank's part of a save. `stack` closes the directory and its lock, which rank 0 holds until the end."""

    def __init__(
        self,
        table: Table,
        path: str | os.PathLike[str],
        ranks: CheckpointRanks,
        stack: contextlib.ExitStack,
        *,
        progress: bool,
    ) -> None:
        self._table = table
        self._given = path
        self._path = ""  # checked by `begin`, which tells the other ranks
        self._stage, self._rank = ranks.folder, ranks.rank
        self._stack = stack
        self._progress = progress
        self._old: ShardsManifest | None = None  # of rank 0: the previous checkpoint
        self._top: Directory | None = None  # of rank 0: the locked directory

    def begin(self) -> dict[str, Any]:
        """Describe the table; on rank 0 also lock the directory, and number the save."""
        self._path = place_of(path_or_address(self._given))
        answer: dict[str, Any] = {"origin": self._table.origin, "schema": self._table.schema.to_json()}
        if self._rank == 0:
            with convert_errors(self._path):
                top = self._top = self._stack.enter_context(_directory(self._path, self._stage, make=True))
                check_shards_directory(top)
                if not top.token:
                    self._stack.callback(unlock, lock(top), os.getpid())
                old = self._old = _previous(top)
                sweep_saves(top, old)
                answer.update(number=next_number(top, old), replaces=old.save if old else None)
        return answer

    def write(self, number: int, replaces: str | None) -> dict[str, Any]:
        """Write the table; return its entry of the manifest.

        Args:
            replaces: name of the previous checkpoint, as rank 0 sees it; None for a first save.
        """
        with convert_errors(self._path), _directory(self._path, self._stage) as directory:
            previous = _previous(directory) if self._rank else self._old
            if (previous.save if previous else None) != replaces:
                raise CheckpointError(
                    f"{directory.path} does not show rank {self._rank} the checkpoint that rank 0 sees there. Save "
                    "into a directory that all ranks share."
                )
            shard = _write_shard(self._table, directory, previous, number, self._rank, self._progress)
            return dataclasses.asdict(shard)

    def remove(self, number: int) -> None:
        """Remove the files of a failed save."""
        with contextlib.suppress(OSError), _directory(self._path, self._stage) as directory:
            remove_shard(directory, number, self._rank)

    def commit(self, shards: ShardsManifest) -> dict[str, Any]:
        """On rank 0, write the manifest of all tables: from then on the new checkpoint is valid."""
        if self._rank == 0:
            assert self._top is not None
            with convert_errors(self._path):
                old = self._old.save if self._old else ""
                check_unchanged(self._top, functools.partial(_save_in, self._top), old)
                write_shards(self._top, shards)
        return {}

    def sweep(self, shards: ShardsManifest) -> None:
        """On rank 0, remove the files of earlier saves."""
        if self._rank == 0:
            assert self._top is not None
            sweep_saves(self._top, shards, replaced=self._old)


def _directory(path: str, stage: str | None, *, make: bool = False) -> Directory:
    """Open the directory of a checkpoint of several tables: `path`, or the directory `stage` in it."""
    top = make_directory(path) if make else open_directory(path)
    if stage is None:
        return top
    with top:
        return top.open_or_make(stage) if make else top.child(stage)


def _previous(directory: Directory) -> ShardsManifest | None:
    return read_shards(directory) if directory.has(SHARDS_NAME) else None


def _save_in(directory: Directory) -> str:
    """Name of the save in a directory, "" of none."""
    found = _previous(directory)
    return found.save if found else ""


def _write_shard(
    table: Table, directory: Directory, old: ShardsManifest | None, number: int, rank: int, progress: bool
) -> Shard:
    """Write this rank's table into the save with a number; return its entry of the manifest."""
    names = identity(table, table._engine.index)
    if old is not None:
        check_shard_links(directory, old, *names)
    save, name = os.path.split(shard_folder(number, rank))
    with contextlib.ExitStack() as stack:
        parent = stack.enter_context(directory.open_or_make_all(save))
        parent.mkdir(name)
        folder = stack.enter_context(parent.child(name))
        if old is not None:
            try:
                link_shard(directory, old, *names, folder)
            except CheckpointError as error:
                notice(f"checkpoint {error}", f"{error} This table is saved again as a whole.")
                remove_checkpoint(parent, name)
                parent.mkdir(name)
                folder = stack.enter_context(parent.child(name))
        save_table(table, folder, progress=progress)
        return shard_of(folder)


def _check_alike(answers: list[dict[str, Any]]) -> None:
    """Check that the tables of all ranks can be parts of one checkpoint.

    Raises:
        CheckpointError: schemas differ, or two tables have the same shard number.
    """
    for rank, other in enumerate(answers):
        if other["schema"] != answers[0]["schema"]:
            first, second = (Schema.from_json(each["schema"]) for each in (answers[0], other))
            raise CheckpointError(
                f"The tables of ranks 0 and {rank} have different schemas: {first} and {second}. Save tables with "
                "another schema into another directory."
            )
    origins = [other["origin"] or 0 for other in answers]
    for rank, origin in enumerate(origins):
        if origins.index(origin) != rank:
            raise CheckpointError(
                f"The tables of ranks {origins.index(origin)} and {rank} both have the shard number {origin}: ids of "
                "different trajectories may be the same. Call table.set_origin(rank) when a table is created."
            )
