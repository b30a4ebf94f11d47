"""The model of examples/grpo.py resumes bit for bit: table, dataset, weights and optimizer, while the table grows."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gear_loader as gear

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "grpo.py"
BATCHES = 3  # of each round


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("grpo_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Run:
    """Rounds of generating, scoring and training in one process, with all of their state."""

    def __init__(self, grpo: Any, table: gear.Table, seed: int, saved: Any = None) -> None:
        torch.manual_seed(seed)
        self.grpo, self.table, self.seed = grpo, table, seed
        self.module = grpo.Grpo(table, None, None, 100)
        made = self.module.configure_optimizers()
        self.optimizer, self.schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
        self.replay = gear.ReplayDataset(
            table,
            windows=gear.Whole(),
            layout="packed",
            device="cpu",
            batch_size=gear.Steps(100, lookahead=8),
            seed=seed,
            groups=gear.Groups("group", grpo.GROUP, varies="reward"),
            batches_per_epoch=1000,
            prefetch=0,
        )
        if saved is not None:
            self.module.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.schedule.load_state_dict(saved["schedule"])
            self.replay.load_state_dict(json.loads(saved["replay"]))
        self.batches = iter(self.replay)
        self.seen: list[Any] = []

    def state(self) -> dict[str, Any]:
        return {
            "model": {name: value.clone() for name, value in self.module.state_dict().items()},
            "optimizer": json_safe(self.optimizer.state_dict()),
            "schedule": self.schedule.state_dict(),
            "replay": json.dumps(self.replay.state_dict()),
        }

    def round(self, number: int) -> None:
        grpo, table, prompts = self.grpo, self.table, 12
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        pairs = torch.randint(grpo.LARGEST + 1, (prompts, 2), generator=generator)
        whole = grpo.prompts_of(pairs).repeat_interleave(grpo.GROUP, 0)
        tokens, logprobs, lengths = grpo.complete(self.module.model, whole, generator)
        group = (torch.arange(prompts) + number * prompts).repeat_interleave(grpo.GROUP)
        policy = torch.full((len(tokens),), table.policy_version)
        rows = {"token": tokens, "logprob": logprobs, "group": group, "policy": policy}
        slots = table.extend(rows, lengths=lengths)
        # Random weights seldom write numbers, and groups without variance are left out.
        rewards = torch.tensor([grpo.reward_of(table[slot]["token"]) for slot in slots.tolist()])
        rewards = rewards + torch.rand(len(slots), generator=generator) / 10
        means = rewards.view(-1, grpo.GROUP).mean(1).repeat_interleave(grpo.GROUP)
        table.fill(slots, reward=rewards, advantage=rewards - means)
        for _ in range(BATCHES):
            batch = next(self.batches)
            self.optimizer.zero_grad()
            loss = self.module.training_step(batch, number)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), grpo.LARGEST_GRADIENT)
            self.optimizer.step()
            self.schedule.step()
            self.seen.append((batch["index"].tolist(), batch["token"].tolist(), float(loss.detach())))
        table.advance_version()


def json_safe(state: Any) -> Any:
    """A copy of an optimizer's state."""
    if isinstance(state, dict):
        return {key: json_safe(value) for key, value in state.items()}
    if isinstance(state, list):
        return [json_safe(value) for value in state]
    return state.clone() if isinstance(state, torch.Tensor) else state


def make_table(grpo: Any) -> gear.Table:
    return gear.Table.create(
        grpo.SCHEMA,
        max_steps=9000,
        max_trajectories=1200,
        block_steps=8,
        memory=gear.Memory(packed=False),
        on_full="evict_oldest",
        limits=gear.Limits(version="policy", max_lag=grpo.MAX_LAG),
    )


@pytest.mark.long
def test_it_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setitem(sys.modules, "grpo_example", None)  # it is no module that others import
    grpo = load_example()
    with make_table(grpo) as table:
        run = Run(grpo, table, 3)
        for number in range(4):
            run.round(number)
        saved = run.state()
        table.save(tmp_path)
        for number in range(4, 8):
            run.round(number)
        expected, after = run.module.state_dict(), run.seen[4 * BATCHES :]
        assert table.stats().num_outdated > 0
    waiting = json.loads(saved["replay"])["budget"][-1]["state"]["waiting"]
    assert waiting  # drawn before the table grew
    with gear.Table.load(tmp_path) as table:
        again = Run(grpo, table, 3, saved)
        for number in range(4, 8):
            again.round(number)
        assert [batch[1:] for batch in again.seen] == [batch[1:] for batch in after]
        for name, value in again.module.state_dict().items():
            assert torch.equal(value, expected[name]), name
