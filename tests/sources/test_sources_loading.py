"""`gear_loader.sources.load`: all trajectories are added or the table is unchanged; what all sources share."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensordict_stand_in
import torch
from files_common import pngs
from sources_common import (
    LENGTHS,
    ScriptedEnv,
    contents,
    cut,
    flat_arrays,
    same,
    same_episodes,
    unchanged,
    write,
)

import gear_loader as gear
from gear_loader import sources
from gear_loader.errors import SchemaError, SourceError, TableFullError
from gear_loader.sources import Episode, collect, collect_iter, infer_schema, load, read_hdf5, source_loading
from gear_loader.sources.episodes import MisfitError, convert, plan_dtype

SCHEMA = {
    "observation": gear.Column(torch.float32, (5,)),
    "action": gear.Column(torch.float32, (2,)),
    "reward": gear.Column(torch.float32),
}


def episodes(lengths: Any = LENGTHS, seed: int = 0) -> list[dict[str, np.ndarray]]:
    return cut(flat_arrays(lengths, seed=seed), lengths)


def name_of(tmp_path: Path) -> str:
    return f"test-sources-{os.getpid()}-{abs(hash(tmp_path)):x}"


@pytest.fixture(params=[1, 3000], ids=["piece by piece", "in some pieces"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(source_loading, "LOAD_BYTES", request.param)
    size: int = request.param
    return size


@pytest.fixture
def table() -> Iterator[gear.Table]:
    """A table with something in it already, and room for one more source."""
    with gear.Table.create(SCHEMA, max_steps=1000, max_trajectories=40, block_steps=16) as made:
        made.extend([{name: e[name] for name in SCHEMA} for e in episodes([5, 40, 9], seed=9)])
        made.remove(int(made.indices()[1]))
        yield made


@pytest.mark.usefixtures("pieces")
def test_a_file_fills_a_table_of_exactly_its_size(tmp_path: Path) -> None:
    block_steps = 7
    path = write(tmp_path / "data.HDF5", flat_arrays(rest=4), compression="gzip")
    with load(path, block_steps=block_steps, priority=2.5) as table:
        table.check_valid()
        assert len(table) == len(LENGTHS) + 1
        assert table.num_steps == sum(LENGTHS) + 4
        same_episodes(contents(table), list(read_hdf5(path)))
        stats = table.stats()
        assert stats.blocks_in_use == stats.num_blocks == sum(-(-n // block_steps) for n in (*LENGTHS, 4))
        with pytest.raises(TableFullError):
            table.add(table[0])


def test_readers_lists_iterators_and_environments() -> None:
    listed = episodes()
    for source in (listed, tuple(listed), iter(listed), (e for e in listed)):
        with load(source) as table:
            same_episodes(contents(table), listed)
    with load(collect_iter(ScriptedEnv(), episodes=4, seed=0)) as table:
        ours = collect(ScriptedEnv(), episodes=4, seed=0)
        same_episodes(contents(table), ours)
        assert dict(table.schema) == infer_schema(ours)


def test_a_reader_with_options_of_its_own(tmp_path: Path) -> None:
    reader = read_hdf5(write(tmp_path / "data.hdf5", flat_arrays(rest=9)), unfinished="drop")
    with load(reader, columns={"state": "observation", "reward": "reward"}) as table:
        assert list(table.schema) == ["state", "reward"]
        assert table.lengths().tolist() == list(LENGTHS)
        same(table[0]["state"], next(iter(reader))["observation"])


def test_columns_of_objects_are_named_with_the_columns_that_leave_them_out() -> None:
    numbers = {"observation.state": np.zeros((3, 2), np.float32), "action": np.zeros((3, 1), np.float32)}
    things = np.array([None, 1, "x"], dtype=object)
    message = (
        r"episode 0: column 'a' is an array of objects, column 'b' is an array of objects; .*Leave them out with "
        r"columns=\['observation.state', 'action'\]"
    )
    with pytest.raises(SourceError, match=message):
        load([numbers | {"a": things, "b": things}], progress=False)
    with load([numbers | {"a": things}], columns=["observation.state", "action"], progress=False) as table:
        assert list(table.schema) == list(numbers)
    with pytest.raises(SourceError, match=r"Leave it out with columns=\{'x': 'action'\}"):
        load([numbers | {"a": things}], columns={"x": "action", "t": "a"}, progress=False)


def test_values_of_any_length() -> None:
    words = np.array(["left", "", "ö" * 40])
    episode = {
        "action": np.zeros((3, 1), np.float32),
        "task": "pick up",  # once: no option is needed
        "steps": ["a", "b", "c"],
        "words": words,
        "things": words.astype(object),
        "raw": [b"", b"\0\0", b"x"],
        "points": [np.zeros((n, 2)) for n in (0, 4, 1)],
        "tokens": gear.Ragged(torch.arange(5), torch.tensor([0, 2, 2, 5])),
    }
    shorter = {
        name: value[:2] if name != "task" else "" for name, value in episode.items() if name != "tokens"
    }
    shorter["tokens"] = gear.Ragged(torch.arange(1), torch.tensor([0, 0, 1]))
    with load(iter([episode, shorter]), progress=False) as table:
        found = table[0]
        assert found["task"] == "pick up"
        assert (found["steps"], found["raw"]) == (episode["steps"], episode["raw"])
        assert found["words"] == found["things"] == words.tolist()
        assert [value.tolist() for value in found["points"]] == [v.tolist() for v in episode["points"]]
        assert found["points"][0].dtype == torch.float64
        assert [value.tolist() for value in found["tokens"]] == [[0, 1], [], [2, 3, 4]]
        assert (table[1]["task"], table[1]["words"]) == ("", ["left", ""])
        with pytest.raises(SourceError, match="counted from episode 0: Column 'task' of trajectory 0 is "):
            load([{**episode, "task": ["a", "b", "c"]}], table, progress=False)
        assert len(table) == table.stats().num_inserted == 2


def test_a_reader_of_values_of_any_length(coded: list[bytes]) -> None:
    class Reader(sources.EpisodeReader):
        def __iter__(self) -> Iterator[Episode]:
            for count in self.lengths:
                yield Episode({"image": coded[:count], "task": "t" * int(count), "x": np.ones(count)})

    schema = {
        "image": gear.Column(torch.uint8, (None, None, 3), codec="png"),
        "task": gear.Column(str, per="trajectory"),
        "x": gear.Column(torch.float32),
    }
    lengths = np.array([2, 3, 1])
    for payload in (None, sum(map(len, [*coded[:2], *coded[:3], *coded[:1]])) + 6):
        reader = Reader("Mine", lengths, schema, payload=payload)
        with load(reader, progress=False) as table:
            assert [table[i]["task"] for i in range(3)] == ["tt", "ttt", "t"]
            assert table[1]["image"][2].tolist() == np.full((2, 5, 3), 2).tolist()
    stored = {**schema, "image": gear.Column(bytes)}  # as the file has them
    with gear.Table.create(
        stored, max_steps=9, max_trajectories=9, memory=gear.Memory(payload=9999)
    ) as table:
        load(Reader("Mine", lengths, schema), table, progress=False)
        assert table[1]["image"] == coded
    with load(Reader("Mine", lengths, schema), filter=lambda e: len(e["task"]) != 2, progress=False) as table:
        assert [table[i]["task"] for i in range(2)] == ["ttt", "t"]
        assert table.num_steps == 4
    one = load(Reader("Mine", lengths, schema), filter=lambda e: True, max_trajectories=1, progress=False)
    assert one.lengths().tolist() == [2]
    damaged = Reader("Mine", lengths, {**schema, "image": gear.Column(torch.uint8, (2, 4, 3), codec="png")})
    with pytest.raises(
        SourceError, match=r"Mine, counted from episode 0: Column 'image' of trajectory 0, step 0"
    ):
        load(damaged, progress=False)
    for function, message in (
        (lambda episode: None, "episode 0: filter= returned None; expected True or False"),
        (lambda episode: np.arange(9), r"episode 0: filter= returned .*\[9\].*; expected True or False"),
        (lambda episode: episode["y"], "episode 0: filter= raised KeyError: 'y'"),
        (lambda episode: False, "filter= takes none of 3 episodes"),
        (3, "filter= is 3; expected a function"),
    ):
        with pytest.raises(SourceError, match=message):
            load(Reader("Mine", lengths, schema), filter=function, progress=False)  # type: ignore[arg-type]


@pytest.fixture
def coded() -> list[bytes]:
    return pngs(3, 2, 5)


class HuggingFace:
    """What `datasets.Dataset` shows of itself: rows by iteration, columns of some rows by a slice."""

    features: Any = None

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns_of, self.column_names = columns, list(columns)

    def with_format(self, _: str) -> HuggingFace:
        return self

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in zip(*self.columns_of.values(), strict=True):
            yield dict(zip(self.columns_of, row, strict=True))

    def __getitem__(self, key: slice) -> dict[str, Any]:
        return {name: np.asarray(values[key]) for name, values in self.columns_of.items()}


STEPS: dict[str, Any] = {"state": np.zeros((6, 4), np.float32), "reward": np.ones(6, np.float32)}
FRAME = type("DataFrame", (), {"shape": (6, 2), "columns": ["a", "b"], "__iter__": lambda self: iter("ab")})
NO_TIME = tensordict_stand_in.TensorDict({"state": torch.zeros(4)}, [])
# fmt: off
ROWS: list[tuple[Any, Any, str]] = [  # source, columns, message
    (HuggingFace(STEPS), ["state"], r"episode 0 looks like one time step.*'reward' is a single number.*read_rows"),
    (HuggingFace({name: torch.as_tensor(v) for name, v in STEPS.items()}), ["state"], "'reward' is a single number"),
    (HuggingFace({"image": np.zeros((3, 8, 8)), "label": [1, 2, 3]}), ["image"], "'label' is a single number"),
    (HuggingFace({"state": STEPS["state"]}), None, "Each of 6 rows of .* has 4 numbers in 'state': they look like"),
    (list(HuggingFace(STEPS)), ["state"], r"one time step.*'reward' is a single number.*\{column: array \[T, ...\]\}"),
    (list(HuggingFace(STEPS)), None, "'reward' is a single number"),
    ([NO_TIME] * 6, None, r"its batch_size is \[\] and no column has more than one dimension"),
    (FRAME(), None, "DataFrame was received, whose rows are time steps.*read_rows"),
    ([FRAME()], None, r"episode 0 is an object of type DataFrame; expected a mapping.*read_rows"),
]
# fmt: on


def test_rows_that_are_time_steps_are_refused() -> None:
    """Vectors of a step would become trajectories of scalars."""
    for source, columns, message in ROWS:
        with pytest.raises(SourceError, match=message):
            load(source, columns=columns, progress=False)


def test_rows_that_are_episodes_are_taken() -> None:
    rows = HuggingFace(STEPS).with_format("numpy")
    words = {"ids": [[1, 2, 3], [4, 5], [6]]}
    whole = {"state": [[[0.0] * 4] * 3, [[1.0] * 4] * 3], "reward": [[1.0] * 3] * 2}
    for source, lengths in (
        ([rows[0:2], rows[2:6]], [2, 4]),
        (HuggingFace(words), [3, 2, 1]),
        (HuggingFace(whole), [3, 3]),
        (list(HuggingFace({"ids": [[1, 2], [3, 4]]})), [2, 2]),
    ):
        with load(source, progress=False) as table:
            assert table.lengths().tolist() == lengths


def test_what_follows_the_last_step_is_stored_in_final_columns(tmp_path: Path) -> None:
    """From environments, readers and lists; the table made here has room for it where lengths fill blocks."""
    arrays = flat_arrays()
    following = arrays["observations"] + 1
    path = write(tmp_path / "data.hdf5", arrays | {"next_observations": following})
    columns = {"state": "observation", "action": "action"}
    mine = [
        {"observation": e["observation"], "action": e["action"], "next.observation": following[:n] * 0 + 7}
        for e, n in zip(episodes(), LENGTHS, strict=True)
    ]
    played = collect(ScriptedEnv(), episodes=6, columns=["observation", "action", "next_observation"])
    for source, expected in (
        (path, list(following[np.cumsum(LENGTHS) - 1])),
        (read_hdf5(path), list(following[np.cumsum(LENGTHS) - 1])),
        (mine, [np.full(5, 7, np.float32)] * 6),
        (played, [e["next_observation"][-1] for e in played]),
        ([{name: e[name] for name in e} for e in played], [e["next_observation"][-1] for e in played]),
        (
            [Episode({name: e[name] for name in ("observation", "action")}, e.final) for e in played],
            [e["next_observation"][-1] for e in played],
        ),
    ):
        with load(source, columns=columns, final=True, block_steps=1) as made:
            finals = {name: column.final for name, column in made.schema.items()}
            assert finals == {"state": True, "action": False}
            schema = {
                "state": gear.Column(torch.float32, made.schema["state"].shape, final=True),
                "action": gear.Column(torch.float32, (2,)),
            }
            with gear.Table.create(schema, max_steps=1000, max_trajectories=10) as given:
                load(source, given, columns=columns)
                for table in (made, given):
                    table.check_valid()
                    assert table.lengths().tolist() == list(LENGTHS)
                    for index, last in zip(table.indices().tolist(), expected, strict=True):
                        same(table.final(index)["state"], last)
        with load(source, columns=columns) as plain:
            assert plain.schema.finals is None


def test_what_an_episode_has_once_becomes_a_column_per_trajectory() -> None:
    """Named, or declared by the table; beside final columns, from lists and from an iterable that refills."""
    once: dict[str, Any] = {"goal": np.array([1.0, 2.0]), "task": 7, "ok": True, "return": np.float32(2.5)}
    given = [{**e, **once, "task": 7 + i} for i, e in enumerate(episodes([4, 4, 4]))]
    arrays = [
        {**e, "task": np.array(e["task"]), "ok": np.array(True), "return": np.array(2.5)} for e in given
    ]
    for source in (given, iter(given), Refilling(arrays), [tensordict_stand_in.TensorDict(arrays[0], [])]):
        with load(source, per_trajectory=list(once), progress=False) as made:
            assert [name for name, column in made.schema.items() if column.per == "trajectory"] == list(once)
            assert made.schema["goal"] == gear.Column(torch.float32, (2,), per="trajectory")
            assert made[len(made) - 1]["task"] == 6 + len(made)
            found = [made[0][name].tolist() for name in ("goal", "ok", "return")]
            assert found == [[1.0, 2.0], True, 2.5]
    schema = {
        "observation": gear.Column(torch.float32, (5,), final=True),
        "at": gear.Column(torch.float16, (2,), per="trajectory"),
        "task": gear.Column(torch.int16, per="trajectory"),
    }
    columns = {"observation": "observation", "at": "goal", "task": "task"}
    with gear.Table.create(schema, max_steps=100, max_trajectories=9) as table:
        load(given, table, columns=columns, progress=False)
        load([Episode(given[1], {"observation": np.ones(5)})], table, columns=columns, progress=False)
        assert [table[i]["task"].item() for i in range(4)] == [7, 8, 9, 8]
        assert table.final(3)["observation"].tolist() == [1.0] * 5
        assert table[3]["at"].tolist() == [1.0, 2.0]
        for change, message in (
            ({"goal": np.ones((4, 2))}, r"'goal' has shape \[4, 2\]; expected one value of shape \[2\], as"),
            ({"task": 2**40}, "episode 0: column 'task' holds 1099511627776, which int16 cannot hold"),
            ({"task": None}, "column 'task' holds values of object where int16 is expected"),
        ):
            with unchanged(table), pytest.raises(SourceError, match=message):
                load([{**given[0], **change}], table, columns=columns)
        with unchanged(table), pytest.raises(SourceError, match="was given with a table; expected one"):
            load(given, table, per_trajectory=["goal"])


def test_readers_tell_what_an_episode_has_once(tmp_path: Path) -> None:
    class Reader(sources.EpisodeReader):
        def __iter__(self) -> Iterator[Episode]:
            yield from (Episode({"a": np.zeros(n, np.float32), "id": np.array(n)}) for n in (2, 3))

    schema = {"a": gear.Column(torch.float32), "id": gear.Column(torch.int64, per="trajectory")}
    with load(Reader("Mine", np.array([2, 3]), schema), progress=False) as table:
        assert [table[i]["id"].item() for i in range(2)] == [2, 3]
        path = write(tmp_path / "data.hdf5", flat_arrays())
        with (
            unchanged(table),
            pytest.raises(SourceError, match="'id' has a value for each step; the table exp"),
        ):
            load(path, table, columns={"a": "reward", "id": "terminated"})
    with pytest.raises(SourceError, match=r"per_trajectory=\['id'\] was given with .*; expected an iterable"):
        load(path, per_trajectory=["id"])


def test_a_source_without_what_follows_leaves_final_columns_empty(tmp_path: Path) -> None:
    columns = {
        "observation": gear.Column(torch.float32, (5,), final=True),
        "action": gear.Column(torch.float32, (2,)),
    }
    damaged = flat_arrays() | {"next_observations": np.zeros((7, 5), np.float32)}  # too short
    for source in (
        episodes(),
        write(tmp_path / "a.hdf5", flat_arrays()),
        write(tmp_path / "b.hdf5", damaged),
    ):
        with gear.Table.create(columns, max_steps=1000, max_trajectories=10) as table:
            load(source, table)
            assert [table.final(int(index)) for index in table.indices()] == [None] * 6
    uneven = [{"observation": np.zeros((3, 5), np.float32), "next_observation": np.zeros((4, 5), np.float32)}]
    with pytest.raises(SourceError, match="has 4 steps of column 'next_observation' and 3 of 'observation'"):
        load(uneven, columns=["observation"], final=True)


def test_max_trajectories_takes_the_first(tmp_path: Path) -> None:
    path = write(tmp_path / "data.hdf5", flat_arrays())
    for source, most in ((path, 4), (episodes(), 1), (read_hdf5(path), 100)):
        with load(source, max_trajectories=most) as table:
            assert table.lengths().tolist() == list(LENGTHS[:most])
            assert table.stats().num_blocks == table.stats().blocks_in_use
    forever = ({"reward": np.zeros(i + 1, np.float32)} for i in itertools.count())
    with load(forever, max_trajectories=3) as table:
        assert table.lengths().tolist() == [1, 2, 3]


def test_columns_of_an_iterable_are_selected_renamed_and_converted() -> None:
    wide = [
        {name: e[name].astype(np.float64) for name in SCHEMA} | {"id": np.arange(len(e["reward"]))}
        for e in episodes()
    ]
    with load(wide, columns={"o": "observation", "reward": "reward", "n": "id"}) as table:
        assert dict(table.schema) == {
            "o": gear.Column(torch.float32, (5,)),
            "reward": gear.Column(torch.float32),
            "n": gear.Column(torch.int64),
        }
        same(table[2]["o"], episodes()[2]["observation"])
    with load(wide, keep_float64=True) as table:
        assert table.schema["observation"].dtype == table.schema["reward"].dtype == torch.float64
        same_episodes(contents(table), wide)


def test_a_table_takes_what_it_has_columns_for_at_its_own_precision(tmp_path: Path) -> None:
    arrays = flat_arrays()
    arrays["observations"] = arrays["observations"].astype(np.float64) / 3
    arrays["actions"] = (np.abs(arrays["actions"]) * 10).astype(np.int32)
    path = write(tmp_path / "data.hdf5", arrays)
    schema = {
        "action": gear.Column(torch.int8, (2,)),
        "observation": gear.Column(torch.float64, (5,)),
        "reward": gear.Column(torch.bfloat16),
    }
    for source in (path, cut(arrays, LENGTHS), read_hdf5(path, keep_float64=True)):
        with gear.Table.create(schema, max_steps=1000, max_trajectories=10) as table:
            columns = list(schema) if isinstance(source, sources.EpisodeReader) else None
            load(source, table, columns=columns)
            for stored, episode in zip(contents(table), cut(arrays, LENGTHS), strict=True):
                same(stored["observation"], episode["observation"])
                same(stored["action"], episode["action"].astype(np.int8))
                assert torch.equal(stored["reward"], torch.from_numpy(episode["reward"]).bfloat16())


def test_tensors_and_lists() -> None:
    half = torch.bfloat16
    source = [
        {"a": torch.ones(3, 2, requires_grad=True), "b": torch.zeros(3, dtype=half), "c": [1, 2, 3]},
        {"a": torch.zeros(1, 2), "b": torch.ones(1, dtype=half), "c": [4]},
    ]
    with load(source) as table:
        dtypes = [column.dtype for column in table.schema.values()]
        assert dtypes == [torch.float32, half, torch.int64]
        assert table[0]["a"].tolist() == [[1, 1]] * 3
        assert table[1]["b"].tolist() == [1.0]
        assert [table[i]["c"].tolist() for i in (0, 1)] == [[1, 2, 3], [4]]


# fmt: off
SCHEMAS: list[tuple[Any, str]] = [
    ({"observation": gear.Column(torch.float32, (4,))}, r"column 'observation' has .*shape \[(3, )?5\]; .*expect"),
    ({"state": gear.Column(torch.float32, (5,))}, r"no column 'state'; it has .*'observation'"),
    ({"observation": gear.Column(torch.int64, (5,))}, r"episode 0: column 'observation' holds values of float32"),
    ({"action": gear.Column(torch.float16, (2,))}, r"episode 3, step 5: column 'action' holds 1000000.0, which"),
]
# fmt: on


def test_a_source_that_does_not_fit_the_table(tmp_path: Path) -> None:
    arrays = flat_arrays()
    arrays["actions"][16] = 1e6
    path = write(tmp_path / "data.hdf5", arrays)
    for (schema, message), source in itertools.product(SCHEMAS, (path, cut(arrays, LENGTHS))):
        table = gear.Table.create(schema, max_steps=1000, max_trajectories=10)
        with table, unchanged(table), pytest.raises(SourceError, match=message):
            load(source, table)


# fmt: off
SPOILT: list[tuple[Any, str]] = [  # changes of episode 4, message
    (lambda e: {"action": None}, "episode 4 has no column 'action'; it has "),
    (lambda e: {"action": e["action"][:-1]}, r"episode 4 has columns of \{.*'action': 64.*\} steps; expected as many"),
    (lambda e: {"reward": np.where(np.arange(65) == 7, np.nan, e["reward"])},
     r"episode 4, step 7: column 'reward' holds nan, .*allow_nonfinite=True"),
    (lambda e: {"observation": e["observation"][:, :4]},
     r"episode 4: column 'observation' has shape \[65, 4\]; expected \[T, 5\]"),
    (lambda e: {"observation": e["observation"].astype(str)},
     r"episode 4: column 'observation' holds values of <U\d+ where float32 is expected"),
    (lambda e: {name: values[:0] for name, values in e.items()},
     r"episode 4 has columns of \{.*\} steps; expected as many in each, at least one"),
    (lambda e: {"reward": 3.0}, r"episode 4: column 'reward' is .*; expected an array \[T, ...\]"),
    (lambda e: {"action": [[1.0, 2.0], [3.0]]},
     r"episode 4: column 'action' is an object of type list; expected an array"),
]
# fmt: on


def test_a_bad_episode_leaves_the_table_as_it_was(table: gear.Table) -> None:
    for spoil, message in SPOILT:
        bad: list[dict[str, Any]] = episodes()
        changed = {**bad[4], **spoil(bad[4])}
        bad[4] = {name: values for name, values in changed.items() if values is not None}
        with unchanged(table), pytest.raises(SourceError, match=message):
            load(bad, table)
        with pytest.raises(SourceError, match=message):
            load(bad)


def test_an_iterator_that_raises_leaves_the_table_as_it_was(table: gear.Table) -> None:
    def failing() -> Iterator[Any]:
        yield from episodes()[:4]
        raise RuntimeError("the network is down")

    with unchanged(table), pytest.raises(SourceError, match="RuntimeError at episode 4: the network is down"):
        load(failing(), table)

    def stopped() -> Iterator[Any]:
        yield from episodes()[:4]
        raise KeyboardInterrupt

    with unchanged(table), pytest.raises(KeyboardInterrupt):
        load(stopped(), table)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("number", [0, 4])
def test_a_damaged_file_leaves_the_table_as_it_was(tmp_path: Path, table: gear.Table, number: int) -> None:
    arrays = flat_arrays()
    end = int(np.cumsum(LENGTHS)[number]) - 1
    arrays["rewards"][end] = np.nan
    path = write(tmp_path / "data.hdf5", arrays)
    message = rf"trajectory {number}, step {LENGTHS[number] - 1} \(step {end} of the file\): column 'rewards' holds nan"
    with unchanged(table), pytest.raises(SourceError, match=message):
        load(path, table)
    with pytest.raises(SourceError, match=message):
        load(path)
    name = name_of(tmp_path)
    with pytest.raises(SourceError, match=message):
        load(path, name=name)
    gear.Table.create(SCHEMA, max_steps=1, max_trajectories=1, name=name).unlink()  # the name is free again


def test_a_full_table_is_as_before(tmp_path: Path) -> None:
    path = write(tmp_path / "data.hdf5", flat_arrays())
    with gear.Table.create(SCHEMA, max_steps=120, max_trajectories=9, block_steps=8) as table:
        table.extend([{name: e[name] for name in SCHEMA} for e in episodes([5])])
        with unchanged(table), pytest.raises(TableFullError):
            load(path, table)
        with unchanged(table), pytest.raises(TableFullError):
            load(episodes(), table)
    small = gear.Table.create(SCHEMA, max_steps=60, max_trajectories=9)
    message = "episode 4 has 65 steps; the table holds at most 60"
    with small, unchanged(small), pytest.raises(SourceError, match=message):
        load(path, small)


@pytest.mark.usefixtures("pieces")
def test_a_table_that_evicts_loses_nothing_to_a_damaged_file(tmp_path: Path) -> None:
    arrays = flat_arrays()
    with gear.Table.create(
        SCHEMA, max_steps=150, max_trajectories=9, block_steps=1, on_full="evict_oldest"
    ) as table:
        load(episodes([70, 60], seed=3), table)
        arrays["rewards"][-1] = np.nan
        path = write(tmp_path / "data.hdf5", arrays)
        with unchanged(table), pytest.raises(SourceError, match="trajectory 5, step 1"):
            load(path, table)
        arrays["rewards"][-1] = 0
        assert load(write(path, arrays), table) is table
        table.check_valid()
        same_episodes(contents(table), [{n: e[n] for n in SCHEMA} for e in cut(arrays, LENGTHS)])


def test_a_table_that_evicts_keeps_the_last_of_a_source_larger_than_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_loading, "LOAD_BYTES", 1)
    path = write(tmp_path / "data.hdf5", flat_arrays())
    with gear.Table.create(
        SCHEMA, max_steps=70, max_trajectories=9, block_steps=1, on_full="evict_oldest"
    ) as table:
        load(path, table)
        assert table.lengths().tolist() == [65, 2]
        table.check_valid()


# fmt: off
BAD: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "has no episodes"),
    (iter(()), {}, "has no episodes"),
    ({"reward": np.zeros(3)}, {}, r"A single episode goes into a list: load\(\[episode\]\)"),
    (7, {}, "of type int was received; expected a path"),
    ([7], {}, "episode 0 is an object of type int; expected a mapping"),
    ([{}], {}, "episode 0 is an object of type dict; expected a mapping"),
    (episodes(), {"max_trajectories": 0}, "max_trajectories is 0; expected an integer"),
    (episodes(), {"columns": ["rewards"]}, "has no column 'rewards'; it has .* Did you mean 'reward'"),
    (episodes(), {"columns": "reward"}, r"expected a list of names: columns=\['reward'\]"),
    (episodes(), {"block_steps": 0}, "block_steps is 0; expected an integer"),
    ("nowhere.hdf5", {}, "'nowhere.hdf5' does not exist"),
    (episodes(), {"per_trajectory": "reward"}, "per_trajectory= is 'reward'; expected a list of names"),
    (episodes(), {"per_trajectory": ["goal"]}, "names 'goal'; expected some of the columns taken from"),
    (episodes(), {"columns": ["reward"], "per_trajectory": ["reward"]}, "all columns, 'reward', are per trajectory"),
    ([{"reward": np.ones(3), "return": 3.0}], {}, r"one time step.* has them once: per_trajectory=\['return'\]"),
    ([{"x": np.ones((3, 4)), "goal": np.ones(2)}], {}, "as many in each.* has once: per_trajectory="),
    ([{"{x}": np.ones(3)}, {"{x}": np.ones((3, 2))}], {}, r"column '\{x\}' has shape \[3, 2\]; expected \[T\]"),
]
# fmt: on


def test_sources_and_options_that_do_not_fit() -> None:
    for source, options, message in BAD:
        with pytest.raises(SourceError, match=message):
            load(source, **options)


def test_options_that_the_table_refuses(tmp_path: Path, table: gear.Table) -> None:
    with unchanged(table), pytest.raises(SchemaError, match="priority"):
        load(episodes(), table, priority=-1.0)
    with pytest.raises(SourceError, match="name='x' was given with a table"):
        load(episodes(), table, name="x")
    name = name_of(tmp_path)
    with gear.Table.create(SCHEMA, max_steps=1, max_trajectories=1, name=name) as taken:
        with pytest.raises(gear.errors.RegionError):
            load(episodes(), name=name)
        with gear.Table.attach(name):  # it is still there
            taken.unlink()


def test_infer_schema() -> None:
    listed = episodes()
    expected = SCHEMA | {"terminated": gear.Column(torch.bool), "truncated": gear.Column(torch.bool)}
    assert infer_schema(listed) == infer_schema(listed[0]) == expected
    assert infer_schema({"x": torch.zeros(2, 3, dtype=torch.bfloat16)}) == {
        "x": gear.Column(torch.bfloat16, (3,))
    }
    for bad, message in (
        (iter(listed), r"A list_iterator was received.*pass list\(episodes\)"),
        ([], "No episodes"),
        ([3], "episode 0 is 3; expected a mapping"),
        ({"x": [1, 2]}, "Column 'x' of the episode is an object of type list"),
        ({"x": np.float32(1)}, "Column 'x' of the episode is an object of type float32"),
        ({"x": np.zeros(3, np.uint64)}, "dtype uint64; expected one of bool"),
        ({"x": np.zeros((3, 0))}, "cannot become a column"),
    ):
        with pytest.raises(SourceError, match=message):
            infer_schema(bad)


DTYPES = [np.bool_, np.uint8, np.int8, np.int16, np.int32, np.int64, np.float16, np.float32, np.float64]


def test_planned_dtypes_hold_every_value() -> None:
    for dtype, order in itertools.product(DTYPES, "<>"):
        stored = np.dtype(dtype).newbyteorder(order)
        planned = plan_dtype("x", stored, "x", keep_float64=True)
        values = np.array([0, 1], stored)
        if stored.kind in "iu":
            values = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max], stored)
        if stored.kind == "f":
            values = np.array([np.finfo(dtype).min, np.finfo(dtype).tiny, np.nan, np.inf], stored)
        same(convert(values, planned), values.astype(dtype))


def test_unsigned_dtypes_are_widened() -> None:
    assert plan_dtype("x", np.uint16, "x", keep_float64=False) == torch.int32
    assert plan_dtype("x", ">u4", "x", keep_float64=False) == torch.int64
    same(convert(np.array([2**32 - 1], np.uint32), torch.int64), np.array([2**32 - 1]))
    for bad in (np.uint64, np.complex64, "U3", "O", "M8[s]", np.longdouble):
        with pytest.raises(SourceError, match=r"x has dtype .*; expected one of bool"):
            plan_dtype("x", bad, "x", keep_float64=False)


def test_values_that_do_not_fit_are_refused() -> None:
    cases: list[tuple[list[Any], torch.dtype, int | None, str]] = [
        ([[1, 2], [3, 300]], torch.uint8, 1, "holds 300, which uint8 cannot hold"),
        ([-1], torch.uint8, 0, "holds -1, which uint8 cannot hold"),
        ([0, 1, 2], torch.bool, 2, "holds 2, which is not a flag: expected 0 or 1"),
        ([0.0, np.nan], torch.bool, 1, "holds nan, which is not a flag"),
        ([0.0, 1e39], torch.float32, 1, r"holds 1e\+39, which float32 cannot hold"),
        ([0.0, 70000.0], torch.float16, 1, r"holds 70000.0, which float16 cannot hold"),
        ([0.5], torch.int64, None, "holds values of float64 where int64 is expected"),
        (["a"], torch.float32, None, "holds values of <U1 where float32 is expected"),
    ]
    for values, dtype, step, problem in cases:
        with pytest.raises(MisfitError, match=problem) as caught:
            convert(np.array(values), dtype)
        assert caught.value.step == step


def test_infinite_values_pass_where_they_are_meant() -> None:
    values = np.array([np.inf, -np.inf, np.nan])
    same(convert(values, torch.float32), values.astype(np.float32))
    with pytest.raises(MisfitError, match="holds inf, which is not a finite number"):
        convert(values, torch.float32, finite=True)


def test_progress_is_shown_on_a_terminal_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "data.hdf5", flat_arrays())

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def shown(stream: io.StringIO, **options: Any) -> str:
        monkeypatch.setattr("sys.stderr", stream)
        load(path, **options).close()
        collect(ScriptedEnv(), episodes=2, **options)
        return stream.getvalue()

    monkeypatch.setenv("TERM", "xterm")
    for variable in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(variable, raising=False)
    text = shown(Terminal())
    assert "Loading" in text
    assert "142/142" in text
    assert "Collecting ScriptedEnv" in text
    assert "2/2" in text
    assert shown(Terminal(), progress=False) == ""
    assert shown(io.StringIO()) == ""


class Refilling:
    """An iterable (no iterator) that fills the same arrays for each episode."""

    def __init__(self, given: list[dict[str, np.ndarray]]) -> None:
        self.given = given

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        shared = {name: values.copy() for name, values in self.given[0].items()}
        for episode in self.given:
            for name, values in episode.items():
                shared[name][...] = values
            yield shared


def test_an_iterable_may_use_its_arrays_again() -> None:
    given = episodes([7, 7, 7, 7])
    expected = load(given)
    for again in (Refilling(given), iter(Refilling(given))):
        with load(again) as table:
            for found, wanted in zip(contents(table), contents(expected), strict=True):
                assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_statistics_are_those_of_a_naive_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_loading, "LOAD_BYTES", 100_000)
    schema = {
        "x": gear.Column(torch.float32, (3,)),
        "ok": gear.Column(torch.bool),
        "image": gear.Column(torch.uint8, (50, 40, 3)),
        "wide": gear.Column(torch.bfloat16, (2, 2)),
        "seed": gear.Column(torch.int64, per="trajectory"),
        "text": gear.Column(str),
    }
    generator = np.random.default_rng(0)
    lengths = [3, 40, 1, 7]
    made = [
        Episode(
            {
                "x": generator.normal(1000.0, 0.01, (count, 3)).astype(np.float32),
                "ok": generator.random(count) < 0.5,
                "image": generator.integers(0, 255, (count, 50, 40, 3), np.uint8),
                "wide": torch.randn(count, 2, 2).bfloat16(),
                "seed": np.int64(count),
                "text": ["a"] * count,
            }
        )
        for count in lengths
    ]

    class Reader(sources.EpisodeReader):
        def __iter__(self) -> Iterator[Episode]:
            return iter(made)

    table = load(Reader("Mine", np.array(lengths), schema), statistics=True, progress=False)
    table.save(tmp_path / "saved")
    loaded = gear.Table.load(tmp_path / "saved")
    for found in (table.statistics, loaded.statistics):
        assert found is not None
        assert set(found) == set(schema) - {"text"}
        for name, column in found.items():
            once = name == "seed"
            whole = [np.asarray(e[name][None] if once else torch.as_tensor(e[name]).float()) for e in made]
            values = np.concatenate(whole).astype(np.float64)
            assert column.count == len(values)
            values = values.reshape(-1, 3) if name == "image" else values
            np.testing.assert_allclose(column.mean, values.mean(0), rtol=1e-12)
            np.testing.assert_allclose(column.std, values.std(0), rtol=1e-7)
            np.testing.assert_array_equal(column.min, values.min(0))
            np.testing.assert_array_equal(column.max, values.max(0))
            for level, quantile in column.quantiles.items():
                np.testing.assert_allclose(quantile, np.quantile(values, level, axis=0), rtol=1e-12)
    transform = gear.transforms.Normalize("x", statistics=loaded.statistics)
    dataset = gear.ReplayDataset(loaded, batch_size=51, windows={"x": gear.Window(1)}, transform=transform)
    assert dataset.sample()["x"].abs().max() < 6  # of values about 1,000
    plain = gear.Table.create({"r": gear.Column(torch.float32)}, max_steps=9, max_trajectories=9)
    assert plain.statistics is None
    with pytest.raises(SchemaError, match="expected those of a table, with the column 'y'"):
        gear.transforms.Normalize("y", statistics=loaded.statistics)


@pytest.mark.long
def test_quantiles_of_many_values_are_of_a_random_sample() -> None:
    values = np.random.default_rng(0).random(1_000_000, np.float32)
    episodes = [{"x": part} for part in np.split(values, 50)]
    table = load(episodes, statistics=True, progress=False)
    assert table.statistics is not None
    column = table.statistics["x"]
    assert column.count == 1_000_000
    assert abs(column.mean - values.mean(dtype=np.float64)) < 1e-12
    for level, quantile in column.quantiles.items():
        assert abs(quantile - level) < 0.006  # four standard errors of 131,072 values
        assert quantile != np.quantile(values.astype(np.float64), level)


class MapStyle:
    """A data set of torch without `__iter__`, whose items never end with an IndexError."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"x": torch.full((number + 1, 2), number), "task": f"t{number}"}


def test_a_data_set_of_torch() -> None:
    with load(torch.utils.data.Subset(MapStyle(), [2, 0]), progress=False) as table:  # type: ignore[arg-type]
        assert (table.lengths().tolist(), table[0]["task"]) == ([3, 1], "t2")
    with load(MapStyle(), progress=False) as table:
        assert table[2]["x"].tolist() == [[2, 2]] * 3


@pytest.mark.parametrize(("steps", "most"), [(1, 2.0), (20, 1.3), (64, 1.3), (200, 1.6)])
def test_blocks_fit_short_episodes(steps: int, most: float) -> None:
    with load([{"text": ["words " * 50] * steps}] * 500, progress=False) as table:
        stats = table.stats()
    assert stats.block_steps == 64 or steps < 64
    assert stats.reserved_bytes < most * stats.payload_bytes
