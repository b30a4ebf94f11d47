"""The tensors of updates of priorities that lie on a GPU, copied until the updates have run."""

from __future__ import annotations

import collections
from typing import Any

import torch

from gear_loader.errors import SchemaError
from gear_loader.utils.launch_graph import RepeatedWork

__all__ = ["Parts", "UpdateSlot", "UpdateSlots", "check_parts"]

_SLOTS = 4
"""Updates of a kind whose tensors are kept at a time: the consumer's stream waits for the last but three."""
_KINDS = 8
"""Numbers of rows, the last ones, for which slots are kept."""
_NAMES = ("index", "priority", "generation", "anchor")
_DTYPES = (torch.int64, torch.float32, torch.int64, torch.int64)

Parts = tuple[torch.Tensor | None, ...]
"""index, priority, generation and anchor of an update."""


class UpdateSlot:
    """Memory for the tensors of an update, which is used again.

    Attributes:
        parts: index, priority, generation and anchor: int64 [n], float32 [n] for priority; None for what is not given.
        items: int64 [n], the items that the update finds. work: its launches. done: recorded after them, on a GPU.
    """

    def __init__(self, like: Parts) -> None:
        self.parts: Parts = tuple(
            None if part is None else torch.empty(part.shape, dtype=kind, device=part.device)
            for part, kind in zip(like, _DTYPES, strict=True)
        )
        assert self.parts[0] is not None
        self.items = torch.empty_like(self.parts[0])
        self.work = RepeatedWork()
        self.done: Any = torch.cuda.Event() if self.items.is_cuda else None
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
        self.copy(parts)

    def copy(self, parts: Parts) -> None:
        """Copy an update's tensors on the current stream."""
        for kept, part in zip(self.parts, parts, strict=True):
            if kept is not None and part is not None:
                kept.copy_(_with_sign(part.detach()), non_blocking=True)


class UpdateSlots:
    """The slots of updates, by their number of rows and by which of their tensors are given."""

    def __init__(self) -> None:
        self._slots: collections.OrderedDict[tuple[object, ...], collections.deque[UpdateSlot]]
        self._slots = collections.OrderedDict()

    def take(self, parts: Parts) -> UpdateSlot:
        """The slot for an update's tensors, which `check_parts` has checked.

        New slots are allocated on the current stream, that of the consumer, which writes them first.
        """
        assert parts[0] is not None
        kind = len(parts[0]), *(part is None for part in parts)
        slots = self._slots.setdefault(kind, collections.deque())
        self._slots.move_to_end(kind)
        if len(self._slots) > _KINDS:
            self._slots.popitem(last=False)
        slot = UpdateSlot(parts) if len(slots) < _SLOTS else slots.popleft()
        slots.append(slot)
        return slot


def check_parts(parts: Parts) -> None:
    """Raise SchemaError for tensors of an update that have other shapes or dtypes."""
    index = parts[0]
    assert index is not None
    count = index.shape[0] if index.ndim == 1 else -1
    for name, part in zip(_NAMES, parts, strict=True):
        if part is None:
            continue
        number = not part.is_complex() and (
            name == "priority" or not (part.is_floating_point() or part.dtype == torch.bool)
        )
        if part.shape != (count,) or not number:
            kind = "numbers" if name == "priority" else "integers"
            raise SchemaError(
                f"{name} is {part.dtype} {list(part.shape)}; expected {kind} [{'n' if count < 0 else count}], as many "
                "as index has. Nothing was changed."
            )


def _with_sign(part: torch.Tensor) -> torch.Tensor:
    """A tensor whose values keep their sign when they become float32."""
    if part.dtype != torch.float64:
        return part
    narrow, tiny = part.float(), torch.finfo(torch.float32).tiny
    lost = (narrow == 0) & (part != 0)
    return torch.where(lost, torch.copysign(narrow.new_full((), tiny), part), narrow)
