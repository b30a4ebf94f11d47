"""The tensors of one batch: where they lie, what the host writes into them, and what a GPU needs beside them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.collection.batches import Batch
from gear_loader.collection.references import Arena, BatchReferences
from gear_loader.kernels.plan import LINE
from gear_loader.storage.inline import InlineBatch
from gear_loader.storage.queued import QueuedBatch
from gear_loader.utils.arrays import Array
from gear_loader.utils.launch_graph import RepeatedWork
from gear_loader.utils.packing import Layout, packed_views

COUNTS, NUMBERS = ("times_sampled", "age"), ("probability", "age_seconds")  # keys of ``sample_info``


def grown(count: int) -> int:
    """The next power of two, so that memory grows seldom."""
    return 1 << max(count - 1, 0).bit_length()


# ---------------------------------------------------------------- memory


@dataclasses.dataclass
class TensorMemory:
    """Allocates the tensors of a batch.

    Attributes:
        device: of the tensors.
        shared: whether they lie in shared memory, so that they are sent to another process without a copy; or what
            allocates them there, of a shape and a dtype.
        pinned: whether they lie in pinned memory, from which a GPU gets copies.
        arena: of small tensors that share allocations; None for one each.
    """

    device: torch.device
    shared: Any = False
    pinned: bool = False
    arena: Arena | None = None

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor."""
        if self.arena is not None and (small := self.arena.empty(shape, dtype)) is not None:
            return small
        if self.shared and self.shared is not True:
            made: torch.Tensor = self.shared.empty(shape, dtype)
            return made
        tensor = torch.empty(shape, dtype=dtype, device=self.device, pin_memory=self.pinned)
        return tensor.share_memory_() if self.shared else tensor

    def mirrored(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory that the host writes, zeros, pinned for a GPU; and memory on the device for its copy; uint8 [size]."""
        host = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=self.device.type == "cuda")
        return host, torch.empty(size, dtype=torch.uint8, device=self.device)


class Staging:
    """A pool of uint8 tensors, from a multiple of 128 bytes on, that hold rows on their way into a batch; thread-safe.

    Args:
        pinned: whether they lie in pinned memory, which a GPU can read.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> torch.Tensor:
        """Take a tensor of at least `size` bytes out of the pool."""
        with self._lock:
            for i, tensor in enumerate(self._free):
                if len(tensor) >= size:
                    return self._free.pop(i)
            if self._free:  # they are too small by now
                self._free.pop()
        total = grown(size + LINE)
        memory = torch.empty(total, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        first = -memory.data_ptr() % LINE
        return memory[first : first + total - LINE]

    def give(self, tensor: torch.Tensor) -> None:
        """Return a tensor that is no longer read or written."""
        with self._lock:
            self._free.append(tensor)


@dataclasses.dataclass
class Part:
    """Rows of a padded batch in staging memory, as `PlacePlan` has them.

    Attributes:
        rows: row of the batch of each, int64 [n], as they were asked for. memory: uint8.
    """

    rows: Array
    memory: torch.Tensor


@dataclasses.dataclass
class SpanPart(Part):
    """Pieces of rows of a packed batch in staging memory: column by column the steps of one piece after another.

    Attributes:
        firsts, counts: first step in the trajectory, and steps, of each piece, int64 [n].
        inside: steps of its row before it, int64 [n].
        offsets: column -> first byte, a multiple of 128.
    """

    firsts: Array
    counts: Array
    inside: Array
    offsets: Mapping[str, int]

    def placed(self, numbers: Array) -> tuple[Array, Array, Array]:
        """The pieces that are in the batch, int64 [m]; the numbers of their rows; their first steps in the memory.

        Args:
            numbers: number in the batch of each row that was asked for, int64 [n]; -1 for those that are not there.
        """
        rows = numbers[self.rows]
        which = np.flatnonzero(rows >= 0)
        return which, rows[which], (np.cumsum(self.counts) - self.counts)[which]


# ---------------------------------------------------------------- what the host writes of the rows


@dataclasses.dataclass
class RowValues:
    """Keys, weights and ``sample_info`` of a batch's rows, where the host writes them.

    Attributes:
        names: values of the row keys, int64 [K, B], or [B] each. weights: float32 [B], or None.
        counts, numbers: int64 and float32 [2, B], or None.
    """

    names: Any
    weights: Array | None
    counts: Array | None
    numbers: Array | None

    @staticmethod
    def layouts(count: int, *, weighs: bool, informs: bool) -> dict[str, Layout]:
        """Shapes and dtypes of what there may be beside the names."""
        parts: dict[str, Layout] = {"weights": ((count,), torch.float32)} if weighs else {}
        if informs:
            parts["counts"], parts["numbers"] = ((2, count), torch.int64), ((2, count), torch.float32)
        return parts

    @classmethod
    def of(cls, names: Iterable[torch.Tensor] | Array, host: Mapping[str, torch.Tensor]) -> RowValues:
        """Make it of tensors that the host writes: the names, int64 [B] each, and others by the names of `layouts`."""
        arrays: Any = names if isinstance(names, np.ndarray) else [each.numpy() for each in names]
        more = (host[key].numpy() if key in host else None for key in ("weights", "counts", "numbers"))
        return cls(arrays, *more)

    def write(self, rows: Any) -> None:
        """Write the values of `SelectedRows`, or of others like them."""
        count = len(rows)
        for place, values in zip(self.names, rows.names, strict=True):
            place[:count] = values
        self.write_more(rows)

    def write_more(self, rows: Any) -> None:
        """`write` without the names."""
        count = len(rows)
        if self.weights is not None and (weights := rows.weights) is not None:
            self.weights[:count] = weights
        if rows.counts is not None and self.counts is not None and self.numbers is not None:
            self.counts[:, :count], self.numbers[:, :count] = rows.counts, rows.numbers


def shown_values(
    keys: Sequence[str], names: Iterable[torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """What a batch has of such tensors, which are on its device; see `RowValues.of`."""
    shown: dict[str, Any] = dict(zip(keys, names, strict=True))
    if "weights" in tensors:
        shown["priority_weight"] = tensors["weights"]
    if "counts" in tensors:
        info = zip(COUNTS + NUMBERS, (*tensors["counts"], *tensors["numbers"]), strict=True)
        shown["sample_info"] = dict(info)
    return shown


# ---------------------------------------------------------------- buffers


@dataclasses.dataclass
class GpuSide:
    """What buffers on a GPU have beside their tensors.

    Attributes:
        filled: event recorded when the batch is complete. The host that waits for it sleeps instead of spinning.
        released: event recorded when its last user has finished.
        staging: a batch in pinned memory, gathered on the CPU; None if the GPU reads the tables itself.
        consumers: streams that have used the batch.
        copy: the copy of the batch to deliver instead, if any.
        work: of whole batches. parts: staging memory that the GPU may still read.
    """

    filled: torch.cuda.Event = dataclasses.field(default_factory=lambda: torch.cuda.Event(blocking=True))
    released: torch.cuda.Event = dataclasses.field(default_factory=lambda: torch.cuda.Event())
    staging: Any = None
    consumers: set[int] = dataclasses.field(default_factory=set)
    copy: Batch | None = None
    work: RepeatedWork = dataclasses.field(default_factory=RepeatedWork)
    parts: list[torch.Tensor] = dataclasses.field(default_factory=list)


class Buffers:
    """The tensors of one batch; each layout has its own.

    Attributes:
        batch: name -> tensor of all its memory.
        mover: what fills them.
        gpu: what there is beside the tensors on a GPU; else None.
        inline: places of a batch that the CPU draws and gathers in one call; None if it cannot.
        computed: n-step returns and converted windows to compute after such a gather; else empty.
        references: the references to the tensors, since the first `lend`; to be reset to None by whatever makes another
            reference that lasts as long as the buffers.
        ragged: what is delivered in place of records, of the batch that was gathered last.
    """

    batch: Batch
    mover: Any
    gpu: GpuSide | None = None
    inline: InlineBatch | None = None
    computed: tuple[Any, ...] = ()
    references: BatchReferences | None = None
    ragged: Mapping[str, Any] = {}

    def compute(self, count: int) -> None:
        """Compute what the first `count` rows have beside gathered windows. Does not wait for a GPU."""

    def rows(self, count: int) -> Batch:
        """The batch of `count` rows that was gathered last; views of the buffers."""
        raise NotImplementedError

    def lend(self, count: int) -> Batch:
        """`rows` as new tensors, whose references `references` finds."""
        if self.references is None:
            self.references = BatchReferences(self.batch)
        return self.rows(count)

    def some(self, count: int, names: Iterable[str]) -> Mapping[str, torch.Tensor]:
        """The windows of these names of the batch of `count` rows that was gathered last; views of the buffers."""
        shown = self.rows(count)
        return {name: shown[name] for name in names}

    def names_on_host(self, count: int) -> tuple[Array, ...] | None:
        """`ROW_KEYS` of the `count` rows that were gathered last, int64 [count] each; None if only a GPU has them."""
        return None

    def queued(self, stream: torch.cuda.Stream) -> QueuedBatch | None:
        """A whole batch that a compiled call draws, and queues on `stream`; None if it cannot, or not yet."""
        return None

    def was_queued(self) -> None:
        """Take over what that call has found out about the batch, which it has queued."""

    def follow(self, staged: Any, count: int) -> None:
        """Make room for the batch of `count` rows that other buffers of this layout hold."""


def named_views(memory: torch.Tensor, parts: Mapping[str, Layout]) -> dict[str, torch.Tensor]:
    """Tensors by name in one piece of memory; see `packed_views`."""
    return dict(zip(parts, packed_views(memory, list(parts.values())), strict=True))


def clone_batch(batch: Batch) -> Batch:
    """A copy of a batch in new memory; aliased tensors stay aliased. Does not wait for a GPU."""
    clones: dict[int, torch.Tensor] = {}

    def clone(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clone(part) for key, part in value.items()}
        if not isinstance(value, torch.Tensor):  # `max_seqlen`
            return value
        if id(value) not in clones:
            clones[id(value)] = value.clone()
        return clones[id(value)]

    return Batch({key: clone(value) for key, value in batch.items()})


def copy_batch(target: Mapping[str, Any], source: Mapping[str, Any]) -> None:
    """Copy all tensors of a batch. Does not wait for a GPU."""
    for key, value in source.items():
        if isinstance(value, dict):
            copy_batch(target[key], value)
        elif isinstance(value, torch.Tensor):
            target[key].copy_(value, non_blocking=True)
