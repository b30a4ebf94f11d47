"""The tensors of updates of priorities that lie on a GPU, copied until the updates have run."""

from __future__ import annotations

import torch

from gear_loader.errors import SchemaError
from gear_loader.utils.launch_graph import RepeatedWork

__all__ = ["Parts", "UpdateSlot", "UpdateSlots", "copied"]

_SLOTS = 4
"""Updates whose tensors are kept at a time: the consumer's stream waits for the last but three."""

Parts = tuple[torch.Tensor | None, ...]
"""index, priority, generation and anchor of an update."""


class UpdateSlot:
    """Memory for the tensors of an update, which is used again.

    Attributes:
        parts: index, priority, generation and anchor: int64 [n], float32 [n] for priority; None for what is not given.
        items: int64 [n], the items that the update finds. work: its launches. done: recorded after them.
    """

    def __init__(self, like: Parts) -> None:
        self.parts: Parts = tuple(None if part is None else torch.empty_like(part) for part in like)
        assert like[0] is not None
        self.items = torch.empty_like(like[0])
        self.work = RepeatedWork()
        self.done = torch.cuda.Event()
        self._streams: set[int] = set()

    def fill(self, parts: Parts, consumer: torch.cuda.Stream, stream: torch.cuda.Stream) -> None:
        """Queue copies of an update's tensors on the consumer's stream, the current one, for an update on `stream`.

        Does not wait for the GPU.
        """
        consumer.wait_event(self.done)
        for user in (consumer, stream):
            if user.cuda_stream not in self._streams:  # else the allocator does not know of it
                self._streams.add(user.cuda_stream)
                for kept in (self.items, *self.parts):
                    if kept is not None:
                        kept.record_stream(user)
        for kept, part in zip(self.parts, parts, strict=True):
            if kept is not None and part is not None:
                kept.copy_(part.detach(), non_blocking=True)


class UpdateSlots:
    """The slots of the updates that follow one another with as many rows."""

    def __init__(self) -> None:
        self._slots: list[UpdateSlot] = []
        self._next = 0

    def take(self, parts: Parts) -> UpdateSlot | None:
        """The slot for an update's tensors; None if these have to be converted, or checked by `copied`.

        New slots are allocated on the current stream, that of the consumer, which writes them first.
        """
        index = parts[0]
        for place, part in enumerate(parts):
            kind = torch.float32 if place == 1 else torch.int64
            if part is not None and (part.dtype != kind or index is None or part.shape != index.shape):
                return None
        if index is None or index.ndim != 1 or len(index) == 0:
            return None
        if self._slots and not _alike(self._slots[0].parts, parts):
            self._slots.clear()
            self._next = 0
        if len(self._slots) < _SLOTS:
            slot = UpdateSlot(parts)
            self._slots.append(slot)
            return slot
        slot = self._slots[self._next]
        self._next = (self._next + 1) % _SLOTS
        return slot


def _alike(kept: Parts, given: Parts) -> bool:
    return all(
        (one is None) == (other is None) and (one is None or other is None or one.shape == other.shape)
        for one, other in zip(kept, given, strict=True)
    )


def copied(
    index: torch.Tensor, priority: torch.Tensor, generation: torch.Tensor | None, anchor: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """Copies of an update's GPU tensors in the kernels' dtypes: int64 [n], and float32 [n] for `priority`.

    Raises:
        SchemaError: other shapes or dtypes.
    """
    count = index.shape[0] if index.ndim == 1 else -1
    parts: list[torch.Tensor | None] = []
    names = ("index", "priority", "generation", "anchor")
    for name, part in zip(names, (index, priority, generation, anchor), strict=True):
        if part is None:
            parts.append(None)
            continue
        integral = not (part.is_floating_point() or part.is_complex() or part.dtype == torch.bool)
        fits = part.shape == (count,) and (not part.is_complex() if name == "priority" else integral)
        if not fits:
            kind = "numbers" if name == "priority" else "integers"
            raise SchemaError(
                f"{name} is {part.dtype} {list(part.shape)}; expected {kind} [{'n' if count < 0 else count}], as many "
                "as index has. Nothing was changed."
            )
        part = part.detach()
        narrow = part.to(torch.float32 if name == "priority" else torch.int64, copy=True)
        if part.dtype == torch.float64:  # keep the sign of values that round to 0
            tiny = torch.finfo(torch.float32).tiny
            narrow = torch.where(
                (narrow == 0) & (part != 0), torch.copysign(narrow.new_full((), tiny), part), narrow
            )
        parts.append(narrow.float().contiguous() if name == "priority" else narrow.contiguous())
    return parts
