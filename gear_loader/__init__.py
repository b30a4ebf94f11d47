"""Gear Loader: a GPU-centric experience-replay store and data loader for PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gear_loader import errors
from gear_loader.utils.lazy import loader
from gear_loader.utils.provided import provide

if TYPE_CHECKING:
    from gear_loader import distributed, exports, graph, sources, transforms
    from gear_loader.collection.batches import Batch
    from gear_loader.collection.n_step import NStep
    from gear_loader.collection.windows import Whole
    from gear_loader.dataset import Mixture, ReplayDataset
    from gear_loader.dataset.options import Draws, Gpu, Prefetch, Ranks
    from gear_loader.dataset.replay_metrics import ReplayLogger
    from gear_loader.graph.features import Features
    from gear_loader.lightning.datamodule import ReplayDataModule
    from gear_loader.lightning.monitor import ReplayMonitor
    from gear_loader.replay.buffer import ReplayBuffer
    from gear_loader.replay.hindsight import Hindsight
    from gear_loader.selection.balance import balance
    from gear_loader.selection.grouping import Groups
    from gear_loader.selection.samplers import Fifo, Lifo, LinearSchedule, Prioritized, TopK, Uniform
    from gear_loader.selection.step_budget import Steps
    from gear_loader.sources.named import load_dataset
    from gear_loader.storage.codecs import Codec
    from gear_loader.storage.device_writer import DeviceWriter
    from gear_loader.storage.disk import Disk, DiskStats
    from gear_loader.storage.limiters import MinSize, Queue, RateLimiter, SampleToInsertRatio
    from gear_loader.storage.memory_options import Memory
    from gear_loader.storage.prometheus import prometheus_text
    from gear_loader.storage.ragged import Ragged
    from gear_loader.storage.schema import Column, Schema, Window
    from gear_loader.storage.stats import TableStats
    from gear_loader.storage.table import Table
    from gear_loader.storage.table_rules import Limits
    from gear_loader.storage.vector_writer import VectorWriter
    from gear_loader.storage.writer import Writer
    from gear_loader.transport.remote_table import RemoteTable, connect
    from gear_loader.transport.table_server import serve

__all__ = [
    "Batch",
    "Codec",
    "Column",
    "DeviceWriter",
    "Disk",
    "DiskStats",
    "Draws",
    "Features",
    "Fifo",
    "Gpu",
    "Groups",
    "Hindsight",
    "Lifo",
    "Limits",
    "LinearSchedule",
    "Memory",
    "MinSize",
    "Mixture",
    "NStep",
    "Prefetch",
    "Prioritized",
    "Queue",
    "Ragged",
    "Ranks",
    "RateLimiter",
    "RemoteTable",
    "ReplayBuffer",
    "ReplayDataModule",
    "ReplayDataset",
    "ReplayLogger",
    "ReplayMonitor",
    "SampleToInsertRatio",
    "Schema",
    "SequenceBuffer",
    "Steps",
    "Table",
    "TableStats",
    "TopK",
    "Uniform",
    "VectorWriter",
    "Whole",
    "Window",
    "Writer",
    "balance",
    "connect",
    "distributed",
    "errors",
    "exports",
    "graph",
    "load_dataset",
    "prometheus_text",
    "serve",
    "sources",
    "transforms",
]

__version__ = "0.1.0"

# Loaded on first use: torch takes a second, of which the command line has no need, and some modules want packages
# that the core does not.
_MODULES = {
    "Batch": "collection.batches",
    "Codec": "storage.codecs",
    "Column": "storage.schema",
    "DeviceWriter": "storage.device_writer",
    "Disk": "storage.disk",
    "DiskStats": "storage.disk",
    "Draws": "dataset.options",
    "Features": "graph.features",
    "Fifo": "selection.samplers",
    "Gpu": "dataset.options",
    "Groups": "selection.grouping",
    "Hindsight": "replay.hindsight",
    "Lifo": "selection.samplers",
    "Limits": "storage.table_rules",
    "LinearSchedule": "selection.samplers",
    "Memory": "storage.memory_options",
    "MinSize": "storage.limiters",
    "Mixture": "dataset",
    "NStep": "collection.n_step",
    "Prefetch": "dataset.options",
    "Prioritized": "selection.samplers",
    "Queue": "storage.limiters",
    "Ragged": "storage.ragged",
    "Ranks": "dataset.options",
    "RateLimiter": "storage.limiters",
    "RemoteTable": "transport.remote_table",
    "ReplayBuffer": "replay.buffer",
    "ReplayDataModule": "lightning.datamodule",
    "ReplayDataset": "dataset",
    "ReplayLogger": "dataset.replay_metrics",
    "ReplayMonitor": "lightning.monitor",
    "SampleToInsertRatio": "storage.limiters",
    "Schema": "storage.schema",
    "SequenceBuffer": "replay.sequences",
    "Steps": "selection.step_budget",
    "Table": "storage.table",
    "TableStats": "storage.stats",
    "TopK": "selection.samplers",
    "Uniform": "selection.samplers",
    "VectorWriter": "storage.vector_writer",
    "Whole": "collection.windows",
    "Window": "storage.schema",
    "Writer": "storage.writer",
    "balance": "selection.balance",
    "connect": "transport.remote_table",
    "load_dataset": "sources.named",
    "prometheus_text": "storage.prometheus",
    "serve": "transport.table_server",
}


_load = loader(__name__, _MODULES)

# Parts of `Table` and `connect` that higher rooms implement: module and name there.
_PARTS = {
    "Learner": ("transport.learner", "Learner"),
    "LearnerLink": ("transport.learner_link", "LearnerLink"),
    "LoadOptions": ("checkpoint.loading", "LoadOptions"),
    "RemoteDataset": ("transport.remote_dataset", "RemoteDataset"),
    "RemoteOrigin": ("transport.remote_dataset", "RemoteOrigin"),
    "Sampled": ("storage.engine", "Sampled"),
    "SharedEpochs": ("transport.learner", "SharedEpochs"),
    "ShardsDataset": ("transport.shards_dataset", "ShardsDataset"),
    "ShardsOrigin": ("transport.shards_dataset", "ShardsOrigin"),
    "TierFiles": ("checkpoint.tier_reader", "FileReader"),
    "connect_through_ray": ("integrations.ray", "connect"),
    "create_on_disk": ("checkpoint.behind", "create"),
    "load": ("checkpoint.loading", "load"),
    "options_to_json": ("transport.learner_options", "options_to_json"),
    "promote": ("checkpoint.spilling", "promote"),
    "recover": ("checkpoint.recovering", "recover"),
    "save": ("checkpoint.saving", "save"),
    "export": ("exports.formats", "export"),
    "gather": ("collection.chosen", "gather"),
    "sample": ("dataset.table_sample", "sample"),
    "serve": ("transport.table_server", "serve"),
}


def _part(name: str) -> Any:
    module, attribute = _PARTS[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)


provide(_part)


def __getattr__(name: str) -> Any:
    packages = ("distributed", "exports", "graph", "sources", "transforms")
    return importlib.import_module(f"{__name__}.{name}") if name in packages else _load(name)


def __dir__() -> list[str]:
    """The public names, whether they are loaded or not."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__") and name.endswith("__"))})
