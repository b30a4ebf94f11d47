"""`Shards`: the sharded table, made of the tables of all ranks."""

from __future__ import annotations

from gear_loader.dataset.options import Ranks
from gear_loader.distributed.shard_origin import ShardOrigin
from gear_loader.distributed.shard_tables import ShardTables


class Shards(ShardTables):
    """The sharded table: a `ReplayDataset` draws from the tables of all ranks as if they were one.

    All ranks must make it at the same time, each with its own table, and also each dataset over it. Ranks of the same
    node read each other's tables in shared memory. Remote rows, those of other nodes, come from a server process on
    that node, which its first rank starts.

    If the process of a rank ends, all others raise a RankError that names it: at once on the same machine, within
    seconds on others, at the latest after `timeout`. A rank that ends before it has made its first Shards is named
    after `timeout`.

    Args:
        table: this rank's shard, a table with a name. Without torch.distributed also several tables of this process,
            numbered in this order.
        mesh: a `torch.distributed.DeviceMesh` with dimensions ``"data"`` and, if there are stages, ``"pipeline"``. By
            default all ranks of the default process group are data-parallel. Ranks with the same data coordinate hold
            the same trajectories, each the columns of its stage; see `Placement`.
        transport: transport of remote rows: ``"socket"``; ``"ucx"``; ``"nixl"``, whose reads bypass the remote CPU, for
            trusted networks; ``"auto"`` takes ucx if it is installed.
        timeout: seconds after which a missing rank is an error that names it. Requests for remote rows fail after a
            third of it, so that the other ranks do not time out while one waits for rows.
        on_failure: what to do if a node's server does not answer while its ranks live (a lost rank is always an error):
            ``"raise"`` an error, or ``"redraw"`` its rows from this rank's shard and leave the shards of that node out
            of the next draws until they can be reached again; each case is logged and counted (`num_lost`). If no shard
            can be reached by all ranks, all shards are drawn from, and each rank redraws the rows that it cannot reach
            from its own shard.
        host: address on which this node's server listens; loopback by default.
        node: name that ranks share if they see the same shared memory; detected by default.
        secret: at least 16 bytes with which servers and ranks authenticate each other; by default the first rank makes
            one and shares it through torch.distributed.
        servers: node -> address, of servers started by hand (``gear-loader serve``); these need `secret`.
        cache: bytes of this rank's host memory that keep remote rows which are likely to be drawn again, an int or a
            text such as ``"4GiB"``; None for no cache. The same on all ranks. Batches are the same as without a cache,
            because the owner of a row sends the version of its trajectory with each draw. One exception: a row that is
            evicted between its draw and its read, or whose node cannot be reached, is delivered if it is cached, and is
            drawn again otherwise.

    Attributes:
        table: this rank's table.
        own: shard -> table: the shards whose rows this process draws.
        num_shards, num_slices: numbers of shards and of slices of a batch (one for each data coordinate).
        cache: the budget of `cache`, or None.

    Raises:
        SchemaError: options or tables that do not fit together.
        PrivateTableError: a table without a name, where there is more than one rank.
        RankError: another rank has failed, or did not answer before the deadline; the message names it.
        HandshakeError: a secret of fewer than 16 bytes. TransportError: the server cannot be started.
    """

    def origin(self, ranks: Ranks) -> ShardOrigin:
        """The source of draws for a `ReplayDataset`."""
        return ShardOrigin(self, ranks)
