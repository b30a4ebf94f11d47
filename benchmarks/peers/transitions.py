"""Single transitions as a task: a store of steps is filled, compared to the byte, drawn from and appended to.

A transition is (observation, action, reward, next observation, terminated). A batch is what a user of the library gets:
tensors, numpy arrays, a tensordict. What is appended, and new priorities, are prepared in the form that the library
takes, which is not timed.
"""

from __future__ import annotations

import functools
import gc
import itertools
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.peers import source
from benchmarks.peers.select import ALPHA, BETA

ENVS = {"append 1": 1, "append 8": 8, "append 64": 64, "append 4096": 4096}
"""Modes in which a step of each environment is appended, and number of environments."""
UNIFORM, PRIORITIZED, ONE, EIGHT, *_ = MODES = ("uniform", "prioritized", *ENVS)
"""Draw a batch; draw one by priority and set the priorities of its steps; append."""
COLUMNS = ("obs", "action", "reward", "next_obs", "terminated")
SHORTEST, LONGEST = 9, 500
_MEAN = 100.0  # steps of an episode beyond the shortest, before the longest are cut off
_DRAWS = 1 << 15
_AHEAD = 4  # batches that a library may have drawn ahead
_FAR = 8.0  # standard deviations of a chi-square: farther than chance goes


class Data:
    """Episodes as long as CartPole's while an agent learns: 9 to 500 steps, about 110 on average.

    spec: ``steps`` of all episodes, ``seed``. obs, next_obs: float32 ``[steps, 4]``; the last of the four numbers says
    which observation it is, of ``steps`` and one more for each episode. action: int64 ``[steps]``. reward: float32
    ``[steps]``. terminated, truncated: bool ``[steps]``, where an episode ended, by itself or at 500 steps. begins,
    lengths: int64, of each episode. priorities: float32 ``[steps]``, uniform in (0, 1].
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.steps, self.seed = int(spec["steps"]), int(spec["seed"])
        random = np.random.default_rng(self.seed)
        lengths = SHORTEST + random.exponential(_MEAN, self.steps // SHORTEST + 1).astype(np.int64)
        lengths = lengths.clip(max=LONGEST)
        lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), self.steps)) + 1]
        lengths[-1] -= lengths.sum() - self.steps
        self.lengths, self.begins = lengths, np.cumsum(lengths) - lengths
        episode = np.repeat(np.arange(len(lengths)), lengths)
        self.place = np.arange(self.steps) + episode  # of a step's observation
        self.observations = random.standard_normal((self.steps + len(lengths), 4), dtype=np.float32)
        self.observations[:, 3] = np.arange(len(self.observations), dtype=np.float32)
        self.obs, self.next_obs = self.observations[self.place], self.observations[self.place + 1]
        self.action = random.integers(0, 2, self.steps)
        self.reward = random.random(self.steps, dtype=np.float32)
        self.terminated = np.zeros(self.steps, dtype=np.bool_)
        self.truncated = np.zeros(self.steps, dtype=np.bool_)
        last = self.begins + lengths - 1
        self.terminated[last[lengths < LONGEST]] = True
        self.truncated[last[lengths == LONGEST]] = True
        self.priorities = np.float32(1) - random.random(self.steps, dtype=np.float32)
        self._step = np.full(len(self.observations), -1)
        self._step[self.place] = np.arange(self.steps)

    def columns(self, steps: Any = slice(None)) -> dict[str, np.ndarray]:
        """The transitions of some steps, of all by default."""
        return {name: getattr(self, name)[steps] for name in COLUMNS}

    def verify(self, rows: Mapping[str, Any]) -> np.ndarray:
        """Compare transitions with the data, value by value; int64 [n], the step that each of them is."""
        found = {name: np.asarray(rows[name]) for name in COLUMNS}
        count = len(found["obs"])
        place = found["obs"].reshape(count, 4)[:, 3].astype(np.int64)
        step = self._step[place.clip(0, len(self._step) - 1)]
        if (step < 0).any():
            raise ValueError(f"observation {place[step < 0][0]} was drawn, from which no step was taken")
        for name, expected in self.columns(step).items():
            if not np.array_equal(found[name].reshape(expected.shape), expected):
                raise ValueError(
                    f"{name} of a transition is not that of the step which its observation tells"
                )
        return step


class Subject(source.Subject):
    """A store of transitions, in one mode.

    `open` makes an empty one with room for the data; with `envs` environments side by side. `fill` stores all
    of the data, by whatever is quickest. `sample()` draws a batch, `found(batch)` are its columns by name. In the mode
    "prioritized" all steps have the data's priorities to the power of alpha, `update(batch, values)` sets new ones, in
    the form that `values` makes of float32 [B], and `weights` are importance weights. `calls(steps)` makes what
    `append` takes, of step numbers ``[calls, envs]``; all steps of the last one end their episodes.
    """

    modes: tuple[str, ...] = MODES
    settings: tuple[dict[str, Any], ...] = ({},)
    """To choose from where batches are drawn: the fastest is measured."""
    open: Any
    fill: Any
    sample: Any
    update: Any
    append: Any
    calls: Any

    def __init__(self, data: Data, mode: str, batch: int, setting: dict[str, Any]) -> None:
        self.data, self.mode, self.batch, self.setting = data, mode, batch, setting
        self.envs = ENVS.get(mode, 1)
        self.prioritized = mode == PRIORITIZED
        self.open()

    def found(self, batch: Any) -> Mapping[str, Any]:
        return batch  # type: ignore[no-any-return]

    def values(self, values: np.ndarray) -> Any:
        return values

    def weights(self, batch: Any) -> np.ndarray:
        raise NotImplementedError

    def stream(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps that are appended over and over, int64 ``[calls, envs]``, of which each environment plays its own part
        of the data; and whether an episode ends with them, which all do in the last call."""
        data, calls = self.data, 2048 if self.envs == 1 else min(1024, (1 << 17) // self.envs)
        calls = max(min(calls, data.steps // (2 * self.envs)), 2)
        first = data.begins[np.arange(self.envs) * (len(data.begins) // self.envs)]
        steps = first + np.arange(calls)[:, None]
        ends = data.terminated[steps] | data.truncated[steps]
        ends[-1] = True
        return steps, ends


def measure(subject: Subject, calls: list[Any], count: int) -> float:
    """Seconds of so many batches, or calls that append. calls: what is appended, over and over; or new priorities.

    As in a learner's loop, a batch is let go when the next one has come.
    """
    given = list(itertools.islice(itertools.cycle(calls), count))
    begin = time.perf_counter()
    if subject.mode == UNIFORM:
        for _ in given:
            _held = subject.sample()
    elif subject.mode == PRIORITIZED:
        for values in given:
            batch = subject.sample()
            subject.update(batch, values)
    else:
        for call in given:
            subject.append(call)
    return time.perf_counter() - begin


class Worker(source.Worker):
    """Does what a mode measures with one store at a time."""

    data: Data | None = None

    def build(self, spec: dict[str, Any], mode: str, batch: int) -> dict[str, Any]:
        """Make the store, in the setting that is found to be the fastest, compare what it gives with the data."""
        self.close()  # first gives back what the one before held
        if mode not in self.kind.modes:
            raise ValueError("it has no call for that")
        if self.data is None or (self.data.steps, self.data.seed) != (spec["steps"], spec["seed"]):
            self.data = Data(spec)
        drawing = mode in (UNIFORM, PRIORITIZED)
        settings = self.kind.settings if drawing else self.kind.settings[:1]
        made = functools.partial(self._made, mode, batch, drawing)
        if len(settings) > 1:
            settings = sorted(settings, key=lambda setting: self._seconds(made(setting)))
        self.held = made(settings[0])
        if drawing:
            (check_priorities if mode == PRIORITIZED else check_uniform)(self.held)
        else:
            check_appended(self.held)
            self.held.fill()
        self.calls = calls_of(self.held)
        gc.collect()
        gc.freeze()
        return {"setting": self.held.setting}

    def _made(self, mode: str, batch: int, filled: bool, setting: dict[str, Any]) -> Any:
        subject = self.kind(self.data, mode, batch, setting)
        if filled:
            subject.fill()
        return subject

    def _seconds(self, subject: Subject) -> float:
        calls = calls_of(subject)
        found = min(measure(subject, calls, 32) for _ in range(4))
        subject.close()
        return found

    def measure(self, count: int) -> dict[str, Any]:
        """Seconds of so many batches, or calls."""
        with source.undisturbed():
            return {"seconds": measure(self.subject, self.calls, count)}


def calls_of(subject: Subject) -> list[Any]:
    """What `measure` gives to each call."""
    if subject.mode == UNIFORM:
        return [None]
    if subject.prioritized:
        values = np.float32(1) - np.random.default_rng(4).random((64, subject.batch), dtype=np.float32)
        return [subject.values(row) for row in values]
    return list(subject.calls(*subject.stream()))


# Correctness -----------------------------------------------------------------------------------------


def _drawn(subject: Subject, draws: int) -> np.ndarray:
    """The steps of so many draws at least."""
    return np.concatenate([_steps(subject, subject.sample()) for _ in range(-(-draws // subject.batch))])


def _steps(subject: Subject, batch: Any) -> np.ndarray:
    step = subject.data.verify(subject.found(batch))
    if len(step) != subject.batch:
        raise ValueError(f"a batch has {len(step)} rows; expected {subject.batch}")
    return step


def _check_shares(found: np.ndarray, weights: np.ndarray, what: str) -> None:
    """Raise ValueError if counts are farther from what the bins weigh than chance goes."""
    expected = weights / weights.sum() * found.sum()
    distance = float(((found - expected) ** 2 / expected).sum())
    freedom = len(found) - 1
    if distance > freedom + _FAR * (2 * freedom) ** 0.5:
        raise ValueError(f"draws are not in proportion: {what}, chi-square {distance:.0f} of {freedom}")


def _check_bins(subject: Subject, steps: np.ndarray, weights: np.ndarray) -> None:
    every = np.arange(subject.data.steps)
    for what, bins in (("positions", every * 64 // len(every)), ("positions within 32", every % 32)):
        share = np.bincount(bins, weights=weights)
        _check_shares(np.bincount(bins[steps], minlength=len(share)), share, what)


def check_uniform(subject: Subject) -> None:
    """Raise ValueError unless batches hold real transitions, all of them equally often."""
    _check_bins(subject, _drawn(subject, _DRAWS), np.ones(subject.data.steps))


def check_priorities(subject: Subject) -> None:
    """Raise ValueError unless transitions are real and drawn by their priorities, before and after some are set, and
    weigh what they should. Priorities are as before afterwards."""
    data, steps = subject.data, _drawn(subject, _DRAWS)
    masses = data.priorities.astype(np.float64) ** ALPHA
    _check_bins(subject, steps, masses)
    levels = np.minimum((data.priorities * 16).astype(np.int64), 15)
    _check_shares(np.bincount(levels[steps], minlength=16), np.bincount(levels, weights=masses), "priorities")

    batch = subject.sample()
    steps = _steps(subject, batch)
    weight = np.asarray(subject.weights(batch), dtype=np.float64).reshape(-1) * masses[steps] ** BETA
    if np.ptp(weight) > 1e-3 * weight.mean():
        raise ValueError("importance weights are not in proportion to their priorities")
    few = np.unique(steps)
    heavy = ((masses.sum() - masses[few].sum()) / len(few)) ** (1 / ALPHA)
    subject.update(batch, subject.values(np.full(subject.batch, heavy, dtype=np.float32)))
    _drawn(subject, _AHEAD * subject.batch)  # may have been drawn before
    again = np.isin(_drawn(subject, _DRAWS // 8), few)
    _check_shares(np.bincount(again, minlength=2), np.array([0.5, 0.5]), "steps whose priorities were set")
    subject.update(batch, subject.values(data.priorities[steps]))


def check_appended(subject: Subject) -> None:
    """Append to the empty store, and raise ValueError unless it then holds what was appended and nothing else."""
    steps, ends = subject.stream()
    for call in subject.calls(steps, ends):
        subject.append(call)
    drawn = np.unique(_drawn(subject, 24 * steps.size))
    missing = np.isin(steps, drawn, invert=True)
    if missing.any() or len(drawn) > steps.size:
        raise ValueError(
            f"of {steps.size} steps appended, {int(missing.sum())} were never drawn, the first of them in call "
            f"{np.argwhere(missing)[0].tolist() if missing.any() else None}; {len(drawn)} different ones were"
        )
