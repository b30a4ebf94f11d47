"""Nodes of one machine, and the ranks of a job on them, which are told what to do all at once.

Nodes are processes side by side, or network namespaces with a bridge between them; all is undone in the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import machine
from benchmarks.harness import Incorrect, Variant
from benchmarks.options import described, option
from benchmarks.peers.process import PeerFailed, PeerProcess, Undo, receive_all, together
from gear_loader.storage.shared_memory import region_path

_NETWORK = "10.199.73"
_MOST_BATCHES = 400
_PATIENCE = 180.0  # seconds that an answer may take
_names = map("subject {}".format, itertools.count())


class Network(str, Enum):
    """How nodes are told apart."""

    processes = "processes"
    namespaces = "namespaces"


Placed = Annotated[Network, described("processes; or namespaces, as root.")]
Bandwidth = option(float, "Of namespaces: Gbit/s that each node sends at most.", min=0.001)
Latency = option(float, "Of namespaces: microseconds that each node's packets are late.", min=0.1)


def check_limits(network: Network, *limits: float | None) -> None:
    """Raise `typer.BadParameter` if processes side by side are to have a bandwidth or latency."""
    if network is Network.processes and any(limits):
        message = "processes share one loopback; use --network namespaces."
        raise typer.BadParameter(message, param_hint="--network")


class NodesFailed(PeerFailed):
    """Nodes cannot be made here; the message says why, and what to do."""


@dataclasses.dataclass(frozen=True)
class Node:
    """Where the processes of one node run. host, device: where its servers listen. prefix: of commands there."""

    name: str
    host: str = "127.0.0.1"
    device: str = "lo"
    prefix: tuple[str, ...] = ()

    @property
    def namespace(self) -> str | None:
        """Its network namespace; None of processes side by side."""
        return self.prefix[-1] if self.prefix else None

    def command(self, module: str, *arguments: str, **environment: str) -> list[str]:
        """How a module is run there; variables that the user has set stay as they are."""
        given = {"GLOO_SOCKET_IFNAME": self.device, **environment}
        variables = [f"{name}={value}" for name, value in given.items() if name not in os.environ]
        return ["env", *variables, *self.prefix, sys.executable, "-m", module, *arguments]


@contextlib.contextmanager
def namespaces(count: int, *, bandwidth: float | None, latency: float | None) -> Iterator[list[Node]]:
    """Nodes that are network namespaces, joined by a bridge that is in one as well."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise NodesFailed("namespaces need root, `ip` and `tc` (iproute2); use --network processes")
    mark = f"gear{os.getpid():x}"
    hub = f"{mark}-hub"
    with Undo() as undo:
        _namespace(undo, hub)
        _run(f"ip -n {hub} link add bridge type bridge")
        _run(f"ip -n {hub} link set bridge up")
        nodes = []
        for number in range(count):
            name, port, host = f"{mark}-{number}", f"port{number}", f"{_NETWORK}.{number + 1}"
            _namespace(undo, name)
            _run(f"ip -n {hub} link add {port} type veth peer name eth0 netns {name}")
            _run(f"ip -n {hub} link set {port} master bridge up")
            _run(f"ip -n {name} addr add {host}/24 dev eth0")
            _run(f"ip -n {name} link set eth0 up")
            _shape(name, bandwidth, latency)
            nodes.append(Node(f"node {number}", host, "eth0", ("ip", "netns", "exec", name)))
        yield nodes


def _namespace(undo: Undo, name: str) -> None:
    undo.add("ip", "netns", "del", name)
    _run(f"ip netns add {name}")
    _run(f"ip -n {name} link set lo up")


def _shape(name: str, bandwidth: float | None, latency: float | None) -> None:
    rate = "" if bandwidth is None else f"rate {round(bandwidth * 1e9)}bit"
    if latency is not None:
        kind = f"netem delay {latency:g}us limit 100000 {rate}"
    elif bandwidth is not None:
        # As much at once as the rate brings in 2 ms, and at least two of the largest packets.
        kind = f"tbf {rate} burst {max(1 << 17, round(bandwidth * 1e9 / 8 * 2e-3))} latency 50ms"
    else:
        return
    try:
        _run(f"tc -n {name} qdisc add dev eth0 root {kind}")
    except NodesFailed as error:
        option = "bandwidth" if latency is None else "latency"
        why = f"this kernel may lack {kind.split()[0]}, which --{option} needs; leave that option out"
        raise NodesFailed(f"{error}: {why}") from error


def _run(command: str) -> None:
    try:
        subprocess.run(command.split(), check=True, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", None) or error
        raise NodesFailed(f"`{command}` failed: {str(why).strip()}") from error


class Job:
    """Ranks, each with a shard of its own.

    nodes: of each rank. Ranks of the same node share memory. carrier: what rows of other nodes come over, ours and the
    bare ones; None where there are none. ranks: the processes. mark: what the names of their tables begin with.
    """

    def __init__(
        self, nodes: Sequence[Node], carrier: str | None, ranks: Sequence[PeerProcess], mark: str
    ) -> None:
        self.nodes, self.carrier, self.ranks, self._mark = nodes, carrier, ranks, mark

    def fill(self, workload: str, trajectories: int, seed: int, cache: int | None = None) -> None:
        """Give every rank a shard, and so many bytes to cache rows of others in."""
        options = [
            {"transport": self.carrier, "node": node.name, "host": node.host} if self.carrier else {}
            for node in self.nodes
        ]
        options = [{**each, "cache": cache} if cache else each for each in options]
        told = {"workload": workload, "trajectories": trajectories, "seed": seed, "table": self._mark}
        self.each("fill", [{"options": own} for own in options], **told)

    def each(
        self,
        what: str,
        arguments: Sequence[Mapping[str, Any]] | None = None,
        *,
        first: bool = False,
        **shared: Any,
    ) -> list[dict[str, Any]]:
        """Tell all ranks, or the first one alone, to do something; their answers."""
        ranks = self.ranks[:1] if first else self.ranks
        for process, own in zip(ranks, arguments or [{}] * len(ranks), strict=True):
            process.send(what, **own, **shared)
        return receive_all(ranks)


@contextlib.contextmanager
def started(nodes: Sequence[Node], carrier: str | None, environment: Mapping[str, str]) -> Iterator[Job]:
    """A job with a rank on each of the nodes, and a bare sender beside each where there is a carrier."""
    mark, world = f"bench-multi-{os.getpid()}-{secrets.token_hex(4)}", len(nodes)
    commands = [node.command("benchmarks.nodes.ranks", **environment) for node in nodes]
    if carrier is not None:
        commands += [
            node.command("benchmarks.nodes.bare", carrier, node.host, **environment) for node in nodes
        ]
    makers = [
        functools.partial(PeerProcess, command, patience=_PATIENCE, folder=machine.ROOT)
        for command in commands
    ]
    with tempfile.TemporaryDirectory(prefix="gear-bench-") as folder, Undo() as undo:
        for rank in range(world):
            undo.add("rm", "-f", region_path(f"{mark}-{rank}"))
        with together(makers, len(makers)) as processes:
            there = [process.result() for process in processes]
            job = Job(nodes, carrier, there[:world], mark)
            store = str(Path(folder) / "store")
            job.each("join", [{"rank": rank, "world": world} for rank in range(world)], store=store)
            # The next rank's sender first: it is the one that is asked where one alone is.
            addresses = [sender.about["address"] for sender in there[world:]]
            if addresses:
                turned = [addresses[rank + 1 :] + addresses[:rank] for rank in range(world)]
                job.each("bare", [{"addresses": others} for others in turned], carrier=carrier)
            yield job


class Subject:
    """Something that the ranks of a job do, as a `Variant`.

    kind: of `ranks.SUBJECTS`; options: its. first: rank 0 alone does it. window: seconds that a measurement should
    take.
    """

    def __init__(
        self, job: Job, kind: str, window: float, options: Mapping[str, Any], *, first: bool = False
    ) -> None:
        self.name, self._job, self._window, self._first = next(_names), job, window, first
        self._seconds: list[float] = []  # of every batch of every rank
        self._figures: dict[str, float] = {}  # means over the ranks
        # The first rank's requests are its own, but all ranks tell each other of their shards when it is made.
        job.each("prepare", name=self.name, kind=kind, **options)

    def variant(self, name: str, amount: int, targets: Mapping[str, float]) -> Variant:
        made = Variant(name, lambda: self._measure(made.batches), lambda: self._check(made), amount, 1)
        made.extras, made.targets = self._extras, targets
        return made

    def _check(self, variant: Variant) -> None:
        answers = self._job.each("check", first=self._first, name=self.name)
        for rank, answer in enumerate(answers):
            if "wrong" in answer:
                raise Incorrect(f"rank {rank}: {answer['wrong']}")
        figures = [answer["figures"] for answer in answers]
        self._figures = {key: float(np.mean([each[key] for each in figures])) for key in figures[0]}
        one = self._measure(3) / 3
        variant.batches = int(np.clip(self._window / max(one, 1e-9), 3, _MOST_BATCHES))
        self._seconds.clear()

    def _measure(self, batches: int) -> float:
        told = {"name": self.name, "batches": batches, "together": not self._first}
        answers = self._job.each("measure", first=self._first, **told)
        self._seconds += [seconds for answer in answers for seconds in answer["each"]]
        return float(np.mean([answer["seconds"] for answer in answers]))

    def _extras(self) -> dict[str, float]:
        low, high = np.quantile(self._seconds, (0.5, 0.95))
        return {"latency_p50": float(low), "latency_p95": float(high), **self._figures}

    def close(self) -> None:
        """Let the ranks forget it."""
        self._job.each("drop", name=self.name)
