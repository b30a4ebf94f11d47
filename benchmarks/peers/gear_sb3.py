"""This project's replay buffer for Stable-Baselines3, beside that library's own: the same calls."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.peers import learn, sb3

PACKAGES, MODULES = sb3.PACKAGES, (*sb3.MODULES, "gear_loader")


class Transitions(sb3.Transitions):
    """`gear_loader.integrations.sb3.ReplayBuffer`."""

    def kind(self) -> Any:
        from gear_loader.integrations.sb3 import ReplayBuffer

        return ReplayBuffer

    def fill(self) -> None:
        """By `add`, one environment's episodes after another's."""
        count = self.data.steps // self.envs
        steps = np.arange(count)[:, None] + np.arange(self.envs) * count
        for call in self.calls(steps, (self.data.terminated | self.data.truncated)[steps]):
            self.store.add(*call)


class Learner(learn.Learner):
    """A learner of Stable-Baselines3 with this project's buffer."""

    def buffer(self) -> Any:
        from gear_loader.integrations.sb3 import ReplayBuffer

        return ReplayBuffer


KINDS: dict[str, dict[str, Any]] = {
    "transitions": {"ours, SB3's calls": Transitions},
    "learn": {"ours": Learner},
}
