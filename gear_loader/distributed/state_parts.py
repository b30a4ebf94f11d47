"""The part of a state that each rank saves: its own shard. Parts are joined, or go to the ranks that need them."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.distributed.failures import run_on_all
from gear_loader.distributed.rank_exchange import SingleProcess
from gear_loader.distributed.records import as_bytes
from gear_loader.distributed.shards_state import (
    LISTS,
    ShardsState,
    from_bytes,
    join_batches,
    share_state,
    to_bytes,
)
from gear_loader.errors import SchemaError
from gear_loader.selection.priorities import find
from gear_loader.selection.samplers import Sampler
from gear_loader.selection.state import batches_of
from gear_loader.storage.index_arrays import ranges
from gear_loader.utils.arrays import Array, shown

_NAMES = ("parts", "of", "checksum")
_PAIR = np.dtype([("id", "<i8"), ("length", "<i8")])
_UPDATE = np.dtype([("id", "<i8"), ("step", "<i8"), ("priority", "<f4"), ("delay", "<i8")])
_PLACE = np.dtype([("id", "<i8"), ("shard", "<i8"), ("count", "<i8")])


# ---------------------------------------------------------------- saving


def part_of_rank(exchange: SingleProcess, priorities: dict[str, Any]) -> dict[str, Any]:
    """The part of this rank in the state that all ranks save now: `priorities`, and by what `join` knows it.

    ``"parts"``: ranks whose state it is; ``"of"``: number of ranks; ``"checksum"``: of all parts, the same in each.
    """
    mine = np.array([_checksum(priorities, 0)], dtype=np.int64)
    checksum = zlib.crc32(np.concatenate(exchange.share_array(mine)).tobytes())
    return {**priorities, "parts": [exchange.rank], "of": exchange.size, "checksum": checksum}


def _checksum(value: Any, start: int) -> int:
    if isinstance(value, torch.Tensor):
        return zlib.crc32(as_bytes(value.numpy()).data, start)
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, (list, tuple)):
        for each in value:
            start = _checksum(each, start)
        return start
    return zlib.crc32(repr(value).encode(), start)


def gather(exchange: SingleProcess, part: dict[str, Any]) -> dict[str, Any]:
    """On rank 0 the whole state, made of all ranks' parts; on other ranks their own part."""
    if exchange.size == 1:
        return join([part])
    data, counts = to_bytes(part), np.zeros(exchange.size, dtype=np.int64)
    counts[0] = len(data)
    received, counts = exchange.send(data, counts)
    if exchange.rank:
        return part
    return join([from_bytes(each) for each in np.split(received, np.cumsum(counts)[:-1])])


def join_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Join what ranks have saved of the same state: of all of them to the whole state, of some to a larger part.

    For a job that goes on with another number of ranks. ``state_dict(full=False)`` of each rank made the parts, and
    each rank of the new job passes some of them, or their join, to `load_state_dict`; each part to at least one rank.

    Args:
        states: of ranks; one that is given twice counts once.

    Raises:
        SchemaError: they are no such states, or of different moments.

    Example:
        >>> files = sorted(Path("run").glob("draws-*.pt"))              # of as many ranks as there were
        >>> mine = files[rank::world] or files[:1]                      # more ranks than files: any of them
        >>> replay.load_state_dict(gear.distributed.join_states(torch.load(file) for file in mine))
    """
    given = list(states)
    if not given or not all(isinstance(each, Mapping) and "config" in each for each in given):
        raise SchemaError(f"{shown(given)} was given; expected a state_dict() of each of some ranks.")
    own = ("priorities", "transforms")
    plain = [{key: value for key, value in each.items() if key not in own} for each in given]
    if any(each != plain[0] for each in plain):
        raise SchemaError(
            "The states of the ranks are of different moments, or of different datasets; expected those that all "
            "ranks saved at the same time."
        )
    if "priorities" not in given[0]:
        return dict(given[0])
    return {**given[0], "priorities": join([each.get("priorities") for each in given])}


def join(states: Sequence[Any]) -> dict[str, Any]:
    """Join the priorities of states; see `join_states`."""
    if not all(isinstance(each, Mapping) for each in states):
        raise SchemaError(
            "A state holds no priorities; expected the state_dict() of the main process of each rank."
        )
    whole = [each for each in states if "parts" not in each]
    if whole:
        return dict(whole[0])
    try:
        if len({(each["of"], each["checksum"]) for each in states}) > 1:
            raise SchemaError(
                "The parts are of different states; expected those that all ranks saved at the same time."
            )
        known: dict[int, Mapping[str, Any]] = {}
        for each in sorted(states, key=lambda each: -len(each["parts"])):
            if not set(each["parts"]) <= set(known):
                known.update(dict.fromkeys(each["parts"], each))
        parts, first = sorted(known), states[0]
        kept = list({id(known[part]): known[part] for part in parts}.values())
        if sum(len(each["parts"]) for each in kept) != len(parts):
            raise SchemaError(
                "Joined parts overlap: some ranks' parts are in two of them. Join the parts of single ranks."
            )
        ends = {name: first[name] for name in _NAMES[1:]}
        if "ranks" in first:  # drawn by each rank from its own shard
            of_rank = {
                rank: one for each in kept for rank, one in zip(each["parts"], each["ranks"], strict=True)
            }
            ranks = [of_rank[part] for part in parts]
            return {"ranks": ranks} if len(parts) == first["of"] else {"ranks": ranks, "parts": parts, **ends}
        joined: dict[str, Any] = {name: torch.cat([each[name] for each in kept]) for name in LISTS}
        joined["maximum"] = max(each["maximum"] for each in kept)
        joined["num_stale"] = sum(each["num_stale"] for each in kept)
        slices = [rows for each in kept for rows in each["recent"]]
        if len(parts) == first["of"]:
            return {**joined, "recent": join_batches(slices), **({} if len(parts) == 1 else ends)}
        return {**joined, "recent": slices, "parts": parts, **ends}
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise SchemaError(
            f"A part of a state is damaged: {error!r}. Expected a state_dict(full=False)."
        ) from error


# ---------------------------------------------------------------- loading


def load_parts(
    exchange: SingleProcess, sampler: Sampler, parse: Callable[[], ShardsState], own: Callable[[], Array]
) -> ShardsState:
    """The state for this rank's trajectories, of what all ranks have of it; all ranks call it.

    A rank may have the whole state, its own part, those of others, or several, as long as each is somewhere. What a
    rank lacks is sent by one that has it, so nobody holds more than what it was given and what it needs.

    Args:
        parse: the state that this rank was given. own: ids of its trajectories, int64 [n].

    Raises:
        SchemaError: parts are missing, or of different states; an error of `parse` is raised as it is. RankError:
            another rank has failed.
    """
    given: list[tuple[ShardsState, Array, Array]] = []

    def describe() -> dict[str, Any]:
        state, ids = parse(), np.unique(own())
        missing = np.setdiff1d(ids, np.concatenate((state.names, state.updates[0])))
        given.append((state, ids, missing))
        return {
            "has": [state.parts, state.of, state.checksum],
            "missing": len(missing),
            "maximum": state.maximum,
        }

    answers = run_on_all("load its state", describe, exchange.share, exchange.ranks)
    state, ids, missing = given[0]
    if all(answer["has"][0] is None for answer in answers):
        return state  # each rank has all of it
    answering = _answering([answer["has"] for answer in answers], exchange)
    answers_here = exchange.rank in answering
    if any(answer["missing"] for answer in answers):
        state = _filled(exchange, state, ids, missing, answers=answers_here)
    shared = share_state(exchange, list(state.slices) if answers_here else [])
    recent = batches_of(
        join_batches([rows for rank in shared for rows in rank]), "ids", weighs=sampler.weighs
    )
    return dataclasses.replace(state, recent=recent, maximum=max(answer["maximum"] for answer in answers))


def _answering(having: list[Any], exchange: SingleProcess) -> list[int]:
    """The ranks that give others what these lack: the first that has each part."""
    saved = {(of, checksum) for _, of, checksum in having if of is not None}  # unknown of older whole states
    if len(saved) > 1:
        raise SchemaError(
            f"The ranks {list(exchange.ranks)} load parts of different states; expected those that all ranks saved "
            "at the same time. Nothing was changed."
        )
    of, _ = saved.pop()
    found, answering = set[int](), []
    for rank, (parts, _, _) in enumerate(having):
        mine = set(range(of) if parts is None else parts)
        if mine - found:
            answering.append(rank)
            found |= mine
    if lost := sorted(set(range(of)) - found):
        raise SchemaError(
            f"The state was saved by {of} ranks, and no rank was given the parts of {lost}. Give each rank the part "
            "that state_dict(full=False) made there, with another number of ranks joined by "
            "gear.distributed.join_states; or all of them what rank 0 saved with full=True. Nothing was changed."
        )
    return answering


def _filled(
    exchange: SingleProcess, state: ShardsState, own: Array, missing: Array, *, answers: bool
) -> ShardsState:
    """The state, with what other ranks have of this one's missing trajectories.

    For each id there is a rank that is told who needs the trajectory, and tells one that has it to whom to send it.

    Args:
        own, missing: ids of this rank's trajectories, and of those that are not in its state, int64 [n] ascending.
        answers: whether this rank sends what others need.
    """
    size = exchange.size
    ranks = np.arange(size)

    def send(values: Array, targets: Array) -> tuple[Array, Array]:
        """Send values to ranks, int64 [n], -1 for none; return those received, and from which ranks."""
        order = np.argsort(targets, kind="stable")[np.count_nonzero(targets < 0) :]
        found, counts = exchange.send(values[order], np.bincount(targets[order], minlength=size))
        return found, np.repeat(ranks, counts)

    def told(ids: Array) -> Array:
        ranks_told: Array = (ids + (ids >> 16)) % size  # their last 16 bits are a shard's number
        return ranks_told

    needed, needing = send(missing, told(missing))
    order = np.argsort(needed, kind="stable")
    offered = np.setdiff1d(np.concatenate((state.names, state.updates[0])), own) if answers else missing[:0]
    offered = offered[np.argsort(told(offered), kind="stable")]
    asked, asking = send(offered, told(offered))
    place, found = find(needed[order], asked)
    first = np.zeros(len(asked), dtype=bool)
    first[np.unique(asked, return_index=True)[1]] = True  # of the ranks that have it
    answers_to = np.where(found & first, needing[order][place] if len(needed) else -1, -1)
    targets, _ = send(answers_to, asking)
    order = np.argsort(offered, kind="stable")
    offered, targets = offered[order], targets[order]

    def target_of(ids: Array) -> Array:
        place, there = find(offered, ids)
        to: Array = np.full(len(ids), -1, dtype=np.int64)
        to[there] = targets[place[there]]
        return to

    def moved(values: Array, to: Array) -> Array:
        return send(values, to)[0]

    def joined(mine: Sequence[Array], dtype: np.dtype[Any]) -> Array:
        """The columns of lists, this rank's and what it gets."""
        rows: Array = np.empty(len(mine[0]), dtype=dtype)
        for name, values in zip(dtype.names or (), mine, strict=True):
            rows[name] = values
        return np.concatenate((rows, moved(rows, target_of(mine[0]))))

    counts = state.lengths if state.steps else np.ones_like(state.lengths)
    leaves = np.concatenate((state.leaves, moved(state.leaves, np.repeat(target_of(state.names), counts))))
    pairs = joined((state.names, state.lengths), _PAIR)
    updates = joined(state.updates, _UPDATE)
    placed, blocks = state.placed[:3], state.placed[3]
    blocks = np.concatenate((blocks, moved(blocks, np.repeat(target_of(placed[0]), placed[2]))))
    places = joined(placed, _PLACE)
    order = np.argsort(pairs["id"], kind="stable")
    counts = pairs["length"] if state.steps else np.ones(len(pairs), dtype=np.int64)
    return dataclasses.replace(
        state,
        names=pairs["id"][order],
        lengths=pairs["length"][order],
        leaves=leaves[ranges((np.cumsum(counts) - counts)[order], counts[order])],
        updates=tuple(np.ascontiguousarray(updates[name]) for name in _UPDATE.names or ()),
        placed=(*(np.ascontiguousarray(places[name]) for name in _PLACE.names or ()), blocks),
    )
