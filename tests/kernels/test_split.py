"""Splitting gathered records into columns: the kernel and its torch twin against the definition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import kernel_and_twin
from gather_common import POISON
from records_common import CARTPOLE, HOPPER, Part, Records

from gear_loader.kernels import reference
from gear_loader.kernels.split import split
from gear_loader.kernels.split_plan import SPLIT_WORD, SplitColumn, SplitPlan

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

DEVICE = "cuda"
Split = Callable[..., None]

ALL = kernel_and_twin(split, reference.split)


@ALL
@pytest.mark.parametrize("chosen", [False, True])
def test_columns_of_a_record(run: Split, chosen: bool) -> None:
    for batch, count, programs in ((1, 1, 1), (9, 0, 1), (30, 30, 3), (70, 41, None)):
        Records(32, 7, CARTPOLE, batch, count, chosen=chosen).run(run, programs)
        Records(64, 20, HOPPER, batch, count, chosen=chosen).run(run, programs)


def test_words_are_as_wide_as_everything_allows() -> None:
    assert Records(32, 7, CARTPOLE, 4, 4).plan.table[:, SPLIT_WORD].tolist() == [16, 4, 4, 1, 16]
    assert Records(36, 7, [(0, 32, 0, 7), (32, 4, 0, 7)], 4, 4).plan.table[:, SPLIT_WORD].tolist() == [4, 4]
    assert Records(32, 7, CARTPOLE, 4, 4, shift=4).plan.table[:, SPLIT_WORD].tolist() == [4, 4, 4, 1, 4]


@hypothesis.given(
    parts=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(0, 5), st.integers(1, 6)),
        min_size=1,
        max_size=4,
    ),
    spare=st.integers(0, 9),
    batch=st.integers(1, 40),
    chosen=st.booleans(),
    shift=st.sampled_from([0, 0, 4, 3]),
)
def test_random_shapes(parts: list[Part], spare: int, batch: int, chosen: bool, shift: int) -> None:
    size = max(inside + width for inside, width, _, _ in parts) + spare
    steps = max(first + length for _, _, first, length in parts)
    for function in (reference.split,) if torch.cuda.is_available() else (split, reference.split):
        Records(size, steps, parts, batch, batch * 2 // 3, chosen=chosen, shift=shift).run(function)


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("column", "error", "message"),
    [
        ((torch.zeros(2, 3, 8), bytes_of(2, 3, 4), 0, 0), TypeError, r"records is torch.float32 \[2, 3, 8\]"),
        ((bytes_of(2, 3, 8), bytes_of(2, 12), 0, 0), TypeError, r"out is torch.uint8 \[2, 12\]"),
        (
            (bytes_of(2, 3, 8), bytes_of(2, 3, 4), 1, 0),
            ValueError,
            "3 steps of 4 bytes from step 1 on; expected",
        ),
        (
            (bytes_of(2, 3, 8), bytes_of(2, 3, 4), 0, 5),
            ValueError,
            "A column of 4 bytes from byte 5 on does not fit",
        ),
        ((bytes_of(3, 3, 8), bytes_of(2, 3, 4), 0, 0), ValueError, "differ in batch size or device"),
    ],
)
def test_columns_that_are_refused(column: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SplitPlan([SplitColumn(*column)])


@ALL
def test_arguments_that_are_refused(run: Split) -> None:
    records = Records(32, 7, CARTPOLE, 4, 2)
    with pytest.raises(ValueError, match="No columns were given"):
        SplitPlan([])
    with pytest.raises(ValueError, match="5 rows; expected at most 4, the batch size"):
        run(records.plan, 5)
    with pytest.raises(ValueError, match="1 rows for a count of 2"):
        run(records.plan, 2, rows=torch.zeros(1, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"rows is torch.int32 \[2\]; expected contiguous torch.int64"):
        run(records.plan, 2, rows=torch.zeros(2, dtype=torch.int32))
    assert all((part.whole == POISON).all() for part in records.guarded)


@pytest.mark.gpu
@pytest.mark.parametrize("chosen", [False, True])
def test_records_on_a_gpu(chosen: bool) -> None:
    for programs, shift in ((1, 0), (3, 1), (132, 4), (None, 0)):
        Records(32, 7, CARTPOLE, 300, 257, chosen=chosen, shift=shift, device=DEVICE).run(split, programs)
        Records(64, 20, HOPPER, 300, 257, chosen=chosen, shift=shift, device=DEVICE).run(split, programs)
