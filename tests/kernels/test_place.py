"""Placing rows out of staging memory: the kernel, its torch twin and the compiled loop against the definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gather_common import FOREIGN, POISON, Guarded, Memory, choose, host_memory, pinned_memory, reserve

from gear_loader import Column, Window
from gear_loader.kernels import reference
from gear_loader.kernels.place import place
from gear_loader.kernels.plan import PLACE_WORD, PlacePlan
from gear_loader.native import gathering
from gear_loader.storage.schema import Schema
from gear_loader.transport.spec import WindowSpec

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

ROW_BYTES = (1, 3, 4, 16, 20, 48, 63, 128, 132, 500, 512, 10_000)
DEVICE = "cuda"
SLEEP = 20_000_000  # cycles: some ten milliseconds

Place = Callable[..., None]

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is compiled here")


def compiled(
    plan: PlacePlan, staging: torch.Tensor, rows: torch.Tensor, *, programs: int | None = None
) -> None:
    """The compiled loop with the signature of the kernel."""
    count = plan.check_rows(staging, rows)
    gathering.place(plan.pieces(staging, count).numpy(), rows.numpy())


RUNS = {"kernel": [interpreted], "twin": [], "compiled": []}
FUNCTIONS: dict[str, Place] = {"kernel": place, "twin": reference.place, "compiled": compiled}
ALL = pytest.mark.parametrize(
    "run", [pytest.param(FUNCTIONS[name], marks=marks, id=name) for name, marks in RUNS.items()]
)


class Staged:
    """Poisoned outputs between guard bytes, and staging memory with random rows for them.

    Attributes:
        plan, staging, rows: what a placing takes. guarded: the outputs.
    """

    def __init__(
        self,
        row_bytes: Sequence[int],
        batch: int,
        count: int,
        *,
        shift: int = 0,
        seed: int = 0,
        memory: Memory = host_memory,
        device: str = "cpu",
    ) -> None:
        random = np.random.default_rng(seed)
        self.guarded = [Guarded((batch, size), shift=shift, device=device) for size in row_bytes]
        self.plan = PlacePlan([each.out for each in self.guarded])
        self.staging = memory(self.plan.size(count)).fill_(FOREIGN)
        rows = choose(count, batch, seed)
        self.rows = rows.to(device)
        for output, offset in zip(self.guarded, self.plan.offsets(count), strict=True):
            size = output.expected.shape[1]
            values = random.integers(0, 256, (count, size), dtype=np.uint8)
            self.staging[offset : offset + count * size] = torch.from_numpy(values.reshape(-1))
            output.expected[rows.numpy()] = values

    def run(self, function: Place, programs: int | None = None) -> None:
        function(self.plan, self.staging, self.rows, programs=programs)
        for output in self.guarded:
            output.check()


@ALL
def test_one_piece(run: Place) -> None:
    for size, count, batch in zip(ROW_BYTES, (0, 1, 7, 7) * 3, (9, 1, 9, 7) * 3, strict=True):
        Staged([size], batch, count, seed=size).run(run)


@ALL
@pytest.mark.parametrize(
    ("shift", "words"), [(0, [16, 4, 1]), (1, [1, 1, 1]), (4, [4, 4, 1]), (8, [4, 4, 1])]
)
def test_outputs_at_odd_addresses(run: Place, shift: int, words: list[int]) -> None:
    staged = Staged([48, 20, 7], 8, 5, shift=shift)
    # torch's own allocations are aligned, on which the words below rest
    assert [part.whole.data_ptr() % 16 for part in staged.guarded] == [0, 0, 0]
    assert staged.plan.table[:, PLACE_WORD].tolist() == words
    staged.run(run)


@pytest.mark.parametrize("size", [4095, 4096, 4097, 70_001])
def test_large_rows(size: int) -> None:
    # Rows above and below what is copied by lines, at every remainder of a line.
    for shift in (0, 1, 63):
        Staged([size, 5], 6, 4, shift=shift).run(compiled)


@hypothesis.given(
    sizes=st.lists(st.integers(1, 70) | st.sampled_from([16, 64, 500, 5001]), min_size=1, max_size=5),
    count=st.integers(0, 20),
    spare=st.integers(0, 3),
    shift=st.sampled_from([0, 0, 4, 3]),
    programs=st.sampled_from([1, 2, 3, 132, None]),
    seed=st.integers(0, 99),
)
def test_random_shapes(
    sizes: list[int], count: int, spare: int, shift: int, programs: int | None, seed: int
) -> None:
    for name, function in FUNCTIONS.items():
        if name == "kernel" and torch.cuda.is_available():
            continue
        staged = Staged(sizes, count + spare or 1, count, shift=shift, seed=seed)
        more = host_memory(len(staged.staging) + 1001 * (seed % 2)).fill_(FOREIGN)  # also more than is needed
        more[: len(staged.staging)] = staged.staging
        staged.staging = more
        staged.run(function, programs)


@ALL
@pytest.mark.parametrize("size", [1008, 1001])
def test_rows_beyond_2_31_bytes(run: Place, size: int) -> None:
    batch = 5 * 2**20 + 7
    out = torch.from_numpy(reserve(batch * size)).view(batch, size)
    plan, count = PlacePlan([out]), 5
    assert (batch - 1) * size > 2**32
    rows = torch.tensor([batch - 1, 0, 3 * 2**20, batch - 3, 2])
    staging = host_memory(plan.size(count))
    staging.copy_(
        torch.from_numpy(np.random.default_rng(size).integers(1, 256, len(staging), dtype=np.uint8))
    )
    run(plan, staging, rows)
    assert torch.equal(out[rows], staging[: count * size].view(count, size))
    for neighbour in (1, 3, batch - 2, 3 * 2**20 + 1):
        assert not out[neighbour].any()


@pytest.mark.parametrize("count", [0, 1, 5, 64])
def test_pieces_lie_as_those_of_a_reply(count: int) -> None:
    schema = Schema(
        {"a": Column(torch.float32, (11,)), "b": Column(torch.bool), "c": Column(torch.int16, (3,))}
    )
    spec = WindowSpec("table", schema, {"a": Window(7), "b": Window(7), "c": Window(3, -2)})
    pieces = spec.pieces(count)
    plan = PlacePlan([torch.empty(64, piece.row_bytes, dtype=torch.uint8) for piece in pieces])
    assert plan.offsets(count) == [piece.offset for piece in pieces]
    assert plan.size(count) == spec.data_bytes(count)


def bytes_of(*shape: int, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8, device=device)


# fmt: off
OUTPUTS: list[tuple[list[torch.Tensor], type[Exception], str]] = [
    ([], ValueError, "No outputs were given; expected at least one"),
    ([torch.zeros(2, 3)], TypeError, r"out is torch.float32 \[2, 3\]; expected contiguous torch.uint8 \[B, row"),
    ([bytes_of(2, 3, 4)], TypeError, r"out is torch.uint8 \[2, 3, 4\]; expected contiguous torch.uint8"),
    ([bytes_of(3, 2).t()], TypeError, r"out is torch.uint8 \[2, 3\]; expected contiguous torch.uint8"),
    ([bytes_of(2, 0)], ValueError, r"out is \[2, 0\]; expected rows of 1 to less than"),
    ([bytes_of(1, 2**31 - 2**13, device="meta")], ValueError, r"out is \[1, 2147475456\]; expected rows of"),
    ([bytes_of(2, 3), bytes_of(3, 3)], ValueError, "The outputs differ in batch size or device"),
    ([bytes_of(2, 3), bytes_of(2, 3, device="meta")], ValueError, "The outputs differ in batch size or"),
]
STAGING = r"staging has {} bytes at 0x[0-9a-f]+{}; expected at least 256 for 2 rows, at a multiple of 128"
ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rows": torch.zeros(2, dtype=torch.int32)}, TypeError, r"rows is torch.int32 \[2\]; expected contig"),
    ({"rows": torch.arange(4)}, ValueError, "4 rows; expected at most 3, the batch size"),
    ({"staging": torch.zeros(256)}, TypeError, r"staging is torch.float32 \[256\]; expected contiguous torch.uint8"),
    ({"staging": bytes_of(2, 128)}, TypeError, r"staging is torch.uint8 \[2, 128\]; expected contiguous"),
    ({"staging": host_memory(512)[::2]}, TypeError, r"staging is torch.uint8 \[256\]; expected contiguous"),
    ({"staging": host_memory(255)}, ValueError, STAGING.format(255, "")),
    ({"staging": host_memory(512)[64:]}, ValueError, STAGING.format(448, "[4c]0")),
]
# fmt: on


def test_outputs_that_are_refused() -> None:
    for outs, error, message in OUTPUTS:
        with pytest.raises(error, match=message):
            PlacePlan(outs)


@ALL
def test_arguments_that_are_refused(run: Place) -> None:
    programs = ({"programs": 0}, ValueError, "programs is 0; expected at least 1")
    for changes, error, message in [*ARGUMENTS, *([programs] if run is place else [])]:
        outs = [torch.full((3, size), POISON, dtype=torch.uint8) for size in (60, 4)]
        arguments = {"staging": host_memory(256), "rows": torch.tensor([2, 0])}
        with pytest.raises(error, match=message):
            run(PlacePlan(outs), **{**arguments, **changes})
        assert all((out == POISON).all() for out in outs)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_shapes_on_a_gpu(count: int) -> None:
    for programs, shift in ((1, 0), (3, 1), (132, 4), (None, 0)):
        sizes = (384, 1, 63, 16, 500, 3, 20, 42_000)
        staged = Staged(sizes, count + 3, count, shift=shift, seed=count, memory=pinned_memory, device=DEVICE)
        staged.run(place, programs)


@pytest.mark.gpu
def test_the_current_stream_is_used() -> None:
    # The kernel comes behind a pause and a second poisoning of the outputs.
    def late(*arguments: Any, **options: Any) -> None:
        torch.cuda._sleep(SLEEP)
        for part in staged.guarded:
            part.whole.fill_(POISON)
        place(*arguments, **options)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        staged = Staged([500, 64], 40, 30, memory=pinned_memory, device=DEVICE)
        staged.run(late)


@pytest.mark.gpu
def test_staging_memory_that_the_gpu_cannot_read() -> None:
    staged = Staged([500, 64], 40, 30, memory=host_memory, device=DEVICE)
    with pytest.raises(
        ValueError, match="staging is in memory that the GPU cannot read; expected pinned memory"
    ):
        staged.run(place)
