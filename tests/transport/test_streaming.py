"""Writers of remote tables: they store what others store, and send long trajectories before these are committed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_remote_table import COLUMNS, episode, named, url_of
from transport_common import SECRET, Proxy, Serving, serving
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.errors import SchemaError
from gear_loader.transport import Limits, spool
from gear_loader.transport.change_messages import Part
from gear_loader.transport.resources import OpenParts

STEP_BYTES = 3 * 4 + 8 + 2  # of COLUMNS
PART_BYTES = 3 * 128  # of a piece on the wire
STEPPED = ("obs", "action", "half")


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of four steps of COLUMNS."""
    monkeypatch.setattr(spool, "_PIECE_BYTES", 4 * STEP_BYTES)


def steps_of(number: int, begin: int, end: int) -> dict[str, torch.Tensor]:
    whole = episode(number, end)
    return {name: whole[name][begin:] for name in STEPPED}


def goal(number: int) -> dict[str, torch.Tensor]:
    return {"goal": torch.full((2,), float(number))}


def contents(table: gear.Table) -> list[Any]:
    """All trajectories, their final steps and priorities, in order."""
    found = []
    for slot in table.indices().tolist():
        rows, final = table[slot], table.final(slot)
        values = {name: value.tolist() for name, value in rows.items()}
        last = None if final is None else {name: value.tolist() for name, value in final.items()}
        found.append((values, last, float(table._engine.region.array("priority")[slot])))
    return found


# ---------------------------------------------------------------- the same as other writers


def write_at_random(table: Any, chance: random.Random, **options: Any) -> None:
    """Streams of steps that are given one by one and several at once, committed, cut, discarded and ended."""
    may_end = "chunk_steps" not in options or "overlap_steps" in options
    with table.writer(**options) as writer:
        for number in range(12):
            writer.priority = chance.choice([None, 0.5])
            writer.trajectory = goal(number)
            at, length = 0, chance.randint(1, 23)
            while at < length:
                count = min(chance.choice([1, 1, 1, 2, 5, 30]), length - at)
                end = at + count
                rows = steps_of(number, at, end)
                writer.append(rows if count > 1 else {name: values[0] for name, values in rows.items()})
                at = end
            if chance.random() < 0.2:
                writer.discard()
                continue
            final = {"obs": torch.full((3,), -1.0 - number)} if chance.random() < 0.5 else None
            writer.commit(chance.choice([None, 2.0]), final=final if may_end else None)
        writer.append(steps_of(99, 0, 2))  # committed at the end


CHUNKS = [
    {},
    {"chunk_steps": 4},
    {"chunk_steps": 6, "overlap_steps": 2},
    {"chunk_steps": 9, "overlap_steps": 5},
]


def test_no_vector_writer_is_made_for_more_environments_than_there_is_memory_for() -> None:
    with (
        named(COLUMNS, max_steps=100, max_trajectories=10) as table,
        serving(str(table.name)) as server,
        gear.connect(url_of(server.address, table), secret=SECRET) as remote,
        pytest.raises(SchemaError, match=r"n is 1,000,000,000,000; expected at most [\d,]+, as 32 steps"),
    ):
        remote.writers(10**12)


def write_vectors_at_random(table: Any, chance: random.Random, **options: Any) -> None:
    may_end = "chunk_steps" not in options or "overlap_steps" in options
    with table.writers(3, **options) as writer:
        writer.trajectory = {"goal": torch.arange(6).reshape(3, 2).float()}
        for number in range(60):
            rows = {
                name: torch.stack([steps_of(i, number, number + 1)[name][0] for i in range(3)])
                for name in STEPPED
            }
            done = np.array([chance.random() < 0.15 for _ in range(3)])
            active = np.array([chance.random() < 0.8 for _ in range(3)])
            final = {"obs": torch.full((3, 3), -1.0 - number)} if may_end and chance.random() < 0.5 else None
            if final is not None and chance.random() < 0.5:  # as Gymnasium has it: None where nothing ended
                final = {"obs": [final["obs"][i] if done[i] else None for i in range(3)]}
            given = {"done": done, "active": active if chance.random() < 0.5 else None, "final": final}
            writer.append(rows, priority=chance.choice([None, 0.5]), **given)
            if chance.random() < 0.05:
                writer.discard(np.array([True, False, False]))
            if chance.random() < 0.05:
                writer.commit(np.array([False, True, False]))


@pytest.mark.parametrize("write", [write_at_random, write_vectors_at_random])
@pytest.mark.parametrize("options", CHUNKS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_remote_writers_store_what_writers_store(
    write: Callable[..., None], options: dict[str, int], seed: int
) -> None:
    sizes = {"max_steps": 4000, "max_trajectories": 300}
    with (
        named(COLUMNS, **sizes) as local,
        named(COLUMNS, **sizes) as table,
        serving(str(table.name)) as server,
    ):
        write(local, random.Random(seed), **options)
        with gear.connect(url_of(server.address, table), secret=SECRET) as remote:
            write(remote, random.Random(seed), **options)
        assert contents(table) == contents(local)
        assert server.server.resources.open_parts.size == 0
        table.check_valid()


# ---------------------------------------------------------------- before the commit


@pytest.fixture
def table() -> Iterator[gear.Table]:
    with named(COLUMNS, max_steps=2000, max_trajectories=300) as table:
        yield table
        table.check_valid()


def begin(remote: gear.RemoteTable, server: Serving, number: int = 7, steps: int = 22) -> Any:
    """A writer of `steps` steps, of which the server has the pieces that are full."""
    writer = remote.writer(wait=True)
    for step in range(steps):
        writer.append({name: values[0] for name, values in steps_of(number, step, step + 1).items()})
    wait_until(lambda: server.server.resources.open_parts.size >= steps // 4 * PART_BYTES)
    return writer


def is_stored(table: gear.Table, slot: int, number: int = 7, steps: int = 22) -> bool:
    wanted, found = episode(number, steps), table[slot]
    return len(table) == 1 and all(torch.equal(found[name], wanted[name]) for name in COLUMNS)


@pytest.mark.parametrize("how", ["kept", "cut", "bytes", "trajectories", "expired"])
def test_a_trajectory_is_whole_also_if_the_server_has_lost_its_parts(table: gear.Table, how: str) -> None:
    limits = {
        "bytes": Limits(open_bytes=3 * PART_BYTES - 1),
        "trajectories": Limits(open_trajectories=1),
        "expired": Limits(open_seconds=0.1),
    }
    with serving(str(table.name), limits=limits.get(how)) as server, Proxy(server.address) as proxy:
        with gear.connect(url_of(proxy.address, table), secret=SECRET, timeout=20.0) as remote:
            others = [begin(remote, server, 1)] if how == "trajectories" else []
            writer = begin(remote, server, steps=8)
            if how == "cut":
                proxy.cut()
            if how in ("cut", "expired"):
                wait_until(lambda: server.server.resources.open_parts.size == 0)
            writer.append(steps_of(7, 8, 22))
            assert len(table) == 0, "nothing can be drawn before the commit"
            last = {"obs": torch.full((3,), -1.0)}
            slot = writer.commit(2.5, final=last, trajectory=goal(7))
            assert is_stored(table, slot)
            final = table.final(slot)
            assert final is not None
            assert torch.equal(final["obs"], last["obs"])
            for other in others:
                other.close()
        wait_until(lambda: server.server.resources.open_parts.size == 0)


# ---------------------------------------------------------------- the server's memory of parts


def test_parts_that_do_not_follow_are_forgotten_with_their_trajectory() -> None:
    limits = Limits(all_open_bytes=1000)
    held = OpenParts(limits)
    parts = OpenParts(limits, held)
    data = np.zeros(100, dtype=np.uint8)
    for number in range(2):
        assert parts.fits(Part(1, number, 10), 100)
        parts.add(Part(1, number, 10), data)
    assert not parts.fits(Part(2, 1, 10), 100), "the first is missing"
    assert (parts.size, held.size, len(parts)) == (200, 200, 1)
    assert not parts.fits(Part(1, 3, 10), 100), "one is missing between"
    assert (parts.size, held.size, len(parts)) == (0, 0, 0)
    held.size = 950
    assert not parts.fits(Part(3, 0, 10), 100), "other connections hold too much"
    assert parts.take(3) == []
