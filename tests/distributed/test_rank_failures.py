"""A rank that fails, stops or goes another way gives all others an error that names it, within the deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from distributed_common import filled, run_ranks
from test_global_selection import COUNTS, shards_of

import gear_loader as gear
from gear_loader.distributed import Shards
from gear_loader.distributed.collector import ShardCollector
from gear_loader.distributed.exchange import Exchange

TIMEOUT = 3.0


def broken_rank(rank: int, world: int, how: str) -> Any:
    table = filled(f"gear-failing-{os.getppid()}-{rank}", rank, COUNTS)
    shards = Shards(table, timeout=TIMEOUT)
    table.unlink()
    data = gear.ReplayDataset(shards, batch_size=8, windows=gear.Window(2), batches_per_epoch=50, prefetch=0)
    began = None
    try:
        for number, _ in enumerate(data):
            began = time.monotonic()
            if rank == 1 and number == 3:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif how == "stopped":
                    threading.Thread(target=_wake_up, args=(os.getpid(),), daemon=True).start()
                    os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    table.close()
        return "nothing happened", 0.0
    except gear.errors.GearError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - (began or 0)


def _wake_up(pid: int) -> None:
    """Nobody else does it, if this test fails."""
    time.sleep(30)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("how", mostly_long(["killed", "stopped", "closed"], "killed", "closed"))
def test_the_others_learn_who_it_was(how: str) -> None:
    gone = how in ("killed", "stopped")
    stopped = how == "stopped"  # those of this process alone can be found and killed
    with stopped_are_killed() if stopped else contextlib.nullcontext():
        method = "spawn" if stopped else "forkserver"
        answers = run_ranks(3, broken_rank, how, dies=(1,) if gone else (), method=method)
    for rank in (0, 2):
        message, seconds = answers[rank]
        assert message.startswith("RankError: Rank 1 "), message
        assert (
            seconds < TIMEOUT + 7
        )  # the deadline, and the time in which those that are left find each other
        if how == "stopped":
            assert "was waited for" in message
        if how == "closed":
            assert "could not do its part of a batch: TableClosedError" in message
    if how == "closed":
        assert answers[1][0].startswith("TableClosedError")


@contextlib.contextmanager
def stopped_are_killed() -> Any:
    """Kill this process's children once they have been stopped for longer than the others wait."""
    over = threading.Event()

    def look() -> None:
        stopped_at: dict[int, float] = {}
        while not over.wait(0.2):
            for pid in children():
                now = time.monotonic()
                if state_of(pid) == "T" and now - stopped_at.setdefault(pid, now) > TIMEOUT + 7:
                    os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def children() -> list[int]:
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def state_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


# ---------------------------------------------------------------- killed at any stage

SLACK = 30.0  # seconds beyond the deadline: this machine may be busy
STAGES = ("shards", "group", "dataset", "batch", "save", "rebalance")


def killed_rank(rank: int, world: int, stage: str, folder: str, parent: int) -> Any:
    """The last rank is killed at this stage; the others' error, and how long it took."""
    victim = rank == world - 1
    began = time.monotonic()

    def reached(now: str) -> None:
        nonlocal began
        began = time.monotonic()
        if victim and now == stage:
            os.kill(os.getpid(), signal.SIGKILL)

    table = filled(f"gear-stages-{parent}-{rank}", rank, COUNTS)
    try:
        reached("shards")
        if stage == "group" and victim:
            torch.distributed.new_group = lambda *_, **__: reached("group")
        shards = Shards(table, timeout=8.0)
        table.unlink()
        reached("dataset")
        data = gear.ReplayDataset(shards, batch_size=8, windows=gear.Window(2), batches_per_epoch=5)
        reached("batch")
        next(iter(data))
        reached("save")
        gear.distributed.save(shards, folder)
        reached("rebalance")
        data.rebalance()
        return "nothing happened", 0.0
    except gear.errors.GearError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    finally:
        with contextlib.suppress(gear.errors.RegionError):
            table.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("stage", mostly_long(STAGES, "batch"))
def test_a_rank_that_is_killed_is_named_at_every_stage(stage: str, tmp_path: Path) -> None:
    answers = run_ranks(4, killed_rank, stage, str(tmp_path), os.getpid(), dies=(3,))
    remove_table_of(3)
    for message, seconds in answers[:3]:
        assert message.startswith("RankError: Rank 3 "), message
        assert seconds < 8.0 + SLACK, message


def remove_table_of(rank: int) -> None:
    """That of a rank that was killed before it could."""
    with contextlib.suppress(gear.errors.GearError):
        gear.Table.attach(f"gear-stages-{os.getpid()}-{rank}").unlink()


def storm_rank(rank: int, world: int, delay: float, folder: str, parent: int) -> Any:
    if rank == world - 1:
        threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    while (answer := killed_rank(rank, world, "", folder, parent))[0] == "nothing happened":
        pass
    return answer


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_rank_that_is_killed_at_any_moment_is_named(tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    for delay in np.concatenate([random.uniform(0, 0.3, 12), random.uniform(0, 3, 8)]).tolist():
        answers = run_ranks(4, storm_rank, delay, str(tmp_path), os.getpid(), dies=(3,))
        remove_table_of(3)
        for message, seconds in answers[:3]:
            assert message.startswith("RankError: Rank 3 "), (delay, message)
            assert seconds < 8.0 + SLACK, (delay, message)


# ---------------------------------------------------------------- ranks that leave


def breaking_rank(rank: int, world: int, then: str, folder: str) -> str:
    """Rank 1 leaves its loop alone."""
    with shards_of(rank, COUNTS, timeout=TIMEOUT) as shards:
        data = gear.ReplayDataset(
            shards, batch_size=8, windows=gear.Window(2), batches_per_epoch=9, prefetch=0
        )
        try:
            for number, _ in enumerate(data):
                if rank == 1 and number == 3:
                    break
            if rank == 1 and then == "epoch":
                next(iter(data))
            elif rank == 1:
                while len(os.listdir(folder)) < world - 1:
                    time.sleep(0.05)
        except gear.errors.RankError as error:
            Path(folder, f"failed-{rank}").touch()
            return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("then", mostly_long(["sleeps", "epoch"], "epoch"))
def test_a_rank_that_leaves_its_loop_alone_is_named(then: str, tmp_path: Path) -> None:
    first, other, third = run_ranks(3, breaking_rank, then, str(tmp_path))
    for message in (first, third):
        assert message.startswith("Rank 1 did not send its part of a batch: was waited for"), message
        assert "has not drawn as many batches" in message
    assert other.startswith("" if then == "sleeps" else "Rank 1 (this one) did not send "), other


def leaving_rank(rank: int, world: int, parent: int) -> list[float]:
    """Rank 0 is through first, and ends; the others still read rows of its node."""
    table = filled(f"gear-leaving-{parent}-{rank}", rank, COUNTS)
    shards = Shards(table, node=f"node-{rank}", transport="socket", timeout=30)
    data = gear.ReplayDataset(shards, batch_size=16, windows=gear.Window(2), batches_per_epoch=4, prefetch=0)
    if rank:  # the last batch, and closing, come late
        gather = ShardCollector.gather

        def late(self: Any, *args: Any) -> Any:
            time.sleep(0.2)
            return gather(self, *args)

        ShardCollector.gather = late  # type: ignore[method-assign]
    rows = sum(len(batch["index"]) for batch in data)
    time.sleep(0.5 * rank)
    closing = time.monotonic()
    shards.close()
    table.unlink()
    return [rows, closing, time.monotonic(), data.num_lost]


@pytest.mark.slow
def test_the_first_to_leave_waits_for_the_others() -> None:
    answers = run_ranks(2, leaving_rank, os.getpid())
    assert [(answer[0], answer[3]) for answer in answers] == [(64, 0)] * 2
    assert all(closed >= answers[1][1] for _, _, closed, _ in answers)


# ---------------------------------------------------------------- ranks that differ


def different_rank(rank: int, world: int) -> list[str]:
    found = []

    def refused(call: Any) -> None:
        with pytest.raises(gear.errors.SchemaError) as caught:
            call()
        found.append(str(caught.value))

    one = rank == 1
    table = filled(f"gear-different-{os.getppid()}-{rank}", rank, COUNTS)
    refused(lambda: Shards(table, timeout=31.0 if one else 30.0, on_failure="redraw" if one else "raise"))
    with Shards(table, timeout=30) as shards:
        table.unlink()
        options = {"batch_size": 8, "windows": gear.Window(2), "seed": 3, "selector": gear.Prioritized()}
        for name, value in DIFFERENT.items():
            mine = {**options, name: value} if one else options
            refused(lambda mine=mine: gear.ReplayDataset(shards, **mine))
        assert len(next(iter(gear.ReplayDataset(shards, **options)))["index"]) == 8
    return found


DIFFERENT: dict[str, Any] = {
    "batch_size": 16,
    "seed": 4,
    "selector": gear.Prioritized(alpha=0.7),
    "windows": gear.Window(3),
    "anchor": "first",
    "drop_last": True,
    "batches_per_epoch": 5,
    "subset": len,
    "scope": "local",
    "prefetch": 1,
    "keep": 3,
}


def test_options_that_differ_between_ranks_are_named_on_all_of_them() -> None:
    answers = run_ranks(3, different_rank)
    assert answers[0] == answers[1] == answers[2]
    first, *rest = answers[0]
    assert first == (
        "The ranks' Shards have different options: on_failure is raise on ranks 0, 2, and redraw on rank 1; timeout is "
        "30.0 on ranks 0, 2, and 31.0 on rank 1. Expected the same on all ranks."
    )
    shown = {"windows": "windows of pipeline stage 0", "selector": "selector", "scope": "scope"}
    for (name, value), message in zip(DIFFERENT.items(), rest, strict=True):
        assert f"ReplayDatasets have different options: {shown.get(name, name)} is " in message, name
        assert "on rank 1" in message
        assert "on ranks 0, 2" in message
        assert name in ("subset", "windows", "drop_last") or str(value) in message, message


def diverging_rank(rank: int, world: int) -> list[str]:
    found = []
    with shards_of(rank, COUNTS) as shards:
        exchange = shards.new_exchange()
        assert isinstance(exchange, Exchange)
        empty = torch.zeros(0, dtype=torch.uint8).numpy()
        exchange._number += rank == 1
        with pytest.raises(gear.errors.RankError) as caught:
            exchange.all_to_all([empty] * world, [0] * world)
        found.append(str(caught.value))
        with pytest.raises(gear.errors.RankError) as caught:  # for good
            exchange.all_to_all([empty] * world, [0] * world)
        found.append(str(caught.value))
        # What one cannot do fails on all, who then go on together.
        other = shards.new_exchange()
        failure = ValueError("no disk") if rank == 1 else None
        with pytest.raises(ValueError if rank == 1 else gear.errors.RankError) as failed:
            other.all_to_all([empty] * world, [0] * world, failure)
        found.append(str(failed.value))
        assert [len(part) for part in other.all_to_all([empty] * world, [0] * world)] == [0] * world
    return found


def test_ranks_out_of_step_are_told_and_failures_of_one_are_shared() -> None:
    answers = run_ranks(2, diverging_rank)
    assert "Rank 1 is at exchange 1, this rank at 0: the ranks have drawn different numbers" in answers[0][0]
    assert "Rank 0 is at exchange 0, this rank at 1" in answers[1][0]
    assert answers[0][1] == answers[0][0]
    assert answers[0][2] == "Rank 1 could not do its part of a batch: ValueError: no disk"
    assert answers[1][2] == "no disk"


def meeting_rank(rank: int, world: int, parent: int) -> list[str]:
    found = []

    def refused(table: gear.Table, **options: Any) -> None:
        with pytest.raises(gear.errors.GearError) as caught:
            Shards(table, timeout=20, **options)
        found.append(f"{type(caught.value).__name__}: {caught.value}")

    name = f"gear-meeting-{parent}-{rank}"
    refused(filled(None if rank == 1 else name, rank, COUNTS))
    other = {"x": gear.Column(torch.float32)}
    table = (
        gear.Table.attach(name)
        if rank == 0
        else gear.Table.create(other, name=name, max_steps=10, max_trajectories=2)
    )
    refused(table)
    table.unlink()
    table.close()
    table = filled(name, rank, COUNTS)
    refused(table, transport=("socket", "ucx")[rank])
    table.unlink()
    same = filled(name, 0, COUNTS)
    same.set_origin(7)
    refused(same)
    same.unlink()
    return found


def test_what_does_not_fit_together_is_refused_on_all_ranks() -> None:
    answers = run_ranks(2, meeting_rank, os.getpid())
    assert answers[0][0].startswith("RankError: Rank 1 could not join: This rank's table is private")
    assert answers[1][0].startswith("PrivateTableError")
    for answer in answers:
        assert "expected the same in all tables of a pipeline stage" in answer[1]
        assert "has transport=" in answer[2]
        assert "are both shard 7" in answer[3]
