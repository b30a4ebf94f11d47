"""`Table.gather`: rows that the caller chose, against the oracle."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from options_common import nested_table

import gear_loader as gear
from gear_loader.errors import SchemaError, StaleIndexError

SCHEMA = {
    "obs": gear.Column(torch.float32, (3,), final=True),
    "wide": gear.Column(torch.int16, (80,)),
    "reward": gear.Column(torch.float64),
    "done": gear.Column(torch.bool),
    "task": gear.Column(torch.int32, (2,), per="trajectory"),
}
LENGTHS = (1, 7, 20, 8, 33)
FINALS = (1, 4)


def trajectory(seed: int, length: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "obs": rng.standard_normal((length, 3), dtype=np.float32),
        "wide": rng.integers(-99, 99, (length, 80), dtype=np.int16),
        "reward": rng.standard_normal(length),
        "done": rng.random(length) < 0.2,
        "task": rng.integers(0, 9, 2, dtype=np.int32),
    }


TRAJECTORIES = [trajectory(seed, length) for seed, length in enumerate(LENGTHS)]
ENDS = {number: {"obs": np.full(3, number, dtype=np.float32)} for number in FINALS}


@pytest.fixture(params=[(8, "auto"), (5, False), (64, "auto")], ids=["records", "columns", "one block"])
def table(request: pytest.FixtureRequest) -> Iterator[gear.Table]:
    block_steps, packed = request.param
    sizes: dict[str, Any] = {"max_steps": 500, "max_trajectories": 20}
    with gear.Table.create(
        SCHEMA, **nested_table({**sizes, "block_steps": block_steps, "memory": gear.Memory(packed=packed)})
    ) as made:
        gone = made.add(trajectory(9, 3))  # so that slots are no numbers of trajectories
        for number, each in enumerate(TRAJECTORIES):
            made.add(each, final=ENDS.get(number))
        made.remove(gone)
        yield made


def drawn(count: int, seed: int = 0) -> tuple[list[oracle.Row], torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    rows = [oracle.Row(int(n), int(rng.integers(LENGTHS[n]))) for n in rng.integers(len(LENGTHS), size=count)]
    return (
        rows,
        torch.tensor([row.trajectory + 1 for row in rows]),
        torch.tensor([row.anchor for row in rows]),
    )


PADDED: list[dict[str, Any]] = [
    {name: gear.Window(4, -2, pad=pad) for name in ("obs", "wide", "reward", "done")} | {"task": None}
    for pad in ("keep", "head", "tail", "edge")
]
PADDED += [
    {name: gear.Window(1, squeeze=True) for name in ("obs", "reward")}
    | {"next": gear.Window(1, 1, column="obs", squeeze=True)},
    {"wide": gear.Window(40, -45), "obs": gear.Window(2, 0, dtype=torch.float64, scale=0.5), "task": None},
    {"wide": gear.Window(50, -20, pad="edge"), "done": gear.Window(3, 30, pad="edge")},
]


def check(found: dict[str, Any], expected: dict[str, Any], windows: dict[str, Any]) -> None:
    for name in windows:
        assert found[name].dtype == torch.from_numpy(expected[name]).dtype, name
        assert np.array_equal(found[name].numpy(), expected[name]), name
    for name, mask in expected.get("masks", {}).items():
        shown = found["mask"]
        assert np.array_equal((shown[name] if isinstance(shown, dict) else shown).numpy(), mask), name


@pytest.mark.parametrize("windows", PADDED)
@pytest.mark.parametrize("count", [0, 1, 5, 70])
def test_padded_rows(table: gear.Table, windows: dict[str, Any], count: int) -> None:
    rows, index, anchor = drawn(count)
    expected = oracle.batch(SCHEMA, TRAJECTORIES, rows, windows, finals=ENDS)
    found = table.gather(index, anchor, windows=windows)
    check(found, expected, windows)
    assert torch.equal(found["index"], index)
    assert torch.equal(found["anchor"], anchor)
    out = {name: torch.empty_like(found[name]).fill_(1) for name in windows}
    given = table.gather(index.numpy(), anchor.tolist(), windows=windows, out=out)
    check(given, expected, windows)
    assert all(given[name] is out[name] for name in windows)


@pytest.mark.parametrize(
    "windows",
    [
        dict.fromkeys(("obs", "wide", "reward", "done"), gear.Whole()) | {"task": None},
        {"obs": gear.Whole(final=True), "wide": gear.Whole(final=True)},
        {"half": gear.Whole(column="obs", dtype=torch.float64, scale=3.0), "task": None},
    ],
)
def test_whole_trajectories(table: gear.Table, windows: dict[str, Any]) -> None:
    rows, index, _ = drawn(9)
    expected = oracle.batch(SCHEMA, TRAJECTORIES, rows, windows, layout="packed", finals=ENDS)
    found = table.gather(index, windows=windows)
    check(found, expected, windows)
    assert found["max_seqlen"] == expected["max_seqlen"]
    for name in ("cu_seqlens", "position"):
        assert np.array_equal(found[name].numpy(), expected[name])
    out = {name: torch.empty_like(found[name]).fill_(1) for name in windows}
    given = table.gather(index, windows=windows, out=out)
    check(given, expected, windows)
    assert all(given[name].data_ptr() == out[name].data_ptr() for name in windows)


def test_all_columns_of_whole_trajectories_are_the_default(table: gear.Table) -> None:
    found = table.gather(table.indices())
    assert list(found["cu_seqlens"].diff()) == list(LENGTHS)
    assert torch.equal(found["reward"], torch.from_numpy(np.concatenate([t["reward"] for t in TRAJECTORIES])))


def test_returns_are_computed(table: gear.Table) -> None:
    rows, index, anchor = drawn(12)
    windows: dict[str, Any] = {"target": gear.NStep("reward", n=3, gamma=0.5, done="done")}
    windows["obs"] = gear.Window(1)
    target = table.gather(index, anchor, windows=windows)["target"]
    for i, row in enumerate(rows):
        each = TRAJECTORIES[row.trajectory]
        steps = range(row.anchor, min(row.anchor + 3, len(each["reward"])))
        ends = [step for step in steps if each["done"][step]]
        counted = [step for step in steps if not ends or step <= ends[0]]
        if not ends and counted[-1] + 1 == len(each["reward"]) and not target["mask"][i]:
            continue
        total = sum(each["reward"][step] * 0.5 ** (step - row.anchor) for step in counted)
        if target["bootstrap"][i] == row.anchor + len(counted):
            assert float(target["return"][i]) == pytest.approx(total, rel=1e-6)


def test_rows_that_are_gone_are_named_before_anything_is_written(table: gear.Table) -> None:
    window = {"obs": gear.Window(2)}
    out = {"obs": torch.full((3, 2, 3), 7.0)}
    for index, named in (([1, 0, 2], r"\[0\]"), ([1, 99, -1], r"\[-1, 99\]")):
        with pytest.raises(StaleIndexError, match=f"rows are stale, .* index {named}, the first in row 1"):
            table.gather(index, windows=window, out=out)
    assert (out["obs"] == 7).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"index": [[1]]}, r"index is \[\[1\]\]; expected integers \[n\]"),
        ({"index": [1.5]}, r"index is \[1.5\]; expected integers \[n\]"),
        ({"anchor": [0, 0]}, "anchor has 2 rows and index 1; expected as many of both"),
        ({"anchor": [7]}, r"1 of 1 anchors .* anchor\[0\], 7, of a trajectory of 7 steps"),
        ({"anchor": [-1]}, r"1 of 1 anchors .* anchor\[0\], -1, of a trajectory"),
        ({"anchor": [0], "windows": gear.Whole()}, "anchor is .* and the windows are whole trajectories"),
        ({"windows": {"other": gear.Window(1)}}, r"Unknown: \['other'\]"),
        ({"out": [1]}, r"out is \[1\]; expected a mapping of names to tensors"),
        ({"out": {}}, r"out has \[\]; expected a tensor for each window, \['obs'\]"),
        ({"out": {"obs": torch.empty(1, 2, 3), "more": torch.empty(1)}}, r"and for nothing else but mask"),
        ({"out": {"obs": torch.empty(1, 3, 3)}}, r"is float32 \[1, 3, 3\] on cpu; expected float32 \[1, 2, 3\]"),
        ({"out": {"obs": torch.empty(1, 2, 3, dtype=torch.int32)}}, r"is int32 \[1, 2, 3\] on cpu; expected float32"),
        ({"out": {"obs": torch.empty(1, 3, 2).mT}}, r"with strides \[6, 1, 2\]; expected a contiguous tensor"),
        ({"out": {"obs": torch.empty(1, 2, 3, device="meta")}}, "is meta tensor; expected a contiguous tensor"),
        ({"out": {"obs": torch.empty(1, 2, 3, requires_grad=True)}}, "that requires a gradient; expected"),
        ({"out": {"obs": torch.empty(1, 2, 3), "mask": torch.empty(1, 2)}}, r"out\['mask'\] is float32 .* bool \[1, 2"),
    ],
)  # fmt: skip
def test_errors(call: dict[str, Any], message: str) -> None:
    with gear.Table.create(SCHEMA, max_steps=99, max_trajectories=3) as table:
        table.add(trajectory(0, 7))
        arguments = {"index": [0], "windows": {"obs": gear.Window(2)}, **call}
        with pytest.raises(SchemaError, match=message):
            table.gather(**arguments)


def test_memory_that_overlaps_is_refused(table: gear.Table) -> None:
    memory = torch.zeros(20)
    out = {"obs": memory[:6].view(1, 2, 3), "other": memory[5:11].view(1, 2, 3)}
    windows = {"obs": gear.Window(2), "other": gear.Window(2, column="obs")}
    with pytest.raises(SchemaError, match=r"out\['obs'\] and out\['other'\] share memory"):
        table.gather([1], windows=windows, out=out)
    assert not memory.any()


def test_columns_that_are_not_filled_yet() -> None:
    schema = {"obs": gear.Column(torch.float32), "advantage": gear.Column(torch.float32, late=True)}
    with gear.Table.create(schema, max_steps=99, max_trajectories=3) as table:
        for _ in range(2):
            table.add({"obs": np.zeros(3, dtype=np.float32)})
        table.fill(0, advantage=np.ones(3, dtype=np.float32))
        assert table.gather([0, 0])["advantage"].tolist() == [1.0] * 6
        assert table.gather([1], windows={"obs": gear.Whole()})["obs"].tolist() == [0.0] * 3
        with pytest.raises(
            SchemaError, match=r"1 of 2 trajectories .* write-once columns \['advantage'\]; .* index\[1\], 1"
        ):
            table.gather([0, 1])


def test_trajectories_on_disk(tmp_path: Path) -> None:
    disk = gear.Disk(tmp_path / "table", sync_seconds=0.01, size="1MiB")
    sizes: dict[str, Any] = {
        "max_steps": 4000,
        "max_trajectories": 200,
        "block_steps": 8,
        "memory": gear.Memory(max_blocks=40),
    }
    with gear.Table.create(SCHEMA, **nested_table({**sizes, "disk": disk, "timeout": 30})) as table:
        many = [trajectory(seed, 20) for seed in range(40)]
        index = [table.add(each) for each in many]
        assert table._engine.num_spilled
        rows = [oracle.Row(number, number % 20) for number in range(40)]
        for windows in (*PADDED[:2], {"obs": gear.Whole(), "task": None}):
            packed = isinstance(windows["obs"], gear.Whole)
            expected = oracle.batch(SCHEMA, many, rows, windows, layout="packed" if packed else "padded")
            anchor = None if packed else [row.anchor for row in rows]
            check(table.gather(index, anchor, windows=windows), expected, windows)


def test_rows_are_whole_while_others_evict() -> None:
    schema = {"obs": gear.Column(torch.int64, (16,))}
    sizes: dict[str, Any] = {"max_steps": 400, "max_trajectories": 10, "block_steps": 4}
    with gear.Table.create(schema, **nested_table({**sizes, "on_full": "evict_oldest"})) as table:
        for number in range(10):
            table.add({"obs": np.full((30, 16), number)})
        stop, gathered = threading.Event(), 0

        def add() -> None:
            number = 10
            while not stop.is_set():
                table.add({"obs": np.full((30, 16), number)})
                number += 1

        writer = threading.Thread(target=add)
        writer.start()
        try:
            for _ in range(3000):
                try:
                    obs = table.gather(table.indices()[-5:], windows=gear.Window(30))["obs"]
                except StaleIndexError:
                    continue
                gathered += 1
                assert (obs == obs[:, :1, :1]).all()
        finally:
            stop.set()
            writer.join()
        assert gathered > 100


def test_threads_gather_different_windows_of_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one keeps for the next call is not what another is about to use."""
    with gear.Table.create({"x": gear.Column(torch.int64)}, max_steps=2000, max_trajectories=20) as made:
        rows = [made.add({"x": torch.arange(50)}) for _ in range(20)]
        inner: list[Any] = []
        real = torch.empty

        def between(*args: Any, **options: Any) -> torch.Tensor:
            if not inner:  # another thread's call, amid the first one
                inner.append(None)
                inner.append(made.gather(rows, windows=gear.Window(9)))
            return real(*args, **options)

        made.gather(rows, windows=gear.Window(3))
        monkeypatch.setattr(torch, "empty", between)
        batch = made.gather(rows, windows=gear.Window(3))
        assert batch["x"].shape == (20, 3)
        assert (batch["x"] == batch["anchor"][:, None] + torch.arange(3)).logical_or(~batch["mask"]).all()
        assert inner[1]["x"].shape == (20, 9)


def test_a_table_that_was_gathered_from_is_freed() -> None:
    made = gear.Table.create({"x": gear.Column(torch.float32)}, max_steps=99, max_trajectories=9)
    made.gather([made.add({"x": torch.arange(5.0)})], windows=gear.Window(2))
    dropped = weakref.ref(made)
    del made
    assert dropped() is None


def test_out_may_be_the_memory_of_the_index() -> None:
    with gear.Table.create({"x": gear.Column(torch.int64)}, max_steps=99, max_trajectories=9) as made:
        rows = [made.add({"x": torch.arange(5) + 7}) for _ in range(4)]
        index = torch.tensor(rows)
        batch = made.gather(index, [0] * 4, windows={"x": gear.Window(1, squeeze=True)}, out={"x": index})
        assert batch["index"].tolist() == rows
        assert index.tolist() == [7] * 4
