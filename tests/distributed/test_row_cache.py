"""The cache for rows of other nodes: it holds what it says, keeps its budget, and changes no batch."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cases import examples
from distributed_common import check_batch, filled, new_priorities, run_ranks, same_rows, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st
from played_peer import PlayedPeer
from test_shard_collector import INTERPRETED, fake_stream, made, some_rows  # noqa: F401

import gear_loader as gear
from gear_loader.distributed.rank_samplers import Samplers
from gear_loader.distributed.remote import RemoteShard
from gear_loader.distributed.row_cache import CacheBudget, RowCache
from gear_loader.distributed.shards import Shards
from gear_loader.errors import RankError, SchemaError

WINDOWS = gear.Window(5, -2)
COUNTS = [20, 15, 10]
SIZES = (24, 3, 9)
FIELDS = [(name, "<i8") for name in ("slot", "step", "generation", "steps", "final")]


def rows_of(random: np.random.Generator, count: int) -> tuple[Any, Any, Any]:
    """Keys of some rows, how often they are drawn, and their bytes, which the keys decide."""
    records = np.zeros(count, dtype=FIELDS)
    for name, most in zip(("slot", "step", "generation", "steps", "final"), (40, 3, 3, 2, 2), strict=True):
        records[name] = random.integers(most, size=count)
    keys = RowCache.keys_of(random.integers(2, size=count), records)
    return keys, 1 / (1.0 + records["slot"]), bytes_of(keys)


def bytes_of(keys: Any) -> list[Any]:
    mixed = (keys @ np.array([3, 5, 7, 11, 13])) % 251
    return [(mixed[:, None] + np.arange(size) % 250).astype(np.uint8) for size in SIZES]


def addresses(pieces: list[Any]) -> Any:
    return np.array([piece.ctypes.data for piece in pieces])


@given(seed=st.integers(0, 10**6), budget=st.integers(1, 20_000), known=st.booleans())
@settings(deadline=None)
def test_a_row_is_found_only_as_it_was_kept(seed: int, budget: int, known: bool) -> None:
    play(seed, budget, known)


@pytest.mark.parametrize("known", [False, True])
def test_rows_are_found_at_all(known: bool) -> None:
    assert sum(play(seed, 20_000, known) for seed in range(4)) > 10


def play(seed: int, budget: int, known: bool) -> int:
    """Keep rows and find them again; return how many were found."""
    random = np.random.default_rng(seed)
    whole = CacheBudget(budget)
    caches = [RowCache(whole, SIZES), RowCache(whole, SIZES)]
    kept: list[dict[tuple[int, ...], tuple[int, ...]]] = [{}, {}]  # what was received last, by name
    hits = 0
    for _ in range(30):
        which = int(random.integers(2))
        cache, last = caches[which], kept[which]
        keys, rates, pieces = rows_of(random, int(random.integers(1, 30)))
        given_rates = rates if known else None
        found = cache.find(keys, given_rates)
        hit = np.flatnonzero(found >= 0)
        hits += len(hit)
        for row in hit:
            assert last[tuple(keys[row, :3])] == tuple(keys[row]), "an older version was found"
        out = [np.full((len(hit) + 1, size), 255, dtype=np.uint8) for size in SIZES]
        turned = np.arange(len(hit))[::-1].copy()
        cache.load(found[hit], addresses(out), turned)
        for got, piece in zip(out, pieces, strict=True):
            np.testing.assert_array_equal(got[turned], piece[hit])
            assert (got[-1] == 255).all()
        some = np.flatnonzero((found < 0) & (random.random(len(keys)) < 0.9))
        cache.keep(keys[some], rates[some] if known else None, addresses(pieces), some)
        last.update({tuple(key[:3]): tuple(key) for key in keys[some].tolist()})
        stats = whole.stats()
        assert stats.resident_bytes <= budget
        assert stats.num_rows == sum(int(cache._state[0]) for cache in caches)
        assert stats.num_hits == hits
        held = sum(len(slab) for cache in caches for slab in cache._slabs)
        assert stats.num_rows * sum(SIZES) <= held <= stats.resident_bytes
        for cache in caches:
            check_valid(cache)
    del cache, caches
    gc.collect()
    assert (whole.stats().resident_bytes, whole.stats().num_rows) == (0, 0)
    return hits


def check_valid(cache: RowCache) -> None:
    """Every entry is found under its key, and nothing else is in the index."""
    used = int(cache._state[0])
    found = np.empty(used, dtype=np.int64)
    from gear_loader.native.row_cache import find

    find(cache._index, cache._keys, cache._keys[:used], found)
    np.testing.assert_array_equal(found, np.arange(used))
    assert (cache._index >= 0).sum() == used


def test_an_interrupt_between_keys_and_bytes_empties_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = RowCache(CacheBudget(20_000), SIZES)
    keys, rates, pieces = rows_of(np.random.default_rng(1), 20)
    cache.keep(keys, rates, addresses(pieces), np.arange(20))
    assert (cache.find(keys, rates) >= 0).any()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "_addresses", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.keep(keys[::-1].copy(), rates, addresses(pieces), np.arange(20))
    assert (cache.find(keys, rates) < 0).all()
    check_valid(cache)


def hit_rate(
    weights_at: Callable[[int], Any], known: bool, capacity: int, batches: int
) -> tuple[float, float]:
    """Hit rates in the second half: of the cache, and of the best choice that does not change, for each batch's
    weights."""
    random = np.random.default_rng(3)
    cache = RowCache(CacheBudget(capacity * (48 + 72)), (48,))
    hits = misses = 0
    best = []
    for number in range(batches):
        weights = weights_at(number)
        shares = weights / weights.sum()
        slots = random.choice(len(shares), size=64, p=shares)
        records = np.zeros(64, dtype=FIELDS)
        records["slot"] = slots
        keys, rates = RowCache.keys_of(np.zeros(64), records), 64 * shares[slots] if known else None
        found = cache.find(keys, rates)
        missed = np.flatnonzero(found < 0)
        source = np.zeros((64, 48), dtype=np.uint8)
        cache.keep(keys[missed], None if rates is None else rates[missed], addresses([source]), missed)
        if number >= batches // 2:
            hits, misses = hits + 64 - len(missed), misses + len(missed)
            best.append(np.sort(shares)[-capacity:].sum())
    return hits / (hits + misses), float(np.mean(best))


def test_hot_rows_stay_also_when_priorities_drift() -> None:
    random = np.random.default_rng(5)
    order, zipf = random.permutation(4000), 1 / np.arange(1, 4001)

    def drifting(number: int) -> Any:  # every row becomes hot and cold again
        return np.roll(zipf, 2 * number)[order]

    for known in (True, False):
        ours, best = hit_rate(lambda _: zipf[order], known, 400, 600)
        assert ours > (0.95 if known else 0.8) * best
    ours, best = hit_rate(drifting, True, 400, 600)
    assert ours > 0.85 * best
    # Where all are alike nothing helps but not to replace.
    ours, best = hit_rate(lambda _: np.ones(1000), False, 400, 200)
    assert ours > 0.95 * best


# ---------------------------------------------------------------- batches


class Played:
    """Three shards in this process, of which 1 and 2 are played as those of other nodes."""

    def __init__(self, tables: list[gear.Table], cache: int | None) -> None:
        self.shards = Shards(tables, cache=cache)
        self.shards.remote = True
        self.peers = [PlayedPeer(tables[shard], set()) for shard in (1, 2)]
        for shard, peer in enumerate(self.peers, 1):
            self.shards._sources[shard] = RemoteShard(peer, "played", tables[0].schema)

    def batches(self, sampler: gear.samplers.Sampler) -> tuple[gear.ReplayDataset, Iterator[Any]]:
        data = gear.ReplayDataset(
            self.shards,
            batch_size=16,
            windows=WINDOWS,
            sampler=sampler,
            seed=4,
            prefetch=gear.Prefetch(0, copy=True),
            batches_per_epoch=10**6,
        )
        return data, iter(data)


def changed(random: np.random.Generator, tables: list[gear.Table], growing: list[Any], turn: int) -> None:
    """Trajectories come, replace others, go, and grow."""
    for shard, table in enumerate(tables):
        choice = random.integers(5)
        number = 100 * shard + 30 + turn % 50
        if choice == 0:  # replaces the oldest ones where there is no room
            table.add(trajectory(number, int(random.integers(1, 20))), priority=float(random.integers(1, 9)))
        elif choice == 1 and len(table) > 3:
            table.remove(int(random.choice(np.asarray(table.indices()))))
        elif choice >= 3:
            writer, number, length = growing[shard]
            if length == 0:
                number = 100 * shard + 80 + turn % 20
                writer.trajectory = {"task": np.array([number, -number])}
            values = {
                name: value[length]
                for name, value in trajectory(number, length + 1).items()
                if name != "task"
            }
            writer.append(values)
            growing[shard][1:] = number, length + 1
            if length > 8 or random.random() < 0.2:
                writer.commit()
                growing[shard][1:] = 0, 0


@pytest.mark.long
@given(
    seed=st.integers(0, 10**6),
    sampler=st.sampled_from(
        [gear.Uniform(), gear.Prioritized(), gear.Prioritized(unit="step"), gear.TopK(), gear.Lifo()]
    ),
    cache=st.sampled_from([3_000, 20_000, 10**6]),
)
@settings(max_examples=examples(12), deadline=None)
def test_batches_are_the_same_with_a_cache_while_tables_change(
    seed: int, sampler: gear.samplers.Sampler, cache: int
) -> None:
    random = np.random.default_rng(seed)
    tables = [
        filled(None, shard, COUNTS, max_steps=240, on_full="evict_oldest", max_trajectories=26)
        for shard in range(3)
    ]
    growing = [[table.writer(commit_every_step=True), 0, 0] for table in tables]
    plain, cached = Played(tables, None), Played(tables, cache)
    (one, ones), (two, twos) = plain.batches(sampler), cached.batches(sampler)
    for turn in range(25):
        expected, got = next(ones), next(twos)
        for name, values in expected.items():
            assert torch.equal(got[name], values), (turn, name)
        if not isinstance(sampler, (gear.Uniform, gear.Lifo)):
            for data, batch in ((one, expected), (two, got)):
                data.update_priority(batch, new_priorities(batch, turn))
        if random.random() < 0.7:
            changed(random, tables, growing, turn)
    stats = cached.shards.cache_stats()
    assert stats.resident_bytes <= cache
    asked = sum(peer.asked for peer in cached.peers)
    assert stats.num_misses == asked
    assert stats.num_hits + asked == sum(peer.asked for peer in plain.peers)
    assert stats.num_hits > 0 or cache < 10**6


@INTERPRETED
@pytest.mark.parametrize("device", [False, True])
def test_a_drawn_row_of_the_cache_is_there_though_it_has_gone(
    device: bool,
    fake_stream: list[Any],  # noqa: F811
) -> None:
    """Exactly what was drawn: without a cache another row would be drawn in its place."""
    played = Played([filled(None, shard, COUNTS) for shard in range(3)], 10**6)
    shards = played.shards
    collector, buffers = made(device, shards, 24)
    samplers: Any = type("Some", (), {"_reach": None, "_extents": True})()
    samplers.dtype = Samplers.__init__.__globals__["record_dtype"](0, extents=True)
    batches = []
    for _ in range(2):
        rows = some_rows(shards, 24, 1)
        full = np.zeros(24, dtype=samplers.dtype)
        for shard in range(3):
            of = rows.shards == shard
            full[of] = Samplers.with_blocks(samplers, shards.own[shard], rows.records[of])
        rows.records = full
        for peer in played.peers:
            peer.asked = 0
        collector.gather(buffers, rows)
        rows.tickets.end()
        batches.append({name: value.clone() for name, value in buffers.rows(24).items() if name != "mask"})
        check_batch(buffers.rows(24), WINDOWS)
        for peer in played.peers:
            peer.gone = set(range(100))
    for name, values in batches[0].items():
        assert torch.equal(batches[1][name], values), name
    assert [peer.asked for peer in played.peers] == [0, 0]
    assert collector.source.num_gone == 0
    assert shards.cache_stats().num_hits == int((rows.shards > 0).sum())


def test_values_that_are_overwritten_are_not_kept() -> None:
    schema = {"number": gear.Column(torch.int64), "state": gear.Column(torch.float32, mutable=True)}
    tables = [gear.Table.create(schema, max_steps=40, max_trajectories=8) for _ in range(3)]
    for table in tables:
        for number in range(4):
            table.add({"number": np.full(10, number), "state": np.zeros(10, np.float32)})
    played = Played(tables, 10**6)
    options: dict[str, Any] = {"batch_size": 48, "device": "cpu", "prefetch": 0}
    states = gear.ReplayDataset(played.shards, windows=gear.Window(1), **options)
    numbers = gear.ReplayDataset(played.shards, windows={"number": gear.Window(1)}, **options)
    for turn in range(1, 6):
        numbers.sample()
        states.sample()
        for table in tables:
            table.set(np.arange(4), np.zeros(4, int), state=np.full((4, 10), turn, np.float32))
        assert (states.sample()["state"] == turn).all()
    stats = played.shards.cache_stats()
    assert stats.num_hits > 0
    assert stats.num_hits + stats.num_misses <= 5 * 48  # rows of one of the two


def test_options_are_checked() -> None:
    table = filled(None, 0, [3])
    for wrong in (0, "many", 1.5):
        with pytest.raises(SchemaError, match="cache is"):
            Shards(table, cache=wrong)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="These shards have no cache"):
        Shards(table).cache_stats()


# ---------------------------------------------------------------- ranks


def turns(
    shards: Shards, own: list[int], rank: int, world: int, *, kills: bool = False
) -> tuple[list[dict[str, Any]], Any]:
    """Batches of two samplers, while each table changes between two of them; and the state of the cache then."""
    found, stats = [], None
    random = [np.random.default_rng(shard) for shard in range(2)]
    tables = [shards.own.get(shard) for shard in range(2)]
    growing: list[Any] = [[table and table.writer(commit_every_step=True), 0, 0] for table in tables]
    for sampler in (gear.Prioritized(), gear.Uniform()):
        data = gear.ReplayDataset(
            shards,
            batch_size=24 // world,
            windows=WINDOWS,
            sampler=sampler,
            seed=4,
            prefetch=gear.Prefetch(0, copy=True),
            batches_per_epoch=14,
        )
        for number, batch in enumerate(data):
            check_batch(batch, WINDOWS)
            found.append(
                {name: batch[name].numpy().copy() for name in ("index", "anchor", "shard", "act", "obs")}
            )
            if isinstance(sampler, gear.Prioritized):
                data.update_priority(batch, new_priorities(batch, number))
            shards.exchange.barrier()  # all have read the batch
            for shard in own:
                changed(random[shard], [tables[shard]], growing[shard : shard + 1], number)
            if kills and rank == 1 and number == 9:
                os.kill(shards._servers.process.pid, signal.SIGKILL)
            shards.exchange.barrier()
        stats = shards.cache_stats() if shards.cache else None
    return found, stats


def cached_rank(rank: int, world: int, transport: str, kills: bool) -> tuple[Any, ...]:
    table = filled(f"gear-cached-{os.getppid()}-{rank}", rank, COUNTS, max_steps=300, on_full="evict_oldest")
    with contextlib.ExitStack() as stack:
        stack.callback(table.unlink)
        options: dict[str, Any] = {"node": f"node-{rank}", "transport": transport, "timeout": 60}
        with Shards(table, cache="64KiB", **options) as shards:
            found, stats = turns(shards, [rank], rank, world, kills=kills)
            shards.exchange.barrier()
        error = ""
        try:
            Shards(table, cache=1000 + rank, **options)
        except (RankError, SchemaError) as wrong:
            error = str(wrong)
    return found, stats.num_hits, stats.num_misses, stats.resident_bytes, error


@pytest.mark.parametrize(
    ("transport", "kills"),
    [
        ("socket", False),
        pytest.param("socket", True, marks=pytest.mark.long),
        pytest.param("nixl", False, marks=pytest.mark.long),
    ],
)
def test_ranks_with_a_cache_draw_what_one_process_draws(transport: str, kills: bool) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl_cu12")
    ranks = run_ranks(2, cached_rank, transport, kills)
    tables = [filled(None, shard, COUNTS, max_steps=300, on_full="evict_oldest") for shard in range(2)]
    same_rows([rank[0] for rank in ranks], turns(Shards(tables), [0, 1], 0, 1)[0], transport)
    for _, hits, misses, resident, error in ranks:
        assert hits > misses / 8
        assert 0 < resident <= 64 << 10
        assert "cache" in error
