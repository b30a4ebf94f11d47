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
from gear_loader.kernels.packed_plan import PackedColumn, PackedPlan, PackedWork
from gear_loader.native.packed_lines import count_lists, list_lines

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
    assert [each > 0 for each in np.diff([0, *batch.work.ends])] == [True] * 4
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
        assert one.work.num_pieces[0] == 1
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
    assert len(batch.work.groups) == len(one.work.groups)
    batch.run(run)


@hypothesis.settings(max_examples=30)
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
def test_rows_one_after_another_in_one_block(run: Gather, shift: int) -> None:
    """As in staging memory: what is read begins anywhere in a line; the plan's table is among the batch's lists."""
    random, counts, order = np.random.default_rng(shift), [70, 1, 5, 300, 12], [3, 0, 4, 1, 2]
    begins, total = np.cumsum(counts) - counts, sum(counts)
    outs = np.zeros(len(counts), dtype=np.int64)
    outs[order] = np.cumsum(np.array(counts)[order]) - np.array(counts)[order]
    pieces, number = staged_pieces(
        begins, np.array(counts), outs, begins % 7, (np.arange(5), np.array(order))
    )
    columns, expected = [], []
    for size, once in ((1, False), (12, False), (64, False), (384, False), (3, True), (16, True)):
        rows = len(counts) if once else total
        values = random.integers(0, 256, (rows, size), dtype=np.uint8)
        memory = pinned_memory if torch.cuda.is_available() else host_memory
        source = memory(-(-rows * size // 128) * 128)
        source[: rows * size] = torch.from_numpy(values.reshape(-1))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        output = Guarded((rows, size), shift=shift, device=device)
        columns.append(PackedColumn(source[None], output.out, once=once))
        for row, (begin, count) in enumerate(zip(begins, counts, strict=True)):
            if once:
                output.expected[order[row]] = values[row]
            else:
                output.expected[outs[row] : outs[row] + count] = values[begin : begin + count]
        expected.append(output)
    position = torch.full((total,), -1, dtype=torch.int32, device=device)
    plan = PackedPlan(columns, position)
    plan.device_table = plan.table.to(device)
    kinds = plan.kinds.numpy()
    classes, ends = np.zeros((len(kinds) + 1, 4), dtype=np.int64), np.zeros(4, dtype=np.int64)
    groups, tiles = (np.empty(n, dtype=np.int64) for n in count_lists(pieces, number, kinds, classes))
    list_lines(pieces, number, kinds, classes, groups, tiles, ends)
    lists = (torch.from_numpy(each).to(device) for each in (pieces, groups, tiles))
    run(plan, PackedWork(*lists, tuple(ends.tolist()), (number, len(counts))))
    for output in expected:
        output.check()
    for row, count in enumerate(counts):
        found = position[outs[row] : outs[row] + count].cpu().numpy()
        np.testing.assert_array_equal(found, begins[row] % 7 + np.arange(count))


@ALL
def test_what_is_refused(run: Gather) -> None:
    batch = PackedBatch(Store([4], [20], 8), [0])
    plan, work = batch.plan, batch.work
    with pytest.raises(TypeError, match=r"pieces is torch.int64 \[.*\]; expected contiguous torch.int32"):
        run(plan, dataclasses.replace(work, pieces=work.pieces.long()))
    with pytest.raises(ValueError, match=r"ends is \(0, 9, 1, 2\) for 2 tiles; expected"):
        run(plan, dataclasses.replace(work, ends=(0, 9, 1, 2)))
    with pytest.raises(ValueError, match=r"pieces is \[3, 5\]; expected \[4, 5\]"):
        run(plan, dataclasses.replace(work, num_pieces=(3, 1)))
    with pytest.raises(ValueError, match=r"tiles is on meta; expected cpu"):
        run(plan, dataclasses.replace(work, tiles=work.tiles.to("meta")))
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
    with pytest.raises(ValueError, match=r"stride 100 and address .*; expected multiples of 128"):
        PackedPlan([dataclasses.replace(column, source=source.view(-1)[:300].view(3, 100))], position)
    with pytest.raises(ValueError, match="differ in capacity or device"):
        PackedPlan([column], position[:4])
    with pytest.raises(TypeError, match=r"position is torch.int64 \[5\]"):
        PackedPlan([column], position.long())
    with pytest.raises(
        ValueError, match=r"device_table is torch.int32 \[1, 4\] on cpu; expected torch.int64 \[1, 4\]"
    ):
        PackedPlan([column], position).device_table = torch.zeros(1, 4, dtype=torch.int32)


@pytest.mark.gpu
def test_packed_batches_on_a_gpu() -> None:
    store = Store([4, 1, 48, 400, 1024], [63, 500, 1, 7, 129, 4000], 32, memory=pinned_memory)
    for programs, shift in ((1, 0), (3, 1), (132, 4), (None, 0)):
        batch = PackedBatch(
            store, [1, 2, 5, 0, 4, 3, 2, 1], once=[4, 16, 3], shift=shift, device="cuda", memory=pinned_memory
        )
        batch.run(gather_packed, programs)
