"""`ReplayBuffer` with texts, bytes and arrays of any length, against a list of the transitions that were added."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from table_common import fresh_name

import gear_loader as gear
from gear_loader.errors import SchemaError, TableEmptyError


def transition(rng: np.random.Generator, step: int, ends: bool, before: Any) -> dict[str, Any]:
    def obs() -> dict[str, Any]:
        return {
            "text": "".join(map(chr, rng.integers(97, 123, rng.integers(0, 9)))) + str(rng.integers(10**9)),
            "tokens": rng.integers(0, 99, (rng.integers(0, 5), 2)).astype(np.int32),
            "speed": rng.normal(size=3).astype(np.float32),
        }

    return {
        "obs": obs() if before is None else before,
        "action": rng.bytes(int(rng.integers(0, 20))),
        "reward": float(step),
        "next_obs": obs(),
        "terminated": ends and bool(step % 2),
        "truncated": ends and not step % 2,
    }


def equal(one: Any, other: Any) -> bool:
    return all(
        one[name] == other[name] if name == "text" else np.array_equal(one[name], other[name]) for name in one
    )


def row(obs: Any, i: int) -> dict[str, Any]:
    """Observation i of a batch."""
    return {"text": obs["text"][i], "tokens": obs["tokens"][i].numpy(), "speed": obs["speed"][i].numpy()}


def check(batch: Any, known: dict[float, Any], drawable: set[float]) -> None:
    assert {float(reward) for reward in batch["reward"]} <= drawable
    for i, reward in enumerate(batch["reward"].tolist()):
        expected = known[reward]
        assert equal(row(batch["obs"], i), expected["obs"])
        assert equal(row(batch["next_obs"], i), expected["next_obs"])
        assert batch["action"][i] == expected["action"]
        assert batch["discount"][i] == (0 if expected["terminated"] else np.float32(0.9))


@pytest.mark.parametrize("envs", [1, 3])
def test_batches_have_what_was_added(envs: int, tmp_path: Any) -> None:
    rng, known, last = np.random.default_rng(envs), dict[float, Any](), [None] * envs
    options: dict[str, Any] = {
        "payload": "1MiB",
        "ragged": ("obs.tokens",),
        "device": "cpu",
        "batch_size": 64,
    }
    buffer = gear.ReplayBuffer(1000, gamma=0.9, **options)
    ended = [False] * envs
    for step in range(60):
        rows = []
        for env in range(envs):
            ends = bool(rng.random() < 0.2)
            before = None if ended[env] else last[env]
            if step == 30 and env == 0:
                before = (
                    None  # another observation than the one that followed: the episode before is truncated
                )
            rows.append(transition(rng, step * envs + env, ends, before))
            last[env], ended[env] = rows[-1]["next_obs"], ends
            known[rows[-1]["reward"]] = rows[-1]
        given: Any = rows[0]
        if envs > 1:
            given = {name: [each[name] for each in rows] for name in rows[0]}
            given |= {name: np.array(given[name]) for name in ("reward", "terminated", "truncated")}
            for name in ("obs", "next_obs"):
                obs = {part: [each[part] for each in given[name]] for part in ("text", "tokens", "speed")}
                given[name] = {**obs, "speed": np.stack(obs["speed"])}
        buffer.add(**given)
        if step == 0:
            if any(ended):
                continue
            with pytest.raises(TableEmptyError):
                buffer.sample(1)
    waiting = {float(59 * envs + env) for env in range(envs) if not ended[env]}
    drawable = {float(i) for i in range(60 * envs)} - waiting
    assert len(buffer) == len(drawable)
    seen = set[float]()
    for _ in range(40):
        batch = buffer.sample(64)
        check(batch, known, drawable)
        seen |= set(batch["reward"].tolist())
    assert seen == drawable
    buffer.save(tmp_path)
    again = gear.ReplayBuffer.load(tmp_path, gamma=0.9, device="cpu", batch_size=64)
    check(again.sample(), known, drawable)
    buffer.table.check_valid()


def test_spaces_tell_what_has_any_length() -> None:
    spaces = pytest.importorskip("gymnasium").spaces
    made = spaces.Dict({"text": spaces.Text(30), "set": spaces.Sequence(spaces.Box(-1, 1, (2,)), stack=True)})
    buffer = gear.ReplayBuffer(
        100,
        observation_space=made,
        action_space=spaces.Discrete(3),
        num_envs=2,
        payload="64KiB",
        device="cpu",
    )
    made.seed(0)
    for _ in range(3):
        obs, after = ([made.sample() for _ in range(2)] for _ in range(2))
        listed = [{name: [each[name] for each in part] for name in ("text", "set")} for part in (obs, after)]
        buffer.add(listed[0], np.array([0, 2]), np.zeros(2), listed[1], np.ones(2, bool), np.zeros(2, bool))
    batch = buffer.sample(50)
    assert after[0]["text"] in batch["next_obs"]["text"]
    assert isinstance(batch["obs"]["set"], gear.Ragged)
    assert len(buffer) == 6


def test_rows_that_are_a_reset_are_left_out() -> None:
    buffer = gear.ReplayBuffer(100, payload="64KiB", device="cpu")
    flags = {"truncated": np.zeros(2, bool)}
    buffer.add(["a", "b"], np.arange(2), np.ones(2), ["c", "d"], np.array([True, False]), **flags)
    buffer.add(["c", "d"], np.arange(2), np.array([0.0, 1]), ["e", "f"], np.zeros(2, bool), **flags)
    buffer.add(["e", "f"], np.arange(2), np.zeros(2), ["g", "h"], np.zeros(2, bool), **flags)
    batch = buffer.sample(200)
    pairs = set(zip(batch["obs"], batch["next_obs"], strict=True))
    assert pairs == {("a", "c"), ("b", "d"), ("d", "f")}  # of e and f the next row is not there
    buffer.add(
        ["g", "x"], np.arange(2), np.zeros(2), ["i", "y"], np.zeros(2, bool), **flags, active=[False, True]
    )
    batch = buffer.sample(200)
    assert set(zip(batch["obs"], batch["next_obs"], strict=True)) == pairs | {("f", "h")}


def test_old_episodes_leave_and_long_ones_are_cut() -> None:
    buffer = gear.ReplayBuffer(64, payload="16KiB", device="cpu")
    for step in range(500):
        buffer.add(f"{step}" * 20, step, 0.0, f"{step + 1}" * 20, False, False)
    assert 32 <= len(buffer) <= 64
    batch = buffer.sample(100)
    assert all(int(action) >= 400 for action in batch["action"])
    assert [text[: len(text) // 20] for text in batch["next_obs"]] == [
        str(int(a) + 1) for a in batch["action"]
    ]


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({"payload": "64KiB"}, {"obs": np.zeros(3)}, "no column of"),
        ({}, {"obs": "text"}, "payload="),
        ({"payload": "64KiB", "ragged": ("obs",)}, {"obs": 3.0}, r"array \[n, \.\.\.\]"),
        ({"ragged": ("obs",)}, None, "without payload"),
        ({"payload": "64KiB", "ragged": "obs"}, None, "names of columns"),
        ({"payload": "64KiB", "agents": ["a"]}, None, "of which each acts"),
    ],
)
def test_what_is_refused(options: dict[str, Any], given: Any, message: str) -> None:
    def make() -> None:
        buffer = gear.ReplayBuffer(100, device="cpu", **options)
        buffer.add(given["obs"], 0, 0.0, given["obs"], False, False)

    with pytest.raises(SchemaError, match=message):
        make()


def test_values_that_do_not_fit_add_nothing() -> None:
    buffer = gear.ReplayBuffer(100, payload="64KiB", ragged=("obs.tokens",), device="cpu")
    good = {"text": "a", "tokens": np.arange(3)}
    buffer.add(good, 0, 0.0, good, True, False)
    for bad in (
        {"text": 3},
        {"tokens": np.zeros((2, 2), int)},
        {"tokens": np.zeros(2)},
        {"text": "x" * 100_000},
    ):
        with pytest.raises(SchemaError):
            buffer.add({**good, **bad}, 0, 0.0, good, True, False)
        assert len(buffer) == 1
    given = {
        "action": np.zeros(2, int),
        "reward": np.zeros(2),
        "terminated": [True] * 2,
        "truncated": [False] * 2,
    }
    several = {**given, "obs": {name: [value] * 2 for name, value in good.items()}}
    with pytest.raises(SchemaError, match=r"have no \['next_obs'\]"):
        buffer.extend(several)
    with pytest.raises(SchemaError, match=r"have the lengths \[1, 2\]; expected the same length"):
        buffer.extend({**several, "next_obs": {name: [value] for name, value in good.items()}})
    assert len(buffer) == 1
    buffer.extend({**several, "next_obs": several["obs"]})
    assert len(buffer) == 3
    buffer.add(good, 0, 0.0, good, True, False)
    assert len(buffer) == 4
    buffer.table.check_valid()


KILLED = """
import os, sys, time
import gear_loader as gear

buffer = gear.ReplayBuffer(100, payload="64KiB", device="cpu", **{options!r})
for i in range(9):
    buffer.add(f"obs {{i}}", b"x" * i, float(i), f"obs {{i + 1}}", i == 5, False)
len(buffer)
time.sleep({seconds})
os.kill(os.getpid(), 9)
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["disk", "name"])
def test_another_process_goes_on(kind: str, tmp_path: Any) -> None:
    options = (
        {"disk": str(tmp_path / "disk")} if kind == "disk" else {"name": fresh_name(), "if_exists": "attach"}
    )
    code = KILLED.format(options=options, seconds=3 if kind == "disk" else 0)  # until it is written
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    buffer: Any = gear.ReplayBuffer(100, payload="64KiB", device="cpu", **options)
    buffer.add("obs 9", b"", 9.0, "obs 10", True, False)
    batch = buffer.sample(200)
    found = set(zip(batch["obs"], batch["next_obs"], batch["action"], strict=True))
    kept = [*range(8), 9]  # without the last transition of the episode that was running
    assert found == {(f"obs {i}", f"obs {i + 1}", b"x" * (i % 9)) for i in kept}
    buffer.table.check_valid()
    if kind == "name":
        buffer.table.unlink()


def test_a_value_that_memory_cannot_hold_is_refused_and_others_are_added() -> None:
    action = np.zeros(1, dtype=np.float32)
    buffer = gear.ReplayBuffer(100, payload="64KiB", batch_size=4, ragged=("action",))

    def add(obs: str, next_obs: str, *, terminated: bool = False, size: int = 1) -> None:
        values = {"obs": {"text": obs}, "next_obs": {"text": next_obs}, "action": action.repeat(size)}
        buffer.add(**values, reward=0.0, terminated=terminated, truncated=False)

    add("a", "b")
    for terminated in (False, True):
        with pytest.raises(SchemaError, match="Nothing was added"):
            add("b", "c" * 100_000, terminated=terminated)
        with pytest.raises(SchemaError, match="larger Memory payload"):
            add("b", "c", terminated=terminated, size=100_000)
    add("b", "c")
    assert len(buffer) == 1
    add("c", "d", terminated=True)
    add("e", "f", terminated=True)
    assert len(buffer) == 4
    batch = buffer.sample()
    pairs = zip(batch["obs"]["text"], batch["next_obs"]["text"], strict=True)
    assert set(pairs) <= {("a", "b"), ("b", "c"), ("c", "d"), ("e", "f")}
