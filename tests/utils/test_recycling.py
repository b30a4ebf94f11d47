"""Memory is used again when nothing refers to it, and only then."""

from __future__ import annotations

import torch

from gear_loader.utils.recycling import LEAST, Recycler


def test_memory_is_used_again_when_no_view_of_it_is_left() -> None:
    pool = Recycler(most=2)
    first = pool.empty(LEAST)
    place = first.data_ptr()
    view = first.view(torch.int32)[3:].numpy()
    del first
    second = pool.empty(LEAST)
    assert second.data_ptr() != place
    del view
    assert pool.empty(LEAST // 2 + 1).data_ptr() != place  # too small to be recycled
    third = pool.empty(LEAST)
    assert third.data_ptr() == place
    assert third.shape == (LEAST,)
    del third
    assert pool.empty(3 * LEAST).data_ptr() != place  # of another size: one that is remembered is forgotten


def test_memory_that_is_forgotten_belongs_to_its_user() -> None:
    pool = Recycler(most=2)
    tensors = [pool.empty(LEAST).fill_(i) for i in range(9)]
    assert [int(tensor.unique()) for tensor in tensors] == list(range(9))
