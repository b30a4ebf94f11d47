"""Two ranks on two machines with an RDMA network between them: their batches are those of one process.

Each machine runs these tests at the same time, with $MACHINE 0 or 1, as `make rdma-check` does.
"""

from __future__ import annotations

import datetime
import importlib.util
import math
import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from distributed_common import check_batch, filled, new_priorities, same_rows
from nixl_common import SLOWER
from options_common import nested
from test_verbs import DEVICES, packets

import gear_loader as gear
from gear_loader.distributed import Shards
from gear_loader.storage.schema import Window

RANK = int(os.environ.get("MACHINE", "0"))
HOSTS = ("10.9.0.1", "10.9.0.2")
pytestmark = [
    pytest.mark.skipif(
        os.environ.get("MACHINES") != "2" or not DEVICES, reason="needs two machines: `make rdma-check`"
    ),
    pytest.mark.timeout(300 * SLOWER),
]
COUNTS, ROWS, BATCHES = [40, 10], 24, 3
WINDOW = Window(6, -2)


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Any]]:
    """What one process draws, which is in no process group."""
    return draw(Shards([filled(None, shard, COUNTS) for shard in range(2)]))


@pytest.fixture(scope="module")
def group(expected: list[dict[str, Any]]) -> Iterator[None]:
    """The process group, over the network between the machines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "eth0")
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{HOSTS[0]}:29500",
            rank=RANK,
            world_size=2,
            timeout=datetime.timedelta(seconds=120 * SLOWER),
        )
        yield
        torch.distributed.destroy_process_group()


def draw(shards: Shards) -> list[dict[str, Any]]:
    """Batches of each sampler, as numpy arrays, with new priorities after each."""
    found = []
    for sampler in (gear.Prioritized(), gear.Uniform(unit="step"), gear.TopK()):
        size = ROWS // shards.num_slices
        options: dict[str, Any] = {"windows": WINDOW, "seed": 9, "copy": True, "batches_per_epoch": BATCHES}
        data = gear.ReplayDataset(shards, **nested({"batch_size": size, "sampler": sampler, **options}))
        for number, batch in enumerate(data):
            check_batch(batch, WINDOW)
            names = ("index", "anchor", "generation", "shard", "act", "obs", "priority_weight")
            found.append({name: batch[name].numpy().copy() for name in names if name in batch})
            if not isinstance(sampler, gear.Uniform):
                data.update_priority(batch, new_priorities(batch, number))
    return found


def shards_of(transport: str, timeout: float = 90.0) -> Shards:
    table = filled(f"gear-machine-{transport}", RANK, COUNTS)
    return Shards(
        table,
        node=f"machine-{RANK}",
        transport=transport,
        host=HOSTS[RANK],
        timeout=timeout * SLOWER,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("transport", ["nixl", "ucx"])
def test_the_machines_together_draw_what_one_process_draws(
    group: None, expected: list[dict[str, Any]], transport: str
) -> None:
    if importlib.util.find_spec("ucxx" if transport == "ucx" else "nixl_cu12") is None:
        pytest.skip(f"{transport} is not installed")  # on both
    before = packets()
    shards = shards_of(transport)
    assert shards.remote
    mine = draw(shards)
    shards.exchange.barrier()  # none closes while the other still reads
    counted = packets() - before
    parts: list[Any] = [None, None]
    torch.distributed.all_gather_object(parts, mine)
    shards.close()
    shards.table.unlink()
    print(f"{transport}: {counted:,} packets of {DEVICES[0].name} for {len(mine)} batches")
    assert counted > 2 * len(mine)
    same_rows(parts, expected, transport)


def test_a_cable_that_is_pulled(group: None) -> None:
    """The last test: the other rank cannot be reached after it."""
    shards = shards_of("nixl", timeout=45.0)
    options: dict[str, Any] = {"batches_per_epoch": math.inf, "prefetch": 0, "seed": 3}
    data = gear.ReplayDataset(
        shards, **nested({"windows": WINDOW, "batch_size": ROWS // 2, "sampler": gear.Uniform(), **options})
    )
    began = time.monotonic()

    def until_it_is_pulled() -> None:
        for number, batch in enumerate(data):
            check_batch(batch, WINDOW)
            if number == 5 and RANK == 1:
                subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)

    with pytest.raises(gear.errors.GearError) as error:
        until_it_is_pulled()
    print(f"machine {RANK}, after {time.monotonic() - began:.0f} s: {error.value}")
    assert time.monotonic() - began < 4 * shards.timeout
    shards.table.unlink()
