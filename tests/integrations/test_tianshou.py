"""Tianshou's replay buffers in a table: the rows, batches and files of Tianshou's own, shared by name."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gear_loader as gear

data = pytest.importorskip(
    "tianshou.data", reason="needs Tianshou: make peers ARGS='.peers tianshou', test_own_tests.py"
)
ours = pytest.importorskip("gear_loader.integrations.tianshou")

OPTIONS = {
    "ReplayBuffer": {"size": 20},
    "PrioritizedReplayBuffer": {"size": 20, "alpha": 0.6, "beta": 0.4},
    "VectorReplayBuffer": {"total_size": 40, "buffer_num": 4},
    "PrioritizedVectorReplayBuffer": {"total_size": 40, "buffer_num": 4, "alpha": 0.6, "beta": 0.4},
}


def batch(step: int, envs: int) -> Any:
    rng = np.random.default_rng(step)
    obs = {"image": rng.integers(0, 255, (2, envs, 3, 3), dtype=np.uint8), "place": rng.random((2, envs, 2))}
    ended = rng.random(envs) < 0.2
    values = {
        "obs": {name: each[0] for name, each in obs.items()},
        "obs_next": {name: each[1] for name, each in obs.items()},
        "act": rng.integers(0, 3, envs),
        "rew": rng.random(envs),
        "terminated": ended,
        "truncated": np.zeros(envs, bool),
        "info": {"index": np.full(envs, step), "text": np.array(["a"] * envs, object)},
    }
    return data.Batch(values)


def same(one: Any, other: Any) -> None:
    assert set(one.keys()) == set(other.keys())
    for key, value in one.items():
        if isinstance(value, data.Batch):
            same(value, other[key])
        else:
            np.testing.assert_array_equal(value, other[key], strict=True)


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_same_batches_from_rows_that_others_attach_to(kind: str, tmp_path: Path) -> None:
    name = f"tianshou-{np.random.default_rng().integers(1 << 40)}"
    theirs = getattr(data, kind)(**OPTIONS[kind])
    mine = getattr(ours, kind)(**OPTIONS[kind], name=name)
    envs = OPTIONS[kind].get("buffer_num", 1)
    try:
        for step in range(35):  # beyond its size
            results = [each.add(batch(step, envs), np.arange(envs)) for each in (theirs, mine)]
            for one, other in zip(*results, strict=True):
                np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(theirs.unfinished_index(), mine.unfinished_index())
        for walk in ("next", "prev"):
            every = np.arange(len(theirs))
            np.testing.assert_array_equal(getattr(theirs, walk)(every), getattr(mine, walk)(every))
        drawn = []
        for each in (theirs, mine):
            np.random.seed(3)  # noqa: NPY002 (Tianshou draws by it)
            if "Prioritized" in kind:
                each.update_weight(np.arange(len(each)), np.arange(1.0, 1 + len(each)))
            drawn.append(each.sample(16))
        np.testing.assert_array_equal(drawn[0][1], drawn[1][1])
        same(drawn[0][0], drawn[1][0])
        with gear.Table.attach(name) as table:
            assert {"obs.image", "obs_next.place", "rew", "info.index"} <= set(table.schema)
            assert torch.equal(table[0]["obs.image"], torch.from_numpy(theirs.obs.image))
            assert torch.equal(table[0]["info.index"], torch.from_numpy(theirs.info.index))
        read = []
        for number, each in enumerate((theirs, mine)):
            each.save_hdf5(str(tmp_path / f"{number}.hdf5"))
            read.append(type(each).load_hdf5(str(tmp_path / f"{number}.hdf5")))
        copied = pickle.loads(pickle.dumps(mine))
        for again, expected in ((copied, theirs), (read[1], read[0])):
            same(again[:], expected[:])
            again.add(batch(50, envs), np.arange(envs))
            assert again.table.name is None
            assert torch.equal(again.table[0]["rew"], torch.from_numpy(again.rew))
        same(mine[:], theirs[:])  # a copy has rows of its own
    finally:
        mine.table.unlink()


def test_a_buffer_learns_as_that_of_tianshou() -> None:
    """n-step returns, which walk over the buffer, of a collector's steps."""
    from tianshou.algorithm.algorithm_base import Algorithm
    from tianshou.env import DummyVectorEnv

    gymnasium = pytest.importorskip("gymnasium")
    found = []
    for module in (data, ours):
        envs = DummyVectorEnv([lambda: gymnasium.make("CartPole-v1") for _ in range(3)])
        envs.seed(0)
        envs.action_space = [space for space in envs.action_space if space.seed(1) is not None]
        buffer = module.VectorReplayBuffer(300, 3)
        obs, _ = envs.reset()
        rng = np.random.default_rng(0)
        for _ in range(60):
            act = rng.integers(0, 2, 3)
            obs_next, rew, terminated, truncated, _ = envs.step(act)
            step = {"obs": obs, "act": act, "rew": rew, "terminated": terminated, "truncated": truncated}
            buffer.add(data.Batch(**step, obs_next=obs_next, info={}))
            obs = obs_next.copy()
            if (ended := np.flatnonzero(terminated | truncated)).size:
                obs[ended] = envs.reset(ended)[0]
        drawn, indices = buffer.sample(0)
        returns = Algorithm.compute_nstep_return(
            drawn, buffer, indices, lambda buffer, at: torch.from_numpy(buffer.obs_next[at].sum(1)), 0.9, 3
        )
        found.append(returns.returns)
        envs.close()
    np.testing.assert_array_equal(*found)
