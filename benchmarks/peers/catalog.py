"""Which libraries do which task, and how a process of one is started."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import cpprb, reverb, sb3, tianshou, torchrl, torchrl_remote
from benchmarks.peers.process import PeerProcess, start

_LIBRARIES = {
    "reverb": reverb,
    "torchrl": torchrl,
    "torchrl_remote": torchrl_remote,
    "cpprb": cpprb,
    "tianshou": tianshou,
    "sb3": sb3,
}


def peers_of(task: str) -> dict[str, Any]:
    """The variants of other libraries for a task, by name: classes that know more about them."""
    return {name: kind for module in _LIBRARIES.values() for name, kind in module.KINDS.get(task, {}).items()}


def library_of(task: str, variant: str) -> str:
    """The library, and environment of `make.sh`, that has a variant."""
    return next(name for name, module in _LIBRARIES.items() if variant in module.KINDS.get(task, {}))


def started(folder: Path | None, task: str, variant: str, threads: int = 1, **options: Any) -> PeerProcess:
    """A process for a variant of another library; see `process.start`."""
    return start(folder, task, library_of(task, variant), variant, threads, **options)


@dataclasses.dataclass(frozen=True)
class Contender:
    """A variant that a process of its own measures. required: whether its failure ends the run."""

    name: str
    launch: Callable[[], PeerProcess]
    required: bool = False
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    at_most: float | None = None


def contenders(
    folder: Path | None,
    task: str,
    own: Mapping[str, str],
    threads: int = 1,
    *,
    required: Sequence[str] = ("ours",),
    patience: float = 300.0,
) -> list[Contender]:
    """Variants of this project and of torch alone, name -> library; then those of other libraries."""
    libraries = {**own, **{name: library_of(task, name) for name in peers_of(task)}}
    found = []
    for name, library in libraries.items():
        launch = functools.partial(start, folder, task, library, name, threads, patience=patience)
        found.append(Contender(name, launch, name in required))
    return found
