"""What the tests of `gear_loader.sources` share: a scripted environment, a D4RL-style file, comparisons."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import torch
from gymnasium import spaces

import gear_loader as gear
from gear_loader.sources import Episode, EpisodeReader

LENGTHS = (3, 1, 7, 64, 65, 2)


def kill_after_go(program: str) -> None:
    """Run an indented program in a process of its own, and kill it when it has printed "go"."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]) as child:
        assert child.stdout is not None
        said = child.stdout.readline()
        child.send_signal(signal.SIGKILL)
    assert said == b"go\n"


class ScriptedEnv(gymnasium.Env[Any, Any]):
    """Episodes of given lengths; everything at global step g tells g, so that a mix-up shows.

    The same buffer is handed out at each step, as fast environments do.
    """

    def __init__(self, lengths: Iterable[int] = LENGTHS, *, dtype: Any = np.float64) -> None:
        self.lengths = tuple(lengths)
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), dtype)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.episode, self.step_of, self.clock = -1, 0, 0
        self.closed = False
        self.seeds: list[int | None] = []
        self._buffer = np.zeros(3, dtype)

    def info(self) -> dict[str, Any]:
        return {"clock": self.clock, "inner": {"xy": np.full(2, self.clock / 8)}}

    def observe(self) -> Any:
        self._buffer[:] = (self.clock, self.episode, self.step_of)
        return self._buffer

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.seeds.append(seed)
        self.episode += 1
        self.step_of = 0
        return self.observe(), self.info()

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.step_of += 1
        self.clock += 1
        done = self.step_of == self.lengths[self.episode % len(self.lengths)]
        # Even episodes end by themselves, every third one is cut off: number 0 and 6 are both.
        return (
            self.observe(),
            self.clock / 4,
            done and self.episode % 2 == 0,
            done and (self.episode % 3 == 0 or self.episode % 2 == 1),
            self.info(),
        )

    def close(self) -> None:
        self.closed = True


def same(left: Any, right: Any) -> None:
    """Equal in every bit, and of the same dtype and shape."""
    left, right = (x.numpy() if isinstance(x, torch.Tensor) else np.asarray(x) for x in (left, right))
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    assert np.ascontiguousarray(left).tobytes() == np.ascontiguousarray(right).tobytes()


def same_episodes(left: Iterable[Mapping[str, Any]], right: Iterable[Mapping[str, Any]]) -> None:
    left, right = list(left), list(right)
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert list(one) == list(other)
        for name in one:
            same(one[name], other[name])
        if isinstance(one, Episode) and isinstance(other, Episode):
            assert set(one.final) == set(other.final)
            for name in one.final:
                same(one.final[name], other.final[name])


def read_in_parts(reader: EpisodeReader) -> None:
    """`EpisodeReader.between` reads what iteration gives, from any episode on, and `starts` are some of them."""
    whole, count = list(reader), len(reader)
    places = sorted({0, 1, count // 2, count - 1, *reader.starts.tolist()})
    for first in places:
        for last in {first, min(first + 1, count), *places, count}:
            found, expected = list(reader.between(first, last)), whole[first:last]
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                assert list(one) == list(other)
                assert one.final.keys() == other.final.keys()
                for name in one:
                    _equal(one[name], other[name])
                for name in one.final:
                    _equal(one.final[name], other.final[name])
    assert reader.starts[0] == 0
    assert (np.diff(reader.starts) > 0).all()
    assert reader.starts[-1] < count


def _equal(one: Any, other: Any) -> None:
    if isinstance(one, list):
        assert len(one) == len(other)
        for each, another in zip(one, other, strict=True):
            _equal(each, another)
    elif isinstance(one, (np.ndarray, torch.Tensor)):
        same(one, other)
    else:
        assert one == other


def contents(table: gear.Table) -> list[dict[str, torch.Tensor]]:
    return [table[int(index)] for index in table.indices()]


def _stats(table: gear.Table) -> gear.TableStats:
    return dataclasses.replace(table.stats(), num_inserted=0)  # what was added and taken back counts too


@contextlib.contextmanager
def unchanged(table: gear.Table) -> Iterator[None]:
    """The block must leave the table as it was, down to the blocks in use."""
    before = (len(table), table.num_steps, table.indices().tolist(), _stats(table), contents(table))
    yield
    table.check_valid()
    after = (len(table), table.num_steps, table.indices().tolist(), _stats(table), contents(table))
    assert after[:4] == before[:4]
    same_episodes(after[4], before[4])


def flat_arrays(lengths: Iterable[int] = LENGTHS, *, rest: int = 0, seed: int = 0) -> dict[str, np.ndarray]:
    """The arrays of a D4RL-style file; trajectory 0 ends with both flags, then the flags take turns.

    Args:
        lengths: steps of the finished trajectories.
        rest: steps after the last flag.
    """
    lengths = list(lengths)
    steps = sum(lengths) + rest
    rng = np.random.default_rng(seed)
    terminals, timeouts = np.zeros(steps, bool), np.zeros(steps, bool)
    for number, end in enumerate(np.cumsum(lengths)):
        terminals[end - 1] = number % 2 == 0
        timeouts[end - 1] = number % 2 == 1 or number == 0
    return {
        "observations": rng.standard_normal((steps, 5)).astype(np.float32),
        "actions": rng.standard_normal((steps, 2)).astype(np.float32),
        "rewards": rng.standard_normal(steps).astype(np.float32),
        "terminals": terminals,
        "timeouts": timeouts,
    }


def write(path: Any, arrays: Mapping[str, np.ndarray], **options: Any) -> str:
    """Write arrays to an HDF5 file, each at its path, and return the file's name."""
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, **options)
    return str(path)


D4RL_NAMES = {
    "observation": "observations",
    "action": "actions",
    "reward": "rewards",
    "terminated": "terminals",
    "truncated": "timeouts",
}


def cut(arrays: Mapping[str, np.ndarray], lengths: Iterable[int]) -> list[dict[str, np.ndarray]]:
    """The trajectories one by one, split here by their known lengths."""
    episodes, start = [], 0
    for length in lengths:
        piece = slice(start, start + length)
        episodes.append({name: arrays[path][piece] for name, path in D4RL_NAMES.items()})
        start += length
    return episodes
