"""Every two options together, and by `make test-all` every three, against the oracle; ranks against one process."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from cases import mostly_long
from distributed_common import run_ranks
from product_array import (
    AXES,
    REFUSED,
    WHOLE,
    WORLD,
    Point,
    array,
    check,
    combinations,
    dataset_of,
    draw,
    make,
    name_of,
    schema_of,
    within,
)

import gear_loader as gear
import gear_loader.distributed as gd
from gear_loader.errors import SchemaError

PAIRS = array(2)
LONG = 12  # tests of the points of all triples

Rows = list[dict[str, np.ndarray]]


@pytest.mark.parametrize("strength", [2, pytest.param(3, marks=pytest.mark.long)])
def test_the_array_has_all_combinations(strength: int) -> None:
    found = set().union(*(within(point, strength) for point in array(strength)))
    assert found == combinations(strength)
    assert len(array(2)) < 55


def plain(**values: Any) -> Point:
    return {axis: values.get(axis, some[0]) for axis, some in AXES.items()}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        pytest.param(dict(zip(rule, values, strict=True)), words, id=", ".join(map(str, values)))
        for rule, words in REFUSED
        for values in itertools.product(*rule.values())
        if "ranks" not in values
    ],
)
def test_values_that_do_not_go_together_are_refused(
    values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    point = plain(**{"per_trajectory": "group" in values, "final": "windows" in values, **values})
    with contextlib.ExitStack() as stack:
        tables = [
            stack.enter_context(gear.Table.create(schema_of(point), max_steps=9, max_trajectories=9))
            for _ in range(2)
        ]
        source: Any = tables[0] if point["shards"] == "none" else stack.enter_context(gd.Shards(tables))
        with pytest.raises(SchemaError, match=words):
            dataset_of(point, source)


def run_rank(rank: int, world: int, points: list[Point], folder: str) -> list[Rows]:
    """The rows of each point's batches on this rank."""
    found = []
    for number, point in enumerate(points):
        place = Path(folder, str(number))
        place.mkdir(exist_ok=True)
        with contextlib.ExitStack() as stack:
            table, contents = make(point, rank, place, stack)
            told: list[Any] = [None] * world
            dist.all_gather_object(told, contents)
            try:
                found.append(draw(point, stack.enter_context(gd.Shards(table, timeout=60)), told, rank))
            except Exception as error:
                raise AssertionError(f"{name_of(point)}: {error!r}") from error
            dist.barrier()
    return found


def check_ranks(points: list[Point], folder: Path) -> None:
    """Ranks together draw the rows that one process draws from the same shards."""
    (folder / "ranks").mkdir()
    ranks = run_ranks(WORLD, run_rank, points, str(folder / "ranks"))
    for number, point in enumerate(points):
        if point["scope"] == "local" or point["layout"] == "budget":
            continue  # each rank draws for itself, or of its own budget
        one = check({**point, "shards": "one process"}, folder / f"one-{number}")
        for rows, *parts in zip(one, *(rank[number] for rank in ranks), strict=True):
            for name, values in rows.items():
                together = np.concatenate([part[name] for part in parts])
                if point["layout"] != "padded" or point["windows"] in WHOLE:  # dealt by their steps
                    together, values = np.sort(together), np.sort(values)
                np.testing.assert_array_equal(together, values, err_msg=f"{name_of(point)}: {name}")


@pytest.mark.parametrize("point", [p for p in PAIRS if p["shards"] != "ranks"], ids=name_of)
def test_two_options_together(point: Point, tmp_path: Path) -> None:
    check(point, tmp_path)


def test_two_options_together_over_ranks(tmp_path: Path) -> None:
    check_ranks([point for point in PAIRS if point["shards"] == "ranks"], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("part", mostly_long(range(LONG), sample=4))
def test_three_options_together(part: int, tmp_path: Path) -> None:
    points = array(3)[part::LONG]
    for number, point in enumerate(points):
        if point["shards"] != "ranks":
            check(point, tmp_path / str(number))
    check_ranks([point for point in points if point["shards"] == "ranks"], tmp_path)
