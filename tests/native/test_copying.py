"""The compiled loops of the CPU path against the definition of a window."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from gather_common import (
    FOREIGN,
    GUARD,
    PADS,
    HugeStore,
    Spec,
    Store,
    check_gather,
    check_two_tables,
    choose,
    host_memory,
    windows_of,
)

from gear_loader.kernels import reference
from gear_loader.kernels.plan import LINE, GatherColumn, GatherPlan
from gear_loader.native import copying, gathering
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
    crew_of: int | None = None,
) -> None:
    """The compiled loop with the signature of the kernels, the rows in so many parts.

    With `crew_of` it is done by a crew of three; that many bytes of a row decide in how many chunks.
    """
    count = plan.check_rows(slots, anchors, rows)
    chosen = None if rows is None else rows.numpy()
    tensors = (plan.table, slots, anchors, extent, block_ids)
    given = (*(each.numpy() for each in tensors), plan.block_steps)
    if crew_of is None:
        for i in range(parts):
            gathering.gather(*given, count * i // parts, count * (i + 1) // parts, chosen)
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        crew.gather(*given, crew_of, chosen)
    finally:
        torch.set_num_threads(threads)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Store, list[Spec], int, int, int]:
    def some(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    lengths = draw(st.lists(st.integers(1, 200), min_size=1, max_size=6))
    store = Store(sizes, lengths, some(1, 110), seed=some(0, 999), spare_lines=some(0, 1))
    pads, masks = st.sampled_from(PADS), st.booleans()
    specs = [
        Spec(n, some(1, 140), some(-230, 230), draw(pads), draw(masks), some(0, 70), draw(masks))
        for n in sizes
    ]
    count = some(0, 12)
    return store, specs, count, count + some(0, 3), some(0, 999)


@hypothesis.given(
    cases(),
    st.booleans(),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([None, None, 1, 1 << 14, 1 << 17, 1 << 24]),
)
def test_random_shapes(
    case: tuple[Any, ...], mask: bool, parts: int, chosen: bool, crew_of: int | None
) -> None:
    store, specs, count, batch, seed = case
    slots, anchors = store.draw(count, seed)
    options: dict[str, Any] = {"batch": batch, "mask": mask}
    options["rows"] = choose(count, batch, seed) if chosen else None
    check_gather(gather, store, specs, slots, anchors, parts=parts, crew_of=crew_of, **options)
    check_gather(reference.gather, store, specs, slots, anchors, **options)


@pytest.mark.parametrize("crew_of", [None, 1 << 20], ids=["one thread", "a crew"])
def test_a_batch_from_two_tables(crew_of: int | None) -> None:
    check_two_tables(functools.partial(gather, crew_of=crew_of))


def test_far_windows_and_large_pieces() -> None:
    store = Store([4, 4], [40, 3], 7)
    slots, anchors = torch.tensor([0, 1, 0]), torch.tensor([2**31 + 5, -(2**31) - 8, 2**33])
    for pad in PADS:
        specs = [Spec(4, 9, offset, pad) for offset in (-(2**31) + 1, 2**31 - 1)]
        check_gather(gather, store, specs, slots, anchors)
    # Pieces of a page and more, that begin anywhere in a line.
    for step_bytes, shift, length in [(1000, 63, 9), (1024, 0, 3), (4100, 1, 2), (4100, 0, 1)]:
        store = Store([step_bytes], [1, 2, 40], 4)
        slots, anchors = store.draw(6)
        check_gather(gather, store, [Spec(step_bytes, length, -1, shift=shift)], slots, anchors)
    # A batch that is written past the caches, in pieces that begin and end anywhere in a line.
    store = Store([1031, 36, 1], [1, 90, 200], 13)
    slots, anchors = store.draw(60)
    specs = [Spec(size, 90, -45, shift=shift) for size, shift in ((1031, 5), (36, 0), (1, 1))]
    assert gathering.STREAM_BATCH_BYTES < 60 * 90 * 1068
    check_gather(gather, store, specs, slots, anchors)


def test_an_address_space_of_more_than_2_31_words() -> None:
    store = HugeStore((48, 96), 21)
    slots, anchors = store.draw(6)
    check_gather(gather, store, [Spec(48, 50, -10), Spec(96, 50, -40)], slots, anchors)
    # And a scatter beyond 2**31 bytes.
    store = HugeStore((96,), 21)
    source, row = store.sources[0], store.rows[0][HugeStore.SLOTS[0]]
    start = int(store.extent[HugeStore.SLOTS[0], 1])
    ids = store.block_ids[start : start + 3].numpy()
    assert (ids.astype(np.int64) * source.stride(0) > 2**31).sum() >= 2
    new = np.ascontiguousarray(~row)
    columns = np.array([(source.data_ptr(), source.stride(0), 96, 96)], dtype=np.int64)
    copying.scatter(columns, 21, ids, np.array([[new.ctypes.data]]), np.array([len(row)], dtype=np.int64))
    for i, block in enumerate(ids.tolist()):
        piece = new[i * 21 : (i + 1) * 21].reshape(-1)
        assert np.array_equal(source[block, : len(piece)].numpy(), piece)
        assert not source[block, len(piece) :].any()


@pytest.mark.parametrize(
    ("total", "step_bytes", "shift"),
    [
        (total, *rest)
        for total in (1000, copying.STREAM_BYTES + 1000)
        for rest in ((1, 0), (36, 64), (64, 8), (64, 0), (420, 8), (420, 64))
    ],
)
def test_copies_with_the_caches_and_past_them(total: int, step_bytes: int, shift: int) -> None:
    generator = np.random.default_rng(step_bytes)
    block_steps, longest = 7, 50
    lengths = generator.integers(1, longest + 1, -(-2 * total // (step_bytes * longest)) + 1)
    blocks = -(-lengths // block_steps)
    ids = generator.permutation(int(blocks.sum())).astype(np.int32)
    stride = -(-block_steps * step_bytes // 128) * 128
    memory = np.full(len(ids) * stride + 256, 7, dtype=np.uint8)
    memory = memory[-memory.ctypes.data % 128 + shift :][: len(ids) * stride]
    given = generator.integers(0, 7, (int(lengths.sum()), step_bytes), dtype=np.uint8)
    ends = np.cumsum(lengths)
    addresses = given.ctypes.data + (ends - lengths)[:, None] * step_bytes
    columns = np.array([[memory.ctypes.data, stride, step_bytes, step_bytes]], dtype=np.int64)
    copying.scatter(columns, block_steps, ids, addresses, lengths)
    expected, first = np.full_like(memory, 7).reshape(-1, stride), 0
    for i, length in enumerate(lengths.tolist()):
        for step in range(0, length, block_steps):
            part = given[ends[i] - length + step : ends[i] - length + min(step + block_steps, length)]
            expected[ids[first], : part.size] = part.reshape(-1)
            first += 1
    assert (memory.reshape(-1, stride) == expected).all()


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
        columns.append((memory[GUARD:].ctypes.data, stride, size, size))
        memories.append(memory)
        sources.append([random.integers(0, 256, shift + n * size, dtype=np.uint8)[shift:] for n in lengths])
    addresses = np.array([[part[i].ctypes.data for part in sources] for i in range(3)], dtype=np.int64)
    copying.scatter(np.array(columns, dtype=np.int64), block_steps, ids, addresses, lengths)
    for (_, stride, size, _), memory, parts in zip(columns, memories, sources, strict=True):
        expected = np.full_like(memory, FOREIGN)
        block = iter(ids.tolist())
        for part in parts:
            for first in range(0, len(part), block_steps * size):
                piece = part[first : first + block_steps * size]
                start = GUARD + next(block) * stride
                expected[start : start + len(piece)] = piece
        assert np.array_equal(memory, expected)


@pytest.mark.parametrize("sizes", [(44, 12, 4, 1), (1, 3)])
def test_records_of_large_trajectories(sizes: tuple[int, ...]) -> None:
    random, block_steps = np.random.default_rng(1), 300
    lengths = np.array([1, 2 * copying.STREAM_BYTES // sum(sizes), 299])
    record = -(-sum(sizes) // 4) * 4
    stride = -(-block_steps * record // LINE) * LINE
    used = -(-lengths // block_steps)
    ids = random.permutation(used.sum()).astype(np.int32)
    source = host_memory(used.sum() * stride).fill_(0).view(-1, stride)
    insides = np.cumsum([0, *sizes[:-1]]).tolist()
    columns = np.array(
        [(source.data_ptr() + at, stride, size, record) for at, size in zip(insides, sizes, strict=True)]
    )
    given = [[random.integers(0, 256, (n, size), dtype=np.uint8) for n in lengths] for size in sizes]
    addresses = np.array([[rows[i].ctypes.data for rows in given] for i in range(len(lengths))])
    copying.scatter(columns, block_steps, ids, addresses, lengths)
    expected = np.zeros((used.sum(), stride), dtype=np.uint8)
    first = 0
    for i, length in enumerate(lengths.tolist()):
        for begin in range(0, length, block_steps):
            steps = np.concatenate([rows[i][begin : begin + block_steps] for rows in given], axis=1)
            padded = np.pad(steps, ((0, 0), (0, record - steps.shape[1])))
            expected[ids[first], : padded.size] = padded.reshape(-1)
            first += 1
    assert np.array_equal(source.numpy(), expected)


@hypothesis.given(
    sizes=st.lists(st.integers(1, 70), min_size=2, max_size=5),
    spare=st.integers(0, 20),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    block_steps=st.integers(1, 30),
    length=st.sampled_from([1, 1, 3, 40]),
    offset=st.integers(-9, 9),
    pad=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_records(
    sizes: list[int],
    spare: int,
    lengths: list[int],
    block_steps: int,
    length: int,
    offset: int,
    pad: int,
    seed: int,
) -> None:
    """Columns that lie step by step: what a scatter wrote, and nothing else, and what a gather finds there."""
    random = np.random.default_rng(seed)
    insides, record = np.cumsum([0, *sizes[:-1]]).tolist(), sum(sizes) + spare
    used = -(-np.array(lengths) // block_steps)
    ids = random.permutation(used.sum() + 2)[: used.sum()].astype(np.int32)
    stride = -(-block_steps * record // LINE) * LINE
    source = host_memory((used.sum() + 2) * stride).fill_(FOREIGN).view(-1, stride)
    given = [[random.integers(0, 256, (n, size), dtype=np.uint8) for n in lengths] for size in sizes]
    columns = [
        (source.data_ptr() + inside, stride, size, record)
        for inside, size in zip(insides, sizes, strict=True)
    ]
    addresses = np.array([[rows[i].ctypes.data for rows in given] for i in range(len(lengths))])
    copying.scatter(np.array(columns), block_steps, ids, addresses, np.array(lengths))
    expected = np.full(source.shape, FOREIGN, dtype=np.uint8)
    starts = np.cumsum(used) - used
    for inside, rows in zip(insides, given, strict=True):
        for start, row in zip(starts.tolist(), rows, strict=True):
            for step, value in enumerate(row):
                at = step % block_steps * record + inside
                expected[ids[start + step // block_steps], at : at + len(value)] = value
    assert np.array_equal(source.numpy(), expected)

    slots, anchors = random.integers(0, len(lengths), 40), random.integers(-5, 70, 40)
    outs = [torch.full((40, length, size), 77, dtype=torch.uint8) for size in sizes]
    plan = GatherPlan(
        [
            GatherColumn(source, out, offset + i // 2, pad, inside=inside, step_stride=record)
            for i, (out, inside) in enumerate(zip(outs, insides, strict=True))
        ],
        block_steps,
    )
    extent = np.stack((lengths, starts, np.zeros_like(starts)), axis=1)
    table = plan.table.numpy()
    assert gathering.gather(table, slots, anchors, extent, ids, block_steps, 0, 40, None) == 0
    for i, (out, rows) in enumerate(zip(outs, given, strict=True)):
        spec = Spec(sizes[i], length, offset + i // 2, pad)
        found, _ = windows_of(rows, spec, torch.from_numpy(slots), torch.from_numpy(anchors))
        assert np.array_equal(out.numpy(), found)


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
    extent = np.full((count + 1, 3), -7, dtype=np.int64)
    ids = np.full((count + 1, width), -7, dtype=np.int32)
    gathering.resolve(
        slots.numpy(), anchors.numpy(), store.extent.numpy(), store.block_ids.numpy(), block_steps,
        first, first + span, extent[:count], ids, store.num_blocks,
    )  # fmt: skip
    assert (extent[count] == -7).all()
    assert (ids[count] == -7).all()
    for b, (slot, anchor) in enumerate(zip(slots.tolist(), anchors.tolist(), strict=True)):
        steps, row, final = store.extent[slot].tolist()
        assert extent[b, 0] == steps
        assert extent[b, 2] == final
        for step in range(max(anchor + first, 0), min(anchor + first + span + 1, steps + final)):
            place = extent[b, 1] + step // block_steps
            assert b * width <= place < (b + 1) * width
            assert ids.reshape(-1)[place] == store.block_ids[row + step // block_steps]
