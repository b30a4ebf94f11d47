"""The table: trajectories in paged columns of one region, under an index."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import numpy as np
import torch

from gear_loader.errors import (
    PrivateTableError,
    RegionError,
    SchemaError,
    StaleIndexError,
)
from gear_loader.storage.background_loading import Loading
from gear_loader.storage.block_sink import BlockSink, GrowingSink
from gear_loader.storage.coders import check_packages
from gear_loader.storage.counters import (
    NUM_STEPS,
    POLICY,
)
from gear_loader.storage.disk import Disk, Tier
from gear_loader.storage.edits import set_columns
from gear_loader.storage.engine import Engine
from gear_loader.storage.group_input import GroupColumn, kept_trajectories
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
from gear_loader.storage.late import fill_columns, unfilled
from gear_loader.storage.layout import Layout
from gear_loader.storage.limiters import RateLimiter
from gear_loader.storage.memory_options import Memory
from gear_loader.storage.numa import check_numa
from gear_loader.storage.payload import check_payload
from gear_loader.storage.prefix_input import Beginning
from gear_loader.storage.priority_updates import is_strict, request
from gear_loader.storage.ragged import check_fixed
from gear_loader.storage.region import Region
from gear_loader.storage.schema import Column, Schema
from gear_loader.storage.shared_memory import region_path
from gear_loader.storage.statistics import Statistics
from gear_loader.storage.stats import TableStats
from gear_loader.storage.table_layout import table_layout
from gear_loader.storage.table_rules import Limits, OnFull, Rules, check_on_full, check_seconds
from gear_loader.storage.vector_writer import VectorWriter
from gear_loader.storage.writer import Writer
from gear_loader.utils.arrays import Array, numbers, shown
from gear_loader.utils.checks import at_least, flag, one_of
from gear_loader.utils.device_option import check_device, device_of
from gear_loader.utils.paths import is_address, path_or_address
from gear_loader.utils.provided import provided

if TYPE_CHECKING:
    from gear_loader.storage.device_writer import DeviceWriter

Trajectory = Mapping[str, Any]


class Table:
    """Trajectories of uneven length, stored column by column in blocks of one memory region.

    Made by `Table.create`, `Table.load` or `Table.attach`. Several threads can read and write it. A table with a name
    is in shared memory: all processes of the same user on the same machine (and in the same PID namespace) can attach
    to it, and unpickling it attaches by the name. As a context manager it closes itself.

    A forked process shares a named table, and has its own copy of a private one. If pinning a private table for a GPU
    had begun before the fork, the child has no copy, and using it there raises PrivateTableError.

    Calls do not wait for a GPU, except those that get CUDA tensors, which are copied to the host, and reads by the CPU
    of a table in GPU memory.
    """

    def __init__(
        self, region: Region, *, on_full: OnFull | None = None, timeout: float | None = None
    ) -> None:
        self._engine = engine = Engine(region, on_full=on_full, timeout=timeout)
        self.schema: Schema = engine.schema
        """The columns, a mapping of name to `Column`."""
        self.name: str | None = engine.name
        """The name that other processes attach by, or None."""
        self.rules: Rules = engine.rules
        """Rules given to `create`: policy, rate limiter and expiry."""

    @property
    def on_full(self) -> OnFull:
        """Policy of additions through this handle to a full table."""
        return self._engine.on_full

    @property
    def statistics(self) -> Statistics | None:
        """Statistics of the columns, of what the last ``load_dataset(..., statistics=True)`` of this process has added,
        or of the checkpoint that the table was loaded from; None if there are none."""
        return self._engine.statistics

    @property
    def loading(self) -> Loading | None:
        """What fills the table in the background, of the last ``load_dataset(..., wait=False)`` of this process."""
        return self._engine.loading

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
        device: str | torch.device | None = None,
        host: int | str | None = None,
    ) -> Table:
        """Create an empty table.

        Args:
            schema: column name -> `Column`. Dicts may be nested: ``{"obs": {"image": Column(...)}}`` has the column
                ``obs.image``, and ``ReplayDataset(output="nested")`` delivers it so.
            max_steps: largest number of steps, and so the longest possible trajectory.
            max_trajectories: largest number of trajectories.
            block_steps: steps of a block, the unit of allocation. A trajectory takes ceil(length / block_steps) blocks:
                small blocks waste less at its end, large ones are read in longer pieces. A block of records, or of a
                column outside them, is padded to a multiple of 128 bytes: 32 steps of 4 bytes need no padding.
                ``"auto"`` wastes least, index included, if lengths are geometric.
            memory: bytes of the whole region, index included: an int, or a text such as ``"20GiB"``; or a `Memory`,
                which has more options. By default enough for `max_steps` steps in `max_trajectories` trajectories of
                any lengths.
            name: name by which other processes attach. The table then outlives this process, until `unlink`. Its file
                is in `/dev/shm`, or in the directory that the environment variable ``GEAR_LOADER_DIR`` names when
                `gear_loader` is imported: an absolute path on a tmpfs, the same in all processes. Without a name the
                table is private memory, whose pages are allocated as they are written. Of a table with `device` other
                processes read the rows through this one, as long as it has the table open; they cannot add.
            on_full: default policy of additions to a full table: ``"error"`` raises `TableFullError`;
                ``"evict_oldest"`` evicts the oldest trajectories; ``"evict_lowest_priority"`` evicts those with the
                lowest current priority (of `add` or `ReplayDataset.update_priority`; ties in any order, those without a
                priority last); ``"wait"`` waits until others free space.
            rate_limiter: bounds sampling relative to adding: `MinSize`, `SampleToInsertRatio` or `Queue`. By default
                no limit.
            limits: `Limits`: rules that remove trajectories although there is room. By default none.
            timeout: seconds that calls through this handle wait for space or for the rate limiter; 60 by default.
            if_exists: what to do if a table of this name exists: ``"error"`` raises; ``"attach"`` attaches to it if its
                columns, sizes and rules are the same, so any process may be the first, and a notebook cell can be run
                again; ``"replace"`` removes it first (attached processes keep the old table until they close it).
            disk: a `Disk` to which the table is written in the background, at most `Disk.sync_seconds` after each
                commit; `recover` restores it after a crash of the machine. A thread of this process writes until
                `close` or the end of the process, also what other processes add. Adding never waits for it; a
                trajectory that is evicted before it was written is never on disk. If the disk is full or fails, the
                table goes on: `stats` and the log say what is not written, and it is written later. The directory must
                be empty or new; with ``if_exists="attach"`` it may be that of the existing table, which one process
                writes at a time.

                With `Disk.size` trajectories that do not fit into `memory` are on disk only; `max_steps` and
                `max_trajectories` limit memory and disk together. Batches are the same as if everything fitted: draws
                use the index, which stays in memory. The thread moves trajectories to disk ahead of need; if it or the
                disk falls behind, additions wait, at most `timeout`. When the disk holds `Disk.size`, `on_full`
                decides: the evicting policies evict from the whole table, ``"error"`` raises. A full file system is an
                error, except with ``"wait"``, which waits for space. A trajectory that cannot be read back is removed,
                logged and counted, and its batch is drawn again. `Shards` over NIXL refuse such a table. See
                docs/tiers.md.
            device: a CUDA device whose memory holds the blocks; the index stays in host memory, and `memory` is that of
                the blocks. Batches for this device are gathered there; what the CPU reads
                (batches, `gather`, ``table[i]``, `save`) is copied, which waits for the GPU. Written by
                ``writers(n, device=...)``, `add` and `extend`. With a `disk` that has a size, trajectories beyond
                `memory` are on that disk, and batches for the device read them from there. Not with late,
                mutable or ragged columns, or versions of a policy. By default everything is in host memory. See
                docs/gpu.md.
            host: with `device` and `memory`, bytes of a part of host memory below the GPU's: an int, or a text such as
                ``"500GiB"``. When few blocks are free on the GPU, the oldest trajectories move there, or those that
                ``Disk(keep=)`` values least; no block is in both. The part is pinned, which this call waits for (about
                0.1 s a GB): kernels read it over the bus, and the CPU and other processes read it where it lies. What
                does not fit there moves to a `disk` that has a size; without one `on_full` decides. A trajectory has to
                fit into either. Draws by priority are made by the host.

        Raises:
            SchemaError: invalid sizes, columns or options, a NUMA node or a device that does not exist, or the existing
                table differs.
            RegionError: the name is taken or invalid, there is not enough memory, ``huge_pages=True`` is not possible,
                `host` cannot be pinned, or ``GEAR_LOADER_DIR`` is not a directory in which only this user and root can
                replace tables.
            CheckpointError: the directory of `disk` holds a table or other files, is in use, or cannot be written. No
                table is left.
            ImportError: the package of a column's codec is not installed; the message names what to install.
        """
        memory = Memory.of(memory)
        tier: Tier | None
        if isinstance(disk, Tier):  # of a table that is recovered, and written later
            tier, disk = disk, None
        elif disk is not None and not isinstance(disk, Disk):
            raise SchemaError(f"disk is {shown(disk)}; expected None or a gear_loader.Disk.")
        else:
            tier = None if disk is None else disk.tier()
        where = _place_of_blocks(schema, device, limits)
        layout = table_layout(
            schema,
            max_steps=max_steps,
            max_trajectories=max_trajectories,
            block_steps=block_steps,
            memory=memory,
            on_full=on_full,
            rate_limiter=rate_limiter,
            limits=limits,
            tier=tier,
            device=where,
            host=host,
        )
        late = {name: layout.schema[name] for name in layout.schema.late}
        if tier is not None:
            check_fixed(late, "a table whose disk has a size takes late")
        check_packages(layout.schema.ragged.values())
        timeout = None if timeout is None else check_seconds("timeout", timeout)
        node = check_numa(memory.numa)
        one_of("if_exists", if_exists, ("error", "attach", "replace"))
        if if_exists != "error" and name is None:
            raise SchemaError(f"if_exists is {if_exists!r} without a name: a private table is always new.")

        def make() -> tuple[Table, bool]:
            """The table, and whether it is new."""
            if if_exists == "replace" and name is not None and os.path.lexists(region_path(name)):
                with contextlib.closing(Region.attach(name)) as old:
                    old.unlink()
            try:
                pages = memory.huge_pages
                region = Region.create(layout, name, huge_pages=pages, node=node, device=where)
                return cls(region, timeout=timeout), True
            except RegionError:
                if if_exists != "attach" or name is None or not os.path.lexists(region_path(name)):
                    raise
                return cls._existing(name, layout, timeout), False

        if disk is None:
            return make()[0]
        table: Table
        table, table._engine.disk = provided("create_on_disk")(
            make, disk, name, exist_ok=if_exists == "attach"
        )
        return table

    @classmethod
    def _existing(cls, name: str, layout: Layout, timeout: float | None) -> Table:
        table = cls.attach(name, timeout=timeout)
        if table._engine.region.layout.header[64:] != layout.header[64:]:
            table.close()
            raise SchemaError(
                f"Table {name!r} exists with other columns, sizes or rules than were asked for; expected the same. "
                "Attach to it, give another name, or use if_exists='replace'."
            )
        region = table._engine.region
        if region.layout.device is not None and region.device_memory is None:
            region.block_client().connect()
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
            table._engine.index.recovery.check_bounds()
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
        block_steps = at_least("block_steps", block_steps)
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

        Writers of a full table wait while the last part is saved: at most 128 MiB, unless they are as fast as the disk.

        If `path` is the directory of ``create(disk=)``, the process that writes it writes what is missing there and
        waits for the disk; other processes cannot save into it.

        The columns are ``.npy`` files of whole trajectories one after another, the index has a record a trajectory with
        sequence number, length, priority, times sampled, time, id and place, and ``manifest.json`` holds rules,
        counts, and size and checksum (XXH128) of every file. See `gear_loader.checkpoint`.

        Args:
            path: directory with a checkpoint, an empty one, or one to create. It may be a symbolic link; links inside
                the checkpoint are not followed, and only files of earlier saves are removed. Or an address of fsspec,
                such as ``"s3://bucket/run"``: uploaded in parts, under names that no other save has, the manifest last.
                Failed requests are repeated for a minute. There is no lock: one save at a time.
            progress: show a progress bar if standard error is a terminal and `rich` is installed.

        Raises:
            CheckpointError: the disk or the store is full, fails or refuses; another save has written to the address;
                the directory holds other files or a checkpoint of another schema or version; one of its own
                directories or files is a symbolic link; or another save into it is running. The previous checkpoint
                is unchanged.
        """
        path = path_or_address(path)
        disk = self._engine.disk
        if disk is not None and not is_address(path) and disk.writes_to(path):
            disk.flush()
            return
        provided("save")(self, path, progress=progress)

    def export(
        self,
        address: str | os.PathLike[str],
        *,
        columns: Sequence[str] | Mapping[str, str] | None = None,
        **options: Any,
    ) -> Any:
        """Write the trajectories as a data set of another format, oldest first, while other processes write::

            table.export("episodes.parquet")
            table.export("hf:my_dataset", columns=["obs", "action", "reward"])

        ============================ ==================================================================================
        ``parquet:PATH``             a file ``*.parquet``, or a folder of them: `gear_loader.exports.parquet`
        ``hf:FOLDER``                the same, for ``datasets.load_dataset(folder)``
        ``npz:FOLDER``               a file for each trajectory: `gear_loader.exports.npz_writer`
        ``lerobot:FOLDER``           LeRobot v3.0, with ``fps=``: `gear_loader.exports.lerobot_writer`
        ``minari:ID``                a data set of Minari: `gear_loader.integrations.minari_export.to_minari`
        ============================ ==================================================================================

        and what `gear_loader.exports.register` has made known. Paths may be addresses of fsspec, such as
        ``s3://bucket/x``: the data set is made in the temporary directory, and uploaded when it is complete. What is
        committed when the call begins is written; of it, what is evicted or removed before it is read is left out.

        `gear_loader.load_dataset` reads them back to the same columns and values, but for bfloat16, which becomes
        float32; images in ``parquet:``, which become bytes (``hf:`` and ``lerobot:`` keep them); and arrays of several
        lengths, one a trajectory, in ``npz:``, which it refuses. ``per_trajectory=`` names columns per trajectory.
        ``final=True`` takes final values, if each trajectory has them; LeRobot has none.

        Args:
            address: as above; a file of a known suffix needs no prefix. There must be nothing at this place; the data
                set is there when it is complete.
            columns: names, or ``{name there: name in the table}``; None takes all.
            options: of the format.

        Returns:
            The path, or for ``minari:`` the `minari.MinariDataset`.

        Raises:
            SchemaError: an unknown format or option, a place that is taken, a column that the format cannot hold, or a
                write-once column that a trajectory has no values of. Nothing was written.
            CheckpointError: the store at an address refuses, or fails for a minute; what was uploaded is removed.
            ImportError: a package that the format needs is not installed.
        """
        self._engine.check_open()
        return provided("export")(self, address, columns=columns, **options)

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
        payload: int | str | None = None,
        on_full: OnFull | None = None,
        progress: bool = False,
        device: str | torch.device | None = None,
        host: int | str | None = None,
    ) -> Table:
        """Create a table from a checkpoint.

        Restores the trajectories in order, with ids, sequence numbers, priorities, times sampled and ages; the shard
        number; the rules; and the counts of the rate limiter. The time between the save and the end of this call does
        not count as age. Indices and generations may differ, and loaded trajectories share no blocks. Every byte read
        is verified.

        Args:
            path: directory or address written by `save`.
            schema: if given, the columns that the checkpoint must have.
            name: name of the table, as for `create`; None for a private table.
            max_steps, max_trajectories, block_steps, max_blocks: as for `create`; by default those of the saved table,
                with additional blocks where trajectories shared some. If one of the first three is given, `max_blocks`
                is computed as in `create`; ``block_steps="auto"`` goes by the mean length of the saved trajectories.
            packed: as for `create`, whatever the saved table was.
            payload: bytes of the values of ragged columns, as of `Memory`; by default those of the saved table.
            on_full: as for `create`; by default that of the saved table. The rate limiter, `max_times_sampled` and
                `max_age` are always those of the saved table.
            progress: show a progress bar if standard error is a terminal and `rich` is installed.
            device: as for `create`, whatever the saved table was. Read by way of host memory, 256 MiB at a time.
            host: as for `create`, with `max_blocks` as the blocks on the GPU. The newest trajectories are read there.

        Raises:
            CheckpointError: there is no checkpoint; it is damaged or of another version or schema; or it does not fit
                into the given sizes. The message names the file. No table is left.
            SchemaError, RegionError: as `create`.
        """
        options = provided("LoadOptions")(
            schema=schema,
            name=name,
            max_steps=max_steps,
            max_trajectories=max_trajectories,
            block_steps=block_steps,
            packed=packed,
            max_blocks=max_blocks,
            payload=payload,
            on_full=on_full,
            progress=progress,
            device=device,
            host=host,
        )
        table: Table = provided("load")(cls, path_or_address(path), options)
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
        payload: int | str | None = None,
        memory: int | str | None = None,
        on_full: OnFull | None = None,
        progress: bool = False,
        device: str | torch.device | None = None,
        host: int | str | None = None,
    ) -> Table:
        """Create a table from what `create(disk=)` has written last, and go on writing into the same directory.

        Restores the same as `load`, with the priorities and times sampled of the last write. If a file of the last
        write is damaged (which needs a faulty disk), the write before it is taken, and the log says so.

        Args:
            disk: the directory, or a `Disk` with it and options; also a directory written by `save`. With `Disk.size`
                trajectories that do not fit into memory stay there, whatever the saved table was; without it, all are
                loaded.
            schema, name, max_steps, max_trajectories, block_steps, packed, max_blocks, payload, on_full, progress: as
                for `load`. With `Disk.size` the memory is by default that of the saved table.
            memory: in place of `max_blocks`, as for `create`.
            device: as for `load`. host: as for `create`.

        Raises:
            CheckpointError: as `load`; or the directory is in use, holds links, or cannot be written.
            SchemaError, RegionError: as `create`.
        """
        options = provided("LoadOptions")(
            schema=schema,
            name=name,
            max_steps=max_steps,
            max_trajectories=max_trajectories,
            block_steps=block_steps,
            packed=packed,
            max_blocks=max_blocks,
            payload=payload,
            memory=memory,
            on_full=on_full,
            progress=progress,
            device=device,
            host=host,
        )
        table: Table
        disk = disk if isinstance(disk, Disk) else Disk(disk)
        table, table._engine.disk = provided("recover")(cls, disk, options)
        return table

    # ---------------------------------------------------------------- pinning and closing

    def pin(self, device: torch.device | str | int | None = None, *, wait: bool = True) -> bool:
        """Pin the table's memory in this process, so that a GPU can read it; else the first dataset on a GPU does it.

        It takes about 0.1 s a GB, in a thread. With ``wait=False`` the table can be filled and read meanwhile: datasets
        on a GPU begin with batches that the CPU gathers and copies, and change to the GPU between two batches; the rows
        are the same either way. Draws by priority and batches over `Shards` wait until it is done. Closing the table
        stops it. The logger ``gear_loader`` tells how long it took (level INFO).

        Processes forked from now on have no copy of a private table; see the class.

        Args:
            device: CUDA device that reads the table; by default the current one.
            wait: wait until it is done, with a progress bar if standard error is a terminal and `rich` is installed.

        Returns:
            Whether it is pinned: False while the thread is at work, without a GPU, or if CUDA refuses; a notice gives
            the reason.

        Raises:
            GpuError: no progress for two minutes.
        """
        self._engine.check_open()
        if device is not None:
            check_device(device)
            device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        return self._engine.region.pin(device, wait=wait)

    def close(self) -> None:
        """Detach; idempotent. A private table's memory is freed, a named table stays until `unlink`.

        A table with `disk` writes the rest first, and waits for the disk.

        Raises:
            CheckpointError: the rest could not be written. The table is closed.
        """
        self._engine.close()

    def serve(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        transport: str = "socket",
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
            transport: ``"socket"`` or ``"ucx"``.
            secret: at least 16 bytes; by default random ones.
            allow: what clients may do: ``"write"`` adds trajectories and sets priorities, ``"read"`` fetches rows,
                ``"all"`` both. Statistics are for all of them.
            tls: PEM files of a certificate and of its private key; with the transport ``"socket"`` only.

        Returns:
            The `gear_loader.transport.TableServer`: its `url` and `secret` are what `gear_loader.connect` takes.

        Raises:
            PrivateTableError: the table has no name. TransportError: the server did not start, or invalid arguments.
            HandshakeError: an invalid secret.
        """
        options = {"host": host, "port": port, "transport": transport, "secret": secret, "allow": allow}
        options["tls"] = tls
        return provided("serve")(self, **options)

    def unlink(self) -> None:
        """Remove the table's name: no process can attach any more, but attached processes may continue.

        Raises:
            PrivateTableError: the table has no name.
            RegionError: the name has been removed already. Another table that has it now stays.
        """
        if self.name is None:
            raise PrivateTableError("A private table has no name to remove; close() frees its memory.")
        self._engine.region.unlink()

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
        return _attach, (self.name, self.on_full, self._engine.index.admission.timeout)

    def __repr__(self) -> str:
        return repr(self._engine) if hasattr(self, "_engine") else "<Table, not opened>"

    # ---------------------------------------------------------------- adding

    def add(
        self,
        trajectory: Trajectory,
        *,
        priority: float | None = None,
        final: Mapping[str, Any] | None = None,
        prefix: int | str | None = None,
        prefix_steps: int | None = None,
        prefix_generation: int | None = None,
    ) -> int:
        """Store one trajectory.

        Args:
            trajectory: column name -> numpy array or torch tensor ``[T, *shape]`` of exactly the column's dtype
                (see `Column` for ``cast=True``), with the same T >= 1; ``[*shape]`` of a column per trajectory; of a
                ragged column a list of T values, or a `Ragged`. It may
                be a TensorDict. A nested dict or TensorDict has the columns ``outer.inner``.
            priority: initial priority for prioritized samplers, finite and not negative. By default the largest
                priority that the sampler has seen (initially 1), so that new trajectories are drawn soon.
            final: values after the last step of all columns with ``Column(final=True)``, column name -> ``[*shape]``:
                the observation that follows the last action. Windows read it, but it is never an anchor.
            prefix: index of a trajectory whose first steps this one begins with: `trajectory` has the steps after them.
                Whole blocks of these steps are stored once, for as long as one of the trajectories is there; with
                columns per trajectory all but the first. Columns per group are left out: it has those of that
                trajectory. Needs ``Memory(prefixes=True)``. It is not evicted to make room for this call, and brought
                back into memory if it lies on disk only. The name of a column per trajectory, of a fixed size, such as
                the id of a prompt: it has the columns per group of a trajectory in the table with the same value there,
                and those that it is given with are left out; without such a trajectory it begins a group.
            prefix_steps: how many steps; by default all of that trajectory, without its final step.
            prefix_generation: generation of the index, as batches have it; detects one that was reused.

        Returns:
            Index of the trajectory: valid until its removal or eviction, then reused.

        Raises:
            SchemaError: the trajectory or the priority does not fit, or there are not so many steps of `prefix`.
            StaleIndexError: `prefix` is no index of a live trajectory.
            TableFullError: the table is full and `on_full` is ``"error"``, or the wait for space timed out.
            RateLimitError: the wait for the rate limiter timed out.
            LockTimeoutError: the wait for the lock, or for space held by readers or unfinished writes, timed out.

        After an error nothing was changed, except for evictions before the wait for space timed out.
        """
        engine = self._engine
        index = engine.index
        first = checked_priority(priority)
        if isinstance(prefix, str):
            more = prefix_steps, prefix_generation, final
            return int(self._extend_groups([trajectory], None, priority, prefix, more)[0])
        schema = engine.schema.added
        begins = self._begins(prefix, prefix_steps, prefix_generation)
        priorities = np.array([first], dtype=np.float32)
        if begins is not None:
            return int(begins.store(lambda: self._add_after(begins, trajectory, final, priorities))[0])
        if schema.ragged and final is None:
            steps, finals = listed(schema, [trajectory]), None
        elif final is not None:
            steps, finals = listed(schema, [with_final(schema, trajectory, final)]), _ONE
        else:
            length, addresses, hold = schema.locate_fast(trajectory) or schema.locate(trajectory)
            if length <= engine.longest_inline:
                slot = index.store_one(engine.targets, length, addresses, first, evict=engine.policy[0])
                if slot is not None:
                    return slot
            steps = Steps(np.array([addresses], dtype=np.int64), np.array([length], dtype=np.int64), hold)
            finals = None
        return int(engine.store_steps(steps, priorities, None, finals)[0])

    def _add_after(self, begins: Beginning, trajectory: Any, final: Any, priorities: Array) -> Array:
        schema, finals = self.schema.added, None if final is None else _ONE
        given = trajectory if final is None else with_final(schema, trajectory, final)
        steps = listed(schema, [given], begins.records if final is None else None)
        return self._engine.store_steps(steps, priorities, None, finals, prefixes=begins.located(steps))

    def _begins(self, *prefix: Any) -> Beginning | None:
        given = any(each is not None for each in prefix)
        return Beginning(self._engine, *prefix) if given else None

    def writer(
        self, *, chunk_steps: int | None = None, overlap_steps: int = 0, commit_every_step: bool = False
    ) -> Writer:
        """Create a writer that adds trajectories step by step; see `Writer`.

        Args:
            chunk_steps: steps of each trajectory that the stream is cut into; None for no cuts.
            overlap_steps: common steps of consecutive trajectories.
            commit_every_step: make each step visible at once, in a trajectory, or chunk, that grows; see `Writer`.

        Raises:
            SchemaError: invalid options; ragged columns with `overlap_steps` and without `commit_every_step`.
        """
        if self._engine.device is not None:
            raise self._elsewhere("writer()")
        sink = self._sink(1, chunk_steps, overlap_steps, commit_every_step)
        return Writer(sink, chunk_steps=chunk_steps, overlap_steps=overlap_steps)

    @overload
    def writers(
        self,
        n: int,
        *,
        chunk_steps: int | None = None,
        overlap_steps: int = 0,
        commit_every_step: bool = False,
        device: None = None,
    ) -> VectorWriter: ...

    @overload
    def writers(
        self, n: int, *, chunk_steps: int | None = None, device: str | torch.device
    ) -> DeviceWriter: ...

    def writers(
        self,
        n: int,
        *,
        chunk_steps: int | None = None,
        overlap_steps: int = 0,
        commit_every_step: bool = False,
        device: str | torch.device | None = None,
    ) -> VectorWriter | DeviceWriter:
        """Create a writer for the n environments of a vector environment; see `VectorWriter` and `DeviceWriter`.

        Args:
            n: number of environments, at most the trajectories and the blocks that the table holds.
            chunk_steps, overlap_steps, commit_every_step: as for `writer`.
            device: where the values of all environments are: then the result is a `DeviceWriter`, which goes without
                `overlap_steps` and `commit_every_step`. Pins the table.

        Raises:
            SchemaError: as `writer`, or invalid sizes.
        """
        count, layout = at_least("n", n), self._engine.region.layout
        most = min(layout.max_trajectories, layout.writable_blocks, layout.max_steps)
        chosen = None if device is None else device_of(device)
        has_blocks = self._engine.device is None or self._engine.region.device_memory is not None
        if self._engine.device not in (None, chosen) or not has_blocks:
            raise self._elsewhere(f"writers(device={shown(device)})")
        if count > most:
            raise SchemaError(
                f"n is {count:,}; expected at most {most:,}, as each environment writes into a slot and a block of "
                f"its own and the table holds {layout.max_trajectories:,} trajectories, {layout.writable_blocks:,} "
                f"blocks and {layout.max_steps:,} steps. Create the table larger."
            )
        if device is not None:
            if overlap_steps or commit_every_step:
                raise SchemaError(
                    f"device is {device!r}, with overlap_steps={overlap_steps} and commit_every_step="
                    f"{commit_every_step}; expected neither: the device writer commits whole trajectories."
                )
            check_fixed(self.schema.added, "writers(device=) takes")
            from gear_loader.storage.device_writer import DeviceWriter

            chunk = None if chunk_steps is None else at_least("chunk_steps", chunk_steps)
            make = lambda n: self._sink(n, None, 0, False)  # noqa: E731
            assert chosen is not None
            return DeviceWriter(self._engine, make, count, chunk, chosen)
        sink = self._sink(count, chunk_steps, overlap_steps, commit_every_step)
        return VectorWriter(sink, chunk_steps=chunk_steps, overlap_steps=overlap_steps)

    def _elsewhere(self, call: str) -> SchemaError:
        return SchemaError(
            f"{call} was called of a table whose blocks are in the memory of {self._engine.device}; expected "
            f"writers(n, device='{self._engine.device}'), which writes there, or add() and extend(), which copy whole "
            "trajectories of the host."
        )

    def _sink(
        self, n: int, chunk_steps: int | None, overlap_steps: int, commit_every_step: bool
    ) -> BlockSink:
        """The sink of a writer with these options."""
        self._engine.check_open()
        if overlap_steps and not commit_every_step:
            check_fixed(self.schema.added, "writers with overlap_steps and without commit_every_step take")
        if commit_every_step and self._engine.has_tier:
            check_fixed(
                self.schema.added, "writers with commit_every_step of a table whose disk has a size take"
            )
        late = [name for name in self.schema.late if not self.schema[name].trajectory]
        overlap_steps = at_least("overlap_steps", overlap_steps, least=0)
        flag("commit_every_step", commit_every_step)
        if late and (overlap_steps or commit_every_step):
            raise SchemaError(
                f"The columns {late} have late=True and a value for each step; expected a writer without overlap_steps "
                "and commit_every_step: steps that several trajectories share, or that follow, cannot be filled once."
            )
        return GrowingSink(self._engine, n) if commit_every_step else BlockSink(self._engine, n)

    def extend(
        self,
        trajectories: Iterable[Trajectory] | Trajectory,
        *,
        lengths: Sequence[int] | Array | torch.Tensor | None = None,
        priority: float | Sequence[float] | Array | torch.Tensor | None = None,
        prefix: int | str | Sequence[int] | Array | torch.Tensor | None = None,
        prefix_steps: int | Sequence[int] | Array | torch.Tensor | None = None,
        prefix_generation: int | Sequence[int] | Array | torch.Tensor | None = None,
    ) -> Array:
        """Store many trajectories atomically, taking the lock once to begin and once to commit.

        Args:
            trajectories: iterable of mappings as for `add`; or, with `lengths`, one mapping of stacked arrays
                ``[n, T, *shape]``, where trajectory i is the first ``lengths[i]`` steps of row i (``[n, *shape]`` of
                columns per trajectory; n lists of values of ragged columns). A TensorDict of batch
                size [n, T] needs no `lengths`: its rows are whole trajectories. A list or a tuple is read in place. Any
                other iterable may refill the same arrays: each item is copied before the next one is requested.
            lengths: int [n], with stacked arrays.
            priority: as for `add`; one number, or [n].
            prefix, prefix_steps, prefix_generation: as for `add`; one number for all, or [n], where a prefix of -1 is
                none. With the name of a column those that begin a group are stored before the others of it, and stay if
                these do not fit.

        Returns:
            Indices of the trajectories, int64 [n].

        Raises:
            As `add`; the message names the first trajectory that does not fit. Nothing was changed.
        """
        begin = prefix, prefix_steps, prefix_generation
        if isinstance(prefix, str):
            return self._extend_groups(trajectories, lengths, priority, prefix, begin[1:])
        return self._extend(trajectories, lengths, priority, prefix=begin)

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
        return self._extend(trajectories, lengths, priority, ids=(ids,))

    def _extend_groups(self, trajectories: Any, lengths: Any, priority: Any, name: str, more: Any) -> Array:
        """`extend` with the name of a column as `prefix`; `more`: what it cannot be combined with."""
        if lengths is not None or any(each is not None for each in more):
            raise SchemaError(
                f"prefix is {name!r}, with lengths, prefix_steps, prefix_generation or final; expected a list of "
                "trajectories, and none of these."
            )

        def store(rows: Any, priorities: Any, parents: Array | None, generations: Any) -> Array:
            begin = () if parents is None else (parents, 0, generations)
            return self._extend(rows, None, priorities, prefix=begin)

        engine = self._engine
        engine.check_open()
        if name not in engine.group_columns:
            engine.group_columns[name] = GroupColumn(engine, name)
        column: GroupColumn = engine.group_columns[name]
        return column.store(trajectories, priority, store)

    def _extend(
        self, trajectories: Any, lengths: Any, priority: Any, *, ids: Any = (), prefix: Any = ()
    ) -> Array:
        lengths = rectangular(trajectories) if lengths is None else lengths
        begins = self._begins(*prefix)
        if (
            begins is not None
            and self._engine.has_tier
            and not isinstance(trajectories, (list, tuple, Mapping))
        ):
            trajectories = kept_trajectories(
                trajectories
            )  # they are read again when others have come back from disk
        given = trajectories, lengths, priority, ids, begins
        return self._stored(*given) if begins is None else begins.store(lambda: self._stored(*given))

    def _stored(
        self, trajectories: Any, lengths: Any, priority: Any, ids: Any, begins: Beginning | None
    ) -> Array:
        index, schema = self._engine.index, self.schema.added
        common = None if begins is None else begins.records
        steps = (
            listed(schema, trajectories, common)
            if lengths is None
            else stacked(schema, trajectories, lengths, common)
        )
        count = len(steps.lengths)
        priorities = checked_priorities(priority, count)
        given = check_ids(ids[0], count) if ids else None
        if not count:
            return np.empty(0, dtype=np.int64)
        given = given if given is not None and (given >= 0).any() else None
        prefixes = None if begins is None else begins.located(steps)
        return self._engine.store_steps(steps, priorities, given, index=index, prefixes=prefixes)

    @property
    def seconds_waited(self) -> float:
        """Back-pressure: seconds that additions through this handle have waited for space or the rate limiter.
        `stats()` has the sum over all processes."""
        return self._engine.index.admission.waited / 1e9

    # ---------------------------------------------------------------- versions of the policy

    @property
    def policy_version(self) -> int:
        """Version of the policy, 0 at first, for all processes. Takes no lock."""
        return int(self._engine.index.arrays.counters[POLICY])

    def advance_version(self) -> int:
        """Raise the version of the policy by one, and remove the trajectories that `max_lag` makes too old.

        Returns:
            The version.

        Raises:
            SchemaError: the table was created without `version`.
        """
        version = self._engine.index.admission.advance_version()
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
        """Write write-once columns, ``Column(late=True)``, of trajectories in the table.

        ``table.fill(index, generation=..., reward=rewards)``, or with the rows of a batch
        ``table.fill(batch, advantage=advantage)``. From then on datasets that read the column draw the trajectory, in
        every process. Either all values are written or none; only trajectories on disk are brought back into memory and
        filled piece by piece. Large values are copied without the table's lock. Calls of different processes run one
        after another.

        Args:
            index: index of a trajectory; int [n], indices of several; or a whole batch, which supplies generations too.
            generation: int [n]; detects stale rows, whose index was reused.
            stale: how to treat rows of removed trajectories: ``"ignore"`` skips them, ``"error"`` changes nothing and
                raises.
            columns: for one index values as for `add`: ``[T, *shape]``, or ``[*shape]`` of columns per trajectory. For
                several a list of n arrays ``[T, *shape]``, or ``[n, *shape]`` of columns per trajectory; with a packed
                batch of whole trajectories also one array ``[total, *shape]`` like its columns. A ragged column takes a
                list of T values in place of an array, and a list of total values. Room for them is made as by `add`,
                so trajectories may be evicted, also those that are filled.

        Returns:
            Number of rows that were skipped.

        Raises:
            FilledError: a trajectory has the column already, or is given twice. Nothing was changed.
            SchemaError: a column that is not late, or values that do not fit. Nothing was changed.
            StaleIndexError: with ``stale="error"``: a trajectory was removed. Nothing was changed.
            TableFullError: with a disk tier: timed out waiting for room in memory. What is filled stays. With ragged
                columns: as `add`; nothing is filled.
            LockTimeoutError: timed out waiting for the lock, or as `add` for ragged columns.
        """
        self._engine.check_open()
        return fill_columns(self._engine, index, generation, columns, strict=is_strict(stale))

    def unfilled(self, *columns: str) -> tuple[Array, Array]:
        """The trajectories in which a write-once column is not filled, oldest first.

        Args:
            columns: names of write-once columns; all of them by default.

        Returns:
            Their indices and generations, int64 [n] each, as `fill` takes them.

        Raises:
            SchemaError: a column that is not late.
        """
        return unfilled(self._engine, columns)

    # ---------------------------------------------------------------- columns that change

    def set(
        self,
        index: Any,
        anchor: Any,
        /,
        *,
        generation: Sequence[int] | Array | torch.Tensor | int | None = None,
        mask: Any = None,
        stale: Literal["ignore", "error"] = "ignore",
        **columns: Any,
    ) -> int:
        """Overwrite values of columns with ``Column(mutable=True)``, also in trajectories that are still growing.

        ``table.set(batch["index"], batch["anchor"], generation=batch["generation"], state=states)``.

        Each row is atomic: batches, `gather` and ``table[i]``, in any process, have all columns of a row from before or
        from after the call. Several rows of a call are not atomic together. If rows have a step in common, the last one
        counts. Each row is copied under the table's lock; calls of all processes, and of `fill`, run one after another.
        A log behind the table's memory lets the next process that uses the table complete a row which a killed or
        interrupted process has left half copied. Prefetched batches, and copies on a GPU, keep the values that they
        were gathered with. Trajectories that were cut with an overlap share whole blocks and have copies of other
        common steps; those that were on disk only share none. `save` and a `Disk` write changed trajectories again,
        each as it is at one moment. Trajectories on disk only are brought back into memory.

        Args:
            index: int [n], indices of trajectories, or one.
            anchor: int [n], the first step of each row that is written.
            generation: int [n]; detects stale rows, whose index was reused.
            mask: bool [n, L], steps to write; by default all. Those outside of a trajectory must be left out.
            stale: how to treat rows of removed trajectories: ``"ignore"`` skips them, ``"error"`` changes nothing and
                raises.
            columns: ``[n, L, *shape]``, of the steps ``anchor`` to ``anchor + L - 1``; or ``[n, *shape]``. Waits for a
                GPU that holds them.

        Returns:
            Number of rows that were skipped.

        Raises:
            SchemaError: a column that is not mutable, values that do not fit, or steps outside of a trajectory. Nothing
                was changed.
            FilledError: a write-once column that is not filled. Nothing was changed.
            StaleIndexError: with ``stale="error"``: a trajectory was removed. Nothing was changed.
            RegionError: no room in `/dev/shm` for the log: as many bytes as a row, 512 KiB or more.
            LockTimeoutError: timed out waiting for the lock. Rows may have been written.
            TableFullError: timed out waiting for room in memory for trajectories on disk. Rows may have been written.
        """
        self._engine.check_open()
        return set_columns(self._engine, index, anchor, generation, mask, columns, strict=is_strict(stale))

    # ---------------------------------------------------------------- reading and removing

    # Otherwise Python would iterate over indices from 0 to the first invalid one.
    __iter__: ClassVar[None] = None

    def __len__(self) -> int:
        return self._engine.index.arrays.num_ready()

    @property
    def num_steps(self) -> int:
        """Steps of all live trajectories."""
        return int(self._engine.index.arrays.counters[NUM_STEPS])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A copy of one trajectory: column name -> tensor ``[T, *shape]`` on the CPU; ``[*shape]`` of columns per
        trajectory; a `Ragged` of T values, or a list of text, of ragged columns. Write-once columns that are not filled
        are not in it.

        Writing into the tensors does not change the table. `fill` writes values that follow later, and `set` those of
        mutable columns; for others remove the trajectory and add it anew.

        Raises:
            StaleIndexError: the index has no live trajectory.
        """
        rows = self._engine.rows(index)
        assert rows is not None
        return rows

    def gather(
        self,
        index: Sequence[int] | Array | torch.Tensor,
        anchor: Sequence[int] | Array | torch.Tensor | None = None,
        *,
        windows: Any = None,
        out: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, Any]:
        """Copy rows that the caller chose, as `ReplayDataset` copies rows that it draws.

        A trajectory that is evicted meanwhile is still read whole; one that grows may have more steps in later rows.
        The rows do not count as drawn, and the rate limiter is not asked. Runs on the CPU, with as many threads as
        torch uses, and waits for no GPU.

        Args:
            index: int [n], indices of trajectories, as `add` returns them, in any order, also several times.
            anchor: int [n], the step of each row that its windows are relative to, from 0 to the trajectory's length
                - 1. By default 0.
            windows: as of a `ReplayDataset`: a `Window` or `Whole` for all columns, or a mapping of names to `Window`,
                `Whole` or `NStep`. By default ``Whole()``: whole trajectories, which take no `anchor`.
            out: memory for the windows: name -> contiguous tensor on the CPU of exactly the shape and dtype below, of
                which no two overlap; ``mask`` may be given too, if all windows have the same. By default new memory.

        Returns:
            A `Batch`. For a `Window` ``[n, length, *shape]``, ``[n, *shape]`` with `squeeze` and of columns per
            trajectory; ``mask``, bool ``[n, length]``; for an `NStep` its mapping. For `Whole` all steps one row after
            the other, ``[steps, *shape]``, with ``cu_seqlens``, ``max_seqlen`` and ``position``, as with
            ``layout="packed"``. And ``index``, ``anchor`` and ``generation``, int64 ``[n]``. The tensors of `out`
            are in it.

        Raises:
            StaleIndexError: an index has no live trajectory; the message names them. Nothing was written.
            SchemaError: other windows, shapes, dtypes or memory, an anchor outside its trajectory, or a write-once
                column that a trajectory has no values of. Nothing was written.
            CheckpointError: a trajectory that lies on disk only cannot be read. `out` may have been written in part.

        Example: ``table.gather(table.indices()[-32:], windows=gear.Window(20))`` has the first 20 steps of the newest
        32 trajectories.
        """
        self._engine.check_open()
        batch: dict[str, Any] = provided("gather")(self, index, anchor, windows, out)
        return batch

    def sample(
        self,
        batch_size: int,
        *,
        windows: Any = None,
        seed: int = 0,
        device: str | torch.device = "auto",
    ) -> dict[str, Any]:
        """Draw one batch uniformly: single steps, or trajectories if `windows` have more than one step.

        For priorities, prefetching and everything else make a `gear_loader.ReplayDataset`. The table keeps a dataset
        for each set of options, so calls continue one sequence of draws. Does not wait for the GPU.

        Args:
            batch_size: rows.
            windows: as of a `ReplayDataset`; ``gear_loader.Whole()`` for whole trajectories. By default one step of
                each column.
            seed: of the draws. device: of the batch: ``"auto"``, or a torch device.

        Returns:
            A `Batch`: columns ``[B, *shape]``, or as `windows` say, and what a `ReplayDataset` adds.

        Raises:
            TableEmptyError: there is nothing to draw from. SchemaError: invalid options.
        """
        self._engine.check_open()
        options = {"windows": windows, "seed": seed, "device": device}
        batch: dict[str, Any] = provided("sample")(self, batch_size, options, self._engine.sampled)
        return batch

    def final(self, index: int) -> dict[str, torch.Tensor] | None:
        """A copy of the values after the last step of one trajectory: column name -> ``[*shape]`` on the CPU.

        Returns:
            The columns with ``Column(final=True)``; None if the trajectory was added without `final`.

        Raises:
            StaleIndexError: the index has no live trajectory.
        """
        rows = self._engine.rows(index, final=True)
        if rows is None:
            return None
        return {name: rows[name][-1] for name, column in self.schema.items() if column.final}

    def indices(self) -> Array:
        """Indices of all live trajectories, oldest first, int64 [n]."""
        return self._engine.reader().snapshot().slots.copy()

    def lengths(self) -> Array:
        """Lengths of all live trajectories in steps, oldest first, int64 [n]."""
        return self._engine.reader().snapshot().lengths.copy()

    @property
    def origin(self) -> int | None:
        """Shard number of the table, the lower 16 bits of its new ids; None if not set (0 in ids)."""
        return origin_of(self._engine.index.arrays.view)

    def set_origin(self, shard: int) -> None:
        """Set the shard number permanently and for all processes, before other processes use its ids.

        Args:
            shard: 0 to 65,535, distinct between tables. Repeating it has no effect.

        Raises:
            SchemaError: invalid, the table has another shard number, or two trajectories would have the same id.
                Nothing was changed.
        """
        self._engine.index.set_origin(check_origin(shard))

    def ids(self, slots: Array) -> Array:
        """Global ids of trajectories, ``sequence << 16 | origin`` unless added with an id. Takes no lock.

        Args:
            slots: int64 [n], indices of live trajectories; ids of other slots are undefined.

        Returns:
            int64 [n].
        """
        slots = numbers(slots, "slots", "iu", "integers [n]")
        try:
            return ids_of(self._engine.index.arrays.view, slots.reshape(-1).astype(np.int64, copy=False))
        except IndexError:
            raise StaleIndexError(
                f"slots has {int(slots.max())}; expected indices of live trajectories, as add() returns them."
            ) from None

    def remove(
        self,
        index: int | Sequence[int] | Array,
        *,
        generation: Sequence[int] | Array | torch.Tensor | int | None = None,
        stale: Literal["ignore", "error"] = "error",
    ) -> int:
        """Remove one trajectory, or several atomically.

        Args:
            index: int, or int [n].
            generation: int [n]; detects stale indices, which were reused.
            stale: how to treat indices without a live trajectory: ``"ignore"`` skips them, ``"error"`` changes nothing
                and raises.

        Returns:
            Number of indices that were skipped.

        Raises:
            StaleIndexError: with ``stale="error"``: an index without a live trajectory; or one that was given twice.
                Nothing was changed.
            SchemaError: anything but integers. Nothing was changed.
        """
        slots = numbers(index, "index", "iu", "an integer, or integers [n], as add() returns them")
        slots = slots.reshape(-1).astype(np.int64)
        since = np.full_like(slots, -1)
        if generation is not None:
            since = numbers(generation, "generation", "iu", "integers [n]").reshape(-1).astype(np.int64)
            if since.shape != slots.shape:
                raise SchemaError(
                    f"generation has {len(since)} entries; expected {len(slots)}, as index has."
                )
        return self._engine.index.remove(slots, since, strict=is_strict(stale))

    def clear(self) -> None:
        """Remove all trajectories that are live now, at once. Open writers are not affected.

        Their memory is reused when batches that are reading it have finished. Ids and sequence numbers go on.
        """
        self._engine.index.clear()

    def stats(self) -> TableStats:
        """Counts, bytes and rates; see `TableStats`.

        Logs a hint if more than a quarter of the resident bytes hold no steps and another `block_steps` would save a
        tenth (tables with 1 MiB of steps or more), as `ReplayDataset` does at the start of an epoch. The hint comes
        once for a table over all its processes, once in a process for tables of the same columns and blocks, and on the
        first rank only.
        """
        return self._engine.stats()

    def check_valid(self) -> None:
        """Check the consistency of the index, for tests and after a crash.

        Raises:
            AssertionError: the index is inconsistent; the message says where.
        """
        engine = self._engine
        recovery = engine.index.recovery
        recovery.check_valid()
        recovery.locked(lambda: check_payload(engine.region, engine.index.arrays))

    def update_priority(
        self,
        index: Sequence[int] | Array | torch.Tensor,
        priority: Sequence[float] | Array | torch.Tensor,
        *,
        generation: Sequence[int] | Array | torch.Tensor | None = None,
        stale: Literal["ignore", "error"] = "ignore",
    ) -> int:
        """Set the priorities of trajectories, for all datasets that draw from the table, in any process.

        Datasets that draw by priority use them from their next draw on; for those that draw single steps they are the
        priorities of all steps of the trajectory. Of this and `ReplayDataset.update_priority` the later call counts.
        Eviction by the lowest priority, checkpoints and datasets that are made later use the new priorities too.

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
        return self._engine.revise(updates, strict=is_strict(stale))


_ONE = np.ones(1, dtype=np.int64)


def _place_of_blocks(schema: Mapping[str, Column], device: Any, limits: Any) -> torch.device | None:
    """The GPU in whose memory the blocks of a new table lie; None for host memory.

    Raises:
        SchemaError: it does not exist, or an option that such a table does not take.
    """
    where = None if device is None else device_of(device)
    if where is None or where.type != "cuda":
        return None
    columns = Schema(schema)
    refused = {
        "late columns": (list(columns.late), "nothing is filled in afterwards"),
        "ragged columns": (list(columns.ragged), "their values would lie in host memory"),
        "mutable columns": (list(columns.mutable), "values stay as they were added"),
        "Limits(version=)": (
            getattr(limits, "version", None),
            "the host would read versions of a policy there",
        ),
    }
    for option, (value, why) in refused.items():
        if value:
            raise SchemaError(
                f"{option}: {shown(value)}, with device={shown(device)}; expected none: the blocks of the table are in "
                f"the memory of a GPU, and {why}. Leave it out, or create the table in host memory, which a GPU reads "
                "too."
            )
    return where


def _attach(name: str, on_full: OnFull, timeout: float | None) -> Table:
    return Table.attach(name, on_full=on_full, timeout=timeout)
