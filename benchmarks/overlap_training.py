"""Training steps to run beside a loader: a small network on windows of W1's columns, forward, backward, optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["MODELS", "Mlp", "Training", "Transformer"]

OBSERVATION, ACTION = 96, 8  # of a step of W1


class Mlp(nn.Module):
    """Each step on its own: two layers."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(OBSERVATION + 1, width), nn.ReLU(), nn.Linear(width, ACTION))

    def forward(self, steps: torch.Tensor) -> torch.Tensor:
        return self.layers(steps)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Steps of a window attend to those before them."""

    def __init__(self, width: int = 64, layers: int = 1, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(OBSERVATION + 1, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, ACTION)

    def forward(self, steps: torch.Tensor) -> torch.Tensor:
        hidden, length = self.embed(steps), steps.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, steps.device, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)  # type: ignore[no-any-return]


MODELS = {"mlp": Mlp, "transformer": Transformer}


class Training:
    """A model that learns to predict actions from observations and rewards.

    Args:
        model: on its device, in its dtype.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._parameters = list(model.parameters())
        cuda = self._parameters[0].device.type == "cuda"
        self._optimizer = torch.optim.AdamW(self._parameters, lr=1e-4, fused=cuda or None)

    def step(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Forward, backward and optimizer on one batch; gives the loss. Waits for nothing on a GPU."""
        dtype = self._parameters[0].dtype
        inputs = torch.cat((batch["observation"], batch["reward"].unsqueeze(-1)), -1).to(dtype)
        loss = functional.mse_loss(self.model(inputs), batch["action"].to(dtype))
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        return loss.detach()
