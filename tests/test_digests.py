"""The batches of a seed, and what a checkpoint holds, are those of the version that recorded them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cases import mostly_long
from digests_common import CONFIGURATIONS, digest_of, epochs, loaded, resumed, table
from distributed_common import run_ranks
from products_common import digest

import gear_loader as gear
import gear_loader.distributed as gd

DATA = Path(__file__).parent / "data"
RECORDED = json.loads((DATA / "digests.json").read_text())
PRODUCTS = json.loads((DATA / "products.json").read_text())


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_batches_of_a_seed_are_those_that_were_recorded(name: str) -> None:
    assert CONFIGURATIONS[name]() == RECORDED[name]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA, tmp_path / "data"))


def test_a_recorded_checkpoint_loads(data: Path) -> None:
    with gear.Table.load(data / "checkpoint") as table:
        table.check_valid()
        assert loaded(table) == RECORDED["checkpoint"]
        table.save(data / "checkpoint")
    with gear.Table.load(data / "checkpoint") as again:
        assert loaded(again) == RECORDED["checkpoint"]


def test_a_recorded_state_goes_on(data: Path) -> None:
    assert digest_of(epochs(resumed(data))) == RECORDED["after the state"]


def contents(made: gear.Table) -> list[str]:
    return [digest_of([made[int(index)]]) for index in made.indices()]


def load_shard(rank: int, world: int, folder: str) -> list[str]:
    with gd.load(folder, name=f"digests-loaded-{rank}") as made:
        try:
            made.check_valid()
            return contents(made)
        finally:
            made.unlink()


@pytest.mark.parametrize("world", mostly_long([1, 2, 3], 3))
def test_a_recorded_checkpoint_of_two_ranks_loads(data: Path, world: int) -> None:
    held = run_ranks(world, load_shard, str(data / "shards"))
    saved = [digest for first in (0, 100) for digest in contents(table(20, first=first))]
    assert sorted(digest for rank in held for digest in rank) == sorted(saved)


@pytest.mark.parametrize("point", mostly_long(PRODUCTS, *list(PRODUCTS)[::4], sample=2))
def test_a_point_of_the_product_of_options_gives_the_batches_that_were_recorded(point: str) -> None:
    assert digest(json.loads(point)) == PRODUCTS[point]
