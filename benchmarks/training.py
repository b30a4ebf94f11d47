"""Training steps to run beside a loader: a small network on windows of W1's columns; where its batches come from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.harness import Medians, Variant
from benchmarks.loading import Feed, closed

ALONE = "alone"
WARM_UP = 3
OBSERVATION, ACTION = 96, 8  # of a step of W1


def mlp(width: int = 128) -> nn.Module:
    """Each step on its own: two layers."""
    return nn.Sequential(nn.Linear(OBSERVATION + 1, width), nn.ReLU(), nn.Linear(width, ACTION))


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


MODELS = {"mlp": mlp, "transformer": Transformer}


class Training:
    """A model that learns to predict actions from observations and rewards. model: on its device, in its dtype."""

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


class Clock:
    """Seconds of a step of every variant of a comparison, by turns, and the share of them spent waiting."""

    def __init__(self) -> None:
        self.seconds, self.waiting = Medians(), Medians()

    def note(self, name: str, seconds: float, waiting: float) -> None:
        """One measurement, and the part of it that was spent waiting for batches."""
        self.seconds.note(**{name: seconds})
        self.waiting.note(**{name: waiting / seconds})

    def slowdown(self, name: str) -> float:
        """Median of a step's time over that of one alone in the same turn."""
        return float(np.median(np.array(self.seconds[name]) / np.array(self.seconds[ALONE])))

    def extras(self, name: str) -> dict[str, float]:
        return {"slowdown": self.slowdown(name), "waiting": self.waiting()[name]}


def train(
    feed: Feed, training: Training, steps: int, synchronize: Callable[[], object] = lambda: None
) -> tuple[float, float]:
    """Seconds of so many steps after a few others, and the part of them spent waiting for batches."""
    waited = 0.0
    with closed(feed.start()) as batches:
        for _ in range(WARM_UP):
            training.step(next(batches))
        synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            training.step(batch)
        synchronize()
        return time.perf_counter() - begin, waited


def fed(
    feeds: list[Feed],
    training: Training,
    batch: int,
    steps: int,
    synchronize: Callable[[], object] = lambda: None,
) -> list[Variant]:
    """Training steps on batches of each feed, the first of which is `ALONE`."""
    clock = Clock()

    def variant(feed: Feed) -> Variant:
        host = Medians()

        def measure() -> float:
            taken, waited = train(feed, training, steps, synchronize)
            clock.note(feed.name, taken, waited)
            host.note(host_seconds=waited / steps)
            return taken

        extras = lambda: {**clock.extras(feed.name), **host()}  # noqa: E731
        return Variant(feed.name, measure, feed.check, batch, steps, feed.parameters, extras=extras)

    return [variant(feed) for feed in feeds]
