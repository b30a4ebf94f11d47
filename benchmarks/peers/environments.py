"""Finding the interpreters that have a peer, and saying why one has not."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks import machine
from benchmarks.peers.process import PeerFailed, PeerProcess

__all__ = ["FOLDER", "first", "interpreters", "start"]

Made = TypeVar("Made")

FOLDER = machine.ROOT / ".peers"
"""Where `make.sh` puts the environments unless it is told otherwise."""


def interpreters(given: Sequence[Path] | None) -> list[Path]:
    """The interpreters that are meant.

    Args:
        given: interpreters, or folders of environments; None or none of them: those that GEAR_LOADER_PEERS names,
            separated by colons, or else what lies in `FOLDER`. An empty GEAR_LOADER_PEERS means none at all.
    """
    named = os.environ.get("GEAR_LOADER_PEERS")
    paths = list(given or []) or [Path(part) for part in (named or "").split(":") if part]
    if not paths and named is None and FOLDER.is_dir():
        paths = [FOLDER]
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = [path / "bin" / "python", *sorted(path.glob("*/bin/python"))]
            failed = [place.parent / "bin" / "python" for place in sorted(path.glob("*/failed.txt"))]
            there = [python for python in inside if python.exists()]
            found += there + [python for python in failed if python not in there] or [path]
        else:
            found.append(path)
    return found


def start(
    pythons: Sequence[Path],
    script: str,
    variant: str,
    threads: int,
    *,
    environment: str | None = None,
    patience: float = 300.0,
) -> PeerProcess:
    """A process of a peer's script under the first interpreter that has the peer.

    Args:
        pythons: of `interpreters`.
        script: the file; it imports nothing of this project.
        variant, threads: its arguments.
        environment: the one of `make.sh` that has the peer; it is tried first.
        patience: seconds that an answer may take.

    Raises:
        PeerFailed: none has it; the message gives each one's reason.
    """
    return first(
        pythons,
        lambda python: PeerProcess([str(python), "-I", script, variant, str(threads)], patience=patience),
        environment=environment,
    )


def first(pythons: Sequence[Path], make: Callable[[Path], Made], *, environment: str | None = None) -> Made:
    """What `make` makes of the first interpreter that it does not refuse with `PeerFailed`.

    Args:
        pythons, environment: see `start`.

    Raises:
        PeerFailed: it refused all; the message gives each one's reason.
    """
    reasons = []
    for python in sorted(pythons, key=lambda path: _environment(path) != environment):
        own = environment == _environment(python)
        note = python.parent.parent / "failed.txt"
        if not note.is_file():
            try:
                return make(python)
            except PeerFailed as error:
                reasons.append(f"{python}: {error}")
        elif own or environment is None:
            reasons.append(note.read_text(encoding="utf-8").strip())
        if own:
            break  # the others have other peers
    raise PeerFailed("; ".join(reasons) or "no interpreter with peers is there (benchmarks/peers/make.sh)")


def _environment(python: Path) -> str:
    return python.parent.parent.name
