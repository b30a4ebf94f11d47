"""Training: all loaders feed one model with real windows, wrong ones are refused, and it goes on to a return."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks_common import Here, rows_of, session, worker

from benchmarks import harness, hopper
from benchmarks.experiments import train
from benchmarks.peers import episodes, gear, plain
from benchmarks.peers import policy as policies
from benchmarks.peers import process as processes

for package in ("gymnasium", "mujoco"):
    pytest.importorskip(package)


HERE = {**gear.KINDS["train"], **plain.KINDS["train"]}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A few short episodes, collected."""
    short = {
        "horizon": 60,
        "steps": 2,
        "chunk": 2,
        "limit": 4,
        "evaluations": 1,
        "seeds": (0, 1),
        "threads": 1,
    }
    folder = tmp_path_factory.mktemp("train")
    return train.prepare(train.Setting(folder=folder, batches=(8,), episodes=12, **short))


@pytest.fixture(scope="module")
def data(setting: Any) -> Any:
    return episodes.Data(str(setting.data))


def inside(name: str, torch_version: str = torch.__version__, **faults: Any) -> Any:
    """What stands in for a process that trains."""
    return Here(worker("train", HERE[name]), {"torch": torch_version}, **faults)


# What loaders deliver --------------------------------------------------------------------------------


def test_episodes_are_whole_and_end_with_what_is_left_of_their_return(data: Any, setting: Any) -> None:
    assert len(data.lengths) == 12
    assert data.lengths.max() == 60
    steps = data.columns["step"]
    assert np.array_equal(steps, np.concatenate([np.arange(n) for n in data.lengths]))
    firsts = data.columns["return_to_go"][data.begins]
    assert firsts.max() == np.float32(data.scale)
    assert firsts.max() >= setting.best > 0
    assert all(values.dtype == np.float32 for values in data.columns.values())


@pytest.fixture(params=HERE)
def loader(request: pytest.FixtureRequest, data: Any) -> Iterator[Any]:
    found = HERE[request.param](data, 16, 3, CPU)
    yield found
    found.close()


def test_each_loader_delivers_windows_of_the_data(loader: Any, data: Any) -> None:
    lengths = set()
    for _ in range(1 if isinstance(loader, plain.Ready) else 12):
        batch = loader.next()
        episodes.verify(batch, data)
        assert batch["observation"].shape == (16, episodes.WINDOW, 11)
        lengths |= set(batch["mask"].sum(1).tolist())
    assert max(lengths) == episodes.WINDOW
    assert isinstance(loader, plain.Ready) or min(lengths) < episodes.WINDOW  # of the begin of an episode


def test_wrong_windows_are_refused(data: Any) -> None:
    def batch_of(steps: Any) -> dict[str, Any]:
        batch = {name: torch.from_numpy(values[steps]) for name, values in data.columns.items()}
        return {**batch, "mask": torch.ones(steps.shape, dtype=torch.bool)}

    window = np.arange(episodes.WINDOW)
    begins = np.array([0, 7, 11, 20])
    assert episodes.verify(batch_of(begins[:, None] + window), data).tolist() == begins.tolist()
    for change, message in (
        (lambda b: b["action"][3, 5].add_(1), "action differs"),
        (lambda b: b["step"][0, -1].fill_(7), "step differs"),
        (lambda b: b["observation"][2, 0].neg_(), "row 2 begins with a step that is not in the data"),
        (lambda b: b["mask"][1, 4].logical_not_(), "not the first ones"),
        (lambda b: b["mask"][3, 1:].fill_(False), "short although its episode began earlier"),
        (lambda b: b.update({n: v[:, :5] for n, v in b.items()}), "not the first ones"),
        (lambda b: b["return_to_go"].copy_(b["return_to_go"].flip(0)), "return_to_go differs"),
        (lambda b: b.update(batch_of(data.begins[1] - 3 + window[None])), "beyond the end of its episode"),
    ):
        batch = batch_of(begins[:, None] + window)
        change(batch)
        with pytest.raises(ValueError, match=message):
            episodes.verify(batch, data)


# Training --------------------------------------------------------------------------------------------


def test_all_train_the_same_model(setting: Any, tmp_path: Path) -> None:
    path, losses, learned = tmp_path / "weights.npz", set(), []
    first, second = (dict(np.load(setting.weights(f"start-{seed}"))) for seed in range(2))
    for name in ("ours", "plain torch", "batch ready"):
        process = inside(name)
        process.ask("build", data=str(setting.data), batch=8, seed=0, device="cpu")
        losses.add(process.ask("reset", weights=str(setting.weights("start-0")))["loss"])
        answer = process.ask("run", steps=3, ready=name == "ours")
        assert 0 <= answer["waiting"] < answer["seconds"]
        assert np.isfinite(answer["loss"])
        process.ask("weights", path=str(path))
        learned.append(dict(np.load(path)))
        process.close()
    assert len(losses) == 1
    for found in (*learned, second):
        assert set(found) == set(first)
        assert not np.array_equal(found["embed.weight"], first["embed.weight"])


@torch.no_grad()
def test_padding_does_not_matter_to_the_loss(data: Any) -> None:
    torch.manual_seed(0)
    policy = policies.Policy(data)
    batch = {name: values.clone() for name, values in policies.first_windows(data).items()}
    batch["mask"][:, 9:] = False
    expected = float(policy.loss({name: values[:, :9] for name, values in batch.items()}))
    assert float(policy.loss(batch)) == pytest.approx(expected, rel=1e-5)
    batch["observation"][:, 9:] = 5.0
    assert float(policy.loss(batch)) == pytest.approx(expected, rel=1e-5)


def test_the_same_windows_again_are_refused_and_no_chunk_starts_with_batches_made_before(
    setting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = inside("plain torch")
    process.ask("build", data=str(setting.data), batch=8, seed=0, device="cpu")
    with pytest.raises(processes.PeerFailed, match="reset comes first"):
        process.ask("run", steps=1)
    process.ask("reset", weights=str(setting.weights("start-0")))
    loader, taken = process.worker.subject, []
    take = loader.next
    monkeypatch.setattr(loader, "ahead", 5, raising=False)
    monkeypatch.setattr(loader, "next", lambda: taken.append(1) or take())
    process.ask("run", steps=2)
    assert len(taken) == 5 + 1 + 2
    batch = take()
    monkeypatch.setattr(loader, "next", lambda: batch)
    with pytest.raises(processes.PeerFailed, match="3 batches of 8 hold only"):
        process.ask("check")


@pytest.mark.long
def test_loaders_that_fail_are_left_out_but_ours_end_the_run(setting: Any, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    made = session(out, 2, "train")
    trainees = [
        train.Trainee("batch ready", inside("batch ready"), True),
        train.Trainee("TorchRL", inside("plain torch", torch_version="9.9+cpu"), False, {"peer": {}}),
        train.Trainee("broken", inside("plain torch", check="ValueError: no window"), False),
        train.Trainee("other", inside("plain torch", reset={"loss": 9.0}), False),
    ]
    able = train.steps(made, setting, list(trainees), 8)
    assert [trainee.name for trainee in able] == ["batch ready", "TorchRL"]
    assert made.reasons[0] == "left out: broken, batch 8: ValueError: no window"
    assert made.reasons[1].startswith("left out: other, batch 8: its model has a loss of 9.0, expected")
    names = [row["variant"] for row in rows_of(out)]
    assert names == ["batch ready", "TorchRL", "batch ready, torch 9.9"]

    before = rows_of(out)
    broken = train.Trainee("ours", inside("ours", check="ValueError: no window"), True)
    with pytest.raises(harness.Incorrect, match="ours, batch 8: ValueError: no window"):
        train.steps(made, setting, [trainees[0], broken], 8)
    assert rows_of(out) == before
    for trainee in (*trainees, broken):
        trainee.process.close()


@pytest.mark.long
def test_training_goes_on_until_the_return_or_the_limit(
    setting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    made = session(out, 2, "train")
    trainees = [
        train.Trainee("plain torch", inside("plain torch"), True),
        train.Trainee("slow", inside("plain torch"), False),
        train.Trainee("dead", inside("plain torch", weights="it has ended"), False),
    ]
    for trainee in trainees:
        trainee.process.ask("build", data=str(setting.data), batch=8, seed=0, device="cpu")
    achieved = iter([0.5, 0.1, 0.95, 0.2, 0.91, 0.3, 0.4])  # in turn, seed after seed; of the best return
    monkeypatch.setattr(hopper, "evaluate", lambda *_, **__: setting.best * next(achieved))
    train.race(made, setting, trainees)
    (amount,) = made.amounts
    assert amount.variant == "plain torch"
    assert [len(curve) for curve in amount.parameters["curves"]] == [2, 1]
    assert amount.parameters["curve"][-1] == (amount.values[0], 0.95 * setting.best)
    assert amount.parameters["return"] == 0.9 * setting.best
    assert amount.extras["reached"] == amount.extras["seeds"] == 2
    reasons = "\n".join(made.reasons)
    assert reasons.count("not reached: slow, return of") == 2
    assert "it reached" in reasons
    assert "in 4 steps" in reasons
    assert reasons.count("not reached: dead, return of") == 2
    assert reasons.count("it has ended") == 2
    for trainee in trainees:
        trainee.process.close()


def test_a_policy_is_evaluated_alike_each_time(data: Any, setting: Any) -> None:
    policy = policies.load(policies.Policy(data), str(setting.weights("start-0")))
    found = [hopper.evaluate(policy, setting.best, episodes=2, horizon=20) for _ in range(2)]
    assert found[0] == found[1] > 0
