"""What the tests of ucx and nixl share."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path

from gear_loader.transport.ucx_library import before_another_ucx

LOOPBACK = {"0100007F", "0" * 24 + "01000000"}  # as /proc writes 127.0.0.1 and ::1


def start_ucx_first() -> None:
    """Start ucxx with the settings of now, before a test starts NIXL, or ucxx itself, with other settings.

    Of two UCX in one process only that which starts last has memory hooks, without which ucxx is not started.
    """
    if importlib.util.find_spec("ucxx") is not None:
        importlib.import_module("ucxx")
        before_another_ucx()


def listening(pid: int | None) -> list[str]:
    """The addresses on which a process listens for TCP, in the hexadecimal of /proc."""
    files = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            files.add(os.readlink(entry))
        except FileNotFoundError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in files:
                found.append(words[1].partition(":")[0])
    return found
