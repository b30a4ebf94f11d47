"""Random programs of calls on replay buffers, against lists of what was added."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings, stateful
from hypothesis import strategies as st
from transition_common import GAMMA, World, add_all, check, numbers_of, shaped

import gear_loader as gear


class BufferMachine(stateful.RuleBasedStateMachine):
    """A `ReplayBuffer` in any order of its calls; the list has every transition.

    Attributes:
        never: observations whose priority was set to 0, which must not be drawn again. elsewhere: observations
            of another buffer.
    """

    buffer: gear.ReplayBuffer | None = None

    @stateful.initialize(
        seed=st.integers(0, 1 << 30),
        n=st.sampled_from([1, 1, 2, 3]),
        n_step=st.integers(1, 3),
        capacity=st.sampled_from([1, 9, 60, 400]),
        kind=st.sampled_from(["array", "tensor", "nested"]),
        resets=st.booleans(),
        by_priority=st.booleans(),
    )
    def create(
        self, seed: int, n: int, n_step: int, capacity: int, kind: str, resets: bool, by_priority: bool
    ) -> None:
        self.kind, self.by_priority = kind, by_priority
        self.world = World(seed, n, next_step=resets and n > 1)
        sampler = gear.Prioritized(unit="step") if by_priority else None
        self.options: Any = {
            "n_step": n_step,
            "gamma": GAMMA,
            "batch_size": 5,
            "sampler": sampler,
            "seed": seed % 7,
        }
        self.buffer = gear.ReplayBuffer(capacity, device="cpu", **self.options)
        self.files = tempfile.TemporaryDirectory()
        self.never: set[int] = set()
        self.elsewhere: set[int] = set()
        self.saves, self.mixed = 0, False
        add_all(self.buffer, self.world, kind)

    @property
    def own(self) -> list[int]:
        """Observations of all transitions of the buffer."""
        return [row.obs for part in self.world.added for row in part if row.obs not in self.elsewhere]

    def check(self, batch: Any) -> None:
        assert self.buffer is not None
        check(self.buffer, self.world, self.kind, batch)
        assert not self.never & set(numbers_of(batch["obs"], self.kind).tolist())

    @stateful.rule(times=st.integers(1, 40))
    def add(self, times: int) -> None:
        for _ in range(times):
            add_all(self.buffer, self.world, self.kind)

    @stateful.precondition(lambda self: self.world.n == 1)
    @stateful.rule(times=st.integers(1, 40))
    def extend(self, times: int) -> None:
        rows = [self.world.step()[0] for _ in range(times)]
        obs, action, reward, following, terminated, truncated = map(np.array, zip(*rows, strict=True))
        self.buffer.extend({
            "obs": shaped(obs, self.kind), "action": action, "reward": reward, "terminated": terminated,
            "next_obs": shaped(following, self.kind), "truncated": truncated, "age": reward * 2,
        })  # fmt: skip

    @stateful.rule(count=st.integers(1, 9))
    def sample(self, count: int) -> None:
        batch = self.buffer.sample(count)
        assert len(batch["reward"]) == count
        self.check(batch)

    @stateful.rule(count=st.integers(1, 3))
    def iterate(self, count: int) -> None:
        for batch, _ in zip(self.buffer, range(count), strict=False):
            check(self.buffer, self.world, self.kind, batch)

    @stateful.precondition(lambda self: self.by_priority)
    @stateful.rule(seed=st.integers(0, 1 << 30), zero=st.booleans())
    def update_priority(self, seed: int, zero: bool) -> None:
        batch = self.buffer.sample()
        self.check(batch)
        obs = numbers_of(batch["obs"], self.kind)
        priority = 0.1 + torch.from_numpy(np.random.default_rng(seed).random(len(obs), np.float32))
        if zero and len(self.buffer) > 4 * (len(self.never) + 1):
            self.never.add(int(obs[0]))
            priority[obs == obs[0]] = 0
        self.buffer.update_priority(batch, priority)

    @stateful.rule()
    def save_and_load(self) -> None:
        """The one that is loaded goes on with the same draws, and takes the place of the first. Not where a mixture has
        drawn from it, whose draws are others; nor by priorities of steps, which depend on where these lie."""
        self.saves += 1
        place = Path(self.files.name) / str(self.saves)
        self.buffer.save(place)
        state = self.buffer.state_dict()
        again = gear.ReplayBuffer.load(place, device="cpu", **self.options)
        again.load_state_dict(state)
        assert len(again) == len(self.buffer)
        for _ in range(2):
            one, other = self.buffer.sample(), again.sample()
            self.check(other)
            if self.mixed or self.by_priority:
                continue
            for name in ("obs", "next_obs"):
                assert torch.equal(numbers_of(one[name], self.kind), numbers_of(other[name], self.kind))
            assert torch.equal(one["reward"], other["reward"])
            assert torch.equal(one["discount"], other["discount"])
        if not (self.world.next_step and any(self.world._ended)):  # what ended is not in the files
            self.buffer.table.close()
            self.buffer, self.mixed = again, False

    @stateful.precondition(lambda self: not self.world.next_step)
    @stateful.rule()
    def mix(self) -> None:
        """With another buffer, whose observations are those of the same list."""
        other = gear.ReplayBuffer(50, device="cpu", **self.options)
        before = set(self.own)
        for _ in range(20):
            add_all(other, self.world, self.kind)
        self.elsewhere |= set(self.own) - before
        add_all(self.buffer, self.world, self.kind)
        sources = {"a": (self.buffer.dataset, 0.5), "b": (other.dataset, 0.5)}
        batch = gear.Mixture(sources, batch_size=6).sample()
        self.mixed = True
        source = batch.pop("source")
        assert source.tolist() == [0, 0, 0, 1, 1, 1]
        check(self.buffer, self.world, self.kind, batch)
        other.table.close()

    @stateful.invariant()
    def holds_the_newest(self) -> None:
        if self.buffer is None:
            return
        total = len(self.own)
        stored = len(self.buffer)
        assert 0 < stored <= total
        if self.world.n == 1:
            least = self.own[-stored]
            drawn = numbers_of(self.buffer.sample(4)["obs"], self.kind)
            assert int(drawn.min()) >= least

    def teardown(self) -> None:
        if self.buffer is not None:
            self.buffer.table.close()
            self.files.cleanup()


TestBufferPrograms = BufferMachine.TestCase
TestBufferPrograms.settings = settings(max_examples=6, stateful_step_count=12, deadline=None)


@pytest.mark.long
def test_many_programs() -> None:
    many = settings(max_examples=20, stateful_step_count=25, deadline=None)
    stateful.run_state_machine_as_test(BufferMachine, settings=many)
