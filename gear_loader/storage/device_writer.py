"""The device writer: adds the streams of n environments whose values are on a GPU, without waiting for it."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np
import torch

from gear_loader.errors import GearError, SchemaError
from gear_loader.kernels import reference
from gear_loader.kernels.special_priorities import UNSET
from gear_loader.native.lanes import LANE_STEPS
from gear_loader.storage.appender import Given, here
from gear_loader.storage.block_sink import BlockSink
from gear_loader.storage.incoming import checked_priorities
from gear_loader.storage.layout import LINE
from gear_loader.storage.region import Region
from gear_loader.storage.schema import Column, Schema, as_mapping, settled
from gear_loader.utils.arrays import Array, shown
from gear_loader.utils.captures import beside_captures, refuse_capture
from gear_loader.utils.streams import current_stream, on_stream, own_stream

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class _Image:
    """Images, on the device, of the blocks that hold a column, or several in records, of one chunk.

    Attributes:
        names: the columns. blocks: uint8 [n, K, bytes of a block].
    """

    def __init__(self, region: Region, names: list[str], n: int, steps: int, device: torch.device) -> None:
        layout = region.layout
        self.names, self._region, self._steps = names, region, layout.block_steps
        first = layout.columns[names[0]]
        count = -(-steps // layout.block_steps)
        self.blocks = torch.zeros((n, count, first.block_stride), dtype=torch.uint8, device=device)
        self._host: torch.Tensor | None = None
        self.columns: dict[str, torch.Tensor] = {}
        """Column -> its steps, [n, K, block_steps, *shape]; or as words of another dtype, [n, K, block_steps, W]: wide
        ones, and where a step does not begin on a multiple of its dtype's bytes."""
        for name in names:
            place, column = layout.columns[name], layout.schema[name]
            natural = column.dtype.itemsize
            word = math.gcd(8, place.step_bytes, place.step_stride, place.inside)
            whole = word % natural == 0 and place.step_bytes < LINE
            words = self.blocks.view(column.dtype if whole else _WORDS[word])
            word = natural if whole else word
            words = words[:, :, : layout.block_steps * place.step_stride // word]
            steps_of = words.unflatten(2, (layout.block_steps, place.step_stride // word))
            begin = place.inside // word
            found = steps_of[..., begin : begin + place.step_bytes // word]
            self.columns[name] = found.unflatten(3, column.shape or (1,)) if whole else found

    def last_bytes(self, steps: int) -> int:
        """Bytes of the last block that are used with so many steps."""
        place = self._region.layout.columns[self.names[0]]
        return int((steps - (self.blocks.shape[1] - 1) * self._steps) * place.step_stride)

    def target(self) -> torch.Tensor:
        """All blocks of the table, uint8 [N, bytes of a block]."""
        return torch.from_numpy(self._region.blocks(self.names[0]))

    def host(self) -> torch.Tensor:
        """Pinned memory for a copy of `blocks`."""
        if self._host is None:
            self._host = torch.empty(self.blocks.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._host


class _Chunk:
    """One chunk of all environments, from its first step until it is committed.

    Attributes:
        sink: holds the blocks that it gets. images: see `_Image`. steps: that were appended.
        blocks: int32 [n, K], in memory that the device reads. sent: whether copies into the table are queued.
        arrived: an event after them; None on the CPU. given: what its trajectories get.
    """

    def __init__(self, sink: BlockSink, images: list[_Image], device: torch.device) -> None:
        self.sink, self.images, self.given = sink, images, Given(len(sink.lanes))
        on_gpu = device.type == "cuda"
        shape = images[0].blocks.shape[:2]
        self.blocks = torch.empty(shape, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self.arrived = torch.cuda.Event() if on_gpu else None
        self.steps, self.sent, self.staged = 0, False, False
        self._places: dict[int, list[tuple[str, torch.Tensor]]] = {}
        self._size = sink.table.region.layout.block_steps

    def places(self, step: int) -> list[tuple[str, torch.Tensor]]:
        """Where a step of each column is written, [n, *shape], or [n, W] as words."""
        found = self._places.get(step)
        if found is None:
            block, inside = divmod(step, self._size)
            found = [
                (name, steps[:, block, inside])
                for image in self.images
                for name, steps in image.columns.items()
            ]
            self._places[step] = found
        return found

    def has_arrived(self) -> bool:
        """Whether all copies have been made. Does not wait."""
        return self.arrived is None or bool(self.arrived.query())

    def wait(self) -> None:
        """Wait for the copies that are queued."""
        if self.sent and self.arrived is not None and not self.has_arrived():
            self.arrived.synchronize()


class DeviceWriter:
    """Adds the streams of n environments that are simulated on a GPU, in chunks of the same length.

    Created by ``Table.writers(n, chunk_steps=T, device="cuda")``. Values stay on the device until a chunk is complete.
    Then a kernel writes it into the table's pinned memory, in whole lines, on a stream of its own, beside what the
    caller's stream does; and a later call commits it, when its bytes have arrived. So no call waits for the GPU, but
    one that begins a third chunk before the first has arrived, and `commit`::

        with table.writers(4096, chunk_steps=32, device="cuda") as writer:
            for _ in range(1000):
                action = policy(obs)
                next_obs, reward, done = simulator.step(action)       # tensors on the GPU
                writer.append(obs=obs, action=action, reward=reward, done=done, final={"obs": next_obs})
                obs = next_obs

    Ends of episodes are not known to the host: chunks go on through them, and `done` is a column. Where memory cannot
    be pinned, chunks are copied to the host by the copy engine and stored by the CPU. With ``device="cpu"`` it behaves
    in the same way; a `VectorWriter` is faster there. Two chunks of all environments are held, on the device and in the
    table. For one thread. As a context manager it commits what is left at the end, or discards it if the block raises.

    Attributes:
        num_envs: number of environments. device: where their values are. chunk_steps: steps of a trajectory.
        num_steps: steps of the chunk that is being written.
        committed: number of trajectories committed so far.
    """

    def __init__(
        self, make_sink: Callable[[], BlockSink], n: int, chunk_steps: int, device: torch.device
    ) -> None:
        sinks = [make_sink(), make_sink()]
        table = sinks[0].table
        self._table, self._schema, self._pid = table, sinks[0].schema, here.pid
        self.num_envs, self.chunk_steps, self.device = n, chunk_steps, device
        self._check_schema(self._schema)
        self._finals = [name for name, column in self._schema.steps.items() if column.final]
        held = chunk_steps + bool(self._finals)
        self._check_room(2 * n, held)
        region = table.region
        self._zero_copy = device.type == "cuda" and region.pin(device)
        homes: dict[int, list[str]] = {}
        for name in self._schema.steps:
            homes.setdefault(region.layout.columns[name].base, []).append(name)
        self._chunks = []
        for sink in sinks:
            sink.most = held
            images = [_Image(region, names, n, held, device) for names in homes.values()]
            self._chunks.append(_Chunk(sink, images, device))
        self._held = held
        self._stream = own_stream(device, 0, self) if device.type == "cuda" else None
        self._last: torch.cuda.Stream | None = None  # on which a step was appended last
        if self._stream is not None:
            self._last = current_stream(device)  # on which the images become zero
        self._everyone = np.arange(n)
        self._ending = np.ones(n, dtype=bool)
        self.committed = 0
        self._closed = False
        weakref.finalize(self, _drain, self._chunks, here.pid)

    def _check_schema(self, schema: Schema) -> None:
        if schema.per_trajectory:
            raise SchemaError(
                f"The columns {sorted(schema.per_trajectory)} have one value a trajectory, which a writer with device= "
                "cannot write; give them one for each step."
            )

    def _check_room(self, chunks: int, held: int) -> None:
        """Raise SchemaError unless the table has room for so many chunks."""
        layout = self._table.region.layout
        blocks = chunks * -(-held // layout.block_steps)
        if chunks > layout.max_trajectories or blocks > layout.num_blocks or chunks * held > layout.max_steps:
            raise SchemaError(
                f"{self.num_envs:,} environments with chunk_steps={self.chunk_steps:,} hold {chunks:,} trajectories, "
                f"{chunks * held:,} steps and {blocks:,} blocks at a time, two chunks each; the table has "
                f"{layout.max_trajectories:,}, {layout.max_steps:,} and {layout.num_blocks:,}. Create the table "
                "larger, or take shorter chunks."
            )

    # ---------------------------------------------------------------- appending

    @property
    def num_steps(self) -> int:
        """Steps of the chunk that is being written."""
        return 0 if self._chunks[0].sent else self._chunks[0].steps

    def append(
        self,
        rows: Mapping[str, torch.Tensor] | None = None,
        /,
        *,
        final: Mapping[str, torch.Tensor] | None = None,
        priority: Any = None,
        **columns: torch.Tensor,
    ) -> int:
        """Append one step of each environment.

        Does not wait for the GPU, but for a table without room (by its `on_full`), and where two chunks are on their
        way. The values are read on the current stream.

        Args:
            rows, columns: ``[n, *shape]`` for every column, tensors on the device of exactly the column's dtype, as one
                mapping or as keywords. Columns called ``final`` or ``priority`` are given in `rows`.
            final: values after this step, ``{name: [n, *shape]}``, for each column with ``Column(final=True)``. Read of
                the last step of a chunk only, which `chunk_steps` makes known: give it in every call, or in those.
            priority: of the trajectories that this call completes: one number, or [n], on the host.

        Returns:
            Number of trajectories that were committed: n or 0. They are of an earlier chunk.

        Raises:
            SchemaError: something does not fit. GpuError: the current stream is capturing a graph.
            TableFullError, RateLimitError, LockTimeoutError: as `Writer.append` and `Writer.commit`.

        After an error nothing was appended, and the call may be repeated. After any other exception (Ctrl-C) what is
        not committed is discarded.
        """
        return self._extend(self._given(rows, columns), 1, False, final, priority)

    def extend(
        self,
        rows: Mapping[str, torch.Tensor] | None = None,
        /,
        *,
        final: Mapping[str, torch.Tensor] | None = None,
        priority: Any = None,
        **columns: torch.Tensor,
    ) -> int:
        """Append k steps of each environment, at most those that are left of the chunk; else as `append`.

        Args:
            rows, columns: ``[n, k, *shape]`` for every column. final: ``[n, *shape]``, after the last of them.
        """
        given = self._given(rows, columns)
        some = next(iter(given.values()), None)
        left = self.chunk_steps - self.num_steps
        count = some.shape[1] if isinstance(some, torch.Tensor) and some.ndim > 1 else 0
        if not 0 < count <= left:
            raise SchemaError(
                f"The rows have {count:,} steps; expected tensors [n, k, ...] with 1 to {left:,}, which are left of "
                f"the chunk of {self.chunk_steps:,}. Nothing was appended."
            )
        return self._extend(given, count, True, final, priority)

    @staticmethod
    def _given(rows: Any, columns: dict[str, Any]) -> dict[str, Any]:
        if rows is None:
            return dict(as_mapping(columns))
        found = as_mapping(rows)
        if not isinstance(found, Mapping):
            raise SchemaError(f"The rows are {shown(rows)}; expected a mapping. Nothing was appended.")
        return {**settled(found), **columns}

    def _extend(self, given: dict[str, Any], count: int, several: bool, final: Any, priority: Any) -> int:
        self._check_usable()
        refuse_capture(self.device, "DeviceWriter.append")
        leading = (self.num_envs, count) if several else (self.num_envs,)
        checked = self._checked("rows", given, dict(self._schema.steps), leading)
        whole = self.num_steps + count == self.chunk_steps
        last = None
        if final is not None and whole:
            wanted = {name: self._schema[name] for name in self._finals}
            last = self._checked("final values", as_mapping(final), wanted, (self.num_envs,))
        priorities = None if priority is None else checked_priorities(priority, self.num_envs)
        with self._closed_by_interrupts():
            before = self.committed
            self._commit_arrived()
            self._put(checked, count, several)
            if whole:
                self._send(last, priorities)
            return self.committed - before

    def _checked(
        self, what: str, given: Any, wanted: dict[str, Column], leading: tuple[int, ...]
    ) -> dict[str, torch.Tensor]:
        """The values, detached; raises SchemaError."""
        if not isinstance(given, Mapping) or given.keys() != wanted.keys():
            names = sorted(given) if isinstance(given, Mapping) else shown(given)
            raise SchemaError(
                f"The {what} have the columns {names}; expected {sorted(wanted)}. Nothing was appended."
            )
        for name, column in wanted.items():
            value, shape = given[name], (*leading, *column.shape)
            if (
                not isinstance(value, torch.Tensor)
                or value.dtype != column.dtype
                or value.shape != shape
                or value.device != self.device
            ):
                got = (
                    f"{value.dtype} {list(value.shape)} on {value.device}"
                    if isinstance(value, torch.Tensor)
                    else shown(value)
                )
                raise SchemaError(
                    f"Column {name!r} of the {what} is {got}; expected a tensor of {column.dtype} {list(shape)} on "
                    f"{self.device}. Nothing was appended."
                )
        return {name: given[name].detach() for name in wanted}

    def _put(self, rows: Mapping[str, torch.Tensor], count: int, several: bool) -> None:
        """Copy checked steps behind those of the running chunk, on the current stream."""
        chunk = self._chunks[0]
        if chunk.steps == 0:
            self._begin(chunk)
        if self._stream is not None:
            stream = current_stream(self.device)
            assert self._last is not None
            if stream.cuda_stream != self._last.cuda_stream:
                stream.wait_stream(self._last)
                for image in (image for each in self._chunks for image in each.images):
                    image.blocks.record_stream(stream)  # the writer may be dropped before its copies are made
            self._last = stream
        for i in range(count):
            for name, place in chunk.places(chunk.steps + i):
                _copy(place, rows[name][:, i] if several else rows[name])
        chunk.steps += count

    def _begin(self, chunk: _Chunk) -> None:
        """Take blocks for a chunk, which has been committed."""
        blocks = chunk.sink.take_blocks(self._held)
        chunk.blocks.numpy()[...] = blocks[:, : chunk.blocks.shape[1]]

    def _send(self, last: Mapping[str, torch.Tensor] | None, priorities: Array | None) -> None:
        """Queue the copy of the running chunk into the table, and let the other one be the running one."""
        chunk = self._chunks[0]
        given = chunk.given
        given.last = None if last is None else {}
        given.priorities = (
            np.full(self.num_envs, UNSET, dtype=np.float32) if priorities is None else priorities
        )
        if last:
            for name, place in chunk.places(chunk.steps):
                if name in last:
                    _copy(place, last[name])
        if self._stream is not None:
            assert self._last is not None
            self._stream.wait_stream(self._last)
            with on_stream(self.device, self._stream):
                self._queue(chunk)
                assert chunk.arrived is not None
                chunk.arrived.record(self._stream)
        chunk.sent = True
        self._chunks.reverse()

    def _queue(self, chunk: _Chunk) -> None:
        """Queue what brings a chunk to the host, on the current stream."""
        for image in chunk.images:
            if self._zero_copy:
                from gear_loader.kernels.store import store

                store(image.blocks, image.target(), chunk.blocks, image.last_bytes(self._held))
            else:
                image.host().copy_(image.blocks, non_blocking=True)

    # ---------------------------------------------------------------- committing

    def _commit_arrived(self) -> None:
        """Commit chunks that have arrived, in order. The first is waited for: its memory is needed."""
        for chunk in self._chunks:
            if chunk.sent and (chunk is self._chunks[0] or chunk.has_arrived()):
                self._commit(chunk)

    def _commit(self, chunk: _Chunk) -> None:
        """Wait for a chunk that was sent, and commit it."""
        chunk.wait()
        lanes = chunk.sink.lanes
        if not chunk.staged:
            if not self._zero_copy:
                for image in chunk.images:
                    blocks = image.blocks if self._stream is None else image.host()
                    reference.store(blocks, image.target(), chunk.blocks, image.last_bytes(self._held))
            lanes[:, LANE_STEPS] = chunk.steps
            chunk.staged = True
        left = np.flatnonzero(lanes[:, LANE_STEPS])
        try:
            chunk.sink.commit_blocks(left, self._ending, chunk.given)
        finally:
            self.committed += len(left) - int(np.count_nonzero(lanes[:, LANE_STEPS]))
        chunk.sent = chunk.staged = False
        chunk.steps = 0

    def commit(self) -> int:
        """Commit all steps; the next ones begin other trajectories. Waits for the GPU.

        Returns:
            Number of trajectories that were committed.

        Raises:
            RateLimitError, LockTimeoutError: as `Writer.commit`; the call may be repeated.
        """
        self._check_usable()
        before = self.committed
        with self._closed_by_interrupts():
            if self.num_steps:
                self._send(None, None)
            for chunk in self._chunks:
                if chunk.sent:
                    self._commit(chunk)
        return self.committed - before

    @contextlib.contextmanager
    def _closed_by_interrupts(self) -> Iterator[None]:
        """Work beside captures; after an exception that is none of ours, discard what is not committed."""
        try:
            with beside_captures(self.device):
                yield
        except GearError:
            raise
        except BaseException:
            self.close()  # how far the call has come is not known
            raise

    def _check_usable(self) -> None:
        if here.pid != self._pid:
            raise GearError(
                f"A device writer of process {self._pid} was used in process {here.pid}; a forked child has no GPU. "
                "Make one in each process that has."
            )
        if self._closed:
            raise GearError(
                "The device writer is closed; make another one with table.writers(n, device=...)."
            )
        self._table.check_open()

    def close(self) -> None:
        """Discard what is not committed; idempotent. Waits for copies that are under way."""
        if here.pid != self._pid or self._closed:
            return
        self._closed = True
        for chunk in self._chunks:
            chunk.wait()
            chunk.sink.abort(self._everyone)

    def __repr__(self) -> str:
        return (
            f"<DeviceWriter of {self.num_envs:,} environments on {self.device}: {self.num_steps:,} of "
            f"{self.chunk_steps:,} steps of the running chunk; to {self._table!r}>"
        )

    def __enter__(self) -> DeviceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        self.close()


def _drain(chunks: list[_Chunk], pid: int) -> None:
    # The blocks are reclaimed when this has returned, so no copy may be under way.
    if here.pid == pid:
        for chunk in chunks:
            chunk.wait()


def _copy(place: torch.Tensor, values: torch.Tensor) -> None:
    """Copy one step of a column, [n, *shape], to its place, on the current stream."""
    if place.dtype != values.dtype or place.shape != (values.shape or (1,)):
        values = values.reshape(len(values), -1)
        # A view as wider words begins on one of them, and has them side by side: one value of a slice has any stride.
        odd = values.storage_offset() * values.element_size() % place.dtype.itemsize
        if odd or not values.is_contiguous() or values.stride(1) != 1:
            values = values.clone(memory_format=torch.contiguous_format)
        values = values.view(place.dtype).view(place.shape)
    place.copy_(values)
