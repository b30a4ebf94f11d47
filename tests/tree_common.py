"""Tables of trajectories that begin with the same steps, and what batches of ``layout="tree"`` hold of them."""

from __future__ import annotations

from typing import Any

import torch

import gear_loader as gear

COLUMNS = {
    "token": gear.Column(torch.int64),
    "hidden": gear.Column(torch.float32, (40,)),
    "reward": gear.Column(torch.float32, per="trajectory"),
}


def rows(number: int, length: int) -> dict[str, Any]:
    tokens = torch.arange(length) + 10_000 * number
    return {
        "token": tokens,
        "hidden": tokens[:, None] + torch.arange(40) / 64,
        "reward": torch.tensor(float(number)),
    }


IMAGES = {**COLUMNS, "images": gear.Column(torch.uint8, (None, 5), per="group")}


def grouped(first_group: int, name: str | None = None) -> gear.Table:
    """Groups with images of their own, and trajectories without a group."""
    memory = gear.Memory(payload="64KiB", prefixes=True)
    sizes: dict[str, Any] = {"max_steps": 5000, "max_trajectories": 100, "block_steps": 4, "name": name}
    table = gear.Table.create(IMAGES, memory=memory, **sizes)
    for group in range(first_group, first_group + 4):
        images = torch.full((group % 3 + 1, 5), group, dtype=torch.uint8)
        first = table.add({**rows(group, 20 + group), "images": images})
        table.extend([rows(group, 3 + i) for i in range(5)], prefix=first, prefix_steps=9 + group)
        if group % 4 == 3:
            table.remove(first)
    return table


def check_groups(batch: gear.Batch, count: int) -> None:
    """The images of each row's group, which its tokens tell, once in the batch."""
    images, ends = batch["images"].tolist(), batch["cu_seqlens"]
    assert len(images) == len(set(batch["group"].tolist()))
    numbers = batch["token"][ends[:-1].long()] // 10_000
    for row, group in enumerate(batch["group"].tolist()):
        assert images[group].unique().tolist() == [int(numbers[row])]
        assert len(images[group]) == int(numbers[row]) % 3 + 1
    assert len(batch["group"]) == count


def expanded(batch: gear.Batch, name: str) -> torch.Tensor:
    """A column of steps as it is packed: what a row begins with, then its own steps."""
    ends, values = batch["cu_seqlens"].tolist(), batch[name]
    parts = []
    for row, (parent, steps) in enumerate(
        zip(batch["parent"].tolist(), batch["prefix_steps"].tolist(), strict=True)
    ):
        if parent >= 0:
            assert ends[parent + 1] - ends[parent] == steps > 0
            parts.append(values[ends[parent] : ends[parent + 1]])
        parts.append(values[ends[row] : ends[row + 1]])
    return torch.cat(parts)
