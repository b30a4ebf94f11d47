"""The experiments: name, module, and what `python -m benchmarks list` says of each."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Experiment:
    """An experiment; its name is that on the command line, in rows and, with underscores, of its module."""

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


_TABLE = """
single-server | cpu, cuda | Reverb, TorchRL, cpprb | 1: throughput on one server
    storing and drawing batches on one machine, through DataLoader
multi-server | cpu | | 2: from 1 to 3 servers
    rows of other nodes, and drawing from all of them; 1 to 3 nodes
batch-size | cpu, cuda | Reverb, TorchRL, cpprb | 3: batch sizes 32 to 1024
    the same batches as single-server, of 32 to 1024 rows
collect | cpu, cuda | TorchRL, cpprb |
    whole batches, against a copy of as many bytes, plain torch, and the commit before
overhead | cpu | |
    what a call costs beside its copy: batches of one, adding
select | cpu, cuda | TorchRL, cpprb, Tianshou |
    drawing by priority and setting priorities, against the number of items
online | cpu | Reverb, TorchRL, cpprb |
    adding by 1 to 8 processes, and reading meanwhile
remote-write | cpu | Reverb |
    adding to a table of another process over loopback, against a bare socket
remote-sample | cpu | Reverb |
    batches of a table of another process over loopback, against a bare socket
checkpoint | cpu | Reverb, TorchRL, cpprb |
    saving and loading a table, against writing and reading as many bytes
exhaustion | cpu | TorchRL |
    filling and reading tables larger than their memory, on a disk
memory | cpu | Reverb, TorchRL, cpprb |
    bytes resident for each byte of payload, with trajectories of uneven length
overlap | cpu, cuda | |
    how much the loader beside it slows down a training step
transitions | cpu | SB3, TorchRL, cpprb, Tianshou |
    drawing single transitions and appending steps, uniformly and by priority
simulator | cpu, cuda | |
    writing the steps of a simulator, on the GPU that it runs on
device | cuda | |
    what a batch on a GPU costs the host and the GPU, part by part
packed | cpu, cuda | |
    packed batches of sequences of uneven length, by a budget of tokens
values | cpu | LeRobot, Lance, WebDataset |
    images, video and token sequences: speed, bytes stored, memory of 4 readers
data | cpu | LeRobot, Streaming, Lance |
    data sets on a disk and in a bucket: first batch, samples a second, memory of readers
graph | cpu, cuda | |
    neighbour sampling with features, and serving a GraphSAGE, beside PyG and plain torch
learn | cpu | SB3 |
    DQN and SAC of Stable-Baselines3, with its replay buffer or ours
train | cpu, cuda | Reverb, TorchRL |
    a small transformer end to end: samples a second, seconds to a return
"""


def _experiment(head: str, summary: str) -> Experiment:
    name, devices, peers, paper = (part.strip() for part in head.split("|"))
    others = tuple(peers.split(", ")) if peers else ()
    return Experiment(name, summary.strip(), tuple(devices.split(", ")), others, paper)


_LINES = _TABLE.strip().splitlines()
EXPERIMENTS = tuple(map(_experiment, _LINES[::2], _LINES[1::2]))


def named(name: str) -> Experiment:
    """The experiment of that name."""
    return {experiment.name: experiment for experiment in EXPERIMENTS}[name]
