"""A pytest plugin for TorchRL's own tests: its LazyTensorStorage and its buffers are ours, wherever it has them."""

from __future__ import annotations

import sys

import torchrl.data  # noqa: F401 (loads the modules that are changed)

from gear_loader.integrations import torchrl_storage as ours

BUFFERS = (
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
)


def substitute() -> int:
    """Replace the classes in the modules that tests import them from; return in how many places."""
    places = 0
    names = ("torchrl.data", "torchrl.data.replay_buffers", "torchrl.data.replay_buffers.storages")
    renamed = {"LazyTensorStorage": ours.TableStorage} | {name: getattr(ours, name) for name in BUFFERS}
    for name, module in list(sys.modules.items()):
        for each, replacement in renamed.items():
            if name in names and each in vars(module):
                setattr(module, each, replacement)
                places += 1
    return places


assert substitute() == 3 + 2 * len(BUFFERS)
