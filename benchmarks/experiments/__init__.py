"""The experiments: name, module, and what `python -m benchmarks list` says of each."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["EXPERIMENTS", "Experiment", "named"]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """An experiment.

    Attributes:
        name: on the command line, in rows, and of its file in `benchmarks/results/`; of its module with underscores.
        summary: one line.
        devices: where it can be measured.
        peers: other libraries that it compares with, where they are installed.
        paper: which of the paper's three experiments it is.
    """

    name: str
    summary: str
    devices: tuple[str, ...] = ("cpu",)
    peers: tuple[str, ...] = ()
    paper: str = ""

    @property
    def command(self) -> Callable[..., Any]:
        """The function behind the command line."""
        module = importlib.import_module(f"benchmarks.experiments.{self.name.replace('-', '_')}")
        found: Callable[..., Any] = module.command
        return found


_BOTH, _THREE = ("cpu", "cuda"), ("Reverb", "TorchRL", "cpprb")
EXPERIMENTS = tuple(
    Experiment(*about)
    for about in (
        (
            "single-server",
            "storing and drawing batches on one machine, through DataLoader",
            _BOTH,
            _THREE,
            "1: throughput on one server",
        ),
        (
            "multi-server",
            "rows of other nodes, and drawing from all of them; 1 to 3 nodes",
            ("cpu",),
            (),
            "2: from 1 to 3 servers",
        ),
        (
            "batch-size",
            "the same batches as single-server, of 32 to 1024 rows",
            _BOTH,
            _THREE,
            "3: batch sizes 32 to 1024",
        ),
        ("collect", "gathering batches, against a copy of as many bytes", _BOTH),
        (
            "select",
            "drawing by priority and setting priorities, against the number of items",
            _BOTH,
            ("TorchRL", "cpprb", "Tianshou"),
        ),
        ("online", "adding by 1 to 8 processes, and reading meanwhile", ("cpu",), _THREE),
        (
            "checkpoint",
            "saving and loading a table, against writing and reading as many bytes",
            ("cpu",),
            _THREE,
        ),
        (
            "memory",
            "bytes resident for each byte of payload, with trajectories of uneven length",
            ("cpu",),
            _THREE,
        ),
        ("overlap", "how much a training step slows down with the loader beside it", _BOTH),
        (
            "train",
            "a small transformer end to end: samples a second, seconds to a return",
            _BOTH,
            ("Reverb", "TorchRL"),
        ),
    )
)


def named(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        KeyError: there is none.
    """
    return {experiment.name: experiment for experiment in EXPERIMENTS}[name]
