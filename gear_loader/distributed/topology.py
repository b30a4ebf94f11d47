"""The ranks: their nodes, and their places in the mesh of data parallelism and pipeline stages."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from gear_loader.errors import SchemaError
from gear_loader.storage import shared_memory as names
from gear_loader.storage.schema import Schema

DATA = ("data", "dp")
PIPELINE = ("pipeline", "pp")


@dataclasses.dataclass(frozen=True)
class MeshCoordinates:
    """A rank's coordinates in the mesh.

    Attributes:
        data: data coordinate: the number of the rank's slice of each batch, and of its shard.
        stage: number of its pipeline stage.
    """

    data: int
    stage: int


def places_of(mesh: Any) -> tuple[list[int], list[MeshCoordinates]]:
    """Return the ranks of a mesh, numbered as in the default process group, in the mesh's order, and their places.

    Args:
        mesh: a `torch.distributed.DeviceMesh` with dimensions called ``"data"`` (or ``"dp"``) and ``"pipeline"`` (or
            ``"pp"``), or with one dimension without a name; None: all ranks are data-parallel.

    Raises:
        SchemaError: a mesh with other dimensions, or one without this rank.
    """
    if mesh is None:
        ranks = list(range(dist.get_world_size()))
        return ranks, [MeshCoordinates(rank, 0) for rank in ranks]
    tensor = getattr(mesh, "mesh", None)
    if tensor is None:
        raise SchemaError(f"mesh is {mesh!r}; expected a torch.distributed.DeviceMesh.")
    names = mesh.mesh_dim_names or (("data",) if tensor.ndim == 1 else ())
    known = [0 if name in DATA else 1 if name in PIPELINE else -1 for name in names]
    if len(known) != tensor.ndim or -1 in known or len(set(known)) != len(known):
        raise SchemaError(
            f"mesh has the dimensions {list(names) or tensor.ndim}; expected mesh_dim_names out of 'data' (or 'dp') "
            "and 'pipeline' (or 'pp'), each once. Give the sub-mesh of these, mesh['data', 'pipeline']."
        )
    ranks = [int(rank) for rank in tensor.flatten().tolist()]
    if dist.get_rank() not in ranks:
        raise SchemaError(f"Rank {dist.get_rank()} is not in the mesh, which has the ranks {ranks}.")
    places = []
    for number in range(len(ranks)):
        at = [0, 0]
        for kind, size in reversed(list(zip(known, tensor.shape, strict=True))):
            number, at[kind] = divmod(number, size)
        places.append(MeshCoordinates(*at))
    return ranks, places


@dataclasses.dataclass(frozen=True)
class Member:
    """The description of a rank, shared with all ranks.

    Attributes:
        rank: its number in the exchange.
        number: its number in the default process group.
        place: its coordinates in the mesh.
        node: name of its node; ranks of the same node attach each other's tables.
        machine: name of its machine; processes of the same machine reach each other's loopback.
        table: name of its table, None for a private one.
        origin: shard number in the table's ids, None before one is set.
        columns: columns of its table, as JSON.
        block_steps: steps of a block of its table.
        transport: its transport of rows of other nodes.
    """

    rank: int
    number: int
    place: MeshCoordinates
    node: str
    machine: str
    table: str | None
    origin: int | None
    columns: Any
    block_steps: int
    transport: str

    @property
    def schema(self) -> Schema:
        """Columns of its table."""
        return Schema.from_json(self.columns)

    def to_json(self) -> dict[str, Any]:
        """Return the attributes as JSON, for `Exchange.share`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Member:
        """Make a member from JSON; the inverse of `to_json`."""
        return cls(**{**fields, "place": MeshCoordinates(**fields["place"])})


def this_machine() -> str:
    """Return a name that processes share if they reach each other's loopback."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def this_node() -> str:
    """Return a name that processes share if they see the same shared memory and each other's process ids."""
    shared = os.stat(names.DIRECTORY)
    return f"{this_machine()}/{shared.st_dev}.{shared.st_ino}/{os.stat('/proc/self/ns/pid').st_ino}"


def check_members(members: Sequence[Member]) -> None:
    """Check that the tables and transports of all ranks fit together.

    Raises:
        SchemaError: columns differ within a stage, two tables have the same shard number, transports differ, or a
            mutable column is in several stages.
    """
    first: dict[int, Member] = {}
    for each in members:
        other = first.setdefault(each.place.stage, each)
        if other.columns != each.columns:
            raise SchemaError(
                f"The table of rank {each.number} has the columns {each.columns}, that of rank {other.number} "
                f"{other.columns}; expected the same in all tables of a pipeline stage."
            )
        if each.transport != members[0].transport:
            raise SchemaError(
                f"Rank {each.number} has transport={each.transport!r}, rank {members[0].number} "
                f"{members[0].transport!r}; expected the same on all ranks."
            )
    changing: dict[str, int] = {}
    for stage, each in sorted(first.items()):
        for name in each.schema.mutable:
            if (before := changing.setdefault(name, stage)) != stage:
                raise SchemaError(
                    f"Column {name!r} with mutable=True is in the tables of stages {before} and {stage}; expected one "
                    "stage: what is overwritten in one would stay as it was in the other."
                )
    for stage in first:
        seen: dict[int, Member] = {}
        for each in members:
            if each.place.stage != stage or each.origin is None:
                continue
            other = seen.setdefault(each.origin, each)
            if other is not each:
                raise SchemaError(
                    f"The tables of ranks {other.number} and {each.number} are both shard {each.origin}, so that their "
                    "trajectories would have the same ids. Give each rank a table of its own; load checkpoints of "
                    "several shards with gear_loader.distributed.load."
                )


def check_alike(what: str, options: Sequence[dict[str, Any]], numbers: Sequence[int]) -> None:
    """Check that all ranks have the same options.

    Args:
        what: name of the objects with these options, for errors.
        options: options of each rank, by name; an option may be given on some ranks alone.

    Raises:
        SchemaError: options differ; the message names them, the ranks and their values.
    """
    different = []
    for name in sorted({name for each in options for name in each}):
        ranks: dict[str, list[int]] = {}
        for number, each in zip(numbers, options, strict=True):
            if name in each:
                ranks.setdefault(_shown(each[name]), []).append(number)
        if len(ranks) > 1:
            values = ", and ".join(
                f"{value} on rank{'s' if len(group) > 1 else ''} {', '.join(map(str, group))}"
                for value, group in ranks.items()
            )
            different.append(f"{name} is {values}")
    if different:
        raise SchemaError(
            f"The ranks' {what} have different options: {'; '.join(different)}. Expected the same on all ranks."
        )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
