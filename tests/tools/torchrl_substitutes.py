"""A pytest plugin for TorchRL's own tests: its LazyTensorStorage is ours, wherever it has it."""

from __future__ import annotations

import sys

import torchrl.data  # noqa: F401 (loads the modules that are changed)

from gear_loader.integrations.torchrl_storage import TableStorage


def substitute() -> int:
    """Replace the class in the modules that tests import it from; return in how many."""
    places = 0
    for name, module in list(sys.modules.items()):
        public = name in (
            "torchrl.data",
            "torchrl.data.replay_buffers",
            "torchrl.data.replay_buffers.storages",
        )
        if public and "LazyTensorStorage" in vars(module):
            module.LazyTensorStorage = TableStorage  # type: ignore[attr-defined]
            places += 1
    return places


assert substitute() == 3
