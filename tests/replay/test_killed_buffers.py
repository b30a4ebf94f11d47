"""Processes that add to a buffer are killed again and again; the next one goes on with what they left."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from table_common import fresh_name

import gear_loader as gear
from gear_loader.errors import SchemaError

CONTEXT = multiprocessing.get_context("forkserver")
GAMMA, ENVS, ROWS = 0.5, 2, 400
PATIENCE = 60.0
KINDS: dict[str, tuple[type[gear.ReplayBuffer], dict[str, Any]]] = {
    "steps": (gear.ReplayBuffer, {"n_step": 3, "gamma": GAMMA}),
    "goals": (
        gear.ReplayBuffer,
        {"hindsight": gear.Hindsight(lambda achieved, desired, info: achieved[:, 0] * 0 - 5)},
    ),
    "sequences": (gear.SequenceBuffer, {"length": 8, "burn_in": 2, "mutable": ("state",)}),
}


def buffer_of(kind: str, place: dict[str, Any]) -> gear.ReplayBuffer:
    made, options = KINDS[kind]
    return made(ROWS, device="cpu", **options, **place)


def ends(env: int, step: int) -> tuple[bool, bool]:
    """terminated, truncated: episodes of 7 and of 90 steps."""
    over = step % (7 if env == 0 else 90) == 5
    return over and step % 2 == 0, over and step % 2 == 1


def row(kind: str, step: int) -> tuple[Any, ...]:
    """What is added in step `step`. An observation is its number; those of the first environment are even."""

    def obs(at: int) -> Any:
        number = np.array([[2.0 * at], [2.0 * at + 1]], np.float32)
        return {"achieved_goal": number, "desired_goal": -number} if kind == "goals" else number

    flags = [np.array(each) for each in zip(*(ends(env, step) for env in range(ENVS)), strict=True)]
    return obs(step), np.full(ENVS, step), np.full(ENVS, 1.0, np.float32), obs(step + 1), *flags


def work(kind: str, place: dict[str, Any], first: int, log: str) -> None:
    """Add steps, and sample and set; note in the file `log` how many were added."""
    done = np.memmap(log, np.int64, "r+")
    buffer, chance = buffer_of(kind, place), random.Random(first)
    for step in range(first, 1 << 20):
        more = {"state": np.full(ENVS, 0.0, np.float32)} if kind == "sequences" else {}
        buffer.add(*row(kind, step), **more)
        assert buffer.table is not None  # from here on no row waits
        done[0] = step + 1
        if step > first + 100 and chance.random() < 0.3:
            batch = buffer.sample(16)
            if isinstance(buffer, gear.SequenceBuffer):
                number = batch["obs"][:, 0, 0]
                buffer.set(batch, state=number[:, None].expand(-1, 8).contiguous())


def checked(kind: str, buffer: gear.ReplayBuffer, starts: set[int]) -> set[tuple[int, int]]:
    """Every stored transition is what was added; return (environment, step) of each.

    Args:
        starts: steps with which processes have begun, so that episodes were cut there.
    """
    table, found = buffer.table, set()
    assert table is not None
    table.check_valid()
    name = "obs.achieved_goal" if kind == "goals" else "obs"
    for index in table.indices().tolist():
        episode, final = table[index], table.final(index)
        assert final is not None
        numbers = episode[name][:, 0].long()
        env = int(numbers[0] % 2)
        steps = numbers // 2
        assert torch.equal(steps, steps[0] + torch.arange(len(steps)))
        assert torch.equal(numbers % 2, torch.full_like(numbers, env))
        assert torch.equal(episode["action"].long(), steps)
        assert int(final[name][0]) == 2 * (int(steps[-1]) + 1) + env
        assert episode["terminated"].tolist() == [ends(env, step)[0] for step in steps.tolist()]
        assert not any(any(ends(env, step)) for step in steps[:-1].tolist())
        if kind == "sequences":
            first = [step == 0 or any(ends(env, step - 1)) or step in starts for step in steps.tolist()]
            assert episode["is_first"].tolist() == first
            states = episode["state"]
            # Set as one change: all steps of a sequence, or those of a later one that overlaps.
            assert ((states == 0) | ((states % 2 == env) & (states // 2 <= steps))).all()
        if kind == "goals" and not any(ends(env, int(steps[-1]))):
            pytest.fail("an episode can be drawn that has not ended")
        found |= {(env, step) for step in steps.tolist()}
    return found


def check_batch(kind: str, batch: Any) -> None:
    """Returns stop where episodes were cut, with the observation to bootstrap from."""
    if kind != "steps":
        return
    for number, following, reward, discount in zip(
        batch["obs"][:, 0].tolist(),
        batch["next_obs"][:, 0].tolist(),
        batch["reward"].tolist(),
        batch["discount"].tolist(),
        strict=True,
    ):
        env, step = int(number) % 2, int(number) // 2
        count = (int(following) - int(number)) // 2
        assert 1 <= count <= 3
        assert reward == sum(GAMMA**i for i in range(count))
        last = ends(env, step + count - 1)
        assert discount == (0 if last[0] else GAMMA**count)
        assert not any(any(ends(env, step + i)) for i in range(count - 1))


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "where"),
    [("steps", "name"), ("goals", "name"), ("sequences", "name"), ("steps", "disk"), ("goals", "disk"),
     ("steps", "both")],
)  # fmt: skip
def test_the_next_process_goes_on(tmp_path: Path, kind: str, where: str) -> None:
    place: dict[str, Any] = {}
    if where != "disk":
        place |= {"name": fresh_name(), "if_exists": "attach"}
    if where != "name":
        place["disk"] = gear.Disk(tmp_path / "disk", sync_seconds=0.01)
    log = tmp_path / "log"
    np.zeros(1, np.int64).tofile(log)
    done, chance = np.memmap(log, np.int64, "r"), random.Random(0)
    starts: set[int] = {0}
    table: gear.Table | None = None
    try:
        for turn in range(8):
            first = int(done[0])
            starts.add(first)
            process = CONTEXT.Process(target=work, args=(kind, place, first, str(log)), daemon=True)
            process.start()
            deadline, wanted = (
                time.monotonic() + PATIENCE,
                first + int(chance.random() * 300) * (turn % 3 > 0),
            )
            while done[0] < wanted or (turn == 0 and not done[0]):
                assert process.is_alive()
                assert time.monotonic() < deadline
            time.sleep(chance.random() * 0.01)
            os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
            process.join(PATIENCE)
            count = int(done[0])
            if not count or (where == "disk" and not place["disk"].exists()):
                continue
            # One step more: it tells the columns, and begins other episodes.
            buffer = buffer_of(kind, place)
            more = {"state": np.zeros(ENVS, np.float32)} if kind == "sequences" else {}
            buffer.add(*row(kind, count + 1), **more)
            starts.add(count + 1)
            table = buffer.table
            assert table is not None
            found = checked(kind, buffer, starts)
            for env in range(ENVS):
                mine = {step for other, step in found if other == env}
                added = set(range(count)) & mine
                if where != "disk" and kind != "goals" and count > 150:
                    assert max(added) == count - 1
                    assert len(added) > 50
            if len(buffer):
                check_batch(kind, buffer.sample(64))
                buffer.save(tmp_path / "saved")
                again = type(buffer).load(tmp_path / "saved", **KINDS[kind][1], device="cpu")
                again.load_state_dict(buffer.state_dict())
                assert torch.equal(again.sample(9)["action"], buffer.sample(9)["action"])
            table.close()
            np.memmap(log, np.int64, "r+")[0] = count + 2
    finally:
        if "name" in place and table is not None:
            gear.Table.attach(place["name"]).unlink()


def test_a_process_that_had_only_created_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was killed before it described the buffer; another buffer begins there, of the same columns only."""
    place = {"disk": gear.Disk(tmp_path / "disk")}
    with monkeypatch.context() as patch:
        patch.setattr(gear.ReplayBuffer, "_describe", lambda *_: None)
        obs = np.zeros((2, 1))
        values = {"obs": obs, "action": np.zeros(2)}
        buffer_of("steps", place)._begin(values, 2, False, obs, (None, None, None))
    gc.collect()  # which ends the writing
    with pytest.raises(
        SchemaError, match=r"expected \['obs', 'action', 'reward', 'terminated'\], as of the table"
    ):
        buffer_of("steps", place).add(*row("goals", 0))
    buffer = buffer_of("steps", place)
    buffer.add(*row("steps", 0)[:1], np.zeros(2, np.float32), *row("steps", 0)[2:])
    assert buffer.table is not None
    assert len(buffer) == 2
    buffer.table.close()
    again = buffer_of("steps", place)
    assert len(again) == 2


def test_options_about_what_exists() -> None:
    for options, message in (
        ({"if_exists": "attach"}, "if_exists is 'attach' without a name"),
        ({"if_exists": "other", "name": fresh_name()}, "if_exists is 'other'; expected"),
    ):
        with pytest.raises(SchemaError, match=message):
            gear.ReplayBuffer(10, **options)  # type: ignore[arg-type]
