"""Rows of n environments written at once: what they hold, what is refused, and what is left after an error."""

from __future__ import annotations

import contextlib
import os
import types
from typing import Any

import numpy as np
import pytest
import torch
from options_common import nested_table
from table_common import forked, forks, named

import gear_loader as gear
from gear_loader.errors import GearError, RateLimitError, SchemaError, TableClosedError, TableFullError
from gear_loader.native import copying
from gear_loader.storage.counters import RUNS
from gear_loader.storage.lock import IndexLock

COLUMNS = {
    "x": gear.Column(torch.int64),
    "value": gear.Column(torch.float32, (3,)),
    "half": gear.Column(torch.bfloat16, (2,)),
    "flag": gear.Column(torch.bool),
}
SCALAR = {"x": gear.Column(torch.int64)}


def rows_of(step: int, n: int) -> dict[str, Any]:
    """Rows that tell step and environment."""
    x = np.arange(n) + 100 * step
    value = (x[:, None] + np.array([0.25, 0.5, 0.75])).astype(np.float32)
    half = torch.from_numpy(x[:, None] * np.ones(2)).to(torch.bfloat16)
    return {"x": x, "value": value, "half": half, "flag": x % 3 == 0}


def shown(table: gear.Table) -> list[Any]:
    """Every trajectory, oldest first, with its priority."""
    table.check_valid()
    priorities = table._engine.reader().arrays.priority
    return [
        (float(priorities[i]), {name: values.tolist() for name, values in table[i].items()})
        for i in map(int, table.indices())
    ]


def scalars(table: gear.Table) -> list[list[int]]:
    return [trajectory["x"] for _, trajectory in shown(table)]


def test_the_end_of_a_block_commits_what_is_open_or_nothing() -> None:
    with gear.Table.create(SCALAR, max_steps=40, max_trajectories=8, block_steps=4) as table:
        with table.writers(3) as writer:
            for step in range(5):
                writer.append(x=np.arange(3) + 10 * step, active=np.arange(3) != 1)
        assert scalars(table) == [[0, 10, 20, 30, 40], [2, 12, 22, 32, 42]]
        writer = table.writers(3)
        with contextlib.suppress(ZeroDivisionError), writer:
            writer.append(x=np.arange(3))
            _ = 1 / 0
        assert len(table) == 2
        assert table.stats().num_writing == 0


GOOD = rows_of(1, 4)
MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"rows": {**GOOD, "value": np.zeros((4, 2), np.float32)}},
     r"'value' of the rows \(T = 4, one for each environment\) has shape \[4, 2\]; expected \[T, 3\]"),
    ({"rows": {**GOOD, "value": np.zeros((4, 3))}}, r"'value' of the rows .* has dtype float64; expected torch.fl"),
    ({"rows": {**GOOD, "x": [1, 2, 3, 4]}}, r"'x' of the rows .* is a list; expected a numpy array"),
    ({"rows": {**GOOD, "x": np.arange(3)}}, r"uneven lengths: \{'x': 3, 'value': 4"),
    ({"rows": rows_of(1, 3)}, r"The rows have 3 entries; expected .* one row for each of the 4 environments"),
    ({"rows": {name: values[1] for name, values in GOOD.items()}}, r"'x' of the rows .* is a int64|shape"),
    ({"rows": {"x": GOOD["x"]}}, r"missing: \['value', 'half', 'flag'\], unknown: \[\]"),
    ({"rows": {**GOOD, "y": GOOD["x"]}}, r"missing: \[\], unknown: \['y'\]"),
    ({"rows": 3}, r"the rows .* is a int; expected a mapping"),
    ({"done": np.zeros(3, bool)}, r"done has dtype bool and shape \[3\]; expected a mask, bool \[4\]"),
    ({"done": np.zeros(4, np.int64)}, r"done has dtype int64 and shape \[4\]; expected a mask, bool \[4\]"),
    ({"done": True}, r"done has dtype bool and shape \[\]; expected a mask"),
    ({"done": [[True], [False, True]]}, r"done is \[\[True\], \[False, True\]\]; expected a mask, bool \[4\]"),
    ({"active": torch.ones(4)}, r"active is float32 \[4\]: 1\.0, .*; expected a mask, bool \[4\]"),
    ({"priority": np.ones(3)}, r"priority has shape \[3\]; expected one number or \[4\]"),
    ({"priority": [1, 1, -1, 1]}, r"priority of trajectory 2 is -1.0"),
]  # fmt: skip


def test_what_does_not_fit_changes_nothing() -> None:
    with gear.Table.create(COLUMNS, max_steps=400, max_trajectories=8, block_steps=4) as table:
        writer = table.writers(4)
        for steps in (0, 4, 5):  # no room yet, the end of a block, and inside one
            writer.discard()
            for step in range(steps):
                writer.append(rows_of(step, 4))
            stats = table.stats()
            for options, message in MISFITS:
                options = dict(options)
                with pytest.raises(SchemaError, match=message):
                    writer.append(options.pop("rows", GOOD), **{"done": np.ones(4, bool), **options})
                assert writer.num_steps.tolist() == [steps] * 4
                assert table.stats() == stats
        writer.append(GOOD, done=np.ones(4, bool))
        assert [len(trajectory["x"]) for _, trajectory in shown(table)] == [6] * 4
        for n, message in (
            (0, "n is 0; expected an integer"),
            (9, "n is 9; expected at most 8"),
            (10**9, "n is 1,000,000,000; expected at most 8"),
            (2.0, "n is 2.0"),
        ):
            with pytest.raises(SchemaError, match=message):
                table.writers(n)  # type: ignore[arg-type]


def test_a_full_table_and_a_rate_limiter_leave_a_call_that_can_be_repeated() -> None:
    x = np.arange(3)
    with gear.Table.create(SCALAR, max_steps=28, max_trajectories=8, block_steps=4, timeout=0.05) as table:
        table.add({"x": np.arange(8)})
        writer = table.writers(3)
        for step in range(5):
            writer.append(x=x + 10 * step, active=x < (3 if step < 4 else 2))
        step = 5
        with contextlib.suppress(TableFullError):
            while step < 9:
                writer.append(x=x + 10 * step)
                step += 1
        before = writer.num_steps
        assert not writer.appended.any()
        with pytest.raises(TableFullError):
            writer.append(x=x + 10 * step)
        assert writer.num_steps.tolist() == before.tolist() == [step, step, step - 1]
        table.remove(0)
        writer.append(x=x + 10 * step, done=np.ones(3, bool))
        tens = [10 * i for i in range(step + 1)]
        assert scalars(table) == [tens, [1 + i for i in tens], [2 + i for i in tens if i != 40]]
    with gear.Table.create(
        SCALAR, max_steps=400, max_trajectories=80, block_steps=4, timeout=0.05, rate_limiter=gear.Queue(2)
    ) as table:
        writer = table.writers(4)
        for step in range(3):
            writer.append(x=np.arange(4) + 10 * step)
        done, rows = np.arange(4) > 0, np.arange(4) + 30  # the fourth row is the last one of a block
        with pytest.raises(RateLimitError):
            writer.append(x=rows, done=done)
        assert writer.appended.tolist() == [False, True, True, False]
        assert writer.num_steps.tolist() == [3, 0, 0, 3]
        with pytest.raises(RateLimitError):
            writer.append(x=rows, done=done, active=~np.array([False, True, True, False]))
        assert writer.num_steps.tolist() == [3, 0, 0, 3]
        ticket, _ = table._engine.reader().begin_snapshot(samples=1)
        ticket.end()
        writer.append(x=rows, done=done, active=[True, False, False, True])
        assert writer.num_steps.tolist() == [4, 0, 0, 0]
        assert scalars(table) == [[i, 10 + i, 20 + i, 30 + i] for i in (1, 2, 3)]


def test_a_chunk_that_may_not_be_committed_is_kept_without_its_last_step() -> None:
    limiter = gear.Queue(1)
    with gear.Table.create(
        SCALAR, max_steps=400, max_trajectories=80, block_steps=4, timeout=0.05, rate_limiter=limiter
    ) as table:
        writer = table.writers(2, chunk_steps=6, overlap_steps=2)
        for step in range(5):
            writer.append(x=np.arange(2) + 10 * step)
        for _ in range(2):
            with pytest.raises(RateLimitError):
                writer.append(x=np.arange(2) + 50, active=~writer.appended)
            assert writer.num_steps.tolist() == [2, 5]
            writer.appended = np.array([True, False])  # as after the first of the two
        ticket, _ = table._engine.reader().begin_snapshot(samples=1)
        ticket.end()
        writer.append(x=np.arange(2) + 50, active=[False, True])
        assert scalars(table) == [[0, 10, 20, 30, 40, 50], [1, 11, 21, 31, 41, 51]]


def test_a_commit_tells_the_index_of_each_environment() -> None:
    with gear.Table.create(SCALAR, max_steps=40, max_trajectories=8, block_steps=4) as table:
        writer = table.writers(3)
        writer.append(x=np.arange(3), active=[True, True, False])
        assert writer.commit([False, True, True], priority=2.0).tolist() == [-1, 1, -1]
        assert shown(table) == [(2.0, {"x": [1]})]
        assert writer.commit().tolist() == [0, -1, -1]


def test_an_interruption_discards_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    append_rows = copying.append_rows

    def interrupted(request: Any) -> int:
        append_rows(request)
        raise KeyboardInterrupt

    with gear.Table.create(SCALAR, max_steps=40, max_trajectories=8, block_steps=4) as table:
        writer = table.writers(3)
        writer.append(x=np.arange(3))
        monkeypatch.setattr(copying, "append_rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.append(x=np.arange(3), done=np.ones(3, bool))
        monkeypatch.undo()
        assert table.stats().num_writing == 0
        writer.append(x=np.arange(3) + 5, done=np.ones(3, bool))
        assert scalars(table) == [[5], [6], [7]]


def test_a_closed_table() -> None:
    with gear.Table.create(SCALAR, max_steps=40, max_trajectories=8) as table:
        writer = table.writers(2)
        writer.append(x=np.arange(2))
    for call in (lambda: writer.append(x=np.arange(2)), writer.commit):
        with pytest.raises(TableClosedError):
            call()


@forks
def test_a_vector_writer_after_a_fork() -> None:
    with named() as table:
        writer = table.writers(2)

        def work() -> None:
            with pytest.raises(
                GearError, match=rf"^A vector writer of process {os.getppid()} was used in process"
            ):
                writer.commit()
            writer.close()

        forked(work)


def test_final_steps_as_gymnasium_gives_them() -> None:
    """In autoreset mode SAME_STEP: an array of objects, None where no episode ended; nothing where none did."""
    columns = {"x": gear.Column(torch.float32, (2,), final=True), "y": gear.Column(torch.int64, final=True)}
    rows = {"x": np.zeros((3, 2), np.float32), "y": np.zeros(3, np.int64)}
    done, active = np.array([True, False, True]), np.array([True, True, False])
    last = np.array([None] * 3)
    last[0] = {"x": np.array([1, 2], np.float32), "y": np.int64(3)}
    by_column = {name: np.array([None, None, None]) for name in columns}
    for name, values in by_column.items():
        values[0] = last[0][name]
    lists = {name: list(values) for name, values in by_column.items()}
    full = {"x": [np.array([1, 2], np.float32)] * 3, "y": [torch.tensor(3)] * 3}
    with gear.Table.create(columns, max_steps=200, max_trajectories=20) as table:
        writer = table.writers(3)
        for final in (last, by_column, lists, full):
            writer.append(rows, done=np.zeros(3, bool), final=dict.fromkeys(columns))
            index = writer.append(rows, done=done, active=active, final=final)[0]
            assert {name: value.tolist() for name, value in table.final(int(index)).items()} == {
                "x": [1, 2],
                "y": 3,
            }
        writer.discard()
        short = by_column | {"x": [np.zeros(1, np.float32), None, None]}
        for wrong, message in (
            (by_column, "Column 'x' of final is None for environment 2, whose trajectory ends"),
            (last, "final of environment 2, whose trajectory ends, is None; expected the columns"),
            (short, r"Column 'x' of final is of shape \[1\] for environment 0"),
            ({"x": full["x"]}, r"final has \['x'\]; expected the columns \['x', 'y'\]"),
            ({"x": [None], "y": [None]}, "Column 'x' of final has 1 rows; expected one for each of 3"),
        ):
            with pytest.raises(SchemaError, match=message):
                writer.append(rows, done=done, final=wrong)
        assert writer.num_steps.tolist() == [0, 0, 0]


@pytest.mark.parametrize("options", [{}, {"commit_every_step": True}])
def test_one_lock_for_all_environments(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One for room for all, one for room for final steps, one for commits; also when the table is full."""
    columns = {"x": gear.Column(torch.int64, final=True)}
    sizes = {"max_steps": 1000, "max_trajectories": 200, "block_steps": 4, "on_full": "evict_oldest"}
    with gear.Table.create(columns, **nested_table(sizes)) as table:
        writer = table.writers(6, **options)
        lengths = 1 + np.random.default_rng(3).permutation(6)
        steps, calls, counters = np.zeros(6, dtype=int), 0, table._engine.region.array("counters")
        run = IndexLock.run

        def counted(self: IndexLock, *given: Any) -> Any:
            nonlocal calls
            calls += 1
            return run(self, *given)

        monkeypatch.setattr(IndexLock, "run", counted)
        # Once a second an append also looks for dead writers, in a lock of its own.
        monkeypatch.setattr(table._engine.index.allocator, "_writers_checked", np.inf)
        for _ in range(250):
            steps += 1
            done, calls, moves = steps == lengths, 0, counters[RUNS]
            x = 100 * np.arange(6) + steps
            index = writer.append(x=x, done=done, final={"x": x + 1})
            assert ((index >= 0) == done).all()
            if counters[RUNS] != moves:
                pass  # the index was used for the first time, or its block tables were compacted
            elif not options:
                assert calls <= 3
            elif (steps > 1).all():
                assert calls <= 1 + 2 * done.sum()  # up to each one that ends, and its final step
            for i in np.flatnonzero(done).tolist():
                assert table[int(index[i])]["x"].tolist() == [100 * i + k + 1 for k in range(lengths[i])]
                last = table.final(int(index[i]))
                assert last is not None
                assert last["x"] == x[i] + 1
            steps[done] = 0
            lengths = np.where(done, (lengths * 5) % 13 + 1, lengths)
            table.check_valid()
        assert table.stats().num_evicted > 50


def test_a_commit_that_fails_leaves_those_before_it() -> None:
    """The final step of the second environment finds no room."""
    columns = {"x": gear.Column(torch.int64, final=True)}
    with gear.Table.create(
        columns, max_steps=20, max_trajectories=3, memory=gear.Memory(max_blocks=3), block_steps=4
    ) as table:
        other = table.add({"x": np.arange(4)})
        writer = table.writers(2)
        for step in range(3):
            writer.append(x=np.arange(2) + 10 * step, active=[step > 0, True])
        x, both = np.arange(2) + 30, np.ones(2, dtype=bool)
        with pytest.raises(TableFullError):
            writer.append(x=x, done=both, final={"x": x})
        assert writer.appended.tolist() == [True, False]
        assert writer.num_steps.tolist() == [0, 3]
        table.remove(other)
        writer.append(x=x, done=both, active=~writer.appended, final={"x": x})
        assert scalars(table) == [[10, 20, 30], [1, 11, 21, 31]]


def test_growing_trajectories_whose_last_row_is_in_end_although_another_has_no_room() -> None:
    with gear.Table.create(
        {"x": gear.Column(torch.int64)}, max_steps=100, max_trajectories=3, block_steps=4
    ) as table:
        writers, other = table.writers(2, commit_every_step=True), table.writers(2)
        writers.append(x=np.array([0, 0]), active=[True, False])
        other.append(x=np.array([7, 7]))
        rows, done = np.array([1, 100]), [True, False]
        with pytest.raises(TableFullError):
            writers.append(x=rows, done=done)
        assert writers.appended.tolist() == [True, False]
        assert writers.num_steps.tolist() == [0, 0]
        other.discard()
        writers.append(x=rows, done=done, active=~writers.appended)
        writers.append(x=np.array([1000, 101]))
        assert sorted(table[int(i)]["x"].tolist() for i in table.indices()) == [[0, 1], [100, 101], [1000]]


@pytest.mark.parametrize("final", [None, {"x": torch.tensor(1)}])
def test_nothing_is_committed_without_a_step(final: Any) -> None:
    columns = {"x": gear.Column(torch.int64, final=True)}
    with (
        gear.Table.create(columns, max_steps=100, max_trajectories=3, block_steps=4) as table,
        table.writer(chunk_steps=6, overlap_steps=2) as writer,
    ):
        with pytest.raises(SchemaError, match="Nothing has been appended"):
            writer.commit(final=final)
        table.check_valid()
        writer.append(x=3)


def test_arrays_that_are_not_what_they_seem_are_looked_at_again() -> None:
    """Arrays of another dtype, shape, order or type, and other objects, are copied right or refused."""
    columns = {"x": gear.Column(torch.float32, (2, 3)), "n": gear.Column(torch.int64)}
    x, n = np.arange(24, dtype=np.float32).reshape(4, 2, 3), np.arange(4)
    same = {
        "in order": x,
        "by columns": np.asfortranarray(x),
        "every second": np.repeat(x, 2, axis=0)[::2],
        "a view": x.reshape(-1)[:24].reshape(4, 2, 3),
        "a tensor": torch.from_numpy(x),
        "a subclass": x.view(np.recarray),
        "its own dtype": x.view(np.dtype(np.float32, metadata={"unit": "m"})),
    }
    wrong = [
        x[:3],
        x[None],
        x.reshape(4, 3, 2),
        x.astype(np.float64),
        x.view(np.int32),
        x.astype(">f4"),
        3,
        None,
    ]
    with gear.Table.create(columns, max_steps=200, max_trajectories=20) as table:
        writer = table.writers(4)
        for value in same.values():
            writer.append(x=value, n=n)
        for value in wrong:
            with pytest.raises(SchemaError):
                writer.append(x=value, n=n)
        with pytest.raises(SchemaError, match="missing"):
            writer.append({"x": x, "m": n})
        for i, slot in enumerate(writer.commit().tolist()):
            assert table[slot]["x"].tolist() == [x[i].tolist()] * len(same)
            assert table[slot]["n"].tolist() == [i] * len(same)


@pytest.mark.parametrize("commit_every_step", [False, True])
def test_values_of_a_mapping_that_makes_them_stay_until_they_are_copied(commit_every_step: bool) -> None:
    """A mapping that is no dict, beside keywords: both are put into a dict that nobody else holds."""
    columns = {"obs": gear.Column(torch.float32, (1 << 10,)), "reward": gear.Column(torch.float32)}
    with gear.Table.create(columns, max_steps=256, max_trajectories=64) as table:
        writer = table.writers(64, commit_every_step=commit_every_step)
        for step in range(1, 4):
            made = types.MappingProxyType({"obs": np.full((64, 1 << 10), step, np.float32)})
            writer.append(made, reward=np.full(64, step, np.float32))
        writer.commit()
        for index in table.indices():
            row = table[int(index)]
            assert row["reward"].tolist() == [1, 2, 3]
            assert (row["obs"] == row["reward"][:, None]).all()


def test_no_lane_takes_what_others_need() -> None:
    """Half of the steps that the table holds, of 64 environments; a block has four times the share of each."""
    with gear.Table.create({"x": gear.Column(torch.int64)}, max_steps=1024, max_trajectories=64) as table:
        writer = table.writers(64)
        for step in range(8):
            writer.append(x=np.full(64, step))
        writer.commit()
        assert table.num_steps == 512
