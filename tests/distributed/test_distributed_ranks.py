"""Two processes joined by gloo: each rank draws its own batches of one sequence, without a word of configuration."""

from __future__ import annotations

import datetime
import multiprocessing
import pickle
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from dataset_common import copies, drawn, named_table, nothing_left, same_batches
from torch.utils.data import DataLoader

import gear_loader as gear

WORLD = 2
LENGTHS = (5, 1, 3, 2, 4, 2, 1, 4, 6, 2, 3, 4, 2, 5)  # 49 steps
SELECTORS = {
    "trajectories": gear.Uniform(),
    "trajectories once": gear.Uniform(replacement=False),
    "steps once": gear.Uniform(replacement=False, unit="step"),
}


def dataset(table: gear.Table, selector: str, **options: Any) -> gear.ReplayDataset:
    return gear.ReplayDataset(
        table,
        **{
            "batch_size": 4,
            "windows": gear.Window(4, -2),
            "selector": SELECTORS[selector],
            "device": "cpu",
            "seed": 9,
            **options,
        },
    )


def run(rank: int, name: str, folder: str) -> None:
    """What each rank does; its findings, or its traceback, go into a file."""
    found: dict[str, Any] = {}
    try:
        warnings.simplefilter("error")
        # Python 3.12 and newer warn when a process with threads forks, as a DataLoader does.
        warnings.filterwarnings(
            "ignore", message="This process .* is multi-threaded", category=DeprecationWarning
        )
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=WORLD,
            timeout=datetime.timedelta(seconds=60),
        )
        with gear.Table.attach(name) as table:
            for selector in SELECTORS:
                data = dataset(table, selector)
                found[selector] = [copies(data), copies(data)]
                found[f"{selector}, length"] = len(data)
                if selector == "trajectories once":
                    found["worker"] = copies(
                        DataLoader(dataset(table, selector), batch_size=None, num_workers=1)
                    )
                found[f"{selector}, sample"] = copies([data.sample(), data.sample()])
                # A spawned worker gets the dataset as a pickle and has no process group of its own.
                found[f"{selector}, pickled"] = pickle.loads(pickle.dumps(data))._shard
                state = data.state_dict()
                resumed = dataset(table, selector)
                resumed.load_state_dict({**state, "epoch": 0, "step": 1})
                found[f"{selector}, resumed"] = copies(resumed)
            given = dataset(table, "trajectories", rank=0, world_size=1)
            found["given"] = copies(given)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException:
        found = {"traceback": traceback.format_exc()}
    torch.save(found, f"{folder}/rank{rank}.pt")


@pytest.mark.slow
def test_ranks_of_a_process_group(tmp_path: Path) -> None:
    with named_table("test-ranks", LENGTHS) as table:
        context = multiprocessing.get_context("forkserver")
        processes = [
            context.Process(target=run, args=(rank, table.name, str(tmp_path))) for rank in range(WORLD)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        assert [process.exitcode for process in processes] == [0] * WORLD
        ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(WORLD)]
        for found in ranks:
            assert "traceback" not in found, found["traceback"]
        for selector in SELECTORS:
            alone = dataset(table, selector)
            items = len(LENGTHS) if "trajectories" in selector else sum(LENGTHS)
            for epoch in range(2):
                expected = copies(alone)
                assert len(expected) == -(-items // 4)
                runs = [found[selector][epoch] for found in ranks]
                lengths = {len(batches) for batches in runs} | {
                    found[f"{selector}, length"] for found in ranks
                }
                assert lengths == {-(-len(expected) // WORLD)}
                dealt = [batch for batches in zip(*runs, strict=True) for batch in batches]
                same_batches(expected, dealt[: len(expected)])
                if "once" in selector:  # disjoint: together each item once, and the padding
                    keys = [row[0] if items == len(LENGTHS) else row for row in drawn(dealt[: len(expected)])]
                    assert len(keys) == len(set(keys)) == items
            for rank, found in enumerate(ranks):
                same_batches(found[selector][0][1:], found[f"{selector}, resumed"])
                assert found[f"{selector}, pickled"] == (rank, WORLD)
            samples = [drawn(found[f"{selector}, sample"]) for found in ranks]
            assert samples[0] != samples[1]
        for found in ranks:
            same_batches(found["trajectories once"][0], found["worker"])
            same_batches(copies(dataset(table, "trajectories")), found["given"])
        nothing_left(table)
