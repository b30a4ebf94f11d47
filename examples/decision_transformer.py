"""Train a Decision Transformer on trajectories of mixed quality, then ask it for different returns.

A Decision Transformer (Chen et al. 2021, arXiv:2106.01345) learns to act by predicting the actions in recorded
trajectories from what was seen, what was done and how much reward was still to come. Acting, it is told how much
reward should come, and takes the actions that went with it. This file goes through the whole of it:

    1. collect   a one-legged robot (Hopper-v5) hops at several speeds, and falls: episodes of 100 to 512 steps
    2. store     in a gear_loader.Table, which takes them as they are and wastes next to no memory on uneven lengths
    3. train     with Lightning, on windows of 20 steps that gear_loader.ReplayDataModule draws from the table
    4. evaluate  ask for several returns, run the policy in the environment, compare

    python examples/decision_transformer.py             # about 2 minutes on two cores
    python examples/decision_transformer.py --quick     # about 10 seconds, to see that it runs

It needs pip install '.[lightning,sources,bench]' and no network. A table of asked and achieved returns
is printed at the end; a plot and the figures are written to the folder --out. The exit status is 1 if the policy
did not do what it was asked to.
"""

import argparse
import csv
import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path

# Threads of torch that wait for each other shall sleep: spinning costs a multiple where the cores are shared.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from rich.console import Console
from rich.progress import TimeElapsedColumn, track
from rich.table import Table as TextTable
from torch import nn
from torch.nn import functional as F

import gear_loader as gear

try:
    import gymnasium
    import lightning
    from lightning.pytorch.callbacks import RichProgressBar
    from matplotlib.figure import Figure
except ImportError as error:
    sys.exit(
        f"{error}. This example needs pip install '.[lightning,sources,bench]', in a clone of Gear Loader."
    )

ENVIRONMENT = "Hopper-v5"
WINDOW = 20  # steps that the model looks back on

parser = argparse.ArgumentParser(
    description="Train a Decision Transformer on a replay table and evaluate it."
)
parser.add_argument(
    "--seed", type=int, default=0, help="decides everything that is random (default: %(default)s)"
)
parser.add_argument("--episodes", type=int, default=216, help="episodes to collect (default: %(default)s)")
parser.add_argument("--steps", type=int, default=800, help="training steps (default: %(default)s)")
parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train")
parser.add_argument(
    "--out", type=Path, default=Path("results/decision_transformer"), help="folder for the results"
)
parser.add_argument("--quick", action="store_true", help="a tiny run without the check at the end")
parser.add_argument(
    "--no-check", action="store_true", help="do not check whether the policy did what it was asked"
)
args = parser.parse_args()

HORIZON = 512  # steps after which an episode is cut off
EPOCHS = 5
EVALUATION_EPISODES = 20  # for each return asked for
if args.quick:
    args.episodes, args.steps, args.no_check = 24, 25, True
    HORIZON, EVALUATION_EPISODES = 128, 2
if args.episodes < 24 or args.steps < EPOCHS:
    parser.error(f"--episodes {args.episodes} --steps {args.steps}; expected at least 24 and {EPOCHS}")
args.steps -= args.steps % EPOCHS
if args.device == "auto":
    args.device = "cuda" if torch.cuda.is_available() else "cpu"

console = Console()
started = time.perf_counter()
# Silence: Lightning lists the accelerators that are missing, and calls a function that torch deprecates.
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec", category=FutureWarning)
lightning.seed_everything(args.seed, verbose=False)


# ---------------------------------------------------------------------- 1. collect
# A hopping gait: torques of thigh, leg and foot as a linear function of the 11 observed positions and velocities.
# Random search found it (Mania et al. 2018, arXiv:1803.07055) in 1.2 million steps; this is its result, rounded.
GAIT = np.array(
    [
        [0.30, -1.55, -1.56, 0.58, 0.16, 0.25, 0.06, -0.05, -0.18, 0.00, 0.01],
        [0.15, -3.73, 0.22, -0.27, 0.14, -0.47, 0.03, -0.78, -0.03, 0.00, -0.01],
        [3.11, 0.16, -0.04, 0.75, -0.21, -0.34, -0.32, -0.22, 0.17, 0.08, 0.00],
    ]
)
TORQUE = np.array([-0.64, 0.18, -2.61])

# Quality is a matter of the foot: with an additional torque of -0.05 the robot hops at full speed. The more of it,
# the slower it hops; at -1.1 it stands, and from -1.15 on it falls, sooner and sooner.
FOOT_TORQUES = (-0.05, -0.2, -0.4, -0.6, -0.8, -0.9, -1.1, -1.15, -1.18, -1.2, -1.22, -1.25)
NOISE = 0.1  # standard deviation of the noise on every action


def behaviour(foot_torque, rng):
    """A policy: observation [11] -> action [3]."""
    torque = TORQUE + np.array([0.0, 0.0, foot_torque])

    def policy(observation):
        action = GAIT @ observation + torque + NOISE * rng.standard_normal(3)
        return action.clip(-1.0, 1.0).astype(np.float32)

    return policy


console.rule(f"1. Collect {ENVIRONMENT}")
episodes = []  # {"observation": [T, 11], "action": [T, 3], "reward": [T]}
behaviours = TextTable("foot torque", "episodes", "return", "steps", title="Behaviours")
best = -np.inf  # mean return of the best behaviour
counts = [len(part) for part in np.array_split(range(args.episodes), len(FOOT_TORQUES))]
environment = gymnasium.make(ENVIRONMENT, max_episode_steps=HORIZON)
for i, foot_torque in enumerate(track(FOOT_TORQUES, "Collecting", console=console)):
    collected = gear.sources.collect(
        environment,
        behaviour(foot_torque, np.random.default_rng([args.seed, i])),
        episodes=counts[i],
        seed=1000 * args.seed + i,
        columns=("observation", "action", "reward"),
        progress=False,
    )
    returns = np.array([episode["reward"].sum() for episode in collected])
    steps = np.array([len(episode["reward"]) for episode in collected])
    behaviours.add_row(
        f"{foot_torque:+.2f}",
        f"{counts[i]}",
        f"{returns.mean():.0f} ± {returns.std():.0f}",
        f"{steps.mean():.0f}",
    )
    best = max(best, returns.mean())
    episodes += collected
environment.close()
console.print(behaviours)


# ---------------------------------------------------------------------- 2. store
for episode in episodes:
    episode["return_to_go"] = np.cumsum(episode["reward"][::-1], dtype=np.float32)[
        ::-1
    ]  # rewards from here on

BLOCK_STEPS = 32
lengths = [len(episode["reward"]) for episode in episodes]
table = gear.Table.create(
    {
        "observation": gear.Column(torch.float32, (11,)),
        "action": gear.Column(torch.float32, (3,)),
        "reward": gear.Column(torch.float32),
        "return_to_go": gear.Column(torch.float32),
    },
    max_steps=sum(lengths),
    max_trajectories=len(lengths),
    block_steps=BLOCK_STEPS,
    memory=gear.Memory(max_blocks=gear.Table.required_blocks(lengths, BLOCK_STEPS)),
)
table.extend(episodes)
behaviour_returns = np.array([episode["return_to_go"][0] for episode in episodes])
observations = torch.as_tensor(np.concatenate([episode["observation"] for episode in episodes]))
del episodes  # the table has them

console.rule("2. Store")
console.print(str(table.stats()), highlight=False)


# ---------------------------------------------------------------------- 3. train
class Block(nn.Module):
    """One layer of a transformer: attention to what came before, then a small network for each token."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.network_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):  # [B, tokens, width] -> the same
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [B, heads, tokens, width / heads]
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.network(self.network_norm(x))


class DecisionTransformer(lightning.LightningModule):
    """(return to go, observation, action) of the last steps -> the action at each of them.

    A step is three tokens in that order, so the action is predicted from the observation's token, which sees the
    step's return to go and observation, and everything before.
    """

    def __init__(self, observations, return_scale, *, width=64, layers=3, heads=4):
        super().__init__()
        self.register_buffer("mean", observations.mean(0))
        self.register_buffer("std", observations.std(0) + 1e-6)
        self.return_scale = return_scale
        self.embed_return = nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, width))
        self.embed_observation, self.embed_action = nn.Linear(11, width), nn.Linear(3, width)
        self.embed_step = nn.Embedding(HORIZON, width)  # how far the episode is
        self.embed_place = nn.Parameter(
            0.02 * torch.randn(3 * WINDOW, width)
        )  # place of a token in the window
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.act = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3), nn.Tanh())
        nn.init.normal_(self.embed_step.weight, std=0.02)

    def forward(self, return_to_go, observation, action, step):  # [B, L], [B, L, 11], [B, L, 3], [B, L]
        # What is to come, altogether and per remaining step. From the second the model reads off at which speed to
        # hop, also late in an episode; without it, it goes by what it did before, whatever return it is asked for.
        total = return_to_go / self.return_scale
        to_come = torch.stack((total, total * HORIZON / (HORIZON - step)), dim=-1)
        tokens = torch.stack(
            (
                self.embed_return(to_come),
                self.embed_observation((observation - self.mean) / self.std),
                self.embed_action(action),
            ),
            dim=2,
        )  # [B, L, 3, width]
        tokens = (tokens + self.embed_step(step)[:, :, None]).flatten(1, 2)
        tokens = self.blocks(tokens + self.embed_place[: tokens.shape[1]])
        return self.act(tokens[:, 1::3])  # [B, L, 3]

    def loss(self, batch):
        mask, anchor = batch["mask"], batch["anchor"]  # [B, L] which steps exist; [B] number of the last one
        first = (anchor - (WINDOW - 1)).clamp(min=0)
        step = (first[:, None] + torch.arange(WINDOW, device=anchor.device)).clamp(max=HORIZON - 1)
        predicted = self(batch["return_to_go"], batch["observation"], batch["action"], step)
        return F.mse_loss(predicted[mask], batch["action"][mask])

    def training_step(self, batch, number):
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, number):
        self.log("val", self.loss(batch), prog_bar=True, batch_size=len(batch["index"]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=1e-2)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


# Each window is a step of the table, drawn uniformly, with the 19 before it. Early in an episode there are fewer:
# pad="tail" then puts them first and the padding last, where causal attention does not see it from a real step.
data = gear.ReplayDataModule(
    table,
    batch_size=64,
    windows=gear.Window(length=WINDOW, offset=-(WINDOW - 1), pad="tail"),
    columns=["observation", "action", "return_to_go"],
    sampler=gear.Uniform(unit="step"),
    seed=args.seed,
    val_fraction=0.05,
    batches_per_epoch=args.steps // EPOCHS,
)


class ProgressBar(RichProgressBar):
    """Lightning's, with fewer columns: a line is 80 characters."""

    def configure_columns(self, trainer):
        description, bar, count, *_ = super().configure_columns(trainer)
        return [description, bar, count, TimeElapsedColumn()]


model = DecisionTransformer(observations, return_scale=float(behaviour_returns.max()))
trainer = lightning.Trainer(
    max_epochs=EPOCHS,
    accelerator="gpu" if args.device == "cuda" else "cpu",
    devices=1,
    limit_val_batches=20,
    gradient_clip_val=1.0,
    callbacks=[ProgressBar(leave=True)],
    logger=False,
    enable_checkpointing=False,
    enable_model_summary=False,
)
console.rule("3. Train")
console.print(
    f"{sum(p.numel() for p in model.parameters()):,} parameters, {args.steps} steps on {args.device}"
)
trainer.fit(model, data)
final_loss = {name: float(value) for name, value in trainer.callback_metrics.items()}


# ---------------------------------------------------------------------- 4. evaluate
@torch.inference_mode()
def evaluate(asked):
    """Run one episode for each return in `asked`; return what they achieved and their lengths."""
    count = len(asked)
    environments = [gymnasium.make(ENVIRONMENT, max_episode_steps=HORIZON) for _ in asked]
    returns, lengths = np.zeros(count), np.zeros(count, dtype=int)
    return_to_go = torch.zeros(count, HORIZON)
    observation, action = torch.zeros(count, HORIZON, 11), torch.zeros(count, HORIZON, 3)
    for i, environment in enumerate(environments):
        first, _ = environment.reset(
            seed=1_000_000 + 1000 * args.seed + i
        )  # seeds that no behaviour was collected with
        observation[i, 0] = torch.as_tensor(first)
    running = list(range(count))
    for t in track(range(HORIZON), "Evaluating", console=console):
        if not running:
            continue
        return_to_go[running, t] = torch.as_tensor(asked - returns, dtype=torch.float32)[running]
        recent = slice(max(0, t - WINDOW + 1), t + 1)
        step = torch.arange(recent.start, recent.stop).expand(len(running), -1)
        inputs = (return_to_go[running, recent], observation[running, recent], action[running, recent], step)
        action[running, t] = model(*(tensor.to(args.device) for tensor in inputs))[:, -1].cpu()
        for i in list(running):
            seen, reward, terminated, truncated, _ = environments[i].step(action[i, t].numpy())
            returns[i] += reward
            lengths[i] += 1
            if terminated or truncated:
                running.remove(i)
            else:
                observation[i, t + 1] = torch.as_tensor(seen)
    for environment in environments:
        environment.close()
    return returns, lengths


console.rule("4. Evaluate")
model.eval().to(args.device)
fractions = np.array([1 / 5, 1 / 3, 1 / 2, 2 / 3, 5 / 6, 1])
targets = best * fractions
achieved, episode_lengths = evaluate(np.repeat(targets, EVALUATION_EPISODES))
achieved, episode_lengths = (
    x.reshape(len(targets), -1) for x in (achieved, episode_lengths)
)  # [targets, episodes]
mean, spread = achieved.mean(1), achieved.std(1)

summary = TextTable(
    "asked for", "of best", "achieved", "of best", "steps", title="Returns asked for and achieved"
)
for i, target in enumerate(targets):
    summary.add_row(
        f"{target:.0f}",
        f"{fractions[i]:.0%}",
        f"{mean[i]:.0f} ± {spread[i]:.0f}",
        f"{mean[i] / best:.0%}",
        f"{episode_lengths[i].mean():.0f}",
    )
console.print(summary)

args.out.mkdir(parents=True, exist_ok=True)
with open(args.out / "returns.csv", "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(("asked", "achieved", "steps"))
    for i, target in enumerate(targets):
        writer.writerows((target, *row) for row in zip(achieved[i], episode_lengths[i], strict=True))
seconds = time.perf_counter() - started
stats = table.stats()
figures = {
    "seed": args.seed,
    "best_behaviour_return": float(best),
    "asked": targets.tolist(),
    "achieved_mean": mean.tolist(),
    "achieved_std": spread.tolist(),
    "loss": final_loss,
    "memory_overhead": stats.overhead,
    "memory_overhead_of_fixed_rows": stats.fixed_row_overhead,
    "seconds": seconds,
}
(args.out / "summary.json").write_text(json.dumps(figures, indent=2) + "\n")

figure = Figure(figsize=(9, 6), layout="constrained")
plot, histogram = figure.subplots(1, 2, sharey=True, width_ratios=(4, 1))
end = 1.12 * max(targets.max(), achieved.max(), behaviour_returns.max())
plot.plot((0, end), (0, end), "--", color="0.6", label="achieved = asked for")
jitter = np.random.default_rng(0).uniform(-0.008, 0.008, achieved.shape) * end
plot.scatter(
    targets[:, None] + jitter, achieved, s=12, alpha=0.35, color="tab:blue", linewidths=0, label="one episode"
)
plot.errorbar(
    targets, mean, spread, fmt="o", color="tab:blue", capsize=4, label="mean and standard deviation"
)
plot.axhline(best, color="tab:orange", label="best behaviour's mean")
plot.set(xlabel="return asked for", ylabel="return achieved", xlim=(0, end), ylim=(0, end))
plot.set_title(f"Decision Transformer on {ENVIRONMENT}")
plot.legend(loc="lower right", frameon=False)
histogram.hist(behaviour_returns, bins=np.linspace(0, end, 41), orientation="horizontal", color="tab:orange")
histogram.set(title="training data", xlabel="episodes of that return")
for axes in (plot, histogram):
    axes.spines[["top", "right"]].set_visible(False)
figure.savefig(args.out / "returns.png", dpi=150)
table.close()
console.print(f"Plot and figures are in {args.out} ({seconds:.0f} seconds in all).", highlight=False)

if not args.no_check:
    third = list(fractions).index(1 / 3)
    missed = []
    if mean[-1] < 0.9 * best:
        missed.append(f"asked for {best:.0f} it achieved {mean[-1]:.0f}, expected at least {0.9 * best:.0f}")
    if mean[third] > 0.6 * best:
        missed.append(
            f"asked for {targets[third]:.0f} it achieved {mean[third]:.0f}, expected at most {0.6 * best:.0f}"
        )
    if (np.diff(mean) < -0.05 * best).any():
        missed.append(f"asked for more it achieved less: {', '.join(f'{value:.0f}' for value in mean)}")
    if stats.overhead > 1.05:
        missed.append(f"the table takes {stats.overhead:.3f} times its payload, expected at most 1.05")
    if missed:
        sys.exit("The check failed: " + "; ".join(missed) + ".")
    console.print(
        "Checked: it achieves the returns that it is asked for, up to the best in the data.", style="green"
    )
