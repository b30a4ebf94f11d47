"""`gear_loader.integrations.minari_export`: what Minari reads is what the table holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import gear_loader as gear
from gear_loader.errors import SchemaError
from gear_loader.sources import load, read_minari

minari = pytest.importorskip("minari", reason="needs pip install '.[sources]'")
from gymnasium import spaces  # noqa: E402
from sources_common import same  # noqa: E402

from gear_loader.integrations.minari_export import to_minari  # noqa: E402

# Minari recommends to name an author, a licence and so on; a test's data set needs none.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:minari")

SCHEMA = {
    "observation.camera": gear.Column(torch.uint8, (16, 16, 3), final=True),
    "observation.pose.0": gear.Column(torch.float64, (2,), final=True),
    "observation.pose.1": gear.Column(torch.bfloat16, final=True),
    "action.0": gear.Column(torch.int64),
    "action.1": gear.Column(torch.bool, (2,)),
    "reward": gear.Column(torch.float64),
    "terminated": gear.Column(torch.bool),
    "truncated": gear.Column(torch.bool),
    "info.clock": gear.Column(torch.int32, final=True),
    "info.inner.xy": gear.Column(torch.float32, (2,)),
}


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


def drawn(schema: dict[str, gear.Column], steps: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(
            0, 2 if column.dtype == torch.bool else 200, (steps, *column.shape), generator=generator
        ).to(column.dtype)
        for name, column in schema.items()
    }


def filled(schema: dict[str, gear.Column], lengths: tuple[int, ...] = (3, 1, 40)) -> gear.Table:
    table = gear.Table.create(schema, max_steps=500, max_trajectories=20)
    finals = {name: column for name, column in schema.items() if column.final}
    for seed, length in enumerate(lengths):
        last = {name: values[0] for name, values in drawn(finals, 1, 100 + seed).items()}
        table.add(drawn(schema, length, seed), final=last or None)
    return table


@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
def test_minari_reads_what_the_table_holds(data_format: str) -> None:
    if data_format == "arrow":
        pytest.importorskip("pyarrow")
    schema = dict(SCHEMA)
    if data_format == "arrow":  # which Minari reads infos from that are arrays, and not nested
        del schema["info.clock"], schema["info.inner.xy"]
        schema |= {"info.clock": gear.Column(torch.int32, (1,), final=True)}
    with filled(schema) as table:
        made = to_minari(table, "made/all-v0", data_format=data_format)
        dataset = minari.load_dataset("made/all-v0")
        assert (made.total_episodes, dataset.total_steps) == (3, 44)
        assert isinstance(dataset.observation_space["pose"], spaces.Tuple)
        for index, episode in zip(table.indices().tolist(), dataset, strict=True):
            rows, final = table[index], table.final(index)
            assert final is not None
            whole = {name: torch.cat((rows[name], final[name][None])) for name in final}
            same(episode.observations["camera"], whole["observation.camera"].numpy())
            same(episode.observations["pose"][0], whole["observation.pose.0"].numpy())
            same(episode.observations["pose"][1], whole["observation.pose.1"].float().numpy())
            for place in (0, 1):
                same(episode.actions[place], rows[f"action.{place}"].numpy())
            same(episode.rewards, rows["reward"].numpy())
            same(episode.terminations, rows["terminated"].numpy())
            same(episode.truncations, rows["truncated"].numpy())
            same(episode.infos["clock"], whole["info.clock"].numpy())
            if data_format == "hdf5":
                same(episode.infos["inner"]["xy"][:-1], rows["info.inner.xy"].numpy())
                assert np.isnan(episode.infos["inner"]["xy"][-1]).all()


def test_what_was_written_is_read_back_with_all_fields() -> None:
    """Into a table again, infos and final steps included."""
    with filled(SCHEMA) as table:
        dataset = to_minari(table, "again-v0")
        columns = [name for name in SCHEMA if not name.startswith("info")] + ["info"]
        with load(dataset, columns=columns, final=True, keep_float64=True, progress=False) as read:
            assert set(read.schema) == set(SCHEMA)
            for one, other in zip(table.indices().tolist(), read.indices().tolist(), strict=True):
                for name, values in table[one].items():
                    assert torch.equal(read[other][name], values.to(read.schema[name].dtype)), name
                expected, found = table.final(one), read.final(other)
                assert expected is not None
                assert found is not None
                for name, value in expected.items():
                    assert torch.equal(found[name], value.to(read.schema[name].dtype)), name


def test_a_replay_buffer_with_the_spaces_of_its_environment() -> None:
    env = gymnasium.make("CartPole-v1")
    buffer = gear.ReplayBuffer(1_000)
    obs, _ = env.reset(seed=0)
    seen: list[list[Any]] = [[obs]]
    for step in range(60):
        next_obs, reward, terminated, truncated, _ = env.step(step % 2)
        buffer.add(obs, step % 2, reward, next_obs, terminated, truncated)
        seen[-1].append(next_obs)
        obs = next_obs
        if terminated or truncated:
            obs, _ = env.reset()
            seen.append([obs])
    dataset = to_minari(buffer.table, "cartpole/mine-v0", env="CartPole-v1", author="me")
    assert dataset.recover_environment().spec.id == "CartPole-v1"
    assert dataset.action_space == env.action_space
    episodes = list(dataset)
    assert len(episodes) == len([each for each in seen if len(each) > 1])
    for episode, expected in zip(episodes, seen, strict=False):
        same(episode.observations, np.stack(expected))
        assert episode.terminations[-1] != episode.truncations[-1]
    assert episodes[-1].truncations[-1]  # it was still running
    assert read_minari(dataset).num_steps == 60


def test_next_observations_are_final_steps() -> None:
    schema = {
        "observation": gear.Column(torch.float32, (2,)),
        "next_observation": gear.Column(torch.float32, (2,)),
    }
    schema |= {"action": gear.Column(torch.int64), "reward": gear.Column(torch.float32)}
    schema |= {"terminated": gear.Column(torch.bool)}
    with filled(schema) as table:
        for index, episode in zip(table.indices().tolist(), to_minari(table, "next-v0"), strict=True):
            same(episode.observations[-1], table[index]["next_observation"][-1].numpy())


def test_what_does_not_fit(root: Path) -> None:
    schema = {"observation": gear.Column(torch.float32, (2,), final=True), "action": gear.Column(torch.int64)}
    schema |= {"reward": gear.Column(torch.float32), "terminated": gear.Column(torch.bool)}
    with filled({**schema, "observation": gear.Column(torch.float32, (2,))}) as table:
        with pytest.raises(SchemaError, match="have no values after the last step"):
            to_minari(table, "no-v0")
        with pytest.raises(SchemaError, match=r"missing: \['reward'\]"):
            to_minari(table, "no-v0", columns=["observation", "action", "terminated"])
    with filled(schema) as table:
        for option, expected in {
            "observation_space": (
                spaces.Box(0, 1, (3,)),
                r"'observation' is float32 \[2\]; the observation space has",
            ),
            "action_space": (spaces.Box(0, 1, (), np.int8), "of a dtype that holds these values"),
        }.items():
            with pytest.raises(SchemaError, match=expected[1]):
                to_minari(table, "no-v0", **{option: expected[0]})
        with pytest.raises(SchemaError, match="has the parts"):
            to_minari(table, "no-v0", observation_space=spaces.Dict(a=spaces.Box(0, 1, (2,))))
        with pytest.raises(SchemaError, match=r"columns names \['goal'\]"):
            to_minari(
                table, "no-v0", columns=[*schema, "goal"] and {**{n: n for n in schema}, "goal": "action"}
            )
        first = to_minari(table, "kept-v0")
        with pytest.raises(ValueError, match="already exists"):
            to_minari(table, "kept-v0")
        assert len(list(first)) == 3
        table.add(drawn(schema, 2, 5))
        with pytest.raises(SchemaError, match="was added without its final step"):
            to_minari(table, "no-v0")
    assert sorted(path.name for path in root.iterdir()) == ["kept-v0"]
