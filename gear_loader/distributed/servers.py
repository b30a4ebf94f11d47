"""This node's server process, and the connections to the servers of other nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from gear_loader.distributed.rank_exchange import Exchange
from gear_loader.distributed.topology import Member
from gear_loader.errors import TransportError
from gear_loader.utils.background import background_thread
from gear_loader.utils.mutex import Event

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_WATCH = 0.5  # seconds between two checks of the server process
_logger = logging.getLogger("gear_loader")


@dataclasses.dataclass(repr=False)
class NodeServers:
    """Starts and watches this node's server, on the node's first rank, and connects to the servers of other nodes.

    Args:
        exchange: channel whose notes hold the current addresses of servers.
        transport: ``"socket"``, ``"ucx"`` or ``"nixl"``.
        host: address on which this node's server listens.
        secret: shared secret of servers and ranks.
        timeout: seconds after which a request fails.
        start_timeout: seconds until a server that this process starts must be ready, if they are more than
            `start_server` allows.
        addresses: node -> address; at first of servers that were started by hand.

    Attributes:
        process: this node's server, if this process has started it.
    """

    members: Sequence[Member]
    me: Member
    exchange: Exchange
    _: dataclasses.KW_ONLY
    transport: str
    host: str
    secret: bytes
    timeout: float
    start_timeout: float
    addresses: Mapping[str, str]
    process: Any = None

    def __post_init__(self) -> None:
        self._by_hand = dict(self.addresses)
        self._peers: dict[str, Any] = {}
        self._writers: dict[str, Any] = {}
        self._watch: threading.Thread | None = None
        self._closed = Event()

    # ---------------------------------------------------------------- this node's server

    def serve(self) -> str | None:
        """Start this node's server if this is the node's first rank; return its address.

        Raises:
            TransportError: other machines cannot reach the address.
        """
        node = self.me.node
        members = [each for each in self.members if each.node == node]
        if members[0].rank != self.me.rank or node in self._by_hand:
            return None
        other_machines = {each.machine for each in self.members} - {self.me.machine}
        if other_machines and self.host in _LOOPBACK:
            raise TransportError(
                f"The server of node {node!r} would listen on {self.host}, where other machines cannot reach it. "
                "Give Shards(host=...) the address of this node on the network that is to be used."
            )
        names = [each.table for each in members if each.table is not None]
        self.process = self._start(names)
        self._watch = background_thread(
            self._restart, "gear-loader-server", args=(node, names), stop=self._closed.set
        )
        self._watch.start()
        return self.address

    def _start(self, names: list[str]) -> Any:
        from gear_loader.transport.process import START_TIMEOUT, start_server

        return start_server(
            names,
            timeout=max(START_TIMEOUT, self.start_timeout),
            carriers=(self._carrier,),
            host=self.host,
            secret=self.secret,
            one_sided=self.transport == "nixl",
        )

    @property
    def _carrier(self) -> str:
        return "socket" if self.transport == "nixl" else self.transport

    @property
    def address(self) -> str:
        """Address of this node's server; it changes when the server is restarted."""
        address: str = self.process.addresses[self._carrier]
        return address

    def _restart(self, node: str, names: list[str]) -> None:
        """Restart the server whenever it has ended, and publish its new address; runs in a thread."""
        while not self._closed.wait(_WATCH):
            if self.process.alive():
                continue
            _logger.warning("The server of node %s has ended; it is started again.", node)
            with contextlib.suppress(Exception):  # tried again at the next check
                self.process = self._start(names)
                self.exchange.put(f"server/{node}", self.address)

    # ---------------------------------------------------------------- connections

    def set_addresses(self, addresses: Mapping[str, str]) -> None:
        """Set the addresses of the servers that ranks have started; servers started by hand keep theirs."""
        self.addresses = {**addresses, **self._by_hand}

    def peer(self, node: str) -> Any:
        """Return the connection over which a node's rows are requested."""
        if node not in self._peers:
            self._peers[node] = self._new_peer(node)
        return self._peers[node]

    def _new_peer(self, node: str) -> Any:
        from gear_loader.transport.channel import TRANSPORTS, load

        reader = TRANSPORTS[self.transport].reader
        if not reader:
            return self._message_peer(node)
        return load(reader)(
            self.writer(node),
            timeout=self.timeout,
            name=self._description(node),
            loopback=self.host in _LOOPBACK,
        )

    def writer(self, node: str) -> Any:
        """Return the connection over which trajectories are sent to a node."""
        if node not in self._writers:
            self._writers[node] = self._message_peer(node)
        return self._writers[node]

    def _message_peer(self, node: str) -> Any:
        from gear_loader.transport.client import Peer

        def address() -> str:  # the current one: a restarted server has another address
            return self.exchange.get(f"server/{node}") or self.addresses[node]

        return Peer(address, secret=self.secret, timeout=self.timeout, name=self._description(node))

    def _description(self, node: str) -> str:
        """Return a node's name and ranks, for errors."""
        ranks = [str(each.number) for each in self.members if each.node == node]
        return f"node {node} (rank {', '.join(ranks)})"

    def close(self) -> None:
        """End the server and the connections. Idempotent."""
        self._closed.set()
        if self._watch is not None:
            self._watch.join()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        if self.process is not None:
            self.process.stop()
        for writer in self._writers.values():
            writer.close()
