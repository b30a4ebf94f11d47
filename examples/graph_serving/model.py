"""A small GraphSAGE of PyTorch Geometric's layers."""

from __future__ import annotations

import torch
from torch import nn
from torch_geometric.nn import SAGEConv


class Sage(nn.Module):
    """Two layers, each with the mean of the sampled neighbours."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.first = SAGEConv(inputs, hidden)
        self.second = SAGEConv(hidden, outputs)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x, edge_index).relu(), edge_index)
        return out
