"""`gear_loader.connect`: what is added through a server, exactly once, whatever happens to server and connection."""

from __future__ import annotations

import contextlib
import gc
import inspect
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import exhaustive_but
from options_common import nested_table
from table_common import fresh_name
from transport_common import SECRET, Proxy, Serving, certificate, serving
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.errors import (
    GearError,
    HandshakeError,
    PeerTimeoutError,
    PriorityError,
    PrivateTableError,
    RegionError,
    SchemaError,
    StaleIndexError,
    TableFullError,
    TransportError,
)
from gear_loader.transport import spool as spool_module
from gear_loader.transport import start_server
from gear_loader.transport.stored_once import StoredOnce

FORK = multiprocessing.get_context("fork")
COLUMNS = {
    "obs": gear.Column(torch.float32, (3,), final=True),
    "action": gear.Column(torch.int64),
    "half": gear.Column(torch.bfloat16),
    "goal": gear.Column(torch.float32, (2,), per="trajectory"),
}
NUMBERS = {"number": gear.Column(torch.int64)}


def episode(number: int, steps: int) -> dict[str, Any]:
    """A trajectory of which every value tells its number and step."""
    values = torch.arange(steps) + 1000 * number
    return {
        "obs": values[:, None].repeat(1, 3).float(),
        "action": values,
        "half": torch.arange(steps).bfloat16(),
        "goal": torch.full((2,), float(number)),
    }


@contextlib.contextmanager
def named(columns: dict[str, gear.Column], **sizes: Any) -> Iterator[gear.Table]:
    """A named table that is unlinked at the end."""
    with gear.Table.create(
        columns, **nested_table({"name": fresh_name(), "block_steps": 4, **sizes})
    ) as table:
        try:
            yield table
        finally:
            with contextlib.suppress(RegionError):
                table.unlink()


def url_of(address: str, table: gear.Table) -> str:
    return f"{address.replace('socket', 'gear')}/{table.name}"


def run_client(program: str, url: str) -> subprocess.CompletedProcess[str]:
    """A program that knows the secret, and has the url as its argument, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", program, url],
        env={**os.environ, "GEAR_LOADER_SECRET": SECRET.decode()},
        capture_output=True,
        text=True,
        timeout=120,
    )


@contextlib.contextmanager
def connected(table: gear.Table, **options: Any) -> Iterator[gear.RemoteTable]:
    """A connection to a server of the table, in this process."""
    with (
        serving(table.name) as server,
        gear.connect(url_of(server.address, table), secret=SECRET, **{"timeout": 20.0, **options}) as remote,
    ):
        yield remote


def numbers_in(table: gear.Table) -> list[int]:
    """The first value of every trajectory, sorted."""
    return sorted(int(table[int(index)]["number"][0]) for index in table.indices())


# ---------------------------------------------------------------- what arrives


def test_all_ways_to_add_store_what_was_given() -> None:
    episodes = [episode(number, 1 + number % 5) for number in range(12)]
    last = {"obs": torch.full((3,), -1.0)}
    with named(COLUMNS, max_steps=500, max_trajectories=40) as table, connected(table) as remote:
        slots = [remote.add(episodes[0], priority=2.5), remote.add(episodes[1], final=last)]
        slots += remote.extend(episodes[2:4], priority=[0.5, 1.5]).tolist()

        def one_dict() -> Iterator[dict[str, Any]]:
            made: dict[str, Any] = {}
            for each in episodes[4:6]:
                made.update({name: value.clone() for name, value in each.items()})
                yield made

        slots += remote.extend(one_dict()).tolist()
        both = {name: torch.stack([episodes[9][name]] * 2) for name in COLUMNS}
        slots += remote.extend(both, lengths=[5, 2]).tolist()
        begin = {name: episodes[9][name][:2] for name in COLUMNS if name != "goal"}
        episodes[6:8] = episodes[9], {**begin, "goal": episodes[9]["goal"]}
        with remote.writer(wait=True) as writer:
            for number in (8, 9):
                for step in range(len(episodes[number]["action"])):
                    writer.append({k: episodes[number][k][step] for k in ("obs", "action", "half")})
                goal = {"goal": episodes[number]["goal"]}
                slots.append(writer.commit(priority=3.0, final=last, trajectory=goal))
        vector = remote.writers(2)
        vector.trajectory = {"goal": torch.stack([episodes[number]["goal"] for number in (10, 10)])}
        for step in range(1 + 10 % 5):
            rows = {k: torch.stack([episodes[10][k][step]] * 2) for k in ("obs", "action", "half")}
            vector.append(rows, done=np.array([False, False]) if step < 10 % 5 else np.array([True, True]))
        remote.flush()
        slots += table.indices()[-2:].tolist()
        for slot, number in zip(slots, [*range(6), 6, 7, 8, 9, 10, 10], strict=True):
            found = table[slot]
            assert all(torch.equal(found[name], episodes[number][name]) for name in COLUMNS), number
            final = table.final(slot)
            assert (final is not None) == (number in (1, 8, 9))
            assert final is None or torch.equal(final["obs"], last["obs"])
        assert len(remote) == len(table) == 12
        assert remote.stats() == table.stats()
        assert remote.num_steps == table.num_steps
        assert table._engine.index.arrays.priority[slots[:4]].tolist() == [2.5, -1.0, 0.5, 1.5]
        assert "goal" in remote.schema
        assert repr(remote).endswith("4 columns, 0 waiting)")
        table.check_valid()


def test_threads_extend_through_one_connection() -> None:
    """Stacked trajectories of uneven lengths, lists of them and single ones at the same time: none is mixed up."""
    columns = {
        **NUMBERS,
        "half": gear.Column(torch.bfloat16, (5,)),
        "goal": gear.Column(torch.int8, per="trajectory"),
    }
    failures: list[BaseException] = []

    def work(remote: gear.RemoteTable, first: int) -> None:
        random = np.random.default_rng(first)
        try:
            for turn in range(15):
                lengths = random.integers(1, 7, 6)
                numbers = first + turn * 6 + np.arange(6)
                made: dict[str, Any] = {
                    "number": np.repeat(numbers[:, None], 7, 1),
                    "half": torch.from_numpy(numbers % 100)[:, None, None].expand(6, 7, 5).bfloat16(),
                    "goal": (numbers % 100).astype(np.int8),
                }
                if turn % 3 == 0:
                    remote.extend(made, lengths=lengths)
                    continue
                each = [
                    {
                        name: values[i] if name == "goal" else values[i][:length]
                        for name, values in made.items()
                    }
                    for i, length in enumerate(lengths)
                ]
                if turn % 3 == 1:
                    remote.extend(each)
                else:
                    for one in each:
                        remote.add(one)
        except BaseException as error:
            failures.append(error)

    with named(columns, max_steps=4000, max_trajectories=400) as table, connected(table) as remote:
        threads = [threading.Thread(target=work, args=(remote, 1000 * i)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        assert numbers_in(table) == [1000 * i + number for i in range(4) for number in range(90)]
        for index in table.indices():
            found = table[int(index)]
            number = int(found["number"][0])
            assert (found["number"] == number).all()
            assert (found["half"] == number % 100).all()
            assert int(found["goal"]) == number % 100


def test_steps_of_a_trajectory_on_its_way_cannot_be_drawn() -> None:
    with named(NUMBERS, max_steps=40, max_trajectories=4) as table, connected(table) as remote:
        for make in (remote.writer, lambda **options: remote.writers(2, **options)):
            with pytest.raises(SchemaError, match=r"commit_every_step is True; .* Pass chunk_steps=1"):
                make(commit_every_step=True)
        with remote.writer(chunk_steps=1, wait=True) as writer:  # what the error says
            for number in range(3):
                writer.append(number=np.int64(number))
                remote.flush()
                assert numbers_in(table) == list(range(number + 1))
            writer.commit()
        assert numbers_in(table) == [0, 1, 2]


@pytest.mark.parametrize("name", ["add", "extend", "update_priority", "advance_version", "stats", "close"])
def test_calls_take_the_arguments_of_a_table(name: str) -> None:
    remote, local = (
        inspect.signature(getattr(kind, name)).parameters for kind in (gear.RemoteTable, gear.Table)
    )
    assert list(remote) == list(local)
    for one, other in zip(remote.values(), local.values(), strict=True):
        assert (one.kind, one.default) == (other.kind, other.default)


def test_bad_input_is_an_error_of_a_table_and_stores_nothing() -> None:
    with named(NUMBERS, max_steps=40, max_trajectories=4) as table, connected(table, timeout=20.0) as remote:
        with pytest.raises(SchemaError, match="trajectory 1 has the columns"):
            remote.extend([{"number": torch.ones(2, dtype=torch.int64)}, {"other": torch.ones(2)}])
        with pytest.raises(SchemaError, match="without lengths"):
            remote.extend({"number": torch.ones(2, dtype=torch.int64)})
        with pytest.raises(SchemaError, match=r"priority is -1\.0"):
            remote.add({"number": torch.ones(2, dtype=torch.int64)}, priority=-1.0)
        with pytest.raises(SchemaError, match="holds at most 40"):
            remote.add({"number": torch.ones(41, dtype=torch.int64)})
        with pytest.raises(SchemaError, match="holds at most 40"):
            remote.writer().append(number=torch.ones(41, dtype=torch.int64))
        assert len(table) == 0
        remote.extend([{"number": torch.ones(1, dtype=torch.int64)}] * 4)
        with pytest.raises(TableFullError, match="4 of at most 4 trajectories"):
            remote.add({"number": torch.ones(1, dtype=torch.int64)})
        assert len(table) == 4


def test_what_cannot_be_connected_to() -> None:
    with named(NUMBERS, max_steps=40, max_trajectories=4) as table, serving(table.name) as server:
        for url in (
            "gear://127.0.0.1/x",
            "socket://127.0.0.1:1/x",
            "gear://127.0.0.1:1",
            "gear://a:1/b/c",
            5,
        ):
            with pytest.raises(TransportError, match="expected gear://"):
                gear.connect(url, secret=SECRET)  # type: ignore[arg-type]
        with pytest.raises(HandshakeError, match="secret"):
            gear.connect(url_of(server.address, table), secret=b"another secret of some length", timeout=5.0)
        with pytest.raises(HandshakeError, match="No secret was given"):
            gear.connect(url_of(server.address, table))
        with pytest.raises(RegionError, match="'else' is not served here"):
            gear.connect(f"{server.address.replace('socket', 'gear')}/else", secret=SECRET)
        with pytest.raises(PeerTimeoutError, match="could not be reached"):
            gear.connect("gear://127.0.0.1:9/x", secret=SECRET, timeout=0.2)
    with pytest.raises(PrivateTableError, match="serve"):
        gear.Table.create(NUMBERS, max_steps=1, max_trajectories=1).serve()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the command openssl is needed")
def test_several_tables_of_one_server_which_is_started_again(tmp_path: Path) -> None:
    files = certificate(tmp_path, "right", "IP:127.0.0.1")
    sizes = {"max_steps": 40, "max_trajectories": 4}
    with named(NUMBERS, **sizes) as first, named(NUMBERS, **sizes) as second, contextlib.ExitStack() as stack:
        server = gear.serve([first, second], secret=SECRET, tls=files)
        try:
            assert list(server.urls) == [first.name, second.name]
            assert server.url == server.urls[str(first.name)]
            assert server.url.startswith("gears://127.0.0.1:")
            remotes = [
                stack.enter_context(gear.connect(url, secret=SECRET, ca_file=files[0], timeout=20.0))
                for url in server.urls.values()
            ]
            for number, remote in enumerate(remotes):
                remote.add({"number": torch.tensor([number])})
            port = int(server.url.split("/")[2].rpartition(":")[2])
            assert "running" in repr(server)
            os.kill(server.pid, signal.SIGKILL)
            server.stop()
            assert not server.alive()
            server = gear.serve((first, second), secret=SECRET, port=port, tls=files)
            for number, remote in enumerate(remotes):
                remote.add({"number": torch.tensor([10 + number])})
        finally:
            server.stop()
        assert [numbers_in(first), numbers_in(second)] == [[0, 10], [1, 11]]
        with pytest.raises(TransportError, match="given twice"):
            gear.serve([first, first])
        for wrong in ([], "replay", [first, second.name]):
            with pytest.raises(TransportError, match="expected"):
                gear.serve(wrong)  # type: ignore[arg-type]


def test_priorities_of_the_servers_table_are_set() -> None:
    with (
        named(NUMBERS, max_steps=40, max_trajectories=4) as table,
        serving(table.name) as server,
        Proxy(server.address) as proxy,
    ):
        table.extend([{"number": torch.tensor([number])} for number in range(4)], priority=1.0)
        sampler = gear.Prioritized(alpha=1.0)
        data = gear.ReplayDataset(table, batch_size=64, windows=gear.Window(1), sampler=sampler, prefetch=0)
        data.sample()
        with gear.connect(url_of(proxy.address, table), secret=SECRET, timeout=20.0) as remote:
            assert remote.update_priority([0, 2], torch.tensor([0.0, 3.0])) == 0
            proxy.swallow.set()
            assert remote.update_priority(np.array([1, 3]), [0.0, 2.0], generation=[77, 1]) == 1
            assert set(data.sample()["number"].reshape(-1).tolist()) == {1, 2, 3}
            for given in (-1.0, float("nan")):
                with pytest.raises(PriorityError, match=r"priority\[0\]"):
                    remote.update_priority([0], [given])
            with pytest.raises(SchemaError, match="stale is"):
                remote.update_priority([0], [1.0], stale="skip")  # type: ignore[arg-type]
            with pytest.raises(StaleIndexError, match=r"1 of 2 priorities .* index 9"):
                remote.update_priority([0, 9], [1.0, 1.0], stale="error")
        proxy.close()
        assert table._engine.region.array("priority").tolist() == [0.0, 1.0, 3.0, 2.0]


def test_a_client_loads_no_torch_no_compiler_and_no_kernels() -> None:
    """A process that adds arrays and numbers starts without torch, numba and Triton."""
    program = (
        "import sys\n"
        "import numpy as np\n"
        "import gear_loader\n"
        "with gear_loader.connect(sys.argv[1]) as remote:\n"
        "    rows = {'number': np.arange(3), 'real': [1, 2, 3], 'goal': 7}\n"
        "    remote.add(rows, priority=2.0, final={'real': 4})\n"
        "    rows = {'number': np.full((1, 2), 4), 'real': np.ones((1, 2)), 'goal': np.ones(1, 'f4')}\n"
        "    remote.extend(rows, lengths=[2])\n"
        "    remote.update_priority([0], [1.0])\n"
        "    with remote.writer() as writer:\n"
        "        try:\n"
        "            writer.append(number=0.5, real=0.5)\n"
        "        except gear_loader.errors.SchemaError as error:\n"
        "            assert 'expected an array or a tensor of torch.int64' in str(error), error\n"
        "        writer.append(number=5, real=0.5)\n"
        "        writer.commit(final={'real': 1.0}, trajectory={'goal': 1.0})\n"
        "    with remote.writers(2) as vector:\n"
        "        vector.trajectory = {'goal': np.ones(2, np.float32)}\n"
        "        vector.append(number=np.array([6, 7]), real=np.ones(2))\n"
        "    remote.flush()\n"
        "    assert len(remote) == 5\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(loaded & {'llvmlite', 'numba', 'torch', 'triton'}))\n"
        "assert str(remote.schema['number'].dtype) == 'torch.int64' and 'torch' in sys.modules\n"
    )
    columns = {
        **NUMBERS,
        "real": gear.Column(torch.float32, final=True, cast=True),
        "goal": gear.Column(torch.float32, per="trajectory"),
    }
    with named(columns, max_steps=40, max_trajectories=8) as table, serving(str(table.name)) as server:
        done = run_client(program, url_of(server.address, table))
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == []
        assert numbers_in(table) == [0, 4, 5, 6, 7]
        assert table[0]["real"].tolist() == [1.0, 2.0, 3.0]


# ---------------------------------------------------------------- exactly once


def test_lost_answers_and_connections_store_nothing_twice() -> None:
    with (
        named(NUMBERS, max_steps=2000, max_trajectories=1000) as table,
        serving(table.name) as server,
        Proxy(server.address) as proxy,
    ):
        with gear.connect(url_of(proxy.address, table), secret=SECRET, timeout=30.0) as remote:
            writer = remote.writer()
            for number in range(0, 300, 3):
                if number % 30 == 0:
                    proxy.swallow.set()
                elif number % 30 == 15:
                    proxy.cut()
                remote.add({"number": torch.tensor([number])})
                remote.extend([{"number": torch.tensor([number + 1])}])
                writer.append(number=number + 2)
                writer.commit()
            remote.flush()
        assert numbers_in(table) == list(range(300))


RATED = {**NUMBERS, "reward": gear.Column(torch.float32, per="trajectory", late=True)}


def storm(*, writers: int, episodes: int, kills: int, seed: int, patch: pytest.MonkeyPatch) -> None:
    """Processes write through a server that is killed and started again; each trajectory must be there once and whole.

    Some are sent in parts, before they are committed; others are added, and have a late column filled.
    """
    patch.setattr(spool_module, "_PIECE_BYTES", 32)
    count = writers * episodes
    with named(RATED, max_steps=30 * count, max_trajectories=2 * count) as table:
        server = start_server([str(table.name)], secret=SECRET)
        address = server.addresses["socket"]
        port = int(address.rpartition(":")[2])

        def write(first: int) -> None:
            with gear.connect(url_of(address, table), secret=SECRET, timeout=180.0) as remote:
                writer = remote.writer()
                for number in range(first, first + episodes):
                    rows = np.full(1 + number % 23, number)
                    if number % 3 == 0:
                        remote.fill(remote.add({"number": rows}), reward=np.float32(number))
                        continue
                    for row in rows:
                        writer.append(number=row)
                    writer.commit()

        processes = [FORK.Process(target=write, args=(i * episodes,)) for i in range(writers)]
        for process in processes:
            process.start()
        chance = random.Random(seed)
        for _ in range(kills):
            threading.Event().wait(chance.uniform(0.05, 0.6))
            os.kill(server.pid, signal.SIGKILL)
            server.stop()
            server = start_server([str(table.name)], port=port, secret=SECRET)
        deadline = time.monotonic() + 240
        for process in processes:
            process.join(max(0, deadline - time.monotonic()))
        server.stop()
        assert [process.exitcode for process in processes] == [0] * writers
        assert numbers_in(table) == list(range(count))
        for index in table.indices():
            found = table[int(index)]
            number = int(found["number"][0])
            assert found["number"].tolist() == [number] * (1 + number % 23)
            assert number % 3 or float(found["reward"]) == number
        table.check_valid()


@pytest.mark.filterwarnings("ignore:.*use of fork.*may lead to deadlocks:DeprecationWarning")
@pytest.mark.long
@pytest.mark.parametrize(
    ("writers", "kills", "seed"),
    exhaustive_but((4, 10, 0), (2, 1, 9), *((4, 10, seed) for seed in range(1, 4))),
)
def test_a_server_that_is_killed_loses_nothing_and_stores_nothing_twice(
    writers: int, kills: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    storm(writers=writers, episodes=140 + 60 * kills, kills=kills, seed=seed, patch=monkeypatch)


class TestStoredOnce:
    """The server's memory of requests."""

    IDS = np.array([7, 8], dtype=np.int64)

    @staticmethod
    def none(ids: np.ndarray) -> np.ndarray:
        return np.full(len(ids), -1, dtype=np.int64)

    def test_a_request_that_is_repeated_is_answered_from_memory(self) -> None:
        once, calls = StoredOnce(self.none), []

        def store() -> np.ndarray:
            calls.append(1)
            return np.array([3, 4])

        assert once.run(self.IDS, store, again=False).tolist() == [3, 4]
        assert once.run(self.IDS, store, again=True).tolist() == [3, 4]
        assert len(calls) == 1

    def test_another_process_may_have_stored_it(self) -> None:
        once = StoredOnce(lambda ids: np.where(ids == 8, 5, -1))
        assert once.run(self.IDS, lambda: pytest.fail("stored twice"), again=True).tolist() == [-1, 5]

    def test_a_repetition_waits_for_the_first_execution(self) -> None:
        once, begun, go = StoredOnce(self.none), threading.Event(), threading.Event()
        results: list[Future[Any]] = [Future(), Future()]

        def store() -> np.ndarray:
            begun.set()
            go.wait(30)
            return np.array([1, 2])

        def first() -> None:
            results[0].set_result(once.run(self.IDS, store, again=False))

        def second() -> None:
            results[1].set_result(once.run(self.IDS, lambda: pytest.fail("stored twice"), again=True))

        threads = [threading.Thread(target=call) for call in (first, second)]
        threads[0].start()
        begun.wait(30)
        threads[1].start()
        go.set()
        assert [result.result(30).tolist() for result in results] == [[1, 2], [1, 2]]

    def test_a_failed_request_can_be_sent_again(self) -> None:
        once = StoredOnce(self.none)

        def full() -> np.ndarray:
            raise TableFullError("full")

        with pytest.raises(TableFullError):
            once.run(self.IDS, full, again=False)
        assert once.run(self.IDS, lambda: np.array([1, 2]), again=True).tolist() == [1, 2]


# ---------------------------------------------------------------- the spool


@pytest.mark.parametrize("limit", ["spool_bytes", "max_in_flight"])
def test_writers_go_on_without_the_server_until_the_spool_is_full(limit: str) -> None:
    with named(NUMBERS, max_steps=20_000, max_trajectories=10_000) as table:
        server = Serving(str(table.name))
        address = server.address
        most = {"spool_bytes": 100 * 768, "max_in_flight": 100}[limit]
        with pytest.raises(SchemaError, match=f"{limit} is 0; expected"):
            gear.connect(url_of(address, table), secret=SECRET, **{limit: 0})
        remote = gear.connect(url_of(address, table), secret=SECRET, timeout=1.0, **{limit: most})
        server.close()
        writer = remote.writer()

        def write(number: int) -> None:
            writer.append(number=number)
            writer.commit()

        for number in range(100):
            write(number)
        with pytest.raises(
            PeerTimeoutError,
            match=rf"spool is full: 100 trajectories wait for table '.*(not answered|was lost).*larger {limit}\.",
        ):
            write(100)
        with pytest.raises(PeerTimeoutError, match="not stored by table"):
            remote.flush()
        with serving(str(table.name), port=int(address.rpartition(":")[2])):
            remote.flush(timeout=60)
            write(100)
            remote.close()
        assert numbers_in(table) == list(range(101))


def test_a_refusal_for_good_is_told_at_every_later_call() -> None:
    with named(NUMBERS, max_steps=40, max_trajectories=4) as table, serving(table.name) as server:
        remote = gear.connect(url_of(server.address, table), secret=SECRET, timeout=5.0)
        table.unlink()
        other = gear.Table.create(
            {"x": gear.Column(torch.int64)}, max_steps=9, max_trajectories=9, name=table.name
        )
        try:
            writer = remote.writer()
            writer.append(number=1)
            writer.commit()
            for call in (remote.flush, lambda: writer.append(number=2), remote.close):
                with pytest.raises(SchemaError, match=r"refused a trajectory.*has the columns \{x int64"):
                    call()
        finally:
            other.unlink()


def test_what_was_committed_is_stored_when_nothing_refers_to_the_connection_any_more() -> None:
    with named(NUMBERS, max_steps=40, max_trajectories=4) as table, serving(table.name) as server:
        writer = gear.connect(url_of(server.address, table), secret=SECRET).writer()
        gc.collect()
        writer.append(number=5)
        writer.commit()
        del writer
        gc.collect()
        wait_until(lambda: numbers_in(table) == [5])


def test_a_process_that_ends_without_close_has_stored_what_it_committed() -> None:
    program = (
        "import sys\n"
        "import weakref\n"
        "import numpy as np\n"
        "import gear_loader\n"
        "class Other: pass\n"
        "weakref.finalize(other := Other(), int)\n"  # the first one registers the handler that calls them all
        "remote = gear_loader.connect(sys.argv[1])\n"
        "writer = remote.writer()\n"
        "for number in range(20):\n"
        "    writer.append(number=np.full(50_000, number))\n"  # 400 KB: a part of it is sent before the commit
        "    writer.commit()\n"
    )
    with (
        named(NUMBERS, max_steps=2_000_000, max_trajectories=40) as table,
        serving(str(table.name)) as server,
    ):
        done = run_client(program, url_of(server.address, table))
        assert (done.returncode, done.stderr) == (0, "")
        assert numbers_in(table) == list(range(20))


@pytest.mark.filterwarnings("ignore:.*use of fork.*may lead to deadlocks:DeprecationWarning")
def test_a_forked_child_is_told_to_connect_itself() -> None:
    with named(NUMBERS, max_steps=40, max_trajectories=4) as table, connected(table) as remote:

        def use() -> None:
            with pytest.raises(TransportError, match="in each process"):
                remote.add({"number": torch.tensor([1])})

        child = FORK.Process(target=use)
        child.start()
        child.join(30)
        assert child.exitcode == 0
        remote.add({"number": torch.tensor([2])})


def test_a_closed_connection_says_so() -> None:
    with named(NUMBERS, max_steps=40, max_trajectories=4) as table, connected(table) as remote:
        writer = remote.writer()
        remote.close()
        for call in (lambda: writer.append(number=1), lambda: remote.add({"number": torch.tensor([1])})):
            with pytest.raises(GearError, match="closed; connect again"):
                call()


@contextlib.contextmanager
def full_after(spool: Any, commits: int) -> Iterator[None]:
    """Let a spool be full after so many more commits."""
    before, reserve = spool._committed, spool.reserve

    def limited(*given: Any) -> Any:
        if spool._committed >= before + commits:
            raise PeerTimeoutError("The spool is full.")
        return reserve(*given)

    spool.reserve = limited
    try:
        yield
    finally:
        spool.reserve = reserve


def test_environments_whose_trajectories_were_committed_before_a_time_out_are_appended() -> None:
    """Their indices are not known, and their rows are not taken back: repeating the call stores each row once.

    Nor is the final step lost of an environment whose chunk was complete before the time-out.
    """
    columns = {"x": gear.Column(torch.int64), "obs": gear.Column(torch.float32, (2,), final=True)}
    with (
        named(columns, max_steps=1000, max_trajectories=50, block_steps=4) as table,
        connected(table) as remote,
    ):
        writers: Any = remote.writers(3, chunk_steps=3, overlap_steps=1)

        def step(number: int) -> dict[str, Any]:
            return {"x": np.arange(3) * 100 + number, "obs": np.zeros((3, 2), np.float32)}

        writers.append(step(0))
        writers.append(step(1), active=[False, True, True])
        done, final = [True, True, False], {"obs": np.ones((3, 2), np.float32)}
        with full_after(writers._sink._spool, 1), pytest.raises(PeerTimeoutError):
            writers.append(step(2), done=done, final=final)
        assert writers.appended.tolist() == [True, True, False]
        assert writers.num_steps.tolist() == [0, 0, 2]
        writers.append(step(2), done=done, final=final, active=~writers.appended)
        remote.flush()
        assert sorted(table[int(i)]["x"].tolist() for i in table.indices()) == [
            [0, 2],
            [100, 101, 102],
            [102],
            [200, 201, 202],
        ]


@pytest.mark.parametrize("overlap", [None, 0, 2])
def test_several_steps_are_appended_or_none_before_a_time_out(overlap: int | None) -> None:
    """Also where they are several pieces of memory, and where a chunk ends with them."""
    with named(NUMBERS, max_steps=400_000, max_trajectories=9) as table, connected(table) as remote:
        chunks = {} if overlap is None else {"chunk_steps": 90_000, "overlap_steps": overlap}
        writer = remote.writer(**chunks)
        spool, steps = writer._sink._spool, {"number": torch.arange(90_000)}
        assert spool.piece_steps < 40_000
        writer.append({"number": steps["number"][:10]})
        for end in (50_000, 90_000):
            with full_after(spool, 0), pytest.raises(PeerTimeoutError):
                writer.append({"number": steps["number"][10:end]})
            assert writer.num_steps == 10
        reserve, asked = spool.reserve, []
        spool.reserve = lambda account, size: (asked.append(size), reserve(account, size))
        writer.append({"number": steps["number"][10:]})
        assert len(asked) == 1, "it waits once, before the first step"
        assert writer.num_steps == (90_000 if overlap is None else overlap)
        writer.append(number=7)
        writer.commit()
        remote.flush()
        lengths = [[90_001], [90_000, 1], [90_000, 3]][[None, 0, 2].index(overlap)]
        stored = [table[int(i)]["number"] for i in table.indices()]
        assert [len(each) for each in stored] == lengths
        assert torch.equal(stored[0][:90_000], steps["number"])
        assert spool._held == 0
