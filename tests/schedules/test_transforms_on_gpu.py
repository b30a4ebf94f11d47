"""Transforms and hindsight of batches on a GPU are those of batches on the CPU, whatever runs when."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from dataset_common import on_host
from streams.cuda import Cuda
from streams.machine import Policy
from test_host_work import WAITS, work

import gear_loader as gear
from gear_loader import transforms

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real torch.cuda")
DEVICE = torch.device("cuda", 1)
PRIORITY = gear.Prioritized(unit="step")


def reward(achieved: Any, desired: Any, info: Any) -> Any:
    return achieved[:, 0] * 3 - desired[:, 0] + info["bonus"]


def filled(device: Any, n_step: int, tensors: bool, *, sampler: Any = None) -> gear.ReplayBuffer:
    buffer = gear.ReplayBuffer(
        300,
        n_step=n_step,
        sampler=sampler,
        batch_size=8,
        device=device,
        hindsight=gear.Hindsight(reward, tensors=tensors),
        transform=[
            transforms.RandomShift("obs.image", pad=1),
            transforms.ToDtype("obs.image", scale=True),
            transforms.Normalize("obs.achieved_goal", "next_obs.achieved_goal"),
        ],
    )
    random = np.random.default_rng(0)
    obs: dict[str, Any] = {}
    for step in range(60):
        following = {
            "achieved_goal": np.array([step + 1, 0], np.float32),
            "desired_goal": np.array([-1 - step // 10, 0], np.float32),
            "image": random.integers(0, 256, (1, 4, 5), dtype=np.uint8),
        }
        buffer.add(obs or following, 0, -1.0, following, step % 20 == 19, step % 10 == 9, bonus=step % 3)
        obs = {} if step % 10 == 9 else following
    return buffer


@pytest.mark.parametrize(("policy", "n_step"), [("random", 1), ("latest", 3)])
def test_batches_are_those_of_the_cpu(policy: Policy, n_step: int) -> None:
    expected = filled("cpu", n_step, tensors=False)
    wanted = [expected.sample() for _ in range(2)] + [b for b, _ in zip(expected, range(3), strict=False)]
    cuda = Cuda(n_step, policy)
    with cuda.installed():
        buffer = filled(DEVICE, n_step, tensors=n_step == 1)
        found = [on_host(buffer.sample()) for _ in range(2)]
        found += [on_host(batch) for batch, _ in zip(buffer, range(3), strict=False)]
        assert buffer.table is not None
        gc.collect()  # the iteration has ended
        cuda.threads.finish()
        buffer.table.close()
        del buffer
        gc.collect()
    cuda.check()
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        for name, values in other.items():
            parts = values if isinstance(values, dict) else {name: values}
            for part, each in parts.items():
                mine = one[name][part] if isinstance(values, dict) else one[name]
                torch.testing.assert_close(mine, each, msg=f"{name} {part}")


@pytest.mark.parametrize(
    ("sampler", "n_step", "tensors"),
    mostly_long(
        [(None, 1, False), (None, 1, True), (None, 3, True), (PRIORITY, 3, False)],
        *((None, 1, False), (PRIORITY, 3, False)),
        ids=["host", "tensors", "n-step", "priority"],
    ),
)
def test_hindsight_does_not_wait_for_the_consumer(sampler: Any, n_step: int, tensors: bool) -> None:
    """Nor for the GPU at all, unless that has drawn the rows: then for their gather."""
    cuda = Cuda(0, "eager")
    with cuda.installed():
        buffer = filled(DEVICE, n_step, tensors, sampler=sampler)
        assert buffer.dataset is not None
        found = work(cuda, buffer.dataset)
        buffer.table.close()  # type: ignore[union-attr]
        del buffer
        gc.collect()
    cuda.check()
    assert "copies of pageable memory" not in found
    waits = {name: found[name] for name in WAITS if name in found}
    assert waits == ({} if sampler is None else {"blocking copies": 1.0, "stream.synchronize": 1.0})
