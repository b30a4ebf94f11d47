"""Who the ranks are: their nodes, and their places in the mesh of data parallelism and pipeline stages."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from gear_loader.errors import GearError, RankError, SchemaError
from gear_loader.storage import shared_memory as names
from gear_loader.storage.schema import Schema
from gear_loader.storage.table import Table

__all__ = [
    "Member",
    "Place",
    "agreed",
    "check_alike",
    "check_members",
    "described",
    "member",
    "places_of",
    "this_machine",
    "this_node",
]

DATA = ("data", "dp")
PIPELINE = ("pipeline", "pp")


@dataclasses.dataclass(frozen=True)
class Place:
    """A rank's place.

    Attributes:
        data: which slice of each batch it gets, and which shard it holds.
        stage: of the pipeline.
    """

    data: int
    stage: int


def places_of(mesh: Any) -> tuple[list[int], list[Place]]:
    """The ranks of a mesh, of the default process group, in its order; and their places.

    Args:
        mesh: a `torch.distributed.DeviceMesh` with dimensions called ``"data"`` (or ``"dp"``) and ``"pipeline"`` (or
            ``"pp"``), or without names with one dimension; None: all ranks are data-parallel.

    Raises:
        SchemaError: another mesh, or this rank is not in it.
    """
    if mesh is None:
        ranks = list(range(dist.get_world_size()))
        return ranks, [Place(rank, 0) for rank in ranks]
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
        places.append(Place(*at))
    return ranks, places


@dataclasses.dataclass(frozen=True)
class Member:
    """What a rank tells the others of itself.

    Attributes:
        rank: in the exchange. number: in the default process group.
        node: ranks of equal ones attach each other's tables. machine: those of equal ones reach each other's loopback.
        table: name of its table, None for a private one.
        origin: the table's shard number as its ids have it, None before one is set.
        columns, block_steps: of its table.
        transport: what it wants rows of other nodes to come over.
    """

    rank: int
    number: int
    place: Place
    node: str
    machine: str
    table: str | None
    origin: int | None
    columns: Any
    block_steps: int
    transport: str

    @property
    def schema(self) -> Schema:
        """Its table's columns."""
        return Schema.from_json(self.columns)

    def to_json(self) -> dict[str, Any]:
        """For `Exchange.share`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Member:
        """The inverse of `to_json`."""
        return cls(**{**fields, "place": Place(**fields["place"])})


def member(table: Table, *, rank: int, number: int, place: Place, node: str | None, transport: str) -> Member:
    """This rank."""
    return Member(
        rank,
        number,
        place,
        this_node() if node is None else node,
        this_machine(),
        table.name,
        table.origin,
        table.schema.to_json(),
        table.region.layout.block_steps,
        transport,
    )


def this_machine() -> str:
    """A name that processes have in common if they reach each other's loopback."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def this_node() -> str:
    """A name that processes have in common if they see the same shared memory and each other's process ids."""
    shared = os.stat(names.DIRECTORY)
    return f"{this_machine()}/{shared.st_dev}.{shared.st_ino}/{os.stat('/proc/self/ns/pid').st_ino}"


def check_members(members: Sequence[Member]) -> None:
    """Raise an error unless the ranks fit together.

    Raises:
        SchemaError: columns that differ within a stage, shard numbers that come twice, or transports that differ.
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


def agreed(answers: Sequence[dict[str, Any]], numbers: Sequence[int], what: str) -> None:
    """Raise RankError if any rank has told of an error, under "error"; the first one is named."""
    for number, answer in zip(numbers, answers, strict=True):
        if answer.get("error"):
            raise RankError(f"Rank {number} could not {what}: {answer['error']}")


def check_alike(what: str, options: Sequence[dict[str, Any]], numbers: Sequence[int]) -> None:
    """Raise an error unless all ranks have the same options.

    Args:
        what: has the options, for errors.
        options: of each rank, by name; an option counts where it is given.
        numbers: of the ranks.

    Raises:
        SchemaError: options differ; the message names them, the ranks and their values.
    """
    different = []
    for name in sorted({name for some in options for name in some}):
        ranks: dict[str, list[int]] = {}
        for number, some in zip(numbers, options, strict=True):
            if name in some:
                ranks.setdefault(_shown(some[name]), []).append(number)
        if len(ranks) > 1:
            values = ", and ".join(
                f"{value} on rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}"
                for value, who in ranks.items()
            )
            different.append(f"{name} is {values}")
    if different:
        raise SchemaError(
            f"The ranks' {what} have different options: {'; '.join(different)}. Expected the same on all ranks."
        )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def described(error: BaseException) -> str:
    """An error in one line."""
    name = "" if isinstance(error, GearError) else f"{type(error).__name__}: "
    return f"{name}{error}"
