"""Streams written from a GPU under adversarial schedules: what is visible has arrived, and is what was appended."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import pytest
import torch
from streams.cuda import Cuda
from streams.machine import Policy

import gear_loader as gear
from gear_loader.errors import GpuError, SchemaError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real torch.cuda")
DEVICE = torch.device("cuda", 1)
POLICIES: tuple[Policy, ...] = ("random", "latest", "eager")
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
        size = choose.choice([1, 3, 4])
        memory = gear.Memory(packed=choose.choice([True, False]), max_blocks=chunks * -(-(chunk + 1) // size))
        table = gear.Table.create(
            SCHEMA, max_steps=chunks * (chunk + 1), max_trajectories=chunks, block_steps=size, memory=memory,
            on_full="evict_oldest" if evicts else "error",
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
@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 120), marks=pytest.mark.long)])
def test_what_is_visible_has_arrived(seeds: range, policy: Policy) -> None:
    counts = [play(seed, policy).machine.counts for seed in seeds]
    assert sum(each["store"] for each in counts) > 0
    assert sum(each["copy to the host"] for each in counts) > 0  # memory that cannot be pinned


def test_no_step_waits_for_the_device() -> None:
    cuda, streams = Cuda(0, "eager"), Streams(4, 0)
    with (
        cuda.installed(),
        torch.cuda.device(DEVICE),
        gear.Table.create(SCHEMA, max_steps=800, max_trajectories=100, block_steps=4) as table,
    ):
        writer = table.writers(4, chunk_steps=5, device=DEVICE)
        rows = [on_device(streams.step()) for _ in range(20)]
        finals = on_device({"obs": streams.final()})
        before = dict(cuda.machine.counts)
        for row in rows:
            writer.append(row, final=finals)
        after = cuda.machine.counts
        waits = {name: after[name] - before.get(name, 0) for name in after if "synchronize" in name}
        assert not any(waits.values()), waits
        assert after["store"] - before.get("store", 0) == 4 * 2  # the record, and the image
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
