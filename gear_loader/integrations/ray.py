"""A table owned by a named Ray actor, which any Ray worker finds by its name.

::

    from gear_loader.integrations.ray import Replay
    replay = Replay.options(name="replay").remote(schema, max_steps=1_000_000, max_trajectories=50_000)

    table = gear_loader.connect("ray://replay")          # in any worker, task or actor of this Ray cluster
    table.add(trajectory)

A worker on the actor's node attaches to the table in shared memory: it gets a `gear_loader.Table`, and can also draw
from it. A worker on another node gets a `gear_loader.RemoteTable`, which writes through the actor's server.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
import urllib.parse
import warnings
from collections.abc import Mapping
from typing import Any

from gear_loader.errors import GearError, PeerTimeoutError, RegionError, TransportError
from gear_loader.storage.schema import Column, Schema
from gear_loader.storage.shared_memory import region_path
from gear_loader.storage.stats import TableStats
from gear_loader.storage.table import Table
from gear_loader.storage.table_rules import check_seconds
from gear_loader.transport.remote_table import RemoteTable
from gear_loader.transport.remote_table import connect as connect_to

try:
    import ray
    import ray.exceptions
    import ray.util
except ImportError as error:
    raise ImportError(
        f"gear_loader.integrations.ray needs Ray, which cannot be imported ({error}). "
        "Install it: pip install '.[ray]' (in a clone of Gear Loader)",
        name="ray",
    ) from error

__all__ = ["Replay", "connect"]

_URL = "expected ray://<actor>, such as ray://replay, or ray://<actor>?namespace=<namespace>"
_PORTS = range(20_000, 32_000)  # below those that Linux hands out by itself
_TRIES = 8
_TAKEN = "Address already in use"
_WATCH = """
import os, sys, time
raylet, began, path, inode = sys.argv[1:]
def start():
    try:
        with open(f"/proc/{raylet}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return None
if os.fork() == 0:
    os.setsid()
    while os.path.exists(path) and start() == began:
        time.sleep(1)
    if os.path.exists(path) and os.stat(path).st_ino == int(inode):
        os.unlink(path)
"""
"""Program that removes a table when Ray has ended on its node, which kills the actor without notice; no child of it."""


class _Owner:
    """The actor: owns a table and its server. Started again with the same arguments, it goes on with both.

    Args:
        schema, options: of `Table.create`. port, secret: of the server.
    """

    def __init__(
        self, schema: dict[str, Column], options: dict[str, Any], port: int, secret: bytes, timeout: float
    ) -> None:
        context = ray.get_runtime_context()
        self._node = context.get_node_id()
        # The actor's id stays when Ray starts it again, and so does the table, which is not in this process's memory.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own: this property calls a method that Ray has deprecated
            again = context.was_current_actor_reconstructed
        self._table = Table.create(
            schema, name=f"ray-{context.get_actor_id()}", if_exists="attach", **options
        )
        self._secret = secret
        _unlink_after_ray(self._table.name or "")
        # The server of the process that was killed may take a moment to end.
        deadline = time.monotonic() + (timeout if again else 0)
        while True:
            try:
                host = ray.util.get_node_ip_address()
                self._server = self._table.serve(host=host, port=port, secret=secret)
                break
            except TransportError as error:
                if time.monotonic() > deadline:
                    if not again:
                        self._table.unlink()
                    raise RuntimeError(str(error)) from None
                time.sleep(0.1)

    def where(self) -> dict[str, Any]:
        """How workers reach the table."""
        return {
            "node": self._node,
            "name": self._table.name,
            "url": self._server.url,
            "secret": self._secret,
        }

    def stats(self) -> TableStats:
        """As `Table.stats`."""
        return self._table.stats()

    def __len__(self) -> int:
        return len(self._table)

    def close(self) -> None:
        """Stop the server and remove the table's name. Workers that have attached may go on with its memory."""
        self._server.stop()
        with contextlib.suppress(RegionError):
            self._table.unlink()

    def __ray_shutdown__(self) -> None:
        """Ray calls it where the actor ends for good, and not by force."""
        self.close()


def _unlink_after_ray(name: str) -> None:
    """Let a process wait until Ray has ended on this node, and then remove a table's name."""
    path, pid = region_path(name), os.getppid()
    while pid > 1:
        with open(f"/proc/{pid}/stat") as file:
            head, _, tail = file.read().rpartition(")")
        if head.endswith("(raylet"):
            command = [sys.executable, "-I", "-S", "-c", _WATCH]
            arguments = [str(pid), tail.split()[19], path, str(os.stat(path).st_ino)]
            none = subprocess.DEVNULL
            subprocess.run(command + arguments, check=True, stdin=none, stdout=none, stderr=none)
            return
        pid = int(tail.split()[1])


_Actor: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_Owner)


class Replay:
    """A Ray actor that owns a table and serves it: ``Replay.options(name="replay").remote(schema, ...)``.

    If the actor dies, Ray restarts it, and it continues with the same table and address: the table is in the shared
    memory of the node, not of the process. If the node is lost, so are the trajectories. The actor reserves no CPU in
    Ray; a separate server process answers workers on other nodes.

    The actor's handle has `stats`, `where` and `close` as remote methods; ``ray.get(replay.close.remote())`` removes
    the table, and ``ray.kill(replay)`` ends the actor. Without `close` the table is removed with the actor's last
    handle, or when Ray ends on its node (a separate process waits for that). After ``ray.kill``, or if the job ends and
    the cluster goes on, the table stays in shared memory until Ray ends.
    """

    @staticmethod
    def options(**options: Any) -> _Options:
        """Options of the actor, as for any Ray actor's ``options``: ``name``, ``namespace``, ``lifetime``,
        ``scheduling_strategy``, ``get_if_exists`` and so on. Workers look for the ``name``."""
        return _Options(options)

    @staticmethod
    def remote(schema: Mapping[str, Column], **options: Any) -> Any:
        """Start an actor without a name, which `gear_loader.connect` cannot find. Arguments as after `options`."""
        return _Options({}).remote(schema, **options)


class _Options:
    """What `Replay.options` returns."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def remote(self, schema: Mapping[str, Column], *, timeout: float = 60.0, **options: Any) -> Any:
        """Start the actor, and wait until it serves its table.

        Args:
            schema, options: of `Table.create`, except its `name` and `if_exists`.
            timeout: seconds to wait for the actor.

        Returns:
            The actor's handle.

        Raises:
            SchemaError: an invalid schema or option; TypeError: an unknown option; no actor was started.
            PeerTimeoutError: Ray did not start the actor in time. GearError: the actor failed; the message says why.
        """
        checked = dict(Schema(schema))
        for name in ("name", "if_exists"):
            if name in options:
                raise TypeError(
                    f"{name} was given; the actor's table has the actor's id as its name. Leave it out."
                )
        with Table.create(checked, **options):  # as private memory, which takes none
            pass
        secret = secrets.token_hex(32).encode()
        actor: Any = None
        for _ in range(_TRIES):
            port = secrets.choice(_PORTS)  # an argument, so that a restarted actor has it too
            actor = _Actor.options(**self._options).remote(checked, options, port, secret, timeout)
            try:
                _ask(actor, "where", timeout)
                return actor
            except GearError as error:
                ray.kill(actor)
                if _TAKEN not in str(error):
                    raise
        raise GearError(f"No free port was found among {_PORTS.start} to {_PORTS.stop} in {_TRIES} tries.")


def connect(
    url: str,
    *,
    attach: bool = True,
    timeout: float = 60.0,
    spool_bytes: int = 256 << 20,
    max_in_flight: int | None = None,
) -> Table | RemoteTable:
    """The table of a named `Replay`; `gear_loader.connect` calls it for addresses that begin with ``ray://``.

    Args:
        url: ``ray://<actor>``, or ``ray://<actor>?namespace=<namespace>``.
        attach: whether to attach to shared memory if the actor is on this node; False always uses its server.
        timeout: seconds to wait for the actor, and for the calls of a `RemoteTable`.
        spool_bytes, max_in_flight: of a `RemoteTable`.

    Returns:
        A `Table` on the actor's node, else a `RemoteTable`.

    Raises:
        TransportError: an invalid address, or Ray is not initialised here.
        PeerTimeoutError: there is no such actor, or it does not answer.
        GearError: the actor failed.
    """
    name, namespace = _split(url)
    timeout = check_seconds("timeout", timeout)
    if not ray.is_initialized():
        raise TransportError(
            f"Ray is not initialised in this process, so {url} cannot be found: call ray.init(address='auto') first."
        )
    where = _ask(_find(name, namespace, timeout), "where", timeout)
    if attach and where["node"] == ray.get_runtime_context().get_node_id():
        with contextlib.suppress(RegionError):  # of a container with shared memory of its own
            return Table.attach(where["name"])
    return connect_to(
        where["url"],
        secret=where["secret"],
        timeout=timeout,
        spool_bytes=spool_bytes,
        max_in_flight=max_in_flight,
    )


def _split(url: str) -> tuple[str, str | None]:
    """Name and namespace of the actor in an address."""
    parts = urllib.parse.urlsplit(url)
    query = urllib.parse.parse_qs(parts.query)
    name = urllib.parse.unquote(parts.netloc)
    fits = parts.scheme == "ray" and name and parts.path in ("", "/") and not parts.fragment
    if not fits or ":" in name or set(query) - {"namespace"}:
        note = " The address of a Ray cluster is for ray.init." if ":" in name else ""
        raise TransportError(f"Address {url!r} was received; {_URL}.{note}")
    return name, query["namespace"][0] if query else None


def _find(name: str, namespace: str | None, timeout: float) -> Any:
    """The actor's handle, as soon as there is one."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return ray.get_actor(name, namespace=namespace)
        except ValueError:
            if time.monotonic() > deadline:
                where = "" if namespace is None else f" in the namespace {namespace!r}"
                raise PeerTimeoutError(
                    f"There is no Ray actor named {name!r}{where} after {timeout:g} s; expected one made by "
                    f"gear_loader.integrations.ray.Replay.options(name={name!r}).remote(...)."
                ) from None
            time.sleep(0.1)


def _ask(actor: Any, method: str, timeout: float) -> Any:
    """The answer of one of the actor's methods."""
    try:
        return ray.get(getattr(actor, method).remote(), timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        raise PeerTimeoutError(
            f"The Ray actor did not answer within {timeout:g} s; `ray list actors` and its logs say why."
        ) from None
    except ray.exceptions.RayError as error:
        raise GearError(f"The Ray actor failed: {' '.join(str(error).split())[-1000:]}") from error
