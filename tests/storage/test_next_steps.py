"""`VectorWriter.append(next=)`: the final step of a growing trajectory moves with it."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import gear_loader as gear
from gear_loader.errors import SchemaError

SCHEMA = {
    "obs": gear.Column(torch.int64, (2,), final=True),
    "flag": gear.Column(torch.uint8, final=True),
    "action": gear.Column(torch.int32),
}
WINDOWS = {
    "action": gear.Window(1, squeeze=True),
    "obs": gear.Window(1, squeeze=True),
    "next": gear.Window(1, 1, column="obs", squeeze=True),
    "flag": gear.Window(1, 1, column="flag", squeeze=True),
}


def observation(number: np.ndarray) -> np.ndarray:
    return np.stack((number, -number), -1)


def draws(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    return gear.ReplayDataset(
        table, batch_size=64, windows=WINDOWS, sampler=gear.Uniform(unit="step"), device="cpu",
        draws=gear.Draws(complete=True), **options,
    )  # fmt: skip


def check(batch: Any, truth: dict[int, tuple[int, int]]) -> set[int]:
    """Compare transitions with what was appended; return their numbers."""
    for action, obs, following, flag in zip(
        *(batch[name].tolist() for name in ("action", "obs", "next", "flag")), strict=True
    ):
        known = truth[action]
        assert (obs, following) == ([known[0], -known[0]], [known[1], -known[1]])
        assert flag == known[1] % 251
    return set(batch["action"].tolist())


TABLES: dict[str, dict[str, Any]] = {
    "ring": {"on_full": "evict_oldest"},
    "one by one": {"limits": gear.Limits(max_age=3600.0), "on_full": "evict_oldest"},
    "limited": {"rate_limiter": gear.MinSize(1), "on_full": "evict_oldest"},
    "per trajectory": {"on_full": "evict_oldest"},
}


@settings(max_examples=examples(12), deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([1, 2, 3, 16]),
    st.sampled_from(sorted(TABLES)),
    st.booleans(),
)
def test_every_transition_can_be_drawn_at_once(
    seed: int, n: int, block_steps: int, kind: str, compiled: bool
) -> None:
    choose = np.random.default_rng(seed)
    schema = dict(SCHEMA)
    if kind == "per trajectory":
        schema["episode"] = gear.Column(torch.int64, per="trajectory")
    steps = 24 * n
    with gear.Table.create(
        schema, max_steps=steps, max_trajectories=8 * n, block_steps=block_steps, **TABLES[kind]
    ) as table:
        table._engine.index.arrays.operate(compiled=compiled)
        writer, dataset = table.writers(n, commit_every_step=True), draws(table)
        if kind == "per trajectory":
            writer.trajectory = {"episode": np.arange(n)}
        truth: dict[int, tuple[int, int]] = {}
        obs, number, length = np.arange(n), n, np.zeros(n, dtype=int)
        for step in range(40):
            following = number + np.arange(n)
            number += n
            action = (step * n + np.arange(n)).astype(np.int32)
            active, done = choose.random(n) < 0.9, choose.random(n) < 0.15
            length += active
            done |= length == 24  # the longest that the table holds
            for i in np.flatnonzero(active):
                truth[int(action[i])] = int(obs[i]), int(following[i])
            out = writer.append(
                {"obs": observation(obs), "flag": (obs % 251).astype(np.uint8), "action": action},
                next={"obs": observation(following), "flag": (following % 251).astype(np.uint8)},
                done=done,
                active=active,
            )
            assert ((out >= 0) == (active & done)).all()
            table.check_valid()
            assert table.num_steps <= steps
            if len(truth):
                drawn = check(dataset.sample(), truth) | check(dataset.sample(), truth)
                assert drawn <= set(truth)
            if 0 < len(truth) <= 6:  # so that all are drawn
                assert drawn == set(truth)
            restarts = done | (choose.random(n) < 0.1)
            length[restarts & active] = 0
            obs = np.where(restarts & active, number + np.arange(n), np.where(active, following, obs))
            number += n


def test_readers_see_no_torn_next_while_a_trajectory_grows() -> None:
    truth = {step: (step, step + 1) for step in range(1 << 16)}
    with gear.Table.create(
        SCHEMA, max_steps=512, max_trajectories=8, block_steps=3, on_full="evict_oldest"
    ) as table:
        writer, dataset = table.writers(1, commit_every_step=True), draws(table, prefetch=0)
        stopped = threading.Event()

        def write() -> None:
            step = 0
            while not stopped.is_set() and step < 1 << 16:
                now, following = np.array([step]), np.array([step + 1])
                writer.append(
                    {
                        "obs": observation(now),
                        "flag": (now % 251).astype(np.uint8),
                        "action": now.astype(np.int32),
                    },
                    next={"obs": observation(following), "flag": (following % 251).astype(np.uint8)},
                    done=[step % 100 == 99],
                )
                step += 1

        thread = threading.Thread(target=write)
        thread.start()
        try:
            deadline = time.monotonic() + 1.5
            while not table.num_steps:
                time.sleep(0.001)
            newest = 0
            while time.monotonic() < deadline:
                newest = max(check(dataset.sample(), truth), default=0)
            assert newest > 100
        finally:
            stopped.set()
            thread.join()


def test_wrong_calls_change_nothing() -> None:
    row = {"obs": np.zeros((2, 2), np.int64), "flag": np.zeros(2, np.uint8), "action": np.zeros(2, np.int32)}
    following = {"obs": np.ones((2, 2), np.int64), "flag": np.zeros(2, np.uint8)}
    with gear.Table.create(SCHEMA, max_steps=64, max_trajectories=8, on_full="evict_oldest") as table:
        whole = table.writers(2)
        with pytest.raises(SchemaError, match="expected it with commit_every_step"):
            whole.append(row, next=following)
        writer = table.writers(2, commit_every_step=True)
        with pytest.raises(SchemaError, match="obs"):
            writer.append(row, next={"flag": following["flag"]})
        with pytest.raises(SchemaError, match="and final too"):
            writer.append(row, next=following, final=following)
        writer.append(row, next=following)
        with pytest.raises(SchemaError, match="next is missing"):
            writer.append(row)
        with pytest.raises(SchemaError, match="next is missing, and final too"):
            writer.commit(final=following)
        assert table.num_steps == 2
        assert len(writer.commit()) == 2
        writer.append(row, next=following)
        assert (len(table), table.num_steps) == (4, 4)
