"""The product of what a dataset can be made of, and digests of the batches of a hundred of its points.

``python -m tests.products_common FILE`` draws points until a hundred are valid and writes their digests, as
`tests/data/products.json` holds them: a rebuilding of the inside changes none.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from options_common import nested, nested_table

import gear_loader as gear
import gear_loader.distributed as gd
from gear_loader.errors import SchemaError

if __package__:
    from tests.digests_common import digest_of
else:
    from digests_common import digest_of

SCHEMA = {
    "observation": gear.Column(torch.float32, (3,), final=True),
    "action": gear.Column(torch.int16, (2,)),
    "reward": gear.Column(torch.float64),
    "wide": gear.Column(torch.uint8, (300,)),
    "prompt": gear.Column(torch.int64, per="trajectory"),
}
LATE = {
    "score": gear.Column(torch.float32, late=True),
    "grade": gear.Column(torch.int32, per="trajectory", late=True),
}
SAMPLERS = {
    "uniform": gear.Uniform(),
    "uniform, each once": gear.Uniform(replacement=False),
    "uniform steps": gear.Uniform(unit="step"),
    "uniform steps, each once": gear.Uniform(replacement=False, unit="step"),
    "fifo": gear.Fifo(),
    "lifo, each once": gear.Lifo(replacement=False),
    "fifo of steps": gear.Fifo(unit="step"),
    "priority": gear.Prioritized(alpha=0.7, beta=gear.LinearSchedule(0.4, 1.0, 10)),
    "priority, distinct": gear.Prioritized(replacement=False),
    "priority of steps": gear.Prioritized(unit="step", normalize="table"),
    "top k": gear.TopK(),
    "top k of steps": gear.TopK(False, unit="step"),
}
WINDOWS = {
    "five": gear.Window(5, offset=-2),
    "one": gear.Window(1, squeeze=True),
    "edge": gear.Window(6, offset=-4, pad="edge"),
    "several": {
        "observation": gear.Window(4, pad="tail"),
        "reward": gear.Window(6, offset=-5, pad="head"),
        "wide": gear.Window(2, pad="edge"),
        "prompt": gear.Window(1),
    },
    "whole": gear.Whole(),
    "whole, final": gear.Whole(final=True),
}
AXES: dict[str, tuple[Any, ...]] = {
    "selector": tuple(SAMPLERS),
    "windows": tuple(WINDOWS),
    "layout": ("padded", "packed", "budget"),
    "complete": (False, False, True),
    "late": (False, True),
    "tier": (False, True),
    "shards": (1, 1, 2),
    "scope": ("global", "local"),
    "group": (False, False, True),
    "sample_info": (False, False, True),
    "prefetch": (0, 2),
}
COUNT = 100
SIZE = 8


def trajectory(number: int) -> dict[str, Any]:
    """One whose values and length follow from its number."""
    length = number * 7 % 23 + 1
    steps = np.arange(length)
    return {
        "observation": (number + steps[:, None] / 64 + np.arange(3) / 8).astype(np.float32),
        "action": (number * 3 + steps[:, None] - np.arange(2)).astype(np.int16),
        "reward": number * 4096.0 + steps,
        "wide": (number + steps[:, None] + np.arange(300)).astype(np.uint8),
        "prompt": number // 2,
    }


@contextlib.contextmanager
def shard(first: int, point: dict[str, Any], folder: Path) -> Iterator[gear.Table]:
    """Trajectories from number `first` on, some of which were replaced, some spilled, some filled later."""
    late = point["late"]
    sizes: dict[str, Any] = {"max_steps": 2000, "max_trajectories": 60, "block_steps": 4}
    if point["tier"]:
        disk = gear.Disk(folder / f"tier-{first}", sync_seconds=1e6, size="1GiB", keep="newest")
        sizes |= {"max_blocks": 60, "timeout": 60.0, "disk": disk}
    with gear.Table.create({**SCHEMA, **(LATE if late else {})}, **nested_table(sizes)) as made:
        added: list[int] = []
        for number in range(first, first + 40):
            values = trajectory(number)
            final = {"observation": values["observation"][-1] + 0.5} if number % 3 else None
            added.append(made.add(values, final=final, priority=number % 5 + 0.5))
        made.remove(added[4:10])
        for number in range(first + 40, first + 44):
            added.append(made.add(trajectory(number), priority=number % 7 + 0.25))
        if late:
            filled = made.indices()[:34]
            lengths = [len(made[int(index)]["reward"]) for index in filled]
            scores = [np.arange(length, dtype=np.float32) + number for number, length in enumerate(lengths)]
            made.fill(filled, score=scores, grade=np.arange(len(filled), dtype=np.int32))
        yield made


def batches(point: dict[str, Any]) -> list[dict[str, Any]]:
    """The batches of two short epochs of a point of the product, with priorities that change between them."""
    sampler = SAMPLERS[point["selector"]]
    options: dict[str, Any] = {"batch_size": SIZE, "batches_per_epoch": 5}
    if point["layout"] != "padded":
        options["layout"] = "packed"
    if point["layout"] == "budget":
        options |= {"batch_size": None, "max_steps": 60, "lookahead": 2}
    if point["scope"] == "local":
        options["scope"] = "local"
    if point["group"]:
        options |= {"group": "prompt", "group_size": 2}
    windows = WINDOWS[point["windows"]]
    names = list(SCHEMA) + (list(LATE) if point["late"] else [])
    if not isinstance(windows, dict):
        options["columns"] = names
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tables = [stack.enter_context(shard(1000 * i, point, folder)) for i in range(point["shards"])]
        source: Any = tables[0] if len(tables) == 1 else stack.enter_context(gd.Shards(tables))
        dataset = gear.ReplayDataset(
            source,
            **nested(
                {
                    "sampler": sampler,
                    "windows": windows,
                    "complete": point["complete"],
                    "sample_info": point["sample_info"],
                    "prefetch": point["prefetch"],
                    "seed": 11,
                    "device": "cpu",
                    "copy": True,
                    **options,
                }
            ),
        )
        found = []
        for _ in range(2):
            for batch in dataset:
                if "sample_info" in batch:
                    batch["sample_info"] = {
                        k: v for k, v in batch["sample_info"].items() if k != "age_seconds"
                    }
                found.append(batch)
            if isinstance(sampler, gear.Prioritized | gear.TopK):
                last = found[-1]
                dataset.update_priority(
                    last["index"],
                    (last["index"] * 31 + last["anchor"]) % 11 + 0.125,
                    generation=last["generation"],
                    anchor=last["anchor"] if sampler.unit == "step" else None,
                    **({"shard": last["shard"]} if "shard" in last else {}),
                )
        return found


def digest(point: dict[str, Any]) -> str:
    """SHA-256 of the batches of a point."""
    return digest_of(batches(point))


def record(file: Path) -> None:
    """Write the digests of the first hundred points, in an order of chance, that are valid."""
    rng = np.random.default_rng(0)
    digests: dict[str, str] = {}
    refused = 0
    while len(digests) < COUNT:
        point = {name: values[rng.integers(len(values))] for name, values in AXES.items()}
        key = json.dumps(point)
        if key in digests:
            continue
        try:
            digests[key] = digest(point)
        except SchemaError as error:
            refused += 1
            print(f"refused: {error}", file=sys.stderr)
    print(f"{refused} points were invalid", file=sys.stderr)
    file.write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
