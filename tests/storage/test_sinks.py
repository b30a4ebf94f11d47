"""What every sink of an appender does: blocks of a table or of a growing trajectory, the spool of a remote table."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from table_common import fresh_name
from transport_common import SECRET, serving

import gear_loader as gear
from gear_loader.errors import SchemaError
from gear_loader.native.lanes import LANE_COMMON, LANE_STEPS
from gear_loader.storage.writer import Writer

COLUMNS = {
    "x": gear.Column(torch.int64),
    "obs": gear.Column(torch.float32, (3,), final=True),
    "half": gear.Column(torch.bfloat16, (2,)),
    "goal": gear.Column(torch.float64, per="trajectory"),
}


@dataclasses.dataclass
class Case:
    """A sink: where its writers come from, their options, and the table that its trajectories are found in."""

    source: Any
    table: gear.Table
    options: dict[str, Any]

    def found(self) -> list[tuple[list[int], float, float | None, float]]:
        """Numbers, goal, final number and priority of each trajectory, by its numbers."""
        if self.source is not self.table:
            self.source.flush()
        self.table.check_valid()
        found = []
        for slot in self.table.indices().tolist():
            rows, final = self.table[slot], self.table.final(slot)
            x = rows["x"].tolist()
            assert rows["obs"].tolist() == [[float(number)] * 3 for number in x]
            assert rows["half"].tolist() == [[float(number % 64)] * 2 for number in x]
            last = None if final is None else float(final["obs"][0])
            priority = float(self.table._engine.reader().arrays.priority[slot])
            found.append((x, float(rows["goal"]), last, priority))
        return sorted(found)


@pytest.fixture(params=["blocks", "growing", "spool"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    with contextlib.ExitStack() as stack:
        sizes = {"max_steps": 20_000, "max_trajectories": 900, "block_steps": 4}
        table = stack.enter_context(gear.Table.create(COLUMNS, name=fresh_name(), **sizes))
        stack.callback(table.unlink)
        source: Any = table
        if request.param == "spool":
            server = stack.enter_context(serving(str(table.name)))
            url = f"{server.address.replace('socket', 'gear')}/{table.name}"
            source = stack.enter_context(gear.connect(url, secret=SECRET))
        yield Case(source, table, {"commit_every_step": True} if request.param == "growing" else {})


def step(number: int) -> dict[str, Any]:
    half = torch.full((2,), float(number % 64), dtype=torch.bfloat16)
    return {"x": number, "obs": np.full(3, number, np.float32), "half": half}


def steps(numbers: Any) -> dict[str, Any]:
    x = np.asarray(numbers)
    half = torch.from_numpy(np.repeat(x[:, None] % 64, 2, 1)).to(torch.bfloat16)
    return {"x": x, "obs": np.repeat(x[:, None], 3, 1).astype(np.float32), "half": half}


def cut(case: Case, **chunks: int) -> dict[str, Any]:
    if case.options:
        pytest.skip("trajectories that grow are not cut")
    return chunks


@pytest.mark.parametrize("seed", range(2))
def test_one_lane(case: Case, seed: int) -> None:
    """Steps one by one and several at once, committed with and without a final step, or discarded."""
    chance, expected = random.Random(seed), []
    with case.source.writer(**case.options) as writer:
        for episode in range(12):
            writer.trajectory, length, at = {"goal": 0.5 * episode}, chance.randint(1, 40), 1000 * episode
            numbers = list(range(at, at + length))
            while at <= numbers[-1]:
                count = min(chance.choice([1, 1, 1, 5, 30]), numbers[-1] + 1 - at)
                writer.append(step(at) if count == 1 else steps(range(at, at + count)))
                at += count
                assert writer.num_steps == at - 1000 * episode
            if chance.random() < 0.2:
                writer.discard()
                if case.options:  # what is visible stays
                    expected.append((numbers, 0.5 * episode, None, -1.0))
            else:
                final = chance.choice([None, {"obs": np.full(3, -episode, np.float32)}])
                writer.commit(final=final)
                last = None if final is None else -float(episode)
                expected.append((numbers, 0.5 * episode, last, -1.0))
            assert writer.num_steps == 0
    assert case.found() == sorted(expected)


@pytest.mark.parametrize(("chunk", "overlap"), [(6, 0), (8, 4), (7, 3), (5, 4)])
def test_one_lane_in_chunks(case: Case, chunk: int, overlap: int) -> None:
    options = cut(case, chunk_steps=chunk, overlap_steps=overlap)
    expected: list[list[int]] = []
    shares = overlap and (chunk - overlap) % 4 == 0
    with case.source.writer(**options) as writer:
        writer.trajectory = {"goal": 1.0}
        for length in (1, chunk, chunk + 1, 4 * chunk - overlap, 33):
            first = 1000 * length
            writer.append(steps(range(first, first + length // 2 + 1)))
            for number in range(first + length // 2 + 1, first + length):
                writer.append(step(number))
            writer.commit()
            at = 0
            while at + chunk <= length:
                expected.append(list(range(first + at, first + at + chunk)))
                at += chunk - overlap
            if length > at + (overlap if at else 0):
                expected.append(list(range(first + at, first + length)))
    assert [x for x, *_ in case.found()] == sorted(expected)
    if case.source is case.table:  # blocks that two chunks have in common are counted once
        blocks = [[(x[0] // 1000, step % 1000 // 4) for step in x[:: 1 if shares else 4]] for x in expected]
        count = len(set(itertools.chain(*blocks))) if shares else sum(map(len, blocks))
        assert case.table.stats().blocks_in_use == count
        for slot in np.random.default_rng(chunk).permutation(case.table.indices()).tolist():
            expected.remove(case.table[slot]["x"].tolist())
            case.table.remove(slot)
            assert [x for x, *_ in case.found()] == sorted(expected)
        assert case.table.stats().blocks_in_use == 0


@pytest.mark.parametrize("options", [{}, {"chunk_steps": 6}, {"chunk_steps": 7, "overlap_steps": 3}], ids=str)
@pytest.mark.parametrize("n", [1, 5])
def test_lanes_hold_what_single_lanes_hold(case: Case, n: int, options: dict[str, int]) -> None:
    """Rows that end, that are left out or discarded; arrays and tensors, contiguous or not; priorities, final steps."""
    options = case.options | (cut(case, **options) if options else {})
    chance, may_end = np.random.default_rng(n), options.keys() != {"chunk_steps"}
    with gear.Table.create(COLUMNS, max_steps=20_000, max_trajectories=900, block_steps=4) as twin:
        singles = [twin.writer(**options) for _ in range(n)]
        with case.source.writers(n, **options) as writer:
            for number in range(80):
                x = 1000 * np.arange(n) + number
                done, active = chance.random(n) < 0.1, chance.random(n) < 0.8
                final = {"obs": -np.repeat(x[:, None], 3, 1).astype(np.float32)}
                given = final if chance.random() < 0.5 and may_end else None
                priority = chance.random(n).astype(np.float32)
                writer.trajectory = {"goal": np.arange(n, dtype=np.float64)}
                rows = steps(x)
                if number % 3 == 1:
                    rows = {name: torch.as_tensor(values) for name, values in rows.items()}
                elif number % 3 == 2:
                    rows["obs"] = np.asfortranarray(rows["obs"])
                ends: Any = done.tolist() if number % 2 else torch.from_numpy(done)
                found = writer.append(rows, done=ends, active=active, final=given, priority=priority)
                expected = np.zeros(n, dtype=bool)
                for i in np.flatnonzero(active).tolist():
                    singles[i].trajectory, singles[i].priority = {"goal": float(i)}, float(priority[i])
                    expected[i] = bool(singles[i].append(step(int(x[i]))))
                    if done[i]:
                        more = {} if case.options else {"priority": float(priority[i])}
                        singles[i].commit(final=None if given is None else {"obs": final["obs"][i]}, **more)
                        expected[i] = True
                if case.source is case.table and not case.options:
                    assert ((found >= 0) == expected).all()
                assert writer.num_steps.tolist() == [single.num_steps for single in singles]
                if number == 40:
                    writer.discard(done)
                    for i in np.flatnonzero(done):
                        singles[i].discard()
        for single in singles:
            if single.num_steps > (0 if case.options else int(single._lane[LANE_COMMON])):
                single.commit()
        assert case.found() == Case(twin, twin, {}).found()


def test_what_does_not_fit_changes_nothing(case: Case) -> None:
    writer = case.source.writer(**case.options)
    writer.trajectory = {"goal": 2.0}
    for before in (0, 1, 4, 7):
        for number in range(before):
            writer.append(step(number))
        wrong: list[dict[str, Any]] = [
            {**step(1), "x": 1.5},
            {**step(1), "obs": np.zeros(2, np.float32)},
            {"x": 1},
            {**steps([1, 2]), "x": np.zeros(3, np.int64)},
            steps([]),
            steps(range(20_001)),
        ]
        for rows in wrong:
            with pytest.raises(SchemaError):
                writer.append(rows)
            assert writer.num_steps == before
        with pytest.raises(SchemaError):
            writer.commit(final={"x": 3})
        assert writer.num_steps == before
        if before:
            writer.commit()
    with pytest.raises(SchemaError, match="Nothing has been appended"):
        writer.commit()
    assert [x for x, *_ in case.found()] == [[0], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]]


def test_an_interruption_leaves_a_writer_that_goes_on(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after each call of the sink: lanes tell what is there, and nothing is written twice."""
    for when in ("before", "after"):
        for method in ("add", "end", "abort"):
            writer: Writer = case.source.writer(**case.options)
            writer.trajectory = {"goal": 3.0}
            writer.append(steps(range(3)))
            sink: Any = writer._sink
            genuine = getattr(sink, method)

            def interrupted(*given: Any, genuine: Any = genuine, when: str = when) -> Any:
                if when == "after":
                    genuine(*given)
                raise KeyboardInterrupt

            monkeypatch.setattr(sink, method, interrupted)
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - one of three calls
                if method == "add":
                    writer.append(steps([3, 4]))
                else:
                    writer.commit() if method == "end" else writer.discard()
            monkeypatch.undo()
            assert sink.lanes[0, LANE_STEPS] == writer.num_steps
            writer.discard()
            writer.append(step(7))
            writer.commit()
            writer.close()
    found = [x for x, *_ in case.found()]
    assert found.count([7]) == 6
    assert all(x in ([7], [0, 1, 2], [0, 1, 2, 3, 4]) for x in found)
