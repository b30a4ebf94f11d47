"""This project's transitions: episodes in a table, drawn from by single steps, as docs/dqn.md does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import gear_loader as gear
from benchmarks.peers import transitions
from benchmarks.peers.select import ALPHA, BETA
from benchmarks.peers.transitions import EIGHT, ONE, PRIORITIZED, UNIFORM

PACKAGES = MODULES = ("torch", "numpy")
_STEP = gear.Window(1, squeeze=True)
_WINDOWS = {
    **dict.fromkeys(("obs", "action", "reward", "terminated"), _STEP),
    "next_obs": gear.Window(1, 1, column="obs", squeeze=True),
}


class Transitions(transitions.Subject):
    """`ReplayDataset.sample` of steps; each observation is stored once, and an episode's last one as its final step."""

    modes: tuple[str, ...] = (UNIFORM, PRIORITIZED)
    copy: bool | None = None
    every_step = True

    def open(self) -> None:
        steps = self.data.steps
        self.store = gear.Table.create(
            {
                "obs": gear.Column(torch.float32, (4,), final=True),
                "action": gear.Column(torch.int64),
                "reward": gear.Column(torch.float32),
                "terminated": gear.Column(torch.bool),
            },
            max_steps=steps,
            max_trajectories=max(steps // 50, 64),
            block_steps="auto",
            on_full="evict_oldest",
        )
        prioritized = gear.Prioritized(alpha=ALPHA, beta=BETA, unit="step")
        self._replay = gear.ReplayDataset(
            self.store,
            batch_size=self.batch,
            windows=_WINDOWS,
            sampler=prioritized if self.prioritized else gear.Uniform(unit="step"),
            seed=self.data.seed,
            device="cpu",
            prefetch=gear.Prefetch(0, copy=self.copy),
        )
        if self.envs > 1:
            self._writer: Any = self.store.writers(self.envs, commit_every_step=self.every_step)
        else:
            self._writer = self.store.writer(commit_every_step=self.every_step)

    def fill(self) -> None:
        data, first = self.data, ("obs", "action", "reward", "terminated")
        index = []
        for begin, length in zip(data.begins, data.lengths, strict=True):
            steps = slice(begin, begin + length)
            rows = {name: getattr(data, name)[steps] for name in first}
            index.append(self.store.add(rows, final={"obs": data.next_obs[begin + length - 1]}))
        if self.prioritized:
            self._replay.sample()
            every = np.repeat(np.array(index), data.lengths)
            anchor = np.arange(data.steps) - np.repeat(data.begins, data.lengths)
            self._replay.update_priority(every, data.priorities, anchor=anchor)

    def sample(self) -> Any:
        return self._replay.sample()

    def values(self, values: np.ndarray) -> Any:
        return torch.from_numpy(values)

    def update(self, batch: Any, values: Any) -> None:
        self._replay.update_priority(batch, values)

    def weights(self, batch: Any) -> np.ndarray:
        return np.asarray(batch["priority_weight"])

    def calls(self, steps: np.ndarray, ends: np.ndarray) -> Iterator[Any]:
        data = self.data
        for row, done in zip(steps if self.envs > 1 else steps[:, 0], ends, strict=True):
            values = data.columns(row)
            final = {"obs": values.pop("next_obs")}
            yield values, done, final if done.any() else None

    def append(self, call: Any) -> None:
        row, done, final = call
        if self.envs > 1:
            self._writer.append(**row, done=done, final=final)
            return
        self._writer.append(**row)
        if final is not None:
            self._writer.commit(final=final)

    def close(self) -> None:
        self._writer.close()
        self.store.close()


class Recycled(Transitions):
    """The same with ``copy=False``: a batch stays as it is until two more have been drawn."""

    copy = False


class EveryStep(Transitions):
    """Appending steps that can be drawn as soon as `append` has returned."""

    modes = (ONE, EIGHT)


class Episodes(EveryStep):
    """Appending steps that can be drawn when their episode has ended."""

    every_step = False


class Buffer(transitions.Subject):
    """`ReplayBuffer`, by its own calls."""

    def open(self) -> None:
        prioritized = gear.Prioritized(alpha=ALPHA, beta=BETA, unit="step")
        self.store = gear.ReplayBuffer(
            self.data.steps,
            sampler=prioritized if self.prioritized else None,
            batch_size=self.batch,
            num_envs=self.envs,
            device="cpu",
            seed=self.data.seed,
        )

    def fill(self) -> None:
        data = self.data
        if self.envs > 1:
            calls = list(self.calls(*self.stream()))
            for _ in range(-(-data.steps // (self.envs * len(calls)))):
                for call in calls:
                    self.store.add(*call)
            return
        self.store.extend({**data.columns(), "truncated": data.truncated})
        if self.prioritized:
            table, dataset = self.store.table, self.store.dataset
            assert table is not None
            assert dataset is not None
            self.store.sample()
            index, begin = [], 0
            pieces = table.lengths()
            for slot, length in zip(table.indices().tolist(), pieces.tolist(), strict=True):
                index.append((slot, length, begin))
                begin += length
            every = np.repeat(np.array([slot for slot, _, _ in index]), pieces)
            anchor = np.arange(begin) - np.repeat(np.array([first for _, _, first in index]), pieces)
            dataset.update_priority(every, data.priorities[data.steps - begin :], anchor=anchor)

    def sample(self) -> Any:
        return self.store.sample()

    def found(self, batch: Any) -> Any:
        return {**batch, "terminated": batch["discount"] == 0}

    def values(self, values: np.ndarray) -> Any:
        return torch.from_numpy(values)

    def update(self, batch: Any, values: Any) -> None:
        self.store.update_priority(batch, values)

    def weights(self, batch: Any) -> np.ndarray:
        return np.asarray(batch["priority_weight"])

    def calls(self, steps: np.ndarray, ends: np.ndarray) -> Iterator[Any]:
        data = self.data
        for row, done in zip(steps if self.envs > 1 else steps[:, 0], ends, strict=True):
            values = data.columns(row)
            last = done if self.envs > 1 else bool(done[0])
            terminated = values["terminated"] if self.envs > 1 else bool(values["terminated"])
            reward = values["reward"] if self.envs > 1 else float(values["reward"])
            yield values["obs"], values["action"], reward, values["next_obs"], terminated, last

    def append(self, call: Any) -> None:
        self.store.add(*call)

    def close(self) -> None:
        if self.store.table is not None:
            self.store.table.close()


KINDS: dict[str, dict[str, Any]] = {
    "transitions": {
        "ours": Transitions,
        "ours, copy=False": Recycled,
        "ours, ReplayBuffer": Buffer,
        "ours, every step": EveryStep,
        "ours, per episode": Episodes,
    }
}
