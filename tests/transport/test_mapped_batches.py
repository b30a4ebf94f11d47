"""Batches of a learner: in memory that it maps on the server's machine, and as messages, with bounded memory."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import mostly_long
from learner_common import CASES, assert_equal, connected, dataset, filled, pair
from transport_common import SECRET, Proxy, serving
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.collection import references
from gear_loader.transport import Limits, learner_link, learner_pipe, mapped_batches
from gear_loader.transport.urls import url_of
from gear_loader.utils import notices


@pytest.mark.parametrize("case", mostly_long(CASES, "windows", sample=3))
def test_batches_in_memory_that_a_learner_maps_are_the_same(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_batches, "LEAST_MAPPED", 1)
    monkeypatch.setattr(references, "_ARENA_BYTES", 0)
    with pair() as (local, _, remote):
        mine, theirs = dataset(local, **CASES[case]), dataset(remote, **CASES[case])
        kept = []
        for _ in range(2):
            for first, second in zip(mine, theirs, strict=True):
                assert_equal(first, second)
                kept.append((copy.deepcopy(first), second))
        for _ in range(2):
            first, second = mine.sample(), theirs.sample()
            assert_equal(first, second)
            kept.append((copy.deepcopy(first), second))
        for first, second in kept:
            assert_equal(first, second)
        assert theirs._link._files._known  # some were mapped


def test_mapped_memory_is_used_again_once_nothing_refers_to_it_and_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mapped_batches, "LEAST_MAPPED", 1 << 10)
    limits = Limits(learner_bytes=1 << 20)
    with filled() as table, serving(str(table.name), limits=limits) as server:
        remote = gear.connect(url_of(server.address, str(table.name)), secret=SECRET, timeout=20)
        with remote:
            big = {"windows": gear.Window(400), "batch_size": 40, "batches_per_epoch": 40, "prefetch": 2}
            files = server.server.resources.files
            replay = dataset(remote, **big)
            for theirs in replay:
                assert len(theirs["index"]) == 40
                assert len(files._places) < 60  # of five columns: most batches lie where earlier ones did
            (learner,) = server.server.resources.learners._known.values()
            held = list(replay)  # nothing may be drawn into these
            assert learner.kept_bytes <= limits.learner_bytes
            for mine, theirs in zip(dataset(table, **big), dataset(table, **big), strict=True):
                assert_equal(mine, theirs)
            local = dataset(table, **big)
            list(local)  # the first epoch
            for mine, theirs in zip(local, held, strict=True):
                assert_equal(mine, theirs)
            del held, theirs
            replay.settle()
            replay.settle()  # whose message says that nothing refers to them
            assert not learner._lent


def test_a_learner_that_cannot_map_gets_messages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mapped_batches, "LEAST_MAPPED", 1)
    monkeypatch.setattr(notices, "_seen", {})
    for told in ([os.getpid(), [0, 1, 2, 3], "00"], ["x"], [1 << 40, [1, 1, 1, 32], "00" * 32], {}):
        monkeypatch.setattr(mapped_batches.MappedMemory, "describe", lambda _, told=told: told)
        with pair() as (local, _, remote):
            mine, theirs = dataset(local, windows=gear.Window(50)), dataset(remote, windows=gear.Window(50))
            assert_equal(mine.sample(), theirs.sample())
            assert theirs._link._files is None
    assert "come through the network" in caplog.text


@pytest.mark.parametrize("broken_off", [False, True])
def test_a_server_that_keeps_as_much_as_it_may_goes_on_when_batches_have_arrived(broken_off: bool) -> None:
    with filled(max_steps=4000) as table:
        for _ in range(2):  # so that batches are larger than the server expects
            steps = torch.arange(1000)
            rows = {"obs": torch.zeros(1000, 3), "reward": steps.float(), "done": steps < 0}
            table.add({**rows, "half": steps.bfloat16(), "prompt": torch.tensor(9)})
        limits = Limits(learner_bytes=220_000)
        with connected(table, timeout=5, limits=limits) as remote:
            options = {"windows": gear.Whole(), "layout": "padded", "batch_size": 30, "batches_per_epoch": 8}
            prefetch = gear.Prefetch(6, max_bytes=1 << 30 if broken_off else limits.learner_bytes)
            theirs, mine = dataset(remote, prefetch=prefetch, **options), dataset(table, **options)
            batches, expected = iter(theirs), iter(mine)
            for _ in range(1 if broken_off else 8):
                assert_equal(next(expected), next(batches))
            assert theirs._link.largest > limits.learner_bytes // 2
            if broken_off:
                batches.close()
                expected.close()
                assert_equal(mine.sample(), theirs.sample())


def test_memory_of_an_answer_that_was_read_in_part_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_batches, "LEAST_MAPPED", 1 << 10)
    with pair() as (local, _, remote):
        big: dict[str, Any] = {"windows": gear.Window(400), "batches_per_epoch": 12, "prefetch": 2}
        mine, theirs = dataset(local, **big), dataset(remote, **big)
        batches, expected = iter(theirs), iter(mine)
        assert_equal(next(expected), next(batches))
        opened, left = mapped_batches.MappedAnswers._open, iter([True, False])

        def fails(self: Any, place: Any) -> Any:
            if next(left, True):
                return opened(self, place)
            raise OSError("Too many open files")

        monkeypatch.setattr(mapped_batches.MappedAnswers, "_open", fails)
        with pytest.raises(gear.errors.TransportError, match="Too many open files"):
            theirs.sample()
        mine.sample()
        kept = [next(batches) for _ in range(5)]
        for each in kept:
            assert_equal(next(expected), each)


def test_batches_leave_descriptors_to_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(mapped_batches.resource, "getrlimit", lambda _: (80, 80))
    memory = mapped_batches.MappedMemory()
    held = [memory.empty((mapped_batches.LEAST_MAPPED,), torch.uint8) for _ in range(60)]
    assert [memory.place(tensor) is None for tensor in held] == [False] * 20 + [True] * 40
    assert len(os.listdir("/proc/self/fd")) - before <= 40
    del held
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) - before <= 0
    monkeypatch.setattr(mapped_batches.resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    assert (
        mapped_batches.MappedMemory()._most >= 8 * Limits().learners
    )  # one that is idle takes none of another
    assert memory.place(memory.empty((mapped_batches.LEAST_MAPPED,), torch.uint8)) is not None


def test_files_that_a_server_may_not_name_are_neither_mapped_nor_opened_for_writing(tmp_path: Path) -> None:
    files = mapped_batches.MappedMemory()
    told = files.describe()
    assert told is not None
    answers = mapped_batches.MappedAnswers(told)
    path = tmp_path / "of another program"
    path.write_bytes(bytes(1 << 12))
    plain, unsealed, pipe = os.open(path, os.O_RDONLY), os.memfd_create("unsealed"), os.pipe()
    os.ftruncate(unsealed, 1 << 12)
    try:
        for fd in (plain, unsealed, *pipe):
            found = os.fstat(fd)
            place = [fd, found.st_dev, found.st_ino, found.st_size]
            with pytest.raises(OSError, match=r"Invalid|names|closed"):
                answers.view(1, place)
            with pytest.raises(OSError, match=r"cannot be mapped|Invalid|names|closed"):
                mapped_batches.MappedAnswers([os.getpid(), place, bytes(1 << 12).hex()])
    finally:
        for fd in (plain, unsealed, *pipe):
            os.close(fd)
    with pytest.raises(OSError, match="other bytes"):
        mapped_batches.MappedAnswers([told[0], told[1], ""])


def test_a_server_of_another_address_names_no_files_to_a_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_pipe.Pipe, "is_local", False)
    monkeypatch.setattr(learner_link, "MappedAnswers", pytest.fail)
    with pair() as (local, _, remote):
        assert_equal(dataset(local).sample(), dataset(remote).sample())


@pytest.mark.long
def test_a_killed_server_leaves_the_batches_that_a_learner_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    with filled() as table:
        server = table.serve(allow="all")
        with gear.connect(server.url, secret=server.secret, timeout=60) as remote:
            big = {"windows": gear.Window(4000), "batch_size": 40, "batches_per_epoch": 20}
            theirs, mine = dataset(remote, **big), dataset(table, **big)
            batches, expected = iter(theirs), iter(mine)
            held = [next(batches) for _ in range(3)]
            assert theirs._link._files._known
            port = int(server.url.rpartition(":")[2].partition("/")[0])
            os.kill(server.pid, signal.SIGKILL)
            server.stop()
            again = table.serve(allow="all", port=port, secret=server.secret)
            held += [next(batches) for _ in range(3)]
            for each in held:
                assert_equal(next(expected), each)
            again.stop()


def test_a_server_that_ends_before_its_answer_is_mapped_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with filled() as table:
        servers = [table.serve(allow="all")]
        (server,) = servers
        with gear.connect(server.url, secret=server.secret, timeout=60) as remote:
            big = {"windows": gear.Window(4000), "batch_size": 40, "batches_per_epoch": 4}
            batches, expected = iter(dataset(remote, **big)), iter(dataset(table, **big))
            held = [next(batches)]
            opened = mapped_batches.MappedAnswers._open

            def late(self: Any, place: Any) -> Any:
                if len(servers) == 1:
                    os.kill(server.pid, signal.SIGKILL)
                    server.stop()
                    port = int(server.url.rpartition(":")[2].partition("/")[0])
                    servers.append(table.serve(allow="all", port=port, secret=server.secret))
                return opened(self, place)

            monkeypatch.setattr(mapped_batches.MappedAnswers, "_open", late)
            for each in [*held, *batches]:
                assert_equal(next(expected), each)
            assert len(servers) == 2
            servers[1].stop()


AT_THE_END = """
import atexit, threading
names = lambda: [each.name for each in threading.enumerate() if "learner" in each.name]
atexit.register(lambda: print(names()))  # called last
import gear_loader as gear
from gear_loader.transport.learner_link import LearnerLink
from gear_loader.transport.urls import url_of
from learner_common import dataset, filled
from transport_common import SECRET, serving

LearnerLink.close = lambda self: None  # as the learner of another process would not
opened = filled()
table = opened.__enter__()
served = serving(str(table.name))
server = served.__enter__()
remote = gear.connect(url_of(server.address, str(table.name)), secret=SECRET, timeout=20)
replay = dataset(remote, windows=gear.Window(4000), batch_size=40, batches_per_epoch=1000, prefetch=2)
next(iter(replay))
table.unlink()
print(names())
"""


def test_threads_of_a_server_end_before_the_interpreter() -> None:
    """PyTorch waits for the GIL in them, which is fatal once the interpreter ends."""
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_END],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, f"{['gear-loader-learner'] * 2}\n[]\n"), done.stderr


def test_prefetched_batches_take_no_more_than_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_batches.MappedMemory, "describe", lambda _: None)  # through the network
    big: dict[str, Any] = {"windows": gear.Window(4000), "batch_size": 40, "batches_per_epoch": 12}
    with filled() as table, serving(str(table.name)) as server, Proxy(server.address) as proxy:
        remote = gear.connect(url_of(proxy.address, str(table.name)), secret=SECRET, timeout=20)
        with remote:
            for most, ahead in ((None, 6), (9 << 20, 2), (1, 0)):
                given = gear.Prefetch(6) if most is None else gear.Prefetch(6, max_bytes=most)
                replay = dataset(remote, prefetch=given, **big)
                batches = iter(replay)
                next(batches)
                size = replay._link.largest
                assert (9 << 20) // size == 2
                for number in range(2):  # a slow learner
                    next(batches)
                    link = replay._link
                    wait_until(lambda link=link, ahead=ahead: len(link._answers) == ahead, patience=20)
                    time.sleep(0.05)
                    expected = (ahead + number + 2) * size
                    assert expected <= len(proxy.heard) < expected + (1 << 17)
                    assert len(link._answers) == ahead
                    assert not link._pending
                    assert sum(len(owner) for owner, _ in link.memory._kept) < (ahead + 4) * size
                (learner,) = server.server.resources.learners._known.values()
                assert learner.kept_bytes <= (ahead + 1) * size
                assert len([*batches]) == 9
                replay.close()
                wait_until(lambda: not server.server.resources.learners._known, patience=20)
                proxy.heard.clear()


@pytest.mark.parametrize("proxied", [False, True])
def test_a_learner_that_closes_before_its_answers_came_is_forgotten_at_once(
    proxied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_batches.MappedMemory, "describe", lambda _: None)  # through the network
    with filled() as table, serving(str(table.name)) as server, Proxy(server.address) as proxy:
        address = proxy.address if proxied else server.address
        with gear.connect(url_of(address, str(table.name)), secret=SECRET, timeout=20) as remote:
            for _ in range(3):
                replay = dataset(remote, prefetch=6, windows=gear.Window(4000), batch_size=40)
                batches = iter(replay)
                next(batches)
                for _ in range(4):
                    replay._link.submit("next", {}, wanted=False)
                replay.close()
                wait_until(lambda: not server.server.resources.learners._known, patience=20)
