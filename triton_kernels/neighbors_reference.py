"""The plain-torch twin of `gear_loader.kernels.neighbors`, and its checks."""

from __future__ import annotations

import torch

from gear_loader.kernels.priority_reference import uniforms
from gear_loader.kernels.tensor_checks import check_tensor

__all__ = ["check_draw", "draw"]


def draw(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    nodes: torch.Tensor,
    random: torch.Tensor,
    neighbors: torch.Tensor,
) -> None:
    """See `gear_loader.kernels.neighbors.draw`; for any fan-out."""
    _, fanout = check_draw(indptr, indices, nodes, random, neighbors)
    first = indptr[nodes]
    degree = indptr[nodes + 1] - first
    chosen = torch.arange(fanout, device=nodes.device).repeat(len(nodes), 1)  # [n, l]
    draws = degree > fanout
    for i in range(fanout):
        last = degree - fanout + i
        place = (uniforms(random, nodes, i) * (last + 1).double()).long().minimum(last)
        place = torch.where((chosen[:, :i] == place[:, None]).any(1), last, place)
        chosen[:, i] = torch.where(draws, place, chosen[:, i])
    taken = torch.arange(fanout, device=nodes.device) < degree[:, None]
    if len(indices):
        found = indices[torch.where(taken, first[:, None] + chosen, 0)].long()
        neighbors.copy_(torch.where(taken, found, -1))
    else:
        neighbors.fill_(-1)


def check_draw(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    nodes: torch.Tensor,
    random: torch.Tensor,
    neighbors: torch.Tensor,
) -> tuple[int, int]:
    """Validate the arguments of `draw`; return the number of nodes and the fan-out."""
    for name, tensor, dtype, shape in (
        ("indptr", indptr, torch.int64, "[nodes + 1]"),
        ("indices", indices, torch.int32, "[edges]"),
        ("nodes", nodes, torch.int64, "[n]"),
        ("random", random, torch.int64, "[k]"),
        ("neighbors", neighbors, torch.int64, "[n, l]"),
    ):
        check_tensor(name, tensor, dtype, shape)
    if neighbors.device != nodes.device:
        raise ValueError(f"neighbors is on {neighbors.device}; expected {nodes.device}, where the nodes are.")
    if len(neighbors) != len(nodes) or neighbors.shape[1] < 1 or len(random) < 2:
        raise ValueError(
            f"neighbors is {list(neighbors.shape)} and random {list(random.shape)}; expected [{len(nodes)}, l] with l "
            "of at least 1, and [2]."
        )
    return len(nodes), neighbors.shape[1]
