"""The part of a checkpoint of several tables that one rank loads, with as many ranks as saved it or another number."""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np

from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.index import read_records
from gear_loader.checkpoint.loading import Part, Share, whole_share
from gear_loader.checkpoint.manifest import Manifest
from gear_loader.checkpoint.segments import check_files
from gear_loader.checkpoint.sharded import ShardsManifest, open_shard, shard_folder
from gear_loader.checkpoint.trajectory_records import Counters, ids_of, rows_of
from gear_loader.errors import CheckpointError
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

_PARTS = 8


def own_share(directory: Directory, shards: ShardsManifest, rank: int) -> Share:
    """The share of a rank that loads its own table, when the number of ranks is the same."""
    folder, manifest = open_shard(directory, shards, rank)
    with folder:
        share = whole_share(folder, manifest, shard_folder(shards.number, rank))
    counters, records = dataclasses.replace(manifest.counters, origin=rank), share.records
    if (manifest.origin or 0) != rank:
        # Another shard wrote the table: its ids stay, and new ids are of this shard.
        records = records.copy()
        records["ident"] = ids_of(records, manifest.origin)
        counters = dataclasses.replace(counters, next_sequence=_next_sequence(shards))
    return dataclasses.replace(share, records=records, counters=counters)


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
            indices.append(read_records(folder, manifest))
            for segment in manifest.segments:
                check_files(folder, segment, manifest.schema)
    shard = np.repeat(np.arange(len(indices)), [len(records) for records in indices])
    everything = np.concatenate(indices)
    ids = np.concatenate([ids_of(records, m.origin) for records, m in zip(indices, manifests, strict=True)])
    _check_distinct(directory.path, ids, shard)
    stored = np.lexsort((everything["first"], everything["segment"], shard))
    owner = np.empty(len(ids), dtype=np.int64)
    owner[stored] = assign_ranks(everything["length"][stored], world_size)
    mine = np.flatnonzero(owner == rank)
    mine = mine[np.argsort(ids[mine], kind="stable")]
    records = everything[mine]
    parts = []
    for i, manifest in enumerate(manifests):
        places = np.flatnonzero(shard[mine] == i)
        parts.append(Part(shard_folder(shards.number, i), manifest, records[places], places))
    live = np.bincount(owner, minlength=world_size).tolist()
    counters = _counters(shards, manifests, live, rank)
    sizes = _sizes(manifests, records, int(rows_of(everything).max(initial=1)), world_size)
    records["sequence"] = counters.next_sequence - len(mine) + np.arange(len(mine))
    records["ident"] = ids[mine]
    return Share(parts, records, counters, sizes, manifests[0], "0")


def _counters(shards: ShardsManifest, manifests: list[Manifest], live: list[int], rank: int) -> Counters:
    """Counters of this rank's table.

    Args:
        live: number of trajectories of each rank.
    """
    removed = sum(manifest.num_inserted for manifest in manifests) - sum(live)
    inserted = [left + part for left, part in zip(live, split_counts(removed, [1] * len(live)), strict=True)]
    sampled = split_counts(sum(manifest.num_sampled for manifest in manifests), inserted)
    return Counters(
        origin=rank,
        next_sequence=max(_next_sequence(shards), inserted[rank]),
        num_inserted=inserted[rank],
        num_sampled=sampled[rank],
        policy_version=max(manifest.policy_version for manifest in manifests),
    )


def _sizes(manifests: list[Manifest], records: Array, longest: int, world_size: int) -> dict[str, int]:
    """Sizes of the table of one rank: its part of the saved tables' sizes, or more where its trajectories need it.

    Args:
        records: of its trajectories. longest: rows of the longest trajectory of all ranks.
    """
    block_steps = max(manifest.block_steps for manifest in manifests)
    blocks = sum(-(-m.num_blocks * m.block_steps // block_steps) for m in manifests)
    limiter = manifests[0].rules.rate_limiter
    return {
        "max_steps": max(
            _part(sum(m.max_steps for m in manifests), world_size), int(records["length"].sum()), longest
        ),
        "max_trajectories": max(
            _part(sum(m.max_trajectories for m in manifests), world_size),
            len(records),
            limiter.min_size if limiter else 1,
        ),
        "block_steps": block_steps,
        "max_blocks": max(
            _part(blocks, world_size),
            Table.required_blocks(rows_of(records), block_steps),
            Table.required_blocks([longest], block_steps),
        ),
        "payload": _part(sum(m.payload for m in manifests), world_size),
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


def assign_ranks(lengths: Array, world_size: int) -> Array:
    """Assign trajectories to ranks with about the same number of steps each; deterministic.

    Consecutive trajectories are assigned in groups, so that a rank reads long pieces of files. A group has one eighth
    of a rank's share of the remaining steps, so groups shrink to single trajectories at the end. Each group goes to the
    rank with the fewest steps so far.

    Args:
        lengths: int64 [n], steps of each trajectory, in storage order.
        world_size: number of ranks.

    Returns:
        int64 [n], rank of each trajectory. The steps of two ranks differ by at most the longest trajectory.
    """
    ranks = np.empty(len(lengths), dtype=np.int64)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    steps = [(0, rank) for rank in range(world_size)]
    begin, done = 0, 0
    while begin < len(lengths):
        aim = done + (total - done) // (_PARTS * world_size)
        end = max(begin + 1, int(np.searchsorted(ends, aim, side="right")))
        held, rank = steps[0]
        ranks[begin:end] = rank
        heapq.heapreplace(steps, (held + int(ends[end - 1]) - done, rank))
        begin, done = end, int(ends[end - 1])
    return ranks


def split_counts(total: int, weights: list[int]) -> list[int]:
    """Split a count over ranks in proportion to their weights (evenly if all are 0); the parts add up to the count."""
    weights = weights if any(weights) else [1] * len(weights)
    everything, before, parts = sum(weights), 0, []
    for weight in weights:
        parts.append(total * (before + weight) // everything - total * before // everything)
        before += weight
    return parts
