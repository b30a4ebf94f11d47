"""The experiments: name, module, and what `python -m benchmarks list` says of each."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["EXPERIMENTS", "Experiment", "named"]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One of the things that can be measured.

    Attributes:
        name: on the command line, in rows, and of its file in `benchmarks/results/`.
        module: in `benchmarks`, whose `command` is the experiment with all its options.
        summary: one line.
        devices: where it can be measured.
        peers: other libraries that it compares with, where they are installed.
        paper: which of the paper's three experiments it is.
    """

    name: str
    module: str
    summary: str
    devices: tuple[str, ...] = ("cpu",)
    peers: tuple[str, ...] = ()
    paper: str = ""

    @property
    def command(self) -> Callable[..., Any]:
        """The function behind the command line."""
        found: Callable[..., Any] = importlib.import_module(f"benchmarks.{self.module}").command
        return found


EXPERIMENTS = (
    Experiment(
        "single-server",
        "single_server",
        "storing and drawing batches on one machine, through DataLoader",
        ("cpu", "cuda"),
        ("Reverb", "TorchRL", "cpprb"),
        "1: throughput on one server",
    ),
    Experiment(
        "multi-server",
        "multi_server",
        "rows of other nodes, and drawing from all of them; 1 to 3 nodes",
        paper="2: from 1 to 3 servers",
    ),
    Experiment(
        "batch-size",
        "batch_size",
        "the same batches as single-server, of 32 to 1024 rows",
        ("cpu", "cuda"),
        ("Reverb", "TorchRL", "cpprb"),
        "3: batch sizes 32 to 1024",
    ),
    Experiment("collect", "collect", "gathering batches, against a copy of as many bytes", ("cpu", "cuda")),
    Experiment(
        "select",
        "select",
        "drawing by priority and setting priorities, against the number of items",
        ("cpu", "cuda"),
        ("TorchRL", "cpprb", "Tianshou"),
    ),
    Experiment(
        "online",
        "online",
        "adding by 1 to 8 processes, and reading meanwhile",
        peers=("Reverb", "TorchRL", "cpprb"),
    ),
    Experiment(
        "checkpoint",
        "checkpoint",
        "saving and loading a table, against writing and reading as many bytes",
        peers=("Reverb", "TorchRL", "cpprb"),
    ),
    Experiment(
        "memory",
        "memory",
        "bytes resident for each byte of payload, with trajectories of uneven length",
        peers=("Reverb", "TorchRL", "cpprb"),
    ),
    Experiment(
        "overlap",
        "overlap",
        "how much a training step slows down with the loader beside it",
        ("cpu", "cuda"),
    ),
    Experiment(
        "train",
        "train",
        "a small transformer end to end: samples a second, seconds to a return",
        ("cpu", "cuda"),
        ("Reverb", "TorchRL"),
    ),
)


def named(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        KeyError: there is none.
    """
    return {experiment.name: experiment for experiment in EXPERIMENTS}[name]
