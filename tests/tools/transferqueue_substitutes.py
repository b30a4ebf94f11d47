"""A pytest plugin for TransferQueue's own tests: the storage that they choose is ours."""

from __future__ import annotations

import os
from typing import Any

from omegaconf import OmegaConf

import gear_loader.integrations.transfer_queue  # noqa: F401  which makes it known

os.environ["TQ_TEST_BACKEND"] = "GearLoader"
OPTIONS = {"name": f"own-tests-{os.getpid()}", "memory": "256MiB"}
CONFIG = {
    "controller": {"polling_mode": True},
    "backend": {"storage_backend": "GearLoader", "GearLoader": OPTIONS},
}


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Give this configuration to the modules, before fixtures read it."""
    for module in {item.module for item in items}:
        if hasattr(module, "BACKEND_CONFIGS"):
            module.BACKEND_CONFIGS["GearLoader"] = CONFIG
        if hasattr(module, "_TQ_CONFIG"):
            module._TQ_CONFIG = OmegaConf.create(CONFIG)
