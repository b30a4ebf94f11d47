"""A rank that fails, stops or goes another way gives all others an error that names it, within the deadline."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from distributed_common import filled, run_ranks
from options_common import nested
from test_global_selection import COUNTS, shards_of
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.distributed import Shards, liveness, shard_tables
from gear_loader.distributed.failures import attempt, collect, describe, run_on_all
from gear_loader.distributed.rank_exchange import Exchange
from gear_loader.distributed.rendezvous import StoreBarrier
from gear_loader.errors import RankError, SchemaError

TIMEOUT = 3.0
WINDOWS = gear.Window(2)


def error_of(act: Any) -> str:
    """The class and the text of the error; "" where there is none."""
    try:
        act()
    except gear.errors.GearError as error:
        return f"{type(error).__name__}: {error}"
    return ""


INSIDE = {  # moments inside Shards(): where it is killed, instead of this call
    "options": (shard_tables, "_check_table"),
    "places": (shard_tables, "places_of"),
    "listed": (liveness.Liveness, "_beat"),
    "joined": (StoreBarrier, "arrive"),
    "group": (torch.distributed, "new_group"),
    "introduced": (shard_tables, "Member"),
    "connected": (shard_tables.ShardTables, "_connect"),
}
STAGES = ("shards", *INSIDE, "dataset", "batch", "save", "rebalance")


def killed_rank(rank: int, world: int, stage: str, folder: str, parent: int) -> str:
    """The last rank is killed at this stage; the others' error."""

    def reached(now: str) -> None:
        if rank == world - 1 and now == stage:
            os.kill(os.getpid(), signal.SIGKILL)

    table = filled(f"gear-stages-{parent}-{rank}", rank, COUNTS)

    def work() -> None:
        reached("shards")
        if stage in INSIDE and rank == world - 1:
            assert hasattr(*INSIDE[stage])
            setattr(*INSIDE[stage], lambda *_, **__: reached(stage))
        shards = Shards(table, timeout=8.0)
        table.unlink()
        reached("dataset")
        data = gear.ReplayDataset(shards, batch_size=8, windows=WINDOWS, batches_per_epoch=5)
        reached("batch")
        next(iter(data))
        reached("save")
        gear.distributed.save(shards, folder)
        reached("rebalance")
        data.rebalance()

    try:
        return error_of(work)
    finally:
        with contextlib.suppress(gear.errors.RegionError):
            table.unlink()


def named_is_the_killed(answers: list[str], what: Any, *, at_once: bool) -> None:
    with contextlib.suppress(gear.errors.GearError):  # it was killed before it could
        gear.Table.attach(f"gear-stages-{os.getpid()}-3").unlink()
    for message in answers[:3]:
        assert "is alive" not in message, (what, message)
        assert not at_once or "was waited for" not in message, (what, message)
        # Where the machine is busy, ranks that have seen it and ended may be named beside it.
        assert re.match(r"RankError: Ranks? ([0-2], )*3 ", message), (what, message)


@pytest.mark.slow
@pytest.mark.parametrize("stage", mostly_long(STAGES, "options", "batch", sample=3))
def test_a_rank_that_is_killed_is_named_at_every_stage(stage: str, tmp_path: Path) -> None:
    answers = run_ranks(4, killed_rank, stage, str(tmp_path), os.getpid(), dies=(3,))
    named_is_the_killed(answers, stage, at_once=stage != "shards")  # of which nothing can be known before


def storm_rank(rank: int, world: int, delay: float, folder: str, parent: int) -> str:
    """All stages again and again, until the last rank is killed after so many seconds."""
    if rank == world - 1:
        threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    message = ""
    while not message:
        message = killed_rank(rank, world, "", folder, parent)
    return message


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_rank_that_is_killed_at_any_moment_is_named(tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    for delay in np.concatenate([random.uniform(0, 0.3, 12), random.uniform(0, 3, 8)]).tolist():
        answers = run_ranks(4, storm_rank, delay, str(tmp_path), os.getpid(), dies=(3,))
        named_is_the_killed(answers, delay, at_once=False)


def busy_rank(rank: int, world: int, port: int, folder: str) -> str:
    """Rank 2 is killed while rank 1 does something else, until rank 0, with the store, has ended."""
    Path(folder, f"connected-{rank}").touch()  # one that left earlier would break off the others' connecting
    wait_until(lambda: len(list(Path(folder).glob("connected-*"))) == world, "all ranks to connect")
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    Path(folder, str(rank)).write_text(str(os.getpid()))

    def work() -> None:
        with shards_of(rank, COUNTS, timeout=60) as shards:
            data = gear.ReplayDataset(shards, batch_size=8, windows=WINDOWS, batches_per_epoch=50, prefetch=0)
            for number, _ in enumerate(data):
                if number == 3 and rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                elif number == 3 and rank == 1:
                    holder = int(Path(folder, "0").read_text())
                    wait_until(lambda pid=holder: liveness._process(pid)[0] in ("", "Z"), "rank 0 to end")

    return error_of(work)


@pytest.mark.slow
def test_a_busy_rank_names_the_one_that_failed_after_the_others_have_ended(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for message in run_ranks(3, busy_rank, port, str(tmp_path), dies=(2,))[:2]:
        assert message.startswith("RankError: Rank 2 did not send"), message


def stopped_rank(rank: int, world: int, folder: str) -> str:
    """Rank 1 is stopped; the others' error, of which they leave a sign before they report it."""

    def work() -> None:
        with shards_of(rank, COUNTS, timeout=TIMEOUT) as shards:
            data = gear.ReplayDataset(shards, batch_size=8, windows=WINDOWS, batches_per_epoch=50, prefetch=0)
            for number, _ in enumerate(data):
                if rank == 1 and number == 3:
                    Path(folder, "pid").write_text(str(os.getpid()))
                    os.kill(os.getpid(), signal.SIGSTOP)

    message = error_of(work)
    Path(folder, f"failed-{rank}").touch()
    return message


@contextlib.contextmanager
def killed_after_the_others_have_failed(folder: Path) -> Iterator[None]:
    """Kill the stopped rank once the two others have had their error, or at the end."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.1) and len(list(folder.glob("failed-*"))) < 2:
            pass
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((folder / "pid").read_text()), signal.SIGKILL)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.long
def test_a_rank_that_is_stopped_is_named_while_it_is_still_there(tmp_path: Path) -> None:
    with killed_after_the_others_have_failed(tmp_path):
        answers = run_ranks(3, stopped_rank, str(tmp_path), dies=(1,))
    for message in (answers[0], answers[2]):
        assert message.startswith("RankError: Rank 1 "), message
        assert "was waited for" in message


def breaking_rank(rank: int, world: int, then: str, folder: str) -> str:
    """Rank 1 leaves its loop alone."""
    with shards_of(rank, COUNTS, timeout=TIMEOUT) as shards:
        data = gear.ReplayDataset(shards, batch_size=8, windows=WINDOWS, batches_per_epoch=9, prefetch=0)
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


# ---------------------------------------------------------------- ranks that differ or fail, one after another

DIFFERENT: dict[str, Any] = {
    "batch_size": 16,
    "seed": 4,
    "sampler": gear.Prioritized(alpha=0.7),
    "windows": gear.Window(3),
    "anchor": "first",
    "drop_last": True,
    "batches_per_epoch": 5,
    "subset": len,
    "scope": "local",
    "prefetch": 1,
    "keep": 3,
}


def meeting(rank: int, parent: int) -> list[str]:
    """Tables that do not fit together: private, with another schema, with another carrier, of the same shard."""
    name = f"gear-meeting-{parent}-{rank}"
    one = rank == 1
    found = [error_of(lambda: Shards(filled(None if one else name, rank, COUNTS), timeout=20))]
    other = {"x": gear.Column(torch.float32)}
    table = (
        gear.Table.create(other, name=name, max_steps=10, max_trajectories=2)
        if one
        else gear.Table.attach(name)
    )
    found.append(error_of(lambda: Shards(table, timeout=20)))
    table.unlink()
    table.close()
    table = filled(name, rank, COUNTS)
    found.append(error_of(lambda: Shards(table, timeout=20, transport="ucx" if one else "socket")))
    table.unlink()
    same = filled(name, 0, COUNTS)
    same.set_origin(7)
    found.append(error_of(lambda: Shards(same, timeout=20)))
    same.unlink()
    return found


def differing(rank: int) -> list[str]:
    one = rank == 1
    table = filled(f"gear-different-{os.getppid()}-{rank}", rank, COUNTS)
    mine: dict[str, Any] = {"timeout": 31.0, "on_failure": "redraw"} if one else {"timeout": 30.0}
    found = [error_of(lambda: Shards(table, **mine))]
    with Shards(table, timeout=30) as shards:
        table.unlink()
        same = {"batch_size": 8, "windows": WINDOWS, "seed": 3, "sampler": gear.Prioritized()}
        for name, value in DIFFERENT.items():
            options = {**same, name: value} if one else same
            found.append(error_of(lambda options=options: gear.ReplayDataset(shards, **nested(options))))
        assert len(next(iter(gear.ReplayDataset(shards, **nested(same))))["index"]) == 8
    return found


def closed(rank: int) -> str:
    """Rank 1 closes its table after some batches."""
    table = filled(f"gear-failing-{os.getppid()}-{rank}", rank, COUNTS)
    shards = Shards(table, timeout=TIMEOUT)
    table.unlink()

    def work() -> None:
        data = gear.ReplayDataset(shards, batch_size=8, windows=WINDOWS, batches_per_epoch=50, prefetch=0)
        for number, _ in enumerate(data):
            if rank == 1 and number == 3:
                table.close()

    return error_of(work)


def diverging(rank: int, world: int) -> list[str]:
    with shards_of(rank, COUNTS) as shards:
        exchange = shards.new_exchange()
        assert isinstance(exchange, Exchange)
        sizes = np.zeros(world, dtype=np.int64)
        nothing = np.zeros(0, dtype=np.uint8), sizes, sizes
        exchange._number += rank == 1
        found = [error_of(lambda: exchange.all_to_all(*nothing)) for _ in range(2)]  # for good
        # What one cannot do fails on all, who then go on together.
        other = shards.new_exchange()
        failure = ValueError("no disk") if rank == 1 else None
        with pytest.raises(ValueError if rank == 1 else gear.errors.RankError) as failed:
            other.all_to_all(*nothing, failure)
        assert len(other.all_to_all(*nothing)) == 0
    return [*found, str(failed.value)]


def other_calls(rank: int) -> list[str]:
    """Rank 1 calls another method first."""
    found = []
    calls: dict[str, Any] = {
        "length": len,
        "state": lambda data: data.state_dict(),
        "batch": lambda data: data.sample(),
    }
    for mine, others in (("state", "length"), ("batch", "state")):
        with shards_of(rank, COUNTS, timeout=20) as shards:
            data = gear.ReplayDataset(shards, batch_size=8, windows=WINDOWS, sampler=gear.Prioritized())
            found.append(error_of(lambda data=data, act=calls[mine if rank == 1 else others]: act(data)))
    return found


def empty_shard(rank: int) -> str:
    with shards_of(rank, [9, 0, 9], timeout=20) as shards:
        data = gear.ReplayDataset(shards, batch_size=8, windows=WINDOWS, ranks=gear.Ranks(scope="local"))
        return error_of(lambda: next(iter(data)))


def length_of_one(rank: int) -> int:
    """Rank 1 asks for the length that all have given."""
    with shards_of(rank, COUNTS, timeout=20) as shards:
        data = gear.ReplayDataset(shards, batch_size=8, windows=WINDOWS, batches_per_epoch=3)
        assert rank != 1 or len(data) == 3
        return sum(1 for _ in data)


def num_sockets() -> int:
    found = 0
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself
            found += stat.S_ISSOCK(os.fstat(int(file)).st_mode)
    return found


def sockets(rank: int) -> list[bool]:
    """Whether the sockets are as many as before a dataset, once it is deleted, or closed, or its Shards are."""

    def used() -> Any:
        data = gear.ReplayDataset(shards, batch_size=8, windows=WINDOWS, batches_per_epoch=9)
        batches = iter(data)
        next(batches)
        return data, batches

    first = num_sockets()
    with shards_of(rank, COUNTS, timeout=20) as shards:
        before = num_sockets()
        used()
        found = [num_sockets() == before]
        data, batches = used()
        found.append(num_sockets() > before)
        data.close()
        found += [num_sockets() == before, next(batches, None) is None]
        found.append(
            error_of(lambda: next(iter(data))).startswith("RankError: The exchange between the ranks was")
        )
        kept = used()
        # gloo gives up soon after the exchange does: until then the process cannot end.
        seconds = (
            kept[0]._origin._exchange._groups[0].group._get_backend(torch.device("cpu")).options._timeout
        )
        found.append(seconds.total_seconds() < 25)
    return [*found, num_sockets() == first]


def different_rank(rank: int, world: int, parent: int) -> dict[str, Any]:
    found: dict[str, Any] = {"sockets": sockets(rank), "length": length_of_one(rank)}
    found |= {"meeting": meeting(rank, parent), "different": differing(rank), "calls": other_calls(rank)}
    found |= {"diverging": diverging(rank, world), "closed": closed(rank), "empty": empty_shard(rank)}
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(3, different_rank, os.getpid())


def test_what_does_not_fit_together_is_refused_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    expected = "RankError: Rank 1 could not join: This rank's table is private"
    for rank, answer in enumerate(found["meeting"] for found in ranks):
        assert answer[0].startswith("PrivateTableError" if rank == 1 else expected)
        assert "expected the same in all tables of a pipeline stage" in answer[1]
        assert "has transport=" in answer[2]
        assert "are both shard 7" in answer[3]


def test_options_that_differ_between_ranks_are_named_on_all_of_them(ranks: list[dict[str, Any]]) -> None:
    answers = [found["different"] for found in ranks]
    assert answers[0] == answers[1] == answers[2]
    assert all(answer.startswith("SchemaError: ") for answer in answers[0])
    first, *rest = answers[0]
    assert first.endswith(
        "The ranks' Shards have different options: on_failure is raise on ranks 0, 2, and redraw on rank 1; timeout is "
        "30.0 on ranks 0, 2, and 31.0 on rank 1. Expected the same on all ranks."
    )
    shown = {"windows": "windows of pipeline stage 0", "scope": "scope"}
    for (name, value), message in zip(DIFFERENT.items(), rest, strict=True):
        assert f"ReplayDatasets have different options: {shown.get(name, name)} is " in message, name
        assert "on rank 1" in message
        assert "on ranks 0, 2" in message
        assert name in ("subset", "windows", "drop_last") or str(value) in message, message


def test_ranks_out_of_step_are_told_and_failures_of_one_are_shared(ranks: list[dict[str, Any]]) -> None:
    first, second = (found["diverging"] for found in ranks[:2])
    step = "RankError: Rank 1 is at exchange 1, this rank at 0: the ranks have drawn different numbers"
    assert step in first[0]
    assert "Rank 0 is at exchange 0, this rank at 1" in second[0]
    assert first[1] == first[0]
    assert first[2] == "Rank 1 could not do its part of a batch: ValueError: no disk"
    assert second[2] == "no disk"
    for rank, message in enumerate(found["closed"] for found in ranks):
        told = "RankError: Rank 1 could not do its part of a batch: TableClosedError"
        assert message.startswith("TableClosedError" if rank == 1 else told), message


def test_ranks_that_call_different_methods_are_told_which(ranks: list[dict[str, Any]]) -> None:
    begins, state = "begins an epoch, or asks for its length", "calls state_dict"
    for number, (one, others) in enumerate(((state, begins), ("draws a batch", state))):
        for found in ranks:
            message = found["calls"][number]
            assert re.match(
                r"RankError: Ranks? [012, ]+(\(this one\) )?did not send what it has: ", message
            ), message
            told = re.search(
                r" it ([^:]*), where rank ([012]) (.*): let all ranks call the same methods", message
            )
            assert told, message
            assert {told[1], told[3]} == {one, others}, message
            assert (told[3] == one) == (told[2] == "1"), message


def test_an_empty_shard_is_told_to_all_ranks_that_draw_from_their_own(ranks: list[dict[str, Any]]) -> None:
    told = "RankError: Rank 1 could not begin its epoch: "
    for rank, found in enumerate(ranks):
        assert found["empty"].startswith("TableEmptyError" if rank == 1 else told), found["empty"]


def test_one_rank_may_ask_for_a_length_that_is_given(ranks: list[dict[str, Any]]) -> None:
    assert [found["length"] for found in ranks] == [3, 3, 3]


def test_a_dataset_that_is_deleted_or_closed_leaves_no_sockets(ranks: list[dict[str, Any]]) -> None:
    assert [all(found["sockets"]) for found in ranks] == [True] * 3, repr(
        [found["sockets"] for found in ranks]
    )


# ---------------------------------------------------------------- the errors of all ranks


def test_answers_and_errors_of_all_ranks() -> None:
    assert run_on_all("count", lambda: {"n": 1}, lambda mine: [mine, {"n": 2}], [4, 7]) == [
        {"n": 1},
        {"n": 2},
    ]
    for others, message in (
        ([{"error": "no disk"}, {}], "Rank 7 could not count: no disk"),
        ([{"error": "a"}, {"error": "b"}], "Rank 7 could not count: a Rank 9 could not count: b"),
    ):
        with pytest.raises(RankError, match=f"^{re.escape(message)}$"):
            run_on_all("count", dict, lambda mine, others=others: [mine, *others], [4, 7, 9])


def test_an_own_error_is_shared_and_raised_as_it_is() -> None:
    shared = []

    def share(answer: dict[str, Any]) -> list[dict[str, Any]]:
        shared.append(answer)
        return [answer, {"error": "also"}]

    def act() -> dict[str, Any]:
        raise ValueError("bad")

    def gone(answer: dict[str, Any]) -> list[dict[str, Any]]:
        raise RankError("Rank 1 is gone.")

    with pytest.raises(ValueError, match=r"^bad$"):
        run_on_all("count", act, share, [0, 1])
    assert shared == [{"error": "ValueError: bad"}]
    with pytest.raises(RankError, match=r"^Rank 1 is gone\.$"):
        collect("count", dict, gone, [0, 1])
    with pytest.raises(ValueError, match=r"^bad$"):  # the failed collective does not hide it
        collect("count", act, gone, [0, 1])


def test_attempts_and_descriptions() -> None:
    assert attempt(lambda: 3, 0) == (3, None)
    value, error = attempt(lambda: 1 // 0, 5)
    assert value == 5
    assert isinstance(error, ZeroDivisionError)
    assert (describe(SchemaError("wrong")), describe(KeyError("x"))) == ("wrong", "KeyError: 'x'")


def test_waits_back_off_to_a_tenth_of_a_second_however_long_they_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(liveness.time, "sleep", slept.append)
    for turn in range(20_000):  # a wait of half an hour
        liveness.back_off(turn)
    assert slept == sorted(slept)
    assert slept[0] == 0.001
    assert slept[-1] == 0.1
