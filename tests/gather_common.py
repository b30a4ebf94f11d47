"""Trajectories in scattered blocks, outputs between guard bytes, and a naive account of what a gather must write."""

from __future__ import annotations

import dataclasses
import mmap
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import oracle
import torch

import gear_loader as gear
from gear_loader.collection.tier_rows import resolve
from gear_loader.kernels.plan import LINE, PAD_EDGE, PAD_HEAD, PAD_KEEP, PAD_TAIL, GatherColumn, GatherPlan

POISON = 77
"""What every byte of an output is before a gather."""

FOREIGN = 0xEE
"""Every byte of the blocks that belongs to no step of a trajectory; it must never come out of a gather."""

GUARD = 256
"""Bytes before and after each output."""

PADS = (PAD_KEEP, PAD_HEAD, PAD_TAIL, PAD_EDGE)
PAD_NAMES: tuple[Any, ...] = ("keep", "head", "tail", "edge")

STEP_BYTES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 44, 48, 64, 128, 132, 384, 1000)

Array = np.ndarray[Any, Any]
Memory = Callable[[int], torch.Tensor]
Gather = Callable[..., None]


def host_memory(size: int) -> torch.Tensor:
    """uint8 [size], whose address is a multiple of 128."""
    memory = torch.empty(size + LINE, dtype=torch.uint8)
    return memory[-memory.data_ptr() % LINE :][:size]


def pinned_memory(size: int) -> torch.Tensor:
    """`host_memory` that a GPU can read."""
    memory = torch.empty(size + LINE, dtype=torch.uint8, pin_memory=True)
    return memory[-memory.data_ptr() % LINE :][:size]


@dataclasses.dataclass(frozen=True)
class Spec:
    """One column of a batch; `shift` moves its output that many bytes away from an aligned address.

    With `final` the window reads the final steps that every other trajectory or so has.
    """

    step_bytes: int
    length: int
    offset: int = 0
    pad: int = PAD_KEEP
    mask: bool = True
    shift: int = 0
    final: bool = True


class Store:
    """Trajectories of random bytes, in blocks that are out of order and have others between them.

    Attributes:
        rows: for each column the trajectories themselves, uint8 [length, step_bytes], and their final steps.
        lengths, finals: steps of each trajectory, and its final steps, 0 or 1.
        sources, extent, block_ids: the same as a gather reads them.
    """

    def __init__(
        self,
        step_bytes: Sequence[int],
        lengths: Sequence[int],
        block_steps: int,
        *,
        seed: int = 0,
        spare_lines: int = 0,
        memory: Memory = host_memory,
        finals: bool = True,
    ) -> None:
        random = np.random.default_rng(seed)
        self.block_steps = block_steps
        self.lengths = list(lengths)
        self.finals = random.integers(0, 1 + finals, len(self.lengths)).tolist()
        count = [length + final for length, final in zip(self.lengths, self.finals, strict=True)]
        self.rows = [
            [random.integers(0, 256, (length, size), dtype=np.uint8) for length in count]
            for size in step_bytes
        ]
        blocks = [-(-length // block_steps) for length in count]
        num_blocks = self.num_blocks = sum(blocks) + 3
        order = random.permutation(num_blocks)[: sum(blocks)]  # three blocks belong to no trajectory

        # Block tables in random order, with a gap before each that names an unused block.
        unused = int(np.setdiff1d(np.arange(num_blocks), order)[0])
        ids: list[int] = []
        extent = np.zeros((len(lengths), 3), dtype=np.int64)
        taken = 0
        for slot in random.permutation(len(lengths)).tolist():
            ids.append(unused)
            extent[slot] = lengths[slot], len(ids), self.finals[slot]
            ids.extend(order[taken : taken + blocks[slot]].tolist())
            taken += blocks[slot]
        ids.append(unused)
        self.extent = _like(extent, memory)
        self.block_ids = _like(np.array(ids, dtype=np.int32), memory)

        self.sources = []
        for size, rows in zip(step_bytes, self.rows, strict=True):
            stride = -(-block_steps * size // LINE) * LINE + spare_lines * LINE
            source = memory(num_blocks * stride).view(num_blocks, stride)
            source.fill_(FOREIGN)
            for slot, row in enumerate(rows):
                first = int(extent[slot, 1])
                for i in range(blocks[slot]):
                    piece = torch.from_numpy(row[i * block_steps : (i + 1) * block_steps].reshape(-1))
                    source[ids[first + i], : len(piece)] = piece
            self.sources.append(source)

    def column(self, number: int, spec: Spec) -> Sequence[Array]:
        """The rows of a column that a window can read."""
        finals = self.finals if spec.final else [0] * len(self.lengths)
        return [
            row[: length + final]
            for row, length, final in zip(self.rows[number], self.lengths, finals, strict=True)
        ]

    def draw(self, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Random slots and anchors, first and last steps among them."""
        return _draw(range(len(self.lengths)), self.lengths, count, seed)

    def compact(
        self, specs: Sequence[Spec], slots: torch.Tensor, anchors: torch.Tensor, batch: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the collector hands to a GPU instead of slots and index: row numbers and the windows' own blocks."""
        first = min(spec.offset for spec in specs)
        last = max(spec.offset + spec.length - 1 for spec in specs)
        layout = types.SimpleNamespace(block_steps=self.block_steps, num_blocks=self.num_blocks)

        def check(bad: int) -> None:
            assert bad == 0

        engine = types.SimpleNamespace(
            region=types.SimpleNamespace(layout=layout),
            reader=lambda: types.SimpleNamespace(
                index_arrays=lambda: (self.extent.numpy(), self.block_ids.numpy()), check_gathered=check
            ),
        )
        stub: Any = types.SimpleNamespace(_engine=engine)
        extent = torch.full((len(slots), 3), -(2**40), dtype=torch.int64)
        ids = torch.full(
            (batch, (last - first) // self.block_steps + 2), int(self.block_ids[0]), dtype=torch.int32
        )
        resolve(stub, slots.numpy(), anchors.numpy(), (first, last), extent.numpy(), ids.numpy())
        return torch.arange(len(slots)), extent, ids.view(-1)


def _draw(
    slots: Sequence[int], lengths: Sequence[int], count: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(seed)
    chosen = random.integers(0, len(slots), count)
    last = np.array(lengths)[chosen] - 1
    anchors = np.choose(
        random.integers(0, 4, count), [np.zeros_like(last), last, *[random.integers(0, last + 1)] * 2]
    )
    return torch.from_numpy(np.array(slots)[chosen]), torch.from_numpy(anchors)


def _like(array: Array, memory: Memory) -> torch.Tensor:
    values = torch.from_numpy(array)
    copy = memory(array.nbytes).view(values.dtype).view(values.shape)
    return copy.copy_(values)


class Guarded:
    """An output between guard bytes.

    Attributes:
        whole: uint8, the output and what lies around it, poisoned. out: the output, uint8 of the shape given.
        expected: what the output must hold, uint8 of the same shape on the CPU; as it was made until it is written.
    """

    def __init__(
        self, shape: Sequence[int], *, shift: int = 0, fill: int = POISON, device: str = "cpu"
    ) -> None:
        inside = slice(GUARD + shift, GUARD + shift + int(np.prod(shape)))
        self.whole = torch.full((inside.stop + GUARD,), POISON, dtype=torch.uint8)
        self.whole[inside] = fill
        self._expected = self.whole.numpy().copy()
        self.expected = self._expected[inside].reshape(shape)
        self.whole = self.whole.to(device)
        self.out = self.whole[inside].view(*shape)

    def check(self, what: object = "output") -> None:
        """Compare every byte, those around the output too."""
        found = self.whole.cpu().numpy()
        if not np.array_equal(found, self._expected):
            different = np.flatnonzero(found != self._expected)
            first = int(different[0])
            raise AssertionError(
                f"{what}: {len(different)} bytes differ, the first at {first - GUARD}: {found[first]}, "
                f"expected {self._expected[first]}"
            )


class Outputs:
    """Poisoned outputs and masks between guard bytes."""

    def __init__(self, specs: Sequence[Spec], batch: int, *, mask: bool = False, device: str = "cpu") -> None:
        self.specs, self.batch = specs, batch
        self._outs = [Guarded((batch, s.length, s.step_bytes), shift=s.shift, device=device) for s in specs]
        self._masks = [
            Guarded((batch, s.length), fill=int(mask), device=device) if s.mask else None for s in specs
        ]
        self.outs = [each.out for each in self._outs]
        self.masks = [None if each is None else each.out.view(torch.bool) for each in self._masks]

    def plan(self, store: Store | HugeStore) -> GatherPlan:
        columns = [
            GatherColumn(source, out, spec.offset, spec.pad, mask, spec.final)
            for source, out, spec, mask in zip(store.sources, self.outs, self.specs, self.masks, strict=True)
        ]
        return GatherPlan(columns, store.block_steps)

    def check(self, expected: list[tuple[Array, Array]], rows: torch.Tensor | None = None) -> None:
        """Compare with what `windows_of` says, to the byte; rows that were not asked for and guards are untouched."""
        for spec, out, mask, (steps, exists) in zip(
            self.specs, self._outs, self._masks, expected, strict=True
        ):
            filled = slice(len(steps)) if rows is None else rows.numpy()
            out.expected[filled] = steps
            out.check(f"{spec}: steps")
            if mask is not None:
                mask.expected[filled] = exists
                mask.check(f"{spec}: mask")


def windows_of(
    rows: Sequence[Array] | Mapping[int, Array], spec: Spec, slots: torch.Tensor, anchors: torch.Tensor
) -> tuple[Array, Array]:
    """The windows by the oracle: uint8 [n, L, step_bytes] and bool [n, L]."""
    window = gear.Window(spec.length, spec.offset, PAD_NAMES[PADS.index(spec.pad)])
    pairs = [
        oracle.padded(window, anchor, rows[slot])
        for slot, anchor in zip(slots.tolist(), anchors.tolist(), strict=True)
    ]
    steps = np.array([values for values, _ in pairs], dtype=np.uint8)
    exists = np.array([mask for _, mask in pairs], dtype=bool)
    return steps.reshape(-1, spec.length, spec.step_bytes), exists.reshape(-1, spec.length)


def check_gather(
    gather: Gather,
    store: Store | HugeStore,
    specs: Sequence[Spec],
    slots: torch.Tensor,
    anchors: torch.Tensor,
    *,
    batch: int | None = None,
    mask: bool = False,
    compact: bool = False,
    device: str = "cpu",
    rows: torch.Tensor | None = None,
    **options: Any,
) -> GatherPlan:
    """Run a gather into poisoned outputs, into `rows` of them, and compare every byte; returns the plan."""
    batch = len(slots) if batch is None else batch
    outputs = Outputs(specs, batch, mask=mask, device=device)
    plan = outputs.plan(store)
    numbers, extent, ids = slots, store.extent, store.block_ids
    if compact:
        assert isinstance(store, Store)
        numbers, extent, ids = (part.to(device) for part in store.compact(specs, slots, anchors, batch))
    if rows is not None:
        options["rows"] = rows.to(device)
    gather(plan, numbers.to(device), anchors.to(device), extent, ids, **options)
    outputs.check(
        [windows_of(store.column(i, spec), spec, slots, anchors) for i, spec in enumerate(specs)], rows
    )
    return plan


def choose(count: int, batch: int, seed: int = 0) -> torch.Tensor:
    """Distinct rows of a batch, in random order."""
    return torch.from_numpy(np.random.default_rng(seed).permutation(batch)[:count])


def check_two_tables(gather: Gather, *, memory: Memory = host_memory, device: str = "cpu") -> None:
    """Fill a batch from two tables of other blocks and strides, each with its own rows, and compare every byte."""
    sizes, batch = (16, 12, 3), 11
    specs = [Spec(16, 9, -4), Spec(12, 30, -29, PAD_HEAD), Spec(3, 9, -4, PAD_TAIL, mask=False)]
    stores = [
        Store(sizes, [5, 40], 9, seed=1, memory=memory),
        Store(sizes, [1, 6, 77], 32, seed=2, spare_lines=2, memory=memory),
    ]
    outputs = Outputs(specs, batch, device=device)
    plans = [outputs.plan(store) for store in stores]
    order = choose(batch - 2, batch)
    expected: list[list[tuple[Array, Array]]] = []
    for store, each, rows in zip(stores, plans, order.split([5, 4]), strict=True):
        slots, anchors = store.draw(len(rows))
        given = [part.to(device) for part in (slots, anchors)]
        gather(each, *given, store.extent, store.block_ids, rows=rows.to(device))
        expected.append(
            [windows_of(store.column(i, spec), spec, slots, anchors) for i, spec in enumerate(specs)]
        )
    both = [
        tuple(np.concatenate(parts) for parts in zip(*pair, strict=True))
        for pair in zip(*expected, strict=True)
    ]
    outputs.check([(steps, exists) for steps, exists in both], order)


def reserve(size: int) -> Array:
    """uint8 [size] of address space: memory is taken only for the pages that are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=np.uint8)


class HugeStore:
    """Two trajectories in an address space where 32-bit arithmetic would go wrong, of which few pages are in use.

    Blocks lie up to 24 GiB (more than 2**32 words of 4 bytes) into a column, slots up to 2**30 into the extents,
    whose words number more than 2**31, and entries beyond 2**31 in the block tables.
    """

    SLOTS = (5, 2**30 + 3)

    rows: Sequence[Mapping[int, Array]]

    def __init__(self, step_bytes: Sequence[int], block_steps: int) -> None:
        random = np.random.default_rng(3)
        self.block_steps = block_steps
        self.lengths = lengths = (3 * block_steps - 1, 5 * block_steps)
        strides = [-(-block_steps * size // LINE) * LINE for size in step_bytes]
        self.rows = [
            {
                slot: random.integers(0, 256, (length, size), dtype=np.uint8)
                for slot, length in zip(self.SLOTS, lengths, strict=True)
            }
            for size in step_bytes
        ]
        extent = reserve(24 * (2**30 + 8)).view(np.int64).reshape(-1, 3)
        ids = reserve(4 * (2**31 + 64)).view(np.int32)
        smallest = min(strides)
        num_blocks = 24 * 2**30 // smallest
        spread = [2**31, 2**32, 2**33, 2**34, 24 * 2**30 - smallest]  # byte offsets in the narrowest column
        blocks = [spread[2] // smallest - 1, 0, spread[3] // smallest]
        blocks += [
            offset // smallest
            for offset in (spread[4], spread[0], spread[1] - smallest, spread[2], spread[1])
        ]
        starts = (2, 2**31 + 11)
        taken = 0
        for slot, length, start in zip(self.SLOTS, lengths, starts, strict=True):
            count = -(-length // block_steps)
            extent[slot] = length, start, 0
            ids[start : start + count] = blocks[taken : taken + count]
            taken += count
        self.extent, self.block_ids = torch.from_numpy(extent), torch.from_numpy(ids)
        self.sources = []
        for stride, rows in zip(strides, self.rows, strict=True):
            source = reserve(num_blocks * stride).reshape(num_blocks, stride)
            for slot in self.SLOTS:
                row, start = rows[slot], int(extent[slot, 1])
                for i in range(-(-len(row) // block_steps)):
                    piece = row[i * block_steps : (i + 1) * block_steps].reshape(-1)
                    source[ids[start + i], : len(piece)] = piece
            self.sources.append(torch.from_numpy(source))

    def column(self, number: int, spec: Spec) -> Mapping[int, Array]:
        return self.rows[number]

    def draw(self, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        return _draw(self.SLOTS, self.lengths, count, seed)
