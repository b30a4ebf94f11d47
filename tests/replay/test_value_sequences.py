"""`SequenceBuffer` and `Hindsight` with values of any length, against lists of what was added."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import gear_loader as gear
from gear_loader.errors import SchemaError

T, OVERLAP = 6, 2


def observation(number: int) -> dict[str, Any]:
    return {
        "text": f"{number} " + "x" * (number % 5),
        "tokens": np.arange(2 * (number % 4), dtype=np.int32).reshape(-1, 2) + number,
        "speed": np.full(3, number, np.float32),
    }


def same(found: Any, row: int, step: int, number: int | None) -> bool:
    """Whether an observation of a batch is that of a number, or blank."""
    text, tokens, speed = (
        found["text"][row][step],
        found["tokens"].tolist()[row][step],
        found["speed"][row, step],
    )
    if number is None:
        return text == "" and len(tokens) == 0 and not speed.any()
    expected = observation(number)
    equal = np.array_equal(tokens.numpy().reshape(-1, 2), expected["tokens"])
    return text == expected["text"] and equal and np.array_equal(speed, expected["speed"])


def play(buffer: gear.SequenceBuffer, envs: int, lengths: list[int]) -> dict[int, list[int]]:
    """Episodes of these lengths, in turn, on each environment; the observations of each episode, by its first one.

    Observation number n is followed by n + 1, and the reward of a transition is the number of its observation.
    """
    known: dict[int, list[int]] = {}
    next_number, now, left = 1, [0] * envs, [0] * envs
    queue = [list(lengths) for _ in range(envs)]
    first = [0] * envs
    for _ in range(sum(lengths)):
        for i in range(envs):
            if not left[i]:
                left[i] = queue[i].pop(0)
                now[i] = first[i] = next_number
                known[first[i]] = [next_number]
                next_number += left[i] + 2
        numbers = np.array(now)
        ends = np.array([each == 1 for each in left])
        obs, after = ([observation(n) for n in some] for some in (numbers, numbers + 1))
        nested = [{name: [each[name] for each in some] for name in some[0]} for some in (obs, after)]
        given = (
            nested[0],
            numbers % 3,
            numbers.astype(np.float32),
            nested[1],
            ends & (numbers % 2 == 0),
            ends,
        )
        buffer.add(*given)
        for i in range(envs):
            known[first[i]].append(now[i] + 1)
            now[i], left[i] = now[i] + 1, left[i] - 1
    return known


@pytest.mark.parametrize("envs", [1, 2])
def test_sequences_have_what_was_added(envs: int) -> None:
    options: dict[str, Any] = {
        "payload": "1MiB",
        "ragged": ("obs.tokens",),
        "device": "cpu",
        "num_envs": envs,
    }
    buffer = gear.SequenceBuffer(400, length=T, burn_in=OVERLAP, **options)
    known = play(buffer, envs, [1, 30, 4, 6, 7, 13])
    firsts = {number: first for first, numbers in known.items() for number in numbers[:-1]}
    trained, unit = set[int](), T - OVERLAP
    for _ in range(20):
        batch = buffer.sample(32)
        numbers = batch["reward"].numpy().astype(int)
        for row, mask in enumerate(batch["mask"].numpy()):
            count = int(mask.sum())
            assert count > 0
            assert mask[:count].all()
            begin = int(numbers[row, 0])
            first, places = firsts[begin], known[firsts[begin]]
            assert (begin - first) % unit == 0
            assert numbers[row, :count].tolist() == list(range(begin, begin + count))
            assert count == min(T, len(places) - 1 - (begin - first))
            for step in range(T):
                there = step < count
                assert same(batch["obs"], row, step, begin + step if step <= count else None)
                assert same(batch["next_obs"], row, step, begin + step + 1 if there else None)
                assert bool(batch["is_first"][row, step]) == (there and begin + step == first)
                loss = there and (step >= OVERLAP or begin == first)
                assert bool(batch["loss_mask"][row, step]) == loss
                trained |= {begin + step} if loss else set()
                ends = there and begin + step == places[-2] and places[-2] % 2 == 0
                assert bool(batch["terminated"][row, step]) == ends
    assert trained == set(firsts)
    assert buffer.table is not None
    buffer.table.check_valid()


def test_pieces_of_a_long_episode_have_steps_in_common() -> None:
    options: dict[str, Any] = {"payload": "1MiB", "ragged": ("obs.tokens",), "device": "cpu"}
    buffer = gear.SequenceBuffer(64, length=T, burn_in=OVERLAP, **options)
    play(buffer, 1, [200])
    assert buffer.table is not None
    pieces = [buffer.table[index]["reward"].int().tolist()[:-1] for index in buffer.table.indices()]
    assert len(pieces) > 2
    for one, other in itertools.pairwise(pieces):
        assert one[-OVERLAP:] == other[:OVERLAP]
    assert not any(buffer.table[index]["is_first"].any() for index in buffer.table.indices()[1:])


def test_returns_of_several_steps_bootstrap_from_values_of_any_length() -> None:
    options: dict[str, Any] = {"payload": "1MiB", "ragged": ("obs.tokens",), "device": "cpu", "num_envs": 2}
    buffer = gear.ReplayBuffer(400, n_step=3, gamma=0.5, **options)
    known = play(buffer, 2, [1, 30, 4, 6, 7])
    firsts = {number: first for first, numbers in known.items() for number in numbers[:-1]}
    seen = set()
    for _ in range(10):
        batch = buffer.sample(64)
        for row, number in enumerate(batch["obs"]["speed"][:, 0].int().tolist()):
            last = known[firsts[number]][-1]
            count = min(3, last - number)
            ends = number + count == last and (last - 1) % 2 == 0
            assert batch["reward"][row] == sum(0.5**i * (number + i) for i in range(count))
            assert batch["discount"][row] == (0 if ends else 0.5**count)
            for found, expected in (("obs", number), ("next_obs", number + count)):
                assert batch[found]["text"][row] == observation(expected)["text"]
                assert np.array_equal(batch[found]["tokens"][row], observation(expected)["tokens"])
                assert np.array_equal(batch[found]["speed"][row], observation(expected)["speed"])
            seen.add(number)
    assert seen == set(firsts)
    assert buffer.table is not None
    windows = {"target": gear.NStep("reward", 2, 0.9, "terminated", next="obs.text")}
    rows = buffer.table.gather(buffer.table.indices()[:1], [0], windows=windows)
    assert rows["target"]["next"][0] in {observation(number)["text"] for number in range(400)}


# ---------------------------------------------------------------- goals


def goals(number: int) -> dict[str, Any]:
    reached = np.array([number, -number], np.float32)
    return {"observation": "o" * (number % 7), "achieved_goal": reached, "desired_goal": reached + 1000}


@pytest.mark.parametrize("running", [False, True])
def test_goals_are_those_of_a_later_step_beside_text(running: bool) -> None:
    def reward(achieved: Any, desired: Any, info: dict[str, Any]) -> Any:
        assert achieved.shape == desired.shape
        return (achieved == desired).all(-1) - 1.0

    options: dict[str, Any] = {"payload": "1MiB", "device": "cpu", "num_envs": 1}
    hindsight = gear.Hindsight(reward, running=running)
    buffer = gear.ReplayBuffer(500, hindsight=hindsight, **options)
    ends = {}
    for first, length in ((0, 9), (100, 1), (200, 30)):
        for step in range(length):
            last = step == length - 1
            numbers = first + step, first + step + 1
            one, other = (
                {name: [value] if name == "observation" else value[None] for name, value in goals(n).items()}
                for n in numbers
            )
            action, number = np.zeros((1, 2), np.float32), np.full(1, -1.0, np.float32)
            flags = np.zeros(1, bool), np.full(1, last and first != 200)
            buffer.add(one, action, number, other, *flags)
        ends[first] = first + length
    relabelled = 0
    for _ in range(10):
        batch = buffer.sample(64)
        for row in range(64):
            step = int(batch["obs"]["achieved_goal"][row, 0])
            first = step // 100 * 100
            assert running or first != 200
            assert batch["obs"]["observation"][row] == "o" * (step % 7)
            assert batch["next_obs"]["observation"][row] == "o" * ((step + 1) % 7)
            desired = int(batch["obs"]["desired_goal"][row, 0])
            if batch["relabelled"][row]:
                assert step < desired <= ends[first]
                assert batch["reward"][row] == (0.0 if desired == step + 1 else -1.0)
                relabelled += 1
            else:
                assert desired == step + 1000
    assert relabelled > 300


def test_what_goals_cannot_have_is_refused() -> None:
    one = {**goals(3), "achieved_goal": "a", "desired_goal": "b"}
    buffer = gear.ReplayBuffer(100, hindsight=gear.Hindsight(lambda *_: 0), payload="1MiB", device="cpu")
    with pytest.raises(
        SchemaError, match=r"\['obs.achieved_goal', 'obs.desired_goal'\] have values of any length"
    ):
        buffer.add(one, np.zeros(2), 0.0, one, False, False)
    with pytest.raises(
        SchemaError, match=r"\['note'\] have values of any length; expected fixed sizes of goals"
    ):
        buffer.add(goals(3), np.zeros(2), 0.0, goals(4), False, False, note="text")
    with pytest.raises(SchemaError, match="payload was given with agents, of which each acts"):
        gear.ReplayBuffer(100, payload="1MiB", agents=("a", "b"))
