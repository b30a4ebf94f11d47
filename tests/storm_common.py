"""What writers of a storm store, so that each value tells where it belongs; and the writer itself. Needs no torch."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from typing import Any

import numpy as np

import gear_loader as gear

WIDTH = 8
LONGEST = 40
FLUSHED = 10  # trajectories after which a writer that does not wait looks whether all are stored


def length_of(key: int, number: int) -> int:
    """Steps of the trajectory `number` of the writer `key`."""
    return 1 + (key * 31 + number * 7) % LONGEST


def payload(key: Any, number: Any, step: Any) -> np.ndarray[Any, Any]:
    """Values of a step that no other step has, float32 [..., WIDTH]."""
    base = (np.asarray(key) * 7919 + np.asarray(number) * 131 + np.asarray(step)) % (1 << 20)
    return (base[..., None] + np.arange(WIDTH)).astype(np.float32)


def trajectory(key: int, number: int) -> dict[str, np.ndarray[Any, Any]]:
    steps = np.arange(length_of(key, number))
    about = {"key": np.full_like(steps, key), "number": np.full_like(steps, number), "step": steps}
    return {**about, "payload": payload(key, number, steps)}


def write(url: str, key: int, waits: bool, log: str) -> None:
    """Commit trajectories until SIGTERM; after those known to be stored, append their count to the file `log`."""
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    chance = random.Random(key)
    with gear.connect(url, timeout=200.0) as remote, open(log, "ab", buffering=0) as stored:
        writer = remote.writer(wait=waits)
        number = 0
        while not stop:
            rows = trajectory(key, number)
            for step in range(len(rows["step"])):
                writer.append({name: values[step] for name, values in rows.items()})
            writer.commit()
            number += 1
            if not waits and number % FLUSHED == 0:
                remote.flush()
            if waits or number % FLUSHED == 0:
                stored.write(f"{number}\n".encode())
            time.sleep(chance.uniform(0.01, 0.06))
        remote.flush()
        stored.write(f"{number}\n".encode())
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "wait", sys.argv[4])
