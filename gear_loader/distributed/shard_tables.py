"""The tables of all ranks as one: where each is, and how its rows are reached."""

from __future__ import annotations

import hashlib
import logging
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from gear_loader.distributed.failures import run_on_all
from gear_loader.distributed.rank_exchange import Exchange, SingleProcess
from gear_loader.distributed.remote import RemoteShard
from gear_loader.distributed.row_cache import CacheBudget, CacheStats
from gear_loader.distributed.servers import NodeServers
from gear_loader.distributed.stage_names import StageNames
from gear_loader.distributed.stage_tables import StageTable
from gear_loader.distributed.topology import (
    Member,
    MeshCoordinates,
    check_members,
    places_of,
    this_machine,
    this_node,
)
from gear_loader.errors import PrivateTableError, SchemaError, TransportError
from gear_loader.storage.table import Table
from gear_loader.storage.table_rules import check_seconds
from gear_loader.transport.handshake import check_secret
from gear_loader.utils.arrays import Array, shown
from gear_loader.utils.checks import byte_count, one_of

_Shards = TypeVar("_Shards", bound="ShardTables")
Transport = Literal["auto", "socket", "ucx", "nixl"]
OnFailure = Literal["raise", "redraw"]
_TRANSPORTS = ("auto", "socket", "ucx", "nixl")
_RETRY = 5.0  # seconds after which an unreachable shard is tried again
_logger = logging.getLogger("gear_loader")


class ShardTables:
    """The tables of all ranks as one; see `gear_loader.distributed.Shards`, which is made of it.

    Attributes:
        table, own, num_shards, num_slices, cache: as of `Shards`.
        nodes: int64 [S], a number for the node of each shard; of each slice, too, where there are several.
    """

    def __init__(
        self,
        table: Table | Sequence[Table],
        *,
        mesh: Any = None,
        transport: Transport = "auto",
        timeout: float = 60.0,
        on_failure: OnFailure = "raise",
        host: str = "127.0.0.1",
        node: str | None = None,
        secret: bytes | None = None,
        servers: Mapping[str, str] | None = None,
        cache: int | str | None = None,
    ) -> None:
        if dist.is_available() and dist.is_initialized():
            Exchange.announce()  # before anything else: the others cannot know of a process that ends before
        self.cache = None if cache is None else CacheBudget(byte_count("cache", cache))
        one_of("transport", transport, _TRANSPORTS)
        one_of("on_failure", on_failure, ("raise", "redraw"))
        for name, value in (("host", host), ("node", node)):
            if not isinstance(value, str) and not (name == "node" and value is None):
                raise SchemaError(f"{name} is {shown(value)}; expected a name, as a string.")
        if servers is not None and not isinstance(servers, Mapping):
            raise SchemaError(f"servers is {shown(servers)}; expected a mapping of node names to addresses.")
        self.timeout = check_seconds("timeout", timeout)
        self.rows_timeout = self.timeout / 3
        self.on_failure: OnFailure = on_failure
        if secret is not None:
            check_secret(secret)
        if servers and secret is None:
            raise SchemaError("servers were given without their secret; give secret as well.")
        self._host = host
        self._secret = secret
        self._by_hand = dict(servers or {})
        self._lost: dict[int, float] = {}
        self._stage_tables: dict[tuple[int, int], StageTable] = {}
        self.names = StageNames()
        self._guard = threading.Lock()  # around `_stage_tables`
        self._servers: NodeServers | None = None
        self._closed = False
        self.datasets: weakref.WeakSet[Any] = weakref.WeakSet()  # that draw from these shards
        self.next_number = 0  # next number of the ids that `Placement` makes
        self._ranks: list[int] | None = None
        self._sources: dict[int, Table | RemoteShard] = {}
        self.transport = _chosen(transport)
        if not isinstance(table, (Table, Sequence)) or isinstance(table, str):
            raise SchemaError(f"{shown(table)} was given; expected a gear_loader.Table, or a list of them.")
        tables = [table] if isinstance(table, Table) else list(table)
        for each in tables:
            _check_table(each, self.transport)
        if dist.is_available() and dist.is_initialized():
            try:
                self._join(tables, mesh, node)
            except BaseException:
                if hasattr(self, "exchange"):
                    self.exchange.close()
                raise
        else:
            self._use_own(tables, mesh)

    # ---------------------------------------------------------------- one process

    def _use_own(self, tables: list[Table], mesh: Any) -> None:
        """Use tables of this process alone."""
        if mesh is not None or not tables:
            raise SchemaError(
                f"{len(tables)} tables and mesh {shown(mesh)} were given; without torch.distributed expected one "
                "table or several, and no mesh."
            )
        self.exchange: SingleProcess = SingleProcess()
        self.table: Table = tables[0]
        self.place = MeshCoordinates(0, 0)
        self.num_slices, self.num_stages = 1, 1
        self.num_shards = len(tables)
        for number, each in enumerate(tables):
            if each.schema != tables[0].schema:
                raise SchemaError(
                    f"Table {number} has the columns {dict(each.schema)}; expected those of table 0, "
                    f"{dict(tables[0].schema)}."
                )
            _number(each, number)
        self.own: dict[int, Table] = dict(enumerate(tables))
        self.leads = [0] * len(tables)
        self.places = [self.place]
        self.nodes: Array = np.zeros(len(tables), dtype=np.int64)
        self.members: list[Member] = []
        self._sources = dict(self.own)
        self.remote = False
        self.block_steps = {
            number: each._engine.region.layout.block_steps for number, each in self.own.items()
        }

    # ---------------------------------------------------------------- several ranks

    def _join(self, tables: list[Table], mesh: Any, node: str | None) -> None:
        """Share this rank's table with all ranks, and connect to theirs."""
        if len(tables) != 1:
            raise SchemaError(f"{len(tables)} tables were given; expected one on each rank.")
        self._ranks, self.places = places_of(mesh)
        self._node = this_node() if node is None else node
        self.exchange = self.new_exchange()
        self.table = tables[0]
        rank = self.exchange.rank
        self.place = self.places[rank]
        self.num_slices = 1 + max(place.data for place in self.places)
        self.num_stages = 1 + max(place.stage for place in self.places)
        self.num_shards = self.num_slices
        answers = run_on_all("join", self._introduce, self.exchange.share, self._ranks)
        self.members = [Member.from_json(answer["member"]) for answer in answers]
        check_members(self.members)
        self.exchange.compare("Shards", self._options())
        if self._secret is None:
            self._secret = bytes.fromhex(answers[0]["secret"])
        self.leads = [self._rank_at(MeshCoordinates(shard, 0)) for shard in range(self.num_shards)]
        names = [self.members[rank].node for rank in self.leads]
        self.nodes = np.array([names.index(name) for name in names], dtype=np.int64)
        self.own = {self.place.data: self.table} if self.place.stage == 0 else {}
        stage = [
            self.members[self._rank_at(MeshCoordinates(shard, self.place.stage))]
            for shard in range(self.num_shards)
        ]
        self.block_steps = {shard: each.block_steps for shard, each in enumerate(stage)}
        self._connect(stage)

    def _introduce(self) -> dict[str, Any]:
        """Return this rank's description, and on rank 0 the secret, for the other ranks."""
        assert self._ranks is not None
        rank = self.exchange.rank
        if self.table.name is None and len(self.places) > 1:
            raise PrivateTableError(
                "This rank's table is private, so that other processes cannot read it. Create it with a name of its "
                f"own, Table.create(..., name=f'replay-{rank}')."
            )
        schema = self.table.schema
        if self.num_stages > 1 and (schema.late or self.table.rules.max_lag is not None):
            raise SchemaError(
                f"The table {self.table.name!r} has late columns or max_lag, and there are {self.num_stages} pipeline "
                "stages; expected one stage: the others would not know which trajectories may be drawn."
            )
        if self.num_stages > 1 and schema.videos:
            raise SchemaError(
                f"The columns {list(schema.videos)} of the table {self.table.name!r} have codec='video', and there are "
                f"{self.num_stages} pipeline stages; expected one stage, or a codec of images, such as 'jpeg'."
            )
        _number(self.table, self.place.data)
        me = Member(
            rank,
            self._ranks[rank],
            self.place,
            self._node,
            this_machine(),
            self.table.name,
            self.table.origin,
            self.table.schema.to_json(),
            self.table._engine.region.layout.block_steps,
            self.transport,
        )
        secret = secrets.token_hex(32) if self._secret is None and rank == 0 else None
        return {"member": me.to_json(), "secret": secret}

    def _options(self) -> dict[str, Any]:
        """Return the options that must be the same on all ranks."""
        secret = None if self._secret is None else hashlib.sha256(self._secret).hexdigest()[:8]
        return {
            "on_failure": self.on_failure,
            "timeout": self.timeout,
            "cache": None if self.cache is None else self.cache.total,
            "transport": self.transport,
            "secret (start of its SHA-256)": secret,
            "servers": self._by_hand,
            "mesh (data, pipeline)": [[place.data, place.stage] for place in self.places],
        }

    def _rank_at(self, place: MeshCoordinates) -> int:
        return self.places.index(place)

    def _connect(self, stage: list[Member]) -> None:
        """Attach to the tables of this node, start its server, and connect to the servers of other nodes.

        Args:
            stage: the ranks of this rank's pipeline stage, by shard.
        """
        assert self._ranks is not None
        assert self._secret is not None
        assert isinstance(self.exchange, Exchange)
        me = self.members[self.exchange.rank]
        nodes = {each.node for each in self.members}
        self.remote = any(each.node != me.node for each in stage)
        servers = self._servers = NodeServers(
            self.members,
            me,
            self.exchange,
            transport=self.transport,
            host=self._host,
            secret=self._secret,
            timeout=self.rows_timeout,
            start_timeout=self.timeout,
            addresses=self._by_hand,
        )

        def attach() -> dict[str, Any]:
            address = servers.serve() if len(nodes) > 1 else None
            for shard, each in enumerate(stage):
                if each.rank == me.rank:
                    self._sources[shard] = self.table
                elif each.node == me.node:
                    assert each.table is not None
                    self._sources[shard] = Table.attach(each.table)
            return {"address": address}

        try:
            answers = run_on_all(
                "reach its node's tables, or start its server", attach, self.exchange.share, self._ranks
            )
        except BaseException:
            self.close()
            raise
        servers.set_addresses(
            {m.node: a["address"] for m, a in zip(self.members, answers, strict=True) if a["address"]}
        )
        for shard, each in enumerate(stage):
            if each.node != me.node:
                assert each.table is not None
                self._sources[shard] = RemoteShard(
                    servers.peer(each.node),
                    each.table,
                    each.schema,
                    one_sided=self.transport == "nixl",
                    asked=servers.writer(each.node),
                )

    @property
    def mutable(self) -> list[str]:
        """Names of the mutable columns of the tables of all stages."""
        schemas = [self.table.schema, *(each.schema for each in self.members)]
        return list(dict.fromkeys(name for schema in schemas for name in schema.mutable))

    # ---------------------------------------------------------------- for selections

    def new_exchange(self) -> SingleProcess:
        """Make a collective channel for a dataset; all ranks call it at the same time."""
        if self._ranks is None:
            return SingleProcess()
        return Exchange(self._ranks, timeout=self.timeout, node=self._node)

    def source(self, shard: int) -> Table | RemoteShard:
        """Return the source of a shard's rows, with the columns of this rank's stage: a table of this node is read in
        place."""
        return self._sources[shard]

    def local_shards(self) -> list[int]:
        """Return the shards whose tables this process reads directly."""
        return [shard for shard, source in self._sources.items() if isinstance(source, Table)]

    def stage_table(self, shard: int, stage: int) -> StageTable:
        """Return the table with the columns of a stage of a shard, for writing; attaches or connects on first use."""
        with self._guard:
            if (shard, stage) not in self._stage_tables:
                self._stage_tables[shard, stage] = self._new_stage_table(shard, stage)
            return self._stage_tables[shard, stage]

    def _new_stage_table(self, shard: int, stage: int) -> StageTable:
        if not self.members:
            return StageTable(shard, stage, self.own[shard].schema, table=self.own[shard])
        each = self.members[self._rank_at(MeshCoordinates(shard, stage))]
        me = self.members[self.exchange.rank]
        names: dict[str, Any] = {"node": each.node, "origin": each.origin, "name": each.table or ""}
        if each.node != me.node:
            assert self._servers is not None
            return StageTable(shard, stage, each.schema, peer=self._servers.writer(each.node), **names)
        source = self._sources[shard] if stage == self.place.stage else None
        table = source if isinstance(source, Table) else None
        return StageTable(shard, stage, each.schema, table=table or Table.attach(each.table or ""), **names)

    def pin(self, device: torch.device | None = None) -> bool:
        """Pin the tables of this node for a GPU, by default the current one; return whether all could be pinned."""
        tables = [source for source in self._sources.values() if isinstance(source, Table)]
        # All of them, also if the first one cannot be pinned.
        pinned = [table._engine.region.pin(device) for table in tables]
        return all(pinned)

    def cache_stats(self) -> CacheStats:
        """Return bytes, rows, hits and misses of this rank's cache.

        Raises:
            SchemaError: these shards have none.
        """
        if self.cache is None:
            raise SchemaError("These shards have no cache; make them with Shards(cache='4GiB').")
        return self.cache.stats()

    def mark_lost(self, shard: int, error: TransportError) -> None:
        """Mark a shard as unreachable for some seconds, because a request has failed with an error."""
        if self.on_failure == "redraw" and shard not in self.lost():
            _logger.warning("Shard %d is left out for now: %s", shard, error)
        self._lost[shard] = time.monotonic()

    def lost(self) -> list[int]:
        """Return the shards that are unreachable at present."""
        now = time.monotonic()
        return [shard for shard, when in self._lost.items() if now - when < _RETRY]

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        """End this node's server and the connections, and detach from other ranks' tables; this rank's stays open.

        Datasets over these shards are closed before (unless an exception is handled). Ranks may close at different
        times. So that no rank ends while others still read its rows, each waits until all have called this, for
        `timeout` at most (then a warning names the missing ranks). It does not wait for ranks that have died, nor after
        a failure of its own: while an exception is handled, or after a `RankError`. Idempotent.
        """
        if not self._closed:
            wait = sys.exc_info()[0] is None
            for dataset in list(self.datasets) if wait else ():
                dataset.close()  # it finishes what has been requested, as on the other ranks
            self.exchange.leave(wait=wait)
        self._closed = True
        if self._servers is not None:
            self._servers.close()
        for (_, stage), stage_table in self._stage_tables.items():
            if stage_table.table is not None and stage != self.place.stage:
                stage_table.table.close()
        for source in self._sources.values():
            if isinstance(source, Table) and source is not self.table and source not in self.own.values():
                source.close()
        self.exchange.close()

    def __enter__(self: _Shards) -> _Shards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.exchange.leave(wait=False)
            self._closed = True
        self.close()

    def __reduce__(self) -> Any:
        raise SchemaError(
            "Shards cannot be sent to another process; every rank makes its own. With a DataLoader use num_workers=0: "
            "batches are prefetched in the background anyway."
        )

    def __repr__(self) -> str:
        return f"<Shards: {self.num_shards} shards, slice {self.place.data} of {self.num_slices}, own {self.table!r}>"


def _chosen(transport: Transport) -> str:
    if transport != "auto":
        return transport
    from importlib.util import find_spec

    return "ucx" if find_spec("ucxx") is not None or find_spec("ucp") is not None else "socket"


def _check_table(table: Any, transport: str) -> None:
    if not isinstance(table, Table):
        raise SchemaError(
            f"A {type(table).__name__} was given; expected a gear_loader.Table, this rank's shard."
        )
    if table._engine.device is not None:
        raise SchemaError(
            f"{table!r} was given; expected a table in host memory, of which other nodes read rows: create it without "
            "device=."
        )
    rules = table.rules
    if rules.rate_limiter is not None or rules.max_times_sampled is not None:
        raise SchemaError(
            f"The table {table.name or '(private)'} has a rate limiter or max_times_sampled, which do not count "
            "the draws of other ranks. Create the tables of Shards without them."
        )
    if table.schema.mutable and transport == "nixl":
        raise SchemaError(
            f"The table {table.name or '(private)'} has the columns {list(table.schema.mutable)} with mutable=True, "
            "with transport='nixl', which would read values that are being overwritten. Use transport='socket' or "
            "'ucx'."
        )
    if table._engine.has_tier and transport == "nixl":
        raise SchemaError(
            f"The table {table.name or '(private)'} has a disk tier (Disk(size=)), with transport='nixl', which reads "
            "only the memory of other nodes. Use transport='socket' or 'ucx', whose servers read their disks."
        )


def _number(table: Table, shard: int) -> None:
    """Set a table's shard number, unless it has one."""
    if table.origin is None:
        table.set_origin(shard)
