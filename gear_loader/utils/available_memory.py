"""Memory that this process can allocate: what the machine has available, and what its control groups leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that can be allocated without swapping, as Linux estimates them; None if it does not say.

    Containers and job schedulers limit memory by control groups (versions 1 and 2), each of which its parents limit
    too. Pages of files that a group has not used lately do not count as used.

    Args:
        proc, groups: where these file systems are mounted.
    """
    found = [*_machine(proc), *_control_groups(proc, groups)]
    return max(min(found), 0) if found else None


def _machine(proc: Path) -> Iterator[int]:
    sizes = _pairs(proc / "meminfo")
    if "MemAvailable:" in sizes:
        yield sizes["MemAvailable:"] * 1024


def _control_groups(proc: Path, groups: Path) -> Iterator[int]:
    """What the limits of this process's group and of its parents leave."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = groups / "memory" if controllers else groups
        names = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        cache = "total_inactive_file" if controllers else "inactive_file"
        inner = Path(path.lstrip("/"))
        for folder in (top / inner, *(top / parent for parent in inner.parents)):
            limit, used = (_number(folder / f"memory.{name}") for name in names)
            if limit is not None and used is not None:
                yield limit - used + _pairs(folder / "memory.stat").get(cache, 0)


def _number(file: Path) -> int | None:
    """The number in a file; None if there is none, as in ``memory.max`` of a group without a limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _pairs(file: Path) -> dict[str, int]:
    """Name -> number of a file with a pair on each line."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}
