"""A table that a Ray actor owns, workers that find it by the actor's name, and the example, with Ray itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray_common import ray_directory
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.storage.shared_memory import region_path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ray_actors.py"
NUMBER = {"number": gear.Column(torch.int64)}
SIZES = {"max_steps": 4000, "max_trajectories": 2000}

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="needs pip install '.[ray]'")
    with ray_directory() as folder:
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=100 << 20,
            _temp_dir=folder,
            namespace="tests",
            log_to_driver=False,
        )
        yield ray
        ray.shutdown()


@pytest.fixture
def replay(ray: Any) -> Iterator[Any]:
    from gear_loader.integrations.ray import Replay

    actor = Replay.options(name="replay").remote(NUMBER, **SIZES)
    yield actor
    ray.get(actor.close.remote())
    ray.kill(actor)


def numbers_in(table: gear.Table) -> list[int]:
    return sorted(int(n) for index in table.indices() for n in table[int(index)]["number"])


def writing(ray: Any) -> Any:
    """A task that writes numbers, one a trajectory, and returns what it wrote to."""

    def write(first: int, count: int, attach: bool) -> str:  # nested, so that Ray sends it as code
        from gear_loader.integrations.ray import connect

        table = connect("ray://replay", attach=attach)
        with table.writer() as writer:
            for number in range(first, first + count):
                writer.append(number=number)
                writer.commit()
        kind = type(table).__name__
        table.close()
        return kind

    return ray.remote(write)


def test_workers_find_the_table_by_the_name_of_its_actor(ray: Any, replay: Any) -> None:
    task = writing(ray)
    kinds = ray.get([task.remote(0, 200, True), task.remote(200, 200, False)])
    assert kinds == ["Table", "RemoteTable"]
    with gear.connect("ray://replay") as table:
        assert numbers_in(table) == list(range(400))
        dataset = gear.ReplayDataset(table, batch_size=8, windows=gear.Window(1), device="cpu")
        assert dataset.sample()["number"].shape == (8, 1)
    with gear.connect("ray://replay?namespace=tests") as table:
        assert len(table) == 400
    assert ray.get(replay.stats.remote()).num_trajectories == 400


def test_an_actor_that_is_killed_goes_on_with_its_table(ray: Any, replay: Any) -> None:
    task = writing(ray)
    running = [task.remote(i * 300, 300, attach) for i, attach in enumerate((True, False, False))]
    before = ray.get(replay.where.remote())
    ray.kill(replay, no_restart=False)
    ray.get(running)
    after = ray.get(replay.where.remote())
    assert {**after, "url": before["url"]} == before
    with gear.connect("ray://replay") as table:
        assert numbers_in(table) == list(range(900))
        table.check_valid()


FORGETS = """
import sys, ray
from gear_loader.integrations.ray import Replay
import test_ray
ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=sys.argv[1], log_to_driver=False)
print(ray.get(Replay.remote(test_ray.NUMBER, **test_ray.SIZES).where.remote())["name"])
"""


def test_a_table_is_removed_when_its_actor_has_no_handle_or_ray_ends(ray: Any) -> None:
    from gear_loader.integrations.ray import Replay

    actor = Replay.remote(NUMBER, **SIZES)
    names = [ray.get(actor.where.remote())["name"]]
    del actor
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        paths = [str(Path(__file__).parent), *sys.path]
        done = subprocess.run(
            [sys.executable, "-c", FORGETS, folder],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "RAY_ADDRESS": "local"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        names.append(done.stdout.split()[-1])
    for name in names:
        wait_until(lambda name=name: not os.path.exists(region_path(name)), f"the end of {name}")


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*")
def test_each_worker_of_a_training_reads_its_shard(ray: Any, tmp_path: Path) -> None:
    pytest.importorskip("ray.train.torch", reason="needs pip install '.[ray]'", exc_type=ImportError)
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from gear_loader.integrations.ray import Replay

    actors = [Replay.options(name=f"shard-{rank}").remote(NUMBER, **SIZES) for rank in range(2)]
    for rank in range(2):
        with gear.connect(f"ray://shard-{rank}") as table:
            table.extend([{"number": torch.tensor([rank * 100 + i])} for i in range(100)])

    def train() -> None:
        import ray.train
        import torch.distributed

        from gear_loader.distributed import Shards

        rank = ray.train.get_context().get_world_rank()
        shards = Shards(gear.connect(f"ray://shard-{rank}"), transport="socket")
        dataset = gear.ReplayDataset(
            shards,
            batch_size=10,
            windows=gear.Window(1),
            sampler=gear.Uniform(replacement=False),
            device="cpu",
        )
        seen = torch.cat([batch["number"].flatten() for batch in dataset])
        parts = [torch.empty_like(seen) for _ in range(2)]
        torch.distributed.all_gather(parts, seen)
        assert sorted(torch.cat(parts).tolist()) == list(range(200))
        assert set((seen // 100).tolist()) == {0, 1}

    try:
        TorchTrainer(
            train,
            scaling_config=ScalingConfig(num_workers=2),
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(storage_path=str(tmp_path)),
        ).fit()
    finally:
        for actor in actors:
            ray.get(actor.close.remote())
            ray.kill(actor)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*")
def test_a_training_goes_on_over_its_connections_where_it_was(ray: Any, replay: Any, tmp_path: Path) -> None:
    """Two workers divide a pass, one by attached memory and one by the server; one is killed, and Ray starts both."""
    pytest.importorskip("ray.train.torch", reason="needs pip install '.[ray]'", exc_type=ImportError)
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    with gear.connect("ray://replay") as table:
        table.extend([{"number": torch.tensor([i])} for i in range(200)])

    def train(config: dict[str, str]) -> None:  # nested, so that Ray sends it as code
        import ray.train
        import torch.distributed

        from gear_loader.integrations.ray import connect

        rank, saved = ray.train.get_context().get_world_rank(), ray.train.get_checkpoint()
        table = connect("ray://replay", attach=rank == 0)
        assert type(table).__name__ == ("Table" if rank == 0 else "RemoteTable")
        dataset = gear.ReplayDataset(
            table,
            batch_size=10,
            windows=gear.Window(1),
            sampler=gear.Uniform(replacement=False),
            ranks=gear.Ranks(rank=rank, world_size=2),
            device="cpu",
        )
        seen: list[int] = []
        if saved is not None:
            with saved.as_directory() as folder:
                known = torch.load(os.path.join(folder, f"{rank}.pt"))
            seen = known["seen"]
            assert len(seen) == 40
            dataset.load_state_dict(known["state"])
        for batch in dataset:
            seen += batch["number"].flatten().tolist()
            if len(seen) == 40:
                with tempfile.TemporaryDirectory() as folder:
                    torch.save(
                        {"seen": seen, "state": dataset.state_dict()}, os.path.join(folder, f"{rank}.pt")
                    )
                    ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder))
            if len(seen) == 60 and saved is None and rank == 1:
                ray.train.get_all_reported_checkpoints()  # waits until Ray has the one of both ranks
                os._exit(1)
        parts: list[Any] = [None, None]
        torch.distributed.all_gather_object(parts, seen)
        assert sorted(parts[0] + parts[1]) == list(range(200))
        assert len(parts[0]) == len(parts[1])
        with open(os.path.join(config["folder"], f"done-{rank}-{saved is not None}"), "x"):
            pass

    TorchTrainer(
        train,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(
            storage_path=str(tmp_path / "run"), failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    assert sorted(each.name for each in tmp_path.glob("done*")) == ["done-0-True", "done-1-True"]


def test_what_cannot_be_found(ray: Any) -> None:
    from gear_loader.integrations.ray import Replay, connect

    with pytest.raises(gear.errors.PeerTimeoutError, match=r"no Ray actor named 'nobody' after 0.3 s"):
        connect("ray://nobody", timeout=0.3)
    for url in ("ray://", "ray://a/b", "ray://head:10001", "ray://a?other=b", "ray://a#b"):
        with pytest.raises(
            gear.errors.TransportError, match=re.escape(f"Address {url!r} was received; expected ray")
        ):
            gear.connect(url)
    with pytest.raises(gear.errors.HandshakeError, match="Leave it out"):
        gear.connect("ray://replay", secret=bytes(32))
    with pytest.raises(gear.errors.SchemaError, match="max_steps"):
        Replay.options(name="bad").remote(NUMBER, max_steps=0, max_trajectories=1)
    with pytest.raises(TypeError, match="if_exists was given"):
        Replay.options(name="bad").remote(NUMBER, if_exists="attach", **SIZES)


def test_without_ray_the_error_says_what_to_do() -> None:
    pytest.importorskip("ray", reason="needs pip install '.[ray]'")
    code = "import gear_loader; gear_loader.connect('ray://replay')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "TransportError: Ray is not initialised in this process" in done.stderr
    code = f"import sys; sys.modules['ray'] = None; {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install '.[ray]'" in done.stderr


def test_the_example(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs pip install '.[ray]'")
    command = [sys.executable, EXAMPLE, "--rounds", "6", "--steps", "300"]
    variables = {**os.environ, "HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every episode that was committed is there once" in done.stdout
