"""Tables owned by named Ray actors, which any Ray worker finds by their name: one, or several shards of one replay.

::

    from gear_loader.integrations.ray import Replay, ReplayShards
    replay = ReplayShards(schema, name="replay", num_shards=4, max_steps=1_000_000, max_trajectories=50_000)

    shards = gear_loader.connect("ray://replay")         # in any worker, task or actor of this Ray cluster
    shards.add(trajectory)
    dataset = gear_loader.ReplayDataset(shards, batch_size=256, windows=gear_loader.Window(1), ...)

A worker on the node of an actor attaches to its table in shared memory: it gets a `gear_loader.Table`. A worker on
another node gets a `gear_loader.RemoteTable`, which writes and reads through the actor's server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, Literal

from gear_loader.errors import GearError, PeerTimeoutError, RegionError, TransportError
from gear_loader.storage.disk import Disk
from gear_loader.storage.schema import Column, Schema
from gear_loader.storage.table import Table
from gear_loader.storage.table_rules import check_seconds
from gear_loader.transport.client import Peer
from gear_loader.transport.remote_shards import RemoteShards
from gear_loader.transport.remote_table import RemoteTable
from gear_loader.transport.urls import split_url
from gear_loader.utils.checks import at_least, one_of

try:
    import ray
    import ray.exceptions
    import ray.util
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ImportError(
        f"gear_loader.integrations.ray needs Ray, which cannot be imported ({error}). "
        "Install it: pip install '.[ray]' (in a clone of Gear Loader)",
        name="ray",
    ) from error

from gear_loader.integrations.ray_owner import Owner

__all__ = ["Replay", "ReplayShards", "connect"]

_URL = "expected ray://<actor>, such as ray://replay, or ray://<actor>?namespace=<namespace>"
_ASK = 5.0  # most seconds to ask an actor for its address, before it is asked again
_PAUSE = 0.1
_START = 120.0  # seconds to start actors
_ACTOR: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Owner)


class Replay:
    """A Ray actor that owns a table and serves it: ``Replay.options(name="replay").remote(schema, ...)``.

    If the actor dies, Ray restarts it, and it continues with the same table: the table is in the shared memory of the
    node, not of the process. Workers ask it for its new address. If the node is lost, Ray restarts the actor on another
    one. With ``disk=gear_loader.Disk(path)`` of a file system that both nodes have, the table comes back with what was
    written, which is all that was committed until `Disk.sync_seconds` before, and a restarted job goes on with it;
    without, it is empty, and the actor logs a warning. The actor reserves 0.001 CPU in Ray until the job
    ends; a separate server process answers workers on other nodes.

    The actor's handle has `stats`, `where` and `close` as remote methods; ``ray.get(replay.close.remote())`` removes
    the table, not its disk, and ``ray.kill(replay)`` ends the actor. Without `close` the table is removed with the
    actor's last handle, or when Ray ends on its node (a separate process waits for that). After ``ray.kill``, or if the
    job ends and the cluster goes on, the table stays in shared memory until Ray ends.
    """

    @staticmethod
    def options(**options: Any) -> _Options:
        """Options of the actor, as for any Ray actor's ``options``: ``name``, ``namespace``, ``lifetime``,
        ``scheduling_strategy``, ``get_if_exists`` and so on. Workers look for the ``name``. By default the actor has a
        placement group of its own, so that Ray restarts it on the same node while this exists: the table's memory is
        there. A strategy in its place should do so, too."""
        return _Options(options)

    @staticmethod
    def remote(schema: Mapping[str, Column], **options: Any) -> Any:
        """Start an actor without a name, which `gear_loader.connect` cannot find. Arguments as after `options`."""
        return _Options({}).remote(schema, **options)


class _Options:
    """What `Replay.options` returns."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def remote(self, schema: Mapping[str, Column], *, timeout: float = _START, **options: Any) -> Any:
        """Start the actor, and wait until it serves its table.

        Args:
            schema, options: of `Table.create`, except its `name` and `if_exists`. A `disk` that holds a table of this
                schema brings that table back, with its own sizes and rules.
            timeout: seconds to wait for the actor.

        Returns:
            The actor's handle.

        Raises:
            SchemaError: an invalid schema or option; TypeError: an unknown option; no actor was started.
            PeerTimeoutError: Ray did not start the actor in time. GearError: the actor failed; the message says why.
        """
        checked = _checked(schema, options)
        chosen = dict(self._options)
        if "scheduling_strategy" not in chosen:
            chosen["scheduling_strategy"] = _bundle(_group(1, chosen.get("lifetime"), timeout), 0)
        actor = _started(chosen, checked, options, timeout)
        _await([actor], timeout)
        return actor


class ReplayShards:
    """Named Ray actors that own a shard each, a table as that of a `Replay`, on the nodes of a Ray cluster.

    ``gear_loader.connect("ray://<name>")`` finds all of them and returns a `gear_loader.transport.RemoteShards`, and
    ``ray://<name>-0-of-4`` finds one. A placement group keeps each shard on its node as long as this exists; what
    happens if the actor or the node dies is written in `Replay`.

    Args:
        schema, options: as for `Replay`; the sizes are of each shard. Of a `disk` each shard has a folder.
        name, namespace, lifetime: of the actors, as for any Ray actor; ``"detached"`` ones outlive the job.
        num_shards: number of shards, or with ``placement="node"`` that of each node.
        placement: ``"SPREAD"``: Ray deals the shards to different nodes, as far as there are enough. ``"node"``: every
            node that there is now, and has a CPU for Ray, gets as many.
        timeout: seconds to wait for the actors.

    Attributes:
        shards: the actors' handles. name: as given.

    Raises:
        As ``Replay.options(...).remote``; no actor is left.
    """

    def __init__(
        self,
        schema: Mapping[str, Column],
        *,
        name: str = "replay",
        num_shards: int = 1,
        placement: Literal["SPREAD", "node"] = "SPREAD",
        namespace: str | None = None,
        lifetime: Literal["detached"] | None = None,
        timeout: float = _START,
        **options: Any,
    ) -> None:
        at_least("num_shards", num_shards)
        one_of("placement", placement, ("SPREAD", "node"))
        checked = _checked(schema, options)
        nodes = sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())
        bundles = nodes if placement == "node" else num_shards
        count = num_shards * bundles if placement == "node" else num_shards
        self.name = name
        self.shards: list[Any] = []
        self._group = _group(bundles, lifetime, timeout)
        try:
            for number in range(count):
                each = dict(options)
                if isinstance(disk := options.get("disk"), Disk):
                    path = os.path.join(disk.path, f"shard-{number}-of-{count}")
                    each["disk"] = dataclasses.replace(disk, path=path)
                actor = {"name": f"{name}-{number}-of-{count}", "namespace": namespace, "lifetime": lifetime}
                actor |= {"scheduling_strategy": self._bundle_of(number)}
                self.shards.append(_started(actor, checked, each, timeout))
            _await(self.shards, timeout)
        except BaseException:
            self._end()
            raise

    def _bundle_of(self, number: int) -> Any:
        """Where a shard is."""
        return _bundle(self._group, number % self._group.bundle_count)

    def _end(self) -> None:
        for shard in self.shards:
            ray.kill(shard)
        ray.util.remove_placement_group(self._group)

    def export(self, folder: str | os.PathLike[str], **options: Any) -> list[str]:
        """Write each shard as a Parquet file ``<shard>.parquet``, on the shards' nodes, as `Table.export` with these
        options; for ``ray.data.read_parquet(folder)``, for example.

        Args:
            folder: that all nodes have; it is made.

        Returns:
            The paths of the files.

        Raises:
            GearError: an export failed; the message says why.
        """
        root = os.path.abspath(os.fspath(folder))
        os.makedirs(root, exist_ok=True)
        places = [_ask(shard, "where", _START) for shard in self.shards]
        paths = [os.path.join(root, f"{place['name']}.parquet") for place in places]
        tasks = [
            _EXPORT.options(scheduling_strategy=self._bundle_of(number)).remote(place["name"], path, options)
            for number, (place, path) in enumerate(zip(places, paths, strict=True))
        ]
        try:
            ray.get(tasks)
        except ray.exceptions.RayError as error:
            raise GearError(f"An export failed: {' '.join(str(error).split())[-1000:]}") from error
        return paths

    def close(self) -> None:
        """Remove the tables, not their disks, and end the actors."""
        ray.get([shard.close.remote() for shard in self.shards])
        self._end()

    def __enter__(self) -> ReplayShards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ReplayShards {self.name!r} of {len(self.shards)} actors>"


def _checked(schema: Mapping[str, Column], options: dict[str, Any]) -> dict[str, Column]:
    """A valid schema; raises for options with which no table can be made."""
    checked = dict(Schema(schema))
    for name in ("name", "if_exists"):
        if name in options:
            raise TypeError(
                f"{name} was given; the actor's table has the actor's id as its name. Leave it out."
            )
    disk = options.get("disk")
    tier = {"disk": disk.tier()} if isinstance(disk, Disk) else {"disk": disk}
    with Table.create(checked, **{**options, **tier}):  # as private memory, which takes none
        pass
    return checked


def _export(name: str, path: str, options: dict[str, Any]) -> None:
    with Table.attach(name) as table:
        table.export(path, **options)


_EXPORT: Any = ray.remote(num_cpus=0)(_export)


def _group(bundles: int, lifetime: Any, timeout: float) -> Any:
    """A placement group. An actor in a bundle is restarted where the bundle is, which moves only if its node is lost;
    outside of one Ray restarts an actor that reserves nothing anywhere, whatever its strategy."""
    group = ray.util.placement_group([{"CPU": 0.001}] * bundles, strategy="SPREAD", lifetime=lifetime)
    if not group.wait(timeout):
        ray.util.remove_placement_group(group)
        raise PeerTimeoutError(f"Ray has had no room for {bundles} x 0.001 CPU for {timeout:g} s.")
    return group


def _bundle(group: Any, number: int) -> Any:
    return PlacementGroupSchedulingStrategy(group, number)


def _started(actor: dict[str, Any], schema: Any, options: dict[str, Any], timeout: float) -> Any:
    """The handle of an actor that is being started."""
    return _ACTOR.options(**actor).remote(schema, options, secrets.token_hex(32).encode(), timeout)


def _await(actors: list[Any], timeout: float) -> None:
    """Wait until actors serve their tables; kill them if one does not."""
    try:
        for actor in actors:
            _ask(actor, "where", timeout)
    except GearError:
        for actor in actors:
            ray.kill(actor)
        raise


def connect(
    url: str,
    *,
    attach: bool = True,
    timeout: float = 60.0,
    spool_bytes: int = 256 << 20,
    max_in_flight: int | None = None,
) -> Table | RemoteTable | RemoteShards:
    """The table of a named `Replay`, or those of `ReplayShards`; `gear_loader.connect` calls it for addresses that
    begin with ``ray://``.

    Args:
        url: ``ray://<actor>``, or ``ray://<actor>?namespace=<namespace>``.
        attach: whether to attach to shared memory if an actor is on this node; False always uses its server.
        timeout: seconds to wait for the actors, and for the calls of a `RemoteTable`, restarts of the actor included.
        spool_bytes, max_in_flight: of a `RemoteTable`.

    Returns:
        A `Table` on the actor's node, else a `RemoteTable`; of `ReplayShards` a `RemoteShards` of these.

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
    found = _find(name, namespace, timeout)
    actors = found if isinstance(found, dict) else {name: found}
    tables: list[Table | RemoteTable] = []
    try:
        for known, actor in actors.items():
            where = _ask(actor, "where", timeout)
            table: Table | RemoteTable | None = None
            if attach and where["node"] == ray.get_runtime_context().get_node_id():
                with contextlib.suppress(RegionError):  # of a container with shared memory of its own
                    table = Table.attach(where["name"])
            if table is None:
                peer = Peer(
                    _address(actor), secret=where["secret"], timeout=timeout, name=f"the Ray actor {known!r}"
                )
                table = RemoteTable(peer, where["name"], url, timeout, spool_bytes, max_in_flight)
            tables.append(table)
        return RemoteShards(tables, timeout=timeout) if isinstance(found, dict) else tables[0]
    except BaseException:
        for each in tables:
            each.close()
        raise


def _address(actor: Any) -> Callable[[], str]:
    """Asks an actor where its server is now."""

    def address() -> str:
        try:
            asked = actor.where.options(max_task_retries=0).remote()  # asked again by who connects
            return split_url(ray.get(asked, timeout=_ASK)["url"]).address
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayError) as error:
            raise ConnectionRefusedError(f"its Ray actor does not answer ({type(error).__name__})") from None

    return address


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
    """The actor's handle, or those of all shards by their names, as soon as they are there."""
    deadline = time.monotonic() + timeout
    while True:
        with contextlib.suppress(ValueError):
            return ray.get_actor(name, namespace=namespace)
        with contextlib.suppress(ValueError):
            if shards := _shards(name, namespace):
                return {each: ray.get_actor(each, namespace=namespace) for each in shards}
        if time.monotonic() > deadline:
            where = "" if namespace is None else f" in the namespace {namespace!r}"
            raise PeerTimeoutError(
                f"There is no Ray actor named {name!r}{where} after {timeout:g} s; expected one made by "
                f"gear_loader.integrations.ray.Replay.options(name={name!r}).remote(...), or shards made by "
                f"ReplayShards(..., name={name!r})."
            )
        time.sleep(_PAUSE)


def _shards(name: str, namespace: str | None) -> list[str]:
    """The names of all shards in their order; none while some are missing."""
    within = namespace or ray.get_runtime_context().namespace
    pattern = re.compile(re.escape(name) + r"-(\d+)-of-(\d+)")
    listed = ray.util.list_named_actors(all_namespaces=True)
    found = [pattern.fullmatch(each["name"]) for each in listed if each["namespace"] == within]
    numbers = sorted((int(each[1]), int(each[2]), each[0]) for each in found if each is not None)
    count = len(numbers)
    whole = [number[:2] for number in numbers] == [(number, count) for number in range(count)]
    return [known for *_, known in numbers] if whole else []


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
