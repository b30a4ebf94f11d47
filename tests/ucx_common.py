"""What the tests of ucx and nixl share."""

from __future__ import annotations

import os
from pathlib import Path

LOOPBACK = {"0100007F", "0" * 24 + "01000000"}  # as /proc writes 127.0.0.1 and ::1


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
