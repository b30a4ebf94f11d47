"""Nested values: in, as columns, and out again, of all containers and of Gymnasium's spaces."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gear_loader as gear
from gear_loader.errors import SchemaError
from gear_loader.replay.nesting import Nesting


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Pose:
    place: Any
    _angle: Any


def text_of(codes: torch.Tensor) -> list[str]:
    """The texts of uint8 [n, size]."""
    return [bytes(row).rstrip(b"\0").decode() for row in codes.tolist()]


def trees(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text("abc0 _", min_size=1, max_size=3)
    return st.recursive(
        leaf | st.none(),
        lambda below: (
            st.dictionaries(keys, below, min_size=1, max_size=3)
            | st.tuples(below)
            | st.tuples(below, below)
            | st.builds(Pair, below, below)
            | st.builds(Pose, below, below)
        ),
        max_leaves=8,
    )


@given(trees(st.integers(-100, 100)), st.booleans())
def test_a_value_comes_back_as_it_was(value: Any, by_description: bool) -> None:
    try:
        nesting = Nesting.of("obs", value)
    except SchemaError:
        assert "None" in repr(value)  # nothing but None in it
        return
    if by_description:
        nesting = Nesting.from_description("obs", json.loads(json.dumps(nesting.described())))
    leaves = list(nesting.leaves(value))
    columns = nesting.columns()
    assert [column for column, _ in leaves] == columns
    assert len(set(columns)) == len(columns)
    again = nesting.build(dict(leaves))
    assert again == value
    assert type(again) is type(value)


def test_what_was_saved_before_other_containers_were_known_still_loads() -> None:
    nesting = Nesting.from_description("obs", ["dict", {"a": None, "b": ["tuple", {"0": None, "1": None}]}])
    assert nesting.columns() == ["obs.a", "obs.b.0", "obs.b.1"]
    assert nesting.build({"obs.a": 1, "obs.b.0": 2, "obs.b.1": 3}) == {"a": 1, "b": (2, 3)}


@pytest.mark.parametrize("value", [1, {"a": 1}, (1, 2), Pair(1, 2), Pose(1, 2), None, {"b": None}])
@pytest.mark.parametrize(
    "other", [1, {"a": 1}, (1, 2), Pair(1, 2), Pose(1, 2), None, {"b": None}, "x", {"a": "x"}]
)
def test_another_nesting_is_refused(value: Any, other: Any) -> None:
    nesting = Nesting.of("obs", {"part": value, "more": 0})
    if type(value) is type(other) and value == other:
        assert nesting.build(dict(nesting.leaves({"part": other, "more": 0})))["part"] == value
        return
    # `{"a": "x"}` has the keys of `{"a": 1}`: the leaf is what differs.
    with pytest.raises(SchemaError, match=r"'obs\.part(\.a|\.b)?' is .*; expected .*, as before"):
        list(nesting.leaves({"part": other, "more": 0}))


@dataclasses.dataclass
class Derived:
    value: Any
    other: Any = dataclasses.field(init=False, default=0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "expected at least one array"),
        ({"a": None}, "expected at least one array"),
        ({"a.b": 1}, r"has the keys \['a\.b'\]"),
        ({1: 1}, r"has the keys \[1\]"),
        ({"a": "text"}, r"'obs\.a' is the text 'text'.*Text\(max_length\)"),
        (Derived(1), "init=False"),
    ],
)
def test_values_that_are_no_columns(value: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        Nesting.of("obs", value)


def run(buffer: gear.ReplayBuffer, value: Any, steps: int = 30) -> None:
    """Steps of one episode whose observation, action and column `more` are `value(step)`."""
    for step in range(steps):
        buffer.add(value(step), value(step), 1.0, value(step + 1), False, step == steps - 1, more=value(step))


@pytest.mark.parametrize("n_step", [1, 3])
def test_batches_are_nested_as_what_was_added(n_step: int, tmp_path: Path) -> None:
    def value(step: int) -> Any:
        pose = Pose(np.full(2, step, np.float32), torch.tensor(step))
        return {"pose": pose, "pair": Pair((step,), collections.OrderedDict(a=float(step), b=None))}

    def check(batch: Any) -> None:
        steps = batch["obs"]["pair"].left[0]
        for name in ("obs", "action", "next_obs", "more"):
            found, expected = batch[name], steps + n_step * (name == "next_obs")
            expected = expected.clamp(max=30)
            assert type(found["pair"]) is Pair
            assert type(found["pose"]) is Pose
            assert found["pair"].right["b"] is None
            assert (found["pair"].left[0] == expected).all()
            assert (found["pair"].right["a"] == expected).all()
            assert (found["pose"].place == expected[:, None]).all()
            assert (found["pose"]._angle == expected).all()

    buffer = gear.ReplayBuffer(1_000, n_step=n_step, device="cpu")
    run(buffer, value)
    assert buffer.table is not None
    assert [name for name in buffer.table.schema if name.startswith("obs.")] == [
        "obs.pose.place",
        "obs.pose._angle",
        "obs.pair.left.0",
        "obs.pair.right.a",
    ]
    check(buffer.sample(50))
    buffer.save(tmp_path / "saved")
    again = gear.ReplayBuffer.load(tmp_path / "saved", n_step=n_step, device="cpu")
    before = again.sample(4)["obs"]["pair"]
    assert type(before).__name__ == "Pair"
    assert before._fields == Pair._fields
    again.add(value(0), value(0), 1.0, value(1), False, False, more=value(0))  # shows the classes
    check_all = again.sample(60)
    assert type(check_all["obs"]["pair"]) is Pair
    assert type(check_all["next_obs"]["pose"]) is Pose


def test_all_spaces_of_fixed_size(tmp_path: Path) -> None:
    spaces = pytest.importorskip("gymnasium").spaces
    space = spaces.Dict(
        {
            "box": spaces.Box(-1, 1, (2, 3), np.float64),
            "wide": spaces.Box(0, 60_000, (2,), np.uint16),
            "one": spaces.Discrete(5, start=-2),
            "many": spaces.MultiDiscrete([[2, 3], [4, 5]]),
            "bits": spaces.MultiBinary((2, 2)),
            "say": spaces.Text(7, charset="aé€"),
            "both": spaces.Tuple((spaces.Text(3), spaces.Discrete(2))),
        }
    )
    space.seed(0)
    samples = [space.sample() for _ in range(41)]
    buffer = gear.ReplayBuffer(100, observation_space=space, action_space=spaces.Discrete(41), device="cpu")
    for step, (obs, following) in enumerate(itertools.pairwise(samples)):
        buffer.add(obs, step, 0.0, following, step == 39, False)
    buffer.save(tmp_path / "saved")
    again = gear.ReplayBuffer.load(tmp_path / "saved", device="cpu")
    for each in (buffer, again):
        batch = each.sample(64)
        for name, late in (("obs", 0), ("next_obs", 1)):
            found = batch[name]
            rows = [samples[step + late] for step in batch["action"].tolist()]
            for key in ("box", "wide", "one", "many", "bits"):
                expected = torch.from_numpy(
                    np.stack([np.asarray(row[key]) for row in rows]).astype(np.float64)
                )
                assert torch.allclose(found[key].double(), expected, atol=1e-6), key
            assert text_of(found["say"]) == [row["say"] for row in rows]
            assert text_of(found["both"][0]) == [row["both"][0] for row in rows]
            assert found["say"].shape == (64, 21)
    with pytest.raises(
        SchemaError, match=r"'obs\.say' is 'aaaaaaaaaaaaaaaaaaaaaa'; expected a text of at most 21"
    ):
        buffer.add({**samples[0], "say": "a" * 22}, 0, 0.0, samples[0], False, False)


def test_texts_of_several_environments() -> None:
    spaces = pytest.importorskip("gymnasium").spaces
    buffer = gear.ReplayBuffer(
        60, observation_space=spaces.Text(4), action_space=spaces.Discrete(9), num_envs=2, device="cpu"
    )
    for step in range(9):
        buffer.add((f"a{step}", f"b{step}"), [step] * 2, [0.0] * 2, (f"a{step + 1}", f"b{step + 1}"), [False] * 2,
                   [step == 8] * 2)  # fmt: skip
    batch = buffer.sample(40)
    for text, following, step in zip(
        text_of(batch["obs"]), text_of(batch["next_obs"]), batch["action"].tolist(), strict=True
    ):
        assert text[1:] == str(step)
        assert following == f"{text[0]}{step + 1}"


@pytest.mark.parametrize("kind", ["Sequence", "Graph", "OneOf"])
def test_spaces_without_a_fixed_size_are_refused(kind: str) -> None:
    spaces = pytest.importorskip("gymnasium").spaces
    space = {
        "Sequence": lambda: spaces.Sequence(spaces.Discrete(2)),
        "Graph": lambda: spaces.Graph(spaces.Box(0, 1, (2,)), None),
        "OneOf": lambda: spaces.OneOf((spaces.Discrete(2), spaces.Discrete(3))),
    }[kind]()
    with pytest.raises(SchemaError, match=rf"'obs\.a' has the space {kind}.*; expected Box, Discrete"):
        gear.ReplayBuffer(
            9, observation_space=spaces.Dict({"a": space}), action_space=spaces.Discrete(2), device="cpu"
        )
