"""A storage for TorchRL's buffers in a table."""

from __future__ import annotations

import multiprocessing
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gear_loader as gear
from gear_loader.errors import SchemaError

_start = multiprocessing.get_start_method(allow_none=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    data = pytest.importorskip("torchrl.data", reason="needs pip install '.[torchrl]'")
    from tensordict import TensorDict

    from gear_loader.integrations import torchrl_storage
    from gear_loader.integrations.torchrl_storage import TableStorage
multiprocessing.set_start_method(_start, force=True)  # which torchrl has changed


def rows(first: int, count: int) -> Any:
    numbers = torch.arange(first, first + count)
    following = {"reward": numbers.double().unsqueeze(-1), "done": numbers % 7 == 0}
    entries = {"observation": numbers.float().unsqueeze(-1).repeat(1, 3), "next": following}
    return TensorDict(entries, [count])


@pytest.mark.parametrize("ndim", [1, 2])
def test_a_buffer_is_that_of_torchrl_with_rows_in_a_named_table(ndim: int, tmp_path: Path) -> None:
    """Its rows after wrapping around, in a table that others attach to, through pickling, a state and files."""
    name = f"torchrl-{np.random.default_rng().integers(1 << 40)}"
    made = []
    for storage in (data.LazyTensorStorage(40, ndim=ndim), TableStorage(40, name=name, ndim=ndim)):
        generator = torch.Generator().manual_seed(3)
        made.append(data.TensorDictReplayBuffer(storage=storage, batch_size=16, generator=generator))
    theirs, ours = made
    try:
        for first in range(0, 100, 10):
            given = rows(first, 10) if ndim == 1 else rows(first, 10).reshape(5, 2)
            for each in made:
                each.extend(given.clone())
            assert len(ours) == len(theirs)
            assert (ours.sample() == theirs.sample()).all()
        with gear.Table.attach(name) as table:
            known = theirs.storage.get(slice(None))["next", "reward"]
            assert torch.equal(table[0]["next.reward"].reshape(known.shape), known)
        other = pickle.loads(pickle.dumps(ours.storage))
        ours.storage.get(slice(None))["observation"].fill_(1)
        assert torch.equal(other.get(0)["observation"], ours.storage.get(0)["observation"])
        ours.dumps(tmp_path / "buffer")
        copied = data.TensorDictReplayBuffer(storage=TableStorage(40, ndim=ndim), batch_size=16)
        copied.extend(rows(0, 10) if ndim == 1 else rows(0, 10).reshape(5, 2))
        copied.loads(tmp_path / "buffer")
        assert (copied.storage.get(slice(None)) == ours.storage.get(slice(None))).all()
        fresh = data.TensorDictReplayBuffer(storage=TableStorage(40, ndim=ndim), batch_size=16)
        fresh.load_state_dict(ours.state_dict())
        assert (fresh.storage.get(slice(None)) == ours.storage.get(slice(None))).all()
        assert fresh.storage.table is not None
    finally:
        ours.storage.table.unlink()


def test_buffers_keep_their_rows_in_a_table_and_are_those_of_torchrl(tmp_path: Path) -> None:
    """Writing, drawing with and without replacement and by slices, transforms, and files."""
    made: list[Any] = []
    for theirs in (True, False):
        given: dict[str, Any] = {"storage": data.LazyTensorStorage(40)} if theirs else {"capacity": 40}
        kind = (data if theirs else torchrl_storage).TensorDictReplayBuffer
        for sampler in (
            data.RandomSampler(),
            data.SamplerWithoutReplacement(),
            data.SliceSampler(slice_len=2),
        ):
            generator = torch.Generator().manual_seed(3)
            made.append(kind(**given, sampler=sampler, batch_size=8, generator=generator))
    for number, (one, other) in enumerate(zip(made[:3], made[3:], strict=True)):
        assert isinstance(other, data.TensorDictReplayBuffer)
        for each in (one, other):
            each.append_transform(lambda batch: batch.set("twice", batch["observation"] * 2))
            torch.manual_seed(0)
            each.extend(rows(0, 30))
            each.add(rows(30, 1)[0])
            each.extend(rows(31, 20))
        assert len(one) == len(other) == 40
        assert isinstance(other.storage, TableStorage)
        if number == 0:
            assert all((one.sample() == other.sample()).all() for _ in range(3))
        for batch, _ in zip(other, range(3), strict=False):
            assert torch.equal(batch["twice"][:, 0].double(), 2 * batch["next", "reward"][:, 0])
        assert (one[:] == other[:]).all()
        other.dumps(tmp_path / str(number))
        again = torchrl_storage.TensorDictReplayBuffer(40, batch_size=8)
        again.extend(rows(0, 1))
        again.storage.loads(tmp_path / str(number) / "storage")
        assert torch.equal(again[:]["next", "reward"], other[:]["next", "reward"])
    with pytest.raises(SchemaError, match="expected either a storage or the others"):
        torchrl_storage.ReplayBuffer(40, storage=data.LazyTensorStorage(40))
    plain = torchrl_storage.ReplayBuffer(5, batch_size=2)
    plain.extend(torch.arange(7))
    assert sorted(plain[:].tolist()) == [2, 3, 4, 5, 6]


def test_tensors_and_pytrees_are_columns_as_well() -> None:
    storage = TableStorage(5)
    storage.set(range(3), {"a": torch.arange(3), "b": (torch.ones(3, 2, dtype=torch.bfloat16),)})
    assert storage.table is not None
    assert {column.dtype for column in storage.table.schema.values()} == {torch.int64, torch.bfloat16}
    assert storage.get(2)["a"] == 2
    single = TableStorage(5)
    single.set(range(3), torch.arange(3))
    assert single.get([0, 2]).tolist() == [0, 2]


def test_what_it_refuses() -> None:
    with pytest.raises(SchemaError, match="given device='cuda'; expected rows in the host's memory"):
        TableStorage(5, device="cuda")
    with pytest.raises(SchemaError, match="given shared_init; expected rows"):
        TableStorage(5, shared_init=True)
    with pytest.raises(SchemaError, match="complex64"):
        TableStorage(5).set(range(3), torch.zeros(3, dtype=torch.complex64))
