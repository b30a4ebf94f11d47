"""Tables in the memory of a GPU under a name: what other processes read, on the stand-in, and what they are refused."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from streams.cuda import Cuda
from table_common import fresh_name
from tier_common import COLUMNS, SIZES, final, fitting, move_out, rows, spill

import gear_loader as gear
from gear_loader.errors import RegionError, SchemaError
from gear_loader.storage import device_server
from gear_loader.storage.shared_memory import region_names

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real torch.cuda")
DEVICE = torch.device("cuda", 1)
COUNT = 25
WINDOWS: dict[str, Any] = {
    "number": gear.Window(3, -1),
    "value": gear.Window(2),
    "wide": gear.Window(1, squeeze=True),
    "task": None,
}
RETURNS = {"task": None, "n": gear.NStep("number", 3, 0.5, done="flag", next="value")}
DATA: dict[str, dict[str, Any]] = {
    "uniform": {"windows": WINDOWS},
    "steps": {"windows": WINDOWS, "sampler": gear.Uniform(unit="step")},
    "priority": {"windows": WINDOWS, "sampler": gear.Prioritized(0.7)},
    "n-step": {"windows": RETURNS},
    "packed": {"windows": gear.Whole(), "layout": "packed"},
}


@contextlib.contextmanager
def owned(**options: Any) -> Iterator[gear.Table]:
    """A table under a name in the memory of a device; its owner only waits while others read."""
    cuda = Cuda(0, "eager")
    with cuda.installed(), cuda.serving_blocks():
        sizes = {**SIZES, "name": fresh_name(), "device": DEVICE, "memory": gear.Memory(max_blocks=400)}
        with gear.Table.create(COLUMNS, **{**sizes, **options}) as table:
            try:
                yield table
            finally:
                if table.name in region_names():
                    with gear.Table.attach(str(table.name)) as left:
                        left.unlink()
    cuda.check()


def fill(table: gear.Table) -> None:
    for number in range(COUNT):
        length = 1 + 7 * number % 23
        ends = final(number, length) if number % 2 else None
        table.add(rows(number, length), priority=1.0 + number % 4, final=ends)


def batches(table: gear.Table, kind: str) -> list[Any]:
    data = gear.ReplayDataset(
        table, batch_size=8, seed=3, device="cpu", batches_per_epoch=3, prefetch=0, **DATA[kind]
    )
    return [*data, data.sample()]


def same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            same(found[name], value)
        else:
            assert np.array_equal(np.asarray(found[name]), np.asarray(value)), name


def in_child(call: Callable[[], object]) -> str:
    """What a call returns in a forked child, or its error, as text."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(100)
        torch.set_num_threads(1)  # those of the parent are not here
        try:
            found = repr(call())
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        told: str = json.load(pipe)
    os.waitpid(child, 0)
    return told


# ---------------------------------------------------------------- forked children


@pytest.mark.parametrize(("pieces", "host"), [(300, None), (device_server.PIECE_BYTES, None), (300, "1MiB")])
def test_forked_children_read_what_fits_into_host_memory(
    pieces: int, host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same batches, rows and checkpoints, of memory and disk, and of the part of host memory between."""
    monkeypatch.setattr(device_server, "PIECE_BYTES", pieces)
    disk = gear.Disk(
        tmp_path / "tier", sync_seconds=1e6, size="1GiB", keep="newest"
    )  # its thread moves nothing
    with fitting() as whole, owned(disk=disk, host=host) as table:
        fill(whole)
        fill(table)
        table.save(tmp_path / "tier")
        if host is not None:
            assert move_out(table, table.indices()[::2]) > 0
        assert spill(table, table.indices()[::3]) > 0

        def compare() -> str:
            other = gear.Table.attach(str(table.name))
            for each in (table, other):  # the one that was there at the fork, and another one
                for index in whole.indices().tolist():
                    same(each[index], whole[index])
                for kind in DATA:
                    for one, expected in zip(batches(each, kind), batches(whole, kind), strict=True):
                        same(one, expected)
            other.save(tmp_path / "saved")
            other.update_priority([3], [77.0])
            other.remove(5)
            return "the same"

        assert in_child(compare) == "'the same'"
        assert len(table) == COUNT - 1
        for index in table.indices().tolist():  # its owner goes on
            same(table[index], whole[index])
        with gear.Table.load(tmp_path / "saved") as loaded:
            for one, index in zip(loaded.indices().tolist(), whole.indices().tolist(), strict=True):
                same(loaded[one], whole[index])
        table.check_valid()


def test_what_other_processes_are_refused() -> None:
    with owned() as table:
        fill(table)
        for call, expected in (
            (lambda: table.add(rows(1, 2)), "SchemaError: .*only the process that created it adds"),
            (lambda: table.writer(), r"SchemaError: writer\(\) was called"),
            (
                lambda: table.writers(2, device=DEVICE),
                r"SchemaError: writers\(device=device\(type='cuda', index=1\)\) was called",
            ),
            (lambda: table.pin(DEVICE), "False"),
        ):
            told = in_child(call)
            with pytest.raises(AssertionError, match=expected):
                raise AssertionError(told)
        assert len(table) == COUNT
        with pytest.raises(SchemaError, match="exists with other columns, sizes or rules"):
            gear.Table.create(COLUMNS, **SIZES, name=table.name, if_exists="attach")


def test_invalid_requests_are_answered_with_an_error() -> None:
    with owned() as table:
        fill(table)
        server = table._engine.region._mapping.block_server
        assert server is not None
        memory, one, zero = np.zeros(4096, dtype=np.uint8), np.ones(1), np.zeros(1)
        numbers = list(COLUMNS).index("number"), list(COLUMNS).index("task")
        for blocks, spans, column, expected in (
            (zero, (zero, one), 99, r"columns \[99\] of 5"),
            (zero, (zero, one), -1, r"columns \[-1\] of 5"),
            (zero, (zero - 1, one), numbers[0], "spans of steps"),
            (zero, (zero, zero), numbers[0], "spans of steps"),
            (zero, (zero, one * 2.0**62), numbers[0], "spans of steps"),
            (zero, (zero, one * 2), numbers[1], "spans of steps that are not in 0 to 0"),
            (zero + 400, (zero, one), numbers[0], "1 blocks, of 400, for spans of 1"),
            (zero - 1, (zero, one), numbers[0], "1 blocks, of 400"),
            (zero, (zero, one * 5), numbers[0], "1 blocks, of 400, for spans of 2"),
            (np.zeros(500), (zero, one * 2000), numbers[0], r"500 blocks, 1 spans and 1 col.* in 1024|bytes of rows"),
        ):  # fmt: skip
            for size in (1024, 4096):
                given = memory[:size]
                with contextlib.suppress(ValueError):
                    parts = device_server._Requested.of(given, len(blocks), 1, 1)
                    parts.ids[:], parts.first[:], parts.counts[:], parts.names[:] = blocks, *spans, column
                with pytest.raises(ValueError, match=expected):
                    server.answer(given, (len(blocks), 1, 1))
        with pytest.raises(ValueError, match=r"-1 blocks, 1 spans"):
            server.answer(memory, (-1, 1, 1))

        def ask() -> None:
            client = gear.Table.attach(str(table.name))._engine.region.block_client()
            client.read(
                np.array([400], np.int32), np.array([0]), np.array([1]), {0: {"number": np.array([0])}}
            )

        assert "RegionError: Blocks of table" in (told := in_child(ask))
        assert "cannot be read: 1 blocks, of 400" in told


def test_an_answer_that_comes_too_late_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a time-out, and after an interrupt, the next requests are answered as ever."""
    answer, late = device_server.BlockServer.answer, [2.0, 0.5]

    def answer_late(*given: Any) -> None:
        time.sleep(late.pop() if late else 0)
        answer(*given)

    monkeypatch.setattr(device_server.BlockServer, "answer", answer_late)
    with owned() as table:
        fill(table)

        def ask() -> str:
            device_server.LOCK_TIMEOUT = 0.2
            with pytest.raises(RegionError, match=r"has not answered for 0.2 s; perhaps it is stopped"):
                table[3]
            device_server.LOCK_TIMEOUT = 60.0
            table._engine.region.block_client().close()
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                table[4]
            return str([table[index]["number"][0].item() for index in (5, 6)])

        assert in_child(ask) == "'[5, 6]'"


def test_a_table_whose_owner_has_closed_it() -> None:
    with owned() as table:
        fill(table)
        name = str(table.name)
        table.close()
        message = f"{name}.* were in the memory of cuda:1, .* has ended or closed .*gear-loader rm {name}"
        with gear.Table.attach(name) as left:
            assert len(left) == COUNT
            data = gear.ReplayDataset(left, batch_size=3, windows=WINDOWS, device="cpu")
            for call in (lambda: left[0], data.sample):
                with pytest.raises(RegionError, match=message):
                    call()
        options = {**SIZES, "name": name, "device": DEVICE, "memory": gear.Memory(max_blocks=400)}
        with pytest.raises(RegionError, match=message):
            gear.Table.create(COLUMNS, **options, if_exists="attach")
        with gear.Table.create(COLUMNS, **options, if_exists="replace") as again:
            assert len(again) == 0
            again.add(rows(1, 3))
            assert in_child(lambda: again[0]["number"].tolist()) == "[1, 1, 1]"


# ---------------------------------------------------------------- other programs

READER = """
import sys, gear_loader as gear, torch
from test_device_server import DATA, batches
table = gear.Table.attach(sys.argv[1])
torch.save({kind: batches(table, kind) for kind in DATA}, sys.argv[2])
print(flush=True)
sys.stdin.readline()
try:
    table[0]
except gear.errors.RegionError as error:
    print(error, flush=True)
"""


@pytest.mark.long
def test_another_program_reads_until_the_owner_dies(tmp_path: Path) -> None:
    """The owner, a program on the stand-in, is killed."""
    owner = """
import sys, time, gear_loader as gear
from streams.cuda import Cuda
from test_device_server import fill, owned
with owned(name=sys.argv[1]) as table:
    fill(table)
    print(flush=True)
    sys.stdin.readline()
"""
    here, name = Path(__file__).parents[1], fresh_name()
    places = [str(here.parent), str(here), str(here / "tools"), str(here / "storage")]
    told: dict[str, Any] = {
        "stdin": -1,
        "stdout": -1,
        "text": True,
        "env": {**os.environ, "PYTHONPATH": ":".join(places)},
    }
    with (
        fitting() as whole,
        subprocess.Popen([sys.executable, "-c", owner, name], **told) as one,
        subprocess.Popen(
            [sys.executable, "-c", "input(); " + f"exec({READER!r})", name, tmp_path / "found"], **told
        ) as other,
    ):
        fill(whole)
        assert one.stdout.readline() == "\n"
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "\n"
        one.kill()
        one.wait()
        assert f"table {name!r} were in the memory of cuda:1" in other.communicate("\n")[0]
        found = torch.load(tmp_path / "found", weights_only=False)
        for kind, each in found.items():
            for batch, expected in zip(each, batches(whole, kind), strict=True):
                same(batch, expected)
        gear.Table.attach(name).unlink()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["uniform", "packed"])
def test_a_server_of_it_serves_learners(kind: str) -> None:
    with fitting() as whole, owned() as table:
        fill(whole)
        fill(table)
        tables = table.serve(allow="all")
        with gear.connect(tables.url, secret=tables.secret, timeout=60) as remote:
            for batch, expected in zip(batches(remote, kind), batches(whole, kind), strict=True):
                same(batch, expected)
            with pytest.raises(gear.errors.GearError, match="only the process that created it adds"):
                remote.add(rows(1, 2))
        tables.stop()
