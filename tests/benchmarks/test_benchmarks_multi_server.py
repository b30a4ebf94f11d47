"""Several nodes: a rank finds wrong batches, bare exchanges move the right bytes, all is undone; the simulation."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks_common import ROOT, call
from ucx_common import start_ucx_first

from benchmarks import harness
from benchmarks.experiments import scaling as simulation
from benchmarks.nodes import bare, ranks
from benchmarks.nodes import job as nodes
from benchmarks.peers import process as peers
from gear_loader.distributed.global_selection import GlobalSelection
from gear_loader.distributed.node_routes import NodeRoutes
from gear_loader.storage import shared_memory

HAS_IP = os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None


def left_in_memory() -> set[str]:
    return {name for name in os.listdir(shared_memory.DIRECTORY) if f"bench-multi-{os.getpid()}-" in name}


def spaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {
        line.split()[0] for line in listed.stdout.splitlines() if line.startswith(f"gear{os.getpid():x}-")
    }


def gone(what: Any) -> bool:
    """Whether `what()` comes to be empty."""
    end = time.monotonic() + 20
    while what() and time.monotonic() < end:
        time.sleep(0.02)
    return not what()


# A rank ----------------------------------------------------------------------------------------------


@pytest.fixture
def rank() -> Iterator[Any]:
    """A rank that is alone, in this process."""
    rank = ranks.Rank()
    rank.fill("W2", 40, seed=3, table=f"bench-multi-{os.getpid()}-test", options={})
    try:
        yield rank
    finally:
        rank.close()
    assert not left_in_memory()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("collect", {"batch": 7, "local": 7}),
        ("batches", {"batch": 7, "selector": "prioritized, without replacement"}),
        ("batches", {"batch": 7, "selector": "top"}),
    ],
)
def test_a_wrong_batch_is_found(rank: Any, kind: str, options: dict[str, Any]) -> None:
    rank.prepare("subject", kind, **options)
    assert "wrong" not in rank.check("subject")
    answer = rank.measure("subject", batches=2, together=False)
    assert len(answer["each"]) == 2
    assert answer["seconds"] == pytest.approx(sum(answer["each"]))
    rank.data_of(0).flat["reward"].add_(1.0)  # what is expected is now something else
    assert "reward differs" in rank.check("subject")["wrong"]


def test_parts_are_those_of_the_transport(rank: Any) -> None:
    spec = rank.spec()
    for rows in (1, 500, 546, 547, 3000):
        pieces = ranks.wire_pieces(spec, rows)
        assert sum((length - 8) // 24 for _, length in pieces) == rows
        assert [size for size, _ in pieces] == [spec.reply_bytes((length - 8) // 24) for _, length in pieces]
    assert ranks.wire_pieces(spec, 0) == []


# Bare exchanges --------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("carrier", bare.CARRIERS)
def test_bare_exchanges_move_the_right_bytes(carrier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (why := bare.missing(carrier)) is not None:
        pytest.skip(why)
    start_ucx_first()
    monkeypatch.setenv("UCX_TLS", "tcp")
    command = [sys.executable, "-m", "benchmarks.nodes.bare", carrier, "127.0.0.1"]
    senders = [peers.PeerProcess(command, patience=60, folder=ROOT) for _ in range(2)]
    try:
        with_all = bare.open_bare(carrier, [tuple(sender.about["address"]) for sender in senders])
        called: list[int] = []
        for pieces in (
            [[(1, 20)], [(70_000, 8)]],
            [[(5000, 600), (129, 600)], []],
            [[], [(1 << 20, 9000)] * 3],
        ):
            with_all.check(pieces)
            with_all.exchange(pieces, meanwhile=lambda: called.append(1))
            with_all.exchange(pieces, in_flight=1)
        assert len(called) == 3
        monkeypatch.setattr(bare, "memory", lambda: np.zeros(1 << 21, dtype=np.uint8))
        with pytest.raises(harness.Incorrect, match="piece 0 of 70,000 bytes from sender 1 differs"):
            with_all.check([[], [(70_000, 8)]])
        with_all.close()
    finally:
        for sender in senders:
            sender.close()


# Nodes -----------------------------------------------------------------------------------------------


def test_collectives_are_counted_however_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        ranks.dist, "all_to_all_single", lambda *told, **options: calls.append((told, options))
    )
    monkeypatch.setattr(ranks.dist, "get_rank", lambda: 1)
    traffic = ranks.Traffic()
    traffic.follow()
    ranks.dist.all_to_all_single("out", "given", [5, 2], [1, 3])
    ranks.dist.all_to_all_single("out", "given", [7, 2], [4, 3], group="group", async_op=True)
    assert (traffic.calls, traffic.sent, traffic.received) == (2, 5, 12)
    assert traffic.last == ([7, 2], [4, 3])
    assert calls[1] == (("out", "given", [7, 2], [4, 3]), {"group": "group", "async_op": True})


@pytest.mark.long
def test_what_was_done_is_undone_though_the_process_is_killed(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).touch()
    script = (
        "import os, signal\nfrom benchmarks.peers.process import Undo\nundo = Undo()\n"
        f"undo.add('rm', {str(tmp_path / 'first')!r})\nundo.add('rm', {str(tmp_path / 'second')!r})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert gone(lambda: list(tmp_path.iterdir()))


@pytest.mark.skipif(not HAS_IP, reason="needs root, ip and tc")
def test_namespaces_reach_each_other_and_are_gone_after_an_error() -> None:
    def in_one() -> None:
        with nodes.namespaces(2, bandwidth=1.0, latency=None) as made:
            assert len(spaces()) == 3
            python, host = (sys.executable, "-I", "-S", "-c"), made[0].host
            command = [*made[0].prefix, *python, _LISTEN, host]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listening:
                assert listening.stdout is not None
                say = [*made[1].prefix, *python, _SAY, host, listening.stdout.readline().strip()]
                assert subprocess.run(say, capture_output=True, text=True, timeout=30).stdout == "heard"
            raise KeyError("on the way out")

    try:
        with pytest.raises(KeyError):
            in_one()
    except nodes.NodesFailed as error:
        pytest.skip(str(error))
    assert not spaces()


_LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
server.accept()[0].sendall(b"heard")
"""
_SAY = """
import socket, sys
print(socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20).recv(5).decode(), end="")
"""


def test_variables_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    node = nodes.Node("node 0", "127.0.0.1", "lo", ("nice",))
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    command = node.command("some.module", "argument", UCX_TLS="tcp")
    assert command[:4] == ["env", "GLOO_SOCKET_IFNAME=lo", "UCX_TLS=tcp", "nice"]
    assert command[4:] == [sys.executable, "-m", "some.module", "argument"]
    monkeypatch.setenv("UCX_TLS", "rc")
    assert "UCX_TLS=tcp" not in node.command("some.module", UCX_TLS="tcp")


# The simulation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 5, 8, 100])
def test_schedules(world: int) -> None:
    (pairwise,) = simulation.rounds("pairwise", world, 10)
    assert pairwise == (world - 1, 10 * (world - 1), False)
    # What Bruck's rounds pass on, bit by bit, walked through: a piece goes on in the rounds of its distance's bits.
    bruck = simulation.rounds("bruck", world, 10)
    hops = sum(distance.bit_count() for distance in range(world))
    assert sum(count for _, count, _ in bruck) == 10 * hops
    assert sum(messages for messages, _, _ in bruck) == (world - 1).bit_length()
    sizes, inside, between, outside = simulation.rounds("hierarchical", world, 10, group=4)
    assert inside == outside
    assert between[1] == 10 * max(world - 4, 0)
    if world % 4 == 0:
        routes = NodeRoutes(0, [str(rank // 4) for rank in range(world)])
        assert sizes[0] + inside[0] + between[0] + outside[0] == routes.most_messages
    # One copy a node: what a node has is doubled in each round, until it has that of all.
    copies = simulation.rounds("one copy a node", world, 10, group=4)
    group = min(world, 4)
    assert sum(count for _, count, inside in copies if not inside) == 10 * group * (-(-world // group) - 1)
    assert copies[-1] == (1, 10 * world, True)


def _rows(start: float, alpha: float, beta: float, cores: int) -> list[dict[str, Any]]:
    network = simulation.Network(alpha, beta, cores, start)
    rows = []
    for world in (2, 4, 8):
        for each in (512, 4096, 65_536):
            taken = simulation.seconds(network, world, simulation.rounds("pairwise", world, each))
            row = {"experiment": "multi-server", "workload": "all_to_all", "machine": {"cores": cores}}
            told = {"world": world, "each_bytes": each}
            rows.append({**row, "parameters": told, "seconds": {"p50": taken}})
    return rows


def test_the_fit_finds_what_the_rows_were_made_of() -> None:
    fitted = simulation.fit(_rows(5e-5, 2e-5, 1e-9, 2))
    assert fitted is not None
    found = fitted.network
    assert (found.start, found.alpha, found.beta) == pytest.approx((5e-5, 2e-5, 1e-9))
    assert all(computed == pytest.approx(taken) for _, _, taken, computed in fitted.points)
    assert simulation.fit([]) is None


@pytest.mark.parametrize("sampler", simulation.SELECTORS)
def test_a_played_rank_draws(sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, Any]] = []

    def see(self: Any, *arguments: Any) -> Any:
        rows = draw(self, *arguments)
        drawn.append((len(rows), rows.records))
        return rows

    draw = GlobalSelection.draw
    monkeypatch.setattr(GlobalSelection, "draw", see)
    assert simulation.work(sampler, 6, 16, trajectories=300, batches=2) > 0
    assert [count for count, _ in drawn] == [16] * 4
    assert all((records["id"] >= 0).all() for _, records in drawn)


def test_the_state_of_a_played_rank_does_not_grow_with_the_ranks() -> None:
    few, many = (simulation.state(world, 16, trajectories=300) for world in (4, 64))
    assert few["saved"] == many["saved"] == 300 * 20 + 2 * 16 * (20 + 8)
    assert few["full saved"] == many["full saved"] == few["saved"]  # of a rank other than the first
    assert many["full sent"] - few["full sent"] < 60 * 16  # besides its part only a checksum to each
    first = simulation.state(4, 16, trajectories=300, rank=0)
    assert first["full received"] > 3 * first["saved"]
    assert first["saved"] == few["saved"]


def test_the_tables_of_the_simulation(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in _rows(5e-5, 2e-5, 1e-9, 2)))
    torch.manual_seed(0)
    done = call("scaling", str(file), "--worlds", "2,16", "--batch", "8")
    assert done.exit_code == 0, done.output
    shown = (
        "alpha 20.0 µs",
        "W = 16",
        "computed, not measured",
        "connections of a server",
        "hierarchical",
        "sent to rank 0",
    )
    assert all(text in done.stdout for text in shown)
