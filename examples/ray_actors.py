"""Ray actors collect CartPole episodes into the table of a Ray actor, while a Ray Train job learns from it.

Run: pip install '.[ray,sources]' (in a clone of Gear Loader), then python examples/ray_actors.py

The table belongs to the actor "replay", which everybody finds by that name. Workers on its node attach to the table's
memory; others write over the network, as one of the actors does here. A network learns to predict the observation that
follows. On the way an actor and the owner of the table are killed: Ray starts them again, the table goes on, and in the
end every episode that was committed is there once.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gear_loader as gear

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
try:
    import gymnasium
    import ray
    import ray.train
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from gear_loader.integrations.ray import Replay, connect
except ImportError as error:
    sys.exit(f"{error}. This example needs pip install '.[ray,sources]', in a clone of Gear Loader.")

SCHEMA = {
    "observation": gear.Column(torch.float32, (4,), final=True),
    "action": gear.Column(torch.int64),
    "episode": gear.Column(torch.int64, per="trajectory"),
}
EPISODES = 1_000_000  # numbers that an actor may give to its episodes
ROUND = 20  # episodes of an actor in a call


@ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0)
class Actor:
    """Collects episodes in one environment.

    Args:
        number: of the actor. attach: whether it attaches to the table's memory, as on the table's node, or writes over
            the network, as on any other.
    """

    def __init__(self, number: int, attach: bool) -> None:
        self.table = connect("ray://replay", attach=attach)
        self.env = gymnasium.make("CartPole-v1")
        self.random = np.random.default_rng(number)
        self.number = number

    def collect(self, first: int, count: int) -> list[int]:
        """Add episodes number `first` and so on, unless they are there: Ray repeats a call that a death cut off."""
        there = self.stored()
        numbers = [self.number * EPISODES + first + i for i in range(count)]
        with self.table.writer() as writer:
            for number in numbers:
                if number in there:
                    continue
                observation, _ = self.env.reset(seed=number)
                ended = False
                while not ended:
                    action = int(self.random.integers(2))
                    writer.append(observation=observation, action=action)
                    observation, _, terminated, truncated, _ = self.env.step(action)
                    ended = terminated or truncated
                writer.commit(trajectory={"episode": number}, final={"observation": observation})
        return numbers

    def stored(self) -> set[int]:
        """Numbers of the episodes in the table, which only this node's processes can read."""
        with connect("ray://replay") as table:
            return {int(table[int(index)]["episode"]) for index in table.indices()}


def train(config: dict[str, Any]) -> None:
    """What each worker of Ray Train does: batches of the one table, every second one each."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(5, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    model = ray.train.torch.prepare_model(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    now, following = gear.Window(1, squeeze=True), gear.Window(1, 1, column="observation", squeeze=True)
    with connect("ray://replay") as table:
        dataset = gear.ReplayDataset(
            table,
            batch_size=64,
            windows={"observation": now, "action": now, "following": following},
            sampler=gear.Uniform(unit="step"),
            batches_per_epoch=config["steps"],
            device="cpu",
        )
        losses = []
        for batch in dataset:
            given = torch.cat([batch["observation"], batch["action"].float()[:, None]], 1)
            loss = (model(given) - (batch["following"] - batch["observation"])).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        told = {"first": losses[0], "last": float(np.mean(losses[-50:]))}
        with tempfile.TemporaryDirectory() as folder:
            torch.save(network.state_dict(), Path(folder) / "network.pt")
            leads = ray.train.get_context().get_world_rank() == 0
            ray.train.report(told, checkpoint=ray.train.Checkpoint.from_directory(folder) if leads else None)


def collect(replay: Any, actors: list[Any], trained: threading.Event, rounds: int) -> int:
    """Let the actors collect until the training has ended, in at least so many rounds; returns the rounds.

    In two of them an actor, and the owner of the table, is killed as by a crash.
    """
    number = 0
    while number < rounds or not trained.is_set():
        running = [actor.collect.remote(number * ROUND, ROUND) for actor in actors]
        if number in (rounds // 3, 2 * rounds // 3):
            print(
                f"Killing {'an actor' if number == rounds // 3 else 'the owner of the table'} ...", flush=True
            )
            ray.kill(actors[0] if number == rounds // 3 else replay, no_restart=False)
        ray.get(running)
        number += 1
        time.sleep(0.3)
    return number


def main() -> None:
    options = argparse.ArgumentParser(description="Ray actors write, a Ray Train job learns, two are killed.")
    options.add_argument("--actors", type=int, default=3)
    options.add_argument(
        "--rounds", type=int, default=10, help=f"at least, of {ROUND} episodes of each actor"
    )
    options.add_argument("--steps", type=int, default=1000, help="training steps of each worker")
    options.add_argument("--workers", type=int, default=2, help="of Ray Train")
    args = options.parse_args()

    with tempfile.TemporaryDirectory(prefix="ray-") as results, ThreadPoolExecutor(1) as pool:
        ray.init(num_cpus=args.workers + 2, object_store_memory=100 * 2**20, log_to_driver=False)
        replay = Replay.options(name="replay").remote(SCHEMA, max_steps=500_000, max_trajectories=50_000)
        try:
            actors = [Actor.remote(number, number % 3 != 1) for number in range(args.actors)]
            trained = threading.Event()
            collected = pool.submit(collect, replay, actors, trained, args.rounds)
            try:
                while not ray.get(replay.stats.remote()).num_trajectories:
                    time.sleep(0.1)
                result = TorchTrainer(
                    train,
                    train_loop_config={"steps": args.steps},
                    scaling_config=ScalingConfig(num_workers=args.workers),
                    torch_config=TorchConfig(backend="gloo"),
                    run_config=RunConfig(storage_path=results),
                ).fit()
            finally:
                trained.set()
            first, last = result.metrics["first"], result.metrics["last"]
            print(f"Mean squared error of the first batch {first:.6f}, of the last 50 {last:.6f}.")
            count = collected.result() * ROUND
            with connect("ray://replay") as table:
                found = sorted(int(table[int(index)]["episode"]) for index in table.indices())
            expected = [actor * EPISODES + i for actor in range(args.actors) for i in range(count)]
            if found != expected:
                sys.exit(
                    f"{len(found)} episodes, {len(set(found))} of them different; expected {len(expected)}."
                )
            print(f"Every episode that was committed is there once: {len(found)} of {args.actors} actors.")
        finally:
            ray.get(replay.close.remote())
            ray.shutdown()


if __name__ == "__main__":
    main()
