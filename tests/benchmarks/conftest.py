"""Fixtures of the benchmarks' tests: one thread, and an interpreter with a stand-in for another library."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other are slow where tests run beside tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


_CPPRB = """
    import numpy as np
    print("a library that prints")
    class ReplayBuffer:
        def __init__(self, size, columns):
            rows = columns.items()
            self.rows = {n: np.zeros((size, *np.atleast_1d(c.get("shape", 1))), c["dtype"]) for n, c in rows}
            self.size, self.n = size, 0
        def get_stored_size(self):
            return min(self.n, self.size)
        def on_episode_end(self):
            pass
        def add(self, **rows):
            name = next(iter(rows))
            shape = self.rows[name].shape[1:]
            count = max(1, np.size(rows[name]) // int(np.prod(shape)))
            places = (self.n + np.arange(count)) % self.size
            for name, values in rows.items():
                self.rows[name][places] = np.reshape(values, (count, *self.rows[name].shape[1:]))
            self.n += count
            return places
        def get_all_transitions(self):
            return {name: values[: self.get_stored_size()].copy() for name, values in self.rows.items()}
        def sample(self, count):
            picked = np.random.default_rng(0).integers(self.get_stored_size(), size=count)
            return {name: values[picked] for name, values in self.rows.items()}
        def save_transitions(self, file):
            np.savez(file, **self.get_all_transitions())
        def load_transitions(self, file):
            with np.load(file) as found:
                self.add(**found)
    class PrioritizedReplayBuffer(ReplayBuffer):
        def __init__(self, size, columns, alpha, eps):
            assert eps == 0.0
            super().__init__(size, columns)
            self.leaves, self.alpha = np.zeros(size), alpha
            self.random = np.random.default_rng(0)
        def add(self, priorities, **rows):
            self.leaves[super().add(**rows)] = priorities.astype(float) ** self.alpha
        def update_priorities(self, indexes, priorities):
            self.leaves[indexes.astype(int)] = priorities.astype(float) ** self.alpha
        def sample(self, batch, beta):
            if batch == 13:
                raise RuntimeError("thirteen")
            i = self.random.choice(self.n, batch, p=self.leaves[: self.n] / self.leaves[: self.n].sum())
            rows = {name: values[i] for name, values in self.rows.items()}
            return {**rows, "indexes": i, "weights": (self.leaves[i] / self.leaves[: self.n].min()) ** -beta}
"""


@pytest.fixture
def environments(tmp_path: Path) -> Path:
    """A folder of environments, with one that has a stand-in of cpprb: isolated, it sees no PYTHONPATH."""
    site = tmp_path / "site"
    about = site / "cpprb-11.0.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: cpprb\nVersion: 11.0.0\n", encoding="utf-8")
    (site / "cpprb.py").write_text(textwrap.dedent(_CPPRB), encoding="utf-8")
    script = tmp_path / "cpprb" / "bin" / "python"
    script.parent.mkdir(parents=True)
    start = f"import runpy, sys; sys.path.insert(0, {str(site)!r}); sys.argv = sys.argv[1:]; " + (
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    script.write_text(f'#!/bin/sh\nshift\nexec "{sys.executable}" -I -c "{start}" "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return tmp_path
