"""Gathering packed batches: the kernel and its torch twin against a naive account."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from cases import kernel_and_twin
from gather_common import POISON, STEP_BYTES, Guarded, Store, host_memory, pinned_memory
from packed_common import WHOLE, PackedBatch

from gear_loader.collection.packed_cuda import staged_pieces
from gear_loader.kernels import packed_reference
from gear_loader.kernels.packed import gather_packed
from gear_loader.kernels.packed_plan import (
    WORK_GROUPS,
    WORK_NUM_TILES,
    WORK_PIECES,
    WORK_WIDTH,
    PackedColumn,
    PackedPlan,
)
from gear_loader.native.packed_lines import SOURCE_WIDTH, list_work

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

Gather = Callable[..., None]
ALL = kernel_and_twin(gather_packed, packed_reference.gather_packed)
EVERY = [packed_reference.gather_packed] + [gather_packed] * (not torch.cuda.is_available())


@ALL
def test_rows_of_very_different_lengths(run: Gather) -> None:
    """Odd lengths, one step, none; wide and narrow columns, so all words and sizes of groups; several programs."""
    store = Store([4, 1, 48, 400], [63, 500, 1, 7, 129], 32)
    batch = PackedBatch(store, [1, 2, 0, 4, 3, 2, 1], once=[4, 16, 3])
    assert (batch.work[: WORK_NUM_TILES + 1].diff(prepend=torch.zeros(1, dtype=torch.int64)) > 0).all()
    for programs in (1, 3, None):
        batch.run(run, programs)


@ALL
def test_blocks_that_lie_side_by_side_are_one_piece(run: Gather) -> None:
    store = Store([128, 32, 4], [320, 64, 500], 32, finals=False)
    # The same steps in blocks one after another: each trajectory is one piece.
    ids = store.block_ids
    for slot, length in enumerate(store.lengths):
        begin, blocks = int(store.extent[slot, 1]), -(-length // 32)
        if blocks > store.num_blocks:
            continue
        for source, rows in zip(store.sources, store.rows, strict=True):
            source[:blocks].view(-1)[: rows[slot].size] = torch.from_numpy(rows[slot].reshape(-1))
        ids[begin : begin + blocks] = torch.arange(blocks, dtype=torch.int32)
        one = PackedBatch(store, [slot])
        assert len(one.work) - one.work[WORK_PIECES] == 3  # words: the numbers of one piece
        one.run(run)


@ALL
def test_no_steps_at_all(run: Gather) -> None:
    """Windows wholly outside, and no rows, leave the outputs as they are; columns per trajectory are read."""
    store = Store([4, 16], [5, 9], 8)
    PackedBatch(store, [0, 1], anchors=[5, 20], window=(3, 4), once=[8]).run(run)
    PackedBatch(store, [0, 1], anchors=[5, 20], window=(3, 4)).run(run)
    PackedBatch(store, []).run(run)


@ALL
@pytest.mark.parametrize("columns", [1, pytest.param(32, marks=pytest.mark.long)])
def test_columns_of_one_size_share_their_lists(run: Gather, columns: int) -> None:
    store = Store([4] * columns, [63, 500, 128], 128, finals=False)
    one, batch = (
        PackedBatch(Store([4], [63, 500, 128], 128, finals=False), [1, 0]),
        PackedBatch(store, [1, 0]),
    )
    many, few = ((each.work[WORK_PIECES] - each.work[WORK_GROUPS]).item() for each in (batch, one))
    assert many == few
    batch.run(run)


@hypothesis.given(
    sizes=st.lists(st.sampled_from(STEP_BYTES), min_size=1, max_size=4),
    once=st.lists(st.sampled_from(STEP_BYTES), max_size=2),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    block_steps=st.integers(1, 70),
    window=st.one_of(st.just(WHOLE), st.tuples(st.integers(-30, 30), st.integers(1, 50))),
    data=st.data(),
)
def test_random_shapes(
    sizes: list[int],
    once: list[int],
    lengths: list[int],
    block_steps: int,
    window: tuple[int, int],
    data: st.DataObject,
) -> None:
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=7))
    anchors = [0 if window == WHOLE else data.draw(st.integers(0, lengths[row] - 1)) for row in rows]
    store = Store(sizes, lengths, block_steps, spare_lines=data.draw(st.integers(0, 1)))
    shift = data.draw(st.sampled_from([0, 0, 4, 3]))
    batch = PackedBatch(store, rows, anchors=anchors, once=once, window=window, shift=shift)
    for function in EVERY:
        batch.run(function, data.draw(st.sampled_from([1, 2, 5])))


@ALL
@pytest.mark.parametrize("shift", [0, 4, 3])
def test_sources_of_one_launch(run: Gather, shift: int) -> None:
    """As in staging memory: what is read begins anywhere in a line; two sources, of which one has no columns per
    trajectory; the second launch's header lies behind the first."""
    random, device = np.random.default_rng(shift), "cuda" if torch.cuda.is_available() else "cpu"
    memory = pinned_memory if torch.cuda.is_available() else host_memory
    counts, order = np.array([70, 1, 5, 300, 12, 9, 44]), np.array([3, 6, 0, 4, 1, 2, 5])
    total, split = int(counts.sum()), 5  # rows of the first source
    outs = np.zeros_like(counts)
    outs[order] = np.cumsum(counts[order]) - counts[order]
    sizes = [(1, False), (12, False), (64, False), (384, False), (3, True), (16, True)]
    guarded = [
        Guarded((len(counts) if once else total, size), shift=shift, device=device) for size, once in sizes
    ]
    position = torch.full((total,), -1, dtype=torch.int32, device=device)
    plans, pieces, parts = [], [np.zeros((0, 5), dtype=np.int32)], []
    for first, end, whole in ((0, split, True), (split, len(counts), False)):
        some, begins = slice(first, end), np.cumsum(counts[first:end]) - counts[first:end]
        columns = []
        for (size, once), output in zip(sizes, guarded, strict=True):
            if once and not whole:
                continue
            rows = end - first if once else int(counts[some].sum())
            values = random.integers(0, 256, (rows, size), dtype=np.uint8)
            source = memory(-(-rows * size // 128) * 128)
            source[: rows * size] = torch.from_numpy(values.reshape(-1))
            columns.append(PackedColumn(source[None], output.out, once=once))
            for row, (begin, count) in enumerate(zip(begins, counts[some], strict=True)):
                if once:
                    output.expected[order[row]] = values[row]
                else:
                    at = outs[first + row]
                    output.expected[at : at + count] = values[begin : begin + count]
        plans.append(PackedPlan(columns, position))
        once_rows = (np.arange(end - first), order[some]) if whole else None
        made, number = staged_pieces(begins, counts[some], outs[some], begins % 7, once_rows)
        parts.append((len(made), number, len(columns)))
        pieces.append(made)
    sources = np.zeros((2, SOURCE_WIDTH), dtype=np.int64)
    for source, (p, c), (made, number, columns_of) in zip(
        sources, ((0, 0), (parts[0][0], parts[0][2])), parts, strict=True
    ):
        source[:] = p, p + number, p + number, p + made, c, c + columns_of
    table = np.concatenate([plan.table.numpy() for plan in plans])
    listed = np.concatenate(pieces), sources, table, total, len(counts)
    needed = list_work(*listed, np.zeros(0, dtype=np.int64), WORK_WIDTH, 2 * WORK_WIDTH)
    words = np.full(needed, -1, dtype=np.int64)
    assert list_work(*listed, words, WORK_WIDTH, 2 * WORK_WIDTH) == needed
    outputs = PackedPlan(
        [PackedColumn(None, each.out, once) for each, (_, once) in zip(guarded, sizes, strict=True)], position
    )
    run(outputs, torch.from_numpy(words[WORK_WIDTH:]).to(device))
    for output, (_, once) in zip(guarded, sizes, strict=True):
        if once:  # rows of the source that has no such columns stay
            left = np.setdiff1d(np.arange(len(counts)), order[:split])
            output.expected[left] = POISON
        output.check()
    for row, count in enumerate(counts):
        found = position[outs[row] : outs[row] + count].cpu().numpy()
        begin = (np.cumsum(counts[:split]) - counts[:split], np.cumsum(counts[split:]) - counts[split:])
        first = np.concatenate(begin)[row] % 7
        np.testing.assert_array_equal(found, first + np.arange(count))


@ALL
def test_what_is_refused(run: Gather) -> None:
    batch = PackedBatch(Store([4], [20], 8), [0])
    plan, work = batch.plan, batch.work
    with pytest.raises(TypeError, match=r"work is torch.int32 \[.*\]; expected contiguous torch.int64"):
        run(plan, work.int())
    with pytest.raises(ValueError, match=r"work is \[5\]; expected at least 16 words"):
        run(plan, work[:5])
    with pytest.raises(ValueError, match=r"work is on meta; expected cpu"):
        run(plan, work.to("meta"))
    assert all((each.whole == POISON).all() for each in batch.guarded)


def test_columns_that_are_refused() -> None:
    source, position = torch.zeros(3, 128, dtype=torch.uint8), torch.zeros(5, dtype=torch.int32)
    column = PackedColumn(
        PackedBatch(Store([4], [20], 8), [0]).plan.columns[0].source, torch.zeros(5, 4, dtype=torch.uint8)
    )
    with pytest.raises(ValueError, match="No columns were given"):
        PackedPlan([], position)
    with pytest.raises(TypeError, match=r"out is torch.float32 \[5, 4\]; expected uint8 with 2"):
        PackedPlan([dataclasses.replace(column, out=torch.zeros(5, 4))], position)
    with pytest.raises(ValueError, match=r"A step of 200 bytes does not fit into blocks of 128"):
        PackedPlan([dataclasses.replace(column, out=torch.zeros(5, 200, dtype=torch.uint8))], position)
    with pytest.raises(ValueError, match=r"strides \(100, 1\) and address .*; expected bytes"):
        PackedPlan([dataclasses.replace(column, source=source.view(-1)[:300].view(3, 100))], position)
    with pytest.raises(ValueError, match="differ in capacity or device"):
        PackedPlan([column], position[:4])
    with pytest.raises(TypeError, match=r"position is torch.int64 \[5\]"):
        PackedPlan([column], position.long())


@pytest.mark.gpu
def test_packed_batches_on_a_gpu() -> None:
    store = Store([4, 1, 48, 400, 1024], [63, 500, 1, 7, 129, 4000], 32, memory=pinned_memory)
    for programs, shift in ((1, 0), (3, 1), (132, 4), (None, 0)):
        batch = PackedBatch(
            store, [1, 2, 5, 0, 4, 3, 2, 1], once=[4, 16, 3], shift=shift, device="cuda", memory=pinned_memory
        )
        batch.run(gather_packed, programs)
