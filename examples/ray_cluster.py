"""Four shards of a replay on two Ray nodes: six actors write, two learners read, and one node is killed and replaced.

Run: pip install '.[ray,sources]' (in a clone of Gear Loader), then python examples/ray_cluster.py

The shards are Ray actors that everybody finds as "ray://replay". Whoever is on the node of a shard uses its shared
memory, others its server. On the way the process of a shard is killed, which loses nothing, and then a whole node: Ray
starts its two shards on the other node, with what they had written to the disk that both nodes have, and its actors.
Learners and actors wait for them and go on. In the end no episode is there twice, and all that were on disk are there.

A second node is started on this machine, as Ray's own tests do; on a cluster everything else is the same.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
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
    from ray.cluster_utils import Cluster
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from gear_loader.integrations.ray import ReplayShards
except ImportError as error:
    sys.exit(f"{error}. This example needs pip install '.[ray,sources]', in a clone of Gear Loader.")

SCHEMA = {
    "observation": gear.Column(torch.float32, (4,), final=True),
    "action": gear.Column(torch.int64),
    "episode": gear.Column(torch.int64, per="trajectory"),
}
EPISODES = 1_000_000  # numbers that an actor may give to its episodes
ROUND = 10  # episodes of an actor in a call
TIMEOUT = 300.0  # seconds that calls wait for a shard that is being restarted


def connected() -> Any:
    """All shards, from any node."""
    from gear_loader.integrations.ray import connect

    return connect("ray://replay", timeout=TIMEOUT)


def stored(shards: Any) -> list[int]:
    """Numbers of the episodes in all shards, in order."""
    found: list[int] = []
    one = gear.Window(1, squeeze=True)
    for table in shards.tables:
        rows = table.indices()
        if len(rows):
            found += table.gather(rows, windows={"episode": one, "action": one})["episode"].tolist()
    return sorted(found)


@ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0, scheduling_strategy="SPREAD")
class Actor:
    """Collects episodes in one environment; `number` is the actor's."""

    def __init__(self, number: int) -> None:
        self.shards = connected()
        self.env = gymnasium.make("CartPole-v1")
        self.random = np.random.default_rng(number)
        self.number = number
        self.again = ray.get_runtime_context().was_current_actor_reconstructed

    def collect(self, first: int) -> None:
        """Add episodes number `first` and so on, unless they are there: Ray repeats a call that a death cut off."""
        there = set(stored(self.shards)) if self.again else set()
        self.again = False
        with self.shards.writer() as writer:
            for number in range(self.number * EPISODES + first, self.number * EPISODES + first + ROUND):
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


def train(config: dict[str, Any]) -> None:
    """What each learner does: batches over all shards, of its own draws."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(5, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    model = ray.train.torch.prepare_model(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    now, following = gear.Window(1, squeeze=True), gear.Window(1, 1, column="observation", squeeze=True)
    with connected() as shards:
        dataset = gear.ReplayDataset(
            shards,
            batch_size=64,
            windows={"observation": now, "action": now, "following": following},
            sampler=gear.Uniform(unit="step"),
            batches_per_epoch=float("inf"),
            device="cpu",
        )
        losses: list[float] = []
        learning, stop = Path(config["folder"], "learning"), Path(config["folder"], "stop")
        for batch in dataset:
            given = torch.cat([batch["observation"], batch["action"].float()[:, None]], 1)
            loss = (model(given) - (batch["following"] - batch["observation"])).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            learning.touch()
            over = torch.tensor(float(stop.exists() and len(losses) >= config["steps"]))
            torch.distributed.all_reduce(over, torch.distributed.ReduceOp.MIN)  # all end at the same step
            if over:
                break
        dataset.close()
    told = {"first": losses[0], "last": float(np.mean(losses[-50:])), "steps": len(losses)}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(network.state_dict(), Path(folder) / "network.pt")
        leads = ray.train.get_context().get_world_rank() == 0
        ray.train.report(told, checkpoint=ray.train.Checkpoint.from_directory(folder) if leads else None)


def rounds(actors: list[Any], first: int, count: int) -> int:
    """Let the actors collect for some rounds; returns the number of the next one."""
    for number in range(first, first + count):
        ray.get([actor.collect.remote(number * ROUND) for actor in actors])
    return first + count


def run(cluster: Any, second: Any, folder: str, args: argparse.Namespace) -> None:
    """Collect and train while things are killed; exits if an episode is missing or there twice."""
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {text}", flush=True)

    replay = ReplayShards(
        SCHEMA,
        name="replay",
        num_shards=args.shards,
        placement="SPREAD",
        disk=gear.Disk(os.path.join(folder, "disk"), sync_seconds=0.2),
        max_steps=200_000,
        max_trajectories=20_000,
        timeout=TIMEOUT,
    )
    actors = [Actor.remote(number) for number in range(args.actors)]
    done = rounds(actors, 0, 1)
    say(f"{args.shards} shards and {args.actors} actors on 2 nodes have {done} round of episodes.")
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": args.steps, "folder": folder},
        scaling_config=ScalingConfig(
            num_workers=args.learners, resources_per_worker={"CPU": 1, "learner": 1}
        ),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=folder),
    )
    with ThreadPoolExecutor(1) as pool, connected() as shards:
        training = pool.submit(trainer.fit)
        try:
            done = rounds(actors, done, args.rounds)
            while not Path(folder, "learning").exists() and not training.done():
                time.sleep(0.1)
            say("Learners have begun. Killing the process of a shard ...")
            ray.kill(replay.shards[0], no_restart=False)
            done = rounds(actors, done, args.rounds)
            while any(ray.get(shard.stats.remote()).disk.unwritten_trajectories for shard in replay.shards):
                time.sleep(0.1)
            before = stored(shards)
            expected = [actor * EPISODES + i for actor in range(args.actors) for i in range(done * ROUND)]
            if before != expected:
                sys.exit(f"{len(before)} episodes, {len(set(before))} different; expected {len(expected)}.")
            say(f"All {len(before)} episodes are there. Killing a node with its shards and actors ...")
            running = [actor.collect.remote(done * ROUND) for actor in actors]
            cluster.remove_node(second, allow_graceful=False)
            cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
            ray.get(running)
            done = rounds(actors, done + 1, args.rounds)
            after = stored(shards)
            lost = args.actors * done * ROUND - len(after)
            if len(set(after)) != len(after) or not set(before) <= set(after):
                sys.exit(
                    f"{len(after)} episodes, {len(set(after))} of them different; some were lost or doubled."
                )
            say(
                f"{len(after)} episodes are there once; {lost} of the node's last moment were not on disk yet."
            )
        finally:
            Path(folder, "stop").touch()
        metrics = training.result().metrics
        say(f"{args.learners} learners made {metrics['steps']} steps meanwhile, and met no error.")
        print(
            f"Mean squared error of the first batch {metrics['first']:.6f}, of the last 50 {metrics['last']:.6f}."
        )
    replay.close()


def main() -> None:
    options = argparse.ArgumentParser(description="Replay shards on two Ray nodes, one of which is killed.")
    options.add_argument("--shards", type=int, default=4)
    options.add_argument("--actors", type=int, default=6)
    options.add_argument("--learners", type=int, default=2)
    options.add_argument(
        "--rounds", type=int, default=3, help=f"of {ROUND} episodes of each actor, each time"
    )
    options.add_argument("--steps", type=int, default=300, help="least training steps of each learner")
    args = options.parse_args()

    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        node = {"object_store_memory": 80 << 20}
        head = {"num_cpus": args.learners + 1, "resources": {"learner": args.learners}}
        cluster = Cluster(initialize_head=True, head_node_args={**node, **head, "include_dashboard": False})
        second = cluster.add_node(**node, num_cpus=2)
        try:
            ray.init(address=cluster.address, namespace="example", log_to_driver=False)
            run(cluster, second, folder, args)
        finally:
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    main()
