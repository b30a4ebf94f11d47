"""Which libraries do which task, and how a process of one is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import cpprb, reverb, sb3, tianshou, torchrl
from benchmarks.peers.process import PeerProcess, start

_LIBRARIES = {"reverb": reverb, "torchrl": torchrl, "cpprb": cpprb, "tianshou": tianshou, "sb3": sb3}


def peers_of(task: str) -> dict[str, Any]:
    """The variants of other libraries for a task, by name: classes that know more about them."""
    return {name: kind for module in _LIBRARIES.values() for name, kind in module.KINDS.get(task, {}).items()}


def library_of(task: str, variant: str) -> str:
    """The library, and environment of `make.sh`, that has a variant."""
    return next(name for name, module in _LIBRARIES.items() if variant in module.KINDS.get(task, {}))


def started(
    pythons: Sequence[Path], task: str, variant: str, threads: int = 1, **options: Any
) -> PeerProcess:
    """A process for a variant of another library; see `process.start`."""
    return start(pythons, task, library_of(task, variant), variant, threads, **options)
