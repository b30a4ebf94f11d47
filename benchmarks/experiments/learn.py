"""``python -m benchmarks learn``: DQN and SAC of Stable-Baselines3, with its own replay buffer and with ours.

DQN learns CartPole-v1 and SAC Pendulum-v1, with the same options, from the same seeds (a turn is a seed, 5 by default),
one after the other on one thread. Our buffer, `gear_loader.integrations.sb3.ReplayBuffer`, gives the batches that
Stable-Baselines3's gives from the same seed, so both must learn the same weights to the bit: anything else is an error.
What is left to measure is time: wall time and processor time of training, and processor time of the buffers' calls.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.harness import Amount, Incorrect, Session
from benchmarks.options import experiment, some_of
from benchmarks.peers.learn import LEARNERS
from benchmarks.peers.process import PeerProcess, start

STEPS = {"DQN": (1_500, 30_000), "SAC": (300, 4_000)}
"""Learner -> steps of the environment, with ``--quick`` and usually."""
EPISODES = (2, 20)
LIBRARIES = {"SB3": "sb3", "ours": "gear_sb3"}
_WARM_UP = {"DQN": 1_300, "SAC": 210}
_PATIENCE = 1800.0


@experiment("learn", repeats=(1, 5), threads=1)
def command(
    session: Session,
    learners: Annotated[str | None, typer.Option(help="DQN,SAC: both by default.")] = None,
) -> None:
    """DQN on CartPole and SAC on Pendulum: returns and seconds of training, with either replay buffer."""
    chosen = some_of(learners, tuple(STEPS), "--learners") if learners else list(STEPS)
    budget = {name: STEPS[name][0 if session.quick else 1] for name in chosen}
    session.configure(steps=budget, seeds=session.repeats, episodes=EPISODES[0 if session.quick else 1])
    ways = {
        name: functools.partial(
            start, session.peers, "learn", library, name, environment="sb3", patience=_PATIENCE
        )
        for name, library in LIBRARIES.items()
    }
    with session.processes(ways) as processes:
        if len(processes) == len(LIBRARIES):
            for what in LEARNERS:
                if what.split(",")[0] in budget and not session.late(what):
                    learned(session, processes, what, budget[what.split(",")[0]])


def learned(session: Session, processes: dict[str, PeerProcess], what: str, steps: int) -> None:
    """Train with both buffers from each seed, in turn, and record returns, times and their ratios."""
    episodes = EPISODES[0 if session.quick else 1]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in processes}
    for process in processes.values():  # compiles and loads what the first batches need
        process.ask("run", learner=what, seed=0, steps=_WARM_UP[what.split(",")[0]], episodes=1)
    for seed in range(session.repeats):
        # Who begins changes from seed to seed.
        for name in list(processes) if seed % 2 == 0 else list(processes)[::-1]:
            found = processes[name].ask("run", learner=what, seed=seed, steps=steps, episodes=episodes)
            runs[name].append(found)
        theirs, ours = runs["SB3"][-1], runs["ours"][-1]
        if (theirs["weights"], theirs["returns"]) != (ours["weights"], ours["returns"]):
            raise Incorrect(f"{what}, seed {seed}: our buffer led to other weights than SB3's")
    shown: dict[str, list[Amount]] = {}
    for name, mine in runs.items():
        returns = [float(np.mean(run["returns"])) for run in mine]
        about = {"steps": steps, "peer": processes[name].about, "weights": [run["weights"] for run in mine]}
        extras = {"mean": float(np.mean(returns))}
        if len(returns) > 1:
            extras["standard_error"] = float(np.std(returns, ddof=1) / len(returns) ** 0.5)
        told = {**about, "returns": returns}
        shown.setdefault("return", []).append(
            session.record(_amount(what, "return", name, returns, told, extras=extras))
        )
        for key, label in _TIMES.items():
            values = [float(run[key]) for run in mine]
            ratios = {}
            if name == "ours":
                quotients = [mine / run[key] for mine, run in zip(values, runs["SB3"], strict=True)]
                ratios = {"relative_to_SB3": float(np.median(quotients))}
            told = {**about, "seconds": values}
            shown.setdefault(label, []).append(
                session.record(_amount(what, label, name, values, told, unit="s", extras=ratios))
            )
    for amounts in shown.values():
        session.show_amounts(amounts)


_TIMES = {
    "seconds": "wall time of training",
    "processor_seconds": "processor time of training",
    "replay_seconds": "processor time of the replay buffer",
}


def _amount(
    what: str,
    label: str,
    name: str,
    values: list[float],
    told: dict[str, Any],
    *,
    unit: str = "return",
    extras: dict[str, float],
) -> Amount:
    return Amount("learn", label, f"{what}: {label}", name, values, unit, told, extras=extras)
