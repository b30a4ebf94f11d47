"""What `benchmarks.train` measures: processes that train, their steps in turn, and their way to a return."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import machine, train_hopper
from benchmarks.harness import Amount, Comparison, Incorrect, Left, Session, Variant
from benchmarks.peers import train_peers
from benchmarks.peers.environments import start
from benchmarks.peers.process import PeerFailed, PeerProcess
from benchmarks.peers.train_peers import LOADERS, WINDOW, Data, Policy
from benchmarks.train_worker import OURS

__all__ = ["RACERS", "YARDSTICK", "Setting", "Trainee", "prepare", "race", "started", "steps"]

YARDSTICK = "batch ready"
RACERS = (
    "ours",
    "plain torch",
    "DataLoader, map-style",
    "DataLoader, map-style, 2 workers",
    "TorchRL",
    "Reverb, gRPC",
)
"""Those that train until they reach the return."""
_ALIKE = 1e-4  # by how much the loss of the same weights may differ between versions of torch


@dataclasses.dataclass(frozen=True)
class Setting:
    """What to measure.

    Attributes:
        folder: for the data and weights.
        loaders: their names.
        batches: batch sizes; training to a return takes the smallest one.
        episodes, horizon: that are collected, of at most so many steps.
        steps: of a measurement, at the smallest batch.
        chunk, limit: training steps between evaluations, and in all.
        evaluations: episodes of an evaluation.
        goal: the return to reach, as a share of the best behaviour's.
        seeds: of the weights that training to a return starts with, one after another.
        best: mean return of the best behaviour, once episodes are collected.
    """

    folder: Path
    loaders: Sequence[str] = (*OURS, *LOADERS)
    batches: Sequence[int] = (64, 256)
    episodes: int = 240
    horizon: int = 400
    steps: int = 24
    chunk: int = 50
    limit: int = 1500
    evaluations: int = 6
    goal: float = 0.9
    seeds: Sequence[int] = (0, 1, 2)
    device: str = "cpu"
    threads: int = 2
    best: float = 0.0

    @property
    def data(self) -> Path:
        """The file with the episodes."""
        return self.folder / "episodes.npz"

    def weights(self, name: str) -> Path:
        """A file of weights."""
        return self.folder / f"{name}.npz"


@dataclasses.dataclass
class Trainee:
    """A loader and the training that it feeds, in a process.

    Attributes:
        name: the loader's. ours: whether its failure ends the run, as does that of plain torch.
        parameters: for the rows.
    """

    name: str
    process: PeerProcess
    ours: bool
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        """What it delivers, compared with the data; then a few steps that are not timed.

        Raises:
            Incorrect: it is something else, or it fails.
        """
        try:
            self.process.ask("check")
            self.process.ask("run", steps=3)
        except PeerFailed as error:
            raise Incorrect(str(error)) from error


def prepare(setting: Setting) -> Setting:
    """Collect the episodes, write the weights that training starts with."""
    best = train_hopper.collect(
        setting.data, episodes=setting.episodes, horizon=setting.horizon, seed=setting.seeds[0]
    )
    data = Data(str(setting.data))
    for seed in setting.seeds:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            train_peers.save(Policy(data), str(setting.weights(f"start-{seed}")))
    return dataclasses.replace(setting, best=best)


# ---------------------------------------------------------------- processes


@contextlib.contextmanager
def started(left: Left, setting: Setting, pythons: Sequence[Path]) -> Iterator[list[Trainee]]:
    """A process for each loader; why one is missing is noted.

    Raises:
        PeerFailed: one of those that need nothing but this environment.
    """
    cuda = setting.device != "cpu"
    names = [name for name in setting.loaders if not (cuda and _elsewhere(name))]
    for name in setting.loaders:
        if name not in names:
            left.add(name, "it is measured on the CPU only")

    def made(name: str) -> Trainee | PeerFailed:
        try:
            return _start(name, setting.threads, pythons)
        except PeerFailed as error:
            return error

    trainees: list[Trainee] = []
    with contextlib.ExitStack() as stack:
        # Threads that wait for each other shall sleep: spinning would take the cores from those that make batches.
        with _environment("OMP_WAIT_POLICY", "PASSIVE"), ThreadPoolExecutor(2) as pool:
            found = list(pool.map(made, names))
        for one in found:
            if isinstance(one, Trainee):
                stack.callback(one.process.close)
                trainees.append(one)
        for name, one in zip(names, found, strict=True):
            if isinstance(one, PeerFailed):
                if not _elsewhere(name):
                    raise one
                left.add(name, str(one))
        yield trainees


def _elsewhere(name: str) -> bool:
    """Whether a loader needs an environment of its own."""
    return name in LOADERS and LOADERS[name].environment is not None


def _start(name: str, threads: int, pythons: Sequence[Path]) -> Trainee:
    if name in OURS:
        command = [sys.executable, "-m", "benchmarks.train_worker", name, str(threads)]
        parameters = {"prefetch": OURS[name].prefetch}
        return Trainee(name, PeerProcess(command, folder=machine.ROOT), True, parameters)
    if not _elsewhere(name):
        command = [sys.executable, "-I", train_peers.__file__, name, str(threads)]
        return Trainee(name, PeerProcess(command), True)
    environment = LOADERS[name].environment
    process = start(pythons, train_peers.__file__, name, threads, environment=environment)
    return Trainee(name, process, False, {"peer": process.about})


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """A variable that processes get unless it is set already."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


# ---------------------------------------------------------------- steps


def steps(
    session: Session, left: Left, setting: Setting, trainees: list[Trainee], batch: int
) -> list[Trainee]:
    """Measure training steps of all loaders in turn.

    Returns:
        Those that could do it, with their loaders of this batch size.

    Raises:
        Incorrect: ours, or plain torch, delivers something else than windows of the data.
    """
    able = []
    with ThreadPoolExecutor(2) as pool:  # making them takes seconds and is not timed
        found = list(pool.map(lambda trainee: _build(trainee, setting, batch), trainees))
    for trainee, error in zip(trainees, found, strict=True):
        if error is None:
            able.append(trainee)
        elif trainee.ours:
            raise Incorrect(f"{trainee.name}, batch {batch}: {error}") from error
        else:
            left.add(f"{trainee.name}, batch {batch}", str(error))
    count = max(2, round(setting.steps * min(setting.batches) / batch))
    session.run(
        Comparison(
            experiment="train",
            workload="steps",
            label=f"training step, batch {batch}",
            variants=[variant for trainee in able for variant in _variants(trainee, batch, count)],
            yardstick=YARDSTICK,
            parameters={"batch": batch, "window": WINDOW},
            unit="rows",
        )
    )
    return able


def _build(trainee: Trainee, setting: Setting, batch: int) -> Exception | None:
    """Make its loader, check it; what went wrong."""
    process, seed = trainee.process, setting.seeds[0]
    try:
        process.ask("build", data=str(setting.data), batch=batch, seed=seed, device=setting.device)
        _reset(trainee, setting, seed)
        trainee.check()
    except (PeerFailed, Incorrect) as error:
        return error
    return None


def _reset(trainee: Trainee, setting: Setting, seed: int) -> None:
    """Start its training anew.

    Raises:
        Incorrect: its model gives another loss than the same weights do here.
        PeerFailed: see `PeerProcess.ask`.
    """
    weights, data = str(setting.weights(f"start-{seed}")), Data(str(setting.data))
    found = trainee.process.ask("reset", weights=weights)["loss"]
    with torch.no_grad():
        expected = float(train_peers.load(Policy(data), weights).loss(data.first))
    if not abs(found - expected) <= _ALIKE * expected:
        raise Incorrect(f"its model has a loss of {found}, expected {expected}")


def _variants(trainee: Trainee, batch: int, count: int) -> Iterator[Variant]:
    yield _variant(trainee, trainee.name, batch, count, ready=False)
    version = trainee.process.about["versions"].get("torch", "").partition("+")[0]
    if trainee.name == "TorchRL" and version != torch.__version__.partition("+")[0]:
        # What differs because of torch, and not of the loader.
        yield _variant(trainee, f"{YARDSTICK}, torch {version}", batch, count, ready=True)


def _variant(trainee: Trainee, name: str, batch: int, count: int, *, ready: bool) -> Variant:
    seconds: list[float] = []
    waiting: list[float] = []

    def measure() -> float:
        answer = trainee.process.ask("run", steps=count, ready=ready)
        seconds.append(answer["seconds"])
        waiting.append(answer["waiting"])
        return float(answer["seconds"])

    def extras() -> dict[str, float]:
        return {
            "waiting": float(np.median(np.array(waiting) / np.array(seconds))),
            "samples_per_s": batch * count / float(np.median(seconds)),
        }

    return Variant(name, measure, trainee.check, batch, count, trainee.parameters, extras=extras)


# ---------------------------------------------------------------- the way to a return


@dataclasses.dataclass
class _Run:
    """How far one loader's training from one seed has come; `curve`: seconds of training and the return then."""

    trainee: Trainee
    seed: int
    seconds: float = 0.0
    waiting: float = 0.0
    steps: int = 0
    curve: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    failed: str = ""

    def reached(self, goal: float) -> bool:
        return bool(self.curve) and self.curve[-1][1] >= goal


def race(session: Session, left: Left, setting: Setting, trainees: Sequence[Trainee]) -> list[Amount]:
    """Train by all loaders in turn, with an evaluation after each chunk, until they reach the return or their limit."""
    goal = setting.goal * setting.best
    runs: list[_Run] = []
    for seed in setting.seeds:
        if session.deadline.passed(f"training to a return, seed {seed}"):
            continue
        now = [_Run(trainee, seed) for trainee in trainees]
        runs += now
        for run in now:
            _reset(run.trainee, setting, seed)
        while now and not session.deadline.passed(f"the rest of training to a return, seed {seed}"):
            for run in now:
                _advance(run, setting)
            now = [r for r in now if not (r.failed or r.reached(goal) or r.steps >= setting.limit)]
    amounts = []
    for trainee in trainees:
        mine = [run for run in runs if run.trainee is trainee]
        for run in mine:
            if not run.reached(goal):
                most = max((value for _, value in run.curve), default=0.0)
                why = run.failed or f"it reached {most:.0f} in {run.steps} steps, {run.seconds:.1f} s"
                left.add(f"{trainee.name}, return of {goal:.0f}, seed {run.seed}", why, "not reached")
        if any(run.reached(goal) for run in mine):
            amounts.append(session.record(_amount(setting, goal, trainee, mine)))
    return amounts


def _advance(run: _Run, setting: Setting) -> None:
    process, path = run.trainee.process, setting.weights("now")
    try:
        answer = process.ask("run", steps=setting.chunk)
        process.ask("weights", path=str(path))
    except PeerFailed as error:
        if run.trainee.ours:
            raise
        run.failed = str(error)
        return
    run.seconds += answer["seconds"]
    run.waiting += answer["waiting"]
    run.steps += setting.chunk
    policy = train_peers.load(Policy(Data(str(setting.data))), str(path))
    achieved = train_hopper.evaluate(
        policy, setting.best, episodes=setting.evaluations, horizon=setting.horizon
    )
    run.curve.append((run.seconds, achieved))


def _amount(setting: Setting, goal: float, trainee: Trainee, runs: Sequence[_Run]) -> Amount:
    there = [run for run in runs if run.reached(goal)]
    return Amount(
        experiment="train",
        workload="return",
        label=f"training until the return is {goal:.0f}, batch {min(setting.batches)}",
        variant=trainee.name,
        values=[run.seconds for run in there],
        unit="s",
        parameters={
            **trainee.parameters,
            "batch": min(setting.batches),
            "return": goal,
            "curve": there[0].curve,
            "curves": [run.curve for run in runs],
        },
        extras={
            "reached": len(there),
            "seeds": len(runs),
            "steps": float(np.median([run.steps for run in there])),
            "waiting": sum(run.waiting for run in there) / sum(run.seconds for run in there),
        },
    )
