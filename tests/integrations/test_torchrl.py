"""Batches of TorchRL collectors as trajectories: by a stand-in for TensorDict, and by the library if installed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import tensordict_stand_in
import torch

import gear_loader as gear
from gear_loader.errors import SchemaError
from gear_loader.integrations.torchrl import CollectorWriter, collector_schema


def batch(numbers: torch.Tensor, done: torch.Tensor, ids: torch.Tensor | None = None) -> Any:
    """A collector's batch with observations that tell environment and time.

    Args:
        numbers: [..., T]. done: bool [..., T]. ids: int64 [..., T], trajectory ids, or None.
    """
    size = list(numbers.shape)
    entries: dict[str, Any] = {
        "observation": numbers.float().unsqueeze(-1),
        "next": {"reward": numbers.double().unsqueeze(-1), "done": done.unsqueeze(-1)},
    }
    if ids is not None:
        entries["collector"] = {"traj_ids": ids}
    return tensordict_stand_in.TensorDict(entries, size)


def table_for(given: Any) -> gear.Table:
    return gear.Table.create(collector_schema(given), max_steps=1000, max_trajectories=100)


def numbers_in(table: gear.Table) -> list[list[int]]:
    return [table[int(index)]["observation"].flatten().int().tolist() for index in table.indices()]


def test_rows_go_on_in_the_next_batch_until_they_are_done() -> None:
    numbers = torch.stack([torch.arange(6), 100 + torch.arange(6)])  # 2 environments, 6 steps in batches of 3
    done = torch.zeros(2, 6, dtype=torch.bool)
    done[0, 1] = done[0, 4] = done[1, 3] = True
    parts = [batch(numbers[:, part], done[:, part]) for part in (slice(0, 3), slice(3, 6))]
    with table_for(parts[0]) as table, CollectorWriter(table) as writer:
        assert table.schema["next.reward"] == gear.Column(torch.float64, (1,))
        assert len(writer.add(parts[0])) == 1
        assert len(writer.add(parts[1])) == 2
        assert numbers_in(table) == [[0, 1], [2, 3, 4], [100, 101, 102, 103]]
        assert writer.num_open == 2
        assert len(writer.flush()) == 2
        assert numbers_in(table)[3:] == [[5], [104, 105]]
        table.check_valid()


def test_trajectory_ids_tell_what_belongs_together() -> None:
    """Batches of two processes in turns, each a flat one of its environments."""
    no = torch.zeros(4, dtype=torch.bool)
    first = batch(torch.tensor([0, 1, 50, 51]), no, torch.tensor([7, 7, 8, 8]))
    other = batch(torch.tensor([70, 71, 90, 91]), no, torch.tensor([3, 3, 4, 4]))
    last = batch(
        torch.tensor([2, 3, 52, 60]), torch.tensor([False, True, True, False]), torch.tensor([7, 7, 8, 9])
    )
    with table_for(first) as table, CollectorWriter(table) as writer:
        assert "collector.traj_ids" not in table.schema
        for each in (first, other, last):
            writer.add(each)
        assert numbers_in(table) == [[0, 1, 2, 3], [50, 51, 52]]
        assert writer.num_open == 3
        writer.close()
        assert writer.num_open == 0
        assert len(table) == 2


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    no = torch.zeros(3, dtype=torch.bool)
    good = batch(torch.arange(3), no)
    with table_for(good) as table, CollectorWriter(table) as writer:
        missing = tensordict_stand_in.TensorDict({"observation": torch.zeros(3, 1)}, [3])
        with pytest.raises(SchemaError, match=r"missing: \['next.reward', 'next.done', 'next.done'\]"):
            writer.add(missing)
        wrong = batch(torch.arange(3), no)
        wrong["observation"] = torch.zeros(3, 2)
        with pytest.raises(
            SchemaError, match=r"'observation' of the batch is torch.float32 \[3, 2\]; expected"
        ):
            writer.add(wrong)
        split = batch(torch.arange(3), no, torch.arange(3))
        split["collector"]["mask"] = ~no
        with pytest.raises(SchemaError, match="split_trajs=False"):
            writer.add(split)
        with pytest.raises(SchemaError, match="expected a TensorDict"):
            writer.add({"observation": torch.zeros(3, 1)})
        assert writer.num_open == 0


@pytest.mark.slow
@pytest.mark.parametrize("environments", [1, 3])
def test_a_collector_of_torchrl(environments: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collectors = pytest.importorskip("torchrl.collectors", reason="needs pip install '.[torchrl]'")
        from torchrl.envs import GymEnv, SerialEnv

        make = getattr(collectors, "Collector", None) or collectors.SyncDataCollector
        env = GymEnv("CartPole-v1")
        if environments > 1:
            env = SerialEnv(environments, lambda: GymEnv("CartPole-v1"))
        collector = make(env, None, frames_per_batch=60, total_frames=300)
        table: gear.Table | None = None
        for given in collector:
            if table is None:
                table = table_for(given)
                writer = CollectorWriter(table)
            writer.add(given)
        collector.shutdown()
    writer.flush()
    assert table is not None
    assert table.num_steps == 300
    for index in table.indices():
        found = table[int(index)]
        assert not found["next.done"][:-1].any()
        assert torch.equal(found["observation"][1:], found["next.observation"][:-1])
    table.close()
