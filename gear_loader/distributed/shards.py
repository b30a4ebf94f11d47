"""`Shards`: the tables of all ranks as one."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist

from gear_loader.distributed.exchange import Exchange, SingleProcess
from gear_loader.distributed.remote import RemoteShard
from gear_loader.distributed.stage_tables import StageTable
from gear_loader.distributed.topology import (
    Member,
    Place,
    agreed,
    check_members,
    described,
    member,
    places_of,
)
from gear_loader.errors import GearError, PrivateTableError, SchemaError, TransportError
from gear_loader.storage.rules import check_seconds
from gear_loader.storage.table import Table
from gear_loader.transport.handshake import check_secret

__all__ = ["LocalShard", "Shards"]

Transport = Literal["auto", "socket", "ucx", "nixl"]
OnFailure = Literal["raise", "redraw"]
_TRANSPORTS = ("auto", "socket", "ucx", "nixl")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_RETRY = 5.0  # seconds after which a shard that could not be reached is tried again
_WATCH = 0.5  # seconds between looks at the server
_logger = logging.getLogger("gear_loader")


class LocalShard:
    """A shard of this node: its region is read as it lies.

    Attributes:
        table: attached, or this rank's own.
    """

    def __init__(self, table: Table) -> None:
        self.table: Table = table


class Shards:
    """The tables of all ranks: what a `ReplayDataset` draws from as if they were one.

    Every rank makes it at the same time, with its own table; so it is with every dataset over it. Ranks of the same
    node read each other's tables directly. Rows of other nodes come from a server process on that node, which its
    first rank starts.

    Args:
        table: this rank's shard, a table with a name. Where torch.distributed is not initialised also several of this
            process, which are numbered in this order.
        mesh: a `torch.distributed.DeviceMesh` with dimensions ``"data"`` and, if there are stages, ``"pipeline"``. By
            default all ranks of the default process group are data-parallel. Ranks of the same data coordinate hold the
            same trajectories, each the columns of its stage; see `Placement`.
        transport: how rows of other nodes come: ``"socket"``; ``"ucx"``; ``"nixl"``, which reads the other node's
            memory without its processor, on networks that are trusted; ``"auto"`` takes ucx where it is installed.
        timeout: seconds after which a rank that does not come is an error that names it; a node's rows are waited for a
            third of that, so that the other ranks still wait for the one that waits.
        on_failure: what happens when a node's rows cannot be had: ``"raise"`` an error, or ``"redraw"`` those rows from
            this rank's shard, and leave the shards of that node out of what is drawn until they can be reached again;
            both is logged and counted (`num_lost`). If no shard can be reached by all ranks, none is left out, and each
            rank draws what it cannot reach from its own.
        host: the address on which this node's server listens: loopback, unless it is told.
        node: a name that ranks have in common if they see the same shared memory; found out by default.
        secret: at least 16 bytes that servers and ranks prove to each other to know; by default made up by the first
            rank, which tells the others through torch.distributed.
        servers: node -> address, of servers that were started by hand (``gear-loader serve``); `secret` is needed then.

    Attributes:
        table: this rank's.
        own: shard -> table, of the shards for whose selection this process answers.
        num_shards, num_slices: how many there are; as many slices as data coordinates.

    Raises:
        SchemaError: options or tables that do not fit together.
        PrivateTableError: a table without a name, where there is more than one rank.
        RankError: another rank has failed, or was waited for too long; it is named.
        HandshakeError: a secret of fewer than 16 bytes. TransportError: the server cannot be started.
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
    ) -> None:
        if transport not in _TRANSPORTS:
            raise SchemaError(f"transport is {transport!r}; expected one of {', '.join(_TRANSPORTS)}.")
        if on_failure not in ("raise", "redraw"):
            raise SchemaError(f"on_failure is {on_failure!r}; expected 'raise' or 'redraw'.")
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
        self._peers: dict[str, Any] = {}
        self._addresses: dict[str, str] = {}
        self._holders: dict[tuple[int, int], StageTable] = {}
        self._guard = threading.Lock()  # around `_holders` and `_writers`
        self._writers: dict[str, Any] = {}
        self._server: Any = None
        self._watch: threading.Thread | None = None
        self._closed = threading.Event()
        self.next_number = 0  # from which `Placement` counts ids
        self._ranks: list[int] | None = None
        self._sources: dict[int, LocalShard | RemoteShard] = {}
        self.transport = _chosen(transport)
        tables = [table] if isinstance(table, Table) else list(table)
        for each in tables:
            _check_table(each)
        if dist.is_available() and dist.is_initialized():
            try:
                self._meet(tables, mesh, node)
            except BaseException:
                if hasattr(self, "exchange"):
                    self.exchange.close()
                raise
        else:
            self._alone(tables, mesh)

    # ---------------------------------------------------------------- one process

    def _alone(self, tables: list[Table], mesh: Any) -> None:
        if mesh is not None or not tables:
            raise SchemaError(
                f"{len(tables)} tables and mesh {mesh!r} were given; without torch.distributed expected one table or "
                "several, and no mesh."
            )
        self.exchange: SingleProcess = SingleProcess()
        self.table: Table = tables[0]
        self.place = Place(0, 0)
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
        self.members: list[Member] = []
        self._sources = {number: LocalShard(each) for number, each in self.own.items()}
        self.remote = False
        self.block_steps = {number: each.region.layout.block_steps for number, each in self.own.items()}

    # ---------------------------------------------------------------- several ranks

    def _meet(self, tables: list[Table], mesh: Any, node: str | None) -> None:
        if len(tables) != 1:
            raise SchemaError(f"{len(tables)} tables were given; expected one on each rank.")
        self._ranks, self.places = places_of(mesh)
        self.exchange = self.new_exchange()
        self.table = tables[0]
        rank = self.exchange.rank
        self.place = self.places[rank]
        self.num_slices = 1 + max(place.data for place in self.places)
        self.num_stages = 1 + max(place.stage for place in self.places)
        self.num_shards = self.num_slices
        told: dict[str, Any] = {}
        try:
            if self.table.name is None and len(self.places) > 1:
                raise PrivateTableError(
                    "This rank's table is private, so that nobody else can read it. Create it with a name of its own, "
                    "Table.create(..., name=f'replay-{rank}')."
                )
            _number(self.table, self.place.data)
            mine = member(
                self.table,
                rank=rank,
                number=self._ranks[rank],
                place=self.place,
                node=node,
                transport=self.transport,
            )
            told = {"member": mine.to_json(), "secret": self._first_secret(rank)}
        except (GearError, OSError) as error:
            self._share({"error": described(error)}, "join", error)
        answers = self._share(told, "join")
        self.members = [Member.from_json(answer["member"]) for answer in answers]
        check_members(self.members)
        self.exchange.compare("Shards", self._options())
        if self._secret is None:
            self._secret = bytes.fromhex(answers[0]["secret"])
        self.leads = [self._rank_at(Place(shard, 0)) for shard in range(self.num_shards)]
        self.own = {self.place.data: self.table} if self.place.stage == 0 else {}
        stage = [
            self.members[self._rank_at(Place(shard, self.place.stage))] for shard in range(self.num_shards)
        ]
        self.block_steps = {shard: each.block_steps for shard, each in enumerate(stage)}
        self._reach(stage)

    def _options(self) -> dict[str, Any]:
        """What all ranks have to agree on."""
        secret = None if self._secret is None else hashlib.sha256(self._secret).hexdigest()[:8]
        return {
            "on_failure": self.on_failure,
            "timeout": self.timeout,
            "transport": self.transport,
            "secret (start of its SHA-256)": secret,
            "servers": self._by_hand,
            "mesh (data, pipeline)": [[place.data, place.stage] for place in self.places],
        }

    def _first_secret(self, rank: int) -> str | None:
        if self._secret is None and rank == 0:
            return secrets.token_hex(32)
        return None

    def _rank_at(self, place: Place) -> int:
        return self.places.index(place)

    def _share(
        self, told: dict[str, Any], what: str, error: BaseException | None = None
    ) -> list[dict[str, Any]]:
        """Tell all ranks, and hear from them; an error on any of them is raised on all."""
        answers: list[dict[str, Any]] = self.exchange.share(told)
        if error is not None:
            raise error
        assert self._ranks is not None
        agreed(answers, self._ranks, what)
        return answers

    def _reach(self, stage: list[Member]) -> None:
        """Attach to the tables of this node, and see that the servers of others run."""
        me = self.members[self.exchange.rank]
        nodes = sorted({each.node for each in self.members})
        self.remote = any(each.node != me.node for each in stage)
        told: dict[str, Any] = {}
        failure: BaseException | None = None
        try:
            if len(nodes) > 1:
                told["address"] = self._serve(me)
            for shard, each in enumerate(stage):
                if each.rank == me.rank:
                    self._sources[shard] = LocalShard(self.table)
                elif each.node == me.node:
                    assert each.table is not None
                    self._sources[shard] = LocalShard(Table.attach(each.table))
        except (GearError, OSError) as error:
            failure, told = error, {"error": described(error)}
        try:
            answers = self._share(told, "reach its node's tables, or start its server", failure)
        except BaseException:
            self.close()
            raise
        addresses = {
            **{m.node: a["address"] for m, a in zip(self.members, answers, strict=True) if a.get("address")}
        }
        addresses.update(self._by_hand)
        self._addresses = addresses
        for shard, each in enumerate(stage):
            if each.node != me.node:
                assert each.table is not None
                self._sources[shard] = RemoteShard(
                    self._peer(each.node),
                    each.table,
                    each.schema,
                    one_sided=self.transport == "nixl",
                )

    # ---------------------------------------------------------------- servers and peers

    def _serve(self, me: Member) -> str | None:
        """Start this node's server, on its first rank; its address."""
        together = [each for each in self.members if each.node == me.node]
        if together[0].rank != me.rank or me.node in self._by_hand:
            return None
        others = {each.machine for each in self.members} - {me.machine}
        if others and self._host in _LOOPBACK:
            raise TransportError(
                f"The server of node {me.node!r} would listen on {self._host}, where other machines cannot reach it. "
                "Give Shards(host=...) the address of this node on the network that is to be used."
            )
        names = [each.table for each in together if each.table is not None]
        self._server = self._start(names)
        self._watch = threading.Thread(
            target=self._look_after, args=(me.node, names), name="gear-loader-server", daemon=True
        )
        self._watch.start()
        return self._address(self._server)

    def _start(self, names: list[str]) -> Any:
        from gear_loader.transport.process import start_server

        assert self._secret is not None
        return start_server(
            names,
            carriers=(self._carrier,),
            host=self._host,
            secret=self._secret,
            one_sided=self.transport == "nixl",
        )

    @property
    def _carrier(self) -> str:
        return "socket" if self.transport == "nixl" else self.transport

    def _address(self, server: Any) -> str:
        address: str = server.addresses[self._carrier]
        return address

    def _look_after(self, node: str, names: list[str]) -> None:
        """Start the server anew when it has died, and leave a note where it is."""
        while not self._closed.wait(_WATCH):
            if self._server.alive():
                continue
            _logger.warning("The server of node %s has ended; it is started again.", node)
            with contextlib.suppress(Exception):  # tried again at the next look
                self._server = self._start(names)
                self.exchange.put(f"server/{node}", self._address(self._server))

    def _peer(self, node: str) -> Any:
        """What a node's rows are asked through."""
        if node not in self._peers:
            self._peers[node] = self._new_peer(node)
        return self._peers[node]

    def _new_peer(self, node: str) -> Any:
        if self.transport != "nixl":
            return self._plain_peer(node)
        from gear_loader.transport.nixl_reader import NixlPeer

        return NixlPeer(
            self._writer(node),
            timeout=self.rows_timeout,
            name=self._called(node),
            loopback=self._host in _LOOPBACK,
        )

    def _called(self, node: str) -> str:
        ranks = [str(each.number) for each in self.members if each.node == node]
        return f"node {node} (rank {', '.join(ranks)})"

    def _plain_peer(self, node: str) -> Any:
        from gear_loader.transport.client import Peer

        def address() -> str:  # where its server is by now
            return self.exchange.get(f"server/{node}") or self._addresses[node]

        assert self._secret is not None
        return Peer(address, secret=self._secret, timeout=self.rows_timeout, name=self._called(node))

    def _writer(self, node: str) -> Any:
        """What trajectories are sent to a node through."""
        if node not in self._writers:
            self._writers[node] = self._plain_peer(node)
        return self._writers[node]

    # ---------------------------------------------------------------- for selections

    def new_exchange(self) -> SingleProcess:
        """An exchange of its own for a dataset; all ranks make it alike."""
        return SingleProcess() if self._ranks is None else Exchange(self._ranks, timeout=self.timeout)

    def source(self, shard: int) -> LocalShard | RemoteShard:
        """Where rows of a shard are read, the columns of this rank's stage."""
        return self._sources[shard]

    def near(self) -> list[int]:
        """Shards whose tables this process reads directly."""
        return [shard for shard, source in self._sources.items() if isinstance(source, LocalShard)]

    def holder(self, shard: int, stage: int) -> StageTable:
        """Who has the columns of a stage of a shard, to write to. Attaches, or connects, when first asked."""
        with self._guard:
            if (shard, stage) not in self._holders:
                self._holders[shard, stage] = self._new_holder(shard, stage)
            return self._holders[shard, stage]

    def _new_holder(self, shard: int, stage: int) -> StageTable:
        if not self.members:
            return StageTable(shard, stage, self.own[shard].schema, table=self.own[shard])
        each = self.members[self._rank_at(Place(shard, stage))]
        me = self.members[self.exchange.rank]
        names: dict[str, Any] = {"node": each.node, "origin": each.origin, "name": each.table or ""}
        if each.node != me.node:
            return StageTable(shard, stage, each.schema, peer=self._writer(each.node), **names)
        source = self._sources[shard] if stage == self.place.stage else None
        table = source.table if source is not None else None
        return StageTable(shard, stage, each.schema, table=table or Table.attach(each.table or ""), **names)

    def pin(self, device: torch.device | None = None) -> bool:
        """Let a GPU (the current one by default) read the tables of this node; whether it can read all of them."""
        tables = [source.table for source in self._sources.values() if source.table is not None]
        pinned = [table.region.pin(device) for table in tables]  # all of them, whatever the first one says
        return all(pinned)

    def lose(self, shard: int, error: TransportError) -> None:
        """Rows of a shard could not be had."""
        if self.on_failure == "redraw" and shard not in self.lost():
            _logger.warning("Shard %d is left out for now: %s", shard, error)
        self._lost[shard] = time.monotonic()

    def lost(self) -> list[int]:
        """Shards that could not be reached, for now."""
        now = time.monotonic()
        return [shard for shard, when in self._lost.items() if now - when < _RETRY]

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        """End this node's server and the connections, and detach from other ranks' tables; not from this rank's own.

        Ranks may close at different times, once no dataset uses the shards any more: so that none takes away what
        others still read, each waits until all have come here, for `timeout` at most (then a warning names who is
        missing), and not for ranks that have died, nor if it has failed itself: while an exception is handled, or after
        a `RankError`. Idempotent.
        """
        if not self._closed.is_set():
            self.exchange.part(wait=sys.exc_info()[0] is None)
        self._closed.set()
        if self._watch is not None:
            self._watch.join()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        if self._server is not None:
            self._server.stop()
        for writer in self._writers.values():
            writer.close()
        for (_, stage), holder in self._holders.items():
            if holder.table is not None and stage != self.place.stage:
                holder.table.close()
        for source in self._sources.values():
            if (
                isinstance(source, LocalShard)
                and source.table is not self.table
                and source.table not in self.own.values()
            ):
                source.table.close()
        self.exchange.close()

    def __enter__(self) -> Shards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.exchange.part(wait=False)
            self._closed.set()
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


def _check_table(table: Any) -> None:
    if not isinstance(table, Table):
        raise SchemaError(
            f"A {type(table).__name__} was given; expected a gear_loader.Table, this rank's shard."
        )
    rules = table.rules
    if rules.rate_limiter is not None or rules.max_times_sampled is not None:
        raise SchemaError(
            f"The table {table.name or '(private)'} has a rate limiter or max_times_sampled, which know nothing of "
            "what other ranks draw. Create the tables of Shards without."
        )


def _number(table: Table, shard: int) -> None:
    """Give a table its shard number, unless it has one."""
    if table.origin is None:
        table.set_origin(shard)
