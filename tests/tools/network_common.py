"""Two network namespaces joined by a virtual cable, and processes in them."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SECRET = "a secret of the right length 123"


def ip(*words: str) -> None:
    """Run the command of this name."""
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@contextlib.contextmanager
def two_networks() -> Iterator[tuple[str, str]]:
    """Two namespaces, joined, with the addresses 10.77.0.1 and 10.77.0.2."""
    one, two = (f"gear-{os.getpid()}-{side}" for side in "ab")
    try:
        for name, address, end in ((one, "10.77.0.1/24", "v"), (two, "10.77.0.2/24", "w")):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            if end == "v":
                ip("-n", one, "link", "add", "v0", "type", "veth", "peer", "name", "w0")
            else:
                ip("-n", one, "link", "set", "w0", "netns", two)
            ip("-n", name, "addr", "add", address, "dev", f"{end}0")
            ip("-n", name, "link", "set", f"{end}0", "up")
        yield one, two
    finally:
        for name in (one, two):
            with contextlib.suppress(subprocess.SubprocessError):
                ip("netns", "del", name)


def possible() -> bool:
    """Whether this process may make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    try:
        with two_networks():
            return True
    except (OSError, subprocess.SubprocessError):
        return False


def inside(network: str, *command: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "GEAR_LOADER_SECRET": SECRET}
    return subprocess.Popen(
        ["ip", "netns", "exec", network, sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        **options,
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 60)[0], "nothing came for a minute"
    return process.stdout.readline().strip()


def ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return line_of(process)
