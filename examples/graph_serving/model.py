"""GraphSAGE with mean aggregation; its layers compute what `SAGEConv` of PyTorch Geometric does."""

from __future__ import annotations

import torch
from torch import nn


class SageLayer(nn.Module):
    """``lin_l(mean of the neighbours) + lin_r(node)``, with the parameters that `SAGEConv` has."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lin_l = nn.Linear(inputs, outputs)
        self.lin_r = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        sources, targets = edge_index
        total = torch.zeros_like(x).index_add_(0, targets, x[sources])
        counts = torch.bincount(targets, minlength=len(x)).clamp(min=1)
        out: torch.Tensor = self.lin_l(total / counts[:, None]) + self.lin_r(x)
        return out


class Sage(nn.Module):
    """Two layers."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.first = SageLayer(inputs, hidden)
        self.second = SageLayer(hidden, outputs)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x, edge_index).relu(), edge_index)
        return out
