"""Train on several nodes from one replay memory: every rank collects into a shard of its own and draws from all.

The ranks run Hopper-v5 with random actions and store what happens, each in a table in its own host memory. Together
they learn a model of its dynamics with DistributedDataParallel: where will it be one step on, given where it is and
what it does? What the model predicts badly comes more often (prioritized replay over all shards). The rows that lie on
another node come over a transport while the batch before them is trained on.

    torchrun --nproc-per-node 4 examples/multi_node.py --simulate-nodes 2           # on one machine, about 20 seconds
    torchrun --nproc-per-node 4 examples/multi_node.py --simulate-nodes 2 --check   # and against one process

    # On two machines, the same command on both; --host is the machine's own address.
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint FIRST:29400 \\
        examples/multi_node.py --host ADDRESS

With --check one process draws the same global batches from the same tables, and must find the same losses.
It needs pip install '.[sources]'; --transport ucx also '.[ucx]'.
"""

import argparse
import copy
import os
import signal
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gear_loader as gear
from gear_loader.distributed import Shards

try:
    import gymnasium
except ImportError as error:
    sys.exit(f"{error}. This example needs pip install '.[sources]', in a clone of Gear Loader.")

OBSERVATION, ACTION = 11, 3
SCHEMA = {
    "observation": gear.Column(torch.float32, (OBSERVATION,)),
    "action": gear.Column(torch.float32, (ACTION,)),
    "next_observation": gear.Column(torch.float32, (OBSERVATION,)),
}
EPISODE_STEPS = 250
WINDOW = gear.Window(length=64)
ROWS = 64  # of a batch, on each rank
LEARNING_RATE = 1e-3


class Dynamics(nn.Module):
    """Predicts by how much the observation changes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(OBSERVATION + ACTION, 128),
            nn.SiLU(),
            nn.Linear(128, 128),
            nn.SiLU(),
            nn.Linear(128, OBSERVATION),
        )

    def forward(self, observation, action):  # [B, L, 11], [B, L, 3] -> [B, L, 11]
        return self.layers(torch.cat((observation, action), dim=-1))


def collect(table, rank, episodes):
    """What this rank sees of the environment; no two ranks see the same."""
    environment = gymnasium.make("Hopper-v5", terminate_when_unhealthy=False)
    for episode in gear.sources.collect_iter(
        environment,
        episodes=episodes,
        max_episode_steps=EPISODE_STEPS,
        seed=1000 + rank,
        columns=list(SCHEMA),
        progress=False,
    ):
        table.add(episode)
    environment.close()


def remote_bytes(batch, remote_shards):
    """Bytes of the rows that came from another node."""
    rows = torch.isin(batch["shard"].cpu(), remote_shards).sum()
    return int(rows) * sum(batch[name][0].nbytes for name in (*SCHEMA, "mask"))


def train(model, shards, rows, remote_shards, options):
    """Train on batches that are drawn from all shards, of which this rank gets `rows` rows each.

    Returns:
        The losses of this rank, float64 [batches]; bytes of remote rows, and the seconds for them.
    """
    dataset = gear.ReplayDataset(
        shards,
        batch_size=rows,
        windows=WINDOW,
        sampler=gear.Prioritized(alpha=0.6, beta=0.4),
        batches_per_epoch=options.batches,
        seed=options.seed,
        prefetch=2,
    )
    dtype = next(model.parameters()).dtype
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    losses, received, began = [], 0, time.perf_counter()
    for number, batch in enumerate(dataset, start=1):
        if number == 2:
            received, began = (
                0,
                time.perf_counter(),
            )  # the first batch waits for connections and compiled loops
        observation, action, after = (batch[name].to(dtype) for name in SCHEMA)
        error = (model(observation, action) - (after - observation)).square().mean(dim=-1)  # [B, L]
        error = (error * batch["mask"]).sum(dim=1) / batch["mask"].sum(dim=1)  # [B]
        # Every rank gives priorities for its own slice; the owners of the rows get them with the next batch.
        dataset.update_priority(batch, error.detach().sqrt())
        loss = (error * batch["priority_weight"]).mean()
        optimizer.zero_grad()
        loss.backward()  # the mean over the ranks' slices is that of the whole batch
        optimizer.step()
        losses.append(loss.item())
        received += remote_bytes(batch, remote_shards)
        if dist.is_initialized() and dist.get_rank() == 0 and number % max(options.batches // 5, 1) == 0:
            print(f"batch {number:5}: loss {np.mean(losses[-20:]):.4f} on rank 0", flush=True)
    return np.array(losses), received, time.perf_counter() - began


def read(shards, remote_shards, options):
    """Bytes of remote rows, and seconds, if nothing is done with the batches."""
    dataset = gear.ReplayDataset(
        shards, batch_size=4 * ROWS, windows=WINDOW, batches_per_epoch=100, seed=options.seed
    )
    began = time.perf_counter()
    received = sum(remote_bytes(batch, remote_shards) for batch in dataset)
    return received, time.perf_counter() - began


def mean_over_ranks(values):
    values = torch.as_tensor(values, dtype=torch.float64).clone()
    dist.all_reduce(values)
    return values.numpy() / dist.get_world_size()


def check(tables, first_model, losses, options):
    """Train once more in this process alone, on the same global batches, and compare the losses."""
    shards = Shards(tables)
    none = torch.empty(0, dtype=torch.int64)
    alone, _, _ = train(first_model, shards, ROWS * len(tables), none, options)
    difference = np.abs(alone / losses - 1).max()
    print(f"One process with the same global batches: losses differ by {difference:.1e} at most.")
    if not difference < 1e-6:
        sys.exit(f"The check failed: expected the same losses, to 1e-6; {losses} and {alone}.")
    print("Checked: the loss curve is that of one process.")


def main():
    parser = argparse.ArgumentParser(
        description="Train on several nodes from one replay memory. Start it by torchrun."
    )
    parser.add_argument("--simulate-nodes", type=int, metavar="N", help="let this machine's ranks be N nodes")
    parser.add_argument("--transport", default="auto", choices=["auto", "socket", "ucx", "nixl"])
    parser.add_argument("--host", default="127.0.0.1", help="this node's address, for other machines")
    parser.add_argument("--batches", type=int, default=200, help="to train on (default: %(default)s)")
    parser.add_argument("--episodes", type=int, default=12, help="of each rank (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of model and draws (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="compare with one process, on one machine")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "start it by torchrun: torchrun --nproc-per-node 4 examples/multi_node.py --simulate-nodes 2"
        )
    if options.check and os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        parser.error("--check attaches to the tables of all ranks, so they have to be on one machine")

    # ------------------------------------------------------------------ ranks and nodes
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.simulate_nodes is not None and not 1 <= options.simulate_nodes <= world:
        parser.error(f"--simulate-nodes {options.simulate_nodes}; expected 1 to {world}, the number of ranks")
    ranks_of_node = (
        world // options.simulate_nodes if options.simulate_nodes else int(os.environ["LOCAL_WORLD_SIZE"])
    )
    node_of = torch.arange(world) // ranks_of_node
    remote_shards = torch.nonzero(node_of != node_of[rank])[:, 0]  # rank r holds shard r
    # Ranks of the same name read each other's memory directly. Left out, it is found out.
    node = f"simulated-{node_of[rank]}" if options.simulate_nodes else None

    # ------------------------------------------------------------------ this rank's shard
    run = os.environ["TORCHELASTIC_RUN_ID"]
    names = [f"multi-node-{run}-{each}" for each in range(world)]
    table = gear.Table.create(
        SCHEMA,
        max_steps=options.episodes * EPISODE_STEPS,
        max_trajectories=options.episodes,
        name=names[rank],
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # from torchrun, when another rank has failed
    try:
        collect(table, rank, options.episodes)
        with Shards(table, node=node, transport=options.transport, host=options.host) as shards:
            if rank == 0:
                print(
                    f"{world} ranks on {int(node_of[-1]) + 1} nodes, {world * options.episodes} trajectories, "
                    f"rows of other nodes by {shards.transport}."
                )

            # ---------------------------------------------------------- training
            torch.manual_seed(options.seed)
            # In double precision the order in which the ranks' gradients are added does not show in what is drawn.
            model = Dynamics().to(
                "cuda" if on_gpu else "cpu", torch.float64 if options.check else torch.float32
            )
            first_model = copy.deepcopy(model)

            losses, received, seconds = train(
                DistributedDataParallel(model), shards, ROWS, remote_shards, options
            )
            losses = mean_over_ranks(losses)
            speed = mean_over_ranks(received / seconds / 1e9)
            top_speed = mean_over_ranks(np.divide(*read(shards, remote_shards, options)) / 1e9)
            if rank == 0:
                print(
                    f"Loss over all ranks: {losses[:20].mean():.4f} at first, {losses[-20:].mean():.4f} in the end.\n"
                    f"Remote rows of each rank: {speed:.3f} GB/s while it trains, {top_speed:.3f} GB/s if it does "
                    "nothing else."
                )
            tables = [gear.Table.attach(name) for name in names] if options.check and rank == 0 else []
            dist.barrier()  # no rank ends while others still read its table
        dist.destroy_process_group()
        if tables:
            check(tables, first_model, losses, options)
    finally:
        table.unlink()  # a named table stays until it is removed


if __name__ == "__main__":
    main()
