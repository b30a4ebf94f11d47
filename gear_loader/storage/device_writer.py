"""The device writer: adds the streams of n environments whose values are on a GPU, without waiting for it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from gear_loader.errors import GearError, SchemaError
from gear_loader.storage.appender import here
from gear_loader.storage.block_sink import BlockSink
from gear_loader.storage.device_chunks import Chunks
from gear_loader.storage.device_images import writable
from gear_loader.storage.incoming import checked_priorities
from gear_loader.storage.schema import Column, as_mapping, settled
from gear_loader.utils.arrays import shown
from gear_loader.utils.captures import beside_captures, refuse_capture

if TYPE_CHECKING:
    from gear_loader.storage.copied_episodes import CopiedEpisodes
    from gear_loader.storage.device_episodes import Episodes
    from gear_loader.storage.engine import Engine


class DeviceWriter:
    """Adds the streams of n environments that are simulated on a GPU, without waiting for it.

    Created by ``Table.writers(n, device="cuda")``. Values are tensors on the device. Kernels write them into the table,
    in pinned host memory or on the GPU; a later call commits them, when they have arrived.

    **Episodes**: trajectories end where `done`, a mask on the device, says. Each step is written in place by one kernel
    on the current stream; it also reports which environments have ended, and the next call commits these, in the order
    of environments::

        with table.writers(4096, device="cuda") as writer:
            for _ in range(1000):
                action = policy(obs)
                next_obs, reward, done = simulator.step(action)       # tensors on the GPU
                writer.append(obs=obs, action=action, reward=reward, done=done, final={"obs": next_obs})
                obs = simulator.obs()

    Each environment has blocks for three trajectories at a time. A call waits for the GPU only if three steps are on
    their way, if a trajectory may have reached the largest length of the table, or if the table is full.

    **Chunks** of the same length, with ``chunk_steps=T``: they continue across the ends of episodes, and `done` is an
    ordinary column. Steps are kept on the device until a chunk is complete; then a kernel writes it on a side stream. A
    call waits only if it begins a third chunk before the first has arrived.

    If memory is not pinned (also on a coherent machine, which needs no pinning), the copy engine brings steps to the
    host, and the CPU stores them. ``device="cpu"`` works too; a `VectorWriter` is faster there. Use it in one thread.
    As a context manager it commits what is left at the end, or discards it if the block raises.

    Attributes:
        num_envs: number of environments. device: where their values are.
        chunk_steps: steps of a trajectory; None where `done` ends them.
    """

    def __init__(
        self,
        table: Engine,
        make_sink: Callable[[int], BlockSink],
        n: int,
        chunk_steps: int | None,
        device: torch.device,
    ) -> None:
        self._table, self._schema, self._pid = table, table.schema.added, here.pid
        if self._schema.per_trajectory:
            raise SchemaError(
                f"The columns {sorted(self._schema.per_trajectory)} have one value a trajectory, which a writer with "
                "device= cannot write; give them one for each step."
            )
        self.num_envs, self.chunk_steps, self.device = n, chunk_steps, device
        self._finals = [name for name, column in self._schema.steps.items() if column.final]
        self._cut: Chunks | Episodes | CopiedEpisodes
        if chunk_steps is not None:
            self._cut = Chunks(make_sink, n, chunk_steps, device)
        elif writable(table.region, device):
            from gear_loader.storage.device_episodes import Episodes

            self._cut = Episodes(make_sink, n, device)
        else:
            from gear_loader.storage.copied_episodes import CopiedEpisodes

            self._cut = CopiedEpisodes(make_sink, n, device)
        self._closed = False
        weakref.finalize(self, _drain, self._cut, here.pid)

    @property
    def num_steps(self) -> int:
        """Steps of the chunk that is being written; without chunks, steps whose ends of episodes are not known yet."""
        return self._cut.num_steps

    @property
    def committed(self) -> int:
        """Number of trajectories committed so far."""
        return self._cut.committed

    # ---------------------------------------------------------------- appending

    def append(
        self,
        rows: Mapping[str, torch.Tensor] | None = None,
        /,
        *,
        done: torch.Tensor | None = None,
        final: Mapping[str, torch.Tensor] | None = None,
        priority: Any = None,
        **columns: torch.Tensor,
    ) -> int:
        """Append one step of each environment.

        Does not wait for the GPU, except as the class says, but for room in a full table (see `on_full`). The values
        are read on the current stream.

        Args:
            rows, columns: ``[n, *shape]`` for every column, tensors on the device of exactly the column's dtype, as one
                mapping or as keywords. Columns called as one of the options are given in `rows`.
            done: bool [n] on the device: environments whose trajectory ends with this row; by default none. With
                `chunk_steps` it is a column, if there is one of this name.
            final: values after this step, ``{name: [n, *shape]}``, for each column with ``Column(final=True)``. Read of
                the environments that are done, or of the last step of a chunk: give it in every call, or in those.
            priority: of the trajectories that end with this call: one number, or [n], on the host.

        Returns:
            Number of trajectories that were committed. They have ended with an earlier call.

        Raises:
            SchemaError: something does not fit, or a trajectory might be longer than the table can hold. GpuError: the
                current stream is capturing a graph.
            TableFullError, RateLimitError, LockTimeoutError: as `Writer.append` and `Writer.commit`.

        After an error nothing was appended, and the call may be repeated. After any other exception (Ctrl-C) what is
        not committed is discarded.
        """
        if done is not None and self.chunk_steps is not None:
            columns["done"], done = done, None
        return self._extend(self._given(rows, columns), None, done, final, priority)

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
        if self.chunk_steps is None:
            raise SchemaError(
                "extend() needs a writer with chunk_steps; append the steps one by one, each with its done. Nothing "
                "was appended."
            )
        given = self._given(rows, columns)
        some = next(iter(given.values()), None)
        left = self.chunk_steps - self.num_steps
        count = some.shape[1] if isinstance(some, torch.Tensor) and some.ndim > 1 else 0
        if not 0 < count <= left:
            raise SchemaError(
                f"The rows have {count:,} steps; expected tensors [n, k, ...] with 1 to {left:,}, which are left of "
                f"the chunk of {self.chunk_steps:,}. Nothing was appended."
            )
        return self._extend(given, count, None, final, priority)

    @staticmethod
    def _given(rows: Any, columns: dict[str, Any]) -> dict[str, Any]:
        if rows is None:
            return dict(as_mapping(columns))
        found = as_mapping(rows)
        if not isinstance(found, Mapping):
            raise SchemaError(f"The rows are {shown(rows)}; expected a mapping. Nothing was appended.")
        return {**settled(found), **columns}

    def _extend(self, given: dict[str, Any], count: int | None, done: Any, final: Any, priority: Any) -> int:
        """Append one step, ``[n, *shape]``, or `count` of them, ``[n, count, *shape]``."""
        self._check_usable()
        refuse_capture(self.device, "DeviceWriter.append")
        leading = (self.num_envs,) if count is None else (self.num_envs, count)
        checked = self._checked("rows", given, dict(self._schema.steps), leading)
        steps = [checked]
        if count is not None:
            steps = [{name: value[:, i] for name, value in checked.items()} for i in range(count)]
        if done is not None:
            mask = {"done": Column(torch.bool)}
            done = self._checked("options", {"done": done}, mask, (self.num_envs,))["done"]
        last = None
        if final is not None and (not isinstance(self._cut, Chunks) or self._cut.ends(len(steps))):
            wanted = {name: self._schema[name] for name in self._finals}
            last = self._checked("final values", as_mapping(final), wanted, (self.num_envs,)) or None
        priorities = None if priority is None else checked_priorities(priority, self.num_envs)
        with self._closed_by_interrupts():
            before = self.committed
            self._cut.take()
            self._cut.put(steps, done, last, priorities)
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

    # ---------------------------------------------------------------- committing

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
            self._cut.finish()
        return self.committed - before

    @contextlib.contextmanager
    def _closed_by_interrupts(self) -> Iterator[None]:
        """Work beside captures; after an exception that is none of ours, discard what is not committed."""
        try:
            with beside_captures(self.device), self._table.region.using():
                yield
        except GearError:
            raise
        except (
            BaseException
        ):  # how far the call has come is not known: a kernel may have been queued just now
            if self.device.type == "cuda":
                with contextlib.suppress(RuntimeError), beside_captures(self.device):
                    torch.cuda.synchronize(self.device)
            self.close()
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
        self._cut.discard()

    def __repr__(self) -> str:
        cut = f"{self.num_steps:,} of {self.chunk_steps:,} steps of the running chunk"
        if self.chunk_steps is None:
            cut = f"{self.num_steps:,} steps on their way"
        return f"<DeviceWriter of {self.num_envs:,} environments on {self.device}: {cut}; to {self._table!r}>"

    def __enter__(self) -> DeviceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        self.close()


def _drain(cut: Chunks | Episodes | CopiedEpisodes, pid: int) -> None:
    # The blocks are reclaimed when this has returned, so no copy may be under way.
    if here.pid == pid:
        cut.wait()
