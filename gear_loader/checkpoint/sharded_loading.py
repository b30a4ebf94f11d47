"""The part of a checkpoint of several tables that one rank loads."""

from __future__ import annotations

import dataclasses

import numpy as np

from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.index import Entries, read_entries
from gear_loader.checkpoint.loading import Contents, Part, check_files, contents_of
from gear_loader.checkpoint.manifest import Manifest
from gear_loader.checkpoint.resharding import assign_ranks, split_counts
from gear_loader.checkpoint.sharded import ShardsManifest, open_shard, shard_folder
from gear_loader.errors import CheckpointError
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

__all__ = ["Share", "own_share", "resharded_share"]


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of a checkpoint that one rank loads.

    Attributes:
        parts, contents: as for `fill`.
        sizes: arguments of `Table.create`. rules: manifest of the table whose rules the new table has.
        parent: name of the save whose files the next save of the table can reuse, or "0".
    """

    parts: list[Part]
    contents: Contents
    sizes: dict[str, int]
    rules: Manifest
    parent: str


def own_share(directory: Directory, shards: ShardsManifest, rank: int) -> Share:
    """The share of a rank that loads its own table, when the number of ranks is the same."""
    folder, manifest = open_shard(directory, shards, rank)
    with folder:
        entries = read_entries(folder, manifest)
        check_files(folder, manifest)
    contents = contents_of(manifest, entries)
    if (manifest.origin or 0) != rank:
        # Another shard wrote the table: its ids stay, and new ids are of this shard.
        contents = dataclasses.replace(
            contents, ident=entries.ids(manifest.origin), next_sequence=_next_sequence(shards)
        )
    contents = dataclasses.replace(contents, origin=rank)
    blocks = Table.required_blocks(entries.rows, manifest.block_steps)
    sizes = {
        "max_steps": manifest.max_steps,
        "max_trajectories": manifest.max_trajectories,
        "block_steps": manifest.block_steps,
        "max_blocks": max(manifest.num_blocks, blocks),
    }
    part = Part(shard_folder(shards.number, rank), manifest, entries, np.arange(len(entries.length)))
    return Share([part], contents, sizes, manifest, manifest.save)


def _next_sequence(shards: ShardsManifest) -> int:
    return max(shard.next_sequence for shard in shards.shards)


def resharded_share(directory: Directory, shards: ShardsManifest, rank: int, world_size: int) -> Share:
    """The share of one rank when another number of ranks saved the tables."""
    manifests = []
    for i in range(len(shards.shards)):
        folder, manifest = open_shard(directory, shards, i)
        with folder:
            manifests.append(manifest)
    _check_rules(directory.path, manifests)
    indices = []
    for i, manifest in enumerate(manifests):
        with directory.child_to_load(shard_folder(shards.number, i)) as folder:
            indices.append(read_entries(folder, manifest))
    shard = np.repeat(np.arange(len(indices)), [len(entries.length) for entries in indices])
    everything = Entries(
        *(np.concatenate(arrays) for arrays in zip(*(e.arrays().values() for e in indices), strict=True))
    )
    ids = np.concatenate([entries.ids(m.origin) for entries, m in zip(indices, manifests, strict=True)])
    _check_distinct(directory.path, ids, shard)
    stored = np.lexsort((everything.first, everything.segment, shard))
    owner = np.empty(len(ids), dtype=np.int64)
    owner[stored] = assign_ranks(everything.length[stored], world_size)
    mine = np.flatnonzero(owner == rank)
    mine = mine[np.argsort(ids[mine], kind="stable")]
    starts = np.searchsorted(shard, np.arange(len(indices)))
    parts = []
    for i, manifest in enumerate(manifests):
        places = np.flatnonzero(shard[mine] == i)
        folder_name = shard_folder(shards.number, i)
        parts.append(Part(folder_name, manifest, indices[i].take(mine[places] - starts[i]), places))
    live = np.bincount(owner, minlength=world_size).tolist()
    chosen = everything.take(mine)
    counts = _counts(shards, manifests, live, rank)
    contents = Contents(
        sequence=counts["next_sequence"] - len(mine) + np.arange(len(mine)),
        length=chosen.length,
        priority=chosen.priority,
        times_sampled=chosen.times_sampled,
        age=chosen.age,
        ident=ids[mine],
        final=chosen.final,
        filled=chosen.filled,
        origin=rank,
        **counts,
    )
    sizes = _sizes(manifests, chosen, int(everything.rows.max(initial=1)), world_size)
    return Share(parts, contents, sizes, manifests[0], "0")


def _counts(shards: ShardsManifest, manifests: list[Manifest], live: list[int], rank: int) -> dict[str, int]:
    """Counters of this rank's table: next_sequence, num_inserted and num_sampled.

    Args:
        live: number of trajectories of each rank.
    """
    removed = sum(manifest.num_inserted for manifest in manifests) - sum(live)
    inserted = [left + part for left, part in zip(live, split_counts(removed, [1] * len(live)), strict=True)]
    sampled = split_counts(sum(manifest.num_sampled for manifest in manifests), inserted)
    return {
        "next_sequence": max(_next_sequence(shards), inserted[rank]),
        "num_inserted": inserted[rank],
        "num_sampled": sampled[rank],
        "policy_version": max(manifest.policy_version for manifest in manifests),
    }


def _sizes(manifests: list[Manifest], entries: Entries, longest: int, world_size: int) -> dict[str, int]:
    """Sizes of the table of one rank: its part of the saved tables' sizes, or more where its trajectories need it.

    Args:
        entries: its trajectories. longest: rows of the longest trajectory of all ranks.
    """
    block_steps = max(manifest.block_steps for manifest in manifests)
    blocks = sum(-(-m.num_blocks * m.block_steps // block_steps) for m in manifests)
    limiter = manifests[0].rules.rate_limiter
    return {
        "max_steps": max(
            _part(sum(m.max_steps for m in manifests), world_size), int(entries.length.sum()), longest
        ),
        "max_trajectories": max(
            _part(sum(m.max_trajectories for m in manifests), world_size),
            len(entries.length),
            limiter.min_size if limiter else 1,
        ),
        "block_steps": block_steps,
        "max_blocks": max(
            _part(blocks, world_size),
            Table.required_blocks(entries.rows, block_steps),
            Table.required_blocks([longest], block_steps),
        ),
    }


def _part(total: int, world_size: int) -> int:
    return -(-total // world_size)


def _check_rules(directory: str, manifests: list[Manifest]) -> None:
    for rank, manifest in enumerate(manifests):
        if manifest.rules.to_json() != manifests[0].rules.to_json():
            raise CheckpointError(
                f"The tables of ranks 0 and {rank} in {directory} have different rules: {manifests[0].rules} and "
                f"{manifest.rules}. Load it with {len(manifests)} ranks, as it was saved."
            )


def _check_distinct(directory: str, ids: Array, shard: Array) -> None:
    order = np.argsort(ids, kind="stable")
    twice = np.flatnonzero(np.diff(ids[order]) == 0)
    if len(twice):
        first, second = order[twice[0]], order[twice[0] + 1]
        raise CheckpointError(
            f"The tables of ranks {shard[first]} and {shard[second]} in {directory} both hold the trajectory "
            f"{ids[first]}. Load it with as many ranks as it was saved with, and remove one of the two."
        )
