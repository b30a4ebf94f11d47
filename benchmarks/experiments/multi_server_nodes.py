"""Nodes of one machine: processes side by side, or network namespaces with a bridge between them; and their undoing."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.peers.process import PeerFailed, Undo

_NETWORK = "10.199.73"


class NodesFailed(PeerFailed):
    """Nodes cannot be made here; the message says why, and what to do."""


@dataclasses.dataclass(frozen=True)
class Node:
    """Where the processes of one node run. host, device: where its servers listen. prefix: of commands there."""

    name: str
    host: str
    device: str
    prefix: tuple[str, ...] = ()

    def command(self, module: str, *arguments: str, **environment: str) -> list[str]:
        """How a module is run there; variables that the user has set stay as they are."""
        given = {"GLOO_SOCKET_IFNAME": self.device, **environment}
        variables = [f"{name}={value}" for name, value in given.items() if name not in os.environ]
        return ["env", *variables, *self.prefix, sys.executable, "-m", module, *arguments]


@contextlib.contextmanager
def processes(count: int) -> Iterator[list[Node]]:
    """Nodes that are names only: their processes reach each other over the loopback device."""
    yield [Node(f"node {number}", "127.0.0.1", "lo") for number in range(count)]


@contextlib.contextmanager
def namespaces(count: int, *, bandwidth: float | None, latency: float | None) -> Iterator[list[Node]]:
    """Nodes that are network namespaces, joined by a bridge that is in one as well."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise NodesFailed("namespaces need root, `ip` and `tc` (iproute2); use --network processes")
    mark = f"gear{os.getpid():x}"
    hub = f"{mark}-hub"
    with Undo() as undo:
        _namespace(undo, hub)
        _run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "bridge", "up")
        nodes = []
        for number in range(count):
            name, port = f"{mark}-{number}", f"port{number}"
            _namespace(undo, name)
            _run("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
            host = f"{_NETWORK}.{number + 1}"
            _run("ip", "-n", name, "addr", "add", f"{host}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _shape(name, bandwidth, latency)
            nodes.append(Node(f"node {number}", host, "eth0", ("ip", "netns", "exec", name)))
        yield nodes


def _namespace(undo: Undo, name: str) -> None:
    undo.add("ip", "netns", "del", name)
    _run("ip", "netns", "add", name)
    _run("ip", "-n", name, "link", "set", "lo", "up")


def _shape(name: str, bandwidth: float | None, latency: float | None) -> None:
    rate = [] if bandwidth is None else ["rate", f"{round(bandwidth * 1e9)}bit"]
    if latency is not None:
        kind = ["netem", "delay", f"{latency:g}us", "limit", "100000", *rate]
    elif bandwidth is not None:
        # As much at once as the rate brings in 2 ms, and at least two of the largest packets.
        burst = str(max(1 << 17, round(bandwidth * 1e9 / 8 * 2e-3)))
        kind = ["tbf", *rate, "burst", burst, "latency", "50ms"]
    else:
        return
    try:
        _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *kind)
    except NodesFailed as error:
        raise NodesFailed(
            f"{error}: this kernel may lack {kind[0]}, which --{'latency' if latency is not None else 'bandwidth'} "
            "needs; leave that option out"
        ) from error


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
    except subprocess.CalledProcessError as error:
        raise NodesFailed(f"`{' '.join(command)}` failed: {error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NodesFailed(f"`{' '.join(command)}` failed: {error}") from error
