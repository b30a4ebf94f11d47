"""Single transitions and learning: stores that give wrong ones are found, ours and plain torch pass."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks_common import call, check_row, reasons_of, rows_of
from cases import mostly_long

from benchmarks.experiments import learn as learning
from benchmarks.peers import learn, transitions
from benchmarks.peers.gear_transitions import KINDS
from benchmarks.peers.plain_transitions import Transitions
from benchmarks.peers.transitions import EIGHT, ONE, PRIORITIZED, UNIFORM

WAYS = {"plain torch": Transitions, **KINDS["transitions"]}
CASES = [(name, mode) for name, kind in WAYS.items() for mode in kind.modes]
SPEC = {"steps": 20_000, "seed": 5}


@pytest.fixture(scope="module")
def data() -> Any:
    return transitions.Data(SPEC)


def worker(kind: Any, data: Any) -> Any:
    made = transitions.Worker({"it": kind}, "it")
    made.data = data
    return made


def test_episodes_are_as_long_as_those_of_cartpole(data: Any) -> None:
    assert data.lengths.sum() == data.steps == 20_000
    assert (data.lengths[:-1].min(), data.lengths.max()) == (9, 500)
    last = data.begins + data.lengths - 1
    assert (data.terminated ^ data.truncated).nonzero()[0].tolist() == last.tolist()
    follows = (data.obs[1:] == data.next_obs[:-1]).all(1)
    assert np.flatnonzero(~follows).tolist() == last[:-1].tolist()


@pytest.mark.parametrize(("name", "mode"), mostly_long(CASES, *CASES[::3]))
def test_each_way_stores_and_draws_what_it_should(name: str, mode: str, data: Any) -> None:
    made = worker(WAYS[name], data)
    made.build(SPEC, mode, 64)
    assert made.measure(5)["seconds"] > 0
    made.close()


def test_a_mode_that_it_has_no_call_for_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="it has no call for that"):
        worker(WAYS["ours, copy=False"], data).build(SPEC, ONE, 64)


def late(self: Any) -> Any:
    batch = Transitions.sample(self)
    return {**batch, "next_obs": batch["obs"]}


def first_half(self: Any) -> Any:
    self._size = self.data.steps // 2
    return Transitions.sample(self)


def unweighted(self: Any) -> Any:
    batch = Transitions.sample(self)
    return {**batch, "weight": batch["weight"] * 0 + 1}


def uniform(self: Any) -> Any:
    self._masses[:] = 1.0
    return Transitions.sample(self)


def every_third(self: Any, call: Any) -> None:
    self.number = getattr(self, "number", 0) + 1
    if self.number % 3:
        Transitions.append(self, call)


def shifted(self: Any, call: Any) -> None:
    Transitions.append(self, [call[0], *(np.roll(part, 1, 0) for part in call[1:])])


DEFECTS: dict[str, tuple[str, dict[str, Callable[..., Any]], str]] = {
    "next observations that are the same": (
        UNIFORM,
        {"sample": late},
        "next_obs of a transition is not that",
    ),
    "only the first half": (UNIFORM, {"sample": first_half}, "draws are not in proportion: positions"),
    "priorities that are ignored": (
        PRIORITIZED,
        {"sample": uniform},
        "draws are not in proportion: priorities",
    ),
    "weights of one": (PRIORITIZED, {"sample": unweighted}, "importance weights are not in proportion"),
    "updates that are lost": (PRIORITIZED, {"update": lambda *_: None}, "steps whose priorities were set"),
    "steps that are lost": (ONE, {"append": every_third}, "682 were never drawn"),
    "rows of other environments": (EIGHT, {"append": shifted}, "of a transition is not that of the step"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_store_with_a_defect_is_not_timed(name: str, data: Any) -> None:
    mode, parts, message = DEFECTS[name]
    made = worker(type("Defective", (Transitions,), parts), data)
    with pytest.raises(ValueError, match=message):
        made.build(SPEC, mode, 256)


@pytest.mark.parametrize("mode", mostly_long([UNIFORM, PRIORITIZED], PRIORITIZED))
def test_the_fastest_setting_is_taken_and_starts_with_the_usual_priorities(mode: str, data: Any) -> None:
    class Slow(Transitions):
        settings = ({"wait": 2000}, {"wait": 0})

        def sample(self) -> Any:
            for _ in range(self.setting["wait"]):
                self.store["obs"].sum()
            return super().sample()

    made = worker(Slow, data)
    assert made.build(SPEC, mode, 64) == {"setting": {"wait": 0}}


# Learning --------------------------------------------------------------------------------------------


def test_without_the_library_nothing_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEAR_LOADER_PEERS", "")
    out = tmp_path / "rows.jsonl"
    done = call("learn", "--quick", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert not rows_of(out)
    assert "benchmarks/peers/make.sh" in reasons_of(out)["SB3"]


@pytest.mark.long
def test_both_buffers_lead_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("stable_baselines3", reason="needs pip install '.[sb3]'")
    monkeypatch.setattr(learning, "STEPS", {"DQN": (1_300, 0), "SAC": (210, 0)})
    out = tmp_path / "rows.jsonl"
    (tmp_path / "sb3").symlink_to(sys.prefix)  # this interpreter's environment, which has the library
    options = ("--quick", "--repeats", "2", "--peers", str(tmp_path), "--out", str(out))
    done = call("learn", *options)
    assert done.exit_code == 0, done.output
    rows = rows_of(out)
    assert len(rows) == len(learn.LEARNERS) * 2 * 4
    for row in rows:
        check_row(row, "learn")
    for learner in learn.LEARNERS:
        mine = {row["variant"]: row for row in rows if row["label"] == f"{learner}: return"}
        weights, other = (mine[name]["parameters"]["weights"] for name in ("ours", "SB3"))
        assert weights == other
        assert len(set(weights)) == 2
