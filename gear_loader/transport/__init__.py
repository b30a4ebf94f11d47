"""Windows of tables on other nodes: a request-reply protocol over TCP sockets, UCX or one-sided NIXL reads.

A server, and a client on another node::

    with start_server(["replay-0"], secret=secret) as server:                      # on the node of the table
        ...
    peer = Peer("socket://10.0.0.2:5555", secret=secret, timeout=30.0, name="node b")   # on another
    status = peer.fetch(spec, slots, anchors, generations, out=out).result()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gear_loader.utils.lazy import loader

if TYPE_CHECKING:
    from gear_loader.transport.channel import Address, Carrier, Channel, Listener, carrier
    from gear_loader.transport.client import Peer
    from gear_loader.transport.process import ServerProcess, start_server
    from gear_loader.transport.remote_shards import RemoteShards
    from gear_loader.transport.server import Server
    from gear_loader.transport.spec import PackedSpec, Piece, ValueSpec, WindowSpec
    from gear_loader.transport.table_server import TableServer
    from gear_loader.transport.wire import Limits

__all__ = [
    "Address",
    "Carrier",
    "Channel",
    "Limits",
    "Listener",
    "PackedSpec",
    "Peer",
    "Piece",
    "RemoteShards",
    "Server",
    "ServerProcess",
    "TableServer",
    "ValueSpec",
    "WindowSpec",
    "carrier",
    "start_server",
]

# Loaded on first use: clients need neither the server nor the compiled loops.
_MODULES = {
    "Address": "channel",
    "Carrier": "channel",
    "Channel": "channel",
    "Limits": "wire",
    "Listener": "channel",
    "PackedSpec": "spec",
    "Peer": "client",
    "Piece": "spec",
    "RemoteShards": "remote_shards",
    "Server": "server",
    "ServerProcess": "process",
    "TableServer": "table_server",
    "ValueSpec": "spec",
    "WindowSpec": "spec",
    "carrier": "channel",
    "start_server": "process",
}

__getattr__ = loader(__name__, _MODULES)
