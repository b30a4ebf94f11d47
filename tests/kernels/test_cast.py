"""Converting columns: the kernel against PyTorch, to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import kernel_and_twin

from gear_loader.kernels import cast_reference
from gear_loader.kernels.cast import LAUNCH, cast
from gear_loader.kernels.cast_plan import CAST_DTYPES, CastColumn, CastPlan

# The interpreter computes by numpy, which warns of what a GPU does silently.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

Cast = Callable[..., None]
ALL = kernel_and_twin(cast, cast_reference.cast)
FLOATS = [dtype for dtype in CAST_DTYPES if dtype.is_floating_point]
SCALES = (1 / 255, -3.7, 2.0)
ROWS = 150


def values(dtype: torch.dtype, *, integers: bool = False) -> torch.Tensor:
    """[150, 5]: limits, ties of every rounding, and numbers of all sizes; those that integers hold, if asked for."""
    bits = torch.arange(ROWS * 5)
    if dtype == torch.bool:
        return (bits % 3 == 0).view(ROWS, 5)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        spread = (bits * 0x9E3779B97F4A7C15 - (1 << 62)) >> (64 - limits.bits)
        spread[:4] = torch.tensor(
            [limits.min, limits.max, limits.max // 2 + 1, (1 << min(25, limits.bits - 2)) + 1]
        )
        return spread.to(dtype).view(ROWS, 5)
    if integers:
        return ((bits - 300) * 0.37).to(dtype).view(ROWS, 5)
    # Every exponent of float32, subnormal ones too, with mantissas halfway between two 16-bit numbers and beside.
    halves = torch.tensor([0x8000, 0x18000, 0x7FFF, 0x8001, 0x1000, 0x3000, 0x0FFF, 0x1001, 0, 0x7FFFFF])
    patterns = (bits // 3 % 255) << 23 | halves[bits % 10] | (bits % 2) << 31
    patterns[:2] = torch.tensor([0x7F800000, 0x7FC00001])  # infinity, NaN
    numbers = patterns.to(torch.int64).to(torch.int32).view(torch.float32)
    if dtype == torch.float64:  # beside what float32 holds: rounded twice on the way to 16 bits
        return (numbers.double() * (1 + (bits % 3 - 1) * 2.0**-40)).view(ROWS, 5)
    return numbers.to(dtype).view(ROWS, 5)


def check(
    run: Cast, sources: list[torch.Tensor], targets: list[torch.dtype], scale: float | None, count: int
) -> None:
    """Convert columns together; compare with PyTorch, but for the bits of NaN, and what must not change."""
    columns = []
    for source, dtype in zip(sources, targets, strict=True):
        out = torch.full(source.shape, 77, device=source.device).to(dtype)
        columns.append(CastColumn(source, out, scale))
    run(CastPlan(columns), count, programs=2)
    for column in columns:
        source, expected = column.source[:count], torch.full_like(column.out, 77)
        expected[:count] = (source if scale is None else source * scale).to(column.out.dtype)
        found = column.out
        if found.dtype.is_floating_point:
            assert torch.equal(found.isnan(), expected.isnan()), column.kind
            found, expected = found.nan_to_num(1e9), expected.nan_to_num(1e9)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), column.kind


@ALL
@pytest.mark.parametrize("given", list(CAST_DTYPES), ids=list(CAST_DTYPES.values()))
def test_all_pairs_of_dtypes(run: Cast, given: torch.dtype) -> None:
    for target in CAST_DTYPES:
        whole = given.is_floating_point and not target.is_floating_point
        check(run, [values(given, integers=whole)], [target], None, 140)
    for target, scale in itertools.product(FLOATS, SCALES):
        check(run, [values(given)], [target], scale, ROWS)


@ALL
def test_columns_of_several_sizes_and_dtypes(run: Cast) -> None:
    """Full tiles and parts of them, one launch for each pair of dtypes, and no rows."""
    tile = LAUNCH["TILE"]
    sizes = [(500, 9), (500,), (500, tile // 500 + 1, 2), (500, 0)]
    sources = [torch.arange(torch.Size(size).numel()).view(size).to(torch.uint8) for size in sizes]
    targets = [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]
    for count in (500, 63, 1, 0):
        check(run, sources, targets, 1 / 255, count)
    plan = CastPlan([CastColumn(each, each.to(to)) for each, to in zip(sources, targets, strict=True)])
    assert sorted(kind for kind, _, _ in plan.launches) == [
        ("uint8", "bfloat16", ""),
        ("uint8", "float32", ""),
    ]


def test_the_default_dtype_decides_about_products_of_integers() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        check(
            cast if not torch.cuda.is_available() else cast_reference.cast,
            [values(torch.int64)],
            [torch.float64],
            1 / 3,
            ROWS,
        )
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("column", "error", "message"),
    [
        ((torch.zeros(2, 3), torch.zeros(3, 2)), ValueError, r"source is \[2, 3\] on cpu, out \[3, 2\]"),
        (
            (torch.zeros(2, dtype=torch.complex64), torch.zeros(2)),
            TypeError,
            r"source is torch.complex64 \[2\]",
        ),
        ((torch.zeros(2), torch.zeros(2).int(), 0.5), TypeError, "out is torch.int32 with scale=0.5"),
        ((torch.zeros(3), torch.zeros(3)), ValueError, "differ in batch size or device"),
    ],
)
def test_columns_that_are_refused(column: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CastPlan([CastColumn(torch.zeros(2), torch.zeros(2).half()), CastColumn(*column)])


@ALL
def test_arguments_that_are_refused(run: Cast) -> None:
    with pytest.raises(ValueError, match="No columns were given"):
        CastPlan([])
    with pytest.raises(ValueError, match="3 rows; expected at most 2"):
        run(CastPlan([CastColumn(torch.zeros(2), torch.zeros(2).half())]), 3)
    if run is cast:
        with pytest.raises(ValueError, match="begins at no multiple of 16 bytes"):
            run(CastPlan([CastColumn(torch.zeros(3)[1:], torch.zeros(2).half())]), 2)


@pytest.mark.gpu
@pytest.mark.parametrize("given", list(CAST_DTYPES), ids=list(CAST_DTYPES.values()))
def test_values_on_a_gpu_are_those_of_torch_there(given: torch.dtype) -> None:
    for target in (torch.float16, torch.bfloat16, torch.int32):  # each is compiled
        whole = given.is_floating_point and not target.is_floating_point
        check(cast, [values(given, integers=whole).cuda()], [target], None, 140)
    check(cast, [values(given).cuda()], [torch.bfloat16], 1 / 255, ROWS)
