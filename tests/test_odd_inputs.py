"""Every entry point with every odd input: an error of ours that names the argument, briefly, and nothing changed."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from options_common import nested, nested_table

import gear_loader as gear
from gear_loader.distributed import Shards
from gear_loader.errors import GearError, SchemaError
from tests.odd_inputs_common import Broken, complaint, odd_inputs
from tests.transport_common import PATIENCE, SECRET, serving

Call = Callable[[Any], object]

COLUMNS = {
    "x": gear.Column(torch.float32, (2,), final=True),
    "done": gear.Column(torch.bool),
    "n": gear.Column(torch.int64, cast=True),
    "goal": gear.Column(torch.int32, (3,), per="trajectory"),
}
LATE = {**COLUMNS, "late": gear.Column(torch.float32, late=True)}
NAME = f"test-odd-inputs-{os.getpid()}"
GOAL = {"goal": np.zeros(3, np.int32)}


def new_table(schema: Any = None, name: str | None = None) -> gear.Table:
    table = gear.Table.create(schema or LATE, max_steps=4096, max_trajectories=64, block_steps=16, name=name)
    fill_table(table)
    return table


def fill_table(table: gear.Table) -> None:
    table.extend([trajectory(4), trajectory(6), trajectory(3)])


@contextlib.contextmanager
def connected(table: gear.Table) -> Iterator[Any]:
    """A named table through a server in this process; its name is removed at the end."""
    try:
        with serving(str(table.name)) as server:
            url = f"{server.address.replace('socket', 'gear')}/{table.name}"
            with gear.connect(url, secret=SECRET, timeout=PATIENCE) as remote:
                yield remote
    finally:
        table.unlink()


def trajectory(steps: int = 4, **columns: Any) -> dict[str, Any]:
    return {**rows(steps), "goal": np.zeros(3, np.int32), **columns}


def rows(count: int, **columns: Any) -> dict[str, Any]:
    found = {"x": np.ones((count, 2), np.float32), "done": np.zeros(count, bool), "n": np.arange(count)}
    return {**found, **columns}


def stacked(**columns: Any) -> dict[str, Any]:
    return {**{name: np.stack([value, value]) for name, value in trajectory().items()}, **columns}


def step(**columns: Any) -> dict[str, Any]:
    return {"x": np.ones(2, np.float32), "done": False, "n": 1, **columns}


def of_any(table: Any) -> Iterator[tuple[str, Call]]:
    """Calls of a table and of a remote one."""
    fill = np.zeros(4, np.float32)
    yield "add", table.add
    yield "extend", table.extend
    yield "extend, item", lambda v: table.extend([trajectory(), v])
    yield "extend, stacked", lambda v: table.extend(v, lengths=[4, 2])
    yield "extend, lengths", lambda v: table.extend(stacked(), lengths=v)
    yield "extend, priority", lambda v: table.extend([trajectory(), trajectory()], priority=v)
    yield "add, priority", lambda v: table.add(trajectory(), priority=v)
    yield "add, final", lambda v: table.add(trajectory(), final=v)
    yield "add, final x", lambda v: table.add(trajectory(), final={"x": v})
    for name in COLUMNS:
        yield f"add, {name}", lambda v, name=name: table.add(trajectory(**{name: v}))
        yield f"stacked, {name}", lambda v, name=name: table.extend(stacked(**{name: v}), lengths=[4, 2])
    yield "update_priority, index", lambda v: table.update_priority(v, [1.0, 2.0])
    yield "update_priority, priority", lambda v: table.update_priority([0, 1], v)
    for name in ("generation", "stale"):
        yield f"update_priority, {name}", lambda v, name=name: table.update_priority([0], [1.0], **{name: v})
        yield f"fill, {name}", lambda v, name=name: table.fill([0], late=[fill], **{name: v})
    yield "unfilled", lambda v: table.unfilled(v)
    yield "fill, index", lambda v: table.fill(v, late=fill)
    yield "fill, late", lambda v: table.fill(0, late=v)
    for name in ("chunk_steps", "overlap_steps", "commit_every_step"):
        yield f"writer, {name}", lambda v, name=name: table.writer(**{"chunk_steps": 4, name: v})
        yield f"writers, {name}", lambda v, name=name: table.writers(2, **{"chunk_steps": 4, name: v})
    yield "writers", table.writers


def of_table(table: gear.Table) -> Iterator[tuple[str, Call]]:
    """Calls of a table that add, read and remove."""
    yield from of_any(table)
    yield "extend_as, ids", lambda v: table.extend_as([trajectory(), trajectory()], ids=v)
    for read in (
        table.__getitem__,
        table._engine.rows,
        table.final,
        table.remove,
        table.ids,
        table.set_origin,
    ):
        yield read.__name__, read
    yield "pin", lambda v: None if v is None else table.pin(v)
    yield "save", lambda v: None if isinstance(v, str) else table.save(v)


def of_remote(table: gear.Table, remote: Any) -> Iterator[tuple[str, Call]]:
    """Calls of a remote table, options of `connect`, and of `Table.serve`."""

    def serve(**options: Any) -> None:
        if not isinstance(options.get("host"), str):  # which would be looked up
            table.serve(**options).stop()

    def connect(**options: Any) -> None:
        if not isinstance(options.get("secret_file"), str):  # a missing file is an OSError
            gear.connect(**options).close()

    yield from of_any(remote)
    yield "writer, wait", lambda v: remote.writer(wait=v)
    yield "flush", remote.flush
    given: dict[str, Any] = {"url": remote.url, "secret": SECRET, "timeout": 5.0}
    for name in inspect.signature(gear.connect).parameters:
        rest = {"secret": None} if name == "secret_file" else {}
        yield (
            f"connect, {name}",
            lambda v, name=name, rest=rest: connect(**{**given, **rest, name: v}),
        )
    for name in list(inspect.signature(gear.Table.serve).parameters)[1:]:
        yield f"serve, {name}", lambda v, name=name: serve(**{"secret": SECRET, name: v})


def of_shards(table: gear.Table) -> Iterator[tuple[str, Call]]:
    for name in inspect.signature(Shards).parameters:
        yield f"Shards, {name}", lambda v, name=name: Shards(**{"table": table, name: v}).close()


def of_sources(path: pathlib.Path) -> Iterator[tuple[str, Call]]:
    """Options of `load`, `collect`, and of the readers."""
    pytest.importorskip("gymnasium", reason="needs pip install '.[sources]'")
    pytest.importorskip("h5py", reason="needs pip install '.[sources]'")
    from tests.sources_common import ScriptedEnv, flat_arrays, write

    episodes = [{"a": np.zeros(4, np.float32), "goal": np.zeros(2, np.float32)}]
    file = path / "data.hdf5"
    if not file.exists():
        write(file, flat_arrays([3, 4]))
    load: dict[str, Any] = {"source": episodes, "per_trajectory": ["goal"], "progress": False}
    collect: dict[str, Any] = {"env": ScriptedEnv(), "episodes": 1, "max_episode_steps": 4, "progress": False}
    steps: dict[str, Any] = {**collect, "episodes": None, "max_steps": 3}
    many: dict[str, Any] = {**collect, "env": ScriptedEnv, "num_envs": 2}
    for call, given in (
        (gear.sources.load, load),
        (gear.sources.collect, collect),
        (gear.sources.collect, steps),
        (gear.sources.collect, many),
        (gear.sources.read_hdf5, {"path": file}),
        (gear.sources.read_minari, {"dataset": "nowhere"}),
    ):
        for name in inspect.signature(call).parameters:

            def tried(value: Any, call: Any = call, given: Any = given, name: str = name) -> None:
                if not (name == "name" and isinstance(value, str)):
                    call(**{**given, name: value})

            yield f"{call.__name__}, {name}", tried
    yield "load, goal", lambda v: gear.sources.load(**{**load, "source": [{**episodes[0], "goal": v}]})
    yield "infer_schema", gear.sources.infer_schema
    yield "infer_schema, column", lambda v: gear.sources.infer_schema({"a": v})


def of_sb3(_: Any) -> Iterator[tuple[str, Call]]:
    """The buffer for stable-baselines3."""
    pytest.importorskip("stable_baselines3", reason="needs pip install '.[sb3]'")
    from gymnasium import spaces

    from gear_loader.integrations.sb3 import ReplayBuffer

    box = spaces.Box(-1, 1, (2,), np.float32)
    made: dict[str, Any] = {
        "buffer_size": 64,
        "observation_space": box,
        "action_space": box,
        "device": "cpu",
        "n_envs": 2,
    }

    def make(**options: Any) -> None:
        table = ReplayBuffer(**options).table
        if table.name is not None:
            table.unlink()

    for name in inspect.signature(ReplayBuffer).parameters:
        yield f"sb3, {name}", lambda v, name=name: make(**{**made, name: v})
    pair = np.zeros((2, 2), np.float32)
    step: dict[str, Any] = {"obs": pair, "next_obs": pair, "action": pair, "reward": np.zeros(2)}
    step |= {"done": np.ones(2, bool), "infos": [{}, {}]}
    for optimize, name in itertools.product((False, True), step):

        def add(value: Any, name: str = name, optimize: bool = optimize) -> None:
            buffer = ReplayBuffer(**made, optimize_memory_usage=optimize)
            buffer.add(**step)
            before = [buffer.observations, buffer.rewards, buffer.dones, buffer.timeouts]
            try:
                buffer.add(**{**step, name: value})
            except BaseException:
                after = [buffer.observations, buffer.rewards, buffer.dones, buffer.timeouts]
                assert all(map(np.array_equal, before, after))
                assert buffer.size() == 1
                raise

        yield f"sb3 add, {name}, {optimize}", add

    def sample(value: Any, name: str) -> None:
        buffer = ReplayBuffer(**made)
        buffer.add(**step)
        buffer.sample(**{"batch_size": 2, name: value})

    for name in ("batch_size", "env"):
        yield f"sb3 sample, {name}", lambda v, name=name: sample(v, name)


def of_writers(table: Any, *, each: bool) -> Iterator[tuple[str, Call]]:
    """Calls of a writer and of a vector writer; `each`: that commit every step."""

    def one(then: Callable[[gear.Writer], object], first: Any = None, trajectory: Any = GOAL) -> object:
        writer = table.writer(commit_every_step=each)
        writer.trajectory = trajectory
        if first is not None:
            writer.append(first)
        try:
            return then(writer)
        finally:
            writer.close()

    def two(then: Callable[[gear.VectorWriter], object], first: Any = None, trajectory: Any = None) -> object:
        writer = table.writers(2, commit_every_step=each)
        writer.trajectory = {"goal": np.zeros((2, 3), np.int32)} if trajectory is None else trajectory
        if first is not None:
            writer.append(first)
        try:
            return then(writer)
        finally:
            writer.close()

    yield "append", lambda v: one(lambda w: w.append(v))
    yield "append, vector", lambda v: two(lambda w: w.append(v))
    for name in ("x", "done", "n"):
        yield f"append, {name}", lambda v, name=name: one(lambda w: w.append(**step(**{name: v})))
        yield f"append, {name} of many", lambda v, name=name: one(lambda w: w.append(rows(4, **{name: v})))
        yield f"append, {name}, vector", lambda v, name=name: two(lambda w: w.append(rows(2, **{name: v})))
    for name in ("done", "active", "priority", "final"):
        yield (
            f"append, option {name}",
            lambda v, name=name: two(lambda w: w.append(rows(2), **{"done": [True, True], name: v})),
        )
    yield (
        "append, option final x",
        lambda v: two(lambda w: w.append(rows(2), done=[True] * 2, final={"x": v})),
    )
    yield "trajectory, vector", lambda v: two(lambda w: w.append(rows(2), done=[True] * 2), trajectory=v)
    yield (
        "trajectory goal, vector",
        lambda v: two(lambda w: w.append(rows(2), done=[True] * 2), trajectory={"goal": v}),
    )
    if each:
        return  # what follows would leave the steps before it in the table
    for name in ("priority", "final", "trajectory"):
        yield f"commit, {name}", lambda v, name=name: one(lambda w: w.commit(**{name: v}), step())
    yield "commit, goal", lambda v: one(lambda w: w.commit(trajectory={"goal": v}), step())
    yield "trajectory", lambda v: one(lambda w: w.commit(), step(), v)
    for name in ("mask", "priority", "final"):
        yield f"commit, {name}, vector", lambda v, name=name: two(lambda w: w.commit(**{name: v}), rows(2))
    yield "discard", lambda v: two(lambda w: w.discard(v), rows(2))


def of_dataset(table: gear.Table) -> Iterator[tuple[str, Call]]:
    """A dataset's options, calls and updates; also of a mixture and a data module."""

    def make(**options: Any) -> gear.ReplayDataset:
        plain = {"batch_size": 2, "windows": gear.Window(2), "columns": ["x", "n"], "device": "cpu"}
        return gear.ReplayDataset(table, **nested({**plain, **options}))

    def update(unit: Any, **change: Any) -> object:
        data = make(sampler=gear.Prioritized(unit=unit))
        batch = data.sample()
        given = {"index": batch["index"], "priority": np.ones(2), "anchor": batch["anchor"]}
        if unit == "trajectory":
            del given["anchor"]
        return data.update_priority(**{**given, **change})

    for name in list(inspect.signature(gear.ReplayDataset).parameters)[1:]:
        rest = {"columns": None} if name == "windows" else {}
        yield f"dataset, {name}", lambda v, name=name, rest=rest: make(**{**rest, name: v})
    yield "dataset", lambda v: gear.ReplayDataset(v, batch_size=1, windows=gear.Window(1))
    yield "sample", lambda v: make().sample(v)
    yield "load_state_dict", lambda v: make().load_state_dict(v)
    for unit, name in itertools.product(
        ("trajectory", "step"), ("index", "priority", "anchor", "generation", "stale")
    ):
        yield f"update, {unit}, {name}", lambda v, unit=unit, name=name: update(unit, **{name: v})
    sizes: dict[str, Any] = {"batch_size": 2, "batches_per_epoch": 3}
    yield "mixture", lambda v: gear.Mixture(v, **sizes)
    yield "mixture, source", lambda v: gear.Mixture({"a": v}, **sizes)
    for name in list(inspect.signature(gear.Mixture).parameters)[1:]:
        yield f"mixture, {name}", lambda v, name=name: gear.Mixture({"a": (make(), 1)}, **{**sizes, name: v})
    given: dict[str, Any] = {"table": table, "batch_size": 2, "windows": gear.Window(1)}
    names = [
        "table",
        "val_fraction",
        "val_batches",
        "val_batch_size",
        "split_seed",
        "num_workers",
        "load_options",
    ]
    for name in [*given, *names]:
        yield f"module, {name}", lambda v, name=name: gear.ReplayDataModule(**nested({**given, name: v}))


def of_options() -> Iterator[tuple[str, Call]]:
    """Constructors of options, one argument each time; and functions without a table."""
    makes: list[tuple[Any, dict[str, Any]]] = [
        (gear.Column, {"dtype": torch.float32}),
        (gear.Window, {"length": 1}),
        (gear.Whole, {}),
        (gear.NStep, {"column": "x", "n": 1, "gamma": 0.9, "done": "done"}),
        (gear.Disk, {"path": "nowhere"}),
        (gear.Uniform, {}),
        (gear.Fifo, {}),
        (gear.Lifo, {}),
        (gear.TopK, {}),
        (gear.Prioritized, {}),
        (gear.LinearSchedule, {"start": 0.0, "end": 1.0, "batches": 10}),
        (gear.MinSize, {"min_size": 1}),
        (gear.Queue, {"size": 4}),
        (gear.SampleToInsertRatio, {"ratio": 1.0, "min_size": 1, "error_buffer": 10.0}),
        (gear.RateLimiter, {"samples_per_insert": 1.0, "min_size": 1, "min_diff": -9.0, "max_diff": 9.0}),
        (gear.balance, {"costs": [1, 2], "ranks": 2}),
    ]
    for make, given in makes:
        for name, parameter in inspect.signature(make).parameters.items():
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                yield (
                    f"{make.__name__}, {name}",
                    lambda v, make=make, given=given, name=name: make(**{**given, name: v}),
                )
    yield "sources.load", gear.sources.load
    yield "sources.load, columns", lambda v: gear.sources.load([{"a": np.zeros(4, np.float32)}], columns=v)
    yield "sources.load, episode", lambda v: gear.sources.load([v])
    yield "sources.load, column", lambda v: gear.sources.load([{"a": np.zeros(4, np.float32), "b": v}])
    yield "schema", gear.Schema
    yield "schema, column", lambda v: gear.Schema({"a": v})
    sizes: dict[str, Any] = {"schema": COLUMNS, "max_steps": 64, "max_trajectories": 8}
    for name in inspect.signature(gear.Table.create).parameters:

        def create(value: Any, name: str = name) -> None:
            if not (name == "name" and isinstance(value, str)):
                gear.Table.create(**nested_table({**sizes, name: value})).close()

        yield f"create, {name}", create
    for call in (gear.Table.attach, gear.Table.load, gear.Table.recover):
        yield call.__name__, call


def state(table: gear.Table) -> list[Any]:
    table.check_valid()
    arrays = table._engine.index.arrays
    found = [(int(i), {name: v.tolist() for name, v in table[int(i)].items()}) for i in table.indices()]
    return [found, table.num_steps, arrays.priority[table.indices()].tolist()]


Kind = Callable[[gear.Table, Any, pathlib.Path], Iterator[tuple[str, Call]]]
KINDS: dict[
    str, tuple[Any, Kind]
] = {  # columns of the table; calls, given it, the same by a server, and a folder
    "table": (LATE, lambda table, _, path: of_table(table)),
    "writers": (COLUMNS, lambda table, _, path: of_writers(table, each=False)),
    "step writers": (COLUMNS, lambda table, _, path: of_writers(table, each=True)),
    "dataset": (LATE, lambda table, _, path: of_dataset(table)),
    "options": (LATE, lambda table, _, path: of_options()),
    "remote table": (LATE, lambda table, remote, path: of_remote(table, remote)),
    "remote writers": (COLUMNS, lambda table, remote, path: of_writers(remote, each=False)),
    "shards": (LATE, lambda table, _, path: of_shards(table)),
    "sources": (LATE, lambda table, _, path: of_sources(path)),
    "sb3": (LATE, lambda table, _, path: of_sb3(path)),
}


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_an_odd_input_is_refused_briefly_or_taken_and_changes_nothing_else(
    kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    schema, calls = KINDS[kind]
    wrong: list[str] = []
    with contextlib.ExitStack() as stack:
        remote = None
        table = new_table(schema, NAME if kind.startswith("remote") else None)
        if kind.startswith("remote"):
            remote = stack.enter_context(connected(table))
        for entry in range(len(list(calls(table, remote, tmp_path)))):
            for name, value in odd_inputs().items():
                what, call = list(calls(table, remote, tmp_path))[entry]
                before = state(table)
                taken = False

                def watched(value: Any, call: Call = call) -> None:
                    nonlocal taken
                    call(value)
                    taken = True

                found = complaint(watched, value)
                if remote is not None:
                    remote.flush()
                if found is None and not taken and state(table) != before:
                    found = "it was refused, and the table has changed"
                if found is not None:
                    wrong.append(f"{what}: {name}: {found}")
                if taken and remote is not None:
                    table.clear()
                    fill_table(table)
                elif taken:
                    table.close()
                    table = new_table(schema)
        table.close()
    assert not wrong, f"{len(wrong)} of them:\n" + "\n".join(wrong[:40])


MASKED = np.ma.masked_array([1.0, 2.0], [True, False])
ACCEPTED: dict[str, Callable[[gear.Table], object]] = {
    "no lengths for two rows": lambda table: table.extend(stacked(), lengths=[]),
    "lengths under a mask": lambda table: table.extend(stacked(), lengths=MASKED.astype(int)),
    "priorities under a mask": lambda table: table.extend([trajectory()] * 2, priority=MASKED),
    "updates under a mask": lambda table: table.update_priority([0, 1], MASKED),
    "ids under a mask": lambda table: table.extend_as([trajectory()] * 2, ids=MASKED.astype(int)),
    "a mask under a mask": lambda table: table.writers(2).discard(MASKED.astype(bool)),
    "rows under a mask": lambda table: gear.sources.load([{"a": MASKED}]),
    "rows of uneven lengths": lambda table: gear.sources.load(
        [{"a": np.zeros(4, np.float32), "b": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])}]
    ),
    "costs under a mask": lambda table: gear.balance(MASKED, 2),
    "ids of anything": lambda table: table.ids(None),  # type: ignore[arg-type]
    "ids of a slice": lambda table: table.ids(slice(3)),  # type: ignore[arg-type]
    "a shape of bytes": lambda table: gear.Column(torch.float32, b"ab"),  # type: ignore[arg-type]
    "a shape of keys": lambda table: gear.Column(torch.float32, {3: 1}),  # type: ignore[arg-type]
    "a shape without order": lambda table: gear.Column(torch.float32, {2, 3}),  # type: ignore[arg-type]
    "squeeze": lambda table: gear.Window(1, squeeze="no"),  # type: ignore[arg-type]
    "if_exists": lambda table: gear.Table.create(COLUMNS, max_steps=9, max_trajectories=9, if_exists=1),  # type: ignore[arg-type]
    "drop_last": lambda table: gear.ReplayDataset(
        table, batch_size=1, windows=gear.Window(1), draws=gear.Draws(drop_last="no")
    ),  # type: ignore[arg-type]
    "a batch of 10**30": lambda table: gear.ReplayDataset(table, batch_size=10**30, windows=gear.Window(1)),
    "keep of 2**63": lambda table: gear.ReplayDataset(
        table, batch_size=1, windows=gear.Window(1), prefetch=gear.Prefetch(keep=2**63)
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("call", ACCEPTED.values(), ids=list(ACCEPTED))
def test_what_was_taken_by_mistake_is_refused(call: Callable[[gear.Table], object]) -> None:
    with new_table(COLUMNS) as table:
        before = state(table)
        with pytest.raises(GearError, match="expected"):
            call(table)
        assert state(table) == before


@pytest.mark.parametrize(
    "value",
    [np.zeros((3, 84, 84)), np.zeros((84, 84)).tolist(), torch.zeros(3, 84, 84), {"a": "x" * 9999}, Broken()],
)
def test_a_message_shows_the_beginning_of_a_value(value: Any) -> None:
    with new_table(COLUMNS) as table:
        calls: list[Call] = [
            lambda v: table.add(trajectory(n=v)),
            lambda v: table.add(trajectory(), final={"x": v}),
            lambda v: table.add(trajectory(), priority=v),
            lambda v: table.update_priority([0], v),
            lambda v: table.writer().append(**step(done=v)),
            gear.Window,
        ]
        for call in calls:
            with pytest.raises(SchemaError) as caught:
                call(value)
            assert len(str(caught.value)) < 600


class Exported:
    """An array of a library that exports it by DLPack or by ``__array__``, as jax's have both."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data


class ByDlpack(Exported):
    def __dlpack__(self, **_: Any) -> Any:
        return self._data.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._data.__dlpack_device__()


class ByArray(Exported):
    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return self._data


@pytest.mark.parametrize("kind", [ByDlpack, ByArray])
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("remote", [False, True])
def test_arrays_of_other_libraries_are_read(
    kind: Callable[[np.ndarray], Any], cast: bool, remote: bool
) -> None:
    x, done, ends = np.arange(8, dtype=np.float32).reshape(4, 2), np.zeros(4, bool), np.ones(4, bool)
    schema = {
        "x": gear.Column(torch.float32, (2,), final=True, cast=cast),
        "done": gear.Column(torch.bool),
        "goal": gear.Column(torch.float32, (2,), per="trajectory", cast=cast),
    }
    one = {"x": kind(x), "done": done, "goal": kind(x[0])}
    with contextlib.ExitStack() as stack:
        sizes: dict[str, Any] = {"max_steps": 99, "max_trajectories": 16, "name": NAME if remote else None}
        table = stack.enter_context(gear.Table.create(schema, **nested_table(sizes)))
        target: Any = stack.enter_context(connected(table)) if remote else table
        target.add(one)
        target.add(one, final={"x": kind(x[0])})
        target.extend([one])
        target.extend({"x": kind(x[None]), "done": done[None], "goal": kind(x[:1])}, lengths=[4])
        for each in (False,) if remote else (False, True):
            with target.writer(commit_every_step=each) as writer:
                writer.trajectory = {"goal": kind(x[0])}
                writer.append(x=kind(x[0]), done=False)
                writer.append({"x": kind(x[1]), "done": False})
                writer.append({"x": kind(x[2:]), "done": done[2:]})
                writer.commit(final={"x": kind(x[0])})
        with target.writers(4) as vector:
            vector.trajectory = {"goal": kind(x)}
            vector.append({"x": kind(x), "done": done}, done=kind(ends), final={"x": kind(x)})
        if remote:
            target.flush()
        target.update_priority(kind(np.arange(2)), kind(np.array([2.0, 3.0])))
        assert table._engine.index.arrays.priority[:2].tolist() == [2, 3]
        found = [table[int(i)] for i in table.indices()]
        assert len(found) == (9 if remote else 10)
        assert all(np.array_equal(each["x"], x) for each in found[:-4])
        assert np.array_equal(np.concatenate([each["x"] for each in found[-4:]]), x)
        assert np.array_equal(np.stack([each["goal"] for each in found[-4:]]), x)
        assert np.array_equal(table.final(int(table.indices()[-1]))["x"], x[3])  # type: ignore[index]


def test_messages_name_what_to_do() -> None:
    with new_table(COLUMNS, NAME) as table:
        data = gear.ReplayDataset(
            table, batch_size=2, windows=gear.Window(1), device="cpu", batches_per_epoch=4
        )
        with pytest.raises(
            KeyError, match=r"The batch has no 'dones'; its keys are \['x', 'done', .*'index'"
        ):
            data.sample()["dones"]
        part, _ = torch.utils.data.random_split(data, [3, 1])  # type: ignore[arg-type]
        with pytest.raises(
            SchemaError, match=r"two datasets with subset=, a function of .*ReplayDataModule\(val_f"
        ):
            next(iter(torch.utils.data.DataLoader(part, batch_size=None)))
        with connected(table) as remote:
            for writers in (table.writers(2), remote.writers(2)):
                writers.trajectory = {"goal": np.zeros((2, 3), np.int32)}
                with pytest.raises(
                    SchemaError, match=r"\['done'\] are missing: append\(\) has options of that"
                ):
                    writers.append(**rows(2))
        with pytest.raises(SchemaError, match=r"unknown: \['obs\.x'\]"):
            table.add(trajectory(obs={"x": np.zeros(4)}))
        with pytest.raises(SchemaError, match=r"missing: \['x'\], unknown: \['x\.a'\]"):
            table.add(trajectory(x={"a": np.zeros(4)}))
    full = gear.Table.create(
        {"x": gear.Column(torch.float32)}, max_steps=64, max_trajectories=4, block_steps=16
    )
    with full, full.writer() as writer:
        writer.append({"x": np.zeros(40, np.float32)})
        with pytest.raises(
            gear.errors.TableFullError, match=r"1 trajectory of 30 steps .*, 40 of 64 steps and 3 of 7"
        ):
            full.add({"x": np.zeros(30, np.float32)})
        full.add({"x": np.zeros(20, np.float32)})
        message = (
            r"24 steps of a trajectory that is being written \(1 block of 16\) to be added .*, 60 of 64 steps"
        )
        with pytest.raises(gear.errors.TableFullError, match=message):
            writer.append({"x": np.zeros(24, np.float32)})
