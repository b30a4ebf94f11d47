"""Calls of a client that an exception interrupts: what was committed is stored once and whole; the process ends."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from table_common import fresh_name
from waiting_common import PATIENCE, wait_until

import gear_loader as gear

COLUMNS = {
    "number": gear.Column(torch.int64, per="trajectory"),
    "place": gear.Column(torch.int32, (2,)),  # of the step; steps of the trajectory
    "wide": gear.Column(torch.float32, (1024,)),  # pieces of 64 steps are sent ahead
}


def steps_of(number: int, length: int) -> dict[str, Any]:
    return {
        "place": np.stack([np.arange(length), np.full(length, length)], 1).astype(np.int32),
        "wide": np.full((length, 1024), number, np.float32),
    }


class Client:
    """Calls that add trajectories; each returns the numbers of those that it has added."""

    def __init__(self, url: str, secret: bytes, seed: int) -> None:
        self._connect = lambda: gear.connect(url, secret=secret, timeout=PATIENCE)
        self._generator = random.Random(seed)
        self._numbers = itertools.count(1)
        self.remote = self._connect()
        self._writers = {
            name: self.remote.writer(wait=name == "waits") for name in ("writer", "waits", "handler")
        }
        self._chunks = self.remote.writer(chunk_steps=70)
        self._vector = self.remote.writers(3)
        self.calls: dict[str, Callable[[], list[int]]] = {
            "add": lambda: self.add(self.remote),
            "writer": lambda: self.write("writer"),
            "waits": lambda: self.write("waits"),
            "chunks": self.write_chunk,
            "vector": self.write_vector,
            "connect": self.connect,
        }

    def _next(self) -> tuple[int, dict[str, Any], int]:
        number, length = next(self._numbers), self._generator.choice((1, 3, 70))
        return number, steps_of(number, length), length

    def add(self, remote: gear.RemoteTable) -> list[int]:
        number, rows, _ = self._next()
        remote.add({**rows, "number": np.int64(number)})
        return [number]

    def connect(self) -> list[int]:
        with self._connect() as remote:
            return self.add(remote)

    def write(self, name: str) -> list[int]:
        writer = self._writers[name]
        writer.discard()
        number, rows, length = self._next()
        for step in range(length):
            writer.append({column: values[step] for column, values in rows.items()})
        writer.commit(trajectory={"number": np.int64(number)})
        return [number]

    def write_chunk(self) -> list[int]:
        """The last step completes the chunk, and commits it."""
        self._chunks.discard()
        number = next(self._numbers)
        self._chunks.trajectory = {"number": np.int64(number)}
        self._chunks.append(steps_of(number, 70))
        return [number]

    def write_vector(self) -> list[int]:
        self._vector.discard()
        numbers, length = [next(self._numbers) for _ in range(3)], self._generator.choice((1, 3, 70))
        self._vector.trajectory = {"number": np.array(numbers)}
        rows = [steps_of(number, length) for number in numbers]
        for step in range(length):
            now = {name: np.stack([each[name][step] for each in rows]) for name in rows[0]}
            self._vector.append(now, done=np.full(3, step == length - 1))
        return numbers


def by_signals(client: Client, count: int, generator: random.Random) -> list[int]:
    """Interrupt calls by signals, each after a random time; the numbers that calls have returned."""
    from interrupts_loop import Interruption, handler, is_interruption

    armed, added = False, []

    def interrupt(*_: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Interruption

    with handler(interrupt):
        for _ in range(count):
            call = client.calls[generator.choice(list(client.calls))]
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, math.exp(generator.uniform(-11, -5)))
                while armed:
                    added += call()
            except BaseException as error:
                if not is_interruption(error):
                    raise
            signal.setitimer(signal.ITIMER_REAL, 0)
    return added


def by_handlers(client: Client, count: int, generator: random.Random) -> list[int]:
    """Interrupt calls by a signal's handler that makes a call itself."""
    from interrupts_loop import handler

    added: list[int] = []
    with handler(lambda *_: added.extend(client.write("handler"))):
        for _ in range(count):
            signal.setitimer(signal.ITIMER_REAL, math.exp(generator.uniform(-11, -5)))
            added.extend(client.calls[generator.choice(list(client.calls))]())
    return added


def by_opcodes(client: Client, count: int, generator: random.Random) -> list[int]:
    """Interrupt each call at random opcodes of the package."""
    from interrupts_loop import interrupt_at, is_interruption, opcodes_of

    added: list[int] = []
    for call in client.calls.values():
        opcodes = max(opcodes_of(lambda call=call: added.extend(call())) for _ in range(5))  # type: ignore[misc]
        for _ in range(count):
            error = interrupt_at(lambda: added.extend(call()), generator.randint(1, opcodes))  # noqa: B023
            assert error is None or is_interruption(error), error
    return added


def main(url: str, how: str, count: str, seed: str, closes: str) -> None:
    """The client's process."""
    client = Client(url, os.environb[b"SECRET"], int(seed))
    for call in client.calls.values():
        call()
    interrupt = {"signals": by_signals, "handlers": by_handlers, "opcodes": by_opcodes}[how]
    added = interrupt(client, int(count), random.Random(int(seed)))
    if closes == "closes":
        client.remote.close()
        wait_until(lambda: not spools(), f"the threads {spools()} to end")
    print(json.dumps(added))


def spools() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "spool" in thread.name]


@pytest.mark.long
@pytest.mark.parametrize("closes", ["closes", "ends"])
@pytest.mark.parametrize(("how", "count"), [("signals", 600), ("handlers", 600), ("opcodes", 80)])
def test_what_was_committed_is_stored_once_and_whole(how: str, count: int, closes: str) -> None:
    sizes: dict[str, Any] = {"max_steps": 100_000, "max_trajectories": 20_000, "block_steps": 8}
    with gear.Table.create(COLUMNS, **sizes, name=fresh_name()) as table:
        server = table.serve()
        try:
            program = [sys.executable, __file__, server.url, how, str(count), "5", closes]
            tests = Path(__file__).parents[1]
            paths = os.pathsep.join(map(str, (tests.parent, tests, tests / "tools")))
            environment = {**os.environ, "SECRET": server.secret.decode(), "PYTHONPATH": paths}
            out = subprocess.run(
                program, env=environment, stdout=subprocess.PIPE, check=True, timeout=8 * PATIENCE
            ).stdout
            stored: list[int] = []
            for i in table.indices().tolist():
                row = table[i]
                length = len(row["place"])
                stored.append(int(row["number"]))
                assert row["place"].tolist() == [[step, length] for step in range(length)]
                assert (row["wide"] == stored[-1]).all()
            assert len(stored) == len(set(stored)), "a trajectory is stored twice"
            assert not set(json.loads(out)) - set(stored)
        finally:
            server.stop()
            table.unlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
