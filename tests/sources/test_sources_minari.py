"""`gear_loader.sources.read_minari`, on data sets that Minari itself wrote."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
import warnings
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
from sources_common import LENGTHS, ScriptedEnv, read_in_parts, same, same_episodes
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
            **{
                "observation_space": spaces.Box(-np.inf, np.inf, (3,)),
                "action_space": spaces.Discrete(2),
                **options,
            },
        )


def stacked(parts: list[Any]) -> Any:
    """A tree of arrays out of trees of values, as a buffer of Minari has it."""
    if isinstance(parts[0], dict):
        return {key: stacked([part[key] for part in parts]) for key in parts[0]}
    if isinstance(parts[0], tuple):
        return tuple(stacked(list(column)) for column in zip(*parts, strict=True))
    return list(parts) if isinstance(parts[0], str) else np.stack([np.array(part) for part in parts])


def played(
    env: gymnasium.Env[Any, Any], policy: Any, episodes: int, *, name: str = "played-v0", **options: Any
) -> Any:
    """A data set of what an environment gives, with infos."""
    buffers = []
    for number in range(episodes):
        observation, info = env.reset()
        seen, infos, actions, results = [copy.deepcopy(observation)], [info], [], []
        while not results or not (results[-1][1] or results[-1][2]):
            actions.append(policy(observation))
            observation, *result, info = env.step(actions[-1])
            seen.append(copy.deepcopy(observation))
            infos.append(info)
            results.append(result)
        rewards, terminations, truncations = zip(*results, strict=True)
        flags: dict[str, Any] = {"terminations": list(terminations), "truncations": list(truncations)}
        trees = {"observations": stacked(seen), "actions": stacked(actions), "infos": stacked(infos)}
        buffers.append(EpisodeBuffer(id=number, rewards=list(rewards), **flags, **trees))
    options |= {"observation_space": env.observation_space, "action_space": env.action_space}
    return build(buffers, name, **options)


FORMATS = [
    "hdf5",
    *(
        pytest.param(f, marks=pytest.mark.skipif(not HAS_ARROW, reason="needs pyarrow"))
        for f in ("arrow", "parquet")
    ),
]


@pytest.mark.parametrize("data_format", FORMATS)
def test_every_step_of_what_minari_has(data_format: str) -> None:
    buffers = [buffer(length) for length in LENGTHS]
    dataset = build(buffers, "made/random-v0", data_format=data_format)
    columns = ["observation", "next_observation", "action", "reward", "terminated", "truncated"]
    reader = read_minari("made/random-v0", columns=columns, keep_float64=True)
    read_in_parts(reader)
    assert len(reader) == len(LENGTHS)
    assert reader.lengths.tolist() == [len(episode) for episode in dataset] == list(LENGTHS)
    assert reader.num_steps == dataset.total_steps
    for episode, narrow, original in zip(reader, read_minari(dataset), dataset, strict=True):
        same(episode["observation"], original.observations[:-1])
        same(episode["next_observation"], original.observations[1:])
        same(episode["action"], original.actions)
        same(episode["reward"], original.rewards.astype(np.float64))
        same(episode["terminated"], original.terminations)
        same(episode["truncated"], original.truncations)
        same(narrow["reward"], original.rewards.astype(np.float32))
        assert list(narrow) == ["observation", "action", "reward", "terminated", "truncated"]
    assert reader.schema["action"] == gear.Column(torch.int64)


def test_minari_and_collect_record_the_same() -> None:
    actions = np.linspace(-1, 1, 2 * 142).reshape(-1, 2).astype(np.float32)
    turns = iter(actions)
    dataset = played(ScriptedEnv(), lambda _: next(turns), len(LENGTHS))
    turns = iter(actions)
    ours = collect(ScriptedEnv(), lambda _: next(turns), episodes=len(LENGTHS))
    reader = read_minari(dataset)
    assert reader.lengths.tolist() == list(LENGTHS)
    same_episodes(reader, ours)
    infos = read_minari(dataset, columns=["info", "observation"], keep_float64=True)
    assert infos.schema["observation"] == gear.Column(torch.float64, (3,))
    assert infos.schema["info.clock"] == gear.Column(torch.int64)
    for episode in infos:
        same(episode["info.clock"], episode["observation"][:, 0].astype(np.int64))
        same(episode["info.inner.xy"], np.stack([episode["observation"][:, 0] / 8] * 2, axis=1))


def test_infos_that_reset_does_not_give_belong_to_the_next_observation() -> None:
    steps = np.arange(1, 6)
    infos = {"both": np.arange(6), "speed": steps / 2, "hit": steps > 2, "xy": np.stack([steps, -steps], 1)}
    (episode,) = read_minari(build([buffer(5, infos=infos)]), columns=["info"])
    same(episode["info.both"], np.arange(5))
    same(episode["info.speed"], np.array([np.nan, 0.5, 1, 1.5, 2], np.float32))
    same(episode["info.hit"], np.array([False, False, False, True, True]))
    same(episode["info.xy"], np.stack([np.arange(5), -np.arange(5)], 1))


def test_dict_and_tuple_spaces() -> None:
    columns = [*NESTED, "next_observation.pose.gear"]
    env = NestedEnv()
    env.action_space.seed(0)
    dataset = played(env, lambda _: env.action_space.sample(), len(LENGTHS), jpeg_encoding=False)
    with pytest.raises(SourceError, match=r"column 'observation.mission' is of the space Text"):
        read_minari(dataset)
    again = NestedEnv()
    again.action_space.seed(0)
    ours = collect(again, lambda _: again.action_space.sample(), episodes=len(LENGTHS), columns=columns)
    same_episodes(read_minari(dataset, columns=columns), ours)


def test_by_id_by_directory_and_a_selection_of_episodes(root: Path) -> None:
    dataset = build(
        [buffer(length, id=number) for number, length in enumerate(LENGTHS)], "cart/pole/random-v3"
    )
    whole, folder = list(read_minari(dataset)), root / "cart/pole/random-v3"
    for source in ("cart/pole/random-v3", folder, str(folder / "data")):
        same_episodes(read_minari(source), whole)
    dataset.episode_indices = np.array([4, 1])
    reader = read_minari(dataset)
    assert len(reader) == 2
    same_episodes(reader, [whole[4], whole[1]])
    same_episodes(read_minari(dataset.filter_episodes(lambda e: e.id == 1)), [whole[1]])
    dataset.episode_indices = np.array([], dtype=int)
    with pytest.raises(SourceError, match=r"'cart/pole/random-v3' has no episodes"):
        read_minari(dataset)


def main_file(dataset: minari.MinariDataset) -> Path:
    return Path(dataset.storage.data_path) / "main_data.hdf5"


def test_rewards_that_are_not_finite() -> None:
    dataset = build([buffer(4), buffer(3, rewards=[0.0, -np.inf, 1.0])])
    message = r"'made-v0', episode 1, step 1: column 'reward' holds -inf, .*allow_non"
    with pytest.raises(SourceError, match=message):
        list(read_minari(dataset))
    assert not np.isfinite(list(read_minari(dataset, allow_nonfinite=True))[1]["reward"][1])


# fmt: off
DAMAGE: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # arrays of the episode, attributes, message
    ({"rewards": None}, {}, r"episode 1: it cannot be read: KeyError"),
    ({"rewards": np.zeros(2)}, {}, r"episode 1: its metadata give it 3 steps, but 'rewards' has 2"),
    ({"actions": np.zeros(2, np.int64)}, {}, r"column 'action' has shape \[2\]; expected \[3\] for 3 steps"),
    ({"observations": np.zeros((3, 3), np.float32)}, {},
     r"episode 1: column 'observation' has shape \[3, 3\]; expected \[4, 3\] for 3"),
    ({"observations": np.zeros((4, 2), np.float32)}, {}, r"'observation' has shape \[4, 2\]; expected \[4, 3\]"),
    ({"actions": [b"left", b"right", b"left"]}, {},
     r"episode 1: column 'action' holds values of \|S5|object where int64 is expected"),
    ({"actions": [0.5, 1.0, 0.0]}, {}, r"column 'action' holds values of float64 where int64 is expected"),
    ({"truncations": [0, 7, 0]}, {}, r"episode 1, step 1: column 'truncated' holds 7, which is not a flag"),
    ({}, {"total_steps": None}, r"episode 1: its metadata cannot be read: KeyError"),
    ({}, {"total_steps": 0}, r"episode 1: its metadata give it 0 steps"),
]
# fmt: on


def test_damage_names_the_episode() -> None:
    for number, (arrays, attributes, message) in enumerate(DAMAGE):
        dataset = build([buffer(4), buffer(3), buffer(2)], f"damaged-v{number}")
        with h5py.File(main_file(dataset), "a") as file:
            group = file["episode_1"]
            for target, changes in ((group, arrays), (group.attrs, attributes)):
                for name, value in changes.items():
                    del target[name]
                    if value is not None:
                        target[name] = value
        with pytest.raises(SourceError, match=message):
            list(read_minari(f"damaged-v{number}"))


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


def test_sources_and_columns_that_do_not_fit(tmp_path: Path) -> None:
    dataset = build([buffer(4)])
    missing = r"cannot be opened: FileNotFoundError"
    for source, columns, message in (
        ("no/where-v0", None, rf"'no/where-v0' {missing}.*list_local_datasets"),
        ("not an id", None, rf"'not an id' {missing}: Dataset not an id not found locally"),
        (
            tmp_path,
            None,
            r"is no Minari data set: it holds no metadata.json.* kind, such as 'parquet:/.*' or",
        ),
        (3, None, r"of type int was received; expected a minari.MinariDataset"),
        (dataset, ["obs"], r"has no column 'obs'; it has 'observation'"),
        (dataset, ["info.speed"], r"has no column 'info.speed'"),
    ):
        with pytest.raises(SourceError, match=message):
            read_minari(source, columns=columns)


def test_what_minaris_storage_needs_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = build([buffer(4)])
    for package in ("h5py", "PIL"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            patch.delitem(sys.modules, "minari.dataset._storages.hdf5_storage")
            with pytest.raises(ImportError, match=rf"{package}.*pip install '\.\[sources\]'"):
                read_minari(dataset.id)


def test_a_data_set_by_its_name() -> None:
    build([buffer(3), buffer(5)])
    with gear.load_dataset("minari:made-v0", final=True, progress=False) as table:
        assert table.lengths().tolist() == [3, 5]
        assert table.final(0) is not None
        with gear.Table.create(table.schema, max_steps=64, max_trajectories=8) as other:
            for _ in range(2):
                assert gear.load_dataset("minari:made-v0", other, download=False, progress=False) is other
            assert other.lengths().tolist() == [3, 5, 3, 5]
    with pytest.raises(SourceError, match="'made-v1' cannot be opened"):
        gear.load_dataset("minari:made-v1", download=False)
