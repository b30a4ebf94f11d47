"""The table: trajectories in paged columns of one region, under an index."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from gear_loader.errors import (
    LockTimeoutError,
    PrivateTableError,
    RegionError,
    SchemaError,
    StaleIndexError,
)
from gear_loader.native import copying
from gear_loader.storage.block_sizes import (
    blocks_within,
    check_memory,
    resolved_block_steps,
    resolved_packing,
    waste_remedy,
)
from gear_loader.storage.counters import (
    NUM_FREE_BLOCKS,
    NUM_READY,
    NUM_SPILLED,
    NUM_STEPS,
    POLICY,
    TOLD,
    WRITING_STEPS,
)
from gear_loader.storage.disk import Disk, DiskWriter, LostRowsError, Tier, TierReader
from gear_loader.storage.ids import check_ids, check_origin, ids_of, origin_of
from gear_loader.storage.incoming import (
    Steps,
    checked_priorities,
    checked_priority,
    listed,
    rectangular,
    stacked,
    with_final,
)
from gear_loader.storage.index import EVICT_LOWEST, EVICT_OLDEST, INLINE_BYTES, REFUSE, Claim, Index
from gear_loader.storage.late import fill_columns, unfilled
from gear_loader.storage.layout import Layout, most_blocks
from gear_loader.storage.limiters import RateLimiter
from gear_loader.storage.memory_options import Memory
from gear_loader.storage.numa import check_numa
from gear_loader.storage.priority_updates import is_strict, request
from gear_loader.storage.reader import TableReader
from gear_loader.storage.readers import Ticket
from gear_loader.storage.region import Region
from gear_loader.storage.rules import Limits, OnFull, Rules, check_on_full, check_seconds
from gear_loader.storage.schema import Column, Schema
from gear_loader.storage.shared_memory import region_path
from gear_loader.storage.stats import TableStats, stats_of
from gear_loader.storage.step_writer import StepWriter
from gear_loader.storage.tier_counts import KEEP, KEEPS, pack_heat
from gear_loader.storage.vector_writer import VectorWriter
from gear_loader.storage.writer import Writer
from gear_loader.utils.arrays import Array, numbers, shown
from gear_loader.utils.checks import at_least, flag, one_of
from gear_loader.utils.devices import check_device
from gear_loader.utils.formatting import size
from gear_loader.utils.notices import notice, notices
from gear_loader.utils.paths import local_path

__all__ = ["Table", "Ticket"]

Trajectory = Mapping[str, Any]
_logger = logging.getLogger("gear_loader")
_POLICIES: dict[str, tuple[int, bool]] = {  # `evict` and `wait` of `Index.begin`
    "error": (REFUSE, False),
    "evict_oldest": (EVICT_OLDEST, False),
    "evict_lowest_priority": (EVICT_LOWEST, False),
    "wait": (REFUSE, True),
}
_INTERNAL = frozenset(  # for other parts of the package; completion does not offer them
    (
        "check_open",
        "column_addresses",
        "has_tier",
        "index",
        "longest",
        "num_spilled",
        "policy",
        "reader",
        "region",
        "remove_lost",
        "step_addresses",
        "store",
        "store_one",
        "tier_reader",
    )
)


class Table:
    """Trajectories of uneven length, stored column by column in blocks of one memory region.

    Created by `Table.create` or `Table.attach`. Several threads can write and read a table and, if it has a name,
    several processes of one user on one machine (which must see each other's process ids). As a context manager it
    closes itself. A named table pickles as a handle: unpickling attaches by name.

    A forked process shares a named table and has a copy of a private one as of the fork. It has no copy of a private
    table whose pinning for a GPU had begun: every use of that raises PrivateTableError.

    Only `add` and `extend` of CUDA tensors wait for a GPU, because they copy them to the host.
    """

    def __init__(
        self, region: Region, *, on_full: OnFull | None = None, timeout: float | None = None
    ) -> None:
        self._region = region
        self._index: Index | None = Index(region)
        self._disk: DiskWriter | None = None
        self._tier_reader: TierReader | None = None
        self._index.admission.timeout = timeout
        layout = region.layout
        start = self._index.arrays.counters.ctypes.data - layout.arrays["counters"][0]
        self._columns: Array = np.array(
            [
                (start + c.offset, c.block_stride, c.step_bytes, c.step_stride)
                for c in layout.columns.values()
            ],
            dtype=np.int64,
        )
        once = np.array([column.trajectory for column in layout.schema.values()])
        added = np.array([not column.late for column in layout.schema.values()])
        self._step_columns = np.ascontiguousarray(self._columns[~once & added])
        self._targets = self._columns.copy()  # for `copying.scatter`
        self._targets[once, 1] *= -1
        self._targets = np.ascontiguousarray(self._targets[added])
        self._added = layout.schema.added
        self._step_bytes = layout.schema.step_bytes
        self.longest: int = min(layout.max_steps, layout.num_blocks * layout.block_steps)
        """Steps of the longest trajectory that the table can hold."""
        most = INLINE_BYTES - layout.schema.trajectory_bytes
        self._longest_inline = min(self.longest, most // self._step_bytes)
        _tables.add(self)
        self.schema: Schema = region.layout.schema
        """The columns, a mapping of name to `Column`."""
        self.name: str | None = region.name
        """The name that other processes attach by, or None."""
        self.rules: Rules = region.layout.rules
        """Rules given to `create`: policy, rate limiter and expiry."""
        self.on_full: OnFull = on_full or self.rules.on_full
        """Policy of additions through this handle to a full table."""

    # ---------------------------------------------------------------- create, attach, close

    @classmethod
    def create(
        cls,
        schema: Mapping[str, Column],
        *,
        max_steps: int,
        max_trajectories: int,
        block_steps: int | Literal["auto"] = 64,
        memory: int | str | Memory | None = None,
        name: str | None = None,
        on_full: OnFull = "error",
        rate_limiter: RateLimiter | None = None,
        limits: Limits | None = None,
        timeout: float | None = None,
        if_exists: Literal["error", "attach", "replace"] = "error",
        disk: Disk | Tier | None = None,
    ) -> Table:
        """Create an empty table.

        Args:
            schema: column name -> `Column`.
            max_steps: largest number of steps, and so the longest possible trajectory.
            max_trajectories: largest number of trajectories.
            block_steps: steps of a block, the unit of allocation. A trajectory takes ceil(length / block_steps)
                blocks: small blocks waste less at its end, large ones are read in longer pieces. Blocks of records, and
                of each column outside them, are padded to 128 bytes; 32 steps are the fewest without padding for 4
                bytes a step.
                ``"auto"`` takes those that waste least of both, and of the index, if lengths are geometric.
            memory: bytes of the whole region, index included, an int or a text such as ``"20GiB"``; or a `Memory`,
                which also says how it lies there. By default enough for `max_steps` steps in `max_trajectories`
                trajectories of any lengths.
            name: name by which other processes attach. The table then outlives this process, until `unlink`. Its file
                is in `/dev/shm`, or in the directory of the environment variable ``GEAR_LOADER_DIR`` at the import of
                `gear_loader`: an absolute path on a tmpfs, the same in all processes. Without a name the table is
                private memory, whose pages are allocated as they are written.
            on_full: default policy of additions to a full table: ``"error"`` raises `TableFullError`;
                ``"evict_oldest"`` evicts the oldest trajectories; ``"evict_lowest_priority"`` evicts those with the
                lowest latest priority (from `add` or `ReplayDataset.update_priority`; ties in any order, those without
                a priority last); ``"wait"`` waits until others free space.
            rate_limiter: bounds sampling relative to adding: `MinSize`, `SampleToInsertRatio` or `Queue`. By default
                no limit.
            limits: `Limits`, when trajectories are removed although there is room. By default none.
            timeout: seconds until a wait for space or the rate limiter through this handle times out; 60 by default.
            if_exists: if a table of this name exists: ``"error"``; ``"attach"`` to it if its columns, sizes and rules
                are the same, so that any process may come first, and a notebook cell can run twice; ``"replace"``
                removes it first, and attached processes keep it until they close it.
            disk: write the table to a disk in the background, `Disk.sync_seconds` after each commit at most, so that
                `recover` brings it back after a crash of the machine. A thread of this process does it until `close`
                or its end, also for what other processes add. Adding never waits for it; what is evicted before it was
                written is not on disk. While the disk is full or fails, the table goes on, `stats` and the log say what
                is not written, and it is caught up later. The directory must be empty or new; with
                ``if_exists="attach"`` it may be that of the existing table, which one process writes at a time.

                With `Disk.size` trajectories beyond `memory` lie on the disk only; `max_steps` and `max_trajectories`
                are limits of both together. Batches are the same as of a table that fits into memory: draws use the
                index, which stays in memory. The thread of this process moves trajectories to disk ahead of need; if
                it falls behind, or the disk does, additions wait, at most `timeout`. When what is on disk reaches
                `Disk.size`, `on_full` decides: the evicting policies evict from the whole table, ``"error"`` raises. A
                file system without space is an error with every policy but ``"wait"``, until it has. A trajectory
                that cannot be read back is removed, logged and counted, and its batch is drawn once more. `Shards`
                over NIXL refuse such a table. See docs/tiers.md.

        Raises:
            SchemaError: invalid sizes, columns or options, a NUMA node that does not exist, or the existing table
                differs.
            RegionError: the name is taken or invalid, there is not enough memory, ``huge_pages=True`` is not possible,
                or ``GEAR_LOADER_DIR`` is not a directory in which only this user and root can replace tables.
            CheckpointError: the directory of `disk` holds a table or other files, is in use, or cannot be written. No
                table is left.
        """
        schema = Schema(schema)
        memory = Memory.of(memory)
        packed = resolved_packing(schema, memory.packed)
        block_steps = resolved_block_steps(
            schema,
            block_steps,
            memory.mean_length,
            max_steps=max_steps,
            max_trajectories=max_trajectories,
            packed=packed,
        )
        tier: Tier | None
        if isinstance(disk, Tier):  # of a table that is recovered, and written later
            tier, disk = disk, None
        elif disk is not None and not isinstance(disk, Disk):
            raise SchemaError(f"disk is {shown(disk)}; expected None or a gear_loader.Disk.")
        else:
            tier = None if disk is None else disk.tier()
        check_memory(memory, tier)
        sizes = {"max_steps": max_steps, "max_trajectories": max_trajectories, "block_steps": block_steps}
        if memory.max_blocks is not None:
            sizes["max_blocks"] = memory.max_blocks
        for key, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value < 2**37:
                raise SchemaError(f"{key} is {shown(value)}; expected an integer from 1 to {2**37 - 1:,}.")
        if limits is not None and not isinstance(limits, Limits):
            raise SchemaError(f"limits is {shown(limits)}; expected None or gear_loader.Limits(...).")
        removal = {} if limits is None else dataclasses.asdict(limits)
        rules = Rules(**removal, on_full=on_full, rate_limiter=rate_limiter)
        rules.check_columns(schema)
        if rate_limiter is not None and rate_limiter.min_size > max_trajectories:
            raise SchemaError(
                f"{rate_limiter!r} waits for more trajectories than the table can hold, max_trajectories="
                f"{max_trajectories:,}. Make one of them smaller or the other larger."
            )
        timeout = None if timeout is None else check_seconds("timeout", timeout)
        node = check_numa(memory.numa)
        max_steps, max_trajectories, block_steps = int(max_steps), int(max_trajectories), int(block_steps)
        max_blocks = memory.max_blocks
        if max_blocks is None:
            max_blocks = most_blocks(max_steps, max_trajectories, block_steps)
        options: dict[str, Any] = {
            "max_steps": max_steps,
            "max_trajectories": max_trajectories,
            "block_steps": block_steps,
            "packed": packed,
            "rules": rules,
            "tier": tier,
        }
        if memory.size is not None:
            max_blocks = blocks_within(memory.size, int(max_blocks), schema, **options)
        if max(max_blocks, max_trajectories) >= 2**31:
            raise SchemaError(
                f"{max_blocks:,} blocks and {max_trajectories:,} trajectories were asked for; expected less than "
                "2**31 of each. Raise block_steps or split the table."
            )
        layout = Layout(schema, num_blocks=int(max_blocks), **options)
        one_of("if_exists", if_exists, ("error", "attach", "replace"))
        if if_exists != "error" and name is None:
            raise SchemaError(f"if_exists is {if_exists!r} without a name: a private table is always new.")

        def make() -> tuple[Table, bool]:
            """The table, and whether it is new."""
            if if_exists == "replace" and name is not None and os.path.lexists(region_path(name)):
                with contextlib.closing(Region.attach(name)) as old:
                    old.unlink()
            try:
                region = Region.create(layout, name, huge_pages=memory.huge_pages, node=node)
                return cls(region, timeout=timeout), True
            except RegionError:
                if if_exists != "attach" or name is None or not os.path.lexists(region_path(name)):
                    raise
                return cls._existing(name, layout, timeout), False

        if disk is None:
            return make()[0]
        table: Table
        table, table._disk = _checkpoint("behind").create(make, disk, name, exist_ok=if_exists == "attach")
        return table

    @classmethod
    def _existing(cls, name: str, layout: Layout, timeout: float | None) -> Table:
        table = cls.attach(name, timeout=timeout)
        if table.region.layout.header[64:] != layout.header[64:]:
            table.close()
            raise SchemaError(
                f"Table {name!r} exists with other columns, sizes or rules than were asked for; expected the same. "
                "Attach to it, give another name, or use if_exists='replace'."
            )
        return table

    @classmethod
    def attach(cls, name: str, *, on_full: OnFull | None = None, timeout: float | None = None) -> Table:
        """Attach to the table called `name` on this machine.

        Args:
            name: as given to `create`.
            on_full: policy of additions through this handle; by default that of `create`.
            timeout: as for `create`.

        Raises:
            RegionError: no table has that name, or the file is not a table, of another format version or user, or
                writable by other users.
            CorruptTableError: the index holds out-of-range values.
        """
        if on_full is not None:
            check_on_full(on_full)
        timeout = None if timeout is None else check_seconds("timeout", timeout)
        table = cls(Region.attach(name), on_full=on_full, timeout=timeout)
        try:
            table.index.recovery.check_bounds()
        except BaseException:
            table.close()
            raise
        return table

    @staticmethod
    def required_blocks(lengths: Iterable[int] | Array, block_steps: int) -> int:
        """Number of blocks of trajectories with these lengths, for `max_blocks`.

        Args:
            lengths: int [n], in steps. block_steps: steps of a block.

        Raises:
            SchemaError: a length or `block_steps` is not a positive integer.
        """
        values = np.asarray(lengths if isinstance(lengths, np.ndarray) else list(lengths))
        if len(values) and (values.ndim != 1 or values.dtype.kind not in "iu" or values.min() < 1):
            raise SchemaError(f"lengths is {shown(lengths)}; expected integers of at least 1.")
        if isinstance(block_steps, bool) or not isinstance(block_steps, (int, np.integer)) or block_steps < 1:
            raise SchemaError(f"block_steps is {shown(block_steps)}; expected a positive integer.")
        return int((-(-values.astype(np.int64) // block_steps)).sum())

    # ---------------------------------------------------------------- checkpoints

    def save(self, path: str | os.PathLike[str], *, progress: bool = False) -> None:
        """Save all trajectories into a directory of standard file formats, while other processes write and sample.

        The checkpoint is a snapshot of the table at one moment during the call: committed trajectories with ids,
        priorities, times sampled and ages; the rules given to `create`; and the counts of the rate limiter. The
        directory holds one checkpoint. Another save writes only new trajectories (and those of old files of which less
        than half is in use) and replaces the index. Trajectories that share blocks are written separately. The
        previous checkpoint stays valid until the new one is complete on disk. A checkpoint of the same schema but of
        another table is replaced; a table loaded from the directory continues its checkpoint.

        Writers of a full table wait for the last part of the save, at most 128 MiB unless they are as fast as the
        disk.

        Into the directory of `create(disk=)`, this process writes what is not there yet and waits for the disk; other
        processes cannot. Other directories do not matter to it.

        The columns are ``.npy`` files of whole trajectories one after another, the index is a safetensors file with
        sequence numbers, lengths, priorities, times sampled, ages, ids and places, and ``manifest.json`` holds rules,
        counts, and size and checksum (XXH128) of every file. See `gear_loader.checkpoint`.

        Args:
            path: directory with a checkpoint, an empty one, or one to create. It may be a symbolic link; links inside
                the checkpoint are not followed, and only files of earlier saves are removed.
            progress: show a progress bar if standard error is a terminal and `rich` is installed.

        Raises:
            CheckpointError: `path` is not local (``s3://...``); the disk is full or fails; the directory holds other
                files or a checkpoint of another schema or version; one of its own directories or files is a symbolic
                link; or another save into it is running. The previous checkpoint is unchanged.
        """
        path = local_path(path)
        if self._disk is not None and self._disk.writes_to(path):
            self._disk.flush()
            return
        _checkpoint("saving").save(self, path, progress=progress)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        schema: Mapping[str, Column] | None = None,
        name: str | None = None,
        max_steps: int | None = None,
        max_trajectories: int | None = None,
        block_steps: int | Literal["auto"] | None = None,
        packed: bool | Literal["auto"] = "auto",
        max_blocks: int | None = None,
        on_full: OnFull | None = None,
        progress: bool = False,
    ) -> Table:
        """Create a table from a checkpoint.

        Restores the trajectories in order, with ids, sequence numbers, priorities, times sampled and ages; the shard
        number; the rules; and the counts of the rate limiter. The time between the save and the end of this call does
        not count as age. Indices and generations may differ, and loaded trajectories share no blocks. Every byte read
        is verified.

        Args:
            path: directory written by `save`.
            schema: if given, the columns that the checkpoint must have.
            name: name of the table, as for `create`; None for a private table.
            max_steps, max_trajectories, block_steps, max_blocks: as for `create`; by default those of the saved table,
                with additional blocks where trajectories shared some. If one of the first three is given, `max_blocks`
                is computed as in `create`; ``block_steps="auto"`` goes by the mean length of the saved trajectories.
            packed: as for `create`, whatever the saved table was.
            on_full: as for `create`; by default that of the saved table. The rate limiter, `max_times_sampled` and
                `max_age` are always those of the saved table.
            progress: show a progress bar if standard error is a terminal and `rich` is installed.

        Raises:
            CheckpointError: there is no checkpoint; it is damaged or of another version or schema; or it does not fit
                into the given sizes. The message names the file. No table is left.
            SchemaError, RegionError: as `create`.
        """
        options = _checkpoint("loading").LoadOptions(
            schema=schema,
            name=name,
            max_steps=max_steps,
            max_trajectories=max_trajectories,
            block_steps=block_steps,
            packed=packed,
            max_blocks=max_blocks,
            on_full=on_full,
            progress=progress,
        )
        table: Table = _checkpoint("loading").load(cls, local_path(path), options)
        return table

    @classmethod
    def recover(
        cls,
        disk: Disk | str | os.PathLike[str],
        *,
        schema: Mapping[str, Column] | None = None,
        name: str | None = None,
        max_steps: int | None = None,
        max_trajectories: int | None = None,
        block_steps: int | Literal["auto"] | None = None,
        packed: bool | Literal["auto"] = "auto",
        max_blocks: int | None = None,
        memory: int | str | None = None,
        on_full: OnFull | None = None,
        progress: bool = False,
    ) -> Table:
        """Create a table from what `create(disk=)` has written last, and go on writing into the same directory.

        Everything is as `load` restores it, with priorities and times sampled as of the last write. If a file of the
        last write is damaged, which a sound disk does not let happen, the write before it is taken, and the log says
        so.

        Args:
            disk: the directory, or a `Disk` with it and options; also a directory written by `save`. With `Disk.size`
                trajectories beyond the memory stay there, whatever the saved table was; without, all are loaded.
            schema, name, max_steps, max_trajectories, block_steps, packed, max_blocks, on_full, progress: as for
                `load`. With `Disk.size` the memory is by default that of the saved table.
            memory: in place of `max_blocks`, as for `create`.

        Raises:
            CheckpointError: as `load`; or the directory is in use, holds links, or cannot be written.
            SchemaError, RegionError: as `create`.
        """
        options = _checkpoint("loading").LoadOptions(
            schema=schema,
            name=name,
            max_steps=max_steps,
            max_trajectories=max_trajectories,
            block_steps=block_steps,
            packed=packed,
            max_blocks=max_blocks,
            memory=memory,
            on_full=on_full,
            progress=progress,
        )
        table: Table
        disk = disk if isinstance(disk, Disk) else Disk(disk)
        table, table._disk = _checkpoint("recovering").recover(cls, disk, options)
        return table

    # ---------------------------------------------------------------- pinning and closing

    def pin(self, device: torch.device | str | int | None = None, *, wait: bool = True) -> bool:
        """Pin the table's memory in this process, so that a GPU can read it; else the first dataset on a GPU does it.

        It takes about 0.1 s a GB, in a thread. With ``wait=False`` the table can be filled and read meanwhile: datasets
        on a GPU begin with batches that the CPU gathers and copies, and change between two batches, which hold the
        same rows either way. Draws by priority and batches over `Shards` wait until it is done. Closing the table stops
        it. The logger ``gear_loader`` tells how long it took (level INFO).

        A private table is not in processes forked from here on, see the class.

        Args:
            device: CUDA device that reads the table; by default the current one.
            wait: wait until it is done, with a progress bar if standard error is a terminal and `rich` is installed.

        Returns:
            Whether it is pinned: False while the thread is at work, without a GPU, or if CUDA refuses; a notice gives
            the reason.

        Raises:
            GpuError: no progress for two minutes.
        """
        self.check_open()
        if device is not None:
            check_device(device)
            device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        return self._region.pin(device, wait=wait)

    def close(self) -> None:
        """Detach; idempotent. A private table's memory is freed, a named table stays until `unlink`.

        A table with `disk` writes the rest first, and waits for the disk.

        Raises:
            CheckpointError: the rest could not be written. The table is closed.
        """
        try:
            if self._disk is not None:
                self._disk.close()
        finally:
            self._index = None
            self._tier_reader = None  # closes its files
            self._region.close()

    def serve(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        carrier: str = "socket",
        secret: bytes | None = None,
        allow: Literal["all", "read", "write"] = "write",
        tls: tuple[str | os.PathLike[str], str | os.PathLike[str]] | None = None,
    ) -> Any:
        """Start a server process of this table, for `gear_loader.connect` from other processes and machines.

        The server attaches to the table and ends with this process. It serves clients that prove the secret; with
        `tls` the connections are encrypted.

        Args:
            host: address of this machine to listen at; by default only this machine can connect.
            port: port number, or 0 for a free one.
            carrier: ``"socket"`` or ``"ucx"``.
            secret: at least 16 bytes; by default random ones.
            allow: what clients may do: ``"write"`` adds trajectories and sets priorities, ``"read"`` fetches rows,
                ``"all"`` both. Statistics are for all of them.
            tls: PEM files of a certificate and of its private key; with the carrier ``"socket"`` only.

        Returns:
            The `gear_loader.transport.TableServer`: its `url` and `secret` are what `gear_loader.connect` takes.

        Raises:
            PrivateTableError: the table has no name. TransportError: the server did not start, or invalid arguments.
            HandshakeError: an invalid secret.
        """
        options = {"host": host, "port": port, "carrier": carrier, "secret": secret, "allow": allow}
        options["tls"] = tls
        return importlib.import_module("gear_loader.transport.table_server").serve(self, **options)

    def unlink(self) -> None:
        """Remove the table's name: no process can attach any more, but attached processes may continue.

        Raises:
            PrivateTableError: the table has no name.
            RegionError: the name has been removed already. Another table that has it now stays.
        """
        if self.name is None:
            raise PrivateTableError("A private table has no name to remove; close() frees its memory.")
        self._region.unlink()

    def check_open(self) -> None:
        """Raise GearError if the table is closed or lost in a fork."""
        _ = self.index

    def __enter__(self) -> Table:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if self.name is None:
            raise PrivateTableError(
                "A private table cannot be sent to another process. Create it with a name, "
                "Table.create(..., name='replay'), and it travels as a handle."
            )
        return _attach, (self.name, self.on_full, self.index.admission.timeout)

    def __repr__(self) -> str:
        if not hasattr(self, "on_full"):
            return "<Table, not opened>"
        name, index, region = self.name or "private", self._index, self._region
        if index is None:
            return f"<Table {name}, {'of the parent process' if region.is_lost else 'closed'}>"
        layout, counters = region.layout, index.arrays.counters
        count, steps = int(counters[NUM_READY]), int(counters[NUM_STEPS])
        text = (
            f"{count:,} of {layout.max_trajectories:,} trajectories, {steps:,} of {layout.max_steps:,} steps, "
            f"{size(max(steps, 0) * self._step_bytes)} in a region of {size(layout.region_bytes)}"
        )
        return f"<Table {name}{'' if count else ', empty'}: {text}>"

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _INTERNAL]

    # ---------------------------------------------------------------- adding

    def add(
        self,
        trajectory: Trajectory,
        *,
        priority: float | None = None,
        final: Mapping[str, Any] | None = None,
    ) -> int:
        """Store one trajectory.

        Args:
            trajectory: column name -> numpy array or torch tensor ``[T, *shape]`` of exactly the column's dtype
                (see `Column` for ``cast=True``), with the same T >= 1; ``[*shape]`` of a column per trajectory. It may
                be a TensorDict; a nested one has the columns ``outer.inner``.
            priority: initial priority for prioritized selectors, finite and not negative. By default the largest
                priority that the selector has seen (initially 1), so that new trajectories are drawn soon.
            final: values after the last step of all columns with ``Column(final=True)``, column name -> ``[*shape]``:
                the observation that follows the last action. Windows read it, but it is never an anchor.

        Returns:
            Index of the trajectory: valid until its removal or eviction, then reused.

        Raises:
            SchemaError: the trajectory or the priority does not fit.
            TableFullError: the table is full and `on_full` is ``"error"``, or the wait for space timed out.
            RateLimitError: the wait for the rate limiter timed out.
            LockTimeoutError: the wait for the lock, or for space held by readers or unfinished writes, timed out.

        After an error nothing was changed, except for evictions before the wait for space timed out.
        """
        index = self.index
        first = checked_priority(priority)
        schema = self._added
        if final is not None:
            rows = with_final(schema, trajectory, final)
            return int(self.store([rows], np.array([first], dtype=np.float32), finals=_ONE)[0])
        length, addresses, hold = schema.locate_fast(trajectory) or schema.locate(trajectory)
        if length <= self._longest_inline:
            slot = index.store_one(self._targets, length, addresses, first, evict=_POLICIES[self.on_full][0])
            if slot is not None:
                return slot
        steps = Steps(np.array([addresses], dtype=np.int64), np.array([length], dtype=np.int64), hold)
        return int(self._store(index, steps, np.array([first], dtype=np.float32))[0])

    def writer(
        self, *, chunk_steps: int | None = None, overlap_steps: int = 0, commit_every_step: bool = False
    ) -> Writer:
        """Create a writer that adds trajectories step by step; see `Writer`.

        Args:
            chunk_steps: steps of each trajectory that the stream is cut into; None for no cuts.
            overlap_steps: common steps of consecutive trajectories.
            commit_every_step: make each step visible at once, in one trajectory that grows; see `StepWriter`.

        Raises:
            SchemaError: invalid options, or chunks that are to be committed step by step.
        """
        late = [name for name in self.schema.late if not self.schema[name].trajectory]
        overlap_steps = at_least("overlap_steps", overlap_steps, least=0)
        flag("commit_every_step", commit_every_step)
        if late and (overlap_steps or commit_every_step):
            raise SchemaError(
                f"The columns {late} have late=True and a value for each step; expected a writer without overlap_steps "
                "and commit_every_step: steps that several trajectories share, or that follow, cannot be filled once."
            )
        if commit_every_step:
            if chunk_steps is not None or overlap_steps:
                raise SchemaError(
                    f"commit_every_step goes without chunk_steps ({chunk_steps}) and overlap_steps ({overlap_steps}): "
                    "the trajectory grows until commit()."
                )
            return StepWriter(self)
        return Writer(self, chunk_steps=chunk_steps, overlap_steps=overlap_steps)

    def writers(self, n: int, **options: Any) -> VectorWriter:
        """Create a writer for the n environments of a vector environment; see `VectorWriter`.

        Args:
            n: number of environments, at most the trajectories and the blocks that the table holds.
            options: of each environment's `writer`.

        Raises:
            SchemaError: invalid sizes.
        """
        return VectorWriter(self, n, lambda: self.writer(**options))

    def extend(
        self,
        trajectories: Iterable[Trajectory] | Trajectory,
        *,
        lengths: Sequence[int] | Array | torch.Tensor | None = None,
        priority: float | Sequence[float] | Array | torch.Tensor | None = None,
    ) -> Array:
        """Store many trajectories atomically, taking the lock once to begin and once to commit.

        Args:
            trajectories: iterable of mappings as for `add`; or, with `lengths`, one mapping of stacked arrays
                ``[n, T, *shape]``, where trajectory i is the first ``lengths[i]`` steps of row i (``[n, *shape]`` of
                columns per trajectory). A TensorDict of batch
                size [n, T] needs no `lengths`: its rows are whole trajectories. A list or a tuple is read in place. Any
                other iterable may refill the same arrays: each item is copied before the next one is requested.
            lengths: int [n], with stacked arrays.
            priority: as for `add`; one number, or [n].

        Returns:
            Indices of the trajectories, int64 [n].

        Raises:
            As `add`; the message names the first trajectory that does not fit. Nothing was changed.
        """
        index = self.index
        steps = self._checked(trajectories, lengths)
        priorities = checked_priorities(priority, len(steps.lengths))
        return self._store(index, steps, priorities) if len(steps.lengths) else np.empty(0, dtype=np.int64)

    def extend_as(
        self,
        trajectories: Iterable[Trajectory] | Trajectory,
        *,
        ids: Sequence[int] | Array | torch.Tensor,
        priority: float | Sequence[float] | Array | torch.Tensor | None = None,
        lengths: Sequence[int] | Array | torch.Tensor | None = None,
    ) -> Array:
        """As `extend`, for trajectories with given global ids: after a migration, or copies.

        New ids of the table stay above the given ids of its own origin.

        Args:
            trajectories, priority, lengths: as for `extend`.
            ids: int64 [n], from 0 to 2**62 - 1, or -1 for a new id.

        Returns:
            Indices of the trajectories, int64 [n].

        Raises:
            SchemaError: an id is invalid, given twice, or in use in the table.

        Raises the other errors of `extend` too. After an error nothing was changed.
        """
        index = self.index
        steps = self._checked(trajectories, lengths)
        priorities = checked_priorities(priority, len(steps.lengths))
        given = check_ids(ids, len(steps.lengths))
        if not len(given):
            return np.empty(0, dtype=np.int64)
        return self._store(index, steps, priorities, given if (given >= 0).any() else None)

    def store(
        self,
        trajectories: Sequence[Trajectory],
        priorities: Array,
        ids: Array | None = None,
        finals: Array | None = None,
        *,
        unique: bool = False,
        index: Index | None = None,
    ) -> Array:
        """`extend_as` with validated priorities and ids, for transports.

        Args:
            trajectories: mappings as for `add`.
            priorities: float32 [n], -1 for a trajectory without one.
            ids: int64 [n], -1 for a new id; None for new ids only.
            finals: int64 [n], 1 if the last row of the trajectory is its final step, else 0; None for none.
            unique: whether no trajectory can have one of `ids`, so that the table is not searched for them.
            index: of this table, with other time-outs; by default its own.

        Returns:
            Indices of the trajectories, int64 [n].

        Raises:
            As `extend_as`.
        """
        return self.store_steps(
            listed(self._added, trajectories), priorities, ids, finals, unique=unique, index=index
        )

    def store_steps(
        self,
        steps: Steps,
        priorities: Array,
        ids: Array | None = None,
        finals: Array | None = None,
        *,
        unique: bool = False,
        index: Index | None = None,
    ) -> Array:
        """As `store`, for steps that fit the schema."""
        return self._store(
            self.index if index is None else index, steps, priorities, ids, finals, unique=unique
        )

    def store_one(
        self, index: Index, rows: int, addresses: list[int], final: int, priority: float, identity: int
    ) -> int | None:
        """`store` of one small trajectory that fits the schema, without a wait.

        Args:
            index: of this table. rows: its rows, the last `final` (0 or 1) of which are final steps.
            addresses: of each column's rows. priority: valid, or -1. identity: an id that a client has made up.

        Returns:
            Its index; None, having done nothing, if `store` has to be used, or to raise an error.
        """
        if rows > self._longest_inline or rows - final > self.longest:
            return None
        return index.store_one(
            self._targets,
            rows - final,
            addresses,
            priority,
            evict=self.policy[0],
            final=final,
            identity=identity,
        )

    def _checked(self, trajectories: Any, lengths: Any) -> Steps:
        if lengths is None:
            lengths = rectangular(trajectories)
        return (
            listed(self._added, trajectories)
            if lengths is None
            else stacked(self._added, trajectories, lengths)
        )

    def _store(
        self,
        index: Index,
        steps: Steps,
        priorities: Array,
        given: Array | None = None,
        finals: Array | None = None,
        *,
        unique: bool = False,
    ) -> Array:
        lengths = steps.lengths if finals is None else steps.lengths - finals
        self._check_lengths(lengths)
        limiter = self.rules.rate_limiter
        if limiter is not None:
            limiter.check_insert(len(steps.lengths))
        evict, wait = self.policy
        if given is None or unique:
            stored = index.store(
                self._targets,
                steps.lengths,
                steps.addresses,
                priorities,
                ids=given,
                finals=finals,
                evict=evict,
                wait=wait,
                step_bytes=self._step_bytes,
            )
            if stored is not None:
                return stored
        claim = Claim(len(steps.lengths))
        try:
            slots, ids = index.begin(
                lengths, finals=finals, evict=evict, wait=wait, ids=given, unique=unique, claim=claim
            )
            self._write(ids, steps)
            index.commit(slots, priorities)
        except BaseException as error:
            if (claim.slots >= 0).any():
                may_wait = not isinstance(error, LockTimeoutError)
                index.abort(claim.slots, wait=may_wait, generations=claim.generations)
            raise
        return slots

    @property
    def policy(self) -> tuple[int, bool]:
        """`on_full` as the arguments `evict` and `wait` of `Index.begin`."""
        return _POLICIES[self.on_full]

    def _check_lengths(self, lengths: Array) -> None:
        if len(lengths) and lengths.max() > self.longest:
            bad = int(lengths.argmax())
            raise SchemaError(
                f"Trajectory {bad} has {lengths[bad]:,} steps; this table holds at most {self.longest:,}. "
                "Create it with a larger max_steps (and max_blocks, if given) or split the trajectory."
            )

    @property
    def seconds_waited(self) -> float:
        """Back-pressure: seconds that additions through this handle have waited for space or the rate limiter.
        `stats()` has the sum over all processes."""
        return self.index.admission.waited / 1e9

    def free_steps(self) -> int:
        """Approximate number of steps that fit without eviction. Takes no lock."""
        counters, layout = self.index.arrays.counters, self._region.layout
        steps = layout.max_steps - int(counters[NUM_STEPS] + counters[WRITING_STEPS])
        if not self.has_tier:  # which makes room in memory
            steps = min(steps, int(counters[NUM_FREE_BLOCKS]) * layout.block_steps)
        return max(0, steps)

    def column_addresses(self) -> Array:
        """int64 [C, 4]: address of each column's first step, bytes from block to block, of a step, and from step to
        step in a block."""
        return self._columns

    def step_addresses(self) -> Array:
        """As `column_addresses`, of the columns in ``schema.added.steps``."""
        return self._step_columns

    def _write(self, ids: Array, steps: Steps) -> None:
        self.check_open()
        layout = self._region.layout
        copying.scatter(self._targets, layout.block_steps, ids, steps.addresses, steps.lengths)

    # ---------------------------------------------------------------- versions of the policy

    @property
    def policy_version(self) -> int:
        """Version of the policy, 0 at first, for all processes. Takes no lock."""
        return int(self.index.arrays.counters[POLICY])

    def advance_version(self) -> int:
        """Raise the version of the policy by one, and remove the trajectories that `max_lag` makes too old.

        Returns:
            The version.

        Raises:
            SchemaError: the table was created without `version`.
        """
        version = self.index.admission.advance_version()
        assert version is not None, "no version was expected"
        return version

    # ---------------------------------------------------------------- columns that are filled later

    def fill(
        self,
        index: Any,
        /,
        *,
        generation: Sequence[int] | Array | torch.Tensor | int | None = None,
        stale: Literal["ignore", "error"] = "ignore",
        **columns: Any,
    ) -> int:
        """Write columns with ``Column(late=True)`` of trajectories that are in the table, once.

        ``table.fill(index, generation=..., reward=rewards)``, or with the rows of a batch
        ``table.fill(batch, advantage=advantage)``. From then on datasets that read the column draw the trajectory, in
        every process. All values are written or none, but those of trajectories that lie on disk only: these are
        brought back into memory and filled piece by piece. Large values are copied without the table's lock; calls of
        all processes follow one another.

        Args:
            index: index of a trajectory; int [n], indices of several; or a whole batch, which supplies generations too.
            generation: int [n]; detects stale rows, whose index was reused.
            stale: how to treat rows of removed trajectories: ``"ignore"`` skips them, ``"error"`` changes nothing and
                raises.
            columns: for one index values as for `add`: ``[T, *shape]``, or ``[*shape]`` of columns per trajectory. For
                several a list of n arrays ``[T, *shape]``, or ``[n, *shape]`` of columns per trajectory; with a packed
                batch of whole trajectories also one array ``[total, *shape]`` like its columns.

        Returns:
            Number of rows that were skipped.

        Raises:
            FilledError: a trajectory has the column already, or is given twice. Nothing was changed.
            SchemaError: a column that is not late, or values that do not fit. Nothing was changed.
            StaleIndexError: with ``stale="error"``: a trajectory was removed. Nothing was changed.
            TableFullError: of a table with a disk tier: timed out waiting for room in memory. What is filled stays.
            LockTimeoutError: timed out waiting for the lock.
        """
        self.check_open()
        return fill_columns(self, index, generation, columns, strict=is_strict(stale))

    def unfilled(self, *columns: str) -> tuple[Array, Array]:
        """The trajectories of which a late column is not filled, oldest first.

        Args:
            columns: names of late columns; all of them by default.

        Returns:
            Their indices and generations, int64 [n] each, as `fill` takes them.

        Raises:
            SchemaError: a column that is not late.
        """
        return unfilled(self, columns)

    # ---------------------------------------------------------------- reading and removing

    # Otherwise Python would iterate over indices from 0 to the first invalid one.
    __iter__: ClassVar[None] = None

    def __len__(self) -> int:
        return self.index.arrays.num_ready()

    @property
    def num_steps(self) -> int:
        """Steps of all live trajectories."""
        return int(self.index.arrays.counters[NUM_STEPS])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """A copy of one trajectory: column name -> tensor ``[T, *shape]`` on the CPU; ``[*shape]`` of columns per
        trajectory. Late columns that are not filled are not in it.

        Writing into the tensors does not change the table: what was added stays as it is. Values that follow later are
        written once, by `fill`; for others remove the trajectory and add it anew.

        Raises:
            StaleIndexError: the index has no live trajectory.
        """
        rows = self.rows(index)
        assert rows is not None
        return rows

    def rows(self, index: int, *, final: bool = False) -> dict[str, torch.Tensor] | None:
        """A copy of one trajectory's rows: column name -> tensor ``[T, *shape]``, or ``[*shape]`` of columns per
        trajectory, on the CPU; for transports.

        Args:
            index: index of the trajectory.
            final: with the final step as the last row (zeros in columns without one); None if it has none.

        Raises:
            StaleIndexError: the index has no live trajectory.
        """
        live = self.index
        if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
            if not (isinstance(index, torch.Tensor) and index.ndim == 0 and not index.is_floating_point()):
                raise TypeError(
                    f"Table index {shown(index)} was received; expected one integer, as add() returns it."
                )
            index = int(index)
        ticket = Ticket()
        try:
            # All of it at one moment: a place in memory that is read later may be one on disk, or lack what is filled.
            extent, bits = live.reader.begin_read_of(int(index), ticket)
            length, place, more = extent
            rows = None
            if more or not final:
                count, names = length + more if final else length, self._filled_columns(bits)
                if place < 0 and self.has_tier:
                    rows = self._read_from_disk(int(index), names, count)
                else:
                    ids = live.arrays.row(int(index), extent)
                    rows = {name: self._read_column(name, ids, count) for name in names}
            ticket.end()
            return rows
        finally:
            ticket.end()  # idempotent; an exception may arrive anywhere above

    def final(self, index: int) -> dict[str, torch.Tensor] | None:
        """A copy of the values after the last step of one trajectory: column name -> ``[*shape]`` on the CPU.

        Returns:
            The columns with ``Column(final=True)``; None if the trajectory was added without `final`.

        Raises:
            StaleIndexError: the index has no live trajectory.
        """
        rows = self.rows(index, final=True)
        if rows is None:
            return None
        return {name: rows[name][-1] for name, column in self.schema.items() if column.final}

    def _read_from_disk(self, slot: int, names: Sequence[str], length: int) -> dict[str, torch.Tensor]:
        """Columns of a trajectory that lies on disk only, or did a moment ago; under a read ticket."""
        slots, zero = np.array([slot]), np.zeros(1, dtype=np.int64)
        columns = {name: self.schema[name] for name in names}
        outs = {
            name: np.empty(column.step_bytes * (1 if column.trajectory else length), dtype=np.uint8)
            for name, column in columns.items()
        }
        self.tier_reader().read(
            slots,
            self.index.arrays.generation[slots],
            zero,
            np.array([length]),
            {name: (out, zero) for name, out in outs.items()},
        )
        return {
            name: torch.from_numpy(outs[name])
            .view(column.dtype)
            .reshape(column.shape if column.trajectory else (length, *column.shape))
            for name, column in columns.items()
        }

    def _filled_columns(self, bits: int) -> list[str]:
        """The columns of a trajectory that have values, by the bits of its late columns."""
        late = self.schema.late
        return [name for name in self.schema if name not in late or bits >> late.index(name) & 1]

    def _read_column(self, name: str, ids: Array, length: int) -> torch.Tensor:
        column = self.schema[name]
        data = self._region.column(name)
        if column.trajectory:
            value = data[ids[0], 0]
            return torch.from_numpy(value.copy()).view(column.dtype).reshape(column.shape)
        rows = np.ascontiguousarray(data[ids].reshape(-1, column.step_bytes)[:length])
        return torch.from_numpy(rows.reshape(-1)).view(column.dtype).reshape(length, *column.shape)

    def indices(self) -> Array:
        """Indices of all live trajectories, oldest first, int64 [n]."""
        return self.reader().snapshot().slots.copy()

    def lengths(self) -> Array:
        """Lengths of all live trajectories in steps, oldest first, int64 [n]."""
        return self.reader().snapshot().lengths.copy()

    @property
    def origin(self) -> int | None:
        """Shard number of the table, the lower 16 bits of its new ids; None if not set (0 in ids)."""
        return origin_of(self.index.arrays.view)

    def set_origin(self, shard: int) -> None:
        """Set the shard number permanently and for all processes, before other processes use its ids.

        Args:
            shard: 0 to 65,535, distinct between tables. Repeating it has no effect.

        Raises:
            SchemaError: invalid, the table has another shard number, or two trajectories would have the same id.
                Nothing was changed.
        """
        self.index.set_origin(check_origin(shard))

    def ids(self, slots: Array) -> Array:
        """Global ids of trajectories, ``sequence << 16 | origin`` unless added with an id. Takes no lock.

        Args:
            slots: int64 [n], indices of live trajectories; ids of other slots are undefined.

        Returns:
            int64 [n].
        """
        slots = numbers(slots, "slots", "iu", "integers [n]")
        try:
            return ids_of(self.index.arrays.view, slots.reshape(-1).astype(np.int64, copy=False))
        except IndexError:
            raise StaleIndexError(
                f"slots has {int(slots.max())}; expected indices of live trajectories, as add() returns them."
            ) from None

    def remove(self, index: int | Sequence[int] | Array) -> None:
        """Remove one trajectory, or several atomically.

        Args:
            index: int, or int [n].

        Raises:
            StaleIndexError: an index without a live trajectory, or given twice. Nothing was changed.
            SchemaError: anything but integers. Nothing was changed.
        """
        slots = numbers(index, "index", "iu", "an integer, or integers [n], as add() returns them")
        self.index.remove(slots.reshape(-1).astype(np.int64))

    def clear(self) -> None:
        """Remove all trajectories that are live now, at once. Open writers are not affected.

        Their memory is reused when the read tickets taken before have ended. Ids and sequence numbers go on.
        """
        self.index.clear()

    def stats(self) -> TableStats:
        """Counts, bytes and rates; see `TableStats`.

        Logs if more than a quarter of the resident bytes hold no steps (of tables with 1 MiB of steps or more) and
        other blocks would save a tenth, as `ReplayDataset` does when an epoch begins: once for a table over all its
        processes, once in a process for tables of the same columns and blocks, and of several ranks on the first.
        """
        if self._tier_reader is not None:
            self._tier_reader.flush()
        stats = stats_of(self.index, self._region.layout)
        if self._disk is not None:
            stats = dataclasses.replace(stats, disk=self._disk.stats())
        self.notice_waste(stats)
        return stats

    def notice_waste(self, stats: TableStats | None = None) -> None:
        """Log once if more than a quarter of the resident bytes hold no steps; see `stats`.

        Args:
            stats: of the table, if they are known.
        """
        index, layout, told = self.index, self._region.layout, self.index.arrays.counters[TOLD]
        key = f"waste {layout.block_steps} {self.schema.to_json()}"  # the tables of shards, and those made again
        if told[0] or key in notices() or _is_later_rank():
            return

        def rows_of() -> Array:
            extent = index.arrays.extent[index.reader.snapshot().slots]
            rows: Array = extent[:, 0] + extent[:, 2]
            return rows

        remedy = waste_remedy(layout, stats_of(index, layout) if stats is None else stats, rows_of)
        if remedy is None:
            return

        def claim() -> bool:
            before, told[0] = bool(told[0]), 1
            return not before

        if index.recovery.locked(claim):
            notice(key, f"Of {'a private table' if self.name is None else f'table {self.name!r}'}, {remedy}")

    def check_valid(self) -> None:
        """Check the consistency of the index, for tests and after a crash.

        Raises:
            AssertionError: the index is inconsistent; the message says where.
        """
        self.index.recovery.check_valid()

    def update_priority(
        self,
        index: Sequence[int] | Array | torch.Tensor,
        priority: Sequence[float] | Array | torch.Tensor,
        *,
        generation: Sequence[int] | Array | torch.Tensor | None = None,
        stale: Literal["ignore", "error"] = "ignore",
    ) -> int:
        """Set the priorities of trajectories, for all who draw from the table, in any process.

        Datasets that draw by priority use them from their next draw on; for those that draw single steps they are the
        priorities of all steps of the trajectory. Of this and `ReplayDataset.update_priority` the later one counts.
        Eviction by the lowest priority, checkpoints and datasets that are made later see them too.

        Args:
            index: int [n], indices of trajectories. Of equal ones the last counts.
            priority: numbers [n], finite as float32 and not negative.
            generation: int [n], ``batch["generation"]``; detects stale rows, whose index was reused.
            stale: how to treat rows of removed trajectories: ``"ignore"`` skips them, ``"error"`` changes nothing and
                raises.

        Returns:
            Number of rows that were skipped.

        Raises:
            PriorityError: a priority is NaN, infinite or negative; the message names the first. Nothing was changed.
            StaleIndexError: with ``stale="error"``: a trajectory was removed. Nothing was changed.
            SchemaError: other shapes or dtypes. Nothing was changed.
        """
        updates = request(index, priority, generation=generation, anchor=None, unit="trajectory")
        skipped, _ = self.reader().revise(updates, strict=is_strict(stale))
        if self.has_tier:
            arrays = self.index.arrays
            current = arrays.generation[updates.slots]
            known = (
                np.ones(len(current), dtype=bool) if generation is None else current == updates.generations
            )
            slots = updates.slots[known]
            arrays.heat[slots] = pack_heat(current[known], updates.priorities[known])
        return skipped

    # ---------------------------------------------------------------- for selections, collectors and transports

    def reader(self) -> TableReader:
        """The read interface, for reads under a read ticket; raises GearError if the table is closed."""
        return self.index.reader

    @property
    def has_tier(self) -> bool:
        """Whether trajectories may lie on disk only."""
        return self._region.layout.tier is not None

    @property
    def num_spilled(self) -> int:
        """Number of trajectories that lie on disk only."""
        return int(self.index.arrays.counters[NUM_SPILLED])

    def tier_reader(self) -> TierReader:
        """What reads trajectories that lie on disk only, of this process; its files are opened when they are read."""
        if self._tier_reader is None:
            self._tier_reader = _checkpoint("tier_reader").FileReader(self)
        reader: TierReader = self._tier_reader
        return reader

    def prefer_in_memory(self, keep: Literal["newest", "oldest", "priority"]) -> None:
        """Tell the owner of a table with a disk tier what is drawn most, for ``Disk(keep="auto")``."""
        self.index.arrays.tier_counts[KEEP] = 1 + KEEPS.index(keep)

    def bring_back(self, slots: Array) -> int:
        """Bring trajectories that lie on disk only back into memory, as far as blocks are free; return how many.

        Args:
            slots: int64 [n], distinct.
        """
        count: int = _checkpoint("promoting").promote(self, slots, most_bytes=None)
        return count

    def remove_lost(self, error: LostRowsError) -> int:
        """Remove trajectories that cannot be read from disk, log the error and count them; return how many.

        Trajectories that are gone by now, or whose removal another process has counted, are left out.
        """
        count = self.index.remove_lost(error.slots, error.generations)
        if count:
            _logger.error(
                "%s %d trajectories were removed from %s.", error, count, self.name or "a private table"
            )
        return count

    @property
    def region(self) -> Region:
        """Memory of the table, for collectors and transports."""
        return self._region

    @property
    def index(self) -> Index:
        """The index, for writers, checkpoints and tests.

        Raises:
            GearError: the table is closed or lost in a fork.
        """
        if self._index is None:
            raise self._region.absence()
        return self._index


def _is_later_rank() -> bool:
    """Whether another rank of torch.distributed says what all ranks would say of their tables."""
    ranks = torch.distributed
    return ranks.is_available() and ranks.is_initialized() and ranks.get_rank() > 0


_ONE = np.ones(1, dtype=np.int64)
_tables: weakref.WeakSet[Table] = weakref.WeakSet()


def _after_fork() -> None:
    # A forked child does not receive pinned private regions, see `Region.pin`.
    for table in list(_tables):
        if table._region.is_lost:
            table._index = None


os.register_at_fork(after_in_child=_after_fork)


def _attach(name: str, on_full: OnFull, timeout: float | None) -> Table:
    return Table.attach(name, on_full=on_full, timeout=timeout)


def _checkpoint(module: str) -> Any:
    """A module of the folder above that saves and loads tables."""
    return importlib.import_module(f"gear_loader.checkpoint.{module}")
