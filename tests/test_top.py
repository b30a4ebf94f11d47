"""`gear-loader top`: rates, tables that come and go, servers, and a terminal of 80 columns."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from table_common import fresh_name, named, rows
from typer.testing import CliRunner

import gear_loader as gear
from gear_loader import cli, top
from gear_loader.storage import shared_memory

SIZES = {"max_steps": 100, "max_trajectories": 20}


def reading(time: float, inserted: int, sampled: int, wait: float = 0.0) -> top.CounterSample:
    return top.CounterSample(time, 10, 50, 100, inserted, sampled, 0, 1, wait, 2 * wait)


def test_rates_are_differences_over_time() -> None:
    assert top._cells(reading(9.0, 100, 0), None) == ("10", "50", "50%", "-", "-", "-", "1", "-")
    cells = top._cells(reading(11.0, 3100, 9, 3.0), reading(9.0, 100, 0))
    assert cells == ("10", "50", "50%", "1.5k", "4.5", "0", "1", "1.5+3.0")
    # Another table of the same name: its counters begin again.
    assert top._cells(reading(11.0, 3, 0), reading(9.0, 100, 0))[3] == "-"


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.2"), (999, "999"), (1500, "1.5k"), (2.5e6, "2.5M"), (3e9, "3G")]
)
def test_short_numbers(value: float, text: str) -> None:
    assert top._short(value) == text


def test_what_a_table_says_without_its_lock() -> None:
    with named(**SIZES, on_full="evict_oldest") as table:
        for number in range(30):
            table.add(rows(number, 4))
        gear.ReplayDataset(table, batch_size=8, windows=gear.Window(1), device="cpu").sample()
        with table._engine.region.lock:
            found = top.read_file(
                os.path.join(shared_memory.DIRECTORY, shared_memory.PREFIX + str(table.name))
            )
        assert (found.trajectories, found.steps, found.most_steps) == (20, 80, 100)
        assert (found.inserted, found.sampled, found.removed) == (30, 8, 10)


@pytest.mark.long
def test_a_server_tells_the_size_and_the_disk_tier(tmp_path: Path) -> None:
    disk = gear.Disk(tmp_path / "disk", size="1MiB")
    with named(**SIZES) as plain, named(**SIZES, memory="64KiB", disk=disk) as tiered:
        for table in (plain, tiered):
            with table.serve() as server, gear.connect(server.url, secret=server.secret) as remote:
                table.add(rows(0, 25))
                found, report = top._read_remote(remote), remote.report()
            assert (found.steps, found.most_steps) == (25, 100)
            assert (found.disk is None, report.has_disk) == (table is plain, table is tiered)


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = CliRunner().invoke
    with named(**SIZES) as table, table.serve() as server:
        table.add(rows(0, 25))
        monkeypatch.setenv("GEAR_LOADER_SECRET", server.secret.decode())
        done = run(
            cli.app, ["top", str(table.name), "nobody", server.url, "--count", "2", "--interval", "0.1"]
        )
        assert done.exit_code == 0, done.output
        first, second = done.output.split("TABLE")[1:]
        assert re.search(rf"{table.name} +1 +25 +25% +- ", first)
        assert re.search(rf"{table.name} +1 +25 +25% +0 +0 +0 +0 +0.0\+0.0", second)
        assert "it is not there" in first
        assert re.search(r"gear://\S+ +1 +25 +25% ", first)
        assert str(table.name) in run(cli.app, ["top", "--count", "1"]).output
    done = run(cli.app, ["top", "gear://127.0.0.1:1"])
    assert (done.exit_code, "expected gear://" in done.output) == (1, True)


def in_a_terminal(*options: str, env: dict[str, str] | None = None) -> list[str]:
    """What the command shows in a terminal of 80 columns, without empty lines."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    command = [sys.executable, "-m", "gear_loader", "top", "--interval", "0.2", "--count", "3", *options]
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", **(env or {})},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # how Linux tells the end of a terminal
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.wait(30) == 0
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).splitlines()
    return [line for line in lines if line.strip()]


def test_a_terminal_of_80_columns() -> None:
    with named(**SIZES) as table, named(**SIZES, name=f"{fresh_name()}-{'long' * 15}"):
        table.add(rows(0, 25))
        lines = in_a_terminal()
        assert sum("WAITING" in line for line in lines) >= 3
        assert any(str(table.name) in line and "25%" in line for line in lines)
        assert max(map(len, lines)) <= 80


@pytest.mark.long
def test_servers_in_a_terminal_of_80_columns(tmp_path: Path) -> None:
    disk = gear.Disk(tmp_path / "disk", size="1MiB")
    tiered = {**SIZES, "memory": "64KiB", "disk": disk}
    with named(**SIZES) as plain, named(**tiered) as table, gear.serve([plain, table]) as server:
        plain.add(rows(0, 25))
        table.add(rows(0, 40))
        secret = {"GEAR_LOADER_SECRET": server.secret.decode()}
        lines = in_a_terminal(*server.urls.values(), env=secret)
        assert max(map(len, lines)) <= 80
        # Addresses are folded; the numbers stand beside their first lines.
        numbers = [line.split()[1:] for line in lines if "gear://" in line]
        assert [each[:3] for each in numbers[:3]] == [["1", "25", "25%"], ["1", "40", "40%"], ["0", "-", "-"]]
        assert sum(line.split() == ["TABLE", "ON", "DISK", "HITS", "READ", "B/s"] for line in lines) >= 3
