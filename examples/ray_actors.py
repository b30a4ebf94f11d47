"""Ray actors collect CartPole episodes into a table, which they attach to by its name, while the driver samples.

Run: pip install '.[ray,sources]' (in a clone of Gear Loader), then python examples/ray_actors.py

Actors and driver share the table's memory, so they must run on one machine: here on the driver's node. Ray moves no
steps; an actor returns only how many it has added. If Ray starts an actor again after it has died, it attaches again;
the steps of an episode that it had not committed are freed.
"""

from __future__ import annotations

import argparse
import os
import sys

import numpy as np
import torch

import gear_loader as gear

try:
    import gymnasium
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    sys.exit(f"{error}. This example needs pip install '.[ray,sources]', in a clone of Gear Loader.")

SCHEMA = {
    "observation": gear.Column(torch.float32, (4,)),
    "action": gear.Column(torch.int64),
    "reward": gear.Column(torch.float32),
    "terminated": gear.Column(torch.bool),
}


@ray.remote(max_restarts=-1)
class Actor:
    """Collects episodes in one environment.

    Args:
        table: the table, which travels as a handle: unpickling attaches to it by its name.
        seed: of environment and actions.
    """

    def __init__(self, table: gear.Table, seed: int) -> None:
        self.table = table
        self.env = gymnasium.make("CartPole-v1")
        self.env.reset(seed=seed)
        self.env.action_space.seed(seed)

    def collect(self, steps: int) -> int:
        """Add whole episodes, at least `steps` steps of them; return how many steps."""
        added = 0
        with self.table.writer() as writer:
            while added < steps:
                observation, _ = self.env.reset()
                ended = False
                while not ended:
                    action = self.env.action_space.sample()
                    following, reward, terminated, truncated, _ = self.env.step(action)
                    writer.append(
                        observation=np.asarray(observation, np.float32),
                        action=int(action),
                        reward=float(reward),
                        terminated=bool(terminated),
                    )
                    observation, ended = following, terminated or truncated
                    added += 1
                writer.commit()
        return added


def main() -> None:
    options = argparse.ArgumentParser(description="Ray actors write into one table.")
    options.add_argument("--actors", type=int, default=2)
    options.add_argument("--steps", type=int, default=2_000, help="steps that each actor adds in a round")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--batches", type=int, default=100, help="batches that the driver draws in a round")
    args = options.parse_args()

    ray.init(num_cpus=max(args.actors, os.cpu_count() or 1), object_store_memory=100 * 2**20)
    table = gear.Table.create(
        SCHEMA,
        max_steps=100_000,
        max_trajectories=20_000,
        block_steps=32,
        name=f"ray-actors-{os.getpid()}",
        on_full="evict_oldest",
    )
    try:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        made = Actor.options(scheduling_strategy=here)
        actors = [made.remote(table, seed) for seed in range(args.actors)]
        dataset = gear.ReplayDataset(table, batch_size=64, windows=gear.Window(10), device="cpu")
        total = sum(ray.get([actor.collect.remote(args.steps) for actor in actors]))
        for number in range(args.rounds):
            running = [actor.collect.remote(args.steps) for actor in actors]
            reward = 0.0
            for _ in range(args.batches):  # while the actors collect
                batch = dataset.sample()
                reward += float(batch["reward"].sum() / batch["mask"].sum())
            total += sum(ray.get(running))
            print(
                f"round {number}: {total:,} steps added, {len(table):,} episodes in the table, "
                f"mean reward {reward / args.batches:.2f}"
            )
        print(f"{args.actors} actors added {total:,} steps.")
    finally:
        ray.shutdown()
        table.unlink()


if __name__ == "__main__":
    main()
