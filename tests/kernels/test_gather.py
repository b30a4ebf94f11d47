"""The gather kernel under Triton's interpreter, its torch twin and the loops of the CPU, against the oracle."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from gather_common import (
    PADS,
    Gather,
    HugeStore,
    Outputs,
    Spec,
    Store,
    check_gather,
    check_two_tables,
    choose,
    host_memory,
    windows_of,
)

from gear_loader.kernels import reference
from gear_loader.kernels.gather import gather, reciprocal
from gear_loader.kernels.plan import (
    LINE,
    LINES,
    PAD_EDGE,
    PAD_HEAD,
    PAD_KEEP,
    PAD_TAIL,
    WIDTH,
    GatherColumn,
    GatherPlan,
)
from gear_loader.native import gathering
from gear_loader.native import threads as crew

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

if torch.cuda.is_available():
    pytest.skip("the kernel is compiled here, see test_gather_gpu.py", allow_module_level=True)


def loop(
    plan: GatherPlan,
    slots: torch.Tensor,
    anchors: torch.Tensor,
    extent: torch.Tensor,
    block_ids: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    programs: int | None = None,
    crew_of: int | None = None,
) -> None:
    """The compiled loop with the signature of the kernels, the rows in `programs` parts.

    With `crew_of` it is done by a crew of three; that many bytes of a row decide in how many chunks.
    """
    count = plan.check_rows(slots, anchors, rows)
    chosen = None if rows is None else rows.numpy()
    tensors = (plan.table, slots, anchors, extent, block_ids)
    given = (*(each.numpy() for each in tensors), plan.block_steps)
    if crew_of is None:
        parts = programs or 1
        for i in range(parts):
            gathering.gather(*given, count * i // parts, count * (i + 1) // parts, chosen)
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        crew.gather(*given, crew_of, chosen)
    finally:
        torch.set_num_threads(threads)


RUNS: dict[str, Gather] = {"kernel": gather, "twin": reference.gather, "loop": loop}
RUNS |= {f"crew of {size}": functools.partial(loop, crew_of=size) for size in (1, 1 << 14, 1 << 20)}
ALL = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


def test_a_window_by_hand() -> None:
    # The example of Window's docstring and its neighbours; `.` is padding.
    store = Store([1] * 4, [3], 2, finals=False)
    store.rows = [[np.frombuffer(b"abc", dtype=np.uint8).reshape(3, 1)]] * 4
    first = int(store.extent[0, 1])
    for source in store.sources:
        for step, letter in enumerate(b"abc"):
            source[store.block_ids[first + step // 2], step % 2] = letter
    expected = {
        (0, -1): (b".abc", b".abc", b"abc.", b"aabc"),
        (1, -3): (b"..ab", b"..ab", b"ab..", b"aaab"),
        (1, 1): (b"c...", b"...c", b"c...", b"cccc"),
        (2, 1): (b"....", b"....", b"....", b"cccc"),
        (0, -4): (b"....", b"....", b"....", b"aaaa"),
    }
    for run, ((anchor, offset), results) in itertools.product(RUNS.values(), expected.items()):
        outputs = Outputs([Spec(1, 4, offset, pad) for pad in PADS], 1)
        run(outputs.plan(store), torch.tensor([0]), torch.tensor([anchor]), store.extent, store.block_ids)
        exists = (*results[:3], results[PAD_KEEP])  # repeated steps are padding all the same
        for out, mask, result, there in zip(outputs.outs, outputs.masks, results, exists, strict=True):
            assert out.numpy().tobytes() == result.replace(b".", b"\0")
            assert mask is not None
            assert mask.numpy().tolist() == [[letter != ord(".") for letter in there]]


@ALL
def test_a_batch_from_two_tables(run: Gather) -> None:
    check_two_tables(run)


def test_masks_of_many_tiles() -> None:
    # 600 entries a row: rows start and end within tiles of 512.
    store = Store([1], [700, 20], 64)
    slots, anchors = torch.tensor([0, 1, 0, 0, 1]), torch.tensor([0, 7, 350, 699, 19])
    check_gather(gather, store, [Spec(1, 600, -300)], slots, anchors, programs=3)


@pytest.mark.parametrize("programs", [3, 132, None])
def test_program_counts(programs: int | None) -> None:
    # 4 columns of several tiles each, so that a program crosses from column to column.
    store = Store([16, 64, 132, 3], [10, 90], 32)
    slots, anchors = store.draw(5)
    specs = [Spec(16, 40, -20), Spec(64, 10, -9, PAD_HEAD), Spec(132, 12, 0, PAD_TAIL), Spec(3, 63, -30)]
    check_gather(gather, store, specs, slots, anchors, programs=programs)


@ALL
def test_far_windows(run: Gather) -> None:
    # Offsets and anchors whose sums leave 32 bits.
    sizes = (4, 4, 16, 16)
    store = Store(sizes, [40, 3], 7)
    slots, anchors = torch.tensor([0, 1, 0]), torch.tensor([2**31 + 5, -(2**31) - 8, 2**33])
    offsets = (-(2**31) + 1, 2**31 - 1, -(2**31) + 1, 0)
    for pad in PADS:
        specs = [Spec(size, 9, offset, pad) for size, offset in zip(sizes, offsets, strict=True)]
        check_gather(run, store, specs, slots, anchors)


@pytest.mark.parametrize("name", ["loop", "crew of 16384"])
def test_large_pieces(name: str) -> None:
    """Pieces of a page and more, and a batch that is written past the caches, that begin anywhere in a line."""
    for step_bytes, shift, length in [(1000, 63, 9), (1024, 0, 3), (4100, 1, 2), (4100, 0, 1)]:
        store = Store([step_bytes], [1, 2, 40], 4)
        slots, anchors = store.draw(6)
        check_gather(RUNS[name], store, [Spec(step_bytes, length, -1, shift=shift)], slots, anchors)
    store = Store([1031, 36, 1], [1, 90, 200], 13)
    slots, anchors = store.draw(60)
    specs = [Spec(size, 90, -45, shift=shift) for size, shift in ((1031, 5), (36, 0), (1, 1))]
    assert gathering.STREAM_BATCH_BYTES < 60 * 90 * 1068
    check_gather(RUNS[name], store, specs, slots, anchors)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    aligned = draw(st.booleans())
    size = st.sampled_from([16, 32, 48, 80, 144]) if aligned else st.integers(1, 70) | st.integers(71, 300)
    sizes = draw(st.lists(size, min_size=1, max_size=3))
    block_steps = draw(st.integers(1, 40) | st.sampled_from([64, 100]))
    lengths = draw(st.lists(st.integers(1, 200), min_size=1, max_size=5))
    windows = st.integers(1, 24) | st.integers(25, 140)
    offsets = st.integers(-40, 40) | st.sampled_from([-400, 400])
    shifts = st.just(0) if aligned else st.integers(0, 70)
    spec = st.tuples(windows, offsets, st.sampled_from(PADS), st.booleans(), shifts, st.booleans())
    count = draw(st.integers(0, 5))
    batch = max(1, count + draw(st.integers(0, 2)))
    options = {"seed": draw(st.integers(0, 99)), "spare_lines": draw(st.integers(0, 1))}
    return {
        "store": Store(sizes, lengths, block_steps, **options),
        "specs": [Spec(size, *draw(spec)) for size in sizes],
        "draw": (count, draw(st.integers(0, 99))),
        "batch": batch,
        "rows": choose(count, batch, draw(st.integers(0, 9))) if draw(st.booleans()) else None,
        "mask": draw(st.booleans()),
        "compact": draw(st.booleans()),
        "programs": draw(st.integers(1, 9)),
    }


@hypothesis.given(cases())
@hypothesis.example(  # rows of masks and steps across tiles, all paddings, no row, chosen rows
    {
        "store": Store([1, 6, 64, 1000], [1, 31, 32, 33, 98, 150], 32),
        "specs": [
            Spec(1, 20, -10, PAD_EDGE),
            Spec(6, 20, -19, PAD_HEAD),
            Spec(64, 20, 2, PAD_TAIL),
            Spec(1000, 20, 0),
        ],
        "draw": (5, 1),
        "batch": 7,
        "rows": choose(5, 7),
        "compact": True,
        "programs": 3,
    }
)
@hypothesis.example(
    {
        "store": Store([16, 48, 384], [3, 40], 1),
        "specs": [
            Spec(16, 7, -6, mask=False),
            Spec(48, 1, 0, PAD_HEAD),
            Spec(384, 9, -3, PAD_TAIL, mask=False),
        ],
        "draw": (0, 0),
        "batch": 2,
        "mask": True,
    }
)
@hypothesis.example(  # a window after the last step, which it repeats; the final step lies in another block
    {
        "store": Store([1], [1], 1),
        "specs": [Spec(1, 1, 1, PAD_EDGE, mask=False, final=False)],
        "draw": (1, 0),
        "batch": 1,
        "compact": True,
    }
)
def test_random_shapes(case: dict[str, Any]) -> None:
    case = dict(case)
    count, seed = case.pop("draw")
    store, specs = case.pop("store"), case.pop("specs")
    slots, anchors = store.draw(count, seed)
    for run in RUNS.values():
        plan = check_gather(run, store, specs, slots, anchors, **case)
    whole = all(spec.step_bytes % 16 == 0 and not spec.shift for spec in specs)
    assert ([word for word, _, _ in plan.launches] == [16]) == whole


@pytest.mark.parametrize("run", [gather, reference.gather, loop], ids=["kernel", "twin", "loop"])
@pytest.mark.parametrize("sizes", [(48, 64), (6, 12)], ids=["aligned", "unaligned"])
def test_an_address_space_of_more_than_2_31_words(run: Gather, sizes: tuple[int, int]) -> None:
    store = HugeStore(sizes, 21)
    assert all(source.numel() >= 24 * 2**30 - LINE * 64 for source in store.sources)
    slots, anchors = store.draw(6)
    specs = [Spec(sizes[0], 50, -10, PAD_KEEP), Spec(sizes[1], 50, -40, PAD_HEAD)]
    check_gather(run, store, specs, slots, anchors)


def column(batch: int = 2, length: int = 3, step_bytes: int = 8, **changes: Any) -> GatherColumn:
    source = host_memory(4 * 128).view(4, 128)
    out = torch.zeros(batch, length, step_bytes, dtype=torch.uint8)
    return dataclasses.replace(GatherColumn(source, out, 0), **changes)


@hypothesis.given(
    block_steps=st.integers(1, 50),
    length=st.integers(1, 80),
    size=st.integers(1, 200),
    spare=st.integers(0, 2),
    position=st.integers(0, 10**6),
)
def test_lines_are_enough_and_not_one_too_many(
    block_steps: int, length: int, size: int, spare: int, position: int
) -> None:
    stride = -(-block_steps * size // LINE) * LINE + spare * LINE

    def touched(first: int) -> int:
        """Lines that a window from step `first` of a block touches, counted as the kernel counts: one after another."""
        last = first + length - 1
        begin = first * size // LINE
        end = last // block_steps * stride + (last % block_steps + 1) * size
        return -(-end // LINE) - begin

    source = torch.empty(0, dtype=torch.uint8).as_strided((0, stride), (stride, 1))
    out = torch.empty(1, length, size, dtype=torch.uint8)
    lines = GatherColumn(source, out, 0).lines(block_steps)
    assert touched(position % block_steps) <= lines
    # The bound is met within the lines that block ends and unaligned starts could add.
    assert lines <= max(touched(first) for first in range(block_steps)) + 2 + spare


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8)


def flags(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bool, **options)


Refused = list[tuple[dict[str, Any], type[Exception], str]]
# fmt: off
COLUMNS: Refused = [
    ({"source": torch.zeros(4, 128)}, TypeError, r"source is torch.float32 \[4, 128\]; expected uint8 with 2"),
    ({"source": bytes_of(512)}, TypeError, r"source is torch.uint8 \[512\]; expected uint8"),
    ({"out": torch.zeros(2, 3, 8)}, TypeError, r"out is torch.float32 \[2, 3, 8\]; expected uint8 with 3"),
    ({"out": bytes_of(2, 24)}, TypeError, r"out is torch.uint8 \[2, 24\]; expected uint8"),
    ({"out": bytes_of(3, 2, 8).transpose(0, 1)}, ValueError, r"must be contiguous; strides \(8, 16, 1\), \(128, 1\)"),
    ({"source": host_memory(512).view(128, 4).t()}, ValueError, r"must be contiguous; strides \(24, 8, 1\), \(1, 4\)"),
    ({"source": host_memory(400).view(4, 100)}, ValueError, r"source has stride 100 and address 0x[0-9a-f]+; expected"),
    ({"source": host_memory(520)[8:].view(4, 128)}, ValueError, r"source has stride 128 and address 0x\w+8; expected"),
    ({"out": bytes_of(2, 3, 65)}, ValueError, "2 steps of 65 bytes do not fit into blocks of 128"),
    ({"out": bytes_of(2, 0, 8)}, ValueError, r"out is \[2, 0, 8\]; expected at least one step"),
    ({"out": bytes_of(2, 3, 0)}, ValueError, r"out is \[2, 3, 0\]; expected at least one step"),
    ({"mask": torch.zeros(2, 3)}, ValueError, r"mask is torch.float32 \[2, 3\] .*; expected contiguous bool \[2, 3\]"),
    ({"mask": flags(2, 4)}, ValueError, r"mask is torch.bool \[2, 4\] .*; expected .* \[2, 3\]"),
    ({"mask": flags(3, 2).t()}, ValueError, r"mask is torch.bool \[2, 3\] .*; expected contiguous bool \[2, 3\]"),
    ({"mask": flags(2, 3, device="meta")}, ValueError, r"\[2, 3\] on meta; expected contiguous bool \[2, 3\] on cpu"),
    ({"pad": 4}, ValueError, "pad is 4; expected 0 to 3"),
]
# fmt: on


def test_columns_that_are_refused() -> None:
    for changes, error, message in COLUMNS:
        with pytest.raises(error, match=message):
            GatherPlan([column(**changes)], 2)


@pytest.mark.parametrize(
    ("batch", "length", "step_bytes", "block_steps", "stride"),
    [
        (1, 1, 2**30, 1, 2**31),  # a block of 2 GiB
        (1, 2**20, 2**11, 64, 2**17),  # a window of 2 GiB
        (2**26, 1, 4096, 1, 4096),  # 2**31 lines of 128 bytes
        (2**31 - 100, 1, 1, 128, 128),  # as many mask entries, to within one tile of masks
        (1, 2**25, 1, 1, 128),  # a window of 32 MiB, each byte of which lies in a line of its own
    ],
)
def test_sizes_beyond_32_bits_are_refused(
    batch: int, length: int, step_bytes: int, block_steps: int, stride: int
) -> None:
    source = torch.empty(0, dtype=torch.uint8).as_strided((0, stride), (stride, 1))
    out = torch.empty(batch, length, step_bytes, dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match=r"are more than the kernels count"):
        GatherColumn(source, out, 0).check(block_steps)


def test_columns_of_too_many_lines_together_are_refused() -> None:
    source = torch.empty(0, dtype=torch.uint8).as_strided((0, 2048), (2048, 1))
    out = torch.empty(2**26, 1, 2048, dtype=torch.uint8, device="meta")  # 2**30 lines
    GatherColumn(source, out, 0).check(1)
    with pytest.raises(
        ValueError, match=r"67,108,864 rows has 2,147,483,648 lines of 128 bytes in its columns"
    ):
        GatherPlan([GatherColumn(source, out, 0)] * 2, 1)


def test_blocks_of_steps_need_no_division() -> None:
    for steps in (1, 2, 3, 7, 31, 32, 33, 100, 1023, 2**20, 2**31 - 1):
        factor, shift = reciprocal(steps)
        assert 2**60 <= factor < 2**63  # an int64 in every launch
        for block in (0, 1, 5, 2**29, 2**61 // steps - 1):
            for x in (block * steps, (block + 1) * steps - 1):
                assert (4 * x * factor >> 64) >> shift == block


def test_sizes_just_below_32_bits_are_taken() -> None:
    source = torch.empty(0, dtype=torch.uint8).as_strided((0, 2**17), (2**17, 1))
    out = torch.empty(2**10, 2**9, 2**11, dtype=torch.uint8, device="meta")  # 1 GiB, 2**23 lines
    GatherColumn(source, out, 0).check(64)


def test_plans_that_are_refused() -> None:
    with pytest.raises(ValueError, match="No columns were given"):
        GatherPlan([], 2)
    with pytest.raises(ValueError, match="differ in batch size or device"):
        GatherPlan([column(), column(batch=3)], 2)
    with pytest.raises(ValueError, match="differ in batch size or device"):
        GatherPlan([column(), column(out=torch.zeros(2, 3, 8, dtype=torch.uint8, device="meta"))], 2)
    with pytest.raises(ValueError, match="0 steps of 8 bytes do not fit"):
        GatherPlan([column()], 0)


def test_steps_that_do_not_fit_into_their_blocks() -> None:
    with pytest.raises(ValueError, match="17 steps of 8 bytes do not fit into blocks of 128 bytes"):
        column().check(17)
    with pytest.raises(ValueError, match="5 steps of 32 bytes do not fit into blocks of 128 bytes"):
        dataclasses.replace(column(), step_stride=32).check(5)
    with pytest.raises(
        ValueError, match="A step of 8 bytes begins 25 bytes into one of 32 bytes of the source"
    ):
        dataclasses.replace(column(), inside=25, step_stride=32).check(2)


def test_launches_of_a_plan() -> None:
    """Columns go together by the words that their steps are made of; masks with the first launch."""
    mask = torch.zeros(2, 3, dtype=torch.bool)
    aligned = [column(step_bytes=size) for size in (16, 64)]
    plan = GatherPlan([*aligned, column(step_bytes=32, mask=mask)], 2)
    assert [(word, len(table)) for word, table, _ in plan.launches] == [(16, 4)]
    plan = GatherPlan(
        [*aligned, column(step_bytes=4), column(step_bytes=6, mask=mask), column(step_bytes=1)], 2
    )
    assert [(word, len(table)) for word, table, _ in plan.launches] == [(4, 4), (1, 2)]
    assert plan.launches[0][1][:, LINES].tolist().index(0) == 3
    assert [
        (word, len(table)) for word, table, _ in GatherPlan([column(step_bytes=3, mask=mask)], 2).launches
    ] == [(1, 2)]
    assert plan.table.shape == (5, WIDTH)
    assert plan.batch_size == 2


def ints(*shape: int, dtype: torch.dtype = torch.int64, **options: Any) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, **options)


I32 = torch.int32
# fmt: off
ROWS: Refused = [
    ({"slots": ints(2, dtype=I32)}, TypeError, r"slots is torch.int32 \[2\]; expected contiguous torch.int64"),
    ({"slots": ints(2, 1)}, TypeError, r"slots is torch.int64 \[2, 1\]; expected"),
    ({"anchors": torch.zeros(2)}, TypeError, r"anchors is torch.float32 \[2\]; expected contiguous torch.int64"),
    ({"anchors": ints(4)[::2]}, TypeError, r"anchors is torch.int64 \[2\]; expected contig"),
    ({"slots": ints(2, device="meta")}, ValueError, "slots is on meta; expected cpu"),
    ({"slots": ints(1)}, ValueError, "1 slots and 2 anchors; expected as many of both, at most 2"),
    ({"rows": ints(2, dtype=I32)}, TypeError, r"rows is torch.int32 \[2\]; expected contiguous torch.int64"),
    ({"rows": ints(4)[::2]}, TypeError, r"rows is torch.int64 \[2\]; expected contiguous torch.int64"),
    ({"rows": ints(2, device="meta")}, ValueError, "rows is on meta; expected cpu"),
    ({"rows": ints(1)}, ValueError, "1 rows and 2 slots; expected as many of both"),
    ({"slots": ints(3), "anchors": ints(3)}, ValueError, "3 slots and 3 anchors; expected as many of both, at most 2"),
]
INDEX: Refused = [
    ({"extent": ints(1, 3, dtype=I32)}, TypeError, "extent is torch.int32 .*; expected contiguous torch.int64"),
    ({"extent": ints(3, 3).t()}, TypeError, r"extent is torch.int64 .*; expected contiguous"),
    ({"extent": ints(4)}, TypeError, r"extent is torch.int64 \[4\]; expected .*\[T, 3\]"),
    ({"block_ids": ints(9)}, TypeError, "block_ids is torch.int64 .*; expected .*torch.int32"),
    ({"block_ids": ints(9, dtype=I32)[::2]}, TypeError, "block_ids is torch.int32 .*; expected contig"),
    ({"block_ids": ints(3, 3, dtype=I32)}, TypeError, r"block_ids is torch.int32 \[3, 3\]; expected"),
    ({"programs": 0}, ValueError, "programs is 0; expected at least 1"),
]
# fmt: on


def test_arguments_that_are_refused() -> None:
    store = Store([8], [4], 2)
    good = {"slots": ints(2), "anchors": ints(2), "extent": store.extent, "block_ids": store.block_ids}
    for run, cases in ((gather, ROWS + INDEX), (reference.gather, ROWS), (loop, ROWS)):
        for changes, error, message in cases:
            outputs = Outputs([Spec(8, 3)], 2)
            with pytest.raises(error, match=message):
                run(outputs.plan(store), **{**good, **changes})
            outputs.check([windows_of(store.rows[0], Spec(8, 3), ints(0), ints(0))])
