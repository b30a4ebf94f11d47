"""`gear_loader.sources.read_minari`, on data sets that Minari itself wrote."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import minari
import numpy as np
import pytest
import torch
from gymnasium import spaces
from minari.data_collector import EpisodeBuffer
from sources_common import LENGTHS, ScriptedEnv, same, same_episodes
from test_sources_environment import NESTED, NestedEnv

import gear_loader as gear
from gear_loader.errors import SourceError
from gear_loader.sources import collect, read_minari

HAS_ARROW = importlib.util.find_spec("pyarrow") is not None


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Minari looks for data sets and puts them."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


def tree_map(function: Any, tree: Any, *others: Any) -> Any:
    if isinstance(tree, dict):
        return {key: tree_map(function, tree[key], *(other[key] for other in others)) for key in tree}
    if isinstance(tree, tuple):
        return tuple(tree_map(function, *parts) for parts in zip(tree, *others, strict=True))
    return function(tree, *others)


class Folder:
    """A temporary folder that nobody removes."""

    def __init__(self, dir: str) -> None:
        self.name = tempfile.mkdtemp(dir=dir)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[minari.DataCollector]]:
    """Minari's collector, without two of its peculiarities.

    It needs one function of jax, which is given here where jax is missing. And it leaves temporary folders to
    the garbage collector, which warns about them whenever it comes by; here they stay for pytest to remove.
    """
    folders = types.SimpleNamespace(TemporaryDirectory=Folder)
    monkeypatch.setattr("minari.data_collector.data_collector.tempfile", folders)
    if importlib.util.find_spec("jax") is None:
        jax, tree_util = types.ModuleType("jax"), types.ModuleType("jax.tree_util")
        jax.tree_util, tree_util.tree_map = tree_util, tree_map  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "jax", jax)
        monkeypatch.setitem(sys.modules, "jax.tree_util", tree_util)
    return minari.DataCollector


def save(collector: minari.DataCollector, name: str) -> minari.MinariDataset:
    with warnings.catch_warnings():
        # Minari recommends to name an author, a licence and so on; a test's data set needs none.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"minari\.utils")
        return collector.create_dataset(name)


def play(env: gymnasium.Env[Any, Any], episodes: int, seed: int = 0) -> None:
    env.action_space.seed(seed)
    for _ in range(episodes):
        env.reset(seed=seed)
        done = False
        while not done:
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            done = terminated or truncated


FORMATS = [
    "hdf5",
    *(
        pytest.param(f, marks=pytest.mark.skipif(not HAS_ARROW, reason="needs pyarrow"))
        for f in ("arrow", "parquet")
    ),
]


@pytest.mark.parametrize("data_format", FORMATS)
def test_every_step_of_what_minari_collected(collector: Any, data_format: str) -> None:
    env = collector(gymnasium.make("Hopper-v5"), data_format=data_format)
    play(env, 4)
    dataset = save(env, "hopper/random-v0")
    env.close()
    columns = [
        "observation",
        "next_observation",
        "action",
        "reward",
        "terminated",
        "truncated",
    ]
    reader = read_minari("hopper/random-v0", columns=columns, keep_float64=True)
    episodes = list(reader)
    assert len(reader) == len(episodes) == 4
    assert reader.lengths.tolist() == [len(episode) for episode in dataset]
    assert reader.num_steps == dataset.total_steps
    for episode, original in zip(episodes, dataset, strict=True):
        same(episode["observation"], original.observations[:-1])
        same(episode["next_observation"], original.observations[1:])
        same(episode["action"], original.actions)
        same(episode["reward"], original.rewards.astype(np.float64))
        same(episode["terminated"], original.terminations)
        same(episode["truncated"], original.truncations)
    narrow = list(read_minari(dataset))
    assert reader.schema["observation"] == gear.Column(torch.float64, (11,))
    assert list(narrow[0]) == ["observation", "action", "reward", "terminated", "truncated"]
    for one, other in zip(narrow, episodes, strict=True):
        same(one["observation"], other["observation"].astype(np.float32))
        same(one["reward"], other["reward"].astype(np.float32))


class FreshEnv(ScriptedEnv):
    """Hands out a new array at each step: Minari keeps what it gets without copying it."""

    def observe(self) -> np.ndarray:
        return super().observe().copy()


def test_minari_and_collect_record_the_same(collector: Any) -> None:
    env = collector(FreshEnv(), record_infos=True)
    actions = iter(np.linspace(-1, 1, 2 * 6 * 142).reshape(-1, 2).astype(np.float32))
    for _ in LENGTHS:
        env.reset()
        done = False
        while not done:
            _, _, terminated, truncated, _ = env.step(next(actions))
            done = terminated or truncated
    dataset = save(env, "scripted-v0")
    env.close()
    actions = iter(np.linspace(-1, 1, 2 * 6 * 142).reshape(-1, 2).astype(np.float32))
    ours = collect(ScriptedEnv(), lambda observation: next(actions), episodes=len(LENGTHS))
    reader = read_minari(dataset)
    assert reader.lengths.tolist() == list(LENGTHS)
    same_episodes(reader, ours)
    infos = read_minari(dataset, columns=["info", "observation"], keep_float64=True)
    assert infos.schema["info.clock"] == gear.Column(torch.int64)
    for episode in infos:
        same(episode["info.clock"], episode["observation"][:, 0].astype(np.int64))
        same(episode["info.inner.xy"], np.stack([episode["observation"][:, 0] / 8] * 2, axis=1))
    assert [(bool(e["terminated"][-1]), bool(e["truncated"][-1])) for e in reader][:2] == [
        (True, True),
        (False, True),
    ]


def test_dict_and_tuple_spaces(collector: Any) -> None:
    env = collector(NestedEnv(), jpeg_encoding=False)
    env.action_space.seed(0)
    play(env, len(LENGTHS))
    dataset = save(env, "nested-v0")
    env.close()
    with pytest.raises(SourceError, match=r"column 'observation.mission' is of the space Text"):
        read_minari(dataset)
    columns = [*NESTED, "next_observation.pose.gear"]
    env = NestedEnv()
    env.action_space.seed(0)
    ours = collect(env, lambda observation: env.action_space.sample(), episodes=len(LENGTHS), columns=columns)
    same_episodes(read_minari(dataset, columns=columns), ours)


def test_by_id_by_directory_and_a_selection_of_episodes(collector: Any, root: Path) -> None:
    env = collector(gymnasium.make("CartPole-v1"))
    play(env, 6)
    dataset = save(env, "cart/pole/random-v3")
    env.close()
    whole = list(read_minari(dataset))
    for source in (
        "cart/pole/random-v3",
        root / "cart/pole/random-v3",
        str(root / "cart/pole/random-v3/data"),
    ):
        same_episodes(read_minari(source), whole)
    dataset.episode_indices = np.array([4, 1])
    reader = read_minari(dataset)
    assert len(reader) == 2
    same_episodes(reader, [whole[4], whole[1]])
    same_episodes(read_minari(dataset.filter_episodes(lambda e: e.id == 1)), [whole[1]])
    dataset.episode_indices = np.array([], dtype=int)
    with pytest.raises(SourceError, match=r"'cart/pole/random-v3' has no episodes"):
        read_minari(dataset)


# Data sets whose contents are chosen here, written by Minari ---------------------------------------------------


def buffer(length: int, **changes: Any) -> EpisodeBuffer:
    rng = np.random.default_rng(length)
    fields = {
        "observations": rng.standard_normal((length + 1, 3)).astype(np.float32),
        "actions": rng.integers(0, 2, length),
        "rewards": rng.standard_normal(length).tolist(),
        "terminations": [False] * (length - 1) + [True],
        "truncations": [False] * length,
    }
    return EpisodeBuffer(**(fields | changes))


def build(buffers: list[EpisodeBuffer], name: str = "made-v0", **options: Any) -> minari.MinariDataset:
    with warnings.catch_warnings():
        # Minari recommends to name an author, a licence and so on; a test's data set needs none.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"minari\.utils")
        return minari.create_dataset_from_buffers(
            name,
            buffers,
            observation_space=spaces.Box(-np.inf, np.inf, (3,)),
            action_space=spaces.Discrete(2),
            **options,
        )


def main_file(dataset: minari.MinariDataset) -> Path:
    return Path(dataset.storage.data_path) / "main_data.hdf5"


def test_discrete_actions_and_uneven_lengths() -> None:
    buffers = [buffer(length) for length in LENGTHS]
    reader = read_minari(build(buffers))
    assert reader.schema["action"] == gear.Column(torch.int64)
    for episode, original in zip(reader, buffers, strict=True):
        same(episode["observation"], original.observations[:-1])
        same(episode["action"], original.actions)
        same(episode["reward"], np.float32(original.rewards))


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_rewards_that_are_no_numbers(value: float) -> None:
    dataset = build([buffer(4), buffer(3, rewards=[0.0, value, 1.0])])
    reader = read_minari(dataset)
    with pytest.raises(
        SourceError, match=rf"'made-v0', episode 1, step 1: column 'reward' holds {value}, .*allow_non"
    ):
        list(reader)
    assert not np.isfinite(list(read_minari(dataset, allow_nonfinite=True))[1]["reward"][1])


def damage(group: h5py.Group, what: str) -> None:
    match what:
        case "no rewards":
            del group["rewards"]
        case "short rewards":
            group["rewards"].resize((2,))
        case "short actions":
            group["actions"].resize((2,))
        case "no last observation":
            group["observations"].resize((3, 3))
        case "narrow observations":
            del group["observations"]
            group["observations"] = np.zeros((4, 2), np.float32)
        case "actions of text":
            del group["actions"]
            group["actions"] = [b"left", b"right", b"left"]
        case "fractions for actions":
            del group["actions"]
            group["actions"] = [0.5, 1.0, 0.0]
        case "a flag of 7":
            del group["truncations"]
            group["truncations"] = [0, 7, 0]
        case "no steps declared":
            del group.attrs["total_steps"]
        case "zero steps declared":
            group.attrs["total_steps"] = 0


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no rewards", r"episode 1: it cannot be read: KeyError"),
        ("short rewards", r"episode 1: its metadata give it 3 steps, but 'rewards' has 2"),
        ("short actions", r"episode 1: column 'action' has shape \[2\]; expected \[3\] for 3 steps"),
        (
            "no last observation",
            r"episode 1: column 'observation' has shape \[3, 3\]; expected \[4, 3\] for 3",
        ),
        ("narrow observations", r"episode 1: column 'observation' has shape \[4, 2\]; expected \[4, 3\]"),
        (
            "actions of text",
            r"episode 1: column 'action' holds values of \|S5|object where int64 is expected",
        ),
        (
            "fractions for actions",
            r"episode 1: column 'action' holds values of float64 where int64 is expected",
        ),
        ("a flag of 7", r"episode 1, step 1: column 'truncated' holds 7, which is not a flag"),
        ("no steps declared", r"episode 1: its metadata cannot be read: KeyError"),
        ("zero steps declared", r"episode 1: its metadata give it 0 steps"),
    ],
)
def test_damage_names_the_episode(what: str, message: str) -> None:
    dataset = build([buffer(4), buffer(3), buffer(2)])
    with h5py.File(main_file(dataset), "a") as file:
        damage(file["episode_1"], what)
    with pytest.raises(SourceError, match=message):
        list(read_minari("made-v0"))


def test_a_missing_episode_is_named() -> None:
    dataset = build([buffer(4), buffer(3), buffer(2)])
    with h5py.File(main_file(dataset), "a") as file:
        del file["episode_2"]
    with pytest.raises(SourceError, match=r"episode 2: its metadata cannot be read: KeyError"):
        read_minari(dataset)
    dataset.episode_indices = np.array([0, 1])  # the remedy that the message names
    assert read_minari(dataset).lengths.tolist() == [4, 3]


def test_an_episode_written_in_two_pieces_is_refused() -> None:
    # Minari 0.5.4 then declares the length of the last piece alone.
    more = buffer(2, id=0, observations=np.zeros((2, 3), np.float32))
    dataset = build([buffer(5), more])
    with pytest.raises(SourceError, match=r"episode 0: its metadata give it 2 steps, but 'rewards' has 7"):
        list(read_minari(dataset))


@pytest.mark.skipif(not HAS_ARROW, reason="needs pyarrow")
def test_a_long_episode_that_minari_reads_only_a_piece_of_is_refused() -> None:
    dataset = build([buffer(4), buffer(40_000), buffer(3)], data_format="arrow")
    with pytest.raises(SourceError, match=r"episode 1: .* 40000 steps, but 'rewards' has 32767.*hdf5 format"):
        list(read_minari(dataset))


def test_a_file_that_was_cut_off() -> None:
    dataset = build([buffer(length) for length in LENGTHS])
    path = main_file(dataset)
    whole = path.read_bytes()
    for size in (0, 8, 512, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(SourceError, match=r"'made-v0', episode 0: its metadata cannot be read: OSError"):
            list(read_minari("made-v0"))


def test_damaged_metadata() -> None:
    dataset = build([buffer(4)])
    path = Path(dataset.storage.data_path) / "metadata.json"
    whole = path.read_text()
    for text in (whole[:50], "", "[]", json.dumps(json.loads(whole) | {"minari_version": "99.0"})):
        path.write_text(text)
        with pytest.raises(SourceError, match=r"data set 'made-v0' cannot be opened"):
            read_minari("made-v0")


def test_load_fetches_what_is_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its error says so, and it does so."""
    with pytest.raises(SourceError, match=r"not found locally .* download=True .*dataset\. Expected an id"):
        gear.sources.load("mujoco/hopper/medium-v0")
    dataset = build([buffer(4)])
    asked = []

    def load_dataset(name: str, download: bool = False) -> minari.MinariDataset:
        asked.append((name, download))
        return dataset

    monkeypatch.setattr(minari, "load_dataset", load_dataset)
    with gear.sources.load("mujoco/hopper/medium-v0", download=True, progress=False) as table:
        assert asked == [("mujoco/hopper/medium-v0", True)]
        assert table.num_steps == 4
    for wrong in ("a.hdf5", tmp_path, [{"reward": np.zeros(3)}]):
        with pytest.raises(
            SourceError, match=r"download=True was given with .*; expected the id of a Minari"
        ):
            gear.sources.load(wrong, download=True)
    assert len(asked) == 1


def test_sources_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(
        SourceError, match=r"'no/where-v0' cannot be opened: FileNotFoundError.*list_local_datasets"
    ):
        read_minari("no/where-v0")
    with pytest.raises(
        SourceError,
        match=r"'not an id' cannot be opened: FileNotFoundError: Dataset not an id not found locally",
    ):
        read_minari("not an id")
    with pytest.raises(SourceError, match=r"is no Minari data set: it holds no metadata.json"):
        read_minari(tmp_path)
    with pytest.raises(SourceError, match=r"of type int was received; expected a minari.MinariDataset"):
        read_minari(3)
    dataset = build([buffer(4)])
    with pytest.raises(SourceError, match=r"has no column 'obs'; it has 'observation'"):
        read_minari(dataset, columns=["obs"])
    with pytest.raises(SourceError, match=r"has no column 'info.speed'"):
        read_minari(dataset, columns=["info.speed"])


def test_what_minaris_storage_needs_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = build([buffer(4)])
    for package in ("h5py", "PIL"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            patch.delitem(sys.modules, "minari.dataset._storages.hdf5_storage")
            with pytest.raises(ImportError, match=rf"{package}.*pip install '\.\[sources\]'"):
                read_minari(dataset.id)
