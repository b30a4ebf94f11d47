"""The gather kernel, under Triton's interpreter, and its torch twin against the definition of a window."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from gather_common import (
    PADS,
    STEP_BYTES,
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
from gear_loader.kernels.gather import gather
from gear_loader.kernels.plan import (
    LINE,
    LINES,
    PAD_HEAD,
    PAD_KEEP,
    PAD_TAIL,
    WIDTH,
    GatherColumn,
    GatherPlan,
)

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

if torch.cuda.is_available():
    pytest.skip("the kernel is compiled here, see test_gather_gpu.py", allow_module_level=True)

BLOCK_STEPS = (1, 7, 20, 32, 64, 100)
LENGTHS = (1, 5, 20, 63, 130)
PROGRAMS = (1, 3, 132)
BOTH = pytest.mark.parametrize("run", [gather, reference.gather], ids=["kernel", "twin"])

# Four sizes a launch: the first group is all whole 16-byte words, the others are of mixed alignment.
GROUPS = ((16, 48, 128, 384), (1, 6, 64, 1000), (2, 8, 20, 132), (3, 4, 12, 44))


def test_the_groups_cover_the_step_sizes() -> None:
    assert sorted(size for group in GROUPS for size in group) == sorted(STEP_BYTES)


# Shapes ----------------------------------------------------------------------------------------------


def specs_for(sizes: tuple[int, ...], length: int, seed: int) -> list[Spec]:
    """Windows before, across the start of, within, across the end of, and after trajectories, with every padding."""
    random = np.random.default_rng(seed)
    offsets = (-length - 300, 1 - length, -length // 2, 0, 2, 300)
    order = random.permutation(len(offsets)).tolist()
    return [
        Spec(size, length, offsets[order[i % len(order)]], PADS[(seed + i) % 3], mask=bool((seed + i) % 4))
        for i, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("block_steps", "length"),
    mostly_long(itertools.product(BLOCK_STEPS, LENGTHS), *itertools.product((1, 7, 32), (1, 5, 20))),
)
def test_shapes(block_steps: int, length: int) -> None:
    # Over all cases every step size meets every block size and every length of window.
    i, j = BLOCK_STEPS.index(block_steps), LENGTHS.index(length)
    sizes, case = GROUPS[(i + j) % 4], i * len(LENGTHS) + j
    lengths = sorted({1, max(block_steps - 1, 1), block_steps, block_steps + 1, 3 * block_steps + 2, 150})
    store = Store(sizes, lengths, block_steps, seed=case)
    slots, anchors = store.draw(2 if length > 100 else 5, seed=case)
    specs = specs_for(sizes, length, case)
    check_gather(reference.gather, store, specs, slots, anchors, mask=bool(case % 2))
    plan = check_gather(
        gather,
        store,
        specs,
        slots,
        anchors,
        mask=bool(case % 2),
        compact=case % 3 == 0,
        programs=PROGRAMS[case % len(PROGRAMS)],
    )
    assert [word for word, _, _ in plan.launches] == ([16] if sizes == GROUPS[0] else [4, 1])


def test_every_step_of_a_small_trajectory() -> None:
    # All anchors and offsets around a trajectory of 5 steps in blocks of 2, each padding, in one launch.
    store = Store([4] * 3, [5], 2)
    for offset in (-9, -8, -5, -1, 0, 3, 4, 7):
        specs = [Spec(4, 4, offset, pad) for pad in PADS]
        slots, anchors = torch.zeros(5, dtype=torch.int64), torch.arange(5)
        check_gather(reference.gather, store, specs, slots, anchors)
        check_gather(gather, store, specs, slots, anchors, compact=offset % 2 == 0)


def test_a_window_by_hand() -> None:
    # The example of Window's docstring and its neighbours; `.` is padding.
    store = Store([1] * 3, [3], 2)
    store.rows = [[np.frombuffer(b"abc", dtype=np.uint8).reshape(3, 1)]] * 3
    first = int(store.extent[0, 1])
    for source in store.sources:
        for step, letter in enumerate(b"abc"):
            source[store.block_ids[first + step // 2], step % 2] = letter
    expected = {
        (0, -1): (b".abc", b".abc", b"abc."),
        (1, -3): (b"..ab", b"..ab", b"ab.."),
        (1, 1): (b"c...", b"...c", b"c..."),
        (2, 1): (b"....", b"....", b"...."),
        (0, -4): (b"....", b"....", b"...."),
    }
    for run, ((anchor, offset), results) in itertools.product((gather, reference.gather), expected.items()):
        outputs = Outputs([Spec(1, 4, offset, pad) for pad in (PAD_KEEP, PAD_HEAD, PAD_TAIL)], 1)
        run(outputs.plan(store), torch.tensor([0]), torch.tensor([anchor]), store.extent, store.block_ids)
        for out, mask, result in zip(outputs.outs, outputs.masks, results, strict=True):
            assert out.numpy().tobytes() == result.replace(b".", b"\0")
            assert mask is not None
            assert mask.numpy().tolist() == [[letter != ord(".") for letter in result]]


@BOTH
@pytest.mark.parametrize("compact", [False, True], ids=["index", "compact"])
@pytest.mark.parametrize(
    ("batch", "count"), mostly_long([(1, 1), (3, 3), (64, 64), (64, 1), (64, 50), (3, 2)], (1, 1), (64, 50))
)
def test_batches(run: Gather, compact: bool, batch: int, count: int) -> None:
    store = Store([8, 12, 1], [1, 6, 7, 20, 33], 7, seed=batch)
    slots, anchors = store.draw(count, seed=count)
    specs = [Spec(8, 5, -2), Spec(12, 3, -4, PAD_HEAD), Spec(1, 9, 0, PAD_TAIL, mask=False)]
    check_gather(run, store, specs, slots, anchors, batch=batch, compact=compact)


@BOTH
def test_no_rows(run: Gather) -> None:
    store = Store([8, 16], [5], 2)
    nothing = torch.zeros(0, dtype=torch.int64)
    check_gather(run, store, [Spec(8, 5), Spec(16, 2)], nothing, nothing, batch=3)


@BOTH
@pytest.mark.parametrize("sizes", [(16, 48), (8, 3)], ids=["aligned", "mixed"])
@pytest.mark.parametrize(("batch", "count"), mostly_long([(7, 7), (9, 1), (40, 7), (3, 0)], (40, 7), (3, 0)))
def test_chosen_rows(run: Gather, sizes: tuple[int, int], batch: int, count: int) -> None:
    store = Store(sizes, [1, 6, 20, 33], 7, seed=batch)
    slots, anchors = store.draw(count, seed=count)
    specs = [Spec(sizes[0], 5, -2), Spec(sizes[1], 63, -40, PAD_HEAD)]
    rows = choose(count, batch, seed=count)
    for compact in (False, True):
        check_gather(run, store, specs, slots, anchors, batch=batch, rows=rows, compact=compact)


@BOTH
def test_a_batch_from_two_tables(run: Gather) -> None:
    check_two_tables(run)


@BOTH
@pytest.mark.parametrize("poison", [False, True])
def test_columns_with_and_without_masks(run: Gather, poison: bool) -> None:
    # Windows of different lengths in one launch; every subset of them with masks.
    store = Store([16, 32, 48], [3, 40], 16)
    slots, anchors = store.draw(6)
    for masks in itertools.product([False, True], repeat=3):
        specs = [
            Spec(size, length, offset, pad, mask)
            for size, length, offset, pad, mask in zip(
                (16, 32, 48), (7, 1, 20), (-6, 0, -3), PADS, masks, strict=True
            )
        ]
        check_gather(run, store, specs, slots, anchors, mask=poison)


def test_masks_of_many_tiles() -> None:
    # 600 entries a row: rows start and end within tiles of 512.
    store = Store([1], [700, 20], 64)
    slots, anchors = torch.tensor([0, 1, 0, 0, 1]), torch.tensor([0, 7, 350, 699, 19])
    check_gather(gather, store, [Spec(1, 600, -300)], slots, anchors, programs=3)


@pytest.mark.parametrize("programs", [*PROGRAMS, None])
def test_program_counts(programs: int | None) -> None:
    # 4 columns of several tiles each, so that a program crosses from column to column.
    store = Store([16, 64, 132, 3], [10, 90], 32)
    slots, anchors = store.draw(5)
    specs = [Spec(16, 40, -20), Spec(64, 10, -9, PAD_HEAD), Spec(132, 12, 0, PAD_TAIL), Spec(3, 63, -30)]
    check_gather(gather, store, specs, slots, anchors, programs=programs)


@pytest.mark.parametrize("spare_lines", [1, 3])
def test_blocks_with_spare_lines(spare_lines: int) -> None:
    # Whole lines of padding at the end of every block, more than a table would leave.
    for sizes in ((16, 48), (1, 20)):
        store = Store(sizes, [5, 61], 7, spare_lines=spare_lines)
        slots, anchors = store.draw(4)
        specs = [Spec(size, 30, -15) for size in sizes]
        check_gather(reference.gather, store, specs, slots, anchors)
        check_gather(gather, store, specs, slots, anchors)


@BOTH
@pytest.mark.parametrize(
    ("shifts", "words"), [((4, 8), [4]), ((1, 4), [4, 1]), ((2, 3), [1]), ((0, 16), [16])]
)
def test_outputs_at_odd_addresses(run: Gather, shifts: tuple[int, int], words: list[int]) -> None:
    store = Store([16, 32], [5, 40], 9)
    slots, anchors = store.draw(4)
    specs = [Spec(size, 11, -5, shift=shift) for size, shift in zip((16, 32), shifts, strict=True)]
    plan = check_gather(run, store, specs, slots, anchors)
    assert [word for word, _, _ in plan.launches] == words


@BOTH
def test_far_windows(run: Gather) -> None:
    # Offsets and anchors whose sums leave 32 bits.
    store = Store([4, 4, 16, 16], [40, 3], 7)
    slots, anchors = torch.tensor([0, 1, 0]), torch.tensor([2**31 + 5, -(2**31) - 8, 2**33])
    offsets = (-(2**31) + 1, 2**31 - 1, -(2**31) + 1, 0)
    for pad in PADS:
        check_gather(
            run,
            store,
            [Spec(s, 9, o, pad) for s, o in zip((4, 4, 16, 16), offsets, strict=True)],
            slots,
            anchors,
        )


# Random sweep ----------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    aligned = draw(st.booleans())
    size = st.sampled_from([16, 32, 48, 80, 144]) if aligned else st.integers(1, 70)
    sizes = draw(st.lists(size, min_size=1, max_size=3))
    block_steps = draw(st.integers(1, 40))
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=5))
    specs = [
        Spec(
            size,
            draw(st.integers(1, 24)),
            draw(st.integers(-40, 40)),
            draw(st.sampled_from(PADS)),
            draw(st.booleans()),
            0 if aligned else draw(st.integers(0, 5)),
        )
        for size in sizes
    ]
    count = draw(st.integers(1, 5))
    batch = count + draw(st.integers(0, 2))
    return {
        "store": Store(
            sizes, lengths, block_steps, seed=draw(st.integers(0, 99)), spare_lines=draw(st.integers(0, 1))
        ),
        "specs": specs,
        "draw": (count, draw(st.integers(0, 99))),
        "batch": batch,
        "rows": choose(count, batch, draw(st.integers(0, 9))) if draw(st.booleans()) else None,
        "mask": draw(st.booleans()),
        "compact": draw(st.booleans()),
        "programs": draw(st.integers(1, 9)),
    }


@hypothesis.given(cases())
def test_random_shapes(case: dict[str, Any]) -> None:
    count, seed = case.pop("draw")
    store, specs = case.pop("store"), case.pop("specs")
    slots, anchors = store.draw(count, seed)
    check_gather(gather, store, specs, slots, anchors, **case)
    check_gather(reference.gather, store, specs, slots, anchors, **case)


# Beyond 32 bits --------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("sizes", [(48, 64), (6, 12)], ids=["aligned", "unaligned"])
def test_an_address_space_of_more_than_2_31_words(run: Gather, sizes: tuple[int, int]) -> None:
    store = HugeStore(sizes, 21)
    assert all(source.numel() >= 24 * 2**30 - LINE * 64 for source in store.sources)
    slots, anchors = store.draw(6)
    specs = [
        Spec(size, 50, offset, pad)
        for size, offset, pad in zip(sizes, (-10, -40), (PAD_KEEP, PAD_HEAD), strict=True)
    ]
    check_gather(run, store, specs, slots, anchors)


# The plan --------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"source": torch.zeros(4, 128)},
            TypeError,
            r"source is torch.float32 \[4, 128\]; expected uint8 with 2",
        ),
        (
            {"source": torch.zeros(512, dtype=torch.uint8)},
            TypeError,
            r"source is torch.uint8 \[512\]; expected uint8",
        ),
        (
            {"out": torch.zeros(2, 3, 8)},
            TypeError,
            r"out is torch.float32 \[2, 3, 8\]; expected uint8 with 3",
        ),
        (
            {"out": torch.zeros(2, 24, dtype=torch.uint8)},
            TypeError,
            r"out is torch.uint8 \[2, 24\]; expected uint8",
        ),
        (
            {"out": torch.zeros(3, 2, 8, dtype=torch.uint8).transpose(0, 1)},
            ValueError,
            r"must be contiguous; strides \(8, 16, 1\), \(128, 1\)",
        ),
        (
            {"source": host_memory(512).view(128, 4).t()},
            ValueError,
            r"must be contiguous; strides \(24, 8, 1\), \(1, 4\)",
        ),
        (
            {"source": host_memory(400).view(4, 100)},
            ValueError,
            r"source has stride 100 and address 0x[0-9a-f]+; expected",
        ),
        (
            {"source": host_memory(520)[8:].view(4, 128)},
            ValueError,
            r"source has stride 128 and address 0x\w+8; expected",
        ),
        (
            {"out": torch.zeros(2, 3, 65, dtype=torch.uint8)},
            ValueError,
            "2 steps of 65 bytes do not fit into blocks of 128",
        ),
        (
            {"out": torch.zeros(2, 0, 8, dtype=torch.uint8)},
            ValueError,
            r"out is \[2, 0, 8\]; expected at least one step",
        ),
        (
            {"out": torch.zeros(2, 3, 0, dtype=torch.uint8)},
            ValueError,
            r"out is \[2, 3, 0\]; expected at least one step",
        ),
        (
            {"mask": torch.zeros(2, 3)},
            ValueError,
            r"mask is torch.float32 \[2, 3\] .*; expected contiguous bool \[2, 3\]",
        ),
        (
            {"mask": torch.zeros(2, 4, dtype=torch.bool)},
            ValueError,
            r"mask is torch.bool \[2, 4\] .*; expected .* \[2, 3\]",
        ),
        (
            {"mask": torch.zeros(3, 2, dtype=torch.bool).t()},
            ValueError,
            r"mask is torch.bool \[2, 3\] .*; expected contiguous bool \[2, 3\]",
        ),
        (
            {"mask": torch.zeros(2, 3, dtype=torch.bool, device="meta")},
            ValueError,
            r"mask is torch.bool \[2, 3\] on meta; expected contiguous bool \[2, 3\] on cpu",
        ),
        ({"pad": 3}, ValueError, "pad is 3; expected 0, 1 or 2"),
    ],
)
def test_columns_that_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
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


def test_sources_that_are_refused() -> None:
    plan = GatherPlan([column(), column()], 2)
    with pytest.raises(ValueError, match="1 sources were given; expected 2, one a column"):
        plan.of_source([host_memory(512).view(4, 128)], 2)
    with pytest.raises(ValueError, match="source has stride 100 and address"):
        plan.of_source([host_memory(512).view(4, 128), host_memory(400).view(4, 100)], 2)
    with pytest.raises(ValueError, match="17 steps of 8 bytes do not fit into blocks of 128 bytes"):
        plan.of_source([column.source for column in plan.columns], 17)


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


# The launchers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"slots": torch.zeros(2, dtype=torch.int32)},
            TypeError,
            r"slots is torch.int32 \[2\]; expected contiguous int64",
        ),
        (
            {"slots": torch.zeros(2, 1, dtype=torch.int64)},
            TypeError,
            r"slots is torch.int64 \[2, 1\]; expected",
        ),
        (
            {"anchors": torch.zeros(2)},
            TypeError,
            r"anchors is torch.float32 \[2\]; expected contiguous int64",
        ),
        (
            {"anchors": torch.zeros(4, dtype=torch.int64)[::2]},
            TypeError,
            r"anchors is torch.int64 \[2\]; expected contig",
        ),
        (
            {"slots": torch.zeros(2, dtype=torch.int64, device="meta")},
            ValueError,
            "slots is on meta; expected cpu",
        ),
        (
            {"slots": torch.zeros(1, dtype=torch.int64)},
            ValueError,
            "1 slots and 2 anchors; expected as many of both, at most 2",
        ),
        (
            {"rows": torch.zeros(2, dtype=torch.int32)},
            TypeError,
            r"rows is torch.int32 \[2\]; expected contiguous int64",
        ),
        (
            {"rows": torch.zeros(4, dtype=torch.int64)[::2]},
            TypeError,
            r"rows is torch.int64 \[2\]; expected contiguous int64",
        ),
        (
            {"rows": torch.zeros(2, dtype=torch.int64, device="meta")},
            ValueError,
            "rows is on meta; expected cpu",
        ),
        (
            {"rows": torch.zeros(1, dtype=torch.int64)},
            ValueError,
            "1 rows and 2 slots; expected as many of both",
        ),
        (
            {"slots": torch.zeros(3, dtype=torch.int64), "anchors": torch.zeros(3, dtype=torch.int64)},
            ValueError,
            "3 slots and 3 anchors; expected as many of both, at most 2",
        ),
    ],
)
@BOTH
def test_rows_that_are_refused(
    run: Gather, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    check_refusal(run, changes, error, message)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"extent": torch.zeros(1, 2, dtype=torch.int32)},
            TypeError,
            "extent is torch.int32 .*; expected contiguous torch.int64",
        ),
        (
            {"extent": torch.zeros(2, 2, dtype=torch.int64).t()},
            TypeError,
            r"extent is torch.int64 .*; expected contiguous",
        ),
        (
            {"extent": torch.zeros(4, dtype=torch.int64)},
            TypeError,
            r"extent is torch.int64 \[4\]; expected .*\[T, 2\]",
        ),
        (
            {"block_ids": torch.zeros(9, dtype=torch.int64)},
            TypeError,
            "block_ids is torch.int64 .*; expected .*torch.int32",
        ),
        (
            {"block_ids": torch.zeros(9, dtype=torch.int32)[::2]},
            TypeError,
            "block_ids is torch.int32 .*; expected contig",
        ),
        (
            {"block_ids": torch.zeros(3, 3, dtype=torch.int32)},
            TypeError,
            r"block_ids is torch.int32 \[3, 3\]; expected",
        ),
        ({"programs": 0}, ValueError, "programs is 0; expected at least 1"),
    ],
)
def test_arguments_that_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    check_refusal(gather, changes, error, message)


def check_refusal(run: Gather, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    store = Store([8], [4], 2)
    outputs = Outputs([Spec(8, 3)], 2)
    rows = {"slots": torch.zeros(2, dtype=torch.int64), "anchors": torch.zeros(2, dtype=torch.int64)}
    index = {"extent": store.extent, "block_ids": store.block_ids}
    with pytest.raises(error, match=message):
        run(outputs.plan(store), **{**rows, **index, **changes})
    nothing = torch.zeros(0, dtype=torch.int64)
    outputs.check([windows_of(store.rows[0], Spec(8, 3), nothing, nothing)])
