"""A simulator of thousands of environments on a GPU, whose steps go into a table in host memory, or on the GPU.

    python examples/gpu_simulator.py            # 4,096 environments, batches of 32,768; on a CPU 64 and 1,024
    python examples/gpu_simulator.py --table gpu
    python examples/gpu_simulator.py --steps 4000 --envs 64 --device cpu

Points accelerate towards targets, in plain PyTorch. Each call of `writer.append` takes the tensors of all environments
as they are on the GPU, and does not wait for it; a chunk of 32 steps of each is a trajectory. An actor and a critic
(DDPG with returns of 3 steps) learn from steps drawn out of all chunks. It prints how many steps a point needs to reach
its target.
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
from torch import nn

import gear_loader as gear

CHUNK, GAMMA, PACE = 32, 0.97, 0.05


class Points:
    """n points in a square; an episode ends when a point reaches its target, and another one begins."""

    def __init__(self, n: int, device: torch.device) -> None:
        self.place, self.speed, self.target = (torch.zeros(n, 2, device=device) for _ in range(3))
        self.reset(torch.ones(n, dtype=torch.bool, device=device))

    def reset(self, which: torch.Tensor) -> None:
        new = torch.rand(3, *self.place.shape, device=which.device) * 2 - 1
        self.place = torch.where(which[:, None], new[0], self.place)
        self.target = torch.where(which[:, None], new[1], self.target)
        self.speed = torch.where(which[:, None], 0.1 * new[2], self.speed)

    def obs(self) -> torch.Tensor:
        return torch.cat([self.target - self.place, self.speed], 1)

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The observation after the step (not that of the next episode), reward and whether the target was reached."""
        self.speed = 0.9 * self.speed + PACE * action
        self.place = (self.place + self.speed).clamp(-1.5, 1.5)
        distance = (self.target - self.place).norm(dim=1)
        reached, following = distance < 0.1, self.obs()
        self.reset(reached)
        return following, torch.where(reached, 1.0, -0.1 * distance), reached


def network(inputs: int, outputs: int) -> nn.Module:
    layers = [nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs)]
    return nn.Sequential(*layers)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learns from a simulator on the GPU.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--envs", type=int, help="environments: 4,096, on a CPU 64")
    parser.add_argument("--batch", type=int, help="rows of a batch: 32,768, on a CPU 1,024")
    parser.add_argument("--steps", type=int, default=2000, help="steps of each environment")
    parser.add_argument(
        "--table", choices=("host", "gpu"), default="host", help="memory in which the table lies"
    )
    options = parser.parse_args()
    if options.table == "gpu" and torch.device(options.device).type != "cuda":
        parser.error(f"--table gpu needs a GPU, and --device is {options.device}.")
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    n, batch_size = options.envs or (4096 if on_gpu else 64), options.batch or (32_768 if on_gpu else 1024)

    torch.manual_seed(0)
    points = Points(n, device)
    actor, critic = (
        nn.Sequential(network(4, 2), nn.Tanh()).to(device),
        network(6, 1).to(device),
    )
    targets = copy.deepcopy(actor), copy.deepcopy(critic)
    improve = torch.optim.Adam(actor.parameters(), 1e-3), torch.optim.Adam(critic.parameters(), 1e-3)

    chunks = 40 * n
    with gear.Table.create(
        {
            "obs": gear.Column(torch.float32, (4,), final=True),
            "action": gear.Column(torch.float32, (2,)),
            "reward": gear.Column(torch.float32),
            "terminated": gear.Column(torch.bool),
        },
        max_steps=chunks * (CHUNK + 1),
        max_trajectories=chunks,
        on_full="evict_oldest",
        device=device if options.table == "gpu" else None,
    ) as table:
        dataset = gear.ReplayDataset(
            table,
            batch_size=batch_size,
            windows={
                "obs": gear.Window(1, squeeze=True),
                "action": gear.Window(1, squeeze=True),
                "target": gear.NStep("reward", 3, GAMMA, "terminated", next="obs"),
            },
            sampler=gear.Uniform(unit="step"),
            device=device,
        )
        reached, began = torch.zeros((), device=device), time.perf_counter()
        with table.writers(n, chunk_steps=CHUNK, device=device) as writer:
            for step in range(1, options.steps + 1):
                obs = points.obs()
                with torch.no_grad():
                    action = (actor(obs) + 0.3 * torch.randn(n, 2, device=device)).clamp(-1, 1)
                following, reward, terminated = points.step(action)
                rows = {"obs": obs, "action": action, "reward": reward, "terminated": terminated}
                writer.append(rows, final={"obs": following})
                reached += terminated.sum()
                if len(table):
                    learn(dataset.sample(), actor, critic, targets, improve)
                if step % 500 == 0:
                    count, reached = float(reached), torch.zeros((), device=device)
                    pace = n * step / (time.perf_counter() - began)
                    print(
                        f"step {step:,}: {500 * n / max(count, 1):.0f} steps to a target, {pace:,.0f} steps a second"
                    )


def learn(
    batch: gear.Batch,
    actor: nn.Module,
    critic: nn.Module,
    targets: tuple[nn.Module, nn.Module],
    improve: tuple[torch.optim.Optimizer, torch.optim.Optimizer],
) -> None:
    """One step of the critic, and one of the actor."""
    obs, action, ahead = batch["obs"], batch["action"], batch["target"]
    with torch.no_grad():
        value = targets[1](torch.cat([ahead["next"], targets[0](ahead["next"])], 1))[:, 0]
        goal = ahead["return"] + ahead["discount"] * value
    improve[1].zero_grad()
    (critic(torch.cat([obs, action], 1))[:, 0] - goal).square().mean().backward()
    improve[1].step()
    improve[0].zero_grad()
    (-critic(torch.cat([obs, actor(obs)], 1)).mean()).backward()
    improve[0].step()
    with torch.no_grad():
        for target, network in zip(targets, (actor, critic), strict=True):
            for old, new in zip(target.parameters(), network.parameters(), strict=True):
                old.lerp_(new, 0.01)


if __name__ == "__main__":
    main()
