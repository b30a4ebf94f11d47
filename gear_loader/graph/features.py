"""Features of nodes: rows of tables by node id, over device cache, host memory, other nodes and disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.distributed.shards import Shards
from gear_loader.errors import SchemaError
from gear_loader.graph.csr import checked_nodes
from gear_loader.graph.feature_copies import FeatureCopies
from gear_loader.graph.feature_placement import checked_probabilities
from gear_loader.graph.shard_rows import Homes, RemoteRows, homes_of, join
from gear_loader.graph.table_rows import DeviceGather, RowIndex, TableRows, unknown_nodes
from gear_loader.storage.ragged import check_fixed
from gear_loader.storage.readers import Ticket
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array
from gear_loader.utils.checks import byte_count
from gear_loader.utils.device_option import device_of
from gear_loader.utils.mutex import new_mutex

_CHUNK_BYTES = 32 << 20  # of rows that `Features.place` copies at a time


@dataclasses.dataclass
class FeatureReads:
    """Rows that were read from each tier.

    Attributes:
        device: of the device cache. replica: of copies in this process's host memory. host: of tables of this machine.
        remote: of other nodes. disk: of trajectories that lay on disk only.
    """

    device: int = 0
    replica: int = 0
    host: int = 0
    remote: int = 0
    disk: int = 0


@dataclasses.dataclass(frozen=True)
class FeatureTiers:
    """What `Features.place` has moved.

    Attributes:
        device_rows, device_bytes: copied into the device cache.
        host_rows, host_bytes: of other nodes or on disk, copied into host memory.
        disk_trajectories: whose priority was set, by which the disk tier keeps trajectories in memory.
    """

    device_rows: int
    device_bytes: int
    host_rows: int
    host_bytes: int
    disk_trajectories: int


class Features:
    """Features of nodes, which are the steps of tables: ``features[ids]`` gathers rows by node id from all tiers.

    Node v is the step number v of all steps that were added, trajectory after trajectory: one trajectory can hold the
    features of all nodes, and every further `Table.add` adds nodes. A trajectory counts with the steps that it has when
    it is first seen. Nodes whose trajectory has been removed are unknown from then on, and the others keep their ids.
    Over `Shards` the nodes are those of all ranks, shard after shard, as they are when all ranks make this.

    Rows are read under a read ticket, without a sampler: no row is torn or of another trajectory. The CPU reads by a
    compiled gather; a GPU reads the table in host memory by the zero-copy kernel. Rows of other nodes come from their
    servers, those that lie on disk only are read from there, and `place` copies what is read most nearer. Several
    threads may read at once, and other processes may add meanwhile.

    Args:
        table: the table, of which each step is a node; or the `Shards` of all ranks.
        columns: name of the column, whose rows ``features[ids]`` returns as a tensor; or several names, or None for
            all, which makes it a dict.
        nodes: int64 [n], node id of each row of this rank's table, at least 0 and distinct; the table's later rows are
            no nodes then. Over shards on all ranks or on none. A node that several ranks have is read from the nearest.
        device: of the returned tensors: "cpu", "auto" or a CUDA device.

    Attributes:
        device: as given. reads: rows that were read from each tier, since `place`.

    Raises:
        SchemaError: not a table, a column that it does not have, has one value per trajectory or is filled later, or
            trajectories that were removed before, so that the ids of the others are not known; invalid nodes or device.
        RankError: over shards, another rank has failed.
    """

    def __init__(
        self,
        table: Table | Shards,
        columns: str | Sequence[str] | None = None,
        *,
        nodes: Any = None,
        device: str | torch.device = "cpu",
    ) -> None:
        if not isinstance(table, (Table, Shards)):
            raise SchemaError(
                f"table is a {type(table).__name__}; expected a gear_loader.Table of this machine, or Shards."
            )
        self.device = device_of(device)
        schema = table.schema if isinstance(table, Table) else table.table.schema
        steps = [name for name in schema.steps if not schema[name].late]
        names = [columns] if isinstance(columns, str) else list(steps if columns is None else columns)
        if not names or not set(names) <= set(steps):
            raise SchemaError(
                f"columns is {columns!r}; expected some of {list(steps)}, the columns of the table's steps."
            )
        check_fixed({name: schema[name] for name in names}, "Features have")
        self.table = table
        self.columns = tuple(names)
        self._single = isinstance(columns, str)
        self._specs = [schema[name] for name in names]
        self.row_bytes = sum(spec.step_bytes for spec in self._specs)
        self._homes: Homes | None = None  # None: of one table, whose numbers are the node ids
        if isinstance(table, Shards):
            self._sources, self._homes = join(table, names, nodes)
        else:
            rows = TableRows(table, names)
            self._sources = [rows]
            if nodes is not None:
                self._homes = _homes_in(rows, nodes)
        self._zero_copy: dict[int, DeviceGather] = {}
        if self.device.type == "cuda":
            for number, source in enumerate(self._sources):
                # Rows on disk are gathered on the CPU, so all rows of such a table are.
                if isinstance(source, RemoteRows) or source.table._engine.has_tier:
                    continue
                if source.table._engine.region.pin(self.device):
                    self._zero_copy[number] = DeviceGather(source, self.device)
        self._mutex = new_mutex()
        # The nearest first; and the rows of each table of this machine, as of them.
        self._caches: tuple[tuple[FeatureCopies, ...], list[RowIndex]] = (), []
        self.reads = FeatureReads()

    @property
    def num_nodes(self) -> int:
        """One more than the largest node id so far; some below it may have been removed."""
        if self._homes is not None:
            return len(self._homes.source)
        source = self._sources[0]
        assert isinstance(source, TableRows)
        return source.look().count

    def __len__(self) -> int:
        return self.num_nodes

    def __repr__(self) -> str:
        shapes = ", ".join(
            f"{name} {list(spec.shape)} {spec.dtype}"
            for name, spec in zip(self.columns, self._specs, strict=True)
        )
        return f"Features({self.num_nodes:,} nodes, {shapes})"

    def __getitem__(self, ids: Any) -> Any:
        """Features of nodes.

        Args:
            ids: integers [n], tensor, array or list; repetitions are allowed. Ids on a GPU are copied to the host.

        Returns:
            Tensor ``[n, *shape]`` on `device`, in new memory, in the order of `ids`; or column name -> such a tensor.
            On a GPU this waits until rows of host memory have been read.

        Raises:
            UnknownNodeError: no table has such a node; the message names them. SchemaError: no integers [n].
            TransportError: another node does not answer. CheckpointError: rows cannot be read from disk.
            GearError: the table is closed.
        """
        self._check_open()
        nodes = checked_nodes("ids", ids.cpu() if isinstance(ids, torch.Tensor) else ids)
        outs = self._empty(len(nodes), self.device)
        if len(nodes):
            self._read(nodes, outs, self._followed())
        return outs[0] if self._single else dict(zip(self.columns, outs, strict=True))

    def place(
        self, probabilities: Any, *, device_bytes: int | str = 0, host_bytes: int | str = 0
    ) -> FeatureTiers:
        """Move rows by how likely they are read; replaces what an earlier call has moved.

        The most read rows are copied into memory of the device. Of the others, those that lie on other nodes or on disk
        are copied into this process's host memory, the most read first. Where a table has a disk tier, each trajectory
        gets the sum of its nodes' probabilities a step as its priority: with ``Disk(keep="priority")`` the table's
        owner moves the most read trajectories into memory, within seconds, and others to disk. So a trajectory should
        be a small part of the nodes there.

        Copies of removed nodes of this machine's tables are not served any more; those of other nodes' are.

        Args:
            probabilities: float [N], N = `num_nodes`: `gear_loader.graph.access_probability`, or numbers of reads. Rows
                with 0 are not copied.
            device_bytes: of rows in the device's memory; int or a text such as ``"2GiB"``. 0 for none.
            host_bytes: of copies in host memory; likewise.

        Returns:
            What was moved. `reads` starts from 0.

        Raises:
            SchemaError: invalid arguments; nothing was changed.
            GearError: rows cannot be read, as for ``features[ids]``; no copies were changed.
        """
        self._check_open()
        rooms = [
            (0 if size == 0 else byte_count(name, size)) // self.row_bytes
            for name, size in (("device_bytes", device_bytes), ("host_bytes", host_bytes))
        ]
        chance = checked_probabilities(probabilities, 1, self.num_nodes)[0]
        seen = [source.look() for source in self._sources if isinstance(source, TableRows)]
        hottest = np.argsort(-chance, kind="stable")
        hottest = hottest[chance[hottest] > 0]
        near, far = self._where(hottest)
        device = hottest[near | far][: rooms[0]]
        rest = hottest[far]
        host = rest[~np.isin(rest, device)][: rooms[1]] if rooms[1] else rest[:0]
        caches = [
            FeatureCopies.on_device(device, self._copied(device, self.device)),
            FeatureCopies.in_table(
                host, dict(zip(self.columns, self._copied(host, torch.device("cpu")), strict=True))
            ),
        ]
        pinned = self._prioritize(chance)  # may fail, for instance when it waits for a table's lock
        with self._mutex:
            self._caches = tuple(cache for cache in caches if cache is not None), seen
            self.reads = FeatureReads()
        bytes_of = (len(device) * self.row_bytes, len(host) * self.row_bytes)
        return FeatureTiers(len(device), bytes_of[0], len(host), bytes_of[1], pinned)

    # ---------------------------------------------------------------- reading

    def _check_open(self) -> None:
        for source in self._sources:
            if isinstance(source, TableRows):
                source.table._engine.check_open()

    def _empty(self, count: int, device: torch.device, *, pinned: bool = False) -> list[torch.Tensor]:
        return [
            torch.empty(count, *spec.shape, dtype=spec.dtype, device=device, pin_memory=pinned)
            for spec in self._specs
        ]

    def _read(self, nodes: Array, outs: Sequence[torch.Tensor], caches: Sequence[FeatureCopies]) -> None:
        """Fill tensors on the device with the rows of nodes (int64 [n])."""
        source = self._sources[0]
        if not caches and self._homes is None and not self._zero_copy and self.device.type == "cpu":
            assert isinstance(source, TableRows)
            disk = source.gather(nodes, nodes, outs)
            self._count(host=len(nodes) - disk, disk=disk)
            return
        left: Array | None = None  # positions of what is still to be read; None: all
        for cache in caches:
            some = nodes if left is None else nodes[left]
            found, rows, missed = cache.divide(some)
            if len(found):
                cache.copy(rows, outs, found if left is None else left[found])
                self._count(**{cache.tier: len(found)})
                left = missed if left is None else left[missed]
        left = np.arange(len(nodes)) if left is None else left
        if len(left):
            self._read_sources(nodes, outs, left)

    def _read_sources(self, nodes: Array, outs: Sequence[torch.Tensor], left: Array) -> None:
        """Fill the rows `left` (int64 [m]) of tensors on the device from the tables."""
        sources, numbers = self._located(nodes[left])
        groups = {int(number): np.flatnonzero(sources == number) for number in np.unique(sources)}
        # On a GPU, what its kernels cannot read goes through host memory.
        through = self.device.type == "cuda" and any(number not in self._zero_copy for number in groups)
        targets = self._empty(len(left), torch.device("cpu"), pinned=True) if through else list(outs)
        into = np.arange(len(left)) if through else left
        pending = []
        for number, which in groups.items():
            source = self._sources[number]
            if isinstance(source, RemoteRows):
                pending.append((source, source.start(numbers[which], nodes[left[which]], into[which])))
                self._count(remote=len(which))
        for number, which in groups.items():
            source = self._sources[number]
            if number in self._zero_copy:
                self._gather_on_device(number, numbers[which], nodes[left[which]], outs, left[which])
            elif isinstance(source, TableRows):
                disk = source.gather(numbers[which], nodes[left[which]], targets, into[which])
                self._count(host=len(which) - disk, disk=disk)
        for source, each in pending:
            source.finish(each, targets)
        if through:
            moved = np.concatenate(
                [which for number, which in groups.items() if number not in self._zero_copy]
            )
            chosen = torch.from_numpy(np.sort(moved))
            rows = torch.from_numpy(left)[chosen].to(self.device)
            for out, target in zip(outs, targets, strict=True):
                out.index_copy_(0, rows, target[chosen].to(self.device))

    def _gather_on_device(
        self, number: int, numbers: Array, nodes: Array, outs: Sequence[torch.Tensor], into: Array
    ) -> None:
        source, ticket = self._zero_copy[number], Ticket()

        def gather() -> None:
            rows = source.rows.begin(ticket)
            slots, steps, missing = rows.locate(numbers)
            if missing:
                raise unknown_nodes(nodes[slots < 0], rows.count)
            source.gather(slots, steps, outs, into)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()  # until then the ticket keeps the rows

        ticket.during(gather)
        self._count(host=len(numbers))

    def _located(self, nodes: Array) -> tuple[Array, Array]:
        """Source of each node, and the number of its row in it.

        Raises:
            UnknownNodeError: a node that no source has.
        """
        if self._homes is None:
            return np.zeros(len(nodes), dtype=np.int32), nodes
        size = len(self._homes.source)
        inside = (nodes >= 0) & (nodes < size)
        sources = np.where(inside, self._homes.source[np.where(inside, nodes, 0)] if size else -1, -1)
        if (sources < 0).any():
            raise unknown_nodes(nodes[sources < 0], int((self._homes.source >= 0).sum()))
        return sources, self._homes.number[nodes]

    def _count(self, **rows: int) -> None:
        with self._mutex:
            for tier, count in rows.items():
                setattr(self.reads, tier, getattr(self.reads, tier) + count)

    # ---------------------------------------------------------------- placing

    def _followed(self) -> tuple[FeatureCopies, ...]:
        """The caches, without nodes that were removed from tables of this machine since they were filled."""
        caches, seen = self._caches
        if not caches:
            return ()
        local = [source for source in self._sources if isinstance(source, TableRows)]
        now = [source.look() for source in local]
        if any(rows is not known for rows, known in zip(now, seen, strict=True)):
            with self._mutex:
                caches = tuple(cache.without(self._gone(cache.nodes)) for cache in self._caches[0])
                self._caches = caches, now
        return caches

    def _gone(self, nodes: Array) -> Array:
        """Which nodes are in no table any more, bool [n]; of those of other nodes this is not known."""
        near, far = self._where(nodes)
        return ~(near | far)

    def _where(self, nodes: Array) -> tuple[Array, Array]:
        """Which nodes lie in memory of this machine, and which on other nodes or on disk; bool [n] each."""
        near, far = np.zeros((2, len(nodes)), dtype=bool)
        if self._homes is None:
            sources, numbers = np.zeros(len(nodes), dtype=np.int32), nodes
        else:
            sources, numbers = self._homes.source[nodes], self._homes.number[nodes]
        for number, source in enumerate(self._sources):
            which = np.flatnonzero(sources == number)
            if isinstance(source, RemoteRows):
                far[which] = True
                continue
            slots, _, _ = source.look().locate(numbers[which])
            far[which] = source.on_disk(numbers[which])
            near[which] = (slots >= 0) & ~far[which]
        return near, far

    def _copied(self, nodes: Array, device: torch.device) -> list[torch.Tensor]:
        """Rows of nodes out of the tables, in new memory."""
        outs = self._empty(len(nodes), device)
        size = max(1, _CHUNK_BYTES // self.row_bytes)
        for first in range(0, len(nodes), size):
            part = slice(first, first + size)
            chunk = self._empty(len(nodes[part]), self.device)
            self._read(nodes[part], chunk, ())
            for out, rows in zip(outs, chunk, strict=True):
                out[part] = rows
        return outs

    def _prioritize(self, chance: Array) -> int:
        """Give trajectories of tables with a disk tier the mean probability of their nodes; return how many."""
        count = 0
        for number, source in enumerate(self._sources):
            if isinstance(source, TableRows) and source.table._engine.has_tier:
                rows = source.look()
                values = np.zeros(rows.count)
                if self._homes is None:
                    values[:] = chance[: rows.count]
                else:
                    nodes = np.flatnonzero(self._homes.source == number)
                    values[self._homes.number[nodes]] = chance[nodes]
                sums = np.concatenate(([0.0], np.cumsum(values)))
                begins = np.concatenate(([0], rows.ends[:-1]))
                means = (sums[rows.ends] - sums[begins]) / np.maximum(rows.ends - begins, 1)
                live = rows.slots >= 0
                source.table.update_priority(
                    rows.slots[live],
                    np.maximum(means[live], 0).astype(np.float32),
                    generation=rows.generations[live],
                )
                count += int(live.sum())
        return count


def _homes_in(rows: TableRows, nodes: Any) -> Homes:
    """Where nodes are in one table."""
    given, count = checked_nodes("nodes", nodes), rows.look().count
    if len(given) > count or (len(given) and given.min() < 0):
        raise SchemaError(
            f"nodes has {len(given):,} ids from {given.min(initial=0)} on; expected one, at least 0, for each of the "
            f"{count:,} rows of the table."
        )
    return homes_of([given], [0])
