"""The compiled loops of the CPU path against the definition of a window, and the path without them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gather_common import (
    FOREIGN,
    GUARD,
    PADS,
    POISON,
    STEP_BYTES,
    HugeStore,
    Outputs,
    Spec,
    Store,
    check_gather,
    check_two_tables,
    choose,
    host_memory,
)

from gear_loader.kernels import reference
from gear_loader.kernels.plan import LINE, GatherPlan
from gear_loader.native import copying
from gear_loader.native import threads as crew

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")


def gather(
    plan: GatherPlan,
    slots: torch.Tensor,
    anchors: torch.Tensor,
    extent: torch.Tensor,
    block_ids: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    parts: int = 1,
) -> None:
    """The compiled loop with the signature of the kernels, the rows in so many parts."""
    count = plan.check_rows(slots, anchors, rows)
    chosen = None if rows is None else rows.numpy()
    given = (
        plan.table.numpy(),
        slots.numpy(),
        anchors.numpy(),
        extent.numpy(),
        block_ids.numpy(),
        plan.block_steps,
    )
    for i in range(parts):
        copying.gather(*given, count * i // parts, count * (i + 1) // parts, chosen)


def crewed(
    plan: GatherPlan,
    slots: torch.Tensor,
    anchors: torch.Tensor,
    extent: torch.Tensor,
    block_ids: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    row_bytes: int = 1 << 20,
) -> None:
    """The same by a crew of three; `row_bytes` decides in how many chunks."""
    plan.check_rows(slots, anchors, rows)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        crew.gather(
            plan.table.numpy(),
            slots.numpy(),
            anchors.numpy(),
            extent.numpy(),
            block_ids.numpy(),
            plan.block_steps,
            row_bytes,
            None if rows is None else rows.numpy(),
        )
    finally:
        torch.set_num_threads(threads)


# Gather ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 5, 20, 63, 130])
@pytest.mark.parametrize("block_steps", [1, 7, 20, 32, 64, 100])
def test_shapes(block_steps: int, length: int) -> None:
    """Every step size with every block size, length of window, padding, and place of the window, in one call each."""
    lengths = sorted({1, max(block_steps - 1, 1), block_steps, block_steps + 1, 3 * block_steps + 2, 150})
    store = Store(STEP_BYTES, lengths, block_steps, seed=length)
    offsets = (-length - 300, 1 - length, -length // 2, 0, 2, 300)
    for case, pad in enumerate(PADS):
        slots, anchors = store.draw(4, seed=case)
        specs = [
            Spec(size, length, offsets[(i + case) % len(offsets)], pad, mask=(i + case) % 3 > 0, shift=i % 5)
            for i, size in enumerate(STEP_BYTES)
        ]
        check_gather(gather, store, specs, slots, anchors, batch=5, mask=bool(case % 2))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Store, list[Spec], int, int, int]:
    sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    store = Store(
        sizes,
        draw(st.lists(st.integers(1, 200), min_size=1, max_size=6)),
        draw(st.integers(1, 110)),
        seed=draw(st.integers(0, 999)),
        spare_lines=draw(st.integers(0, 1)),
    )
    specs = [
        Spec(
            size,
            draw(st.integers(1, 140)),
            draw(st.integers(-230, 230)),
            draw(st.sampled_from(PADS)),
            draw(st.booleans()),
            draw(st.integers(0, 70)),
        )
        for size in sizes
    ]
    count = draw(st.integers(0, 12))
    return store, specs, count, count + draw(st.integers(0, 3)), draw(st.integers(0, 999))


@hypothesis.given(cases(), st.booleans(), st.integers(1, 4), st.booleans())
def test_random_shapes(case: tuple[Any, ...], mask: bool, parts: int, chosen: bool) -> None:
    store, specs, count, batch, seed = case
    slots, anchors = store.draw(count, seed)
    options: dict[str, Any] = {"batch": batch, "mask": mask}
    options["rows"] = choose(count, batch, seed) if chosen else None
    check_gather(gather, store, specs, slots, anchors, parts=parts, **options)
    check_gather(reference.gather, store, specs, slots, anchors, **options)


@hypothesis.given(cases(), st.sampled_from([1, 1 << 14, 1 << 17, 1 << 20, 1 << 24]), st.booleans())
def test_random_shapes_by_a_crew(case: tuple[Any, ...], row_bytes: int, chosen: bool) -> None:
    store, specs, count, batch, seed = case
    slots, anchors = store.draw(count, seed)
    rows = choose(count, batch, seed) if chosen else None
    check_gather(crewed, store, specs, slots, anchors, batch=batch, row_bytes=row_bytes, rows=rows)


@pytest.mark.parametrize("run", [gather, crewed], ids=["one thread", "a crew"])
def test_a_batch_from_two_tables(run: Any) -> None:
    check_two_tables(run)


def test_far_windows() -> None:
    store = Store([4, 4], [40, 3], 7)
    slots, anchors = torch.tensor([0, 1, 0]), torch.tensor([2**31 + 5, -(2**31) - 8, 2**33])
    for pad in PADS:
        specs = [Spec(4, 9, offset, pad) for offset in (-(2**31) + 1, 2**31 - 1)]
        check_gather(gather, store, specs, slots, anchors)


def test_an_address_space_of_more_than_2_31_words() -> None:
    store = HugeStore((48, 96), 21)
    slots, anchors = store.draw(6)
    specs = [Spec(48, 50, -10), Spec(96, 50, -40)]
    check_gather(gather, store, specs, slots, anchors)


@pytest.mark.parametrize("shift", [0, 1, 63])
@pytest.mark.parametrize("step_bytes", [1000, 1024, 4100])
def test_large_pieces(step_bytes: int, shift: int) -> None:
    # Pieces of a page and more, that begin anywhere in a line.
    store = Store([step_bytes], [1, 2, 40], 4)
    slots, anchors = store.draw(6)
    for length in (1, 2, 3, 9):
        spec = Spec(step_bytes, length, -1, shift=shift)
        check_gather(gather, store, [spec], slots, anchors)


# Scatter ---------------------------------------------------------------------------------------------


@hypothesis.given(
    length=st.integers(1, 200),
    block_steps=st.integers(1, 70),
    step_bytes=st.integers(1, 200),
    spare=st.integers(0, 2),
    shift=st.integers(0, 8),
    seed=st.integers(0, 99),
)
def test_scatter(length: int, block_steps: int, step_bytes: int, spare: int, shift: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = np.array([length, 1, length // 2 + 1], dtype=np.int64)
    sizes = (step_bytes, 1)  # bytes of a step of each column
    used = -(-lengths // block_steps)
    ids = random.permutation(used.sum() + 2)[: used.sum()].astype(np.int32)
    columns, memories, sources = [], [], []
    for size in sizes:
        stride = -(-block_steps * size // LINE) * LINE + spare * LINE
        memory = host_memory((used.sum() + 2) * stride + 2 * GUARD).fill_(FOREIGN).numpy()
        columns.append((memory[GUARD:].ctypes.data, stride, size))
        memories.append(memory)
        sources.append([random.integers(0, 256, shift + n * size, dtype=np.uint8)[shift:] for n in lengths])
    addresses = np.array([[part[i].ctypes.data for part in sources] for i in range(3)], dtype=np.int64)
    copying.scatter(np.array(columns, dtype=np.int64), block_steps, ids, addresses, lengths)
    for (_, stride, size), memory, parts in zip(columns, memories, sources, strict=True):
        expected = np.full_like(memory, FOREIGN)
        block = iter(ids.tolist())
        for part in parts:
            for first in range(0, len(part), block_steps * size):
                piece = part[first : first + block_steps * size]
                start = GUARD + next(block) * stride
                expected[start : start + len(piece)] = piece
        assert np.array_equal(memory, expected)


def test_scatter_beyond_2_31_bytes() -> None:
    store = HugeStore((96,), 21)
    source = store.sources[0]
    row = store.rows[0][HugeStore.SLOTS[0]]
    start = int(store.extent[HugeStore.SLOTS[0], 1])
    ids = store.block_ids[start : start + 3].numpy()
    assert (ids.astype(np.int64) * source.stride(0) > 2**31).sum() >= 2
    new = np.ascontiguousarray(~row)
    columns = np.array([(source.data_ptr(), source.stride(0), 96)], dtype=np.int64)
    addresses, lengths = np.array([[new.ctypes.data]]), np.array([len(row)], dtype=np.int64)
    copying.scatter(columns, 21, ids, addresses, lengths)
    for i, block in enumerate(ids.tolist()):
        piece = new[i * 21 : (i + 1) * 21].reshape(-1)
        assert np.array_equal(source[block, : len(piece)].numpy(), piece)
        assert not source[block, len(piece) :].any()


# Resolve ---------------------------------------------------------------------------------------------


@hypothesis.given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=5),
    block_steps=st.integers(1, 40),
    first=st.integers(-130, 130),
    span=st.integers(0, 150),
    count=st.integers(0, 6),
    seed=st.integers(0, 999),
)
def test_resolve(lengths: list[int], block_steps: int, first: int, span: int, count: int, seed: int) -> None:
    """Every step that a window covers is found through the compact block tables; the rest of them is not written."""
    store = Store([1], lengths, block_steps, seed=seed)
    slots, anchors = store.draw(count, seed)
    width = span // block_steps + 2
    extent = np.full((count + 1, 2), -7, dtype=np.int64)
    ids = np.full((count + 1, width), -7, dtype=np.int32)
    copying.resolve(
        slots.numpy(), anchors.numpy(), store.extent.numpy(), store.block_ids.numpy(), block_steps,
        first, first + span, extent[:count], ids, store.num_blocks,
    )  # fmt: skip
    assert (extent[count] == -7).all()
    assert (ids[count] == -7).all()
    for b, (slot, anchor) in enumerate(zip(slots.tolist(), anchors.tolist(), strict=True)):
        steps, row = store.extent[slot].tolist()
        assert extent[b, 0] == steps
        for step in range(max(anchor + first, 0), min(anchor + first + span + 1, steps)):
            place = extent[b, 1] + step // block_steps
            assert b * width <= place < (b + 1) * width
            assert ids.reshape(-1)[place] == store.block_ids[row + step // block_steps]


def test_outputs_that_differ_are_noticed() -> None:
    """The comparison itself: it finds a wrong byte, an untouched one, and a write outside."""
    store = Store([4], [9], 4)
    slots, anchors = torch.tensor([0, 0]), torch.tensor([3, 8])

    def with_fault(fault: Any) -> Any:
        def run(plan: GatherPlan, *arguments: torch.Tensor) -> None:
            gather(plan, *arguments)
            fault(plan.columns[0])

        return run

    def outside(column: Any) -> None:
        memory = column.out.view(-1).as_strided((1,), (1,), column.out.storage_offset() + column.out.numel())
        memory.fill_(POISON + 1)

    faults = {
        "steps: 1 bytes differ, the first at .*0.*2.*1": lambda c: c.out[0, 2, 1].add_(1),
        "mask: 1 bytes differ": lambda c: c.mask[1, 0].logical_not_(),
        "rows beyond 2 were written": lambda c: c.out[2].fill_(0),
        "mask rows beyond 2 were written": lambda c: c.mask[2, 1].fill_(True),
        "bytes around .* were written": outside,
    }
    for message, fault in faults.items():
        with pytest.raises(AssertionError, match=message):
            check_gather(with_fault(fault), store, [Spec(4, 5, -2)], slots, anchors, batch=3)
    assert isinstance(Outputs([Spec(4, 5)], 1).masks[0], torch.Tensor)
