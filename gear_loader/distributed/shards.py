"""`Shards`: the sharded table, made of the tables of all ranks."""

from __future__ import annotations

from gear_loader.dataset.options import Ranks
from gear_loader.distributed.shard_origin import ShardOrigin
from gear_loader.distributed.shard_tables import ShardTables


class Shards(ShardTables):
    """The sharded table: a `ReplayDataset` draws from the tables of all ranks as if they were one.

    All ranks make it at the same time, each with its own table; so it is with every dataset over it. Ranks of the same
    node read each other's tables directly. Rows of other nodes come from a server process on that node, which the
    node's first rank starts.

    The others name a rank whose process ends: at once if it is on their machine, else within seconds, or at the
    deadline of `timeout`. They know nothing of one that ends before it makes its first Shards, and name it at the
    deadline.

    Args:
        table: this rank's shard, a table with a name. Where torch.distributed is not initialised, also several tables
            of this process, which are numbered in this order.
        mesh: a `torch.distributed.DeviceMesh` with dimensions ``"data"`` and, if there are stages, ``"pipeline"``. By
            default all ranks of the default process group are data-parallel. Ranks of the same data coordinate hold the
            same trajectories, each the columns of its stage; see `Placement`.
        transport: transport of rows of other nodes: ``"socket"``; ``"ucx"``; ``"nixl"``, which reads the other node's
            memory without its processor, on trusted networks; ``"auto"`` takes ucx where it is installed.
        timeout: seconds after which a missing rank is an error that names it. Requests for rows of other nodes fail
            after a third of it, so that the other ranks do not time out while one waits for rows.
        on_failure: policy for rows of a node whose server does not answer, while its ranks live (one that is lost is
            an error): ``"raise"`` an error, or ``"redraw"`` those rows from this rank's shard, and leave the shards of
            that node out of the next draws until they can be reached again; each case is logged and counted
            (`num_lost`). If no shard can be reached by all ranks, all shards are drawn from, and each rank draws the
            rows that it cannot reach from its own.
        host: address on which this node's server listens; loopback by default.
        node: name that ranks share if they see the same shared memory; detected by default.
        secret: at least 16 bytes, by which servers and ranks authenticate each other; by default the first rank makes
            one, and shares it through torch.distributed.
        servers: node -> address, of servers that were started by hand (``gear-loader serve``); these need `secret`.
        cache: bytes of this rank's host memory for rows of other nodes that are likely to be drawn again, an int or a
            text such as ``"4GiB"``; None for none. The same on all ranks. Batches are the same as without it, because
            the owner of a row, which draws it, tells with every row which version of the trajectory it has drawn; but a
            row that is evicted between its draw and its read, or whose node is out of reach, is delivered if it is
            here, and drawn again without a cache.

    Attributes:
        table: this rank's table.
        own: shard -> table, of the shards whose rows this process draws.
        num_shards, num_slices: numbers of shards and of slices; there are as many slices as data coordinates.
        cache: the budget of `cache`, or None.

    Raises:
        SchemaError: options or tables that do not fit together.
        PrivateTableError: a table without a name, where there is more than one rank.
        RankError: another rank has failed, or did not answer before the deadline; the message names it.
        HandshakeError: a secret of fewer than 16 bytes. TransportError: the server cannot be started.
    """

    def origin(self, ranks: Ranks) -> ShardOrigin:
        """What a `ReplayDataset` draws from."""
        return ShardOrigin(self, ranks)
