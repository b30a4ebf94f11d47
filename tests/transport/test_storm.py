"""Sixteen writers in another network, whose processes, server and link are killed and cut all the time."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import random
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import storm_common as storm
import torch
from network_common import inside, ip, line_of, possible, two_networks
from waiting_common import wait_until

import gear_loader as gear

WRITERS = 16
COLUMNS = {
    "key": gear.Column(torch.int64),
    "number": gear.Column(torch.int64),
    "step": gear.Column(torch.int64),
    "payload": gear.Column(torch.float32, (storm.WIDTH,)),
}


class Server:
    """The server process in the first network, started again at the same port."""

    def __init__(self, network: str, table: str) -> None:
        self._network, self._table = network, table
        self._process: subprocess.Popen[str] | None = None
        self.address = "10.77.0.1:0"
        self.start()

    def start(self) -> None:
        words = ("-m", "gear_loader", "serve", self._table, "--listen", self.address, "--allow", "write")
        self._process = inside(self._network, *words, stderr=subprocess.DEVNULL)
        self.address = json.loads(line_of(self._process))["addresses"]["socket"].partition("//")[2]

    @property
    def url(self) -> str:
        return f"gear://{self.address}/{self._table}"

    def kill(self) -> None:
        assert self._process is not None
        _end(self._process)


class Writers:
    """The writer processes in the second network; each that is killed is followed by one with another key."""

    def __init__(self, network: str, url: str, folder: Path) -> None:
        self._network, self._url, self._folder = network, url, folder
        self._keys = itertools.count()
        self.logs: dict[int, Path] = {}
        self.running = [self._started(place) for place in range(WRITERS)]

    def _started(self, place: int) -> tuple[int, subprocess.Popen[str]]:
        key = next(self._keys)
        self.logs[key] = self._folder / str(key)
        how = "wait" if place % 2 else "stream"
        words = (str(storm.__file__), self._url, str(key), how, str(self.logs[key]))
        return key, inside(self._network, *words)

    def replace(self, place: int) -> None:
        _end(self.running[place][1])
        self.running[place] = self._started(place)

    def stop(self) -> None:
        """Let all end in order, everything stored."""
        for key, process in self.running:
            wait_until(self.logs[key].exists)  # else the process does not know the signal yet
            process.terminate()
        for _, process in self.running:
            assert process.wait(240) == 0
            _close(process)

    def kill(self) -> None:
        for _, process in self.running:
            _end(process)

    def stored(self) -> dict[int, int]:
        """Of each writer, how many trajectories it knows to be stored."""
        found = {}
        for key, path in self.logs.items():
            lines = path.read_text().split() if path.exists() else []
            found[key] = int(lines[-1]) if lines else 0
        return found


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    _close(process)


def _close(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


class Trainer(threading.Thread):
    """Draws batches and checks every row, until it is told to stop."""

    def __init__(self, table: gear.Table) -> None:
        super().__init__()
        self._table = table
        self.stop_now = threading.Event()
        self.rows = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            dataset = gear.ReplayDataset(
                self._table,
                batch_size=64,
                windows=gear.Window(4),
                sampler=gear.Uniform(unit="step"),
                batches_per_epoch=1 << 40,
                device="cpu",
            )
            for batch in dataset:
                check_rows(batch)
                self.rows += 64
                if self.stop_now.wait(0.05):
                    return
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self.stop_now.set()
        self.join(60)
        assert not self.is_alive()
        assert self.error is None, self.error


def check_rows(batch: Any) -> None:
    """Each row is of one trajectory, in order."""
    there = batch["mask"].numpy()
    key, number, step = (batch[name].numpy() for name in ("key", "number", "step"))
    assert there[:, 0].all()
    assert (batch["payload"].numpy() == storm.payload(key, number, step))[there].all()
    assert ((key == key[:, :1]) & (number == number[:, :1]))[there].all()
    assert (step == step[:, :1] + np.arange(4))[there].all()
    lengths = 1 + (key * 31 + number * 7) % storm.LONGEST
    assert (there.sum(1) == np.minimum(4, lengths[:, 0] - step[:, 0])).all()


def check_table(table: gear.Table, stored: dict[int, int], ended: set[int]) -> int:
    """Every trajectory that is known to be stored is there once, and none is torn; returns their number.

    Args:
        stored: of each writer, how many it knew to be stored. ended: writers that have ended in order.
    """
    numbers: dict[int, list[int]] = collections.defaultdict(list)
    for index in table.indices():
        row = table[int(index)]
        key, number = int(row["key"][0]), int(row["number"][0])
        for name, values in storm.trajectory(key, number).items():
            assert np.array_equal(row[name].numpy(), values), (key, number, name)
        numbers[key].append(number)
    for key, count in stored.items():
        found = sorted(numbers[key])
        assert found == list(range(len(found))), f"writer {key}"
        assert len(found) == count if key in ended else len(found) >= count, f"writer {key}"
    table.check_valid()
    return sum(map(len, numbers.values()))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not possible(), reason="network namespaces cannot be made here (root and ip are needed)")
def test_storm(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """``--storm-seconds`` of kills of writers, server and link: nothing is lost, twice or torn."""
    seconds = request.config.getoption("--storm-seconds")
    seed = int.from_bytes(os.urandom(4), "little")
    chance = random.Random(seed)
    most = int(WRITERS * 40 * seconds) + 2000
    events: collections.Counter[str] = collections.Counter()
    with contextlib.ExitStack() as stack:
        table = gear.Table.create(
            COLUMNS,
            max_steps=most * 32,
            max_trajectories=most,
            name=f"gear-storm-{os.getpid()}",
            on_full="error",
        )
        stack.callback(table.close)
        stack.callback(table.unlink)
        one, two = stack.enter_context(two_networks())
        server = Server(one, str(table.name))
        stack.callback(lambda: server.kill())
        writers = Writers(two, server.url, tmp_path)
        stack.callback(writers.kill)
        wait_until(lambda: len(table) > 0)
        trainer = Trainer(table)
        trainer.start()
        stack.callback(trainer.stop_now.set)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(chance.uniform(0.2, 2.0))
            event = chance.choices(["writer", "server", "link"], [3, 1, 2])[0]
            events[event] += 1
            if event == "writer":
                writers.replace(chance.randrange(WRITERS))
            elif event == "server":
                server.kill()
                server.start()
            else:
                ip("-n", two, "link", "set", "w0", "down")
                time.sleep(chance.uniform(0.1, 3.0))
                ip("-n", two, "link", "set", "w0", "up")
        ended = {key for key, _ in writers.running}
        writers.stop()
        trainer.end()
        count = check_table(table, writers.stored(), ended)
        print(f"seed {seed}: {dict(events)}, {count} trajectories, {trainer.rows} rows drawn")
        assert min(events[event] for event in ("writer", "server", "link")) > 0 or seconds < 30, seed
        assert count > 0
        assert trainer.rows > 0
