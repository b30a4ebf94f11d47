"""The replay buffer of `examples/rllib_replay.py`: what RLlib gives it, and what it gives RLlib's learner."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


def example() -> Any:
    try:
        import ray.rllib.algorithms.dqn  # noqa: F401
    except Exception as error:
        pytest.skip(f"needs ray[rllib] ({error}): make peers ARGS='.peers rllib', test_own_tests.py")
    spec = importlib.util.spec_from_file_location("rllib_replay", ROOT / "examples" / "rllib_replay.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore")  # RLlib's own
def test_pieces_of_episodes_become_n_step_transitions() -> None:
    """Every transition of running, ended and abandoned episodes, with their returns, at least once."""
    module = example()
    buffer = module.GearEpisodeReplayBuffer(1_000, num_envs=2, n_step=3, gamma=0.9)
    lengths = [(7, True), (4, False), (1, True), (12, None), (9, True)]  # None: its runner dies
    expected: dict[float, tuple[float, float, int, bool]] = {}
    first = 0.0
    for number, (length, terminated) in enumerate(lengths):
        obs = [np.full(2, first + t, np.float32) for t in range(length + 1)]
        rewards = [first + t + 0.5 for t in range(length)]
        for t in range(length):
            count = min(3, length - t)
            if terminated is None and t + 3 > length:
                continue  # its return goes on; drawn or not, RLlib is told how many rewards it has
            value = sum(0.9**k * rewards[t + k] for k in range(count))
            expected[first + t] = (
                value,
                first + t + count,
                count,
                terminated is True and t + count == length,
            )
        for start in range(0, length, 4):  # pieces
            end = min(start + 4, length)
            last = end == length
            piece = module.SingleAgentEpisode(
                id_=f"episode {number}",
                observations=obs[start : end + 1],
                actions=[t % 2 for t in range(start, end)],
                rewards=rewards[start:end],
                terminated=last and terminated is True,
                truncated=last and terminated is False,
                t_started=start,
                len_lookback_buffer=0,
            )
            buffer.add([piece])
        first += 100
    assert len(buffer) == sum(length for length, _ in lengths)
    seen = set()
    for _ in range(20):
        drawn = buffer.sample(64, n_step=3, gamma=0.9, beta=0.4, sample_episodes=True)
        for episode in drawn:
            obs, following = episode.get_observations()
            found = expected.get(float(obs[0]))
            if found is not None:
                outputs = {name: episode.get_extra_model_outputs(name)[0] for name in ("n_step", "weights")}
                assert np.isclose(episode.get_rewards()[0], found[0])
                assert episode.is_terminated == found[3]
                assert 0 < outputs["weights"] <= 1
                if not found[3]:
                    assert (float(following[0]), outputs["n_step"]) == (found[1], found[2])
                seen.add(float(obs[0]))
        buffer.update_priorities(np.ones(64))
    assert seen == set(expected)


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "goal", "seconds"),
    [
        ("dqn", 40, 250),
        pytest.param("sac", -600, 900, marks=[pytest.mark.exhaustive, pytest.mark.timeout(1000)]),
    ],
)
def test_it_learns(algorithm: str, goal: int, seconds: int) -> None:
    example()
    command = [sys.executable, ROOT / "examples" / "rllib_replay.py", "--algorithm", algorithm]
    done = subprocess.run(
        [*map(str, command), f"--stop={goal}", f"--seconds={seconds}"],
        capture_output=True,
        text=True,
        timeout=seconds + 60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Checked: the mean return" in done.stdout
