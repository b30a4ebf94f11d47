"""`ReplayBuffer` against a list of the transitions that were added."""

from __future__ import annotations

import concurrent.futures
import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from table_common import fresh_name
from transition_common import GAMMA, World, add_all, check, shaped

import gear_loader as gear
from gear_loader.collection import prefetch
from gear_loader.errors import CheckpointError, SchemaError, TableEmptyError
from gear_loader.utils import notices


@settings(max_examples=examples(15), deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.sampled_from([1, 1, 2, 5]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 7, 60, 400]),
    st.sampled_from(["array", "tensor", "nested"]),
    st.booleans(),
    st.booleans(),
)
def test_batches_are_what_was_added(
    seed: int, n: int, n_step: int, capacity: int, kind: str, next_step: bool, by_priority: bool
) -> None:
    world = World(seed, n, next_step=next_step and n > 1)
    sampler = gear.Prioritized(unit="step") if by_priority else None
    buffer = gear.ReplayBuffer(
        capacity, n_step=n_step, gamma=GAMMA, batch_size=9, sampler=sampler, device="cpu"
    )
    for turn in range(40):
        add_all(buffer, world, kind)
        batch = buffer.sample(None if turn % 2 else 4)
        assert len(batch["reward"]) == (9 if turn % 2 else 4)
        check(buffer, world, kind, batch)
        if by_priority:
            buffer.update_priority(batch, torch.rand(len(batch["reward"])))
    total = sum(map(len, world.added))
    assert len(buffer) <= total
    if total <= capacity:
        assert len(buffer) == total


@pytest.mark.parametrize("n_step", [1, 3])
def test_a_transition_can_be_drawn_at_once(n_step: int) -> None:
    buffer = gear.ReplayBuffer(100, n_step=n_step, gamma=GAMMA, device="cpu")
    for step in range(20):
        ends = step % 7 == 6
        buffer.add(np.float32(step), step, 1.0, np.float32(step + 1), False, ends)
        batch = buffer.sample(400)
        assert set(batch["obs"].tolist()) == set(range(step + 1))
        episode_end = batch["obs"] // 7 * 7 + 7
        reached = torch.minimum(torch.minimum(batch["obs"] + n_step, episode_end), torch.tensor(step + 1.0))
        assert torch.equal(batch["next_obs"], reached)


def test_the_table_has_all_that_was_added_before() -> None:
    buffer = gear.ReplayBuffer(1_000, device="cpu")
    for step in range(60):
        obs, next_obs = torch.full((4,), step), torch.full((4,), step + 1)
        buffer.add(obs, 0, 1.0, next_obs, terminated=False, truncated=False)
    table = buffer.table
    assert table is not None
    assert sum(len(table[int(index)]["reward"]) for index in table.indices()) == 60


def test_a_full_buffer_drops_its_oldest_and_holds_nearly_its_capacity() -> None:
    buffer = gear.ReplayBuffer(1_000, device="cpu")
    for step in range(5_010):
        buffer.add(np.float32(step), step, 0.0, np.float32(step + 1), False, False)  # a stream without end
    drawn = set(buffer.sample(20_000)["action"].tolist())
    assert max(drawn) == 5_009
    assert 800 <= len(buffer) <= 1_000
    assert min(drawn) == 5_010 - len(buffer)


@pytest.mark.parametrize("mean_length", [1, 2.5])
@pytest.mark.parametrize("payload", [None, "1MiB"])
def test_short_episodes_of_a_given_mean_length_fill_the_capacity(
    mean_length: float, payload: str | None
) -> None:
    buffer = gear.ReplayBuffer(2_000, device="cpu", mean_length=mean_length, payload=payload)
    for step in range(4_000):
        obs, next_obs = ((f"{at}" if payload else float(at)) for at in (step, step + 1))
        end = mean_length == 1 or step % 5 in (1, 4)  # of 2 and 3 steps
        buffer.add(obs, 0, float(step), next_obs, end, False)
    assert 1_950 <= len(buffer) <= 2_000


def test_a_buffer_says_once_that_its_episodes_are_short(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_seen", {})

    def said(buffer: gear.ReplayBuffer, steps: int, *, follows: bool) -> str:
        caplog.clear()
        for step in range(steps):
            obs = float(step) if follows else -float(step)
            buffer.add(obs, 0, 0.0, obs + 1, False, step % 10 == 9)
            if step % 50 == 49:
                buffer.sample(2)
        return caplog.text

    make = lambda **options: gear.ReplayBuffer(1_000, device="cpu", **options)  # noqa: E731
    assert said(make(n_step=3), 3_000, follows=True) == ""
    assert said(make(), 100, follows=False) == ""  # each transition is whole, and there is room
    text = said(make(n_step=3), 100, follows=False)
    assert (
        "have 1.0 steps on average, where rows are to reach over 3. An episode also ends where obs is not"
        in text
    )
    assert "where rows are to reach over 20." not in text
    monkeypatch.setattr(notices, "_seen", {})
    assert "reach over 20" in said(gear.SequenceBuffer(1_000, length=20, device="cpu"), 100, follows=False)
    text = said(make(), 1_000, follows=False)
    assert "is full with 159: there is room for 159 trajectories" in text
    assert "give mean_length=1." in text
    assert said(make(), 1_000, follows=False) == ""  # once


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("n_step", [1, 3])
def test_observations_are_stacked_within_their_episodes(n: int, n_step: int, tmp_path: Path) -> None:
    """Also those to bootstrap from, wherever an episode ends; and after a load."""
    sampler = gear.Prioritized(unit="step")
    buffer = gear.ReplayBuffer(900, n_step=n_step, gamma=GAMMA, stack=4, sampler=sampler, device="cpu")
    random, episodes = np.random.default_rng(n), n
    obs = 1000.0 * np.arange(n)
    for step in range(200):
        ends = random.random((2, n)) < 0.1
        given: Any = obs, np.zeros(n, int), np.ones(n), obs + 1, *ends
        buffer.add(*(each[0].item() for each in given) if n == 1 else given)
        obs = obs + 1
        for place in np.flatnonzero(ends.any(0)):
            obs[place], episodes = 1000.0 * episodes, episodes + 1
        if step == 100:
            buffer.save(tmp_path / "saved")
            loaded = gear.ReplayBuffer.load(tmp_path / "saved", sampler=sampler, device="cpu")
        if step % 50 == 20 or step == 100:
            batch = (loaded if step == 100 else buffer).sample(512)
            now, then = batch["obs"][:, -1], batch["next_obs"][:, -1]
            first, back = now // 1000 * 1000, torch.arange(3, -1, -1)
            assert torch.equal(batch["obs"], (now[:, None] - back).maximum(first[:, None]))
            assert torch.equal(batch["next_obs"], (then[:, None] - back).maximum(first[:, None]))
            assert (now == first).any()  # the first step of an episode is drawn
            assert set((then - now).tolist()) == set(range(1, n_step + 1))
            ended = batch["discount"] == 0
            assert ended.any()
            torch.testing.assert_close(batch["discount"][~ended], GAMMA ** (then - now)[~ended])


def test_a_target_is_right_where_an_episode_is_cut_off() -> None:
    buffer = gear.ReplayBuffer(100, gamma=0.5, device="cpu")
    buffer.add(np.zeros(2), 0, 1.0, np.ones(2), False, True)
    buffer.add(np.full(2, 5.0), 0, 3.0, np.full(2, 6.0), True, False)
    batch = buffer.sample(50)
    found = {
        (o[0], f[0], r, d)
        for o, f, r, d in zip(
            *(batch[k].tolist() for k in ("obs", "next_obs", "reward", "discount")), strict=True
        )
    }
    assert found == {(0.0, 1.0, 1.0, 0.5), (5.0, 6.0, 3.0, 0.0)}


@settings(max_examples=examples(10), deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([9, 200]), st.sampled_from([1, 30, 150]), st.booleans())
def test_extend_adds_what_add_adds(seed: int, capacity: int, count: int, some: bool) -> None:
    one, other = (gear.ReplayBuffer(capacity, n_step=2, device="cpu") for _ in range(2))
    world, choose = World(seed, 1), np.random.default_rng(seed)
    for _ in range(2):
        rows = [world.step()[0] for _ in range(count)]
        active = choose.random(count) < 0.8 if some else np.ones(count, bool)
        for row, acts in zip(rows, active, strict=True):
            one.add(
                shaped(row.obs, "nested"), *row[1:3], shaped(row.next_obs, "nested"), *row[4:], active=[acts]
            )
        obs, action, reward, following, terminated, truncated = (
            np.array(part) for part in zip(*rows, strict=True)
        )
        other.extend({
            "obs": shaped(obs, "nested"), "action": action, "reward": reward,
            "next_obs": shaped(following, "nested"), "terminated": terminated, "truncated": truncated,
            **({"active": active} if some else {}),
        })  # fmt: skip
        assert len(one) == len(other)
        if not len(one):
            continue
        for a, b in zip(flat(one.sample()), flat(other.sample()), strict=True):
            assert torch.equal(a, b)


def flat(batch: Any) -> list[torch.Tensor]:
    """The leaves of a batch."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    return [leaf for part in (batch.values() if isinstance(batch, dict) else batch) for leaf in flat(part)]


@pytest.mark.parametrize(
    "change", [{"obs": np.zeros((2, 3))}, {"reward": np.zeros(3)}, {"terminated": [0.5, 1]}]
)
def test_a_wrong_extend_adds_nothing(change: dict[str, Any]) -> None:
    buffer = gear.ReplayBuffer(50, device="cpu")
    buffer.add(**GOOD)
    with pytest.raises(SchemaError):
        buffer.extend({**{name: np.stack([value, value]) for name, value in GOOD.items()}, **change})
    assert len(buffer) == 1


def test_a_saved_buffer_goes_on(tmp_path: Path) -> None:
    world = World(3, 2)
    buffer = gear.ReplayBuffer(200, n_step=2, gamma=GAMMA, device="cpu")
    for _ in range(50):
        add_all(buffer, world, "nested")
    buffer.sample()
    buffer.save(tmp_path / "saved")
    state = buffer.state_dict()
    again = gear.ReplayBuffer.load(tmp_path / "saved", device="cpu")  # n_step and gamma are saved with it
    again.load_state_dict(state)
    assert (again.n_step, again.gamma) == (2, GAMMA)
    assert gear.ReplayBuffer.load(tmp_path / "saved", n_step=1, device="cpu").n_step == 1
    assert len(again) == len(buffer)
    for _ in range(3):
        a, b = buffer.sample(), again.sample()
        assert torch.equal(a["obs"]["number"], b["obs"]["number"])
        assert torch.equal(a["next_obs"]["eyes"][0], b["next_obs"]["eyes"][0])
        assert torch.equal(a["reward"], b["reward"])
    for _ in range(150):
        add_all(again, world, "nested")
        check(again, world, "nested", again.sample(8))


def test_a_buffer_goes_on_with_what_its_directory_holds(tmp_path: Path) -> None:
    world = World(5, 2)
    buffer = gear.ReplayBuffer(200, gamma=GAMMA, device="cpu", disk=tmp_path / "here")
    for _ in range(30):
        add_all(buffer, world, "nested")
    count = len(buffer)
    assert buffer.table is not None
    buffer.table.close()
    for wrong in ({"capacity": 300}, {"capacity": 200, "num_envs": 3}):
        with pytest.raises(SchemaError, match="expected 200 and 2"):
            gear.ReplayBuffer(**wrong, device="cpu", disk=tmp_path / "here")
    again = gear.ReplayBuffer(200, gamma=GAMMA, device="cpu", disk=tmp_path / "here")
    assert len(again) == count
    check(again, world, "nested", again.sample(64))
    for _ in range(10):
        add_all(again, world, "nested")
    check(again, world, "nested", again.sample(64))
    assert again.table is not None
    again.table.close()


def test_spaces_tell_the_columns() -> None:
    spaces = pytest.importorskip("gymnasium").spaces
    space = spaces.Dict(
        {
            "eye": spaces.Box(0, 255, (4, 4), np.uint8),
            "pair": spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,)))),
        }
    )
    buffer = gear.ReplayBuffer(
        50, num_envs=1, observation_space=space, action_space=spaces.MultiDiscrete([2, 3]), device="cpu"
    )
    assert buffer.table is not None
    assert list(buffer.table.schema) == [
        "obs.eye",
        "obs.pair.0",
        "obs.pair.1",
        "action",
        "reward",
        "terminated",
    ]
    first = space.sample()
    for _ in range(5):
        following = space.sample()
        buffer.add(first, np.array([1, 2]), 1.0, following, False, False)
        first = following
    batch = buffer.sample(3)
    assert batch["obs"]["eye"].shape == (3, 4, 4)
    assert batch["next_obs"]["pair"][1].shape == (3, 2)


def test_the_table_is_open_to_other_processes() -> None:
    buffer = gear.ReplayBuffer(50, name=fresh_name(), device="cpu")
    try:
        buffer.add(np.zeros(2), 0, 1.0, np.ones(2), False, False)
        assert buffer.table is not None
        with gear.Table.attach(buffer.table.name) as other:
            assert other.num_steps == 1
    finally:
        assert buffer.table is not None
        buffer.table.unlink()


GOOD: dict[str, Any] = {
    "obs": np.zeros(2), "action": 0, "reward": 0.0, "next_obs": np.zeros(2), "terminated": False, "truncated": False,
}  # fmt: skip
WRONG_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"reward": np.zeros((2, 2))}, r"reward has the shape \[2, 2\]"),
    ({"reward": np.zeros(2)}, r"reward has the shape \[2\]; expected a number or \[1\]: .*num_envs"),
    ({"obs": {"a": np.zeros(2)}}, r"'obs' is a dict of \['a'\]; expected an array, as before"),
    ({"next_obs": (np.zeros(2),)}, r"'obs' is a tuple of \[0\]; expected an array"),
    ({"obs": np.zeros(3)}, r"'obs' has the shape \[3\]; expected \[2\]"),
    ({"next_obs": np.zeros(3)}, r"'next_obs' has the shape \[3\]; expected \[2\]"),
    ({"obs": np.zeros(2, complex)}, "obs"),
    ({"terminated": np.zeros(3, bool)}, r"terminated has the shape \[3\]"),
    ({"truncated": 0.5}, "truncated has the shape .* and dtype float64"),
    ({"new": 1}, r"the first add, \['action', 'obs'\]; missing: \[\], unknown: \['new'\]"),
    ({"active": [True, False]}, r"active has the shape \[2\]"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_CALLS)
def test_wrong_calls_change_nothing(change: dict[str, Any], message: str) -> None:
    buffer = gear.ReplayBuffer(50, device="cpu")
    buffer.add(**GOOD)
    with pytest.raises(SchemaError, match=message):
        buffer.add(**{**GOOD, **change})
    assert len(buffer) == 1
    buffer.add(**GOOD)
    assert len(buffer) == 2


WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"capacity": 0}, "capacity is 0"),
    ({"n_step": 0}, "n_step is 0"),
    ({"gamma": 1.5}, "gamma is 1.5"),
    ({"sampler": gear.Uniform()}, "expected one of steps"),
    ({"num_envs": 0}, "num_envs is 0"),
    ({"stack": 0}, "stack is 0"),
    ({"stack": 4, "payload": "1MiB"}, "stack is 4 with agents, hindsight or payload"),
    ({"mean_length": 0.5}, "mean_length is 0.5; expected a number of at least 1"),
    ({"observation_space": 1}, "expected both, or none"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        gear.ReplayBuffer(**{"capacity": 10, **options})


@pytest.mark.parametrize(
    "kind", [gear.ReplayBuffer, functools.partial(gear.SequenceBuffer, length=5, burn_in=2)]
)
def test_several_attached_buffers_add_to_one_table(kind: Any) -> None:
    """As in processes of their own: each has its own running episodes."""
    make = functools.partial(kind, 2_000, name=(name := fresh_name()), device="cpu")
    learner = make()
    learner.add(-1.0, 0, 0.0, -2.0, True, False)
    actors = [make(if_exists="attach") for _ in range(3)]
    try:
        for step in range(70):
            for number, actor in enumerate(actors):
                obs = 1000.0 * number + step
                actor.add(obs, 0, 0.0, obs + 1, False, step % 30 == 29)
            learner.sample(4)
        assert len(learner) == 1 + 3 * 70
        assert learner.table is not None
        assert sorted(len(learner.table[int(i)]["obs"]) for i in learner.table.indices()) == [
            1,
            *3 * [10],
            *6 * [30],
        ]
        batch = learner.sample(512)
        steps, inside = batch["next_obs"] - batch["obs"], batch.get("mask", torch.tensor(True))
        assert set(steps[inside.expand(steps.shape)].tolist()) == {1.0, -1.0}
        assert len(set((batch["obs"] // 1000).flatten().tolist())) >= 4
    finally:
        gear.Table.attach(name).unlink()


def test_what_a_buffer_is_not_says_what_to_do() -> None:
    buffer = gear.ReplayBuffer(50, device="cpu")
    with pytest.raises(SchemaError, match=r"priority was given to add, .* largest one so far"):
        buffer.add(**GOOD, priority=1.0)
    assert len(buffer) == 0
    buffer.add(**GOOD)
    with pytest.raises(
        TypeError, match=r"Row 0 of a ReplayBuffer .* DataLoader\(buffer.dataset, batch_size=None\)"
    ):
        next(iter(torch.utils.data.DataLoader(buffer, batch_size=None)))  # type: ignore[arg-type]


def test_an_empty_buffer_says_so(tmp_path: Path) -> None:
    buffer = gear.ReplayBuffer(10)
    assert len(buffer) == 0
    for call in (buffer.sample, lambda: next(iter(buffer)), lambda: buffer.save(tmp_path / "x")):
        with pytest.raises(TableEmptyError, match="The replay buffer is empty"):
            call()
    with pytest.raises(CheckpointError, match=r"buffer\.json"):
        gear.ReplayBuffer.load(tmp_path)


def test_threads_that_sample_store_waiting_rows_once() -> None:
    buffer = gear.ReplayBuffer(1_000, batch_size=4, device="cpu")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            for number in range(500):
                obs = np.full(3, number, np.float32)
                buffer.add(obs, 0, float(number), obs + 1, False, False)
                if number % 5 == 4:
                    list(threads.map(lambda _: [buffer.sample() for _ in range(3)], range(4)))
    finally:
        sys.setswitchinterval(interval)
    rewards = [buffer.table[int(index)]["reward"] for index in buffer.table.indices()]
    assert torch.cat(rewards).tolist() == list(range(500))


def test_threads_that_iterate_or_ask_for_the_length_store_waiting_rows_once() -> None:
    buffer = gear.ReplayBuffer(5_000, batch_size=4, device="cpu")
    buffer.add(np.zeros(3, np.float32), 0, 0.0, np.ones(3, np.float32), False, False)
    batches, interval = iter(buffer), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            for number in range(1, 500):
                obs = np.full(3, number, np.float32)
                buffer.add(obs, 0, float(number), obs + 1, False, False)
                calls = (buffer.sample, lambda: next(batches), lambda: len(buffer))
                list(threads.map(lambda call: call(), calls))
    finally:
        sys.setswitchinterval(interval)
    rewards = [buffer.table[int(index)]["reward"] for index in buffer.table.indices()]
    assert torch.cat(rewards).tolist() == list(range(500))


@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_row_whose_add_was_interrupted_when_it_was_stored_is_not_stored_again(
    num_envs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = gear.ReplayBuffer(1_000, num_envs=num_envs, device="cpu")

    def add(number: int) -> None:
        obs = np.full((num_envs, 3), number, np.float32)
        flags = np.zeros(num_envs, bool)
        buffer.add(obs, np.zeros(num_envs), np.full(num_envs, number, np.float32), obs + 1, flags, flags)

    add(0)
    lock: Any = buffer.table._engine.index.recovery.lock
    run = lock.run

    def interrupted(*given: Any) -> None:
        run(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lock, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            add(2)  # begins another trajectory, as the next one
    add(4)
    rewards = [buffer.table[int(index)]["reward"] for index in buffer.table.indices()]
    assert sorted(torch.cat(rewards).tolist()) == sorted([0, 2, 4] * num_envs)


@pytest.mark.parametrize("handler", [False, True])
def test_a_batch_is_sampled_while_the_thread_of_an_iteration_starts(
    handler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = gear.Prioritized(alpha=0.6, beta=0.4, unit="step")
    buffer = gear.ReplayBuffer(100, batch_size=4, device="cpu", sampler=sampler)
    for number in range(10):
        obs = np.full(3, number, np.float32)
        buffer.add(obs, 0, float(number), obs + 1, False, False)
    make = prefetch.background_thread

    with concurrent.futures.ThreadPoolExecutor(1) as threads:

        def delayed(*args: Any, **options: Any) -> Any:
            thread = make(*args, **options)
            start = thread.start

            def begin() -> None:
                if handler:
                    buffer.sample()
                else:
                    concurrent.futures.wait([threads.submit(buffer.sample)], timeout=0.5)
                start()

            monkeypatch.setattr(thread, "start", begin)
            return thread

        monkeypatch.setattr(prefetch, "background_thread", delayed)
        batches = iter(buffer)
        assert len(next(batches)["reward"]) == len(next(batches)["reward"]) == 4
