"""Points of the product of what a dataset can be made of, in a covering array, and a check of one point's batches.

A point names a value of each axis of `AXES`. `array(t)` has, for any t axes, every combination of their values that
datasets accept. `check` draws the batches of a point and compares them with the oracle.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import oracle
import products_common
import torch
from options_common import nested, nested_table
from table_common import fresh_name

import gear_loader as gear
import gear_loader.distributed as gd

Point = dict[str, Any]

SAMPLERS: dict[str, gear.samplers.Sampler] = {
    "uniform": gear.Uniform(),
    "each once": gear.Uniform(replacement=False),
    "steps": gear.Uniform(unit="step"),
    "lifo, once": gear.Lifo(replacement=False),
    "fifo of steps": gear.Fifo(unit="step"),
    "priority": gear.Prioritized(alpha=0.7, beta=gear.LinearSchedule(0.4, 1.0, 10), normalize="table"),
    "distinct steps by priority": gear.Prioritized(replacement=False, unit="step"),
    "top k": gear.TopK(),
}
STEPS = tuple(name for name, sampler in SAMPLERS.items() if sampler.unit == "step")
BY_PRIORITY = (gear.Prioritized, gear.TopK)
WHOLE = ("whole", "whole, final")
PACKED = ("packed", "jagged", "budget")
SHARDS = ("one process", "ranks")
AXES: dict[str, tuple[Any, ...]] = {
    "sampler": tuple(SAMPLERS),
    "windows": ("five", "edge", "several", "timed", *WHOLE),
    "layout": ("padded", *PACKED),
    "shards": ("none", *SHARDS),
    "scope": ("global", "local"),
    **dict.fromkeys(("complete", "late", "tier", "group", "sample_info", "prefetch"), (False, True)),
    **dict.fromkeys(("named", "final", "per_trajectory", "cast"), (False, True)),
}
REFUSED: list[tuple[dict[str, tuple[Any, ...]], str]] = [
    ({"windows": WHOLE, "complete": (True,)}, "was given with whole trajectories, which always are"),
    ({"windows": WHOLE, "sampler": STEPS}, "were given with whole trajectories; expected a sampler with unit="),
    ({"windows": ("edge", "several", "timed"), "layout": PACKED}, "a gear_loader.Window without pad, squeeze, every"),
    ({"windows": ("timed",), "complete": (True,)}, "expected windows of steps: those of times are known when"),
    ({"windows": ("whole, final",), "shards": SHARDS}, r"Whole\(final=True\) was given with Shards"),
    ({"windows": ("whole, final",), "final": (False,)}, "have final=True, and"),
    ({"group": (True,), "per_trajectory": (False,)}, "The column of the groups is 'prompt'; expected"),
    ({"group": (True,), "sampler": STEPS}, "size=2.* was given with .*; expected unit='trajectory'"),
    ({"group": (True,), "shards": SHARDS, "scope": ("global",)}, "groups lie in one table, and are drawn whole"),
    ({"sample_info": (True,), "shards": SHARDS}, "Shards, which know their ranks and do not support sample_info"),
    ({"layout": ("budget",), "sampler": ("fifo of steps", "top k")}, "of which every batch has the same"),
    ({"layout": ("budget",), "sampler": ("distinct steps by priority",)}, "max_steps=.*was given with Prioritized"),
]  # fmt: skip
"""Values of some axes that do not go together, and words of the error."""

SIZE, BATCHES, EPOCHS, WORLD = 8, 3, 2, 2
BUDGET = 40  # steps of a batch


# ---------------------------------------------------------------- the array


def refused(point: Point) -> bool:
    """Whether what is known of a point breaks a rule."""
    return any(
        all(axis in point and point[axis] in values for axis, values in rule.items()) for rule, _ in REFUSED
    )


def completed(point: Point) -> Point | None:
    """A point with these values that datasets accept, or None."""
    if refused(point):
        return None
    axis = next((axis for axis in AXES if axis not in point), None)
    if axis is None:
        return point
    return next(filter(None, (completed({**point, axis: value}) for value in AXES[axis])), None)


def combinations(strength: int) -> set[tuple[tuple[str, Any], ...]]:
    """Every combination of values of so many axes that a point can have."""
    return {
        combination
        for axes in itertools.combinations(AXES, strength)
        for values in itertools.product(*(AXES[axis] for axis in axes))
        if completed(dict(combination := tuple(zip(axes, values, strict=True))))
    }


def within(point: Point, strength: int) -> set[tuple[tuple[str, Any], ...]]:
    """The combinations of a point's values."""
    pairs = [(axis, point[axis]) for axis in AXES if axis in point]
    return set(itertools.combinations(pairs, strength))


@functools.cache
def array(strength: int) -> list[Point]:
    """Points that have all combinations of values of `strength` axes, found greedily.

    A point begins with a combination that is missing; then each axis gets the value that brings the most others, or
    of such values the one with the fewest points.
    """
    missing, points = combinations(strength), []
    uses: collections.Counter[tuple[str, Any]] = collections.Counter()
    for first in sorted(missing, key=repr):
        if first not in missing:
            continue
        point = dict(first)
        for axis in AXES:
            if axis in point:
                continue
            ways = {value: {**point, axis: value} for value in AXES[axis]}
            gains = {
                value: (len(within(way, strength) & missing), -uses[axis, value])
                for value, way in ways.items()
                if completed(way)
            }
            point = ways[max(gains, key=lambda value: gains[value])]
        missing -= within(point, strength)
        uses.update(point.items())
        points.append({axis: point[axis] for axis in AXES})
    return points


def name_of(point: Point) -> str:
    """What differs from the plainest point."""
    plain = {axis: values[0] for axis, values in AXES.items()}
    parts = [axis if value is True else str(value) for axis, value in point.items() if value != plain[axis]]
    return "; ".join(parts) or "plain"


# ---------------------------------------------------------------- a point's tables


def schema_of(point: Point) -> dict[str, gear.Column]:
    columns = dict(products_common.SCHEMA)
    columns["observation"] = gear.Column(torch.float32, (3,), final=point["final"])
    if not point["per_trajectory"]:
        del columns["prompt"]
    if point["late"]:
        columns["score"] = gear.Column(torch.float32, late=True)
    if point["late"] and point["per_trajectory"]:
        columns["grade"] = gear.Column(torch.int32, (2,), per="trajectory", late=True)
    if point["windows"] == "timed":
        columns["time"] = gear.Column(torch.float64)
    return columns


def windows_of(point: Point) -> Any:
    cast: dict[str, Any] = {"dtype": torch.float32, "scale": 0.25} if point["cast"] else {}
    several = {
        "observation": gear.Window(4, pad="tail"),
        "reward": gear.Window(6, offset=-5, pad="head", **cast),
        "wide": gear.Window(2, pad="edge", **cast),
        "next": gear.Window(1, 1, column="action", squeeze=True),
    }
    several |= {name: None for name, column in schema_of(point).items() if column.per == "trajectory"}
    several |= {"score": gear.Window(3, offset=-1)} if point["late"] else {}
    times: dict[str, Any] = {"timestamps": "time", "tolerance": 0.03}
    timed = {
        "observation": gear.Window(at=[-0.2, 0.0, 0.3], pad="edge", **times),
        "reward": gear.Window(at=[0.1, -9.0, -0.1], **times, **cast),
        "next": gear.Window(at=[0.1], column="action", squeeze=True, **times),
        "wide": gear.Window(2),
    }
    timed |= {name: None for name, column in schema_of(point).items() if column.per == "trajectory"}
    timed |= {"score": gear.Window(at=[-0.1, 0.0], **times)} if point["late"] else {}
    return {
        "timed": timed,
        "five": gear.Window(5, offset=-2, **cast),
        "edge": gear.Window(6, offset=-4, pad="edge", **cast),
        "several": several,
        "whole": gear.Whole(**cast),
        "whole, final": gear.Whole(final=True, **cast),
    }[point["windows"]]


def trajectory(number: int, schema: Mapping[str, gear.Column]) -> dict[str, Any]:
    """One whose values and length follow from its number."""
    values = products_common.trajectory(number)
    steps = np.arange(len(values["reward"]))
    values["score"] = (steps - number).astype(np.float32)
    values["time"] = steps / 10 + steps % 3 / 50 + number
    values["grade"] = np.array([number, -number], dtype=np.int32)
    return {name: values[name] for name in schema}


def final_of(number: int, values: Mapping[str, Any]) -> dict[str, Any] | None:
    return {"observation": values["observation"][-1] + 0.5} if number % 3 else None


class Contents(NamedTuple):
    """The number of the trajectory at each index of a table, and the indices that a dataset may draw."""

    numbers: dict[int, int]
    drawable: list[int]


def make(point: Point, shard: int, folder: Path, stack: contextlib.ExitStack) -> tuple[gear.Table, Contents]:
    """A table of a point: trajectories, some of which were replaced, some spilled, some filled."""
    schema = schema_of(point)
    late = [name for name, column in schema.items() if column.late]
    sizes: dict[str, Any] = {"max_steps": 2000, "max_trajectories": 60, "block_steps": 4}
    if point["tier"]:
        disk = gear.Disk(folder / f"tier-{shard}", sync_seconds=1e6, size="1GiB", keep="newest")
        sizes |= {"max_blocks": 60, "timeout": 60.0, "disk": disk}
    if point["named"] or point["shards"] == "ranks":
        sizes["name"] = fresh_name()
    table = stack.enter_context(gear.Table.create(schema, **nested_table(sizes)))
    if "name" in sizes:
        stack.callback(table.unlink)
    numbers: dict[int, int] = {}
    first = 1000 * shard
    for number in range(first, first + 44):
        values = trajectory(number, schema)
        early = {name: value for name, value in values.items() if name not in late}
        final = final_of(number, values) if point["final"] else None
        numbers[table.add(early, final=final, priority=number % 5 + 0.5)] = number
        if number == first + 39:
            gone = list(numbers)[4:10]
            table.remove(gone)
            numbers = {index: each for index, each in numbers.items() if index not in gone}
    drawable = list(numbers)
    if late:
        drawable = drawable[:34]
        filled = [trajectory(numbers[index], schema) for index in drawable]
        given: dict[str, Any] = {name: [each[name] for each in filled] for name in late}
        if "grade" in given:
            given["grade"] = np.stack(given["grade"])
        table.fill(np.array(drawable), **given)
    return table, Contents(numbers, drawable)


def dataset_of(point: Point, source: Any) -> gear.ReplayDataset:
    windows = windows_of(point)
    size = SIZE // WORLD if point["shards"] == "ranks" and point["scope"] == "global" else SIZE
    options: dict[str, Any] = {"batch_size": size, "layout": point["layout"]}
    if point["layout"] == "budget":
        options = {"batch_size": None, "max_steps": BUDGET, "lookahead": 2, "layout": "packed"}
    if point["group"]:
        options |= {"group": "prompt", "group_size": 2}
    if not isinstance(windows, dict):
        options["columns"] = list(schema_of(point))
    common = {name: point[name] for name in ("complete", "sample_info", "scope")}
    options |= {**common, "prefetch": 2 * point["prefetch"], "batches_per_epoch": BATCHES, "seed": 11}
    sampler = SAMPLERS[point["sampler"]]
    return gear.ReplayDataset(
        source, **nested({"sampler": sampler, "windows": windows, "device": "cpu", "copy": True, **options})
    )


# ---------------------------------------------------------------- a point's batches


def expected_batch(
    point: Point, batch: Mapping[str, Any], numbers: list[int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the oracle says of the rows of a batch, and the windows by their names."""
    schema, windows = schema_of(point), windows_of(point)
    if not isinstance(windows, dict):
        windows = {name: None if schema[name].per == "trajectory" else windows for name in schema}
    values = [trajectory(number, schema) for number in numbers]
    ends = {}
    if point["final"]:
        found = (final_of(number, each) for number, each in zip(numbers, values, strict=True))
        ends = {row: end for row, end in enumerate(found) if end is not None}
    rows = [oracle.Row(row, anchor) for row, anchor in enumerate(batch["anchor"].tolist())]
    packed = point["layout"] != "padded" or point["windows"] in WHOLE
    layout = "packed" if packed else "padded"
    expected = oracle.batch(schema, values, rows, windows, layout=layout, finals=ends)
    if point["windows"] == "whole, final":
        expected["final"] = np.array([row in ends for row in range(len(rows))])
    return expected, windows


def check_values(point: Point, batch: Mapping[str, Any], numbers: list[int]) -> None:
    """Compare columns, masks and lengths of a batch with the oracle, to the bit."""
    expected, windows = expected_batch(point, batch, numbers)
    of_steps = [name for name, window in windows.items() if window is not None]
    starts, masks = expected.get("cu_seqlens"), expected.pop("masks", None)
    if starts is not None and point["layout"] == "padded":
        counts = np.diff(expected.pop("cu_seqlens"))
        there = np.arange(expected.pop("max_seqlen")) < counts[:, None]
        del expected["position"]
        for name in of_steps:
            flat, expected[name] = (
                expected[name],
                np.zeros((*there.shape, *expected[name].shape[1:]), expected[name].dtype),
            )
            expected[name][there] = flat
        expected["mask"] = there
    elif masks is not None and len(masks) and not isinstance(batch["mask"], dict):
        expected["mask"] = next(iter(masks.values()))
        assert all(np.array_equal(mask, expected["mask"]) for mask in masks.values())
    for name, mask in (masks or {}).items():
        if isinstance(batch["mask"], dict):
            same(batch["mask"][name], mask, f"mask of {name}")
        assert not point["complete"] or mask.all(), name
    for name, values in expected.items():
        found = batch[name]
        if point["layout"] == "jagged" and name in (*of_steps, "position"):
            same(found.offsets(), starts, f"offsets of {name}")
            found = found.values()
        same(found, values, name)


def same(found: Any, expected: Any, what: str) -> None:
    found = np.asarray(found)
    assert (found.dtype, found.shape) == (np.asarray(expected).dtype, np.shape(expected)), what
    assert found.tobytes() == np.asarray(expected).tobytes(), what


def check_rows(point: Point, batch: Mapping[str, Any], numbers: list[int]) -> None:
    """Whose rows they are: groups side by side, weights, and what is told of draws."""
    if point["group"] and point["layout"] != "budget":  # of so many steps a batch may end inside a group
        pairs = np.array(numbers).reshape(-1, 2)
        assert (pairs[:, 0] % 2 == 0).all()
        assert (pairs[:, 1] == pairs[:, 0] + 1).all()
    assert ("priority_weight" in batch) == isinstance(SAMPLERS[point["sampler"]], gear.Prioritized)
    if "priority_weight" in batch:
        assert (batch["priority_weight"] > 0).all()
    assert ("sample_info" in batch) == point["sample_info"]
    if point["sample_info"]:
        info = batch["sample_info"]
        assert set(info) == {"times_sampled", "age", "age_seconds", "probability"}
        assert (info["times_sampled"] > 0).all()
        assert ((info["probability"] > 0) & (info["probability"] <= 1)).all()
        assert ((info["age"] >= 0) & (info["age"] < 60)).all()
    if point["layout"] == "budget":
        assert batch["cu_seqlens"][-1] <= BUDGET


def learn(data: gear.ReplayDataset, batch: Mapping[str, Any], number: int) -> None:
    """Priorities that follow from what batch `number` holds."""
    if isinstance(data.sampler, BY_PRIORITY):
        data.update_priority(batch, (batch["index"] * 7 + batch["anchor"] * 3 + number) % 11 + 0.25)


def rows_of(batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
    names = ("index", "anchor", "generation", "shard", "priority_weight")
    return {name: batch[name].numpy().copy() for name in names if name in batch}


def draw(point: Point, source: Any, shards: Sequence[Contents], own: int = 0) -> list[dict[str, np.ndarray]]:
    """The rows of all batches of a table or of Shards, each of which is checked; new priorities come after each.

    A dataset that is made of the state after the first batch draws the others.

    Args:
        own: the shard that a local draw is from.
    """
    data = dataset_of(point, source)
    found: list[dict[str, np.ndarray]] = []
    state: Any = None
    for _ in range(EPOCHS):
        seen: list[tuple[int, ...]] = []
        for batch in data:
            index = batch["index"].tolist()
            owners = batch["shard"].tolist() if "shard" in batch else [own] * len(index)
            pairs = list(zip(owners, index, strict=True))
            assert all(at in shards[shard].drawable for shard, at in pairs)
            numbers = [shards[shard].numbers[at] for shard, at in pairs]
            check_values(point, batch, numbers)
            check_rows(point, batch, numbers)
            seen += [
                (number, anchor) for number, anchor in zip(numbers, batch["anchor"].tolist(), strict=True)
            ]
            found.append(rows_of(batch))
            learn(data, batch, len(found))
            state = data.state_dict() if state is None else state
        few = point["complete"] and point["group"]  # a pass ends within the epoch
        if not data.sampler.replacement and not isinstance(data.sampler, BY_PRIORITY) and not few:
            items = seen if data.sampler.unit == "step" else [number for number, _ in seen]
            assert len(set(items)) == len(items), f"{name_of(point)}: drawn twice: {sorted(items)}"
    check_resumed(point, source, state, found)
    return found


def check_resumed(point: Point, source: Any, state: Any, rows: list[dict[str, np.ndarray]]) -> None:
    """A dataset that goes on after the first batch draws the same rows, to the bit."""
    data = dataset_of(point, source)
    data.load_state_dict(state)
    again = rows[:1]
    while len(again) < len(rows):
        for batch in data:
            again.append(rows_of(batch))
            learn(data, batch, len(again))
    for number, (one, other) in enumerate(zip(again, rows, strict=True)):
        assert one.keys() == other.keys()
        for name, values in one.items():
            assert np.array_equal(values, other[name]), f"resumed batch {number}: {name}"


def check(point: Point, folder: Path) -> list[dict[str, np.ndarray]]:
    """Make a point's tables in this process, draw its batches and check them; returns their rows."""
    count = 1 if point["shards"] == "none" else WORLD
    with contextlib.ExitStack() as stack:
        tables, contents = zip(*(make(point, shard, folder, stack) for shard in range(count)), strict=True)
        source = tables[0] if count == 1 else stack.enter_context(gd.Shards(tables))
        return draw(point, source, contents)
