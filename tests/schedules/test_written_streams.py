"""Streams written from a GPU under adversarial schedules: what is visible has arrived, and is what was appended."""

from __future__ import annotations

import gc
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import amounts, mostly_long
from streams.cuda import Cuda
from streams.machine import Policy

import gear_loader as gear
from gear_loader.errors import GpuError, SchemaError, TableFullError
from gear_loader.kernels import append
from gear_loader.storage import device_episodes

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real torch.cuda")
DEVICE = torch.device("cuda", 1)
POLICIES: list[Any] = mostly_long(["random", "latest", "eager"], "random", "latest")
SCHEMA = {
    "obs": gear.Column(torch.float32, (5,), final=True),
    "image": gear.Column(torch.uint8, (9, 15)),
    "action": gear.Column(torch.bfloat16, (3,)),
    "number": gear.Column(torch.int64),
    "done": gear.Column(torch.bool),
}


class Streams:
    """What n environments have done: `rows[t]` has step t of each, on the host."""

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.random, self.rows = n, np.random.default_rng(seed), list[dict[str, torch.Tensor]]()

    def step(self) -> dict[str, torch.Tensor]:
        n, t = self.n, len(self.rows)
        self.rows.append(
            {
                "obs": torch.from_numpy(self.random.random((n, 5), dtype=np.float32)),
                "image": torch.from_numpy(self.random.integers(0, 256, (n, 9, 15), dtype=np.uint8)),
                "action": torch.from_numpy(self.random.random((n, 3), dtype=np.float32)).bfloat16(),
                "number": torch.arange(n) + 1000 * t,
                "done": torch.from_numpy(self.random.random(n) < 0.2),
            }
        )
        return self.rows[-1]

    def final(self) -> torch.Tensor:
        """The observation after the last step."""
        return self.rows[-1]["obs"] + 1

    def check(self, table: gear.Table, chunk: int) -> None:
        """Compare all trajectories of the table with what was appended."""
        for index in table.indices().tolist():
            found, final = table[index], table.final(index)
            t, env = divmod(int(found["number"][0]), 1000)
            steps = len(found["number"])
            for name in SCHEMA:
                expected = torch.stack([row[name][env] for row in self.rows[t : t + steps]])
                assert torch.equal(found[name], expected), (name, t, env)
            assert (final is None) is (steps < chunk)  # what `commit` has cut
            if final is not None:
                assert torch.equal(final["obs"], self.rows[t + steps - 1]["obs"][env] + 1)


def home(seed: int, cuda: Cuda) -> dict[str, Any]:
    """Options of a table that lies, with each fourth seed, in the memory of the device, or there and in host memory."""
    if seed % 4 == 3 and not cuda.refuse_pinning:
        return {"device": DEVICE, "host": "1MiB"}
    return {"device": DEVICE} if seed % 4 == 1 else {}


def on_device(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: values.to(DEVICE, non_blocking=True) for name, values in rows.items()}


def play(seed: int, policy: Policy) -> Cuda:
    """A run that a seed chooses."""
    choose = random.Random(f"device writer {seed}")
    n, chunk, calls = choose.choice([1, 3, 6]), choose.choice([1, 3, 4, 7]), choose.choice([9, 20])
    cuda = Cuda(seed, policy)
    cuda.refuse_pinning = seed % 3 == 2
    evicts, several = choose.random() < 0.6, choose.random() < 0.3
    chunks = 2 * n + (choose.choice([1, n]) if evicts else n * (calls // chunk + 3))
    streams = Streams(n, seed)
    with cuda.installed():
        size, where = choose.choice([1, 3, 4]), home(seed, cuda)
        here = 2 * n + 1 if "host" in where else chunks
        memory = gear.Memory(packed=choose.choice([True, False]), max_blocks=here * -(-(chunk + 1) // size))
        table = gear.Table.create(
            SCHEMA, max_steps=chunks * (chunk + 1), max_trajectories=chunks, block_steps=size, memory=memory,
            on_full="evict_oldest" if evicts else "error", **where,
        )  # fmt: skip
        side = torch.cuda.Stream(DEVICE)
        with table, torch.cuda.device(DEVICE):
            writer: Any = table.writers(n, chunk_steps=chunk, device=DEVICE)
            done = 0
            for _ in range(calls):
                elsewhere = choose.random() < 0.4
                with torch.cuda.stream(side if elsewhere else torch.cuda.default_stream(DEVICE)):
                    if several and writer.num_steps + 2 <= chunk:
                        pair = [streams.step(), streams.step()]
                        rows = {name: torch.stack([each[name] for each in pair], 1) for name in SCHEMA}
                        append = writer.extend
                    else:
                        rows, append = streams.step(), writer.append
                    given = on_device(rows)
                    whole = writer.num_steps + rows["obs"].ndim - 1 == chunk
                    done += append(given, final=on_device({"obs": streams.final()}) if whole else None)
                    for values in given.values():
                        values.fill_(0)
                    del given
                if not evicts:
                    assert len(table) == done == writer.committed
                streams.check(table, chunk)
            if choose.random() < 0.4:
                del writer, append
                gc.collect()
                writer = table.writers(n, chunk_steps=chunk, device=DEVICE)
                streams.check(table, chunk)
            else:
                done += writer.commit()
                assert evicts or len(table) == done
                streams.check(table, chunk)
            writer.close()
    cuda.check()
    return cuda


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seeds", amounts(range(3), range(3, 15), range(15, 120)))
def test_what_is_visible_has_arrived(seeds: range, policy: Policy) -> None:
    counts = [play(seed, policy).machine.counts for seed in seeds]
    assert sum(each["store"] for each in counts) > 0
    assert sum(each["copy to the host"] for each in counts) > 0  # memory that cannot be pinned


@pytest.mark.parametrize("episodes", [False, True])
def test_no_step_waits_for_the_device(episodes: bool) -> None:
    cuda, streams = Cuda(0, "eager"), Streams(4, 0)
    with (
        cuda.installed(),
        torch.cuda.device(DEVICE),
        gear.Table.create(SCHEMA, max_steps=800, max_trajectories=100, block_steps=4) as table,
    ):
        writer = table.writers(4, device=DEVICE, **({} if episodes else {"chunk_steps": 5}))
        rows = [on_device(streams.step()) for _ in range(20)]
        finals = on_device({"obs": streams.final()})
        before = dict(cuda.machine.counts)
        for row in rows:
            writer.append({**row}, final=finals, **({"done": row["done"]} if episodes else {}))
        counts = cuda.machine.counts
        made = {name: counts[name] - before.get(name, 0) for name in counts}
        assert not any(count for name, count in made.items() if "synchronize" in name), made
        # One launch for all columns of a step; of a chunk that is full the record, and the image.
        assert (made.get("append", 0), made.get("store", 0)) == ((20, 0) if episodes else (0, 4 * 2))
        writer.close()
    cuda.check()


def test_captures_and_what_does_not_fit() -> None:
    cuda, streams = Cuda(0, "latest"), Streams(2, 0)
    with (
        cuda.installed(),
        torch.cuda.device(DEVICE),
        gear.Table.create(SCHEMA, max_steps=80, max_trajectories=20, block_steps=4) as table,
    ):
        writer = table.writers(2, chunk_steps=5, device=DEVICE)
        row = on_device(streams.step())
        with (
            pytest.raises(GpuError, match="capturing a CUDA graph"),
            cuda.capturing(cuda.current_stream(DEVICE)),
        ):
            writer.append(row)
        for wrong, expected in (
            ({**row, "obs": streams.rows[0]["obs"]}, "'obs' .* on cpu; expected .* on cuda:1"),
            (
                {**row, "done": row["number"]},
                r"'done' .* torch.int64 .*expected a tensor of torch.bool \[2\]",
            ),
            ({**row, "number": row["number"][:1]}, r"'number' .*\[1\] on"),
            ({k: v for k, v in row.items() if k != "obs"}, "have the columns .*expected"),
            ({**row, "done": [True, False]}, "'done' of the rows is .*expected a tensor"),
        ):
            with pytest.raises(SchemaError, match=expected):
                writer.append(wrong)
        assert writer.num_steps == 0
        writer.append(row)
        assert writer.num_steps == 1
        writer.close()
        writer.close()
        with pytest.raises(gear.errors.GearError, match="is closed"):
            writer.append(row)
        assert len(table) == 0
    cuda.check()


# ---------------------------------------------------------------- episodes


def play_episodes(seed: int, policy: Policy) -> Cuda:
    """Trajectories that a mask on the device ends: all are visible whole, and in the end those of a vector writer."""
    choose = random.Random(f"episodes {seed}")
    n, calls = choose.choice([1, 3, 5]), choose.choice([8, 25])
    cuda = Cuda(seed, policy)
    cuda.refuse_pinning = seed % 5 == 4
    streams, share, commits = Streams(n, seed), choose.choice([0.1, 0.4, 1.0]), choose.random() < 0.3
    evicts = choose.random() < 0.5
    trajectories = 3 * n + (choose.choice([1, n]) if evicts else n * calls)
    options: Any = {"max_trajectories": trajectories, "block_steps": choose.choice([1, 3, 4])}
    where, blocks = home(seed, cuda), 4 * trajectories + 2 * n * calls
    options["memory"] = gear.Memory(packed=choose.choice([True, False]), max_blocks=blocks)
    open_blocks = n * (12 + (calls if share < 1 else 0))
    more = {"memory": gear.Memory(max_blocks=open_blocks)} if "host" in where else {}
    options["on_full"] = "evict_oldest" if evicts else "error"
    masks = np.random.default_rng(seed).random((calls, n)) < share
    with (
        gear.Table.create(
            SCHEMA, max_steps=40 * n * calls, **{**options, "max_trajectories": n * calls}
        ) as plain,
        cuda.installed(),
        gear.Table.create(SCHEMA, max_steps=40 * n * calls, **{**options, **more}, **where) as table,
    ):
        side = torch.cuda.Stream(DEVICE)
        with torch.cuda.device(DEVICE):
            writer: Any = table.writers(n, device=DEVICE)
            expected = plain.writers(n)
            for t in range(calls):
                elsewhere = choose.random() < 0.4
                with torch.cuda.stream(side if elsewhere else torch.cuda.default_stream(DEVICE)):
                    rows, finals = streams.step(), {"obs": streams.final()}
                    given, after = on_device(rows), on_device(finals)
                    done = torch.from_numpy(masks[t]).to(DEVICE, non_blocking=True)
                    writer.append(given, done=done, final=after, priority=1.0 + t)
                    for values in (*given.values(), *after.values(), done):
                        values.fill_(0)
                    del given, after, done
                expected.append(rows, done=masks[t], final=finals, priority=1.0 + t)
                assert writer.num_steps <= 3
                same_as(table, plain, whole=False)
                if commits and t == calls // 2:
                    writer.commit()
                    expected.commit()
                    same_as(table, plain, whole=True)
            if choose.random() < 0.3:
                del writer
                gc.collect()
                writer = table.writers(n, device=DEVICE)
                same_as(table, plain, whole=False)
            else:
                writer.commit()
                expected.commit()
                same_as(table, plain, whole=True)
            writer.close()
    cuda.check()
    return cuda


def same_as(table: gear.Table, plain: gear.Table, *, whole: bool) -> None:
    """The trajectories of a table are some consecutive ones of another; with `whole`, the last of them."""
    numbers = [tuple(plain[index]["number"].tolist()) for index in plain.indices().tolist()]
    order = plain.indices().tolist()
    found = table.indices().tolist()
    assert not whole or found or not order
    if not found:
        return
    first = numbers.index(tuple(table[found[0]]["number"].tolist()))
    assert not whole or first + len(found) == len(order)
    for one, other in zip(found, order[first : first + len(found)], strict=True):
        for name, values in plain[other].items():
            assert torch.equal(table[one][name], values), name
        last, wanted = table.final(one), plain.final(other)
        assert (last is None) == (wanted is None)
        assert last is None or wanted is None or torch.equal(last["obs"], wanted["obs"])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seeds", amounts(range(3), range(3, 10), range(10, 50)))
def test_episodes_are_visible_when_they_have_arrived(seeds: range, policy: Policy) -> None:
    counts = [play_episodes(seed, policy).machine.counts for seed in seeds]
    assert sum(each["append"] for each in counts) > 0
    assert sum(each["copy to the host"] for each in counts) > 0  # memory that cannot be pinned


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("below", mostly_long(["disk", "both", "host"], "disk", "both"))
@pytest.mark.parametrize("episodes", [False, True])
def test_what_does_not_fit_into_the_device_goes_below(
    episodes: bool, below: str, policy: Policy, tmp_path: Path
) -> None:
    """Four times the memory is written. A step waits only for blocks, which are freed when their steps are on disk, or
    have been copied to host memory."""
    n, calls, seed = 3, 48, 5
    cuda, streams = Cuda(seed, policy), Streams(n, seed)
    masks = np.random.default_rng(seed).random((calls, n)) < 0.3
    sizes: dict[str, Any] = {"max_steps": 10_000, "max_trajectories": 1000, "block_steps": 2}
    with (
        gear.Table.create(SCHEMA, **sizes) as plain,
        cuda.installed(),
        cuda.disks_in_turn(),
        torch.cuda.device(DEVICE),
        gear.Table.create(
            SCHEMA, **sizes, memory=gear.Memory(max_blocks=36), device=DEVICE,
            disk=gear.Disk(tmp_path / "own", sync_seconds=0.01, size=None if below == "host" else "1GiB"),
            host={"disk": None, "both": 30 * 512, "host": "1MiB"}[below],
        ) as table,
    ):  # fmt: skip
        writer = table.writers(n, device=DEVICE, **({} if episodes else {"chunk_steps": 4}))
        expected = plain.writers(n)
        for t in range(calls):
            rows, finals = streams.step(), {"obs": streams.final()}
            mask = masks[t] if episodes else np.full(n, t % 4 == 3)
            given = on_device(rows)
            done = {"done": torch.from_numpy(mask).to(DEVICE)} if episodes else {}
            writer.append(given, final=on_device(finals), **done)
            expected.append(rows, done=mask, final=finals)
        writer.commit()
        expected.commit()
        stats = table.stats()
        assert stats.num_spilled > {"disk": len(table) // 2, "both": len(table) // 4, "host": -1}[below]
        assert (stats.host_part_bytes > 0) == (below != "disk")
        same_as(table, plain, whole=True)
        table.save(tmp_path / "own")
        shutil.copytree(tmp_path / "own", tmp_path / "left")  # what a process that is killed here leaves
        disk = gear.Disk(tmp_path / "left", sync_seconds=1e6, size="1GiB")
        with gear.Table.recover(disk, device=DEVICE, host=30 * 512 if below == "both" else None) as recovered:
            assert 0 < recovered.stats().num_spilled < len(recovered)
            assert (recovered.stats().host_part_bytes > 0) == (below == "both")
            same_as(recovered, plain, whole=True)
        writer.close()
    cuda.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_that_are_given_to_a_table_wait_once(policy: Policy) -> None:
    """For all columns, and all trajectories of a list; what comes into the table has been computed."""
    cuda, streams = Cuda(3, policy), Streams(4, 0)
    with (
        cuda.installed(),
        torch.cuda.device(DEVICE),
        gear.Table.create(SCHEMA, max_steps=800, max_trajectories=100, block_steps=4) as table,
    ):
        rows = [on_device(streams.step()) for _ in range(2)]
        stacked = {name: torch.stack([row[name] for row in rows], 1) for name in SCHEMA}
        final = on_device({"obs": torch.stack([streams.final()] * 2)})["obs"][0]
        writer = table.writers(4)
        given: list[Any] = [
            lambda: table.add(rows[0]),
            lambda: table.extend(rows),
            lambda: table.extend(stacked, lengths=[2] * 4),
            lambda: writer.append(rows[1], done=[True] * 4),
            lambda: writer.append(rows[0], done=[True] * 4, final={"obs": final}),
        ]
        for call, waits in zip(given, (1, 1, 1, 1, 2), strict=True):
            before = sum(count for name, count in cuda.machine.counts.items() if "synchronize" in name)
            call()
            after = sum(count for name, count in cuda.machine.counts.items() if "synchronize" in name)
            assert after - before == waits
        found = [table[index] for index in table.indices().tolist()]
        for name in SCHEMA:
            for t, row in ((0, found[0]), (0, found[1]), (1, found[2])):
                assert torch.equal(row[name], streams.rows[t][name]), name
            for env in range(4):
                expected = torch.stack([row[name][env] for row in streams.rows])
                assert torch.equal(found[3 + env][name], expected)
                assert torch.equal(found[7 + env][name], expected[1:])
    cuda.check()


NUMBERS = {"number": gear.Column(torch.int64)}
NOT_DONE = torch.zeros(3, dtype=torch.bool)


def append_numbers(writer: Any, step: int) -> None:
    done = {} if writer.chunk_steps else {"done": NOT_DONE.to(DEVICE)}
    writer.append(number=(torch.arange(3) + 1000 * step).to(DEVICE), **done)


def numbers_of(table: gear.Table) -> list[list[int]]:
    return sorted(table[index]["number"].tolist() for index in table.indices().tolist())


@pytest.mark.parametrize("more", [1, 7])
def test_a_call_is_repeated_where_only_some_environments_got_room(more: int) -> None:
    cuda, memory = Cuda(0, "eager"), gear.Memory(max_blocks=39 + more)
    sizes = {"max_steps": 1000, "max_trajectories": 60, "block_steps": 1, "on_full": "error"}
    with (
        cuda.installed(),
        torch.cuda.device(DEVICE),
        gear.Table.create(NUMBERS, **sizes, memory=memory) as table,
    ):
        table.add({"number": torch.full((12,), -7)})
        writer = table.writers(3, device=DEVICE)
        step, refused = 0, 0
        while step < 9 and refused < 2:  # the second time it is full of these steps
            try:
                append_numbers(writer, step)
                step += 1
            except TableFullError:
                refused += 1
                table.clear()
        assert refused
        writer.commit()
        assert numbers_of(table) == [[env + 1000 * each for each in range(step)] for env in range(3)]
        writer.close()


@pytest.mark.parametrize("chunks", [{}, {"chunk_steps": 4}])
def test_a_coherent_machine_takes_the_copy_engine(chunks: dict[str, int]) -> None:
    """Its memory is not registered, and so no kernel writes there."""
    cuda = Cuda(0, "random")
    cuda.pageable, cuda.refuses = {1: {88, 100}}, 801
    sizes = {"max_steps": 1000, "max_trajectories": 60, "block_steps": 4}
    with cuda.installed(), torch.cuda.device(DEVICE), gear.Table.create(NUMBERS, **sizes) as table:
        writer = table.writers(3, device=DEVICE, **chunks)
        for step in range(4):
            append_numbers(writer, step)
        writer.commit()
        assert numbers_of(table) == [[env + 1000 * step for step in range(4)] for env in range(3)]
        writer.close()


@pytest.mark.parametrize("device", [torch.device("cpu"), DEVICE])
@pytest.mark.parametrize("chunks", [{}, {"chunk_steps": 4}])
def test_no_final_values_are_no_final_step(device: torch.device, chunks: dict[str, int]) -> None:
    cuda = Cuda(0, "eager")
    sizes = {"max_steps": 1000, "max_trajectories": 60, "block_steps": 4}
    with cuda.installed(), torch.cuda.device(DEVICE), gear.Table.create(NUMBERS, **sizes) as table:
        writer = table.writers(3, device=device, **chunks)
        for step in range(8):
            done = {} if chunks else {"done": torch.full((3,), step % 4 == 3).to(device)}
            writer.append(number=(torch.arange(3) + 1000 * step).to(device), final={}, **done)
        writer.commit()
        assert [len(each) for each in numbers_of(table)] == [4] * 6
        assert not any(table.final(index) for index in table.indices().tolist())
        writer.close()


def test_an_interrupt_behind_a_launch_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the kernel would write into blocks that are somebody else's."""
    cuda = Cuda(0, "latest")
    sizes = {
        "max_steps": 1000,
        "max_trajectories": 60,
        "block_steps": 1,
        "memory": gear.Memory(max_blocks=50),
    }

    def interrupted(*args: Any, **options: Any) -> None:
        launch(*args, **options)
        raise KeyboardInterrupt

    with cuda.installed(), torch.cuda.device(DEVICE), gear.Table.create(NUMBERS, **sizes) as table:
        writer, launch = table.writers(3, device=DEVICE), append.append
        append_numbers(writer, 0)
        monkeypatch.setattr(append, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            append_numbers(writer, 1)
        for number in range(4):
            table.add({"number": torch.full((12,), number)})
        torch.cuda.synchronize(DEVICE)
        assert numbers_of(table) == [[number] * 12 for number in range(4)]


def _episodes_known_early(patch: pytest.MonkeyPatch) -> None:
    """Ends are read, and committed, before the kernel has run."""
    patch.setattr(device_episodes, "_arrived", lambda step: True)


def _too_many_on_their_way(patch: pytest.MonkeyPatch) -> None:
    """More steps are on their way than an environment has lanes for."""
    patch.setattr(device_episodes, "MOST", 6)


def _play_some() -> None:
    for seed in range(60):
        if seed % 5 != 4:
            play_episodes(seed, "latest")


@pytest.mark.long
@pytest.mark.parametrize("put_back", [_episodes_known_early, _too_many_on_their_way])
def test_defects_of_episodes_are_found(put_back: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        put_back(patch)
        with pytest.raises((AssertionError, ValueError, IndexError)):
            _play_some()
