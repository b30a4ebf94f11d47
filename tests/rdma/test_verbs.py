"""One-sided reads over an RDMA device: correct bytes, or the documented error, whatever fails meanwhile.

They run where the kernel shows a device that UCX can use; `make rdma-check` runs them in a virtual machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nixl_common import DEREGISTER, SCHEMA, SLOWER, WINDOWS, Owner, World, naive, steps, windows_on
from transport_common import SECRET, check_fetch, six, spec_of
from waiting_common import go_on, stop_process, wait_until

from gear_loader.errors import PeerTimeoutError, TransportError
from gear_loader.storage.schema import Window
from gear_loader.transport import Peer, start_server
from gear_loader.transport.spec import WindowSpec

DEVICES = sorted(Path("/sys/class/infiniband").glob("*"))
pytestmark = [
    pytest.mark.skipif(not DEVICES, reason="the kernel shows no RDMA device; `make rdma-check` emulates one"),
    pytest.mark.timeout(300 * SLOWER),
]
SOFTWARE = pytest.mark.skipif(
    not DEVICES or DEVICES[0].name != "rxe0", reason="switches off a device, which has to be rdma_rxe's"
)
MANY = 3000  # rows of a read that takes a while: 15 MB in pieces of 1,200 bytes
Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True, scope="module")
def verbs() -> Iterator[None]:
    """Only verbs, in this process and in those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("UCX_TLS", "rc,ud,self"), ("UCX_NET_DEVICES", f"{DEVICES[0].name}:1")):
            patch.setenv(name, os.environ.get(name, value))
        yield


@pytest.fixture(scope="module")
def owners(verbs: None) -> Iterator[list[Owner]]:
    made: list[Owner] = []
    yield made
    for each in made:
        each.end()


@pytest.fixture
def world(owners: list[Owner]) -> Iterator[World]:
    """A table whose owner is started again after a test that ended it."""
    if not owners or owners[-1].process.exitcode is not None:
        owners.append(Owner("verbs"))
    world = World("verbs", owners[-1])
    yield world
    world.close()


def packets() -> int:
    """Packets that the device has sent or received so far."""
    folder = DEVICES[0] / "ports/1"
    names = ("hw_counters/sent_pkts", "hw_counters/rcvd_pkts", "counters/port_xmit_packets")
    return sum(int((folder / name).read_text()) for name in names if (folder / name).exists())


def many(world: World) -> tuple[list[int], list[int]]:
    """Rows of a long read: windows that hold whole trajectories."""
    world.spec = WindowSpec("verbs", SCHEMA, windows_on({"big": Window(25)}))
    long = [slot for slot, rows in world.held.items() if len(rows["x"]) > 10]
    return [long[i % len(long)] for i in range(MANY)], [0] * MANY


def begin(world: World) -> Any:
    """Start a long read; returns its future once bytes are on the way."""
    world.check(list(world.held)[:4], [0] * 4)  # connected
    before = packets()
    future, out = world.start(*many(world))
    wait_until(lambda: packets() > before + 100)
    assert not future.done()
    return future, out


def test_windows_come_over_the_device(world: World) -> None:
    random = np.random.default_rng(0)
    world.spec = WindowSpec("verbs", SCHEMA, WINDOWS)
    slots = random.choice(list(world.held), 64).tolist()
    anchors = [int(random.integers(-2, len(world.held[slot]["x"]) + 2)) for slot in slots]
    world.check(slots, anchors)
    for pad in ("keep", "head", "tail", "edge"):
        world.spec = WindowSpec("verbs", SCHEMA, windows_on({"x": Window(9, -4, pad), "big": Window(3, 1)}))  # type: ignore[arg-type]
        world.check(slots, anchors)
    before, (slots, anchors) = packets(), many(world)
    status, out = world.fetch(slots, anchors)
    moved = sum(world.held[slot]["big"].nbytes for slot in slots)
    counted = packets() - before
    print(f"{DEVICES[0].name}: {moved:,} bytes of steps in {counted:,} packets")
    assert counted > moved / 4096  # the largest packet of RDMA
    assert not status.any()
    world.compare(out, slots, anchors)


def test_an_owner_that_stands_still_is_read(world: World) -> None:
    """The adapter answers, and not the processor."""
    slots = list(world.held)[:8]
    world.check(slots, [0] * 8)
    stop_process(world.owner.process.pid)
    try:
        for _ in range(5):
            world.check(slots, [1] * 8)
    finally:
        go_on(world.owner.process.pid)


def test_trajectories_that_are_replaced_meanwhile(world: World) -> None:
    world.spec = WindowSpec("verbs", SCHEMA, windows_on({"big": Window(25)}))
    seen = {0: 0, 1: 0}
    for seed in range(12):
        held, slots = dict(world.held), list(world.held)
        rows = slots * 40
        future, out = world.start(rows, [0] * len(rows))
        for slot in slots[seed % 2 :: 2]:
            world.table.remove([slot])
            del world.held[slot]
        for number in range(len(slots) // 2):
            data = steps(1 + (7 * number) % 25, 1000 * seed + number)
            world.held[world.table.add(data)] = data
        status = future.result(30 * SLOWER)
        gone = tuple(np.flatnonzero(status).tolist())
        wanted = naive(world.spec, held, rows, [0] * len(rows), gone)
        for piece in world.spec.pieces(len(rows)):
            found = out[piece.offset : piece.offset + len(rows) * piece.row_bytes]
            assert (found == wanted[piece.name, piece.kind]).all(), piece
        for value in status.tolist():
            seen[value] += 1
    assert seen[0]
    assert seen[1]


def test_an_owner_killed_in_a_read(world: World) -> None:
    future, _ = begin(world)
    world.owner.signal(signal.SIGKILL)
    world.owner.process.join()
    with pytest.raises((TransportError, PeerTimeoutError), match=r"node b: .*; 3000 rows of table 'verbs'"):
        future.result(60 * SLOWER)
    with pytest.raises((TransportError, PeerTimeoutError), match="node b: "):
        world.fetch(list(world.held)[:4], [0] * 4)
    world.owner.start()
    world.check(list(world.held)[:4], [0] * 4)


def test_a_registration_that_is_gone(owners: list[Owner]) -> None:
    # A cache would keep it on the device.
    owners.append(Owner("verbs", UCX_RCACHE_ENABLE="n"))
    world = World("verbs", owners[-1])
    try:
        slots = list(world.held)[:4]
        world.check(slots, [0] * 4)
        world.owner.metadata("nixl", DEREGISTER + "verbs").result(10 * SLOWER)
        with pytest.raises((TransportError, PeerTimeoutError), match=r"node b: .*; 4 rows of table 'verbs'"):
            world.fetch(slots, [0] * 4)
        world.owner.end()
        world.owner.start()
        world.check(slots, [0] * 4)
    finally:
        world.close()
        world.owner.end()


@SOFTWARE
def test_a_device_that_goes_down_in_a_read(world: World) -> None:
    def link(state: str) -> None:
        subprocess.run(["ip", "link", "set", "eth0", state], check=True)

    future, out = begin(world)
    link("down")
    try:
        error = future.exception(60 * SLOWER)
    finally:
        link("up")
    if error is None:  # it came before the device noticed
        assert not future.result().any()
        world.compare(out, *many(world))
    else:
        assert isinstance(error, TransportError | PeerTimeoutError)
        assert re.search(r"node b: .*; 3000 rows of table 'verbs'", str(error))
    deadline = time.monotonic() + 60 * SLOWER
    while True:  # a connection that broke shows at its next use
        try:
            world.check(list(world.held)[:4], [0] * 4)
            break
        except (TransportError, PeerTimeoutError):
            assert time.monotonic() < deadline


@SOFTWARE
def test_doctor_names_a_libibverbs_without_a_provider() -> None:
    """The wheel's own; for these tests another one lies in its place."""

    def infiniband(*words: str) -> dict[str, Any]:
        command = [*words, sys.executable, "-m", "gear_loader", "doctor", "--json"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=200 * SLOWER, check=True)
        found: dict[str, Any] = json.loads(said.stdout)["carriers"]["nixl"]["infiniband"]
        return found

    assert infiniband() == {"possible": True, "reason": None}
    package = importlib.util.find_spec("nixl_cu12")
    assert package is not None
    assert package.origin is not None
    libraries = Path(package.origin).parents[1] / "nixl_cu12.libs"
    (library,) = libraries.glob("libibverbs-*")
    found = infiniband("unshare", "--mount", "sh", "-c", f'umount {library}; exec "$@"', "sh")
    assert not found["possible"]
    assert f"{library} has no provider for rxe0: the libibverbs of a wheel" in found["reason"]


def test_messages_of_ucx_go_over_the_device(verbs: None) -> None:
    """With the links of `gear-loader ucx-env`, or a system's UCX: a table's server and its reader."""
    libucxx = pytest.importorskip("ucxx._lib.libucxx")
    if "verbs/" not in libucxx.UCXContext({}).info:
        pytest.skip("ucxx has loaded a UCX without verbs")
    before = packets()
    with six() as table:
        server = start_server([str(table.name)], secret=SECRET, carriers=("ucx",), timeout=120 * SLOWER)
        peer = Peer(server.addresses["ucx"], secret=SECRET, timeout=60 * SLOWER, name="node b")
        try:
            check_fetch(peer, table, spec_of(table), [3, 1, 5, 3], [1, 2, -1, 9])
            check_fetch(peer, table, spec_of(table, {"value": Window(4096)}), [0, 1] * 100, [0] * 200)
            counted = packets() - before
            print(f"{DEVICES[0].name}: a reply of 10 MB by UCX in {counted:,} packets")
            assert counted > 10e6 / 4096
            os.kill(server.pid, signal.SIGKILL)
            with pytest.raises(TransportError, match=r"node b"):
                check_fetch(peer, table, spec_of(table), [3], [1])
        finally:
            peer.close()
            server.stop()
