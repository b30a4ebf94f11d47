"""A storage back end of TransferQueue that keeps samples in a table: in shared memory, and on a disk.

::

    import gear_loader.integrations.transfer_queue          # makes the back end known, in the process that calls init
    import transfer_queue

    backend = {"storage_backend": "GearLoader", "GearLoader": {"memory": "64GiB", "path": "/disk/transfer_queue"}}
    transfer_queue.init(OmegaConf.create({"backend": backend}))

The entries of ``GearLoader`` are those of `BackendOptions`. Other processes need no import: the configuration that they
get from the controller brings it. Processes of the machine of the table, that of the process which calls `init` first,
read and write its memory themselves; those of other machines do so through its owner, an actor of Ray.

What was put, with its keys and tags, outlives any process; with `BackendOptions.path` the end of the job and of the
machine too: the next `init` tells the new controller of it. What a consumer has had already is known to the controller
alone, which forgets it: `transfer_queue.save_checkpoint` saves that.

Nothing is pickled: see `transfer_queue_fields.packed` for what a field can hold. Tested with TransferQueue 0.1.11.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gear_loader.errors import GearError, RegionError
from gear_loader.integrations.transfer_queue_fields import packed, values_of
from gear_loader.integrations.transfer_queue_owner import (
    BackendOptions,
    TableOwner,
    rows_of,
    this_machine,
)
from gear_loader.integrations.transfer_queue_restoring import restore
from gear_loader.integrations.transfer_queue_rows import Rows
from gear_loader.storage.table import Table

try:
    import ray
    import transfer_queue.storage
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    from tensordict import TensorDict
    from transfer_queue.metadata import extract_field_schema
    from transfer_queue.storage.bootstrap import StorageBootstrapProvider
    from transfer_queue.storage.clients.base import StorageClientFactory, StorageKVClient
    from transfer_queue.storage.managers.base import StorageManager, StorageManagerFactory
    from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
    from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType
except ImportError as error:
    raise ImportError(
        f"gear_loader.integrations.transfer_queue needs TransferQueue 0.1.11 or newer, which cannot be imported "
        f"({error}). Install it: pip install TransferQueue",
        name="transfer_queue",
    ) from error

__all__ = ["BackendOptions", "GearStorageClient", "GearStorageManager", "start"]

NAME = "GearLoader"
_NAMESPACE = "transfer_queue"
_INLINE = 1 << 20
"""Bytes up to which a copy is made in the event loop: handing it to a thread takes longer."""
_SECONDS = 30.0


class TableAddress:
    """Where the table of a TransferQueue is. It is part of the configuration that TransferQueue sends to its processes,
    so that they import this module, and with it the back end. (A dataclass would become a plain mapping there.)

    Attributes:
        table: its name in shared memory. actor: name of the owner, in the namespace ``transfer_queue``.
        machine: `this_machine` of the owner.
    """

    def __init__(self, table: str, actor: str, machine: str) -> None:
        self.table, self.actor, self.machine = table, actor, machine


class _Backend:
    """The rows of a table on this machine, or on another.

    Args:
        options: with an address.
    """

    def __init__(self, options: BackendOptions) -> None:
        address: TableAddress = options.address
        if not isinstance(address, TableAddress):
            raise GearError(
                f"backend.{NAME} has no address of a table; expected that gear_loader.integrations.transfer_queue was "
                "imported in the process that called transfer_queue.init first."
            )
        self._actor = address.actor
        self.local: Rows | None = None
        if address.machine == this_machine():
            try:
                self.local = Rows(Table.attach(address.table, timeout=options.timeout))
            except RegionError:  # another container of this machine
                self.local = None
        self._sync = options.sync

    @functools.cached_property
    def owner(self) -> Any:
        """The actor, which only some calls on its machine need."""
        return ray.get_actor(self._actor, namespace=_NAMESPACE)

    def put(self, rows: Any, fields: Mapping[str, Any], names: Sequence[bytes]) -> None:
        if self.local is None:
            ray.get(self.owner.put.remote(rows, dict(fields), names))
        else:
            self.local.put(rows, [values_of(name, value) for name, value in fields.items()], names)
        if self._sync:
            ray.get(self.owner.flush.remote())

    def get(self, rows: Any, names: Sequence[str]) -> dict[str, Any]:
        if self.local is not None:
            return self.local.get(rows, names)
        found: dict[str, Any] = ray.get(self.owner.get.remote(rows, names))
        return found

    def read_bytes(self, values: int) -> float:
        """About the bytes of so many values, by the last read; infinite if that is unknown."""
        return float("inf") if self.local is None else values * self.local.value_bytes

    def remove(self, rows: Any) -> None:
        if self.local is None:
            ray.get(self.owner.remove.remote(rows))
        else:
            self.local.remove(rows)

    def close(self) -> None:
        if self.local is not None:
            self.local.table.close()


@StorageManagerFactory.register(NAME)
class GearStorageManager(StorageManager):
    """Puts, gets and clears samples in a table; a process of TransferQueue has one.

    Args:
        controller_info, config, zmq_context: as TransferQueue gives them.

    Raises:
        SchemaError, GearError: an invalid configuration.
    """

    def __init__(self, controller_info: Any, config: Any, zmq_context: Any = None) -> None:
        self._store = _Backend(BackendOptions.of(config))
        super().__init__(controller_info, config, zmq_context=zmq_context)

    async def put_data(
        self, data: TensorDict, metadata: Any, data_parser: Callable[[Any], Any] | None = None
    ) -> None:
        """Store fields of samples, and tell the controller. When it returns they are in the table.

        Raises:
            SchemaError: an object that cannot be stored. TableFullError: the table is full. Nothing was stored.
        """
        count = metadata.size
        if not count:
            return
        if data.batch_size[0] != count:
            raise ValueError(f"data has {data.batch_size[0]} samples; expected {count}, as metadata has.")
        schema = extract_field_schema(data)
        fields = {str(name): data[name] for name in list(data.keys())}
        if data_parser is not None:
            fields = {name: _plain(value) for name, value in fields.items()}
            data_parser(fields)
        rows = rows_of(metadata.global_indexes)
        names = await self._names(metadata)
        size = sum(value.nbytes for value in fields.values() if hasattr(value, "nbytes"))
        await self._run(size, self._store.put, rows, fields, names)
        await self.notify_data_update(metadata.partition_ids[0], metadata.global_indexes, schema)

    async def _names(self, metadata: Any) -> list[bytes]:
        """What is stored with samples, so that a new controller can be told: partition, key and tag."""
        keys: dict[int, str | None] = {}
        for partition in dict.fromkeys(metadata.partition_ids):
            pairs = zip(metadata.global_indexes, metadata.partition_ids, strict=True)
            indexes = [index for index, each in pairs if each == partition]
            asked: Any = asyncio.run_coroutine_threadsafe(self._keys(partition, indexes), self._notify_loop)
            keys.update(zip(indexes, await asyncio.wrap_future(asked), strict=True))
        each = zip(metadata.global_indexes, metadata.partition_ids, metadata.custom_meta, strict=True)
        return [packed([partition, keys[index], tag], "tag") for index, partition, tag in each]

    async def _keys(self, partition: str, indexes: list[int]) -> list[str | None]:
        """The keys that users gave samples, None of those that have none."""
        request = ZMQMessage.create(
            request_type=ZMQRequestType.KV_RETRIEVE_KEYS,
            sender_id=self.storage_manager_id,
            receiver_id=self.controller_info.id,
            body={"global_indexes": indexes, "partition_id": partition},
        )
        async with self.notify_pool.alease(self.controller_info) as socket:
            try:
                await socket.send_multipart(request.serialize())
                answer = await asyncio.wait_for(socket.recv_multipart(copy=False), timeout=_SECONDS)
            except BaseException:
                socket.close(linger=0)  # a late answer must not be read as that to another question
                raise
        keys: list[str | None] = ZMQMessage.deserialize(answer).body.get("keys", [])
        return keys if len(keys) == len(indexes) else [None] * len(indexes)

    async def get_data(self, metadata: Any) -> TensorDict:
        """Copies of fields of samples.

        Raises:
            transfer_queue.StorageKeyNotFoundError: a sample does not have a field.
        """
        count, names = metadata.size, metadata.field_names
        if not count or not names:
            return TensorDict({}, batch_size=count)
        try:
            size = self._store.read_bytes(count * len(names))
            found = await self._run(size, self._store.get, rows_of(metadata.global_indexes), names)
        except KeyError as error:
            raise transfer_queue.storage.StorageKeyNotFoundError(
                f"The table has no {error.args[0]}."
            ) from None
        pack = AsyncSimpleStorageManager._pack_field_values
        fields = {name: pack(value) if isinstance(value, list) else value for name, value in found.items()}
        return TensorDict(fields, batch_size=count)

    async def clear_data(self, metadata: Any) -> None:
        """Remove samples with all of their fields."""
        if metadata.size:
            self._store.remove(rows_of(metadata.global_indexes))

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save all samples into a folder, see `Table.save`."""
        await self._store.owner.save.remote(checkpoint_dir)

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Put what `save_checkpoint` has saved in place of all samples."""
        await self._store.owner.load.remote(checkpoint_dir)

    @staticmethod
    async def _run(size: float, call: Callable[..., Any], *given: Any) -> Any:
        return call(*given) if size <= _INLINE else await asyncio.to_thread(call, *given)

    def close(self) -> None:
        """Detach from the table."""
        if hasattr(self, "_store"):
            self._store.close()
        super().close()


def _plain(value: Any) -> Any:
    """A column as a `data_parser` takes it: a tensor, or a list."""
    if hasattr(value, "unbind") and getattr(value, "is_nested", False):
        return list(value.unbind())
    return value.tolist() if type(value).__name__ in ("NonTensorStack", "NonTensorData") else value


@StorageClientFactory.register("GearStorageClient")
class GearStorageClient(StorageKVClient):
    """The same as a client of TransferQueue's `KVStorageManager`: keys are ``<global index>@<field>``.

    A new controller is not told of what was stored this way.

    Args:
        config: with the entries of `BackendOptions`, and ``client_name``.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(dict(config))
        self._store = _Backend(BackendOptions.of({k: v for k, v in config.items() if k != "client_name"}))

    def put(self, keys: list[str], values: list[Any]) -> None:
        """Store values."""
        samples: dict[int, dict[str, Any]] = {}
        for key, value in zip(keys, values, strict=True):
            row, name = _split(key)
            samples.setdefault(row, {})[name] = value
        alike: dict[tuple[str, ...], list[int]] = {}
        for row, fields in samples.items():
            alike.setdefault(tuple(fields), []).append(row)
        for names, rows in alike.items():
            columns = {name: [samples[row][name] for row in rows] for name in names}
            self._store.put(rows_of(rows), columns, [b""] * len(rows))

    def get(
        self, keys: list[str], shapes: Any = None, dtypes: Any = None, custom_backend_meta: Any = None
    ) -> list[Any]:
        """The values of keys.

        Raises:
            KeyError: there is none.
        """
        found: dict[str, Any] = {}
        fields: dict[str, list[int]] = {}
        for key in keys:
            row, name = _split(key)
            fields.setdefault(name, []).append(row)
        for name, rows in fields.items():
            column = self._store.get(rows_of(rows), [name])[name]
            values = column if isinstance(column, list) else column.unbind()
            found.update((f"{row}@{name}", value) for row, value in zip(rows, values, strict=True))
        return [found[key] for key in keys]

    def clear(self, keys: list[str], custom_backend_meta: Any = None) -> None:
        """Remove the samples of keys, with all of their fields."""
        self._store.remove(rows_of(sorted({_split(key)[0] for key in keys})))


def _split(key: str) -> tuple[int, str]:
    row, at, name = key.partition("@")
    if not at or not row.isdecimal():
        raise ValueError(f"key is {key!r}; expected <global index>@<field>, such as '17@input_ids'.")
    return int(row), name


@StorageBootstrapProvider.register_provider(NAME)
def start(conf: Any) -> dict[str, Any]:
    """Start the owner of the table on this node, and tell the controller of what is in the table.

    TransferQueue calls it, in the process that calls `transfer_queue.init` first.
    """
    options = BackendOptions.of(conf.backend.get(NAME))
    name = f"GearLoader-{options.name}"
    owner = _started(options, name)
    address = TableAddress(options.name, name, ray.get(owner.machine.remote()))
    conf.backend[NAME] = {**(conf.backend.get(NAME) or {}), "address": address}
    controller = ray.get_actor("TransferQueueController", namespace=_NAMESPACE)
    ray.get(controller.__ray_call__.remote(restore, ray.get(owner.samples.remote())))
    return {"owner": owner}


def _started(options: BackendOptions, name: str) -> Any:
    node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    made = ray.remote(TableOwner).options(
        name=name,
        namespace=_NAMESPACE,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=8,
        scheduling_strategy=node,
    )
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            return made.remote(options)
        except ValueError:  # that of a queue which was closed just now has not ended yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
