"""The model that `train` trains, and how it learns: once for all loaders."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.peers.episodes import WINDOW, Data

Batch = Mapping[str, torch.Tensor]


def first_windows(data: Data) -> dict[str, torch.Tensor]:
    """The first windows of some episodes, as a batch."""
    rows = data.begins[:8, None] + np.arange(min(WINDOW, int(data.lengths.min())))
    batch = {name: torch.from_numpy(values[rows]) for name, values in data.columns.items()}
    return {**batch, "mask": torch.ones(rows.shape, dtype=torch.bool)}


class Block(nn.Module):
    """One layer of a transformer: attention to what came before, then a small network for each token."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.network_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, tokens, width] -> the same
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [B, heads, tokens, width / heads]
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.network(self.network_norm(x))


class Policy(nn.Module):
    """(return to go, observation, action) of the last steps -> the action at each of them.

    A step is one token: its return to go and observation, and the action before. Where that is not in the window, it is
    zeros. data: whose mean and deviation observations are normalized with.
    """

    mean: torch.Tensor
    std: torch.Tensor
    scales: torch.Tensor

    def __init__(self, data: Data, *, width: int = 48, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        observations = torch.from_numpy(data.columns["observation"])
        actions = data.columns["action"].shape[1]
        self.register_buffer("mean", observations.mean(0))
        self.register_buffer("std", observations.std(0) + 1e-3)
        self.register_buffer("scales", torch.tensor([data.horizon, data.scale]))
        self.embed = nn.Linear(2 + observations.shape[1] + actions, width)
        self.place = nn.Parameter(0.02 * torch.randn(WINDOW, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.act = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, actions), nn.Tanh())

    def forward(self, batch: Batch) -> torch.Tensor:  # [B, L, ...] -> [B, L, actions]
        horizon, scale = self.scales
        # What is to come, altogether and for each step that is left.
        total = batch["return_to_go"] / scale
        to_come = torch.stack((total, total * horizon / (horizon - batch["step"])), dim=-1)
        before = F.pad(batch["action"][:, :-1], (0, 0, 1, 0))
        seen = (batch["observation"] - self.mean) / self.std
        tokens = self.embed(torch.cat((to_come, seen, before), dim=-1))
        return self.act(self.blocks(tokens + self.place[: tokens.shape[1]]))  # type: ignore[no-any-return]

    def loss(self, batch: Batch) -> torch.Tensor:
        """Of the actions of steps that exist."""
        mask = batch["mask"].unsqueeze(-1)
        wrong = (self(batch) - batch["action"]).square() * mask
        return wrong.sum() / (mask.sum() * wrong.shape[-1])


class Learner:
    """A policy that learns: AdamW with a warm-up, gradients clipped."""

    def __init__(self, data: Data, weights: str, device: torch.device) -> None:
        self.policy = load(Policy(data), weights).to(device)
        self._optimizer = torch.optim.AdamW(self.policy.parameters(), lr=2e-4, weight_decay=1e-2)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda i: min(1.0, (i + 1) / 100))

    def step(self, batch: Batch) -> torch.Tensor:
        """One training step; returns the loss before it."""
        loss = self.policy.loss(batch)
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        return loss.detach()


def save(policy: Policy, path: str) -> None:
    np.savez(path, **{name: value.cpu().numpy() for name, value in policy.state_dict().items()})


def load(policy: Policy, path: str) -> Policy:
    """The policy with the weights of a file."""
    with np.load(path) as file:
        policy.load_state_dict({name: torch.from_numpy(file[name]) for name in file.files})
    return policy
