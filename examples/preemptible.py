"""A job on several nodes that can be stopped at any moment, and goes on, also on another number of ranks.

Each rank keeps trajectories of a rotation in a table of its own memory; together they learn it by
DistributedDataParallel. SIGTERM, which Slurm, Kubernetes and torchrun send before they end a job, saves tables, draws
and model between two steps. A rank that is killed is started again by torchrun with the others, which attach to
the tables: these stay in the machine's memory, and only the steps since the last checkpoint are trained again.

    torchrun --standalone --nproc-per-node 3 --max-restarts 2 examples/preemptible.py --folder run
    # kill -TERM it, and it goes on with two ranks:
    torchrun --standalone --nproc-per-node 2 --max-restarts 2 examples/preemptible.py --folder run

docs/cluster.md has the same for Slurm and Kubernetes, where `--host` is the node's address.
"""

import argparse
import math
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gear_loader as gear
from gear_loader.distributed import Shards, load, save

SCHEMA = {"point": gear.Column(torch.float32, (2,)), "angle": gear.Column(torch.float32, per="trajectory")}
LENGTH, EVERY = 32, 20  # steps of a trajectory; batches from one checkpoint to the next


def trajectory(random):
    """Points that turn about the origin, by another angle in each trajectory."""
    angle, start = torch.rand(2, generator=random) * torch.tensor([1.0, 2 * math.pi])
    turns = start + angle * torch.arange(LENGTH)
    return {"point": torch.stack((turns.cos(), turns.sin()), dim=1), "angle": angle}


def join():
    """Make the process group. torchrun keeps its store when it starts ranks again: each attempt has keys of its own."""
    told = os.environ
    rank, world, attempt = (int(told.get(n, 0)) for n in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    holds = rank == 0 and told.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(told["MASTER_ADDR"], int(told["MASTER_PORT"]), is_master=holds)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(f"attempt-{attempt}", store), rank=rank, world_size=world
    )


def agreed(value):
    """Whether it is true on all ranks."""
    told = torch.tensor(int(value))
    dist.all_reduce(told, op=dist.ReduceOp.MIN)
    return bool(told)


def own_table(path, name, episodes):
    """This rank's table: that of the ranks before a restart, from the last checkpoint, or a new one."""
    try:
        table = gear.Table.attach(name)
    except gear.errors.RegionError:
        table = None
    if agreed(table is not None):
        return table, "attached to"
    if table is not None:
        table.unlink()
    if agreed(path.exists()):
        return load(path, name=name), "loaded"
    table = gear.Table.create(
        SCHEMA, max_steps=LENGTH * 4 * episodes, max_trajectories=4 * episodes, name=name, if_exists="replace"
    )
    random = torch.Generator().manual_seed(dist.get_rank())
    table.extend([trajectory(random) for _ in range(episodes)])
    return table, "collected"


def main():
    parser = argparse.ArgumentParser(description="A job that can be stopped. Start it by torchrun.")
    parser.add_argument("--folder", type=Path, default=Path("run"), help="directory that all nodes share")
    parser.add_argument(
        "--batches", type=int, default=200, help="to train on, over all runs (default: %(default)s)"
    )
    parser.add_argument(
        "--episodes", type=int, default=50, help="that a rank collects (default: %(default)s)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="this node's address, for other nodes")
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds after each batch (default: %(default)s)"
    )
    options = parser.parse_args()
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    torch.set_num_threads(1)
    join()
    rank, world = dist.get_rank(), dist.get_world_size()
    shared, model_file = options.folder / "replay", options.folder / "model.pt"
    name = f"preemptible-{os.environ.get('TORCHELASTIC_RUN_ID', 'job')}-{world}-{rank}"
    table, how = own_table(shared, name, options.episodes)

    model = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    done = False
    try:
        with Shards(table, host=options.host) as shards:
            replay = gear.ReplayDataset(
                shards,
                batch_size=96 // world,
                windows={"point": gear.Window(2), "angle": None},
                sampler=gear.Prioritized(),
                batches_per_epoch=options.batches,
                ranks=gear.Ranks(prefer_local=True),
            )
            number = 0
            if agreed(model_file.exists()):
                state = torch.load(model_file)
                number = state["number"]
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
                replay.load_state_dict(state["replay"])
            print(f"rank {rank} of {world}: {how} {len(table)} trajectories, batch {number}", flush=True)
            trained, loss = DistributedDataParallel(model), torch.zeros(())
            for batch in replay if number < options.batches else ():
                angle = batch["angle"][:, None]
                error = (
                    (trained(torch.cat((batch["point"][:, 0], angle), dim=1)) - batch["point"][:, 1])
                    .square()
                    .sum(1)
                )
                replay.update_priority(batch, error.detach().sqrt())
                loss = (error * batch["priority_weight"]).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                number += 1
                time.sleep(options.pause)
                going = agreed(not stopped)
                if number % EVERY == 0 or number == options.batches or not going:
                    save(shards, shared)
                    state = {"number": number, "model": model.state_dict(), "replay": replay.state_dict()}
                    if rank == 0:
                        torch.save({**state, "optimizer": optimizer.state_dict()}, f"{model_file}.new")
                        os.replace(f"{model_file}.new", model_file)
                    print(f"rank {rank} of {world}: saved batch {number}, loss {loss:.4f}", flush=True)
                if not going:
                    break
            done = True
    finally:
        if done:  # after an error torchrun starts the ranks again, which attach to it
            table.unlink()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
