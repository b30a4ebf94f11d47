"""Images of blocks into blocks of a table: the kernel and its torch twin against numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from gather_common import Memory, host_memory, pinned_memory

from gear_loader.kernels import reference
from gear_loader.kernels.store import LAUNCH, store

Store = Callable[..., None]
RUNS = [
    pytest.param(
        store, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it is compiled here"), id="kernel"
    ),
    pytest.param(reference.store, id="twin"),
]
TILE = LAUNCH["TILE"]


def check(
    run: Store,
    n: int,
    per_row: int,
    lines: int,
    last: int,
    *,
    memory: Memory = host_memory,
    device: str = "cpu",
    **options: int,
) -> None:
    """Store random images, and compare all blocks."""
    random = np.random.default_rng((n, per_row, lines, last))
    count = n * per_row + 3
    source = host_memory(n * per_row * lines * 128).view(n, per_row, lines * 128)
    source.copy_(torch.from_numpy(random.integers(0, 256, source.shape, dtype=np.uint8)))
    source = source.to(device)
    target = memory(count * lines * 128).view(count, lines * 128)
    expected = random.integers(0, 256, target.shape, dtype=np.uint8)
    target.copy_(torch.from_numpy(expected))
    blocks = torch.from_numpy(random.permutation(count)[: n * per_row].astype(np.int32).reshape(n, per_row))
    for row, places in enumerate(blocks.tolist()):
        for k, place in enumerate(places):
            end = -(-last // 128) * 128 if k == per_row - 1 else lines * 128
            expected[place, :end] = source[row, k, :end].cpu()
    run(source, target, blocks.to(device), last, **options)
    if device != "cpu":
        torch.cuda.synchronize()
    np.testing.assert_array_equal(target.numpy(), expected)


SHAPES = [
    (1, 1, 1, 1), (1, 1, 1, 128), (5, 3, 2, 129), (7, 2, TILE, 1), (3, 2, TILE + 1, TILE * 128 + 1),
    (2, 3, 2 * TILE + 5, 300),
]  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("programs", [None, 1, 3])
def test_blocks_are_written_and_nothing_else(
    run: Store, shape: tuple[int, int, int, int], programs: int | None
) -> None:
    options = {} if programs is None else {"programs": programs}
    check(run, *shape, **options)


def test_no_row_is_no_launch() -> None:
    target = host_memory(256).view(2, 128).fill_(7)
    store(torch.empty(0, 1, 128, dtype=torch.uint8), target, torch.empty(0, 1, dtype=torch.int32), 1)
    assert (target == 7).all()


def test_what_does_not_fit() -> None:
    source, target = host_memory(512).view(2, 2, 128), host_memory(1024).view(8, 128)
    blocks = torch.zeros(2, 2, dtype=torch.int32)
    for arguments, expected in (
        ((source.view(4, 1, 128), target, blocks, 1), r"blocks is torch.int32 \[2, 2\]; expected .*\[4, 1\]"),
        ((source.view(torch.int8), target, blocks, 1), "source is torch.int8"),
        ((source, target.view(4, 256), blocks, 1), r"source is torch.uint8 \[2, 2, 128\]; expected .*256"),
        ((source, target, blocks.long(), 1), "blocks is torch.int64"),
        ((source, target, blocks, 0), "last_bytes is 0; expected 1 to 128"),
        ((source, target, blocks, 129), "last_bytes is 129"),
        (
            (source.view(2, 4, 64), target.view(16, 64), blocks.repeat(1, 2), 1),
            "Blocks have 64 bytes .* multiples of 128",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=expected):
            store(*arguments)
    with pytest.raises(ValueError, match="programs is 0"):
        store(source, target, blocks, 1, programs=0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_gpu(shape: tuple[int, int, int, int]) -> None:
    check(store, *shape, memory=pinned_memory, device="cuda")
