"""TransferQueue with samples in a table: a run that is killed, and what a new controller is told of it.

Its own tests, which start Ray, run on ours in test_own_tests.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gear_loader as gear
from gear_loader.storage.shared_memory import region_path

controllers = pytest.importorskip(
    "transfer_queue.controller",
    reason="needs TransferQueue: make peers ARGS='.peers transferqueue', test_own_tests.py",
)
owners = pytest.importorskip("gear_loader.integrations.transfer_queue_owner")
restoring = pytest.importorskip("gear_loader.integrations.transfer_queue_restoring")

PROGRAM = """
import os, signal, sys
import numpy as np, torch
from gear_loader.integrations.transfer_queue_fields import packed
from gear_loader.integrations.transfer_queue_owner import BackendOptions, TableOwner

owner = TableOwner(BackendOptions(name=sys.argv[1], path=sys.argv[2], memory="16MiB", sync=True, sync_seconds=100.0))

def put(partition, rows, version, **fields):
    owner.put(np.array(rows), fields, [packed([partition, f"k{i}", {"version": version}], "tag") for i in rows])

for partition, rows in (("train", [0, 1, 2, 3]), ("test", [7, 8])):
    ids = torch.nested.as_nested_tensor([torch.arange(i + 1) for i in rows], layout=torch.jagged)
    put(partition, rows, 1, ids=ids, text=[str(i) for i in rows], score=torch.tensor(rows) * 1.0)
owner.remove(np.array([1]))
put("train", [2], 2, late=torch.ones(1, 3))
owner.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def controller() -> Any:
    """A controller without Ray and sockets."""
    kind = controllers.TransferQueueController.__ray_metadata__.modified_class
    made = kind.__new__(kind)
    made.partitions, made.index_manager = {}, controllers.PartitionIndexManager()
    made.controller_id = "controller"
    return made


@pytest.mark.long
@pytest.mark.parametrize("lost", ["processes", "memory"])
def test_what_a_killed_run_had_put_is_told_to_the_next_controller(tmp_path: Path, lost: str) -> None:
    name, path = f"killed-{np.random.default_rng().integers(1 << 40)}", str(tmp_path / "disk")
    done = subprocess.run([sys.executable, "-c", PROGRAM, name, path], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    if lost == "memory":
        os.unlink(region_path(name))
    owner = owners.TableOwner(owners.BackendOptions(name=name, memory="16MiB", path=path))
    try:
        new = controller()
        assert restoring.restore(new, owner.samples()) == 5
        train, test = new.partitions["train"], new.partitions["test"]
        assert train.keys_mapping == {"k0": 0, "k2": 2, "k3": 3}
        assert {row: tag["version"] for row, tag in train.custom_meta.items()} == {0: 1, 2: 2, 3: 1}
        assert test.keys_mapping == {"k7": 7, "k8": 8}
        assert train.field_metadata["ids"].per_sample_shapes == {0: (1,), 2: (3,), 3: (4,)}
        found = new.kv_retrieve_meta(["k2", "k0"], "train")
        assert (found.global_indexes, sorted(found.field_names)) == ([2, 0], ["ids", "score", "text"])
        batch = owner.get(np.array(found.global_indexes), found.field_names)
        assert [ids.tolist() for ids in batch["ids"].unbind()] == [[0, 1, 2], [0]]
        assert (batch["text"], batch["score"].tolist()) == (["2", "0"], [2.0, 0.0])
        assert torch.equal(owner.get(np.array([2]), ["late"])["late"].unbind()[0], torch.ones(3))
        fresh = new.kv_retrieve_meta([f"new{i}" for i in range(9)], "train", create=True).global_indexes
        assert not {0, 2, 3, 7, 8}.intersection(fresh)
    finally:
        owner.__ray_shutdown__()
    assert not os.path.exists(region_path(name)), "it is on the disk"
    with gear.Table.load(path) as saved:
        assert len(saved) == 6 + 2  # and the two sets of fields
