"""Clone a clumsy demonstrator from a replay table, in plain PyTorch: a DataLoader and a loop.

The demonstrator balances CartPole-v1 and sees everything, but every other action of it is random. The clone sees
the positions of the cart and the pole over the last 4 steps, no velocities, and learns which action comes with
them. It finds the rule behind the noise and balances longer than the demonstrator.

    python examples/plain_pytorch.py     # about 10 seconds

It needs pip install '.[sources]'.
"""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import gear_loader as gear

try:
    import gymnasium
except ImportError as error:
    sys.exit(f"{error}. This example needs pip install '.[sources]', in a clone of Gear Loader.")

HISTORY = 4
rng = np.random.default_rng(0)
torch.manual_seed(0)


# Collect. Episodes are dictionaries of arrays [T, ...], here of 10 to 500 steps.
def demonstrator(observation):
    if rng.random() < 1 / 2:
        return rng.integers(2)
    position, speed, angle, angular_speed = observation
    return int(0.1 * position + 0.3 * speed + 3 * angle + angular_speed > 0)


episodes = gear.sources.collect(
    "CartPole-v1", demonstrator, episodes=200, seed=0, columns=["observation", "action"]
)
lengths = [len(episode["action"]) for episode in episodes]
print(f"The demonstrator balances for {np.mean(lengths):.0f} steps ({len(lengths)} episodes).")

# Store. The table holds episodes of any length; this one has room for just these.
table = gear.Table.create(
    {"position": gear.Column(torch.float32, (2,)), "action": gear.Column(torch.int64)},
    max_steps=sum(lengths),
    max_trajectories=len(lengths),
    block_steps=32,
    memory=gear.Memory(max_blocks=gear.Table.required_blocks(lengths, 32)),
)
table.extend(
    {"position": episode["observation"][:, [0, 2]], "action": episode["action"]} for episode in episodes
)

# Load. Each column has a window of its own: the positions of the last 4 steps, the action of the last one. With
# unit="step" and replacement=False an epoch visits every step of the table once.
dataset = gear.ReplayDataset(
    table,
    batch_size=256,
    windows={
        "position": gear.Window(length=HISTORY, offset=1 - HISTORY),
        "action": gear.Window(length=1),
    },
    sampler=gear.Uniform(replacement=False, unit="step"),
    seed=0,
)
loader = DataLoader(dataset, batch_size=None)  # the dataset makes the batches

# Train. Steps before the start of an episode are zeros; the mask tells them from real ones.
device = dataset.device
model = nn.Sequential(nn.Linear(3 * HISTORY, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
model.to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def scores(position, mask):  # [B, 4, 2], [B, 4] -> [B, 2]
    speed = position.diff(dim=1) / 0.02  # a step of CartPole is 0.02 seconds
    return model(torch.cat((position[:, -1], speed.flatten(1), mask.float()), dim=1))


for epoch in range(6):
    losses = []
    for batch in loader:
        loss = nn.functional.cross_entropy(
            scores(batch["position"], batch["mask"]["position"]), batch["action"][:, 0]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    print(f"epoch {epoch}: {len(losses)} batches, loss {torch.stack(losses).mean():.3f}")

# Evaluate: does the clone balance by itself?
environment = gymnasium.make("CartPole-v1")
balanced = []
for episode in range(10):
    observation, _ = environment.reset(seed=1000 + episode)
    position, mask = torch.zeros(1, HISTORY, 2), torch.zeros(1, HISTORY)
    steps, done = 0, False
    while not done:
        now = torch.as_tensor(observation[[0, 2]])[None, None]
        position = torch.cat((position[:, 1:], now), dim=1)
        mask = torch.cat((mask[:, 1:], torch.ones(1, 1)), dim=1)
        with torch.no_grad():
            action = int(scores(position.to(device), mask.to(device)).argmax())
        observation, _, terminated, truncated, _ = environment.step(action)
        steps, done = steps + 1, terminated or truncated
    balanced.append(steps)
environment.close()
table.close()
print(f"The clone balances for {np.mean(balanced):.0f} steps ({len(balanced)} episodes).")
