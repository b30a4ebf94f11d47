"""`SequenceBuffer` against the episodes that were added."""

from __future__ import annotations

import itertools
import random
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings, stateful
from hypothesis import strategies as st

import gear_loader as gear
from gear_loader.errors import CheckpointError, SchemaError


class Step(NamedTuple):
    """One step; `obs` and `next_obs` are numbers of observations, which never come back."""

    obs: int
    action: int
    next_obs: int
    terminated: bool
    truncated: bool


class World:
    """Environments whose observations are numbers that never come back.

    Attributes:
        episodes: of all environments, the steps of each so far.
        running: the episode that each environment goes on with.
        factors: by which ``twice`` may be larger than the observation.
    """

    def __init__(self, seed: int, n: int, end: float) -> None:
        self.choose, self.n, self.end = random.Random(seed), n, end
        self._numbers = itertools.count(1)
        self.factors = {2}
        self.episodes: list[list[Step]] = []
        self.running: list[list[Step]] = [[] for _ in range(n)]
        self.obs = [next(self._numbers) for _ in range(n)]

    def add_to(self, buffer: gear.SequenceBuffer) -> None:
        rows = []
        for env, obs in enumerate(self.obs):
            ends, cuts = (self.choose.random() < self.end for _ in range(2))
            row = Step(obs, self.choose.randrange(5), next(self._numbers), ends, cuts)
            if not self.running[env]:
                self.episodes.append(self.running[env])
            self.running[env].append(row)
            resets = ends or cuts or self.choose.random() < self.end / 2  # by a reset in its middle
            self.obs[env] = next(self._numbers) if resets else row.next_obs
            if resets:
                self.running[env] = []
            rows.append(row)
        obs, action, following, terminated, truncated = (np.array(part) for part in zip(*rows, strict=True))
        more = {"state": (obs.astype(np.float32), np.stack((obs, -obs), -1)), "twice": 2 * obs}
        buffer.add({"number": obs}, action, obs / 4, {"number": following}, terminated, truncated, **more)

    def check(self, batch: Any, buffer: gear.SequenceBuffer) -> list[tuple[int, int]]:
        """Check the rows of a batch against what was added; return the episode and step that each begins with."""
        found, length = [], buffer.length
        known = {row.obs: (e, t) for e, steps in enumerate(self.episodes) for t, row in enumerate(steps)}
        assert batch["obs"]["number"].shape == batch["mask"].shape == (len(batch["index"]), length)
        for i in range(len(batch["index"])):
            episode, start = known[int(batch["obs"]["number"][i, 0])]
            steps = self.episodes[episode][start : start + length]
            count = int(batch["mask"][i].sum())
            assert batch["mask"][i, :count].all()
            assert count > 0
            if buffer.capacity > 60:  # else pieces may lose their beginning while they are written
                assert count == len(steps)
            rows = steps[:count]
            obs = torch.tensor([row.obs for row in rows])
            assert torch.equal(batch["obs"]["number"][i, :count], obs)
            assert batch["next_obs"]["number"][i, :count].tolist() == [row.next_obs for row in rows]
            assert batch["action"][i, :count].tolist() == [row.action for row in rows]
            assert torch.equal(batch["reward"][i, :count], obs / 4)
            assert batch["terminated"][i, :count].tolist() == [row.terminated for row in rows]
            assert batch["is_first"][i, :count].tolist() == [start + k == 0 for k in range(count)]
            factors = batch["twice"][i, :count] // obs
            assert torch.equal(factors * obs, batch["twice"][i, :count])
            assert set(factors.tolist()) <= self.factors
            skipped = 0 if start == 0 else buffer.burn_in
            assert batch["loss_mask"][i].tolist() == [skipped <= k < count for k in range(length)]
            one, two = batch["state"]
            assert (one[i].item(), two[i].tolist()) == (obs[0], [obs[0], -obs[0]])
            found.append((episode, start))
        return found


@given(data=st.data())
@settings(deadline=None)
def test_sequences_are_parts_of_episodes(data: Any) -> None:
    """Also while a full buffer drops its oldest pieces; without that, a pass has every sequence once."""
    length = data.draw(st.integers(1, 12), "length")
    overlap = data.draw(st.integers(0, length - 1), "overlap")
    burn_in = data.draw(st.integers(0, length - 1), "burn_in")
    n, capacity = data.draw(st.integers(1, 3), "n"), data.draw(st.sampled_from([60, 400, 5_000]), "capacity")
    by_priority = data.draw(st.booleans(), "by priority")
    world = World(
        data.draw(st.integers(0, 10_000), "seed"), n, data.draw(st.sampled_from([0.0, 0.02, 0.2]), "end")
    )
    sampler = gear.Prioritized(unit="step") if by_priority else gear.Uniform(unit="step", replacement=False)
    buffer = gear.SequenceBuffer(
        capacity,
        length=length,
        overlap=overlap,
        burn_in=burn_in,
        sampler=sampler,
        batch_size=16,
        device="cpu",
    )
    for _ in range(3):
        for _ in range(data.draw(st.integers(2, 60), "steps")):
            world.add_to(buffer)
        stride = length - overlap
        rows = world.check(buffer.sample(), buffer)
        if capacity > 60:
            assert all(start % stride == 0 for _, start in rows)
        batch = buffer.sample(8)
        buffer.update_priority(batch, torch.rand(8, length)) if by_priority else None
        if by_priority or buffer.table.stats().num_evicted:
            continue
        pieces = gear.ReplayDataset(
            buffer.table,
            windows=buffer.dataset.windows,
            sampler=sampler,
            draws=gear.Draws(stride=stride),
            batch_size=16,
            device="cpu",
        )
        drawn = [row for each in pieces for row in world.check(buffer._finish(each), buffer)]
        assert len(set(drawn)) == len(drawn)
        wanted = set()
        for number, steps in enumerate(world.episodes):
            starts = range(0, len(steps), stride)
            wanted |= {(number, start) for start in starts if start == 0 or start + overlap < len(steps)}
        assert set(drawn) == wanted


def test_every_step_is_in_one_loss_mask() -> None:
    """With the default overlap, over pieces and the ends of episodes."""
    world = World(3, 2, 0.003)
    sampler = gear.Uniform(unit="step", replacement=False)
    buffer = gear.SequenceBuffer(3_000, length=10, burn_in=4, sampler=sampler, batch_size=7, device="cpu")
    for _ in range(600):
        world.add_to(buffer)
    buffer.dataset.batches_per_epoch = None
    counts: dict[int, int] = {}
    for batch in buffer:
        for obs in batch["obs"]["number"][batch["loss_mask"]].tolist():
            counts[obs] = counts.get(obs, 0) + 1
    wanted = {row.obs for steps in world.episodes for row in steps}
    assert max(len(steps) for steps in world.episodes) > 200  # some have pieces
    assert set(counts.values()) == {1}
    assert set(counts) == wanted


def test_states_are_written_back_and_found_by_the_next_sequences() -> None:
    buffer = gear.SequenceBuffer(1_000, length=6, burn_in=2, mutable=("state",), batch_size=8, device="cpu")
    for step in range(41):
        done = step % 20 == 19
        obs = np.full(3, step, np.float32)
        buffer.add(obs, 0, 0.0, obs + 1, done, False, state={"h": np.zeros(2, np.float32)})
    for _ in range(20):
        batch = buffer.sample()
        steps = batch["obs"][..., 0]
        assert buffer.set(batch, state={"h": torch.stack((steps, -steps), -1)}) == 0
    batch = buffer.sample(64)
    first = batch["obs"][:, 0, 0]
    assert torch.equal(batch["state"]["h"], torch.stack((first, -first), -1))
    assert buffer.set(batch, state={"h": torch.ones(64, 2)}) == 0
    assert (buffer.sample()["state"]["h"] == 1).all()
    for wrong, message in (
        ({"action": torch.zeros(64)}, "expected columns in mutable"),
        ({"state": torch.zeros(64)}, "expected a dict"),
        ({"state": {"h": torch.zeros(64, 3)}}, "has the shape"),
    ):
        with pytest.raises(SchemaError, match=message):
            buffer.set(batch, **wrong)
    buffer.table.clear()
    assert buffer.set(batch, state={"h": torch.zeros(64, 2)}) == 64


def test_priorities_of_steps_are_mixed() -> None:
    sampler = gear.Prioritized(alpha=1.0, eps=0.0, unit="step")
    buffer = gear.SequenceBuffer(
        500, length=4, burn_in=1, overlap=1, sampler=sampler, batch_size=64, device="cpu"
    )
    for step in range(13):
        buffer.add(float(step), 0, 0.0, float(step + 1), False, step == 12)
    batch = buffer.sample()
    error = torch.tensor([[9.0, 1.0, 2.0, 6.0]]).expand(64, 4)
    buffer.update_priority(batch, error, eta=0.5)
    # The first sequence has no burn-in; the others leave the 9 out.
    wanted = {0: 0.5 * 9 + 0.5 * 18 / 4, 3: 0.5 * 6 + 0.5 * 3, 6: 6 * 0.5 + 1.5, 9: 4.5}
    counts = dict.fromkeys(wanted, 0)
    for _ in range(100):
        for anchor in buffer.sample()["anchor"].tolist():
            counts[anchor] += 1
    total = sum(wanted.values())
    chi = sum((counts[a] - 6400 * p / total) ** 2 / (6400 * p / total) for a, p in wanted.items())
    assert chi < 16.3  # one in a thousand, with 3 degrees of freedom
    with pytest.raises(SchemaError, match="priority has the shape"):
        buffer.update_priority(batch, torch.zeros(64, 5))
    with pytest.raises(SchemaError, match="eta is 2"):
        buffer.update_priority(batch, error, eta=2)


def test_saved_buffers_go_on(tmp_path: Path) -> None:
    world = World(1, 2, 0.05)
    buffer = gear.SequenceBuffer(1_000, length=8, burn_in=3, mutable=("state",), batch_size=4, device="cpu")
    for _ in range(100):
        world.add_to(buffer)
    batch = buffer.sample(4)
    buffer.set(batch, state=(torch.full((4,), 7.0), torch.full((4, 2), 9)))
    buffer.save(tmp_path)
    loaded = gear.SequenceBuffer.load(tmp_path, batch_size=4, device="cpu")
    assert (loaded.length, loaded.burn_in, loaded.overlap, loaded.mutable) == (8, 3, 3, ("state",))
    loaded.load_state_dict(buffer.state_dict())
    one, two = buffer.sample(64), loaded.sample(64)
    assert torch.equal(one["state"][1], two["state"][1])
    assert (one["state"][0] == 7).any()
    for _ in range(30):
        world.add_to(loaded)
    loaded.sample()
    with pytest.raises(CheckpointError, match="of a SequenceBuffer"):
        gear.ReplayBuffer.load(tmp_path)


def test_errors() -> None:
    for options, message in (
        ({"length": 4, "burn_in": 4}, "burn_in and overlap below length"),
        ({"length": 4, "overlap": 5}, "burn_in and overlap below length"),
        ({"length": 0}, "length is 0"),
        ({"length": 4, "n_step": 3}, "has no n-step returns"),
        ({"length": 4, "mutable": "state"}, "expected names of columns"),
        ({"length": 4, "sampler": gear.Uniform()}, "expected one of steps"),
    ):
        with pytest.raises(SchemaError, match=message):
            gear.SequenceBuffer(100, **options)
    buffer = gear.SequenceBuffer(100, length=4, mutable=("state",))
    with pytest.raises(SchemaError, match="mutable has"):
        buffer.add(1.0, 0, 0.0, 2.0, False, False)
    with pytest.raises(SchemaError, match="is_first"):
        buffer.add(1.0, 0, 0.0, 2.0, False, False, state=1.0, is_first=True)
    buffer.add(1.0, 0, 0.0, 2.0, False, False, state=1.0)


class SequenceMachine(stateful.RuleBasedStateMachine):
    """A `SequenceBuffer` in any order of its calls; the list has every episode."""

    buffer: gear.SequenceBuffer | None = None

    @stateful.initialize(
        seed=st.integers(0, 1 << 30),
        n=st.integers(1, 3),
        length=st.integers(1, 8),
        parts=st.tuples(st.integers(0, 7), st.integers(0, 7)),
        capacity=st.sampled_from([60, 400, 5_000]),
        by_priority=st.booleans(),
    )
    def create(
        self, seed: int, n: int, length: int, parts: tuple[int, int], capacity: int, by_priority: bool
    ) -> None:
        overlap, burn_in = (min(part, length - 1) for part in parts)
        self.world = World(seed, n, 0.1)
        sampler = gear.Prioritized(unit="step") if by_priority else None
        self.options: Any = {"batch_size": 4, "sampler": sampler, "seed": seed % 7}
        sizes: Any = {"length": length, "overlap": overlap, "burn_in": burn_in, "mutable": ("twice",)}
        self.buffer = gear.SequenceBuffer(capacity, device="cpu", **sizes, **self.options)
        self.by_priority, self.saves = by_priority, 0
        self.files = tempfile.TemporaryDirectory()
        self.add(1)

    @stateful.rule(times=st.integers(1, 40))
    def add(self, times: int) -> None:
        for _ in range(times):
            self.world.add_to(self.buffer)

    @stateful.rule(count=st.integers(1, 6))
    def sample(self, count: int) -> None:
        self.world.check(self.buffer.sample(count), self.buffer)

    @stateful.rule()
    def set(self) -> None:
        batch = self.buffer.sample()
        self.world.factors.add(-1)
        assert self.buffer.set(batch, twice=-batch["obs"]["number"]) == 0
        names = batch["index"], batch["anchor"]
        found = self.buffer.table.gather(*names, windows={"twice": gear.Window(self.buffer.length)})
        assert torch.equal(found["twice"] * batch["mask"], -batch["obs"]["number"] * batch["mask"])

    @stateful.precondition(lambda self: self.by_priority)
    @stateful.rule()
    def update_priority(self) -> None:
        batch = self.buffer.sample()
        self.buffer.update_priority(batch, torch.rand(batch["mask"].shape) + 0.1)

    @stateful.rule()
    def save_and_load(self) -> None:
        self.saves += 1
        place = Path(self.files.name) / str(self.saves)
        self.buffer.save(place)
        again = gear.SequenceBuffer.load(place, device="cpu", **self.options)
        again.load_state_dict(self.buffer.state_dict())
        one, other = self.buffer.sample(), again.sample()
        if not self.by_priority:  # else draws depend on where the steps lie
            assert torch.equal(one["obs"]["number"], other["obs"]["number"])
            assert torch.equal(one["mask"], other["mask"])
        self.world.check(other, again)

    def teardown(self) -> None:
        if self.buffer is not None:
            self.buffer.table.close()
            self.files.cleanup()


TestSequencePrograms = SequenceMachine.TestCase
TestSequencePrograms.settings = settings(max_examples=4, stateful_step_count=10, deadline=None)


@pytest.mark.long
def test_many_programs() -> None:
    many = settings(max_examples=10, stateful_step_count=20, deadline=None)
    stateful.run_state_machine_as_test(SequenceMachine, settings=many)
