"""``python -m benchmarks train``: training a small decision transformer end to end, fed by different loaders.

A robot that hops (Hopper-v5) is recorded with behaviours from good to bad; a transformer learns from windows of 20
steps to do what leads to a given return. Model, optimizer, data and first weights are the same for all, and so are the
loop and the threads; each loader (of `benchmarks/peers/`) trains in a process of its own, in turn with the others. The
yardstick is the same training step, with one batch that is there already; TorchRL's environment has a torch of its own,
with which the yardstick is measured too.

Measured are training steps: how long one takes, and how much of that is waiting for its batch. Batches that were made
while others were measured do not count: they are thrown away. Then each loader's training starts again and goes on
until the policy, evaluated every so many steps in the environment, reaches a share of the best behaviour's return: the
seconds of training until then. Evaluating is not counted.

Every batch that is checked holds real windows, to the byte. Two draw alike but not the same: ours, plain torch and
`DataLoader` take a window that ends at any step, with padding at the begin of an episode; Reverb takes any window
without padding, TorchRL first a trajectory, then a window in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from benchmarks import hopper
from benchmarks.harness import Amount, Incorrect, Medians, Session, Variant
from benchmarks.options import described, experiment, numbers
from benchmarks.peers import policy
from benchmarks.peers.catalog import library_of
from benchmarks.peers.episodes import WINDOW, Data
from benchmarks.peers.process import OWN, PeerFailed, PeerProcess, start, together

_QUICK: Mapping[str, Any] = {
    "loaders": ("ours", "batch ready", "DataLoader, map-style", "TorchRL", "Reverb, gRPC"),
    "batches": (16,),
    "seeds": (0,),
    "episodes": 24,
    "horizon": 60,
    "steps": 4,
    "chunk": 10,
    "limit": 20,
    "evaluations": 2,
    "goal": 0.2,
}


@experiment("train", repeats=(2, 15))
def command(
    session: Session,
    batches: Annotated[str | None, described("Batch sizes: 64,256 by default.")] = None,
    episodes: Annotated[int | None, described("Episodes to collect.", min=12)] = None,
    goal: Annotated[
        float | None, described("Return to reach, as a share of the best behaviour's.", min=0.0)
    ] = None,
    seeds: Annotated[int | None, described("Times that each trains to it: 3 by default.", min=1)] = None,
) -> None:
    """A small transformer end to end: steps and samples a second, seconds of training until it reaches a return."""
    sizes, times = numbers(batches, "--batches", 1, 2**16) or None, tuple(range(seeds or 0)) or None
    given = {"batches": sizes, "episodes": episodes, "goal": goal, "seeds": times}
    chosen: dict[str, Any] = {**(_QUICK if session.quick else {})}
    chosen |= {name: value for name, value in given.items() if value is not None}
    with tempfile.TemporaryDirectory(prefix="train-") as folder:
        device = "cuda" if session.cuda else "cpu"
        setting = Setting(folder=Path(folder), device=device, threads=session.threads, **chosen)
        names = ("batches", "episodes", "horizon", "chunk", "limit", "evaluations", "goal", "seeds")
        session.configure(**{name: getattr(setting, name) for name in names})
        setting = prepare(setting)
        with started(session, setting) as trainees:
            # The last one is that of training to a return.
            for batch in session.each("train", sorted(setting.batches, reverse=True), "batch {}".format):
                trainees = steps(session, setting, trainees, batch)
            if not session.late("training to a return"):
                race(session, setting, [trainee for trainee in trainees if trainee.name in RACERS])


YARDSTICK = "batch ready"
LOADERS = {
    "ours": "gear",
    "ours, prefetch 2": "gear",
    "batch ready": "plain",
    "plain torch": "plain",
    "DataLoader, map-style": "plain",
    "DataLoader, map-style, 2 workers": "plain",
    **{name: library_of("train", name) for name in ("TorchRL", "Reverb, gRPC")},
}
"""Loader -> the library that it is of."""
RACERS = tuple(name for name in LOADERS if name not in ("ours, prefetch 2", YARDSTICK))
"""Those that train until they reach the return."""
_ALIKE = 1e-4  # by how much the loss of the same weights may differ between versions of torch


@dataclasses.dataclass(frozen=True)
class Setting:
    """What to measure.

    folder: for the data and weights. batches: training to a return takes the smallest one. episodes, horizon: that are
    collected, of at most so many steps. steps: of a measurement, at the smallest batch. chunk, limit: training steps
    between evaluations, and in all. evaluations: episodes of an evaluation. goal: a share of the best behaviour's
    return, of which `best` is the mean, once episodes are collected. seeds: of the first weights, one after another.
    """

    folder: Path
    loaders: Sequence[str] = tuple(LOADERS)
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
        return self.folder / f"{name}.npz"


@dataclasses.dataclass
class Trainee:
    """A loader and the training that it feeds, in a process. ours: whether its failure ends the run."""

    name: str
    process: PeerProcess
    ours: bool
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        """What it delivers, compared with the data; then a few steps that are not timed."""
        try:
            self.process.ask("check")
            self.process.ask("run", steps=3)
        except PeerFailed as error:
            raise Incorrect(str(error)) from error


def prepare(setting: Setting) -> Setting:
    """Collect the episodes, write the weights that training starts with."""
    best = hopper.collect(
        setting.data, episodes=setting.episodes, horizon=setting.horizon, seed=setting.seeds[0]
    )
    data = Data(str(setting.data))
    for seed in setting.seeds:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            policy.save(policy.Policy(data), str(setting.weights(f"start-{seed}")))
    return dataclasses.replace(setting, best=best)


@contextlib.contextmanager
def started(session: Session, setting: Setting) -> Iterator[list[Trainee]]:
    """A process for each loader; why one is missing is noted."""
    # Threads that wait for each other shall sleep: spinning would take the cores from those that make batches.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    makers: dict[str, Any] = {}
    for name in setting.loaders:
        if setting.device != "cpu" and LOADERS[name] not in OWN:
            session.leave(name, "it is measured on the CPU only")
        else:
            told = (session.peers, "train", LOADERS[name], name, setting.threads)
            makers[name] = functools.partial(start, *told)
    trainees: list[Trainee] = []
    with together(list(makers.values()), 2) as processes:
        for name, made in zip(makers, processes, strict=True):
            ours = LOADERS[name] in OWN
            process = session.attempt(name, made.result, required=ours)
            if process is not None:
                parameters = _PREFETCH.get(name, {}) if ours else {"peer": process.about}
                trainees.append(Trainee(name, process, ours, parameters))
        yield trainees


_PREFETCH = {"ours": {"prefetch": 0}, "ours, prefetch 2": {"prefetch": 2}}


def steps(session: Session, setting: Setting, trainees: list[Trainee], batch: int) -> list[Trainee]:
    """Measure training steps of all loaders in turn."""
    with ThreadPoolExecutor(2) as pool:  # making them takes seconds and is not timed
        made = [pool.submit(_build, trainee, setting, batch) for trainee in trainees]
    able = [
        trainee
        for trainee, done in zip(trainees, made, strict=True)
        if session.attempt(f"{trainee.name}, batch {batch}", done.result, required=trainee.ours)
    ]
    count = max(2, round(setting.steps * min(setting.batches) / batch))
    variants = [variant for trainee in able for variant in _variants(trainee, batch, count)]
    parameters, label = {"batch": batch, "window": WINDOW}, f"training step, batch {batch}"
    session.compare("steps", label, variants, YARDSTICK, parameters, unit="rows")
    return able


def _build(trainee: Trainee, setting: Setting, batch: int) -> bool:
    """Make its loader, and check it; raises `PeerFailed` or `Incorrect`."""
    seed, told = setting.seeds[0], {"data": str(setting.data), "device": setting.device}
    trainee.process.ask("build", batch=batch, seed=seed, **told)
    _reset(trainee, setting, seed)
    trainee.check()
    return True


def _reset(trainee: Trainee, setting: Setting, seed: int) -> None:
    weights, data = str(setting.weights(f"start-{seed}")), Data(str(setting.data))
    found = trainee.process.ask("reset", weights=weights)["loss"]
    with torch.no_grad():
        expected = float(policy.load(policy.Policy(data), weights).loss(policy.first_windows(data)))
    if not abs(found - expected) <= _ALIKE * expected:
        raise Incorrect(f"its model has a loss of {found}, expected {expected}")


def _variants(trainee: Trainee, batch: int, count: int) -> Iterator[Variant]:
    yield _variant(trainee, trainee.name, batch, count, ready=False)
    version = trainee.process.about["versions"].get("torch", "").partition("+")[0]
    if trainee.name == "TorchRL" and version != torch.__version__.partition("+")[0]:
        # What differs because of torch, and not of the loader.
        yield _variant(trainee, f"{YARDSTICK}, torch {version}", batch, count, ready=True)


def _variant(trainee: Trainee, name: str, batch: int, count: int, *, ready: bool) -> Variant:
    figures = Medians()

    def measure() -> float:
        answer = trainee.process.ask("run", steps=count, ready=ready)
        seconds = float(answer["seconds"])
        figures.note(waiting=answer["waiting"] / seconds, samples_per_s=batch * count / seconds)
        return seconds

    return Variant(name, measure, trainee.check, batch, count, trainee.parameters, extras=figures)


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


def race(session: Session, setting: Setting, trainees: Sequence[Trainee]) -> None:
    """Train by all loaders in turn, with an evaluation after each chunk, until they reach the return or their limit."""
    goal = setting.goal * setting.best
    runs: list[_Run] = []
    for seed in setting.seeds:
        if session.late(f"training to a return, seed {seed}"):
            continue
        now = [_Run(trainee, seed) for trainee in trainees]
        runs += now
        for run in now:
            _reset(run.trainee, setting, seed)
        while now and not session.late(f"the rest of training to a return, seed {seed}"):
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
                session.leave(f"{trainee.name}, return of {goal:.0f}, seed {run.seed}", why, "not reached")
        if any(run.reached(goal) for run in mine):
            amounts.append(session.record(_amount(setting, goal, trainee, mine)))
    session.show_amounts(amounts)


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
    trained = policy.load(policy.Policy(Data(str(setting.data))), str(path))
    achieved = hopper.evaluate(trained, setting.best, episodes=setting.evaluations, horizon=setting.horizon)
    run.curve.append((run.seconds, achieved))


def _amount(setting: Setting, goal: float, trainee: Trainee, runs: Sequence[_Run]) -> Amount:
    there = [run for run in runs if run.reached(goal)]
    batch, seconds = min(setting.batches), [run.seconds for run in there]
    curves = {"curve": there[0].curve, "curves": [run.curve for run in runs]}
    parameters = {**trainee.parameters, "batch": batch, "return": goal, **curves}
    extras = {"reached": len(there), "seeds": len(runs)}
    extras["steps"] = float(np.median([run.steps for run in there]))
    extras["waiting"] = sum(run.waiting for run in there) / sum(seconds)
    label = f"training until the return is {goal:.0f}, batch {batch}"
    return Amount("train", "return", label, trainee.name, seconds, "s", parameters, extras=extras)
