"""n-step returns of a batch against a naive loop over the stored episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cuda_common import played_on_cpu

import gear_loader as gear
from gear_loader.collection.collector import TableSource, collector_for
from gear_loader.collection.n_step import OUTPUTS, Returns, n_step
from gear_loader.collection.windows import windows_of
from gear_loader.storage.selected_rows import SelectedRows
from gear_loader.transport.learner_options import options_from_json, options_to_json

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")


def naive(
    rewards: list[float], done: list[bool], anchor: int, n: int, gamma: float, final: bool
) -> tuple[float, float, int, bool]:
    """Return, discount, bootstrap step and whether there is a target."""
    counted = []
    for step in range(anchor, min(anchor + n, len(rewards))):
        counted.append(rewards[step])
        if done[step]:
            total = sum(gamma**i * reward for i, reward in enumerate(counted))
            return total, 0.0, anchor + len(counted), True
    if anchor + len(counted) >= len(rewards) + final:
        counted.pop()
    total = sum(gamma**i * reward for i, reward in enumerate(counted))
    return total, gamma ** len(counted), anchor + len(counted), bool(counted)


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("reward", [torch.float32, torch.float64, torch.int16, torch.bfloat16])
@pytest.mark.parametrize(("n", "gamma"), [(1, 0.99), (3, 0.5), (7, 1.0), (4, 0.0)])
def test_against_a_naive_loop(final: bool, reward: torch.dtype, n: int, gamma: float) -> None:
    shape = (1,) if n == 3 else ()  # TorchRL's rewards and ends have a dimension of their own
    schema = {
        "obs": gear.Column(torch.float32, (2,), final=final),
        "reward": gear.Column(reward, shape),
        "terminated": gear.Column(torch.bool, shape),
    }
    random = np.random.default_rng(n)
    stored: dict[int, tuple[list[float], list[bool], bool]] = {}
    with gear.Table.create(schema, max_steps=400, max_trajectories=40, block_steps=3) as table:
        for number in range(20):
            length, ends = int(random.integers(1, 12)), number % 2 == 0
            rewards = torch.from_numpy(random.integers(-4, 5, length)).to(reward)
            done = torch.zeros(length, dtype=torch.bool)
            done[-1] = ends
            rows = {"obs": torch.full((length, 2), float(number))}
            rows |= {"reward": rewards.view(length, *shape), "terminated": done.view(length, *shape)}
            last = {"obs": torch.full((2,), -float(number))} if final and number % 3 else None
            stored[table.add(rows, final=last)] = rewards.tolist(), done.tolist(), last is not None
        dataset = gear.ReplayDataset(
            table,
            batch_size=32,
            windows={
                "obs": gear.Window(1),
                "target": gear.NStep("reward", n, gamma, "terminated", next="obs"),
                "ahead": gear.Window(n + 1, column="obs"),
            },
            sampler=gear.Uniform(replacement=False, unit="step"),
            device="cpu",
            prefetch=1,
        )
        rows_seen = 0
        for batch in dataset:
            target: Any = batch["target"]
            assert set(batch) >= {"obs", "target", "mask"}
            assert not any(":" in key for key in batch)
            assert list(batch["mask"]) == ["obs", "ahead"]  # those of n steps are in "target"
            rows = range(len(batch["index"]))
            assert torch.equal(target["next"], batch["ahead"][rows, target["bootstrap"] - batch["anchor"]])
            for row, (slot, anchor) in enumerate(
                zip(batch["index"].tolist(), batch["anchor"].tolist(), strict=True)
            ):
                expected = naive(*stored[slot][:2], anchor, n, gamma, stored[slot][2])
                found = [target[key][row].item() for key in ("return", "discount", "bootstrap", "mask")]
                assert found == pytest.approx(list(expected), rel=1e-6), (slot, anchor)
                rows_seen += 1
        assert rows_seen == table.num_steps


@pytest.mark.parametrize("mover", ["gpu", "staged"])
@pytest.mark.parametrize("small", [True, False])
def test_a_gpu_gathers_one_observation_a_row(
    mover: str, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device plays on the CPU, with the kernels' twins."""
    if torch.cuda.is_available():
        pytest.skip("there is a real torch.cuda")
    schema = {
        "obs": gear.Column(torch.float32, (8 if small else 300,), final=True),
        "reward": gear.Column(torch.float64),
        "terminated": gear.Column(torch.bool),
    }
    spec = gear.NStep("reward", 3, 0.5, "terminated", next=("obs", "reward"))
    windows = {
        "obs": gear.Window(2, -1),
        "target": spec,
        "other": gear.NStep("reward", 2, 0.9, "terminated", "obs"),
    }
    rng = np.random.default_rng(0)
    with gear.Table.create(schema, max_steps=400, max_trajectories=40, block_steps=3) as table:
        for number in range(12):
            length = int(rng.integers(1, 12))
            done = torch.arange(length) == (length - 1 if number % 2 else -1)
            values = torch.from_numpy(rng.normal(size=(length + 1, schema["obs"].shape[0]))).float()
            rows = {
                "obs": values[:-1],
                "reward": torch.from_numpy(rng.normal(size=length)),
                "terminated": done,
            }
            table.add(rows, final={"obs": values[-1]} if number % 3 else None)
        steps, (extent, _) = table.indices(), table._engine.reader().index_arrays()
        slots = rng.choice(steps, 24).astype(np.int64)
        anchors = rng.integers(extent[slots, 0])
        chosen = SelectedRows(slots, anchors, table._engine.reader().slot_states()[1][slots])

        def gathered(device: str, zero_copy: bool) -> tuple[Any, Any]:
            plain = windows_of(table.schema, windows, None)
            options: dict[str, Any] = {"device": torch.device(device), "zero_copy": zero_copy}
            collector = collector_for(TableSource(table), plain, batch_size=24, **options)
            buffers = collector.buffers()
            for rows in (chosen.take(np.arange(24) < 7), chosen):
                collector.gather(buffers, rows)
            return dict(buffers.rows(24)), buffers

        expected = gathered("cpu", False)[0]
        for _ in played_on_cpu(monkeypatch):
            found, buffers = gathered("cuda:1", mover == "gpu")
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        if mover == "gpu":
            read = [
                each.out.shape[1] for each in buffers.outputs if each.column == "obs" and each.out is not None
            ]
            assert sorted(read) == [1, 1, 2]


@hypothesis.given(st.integers(0, 10**6), st.integers(1, 6))
def test_tensor_operations_are_the_loop(seed: int, n: int) -> None:
    """What a GPU computes; the compiled loop is compared with the naive one above."""
    random = np.random.default_rng(seed)
    count, gamma = 9, float(random.choice([0.0, 0.3, 0.99, 1.0]))
    left = random.integers(1, n + 3, count)  # steps from the anchor to the end
    steps = np.arange(n) < left[:, None]
    follows = np.arange(n + 1) < (left + random.integers(0, 2, count))[:, None]
    rewards = random.normal(size=(count, n)).astype(np.float32)
    done = steps & (random.random((count, n)) < 0.2)
    anchors = random.integers(0, 50, count)
    parts = [torch.from_numpy(part) for part in (rewards, done, steps, follows, anchors)]
    out = {name: torch.empty(count, dtype=dtype) for name, dtype in OUTPUTS.items()}
    ahead, ends = torch.arange(2 * count * (n + 1)).view(count, n + 1, 2), torch.empty(count, 2).long()
    windows = {"reward": parts[0], "done": parts[1], "next.obs": ahead}
    spec = gear.NStep("reward", n, gamma, "terminated", next="obs")
    Returns(spec, out, [ends], windows, *parts[2:4]).compute(parts[4])
    for found, expected in zip(n_step(*parts, gamma), out.values(), strict=True):
        torch.testing.assert_close(found, expected)
    for row, step in enumerate((out["bootstrap"] - parts[4]).tolist()):
        there = 0 <= step < n + 1 and follows[row, step]
        assert ends[row].tolist() == (ahead[row, step] * bool(there)).tolist()


def test_windows_around_the_bootstrap_step() -> None:
    """Stacks of frames, exact wherever the episode ends."""
    schema = {
        "frame": gear.Column(torch.float32, final=True),
        "reward": gear.Column(torch.float32),
        "terminated": gear.Column(torch.bool),
    }
    random, stored = np.random.default_rng(0), dict[int, list[float]]()
    stack = gear.Window(4, -3, pad="edge", column="frame")
    half = gear.Window(2, -2, every=2, pad="edge", column="frame", dtype=torch.float64, scale=0.5)
    windows = {
        "obs": stack,
        "target": gear.NStep("reward", 3, 0.9, "terminated", next={"obs": stack, "half": half}),
        "plain": gear.NStep("reward", 3, 0.9, "terminated", next="frame"),
    }
    with gear.Table.create(schema, max_steps=400, max_trajectories=40, block_steps=3) as table:
        for number in range(20):
            length, final = int(random.integers(1, 12)), number % 3 > 0
            frames = torch.arange(length + 1) + 100.0 * number
            done = torch.arange(length) == length - 1 if number % 2 else torch.zeros(length, dtype=torch.bool)
            rows = {"frame": frames[:length], "reward": torch.ones(length), "terminated": done}
            index = table.add(rows, final={"frame": frames[length]} if final else None)
            stored[index] = frames[: length + final].tolist()
        sampler = gear.Uniform(unit="step")
        batch = gear.ReplayDataset(
            table, batch_size=256, windows=windows, sampler=sampler, device="cpu"
        ).sample()
    target, plain = batch["target"], batch["plain"]
    assert torch.equal(target["return"], plain["return"])
    assert (target["next"]["half"].dtype, target["next"]["half"].shape) == (torch.float64, (256, 2))
    for row, (index, step) in enumerate(
        zip(batch["index"].tolist(), target["bootstrap"].tolist(), strict=True)
    ):
        frames, last = stored[index], len(stored[index]) - 1
        shown = [frames[min(max(step + offset, 0), last)] for offset in range(-3, 1)]
        assert target["next"]["obs"][row].tolist() == shown
        assert target["next"]["half"][row].tolist() == [shown[1] / 2, shown[3] / 2]
        assert step > last or plain["next"][row] == frames[step]
    assert options_from_json(options_to_json({"windows": windows})) == {"windows": windows}  # for a server


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n is 0"),
        ({"gamma": 1.5}, "gamma is 1.5"),
        ({"column": "none"}, r"Unknown: \['none'\]"),
        ({"done": "obs"}, r"'obs' .* has shape \[2\]"),
        ({"next": 1}, "next is 1"),
        ({"next": {"obs": 4}}, "next is .*; expected .* or a mapping of names to gear_loader.Window"),
        ({"next": {"none": gear.Window(4)}}, r"delivers \['none'\]; expected columns"),
        (
            {"next": {"obs": gear.Window(at=[0.0], timestamps="reward", tolerance=1.0)}},
            r"next has windows with timestamps, \['obs'\]",
        ),
        ({"next": ("obs", "none")}, r"delivers \['none'\]; expected columns"),
    ],
)
def test_invalid_options(options: dict[str, Any], message: str) -> None:
    schema = {"obs": gear.Column(torch.float32, (2,)), "reward": gear.Column(torch.float32)}
    with gear.Table.create(schema, max_steps=10, max_trajectories=2, block_steps=2) as table:
        given = {"column": "reward", "n": 2, "gamma": 0.9, "done": "reward", **options}
        with pytest.raises(gear.errors.SchemaError, match=message):
            gear.ReplayDataset(table, batch_size=2, windows={"target": gear.NStep(**given)}, device="cpu")
