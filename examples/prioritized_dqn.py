"""Deep Q-learning on CartPole-v1 from a replay table, drawn from uniformly and by priority, side by side.

Deep Q-learning (Mnih et al. 2015) learns from transitions it has seen before: what it observed, what it did, what
came of it. Prioritized replay (Schaul et al. 2016, arXiv:1511.05952) draws those more often whose value the network
got most wrong the last time, and lowers the weight of their loss in return. This file runs both, each on a core of
its own, with everything but the draw the same:

    1. act       balance the pole, at times at random; store the steps in a gear_loader.Table
    2. learn     from batches of gear_loader.ReplayDataset; with priorities, tell it how wrong each step's value was
    3. evaluate  the greedy policy, now and then and at the end, in episodes that it was not trained on
    4. plot      return against steps in the environment, for both

    python examples/prioritized_dqn.py             # about a minute and a half on two cores
    python examples/prioritized_dqn.py --quick     # about 10 seconds, to see that it runs

It needs pip install '.[sources,bench]' and no network. A plot and the figures are written to the folder
--out. The exit status is 1 if the policy that was learnt by priority does not balance. CartPole is easy, and this is
one run of each: which of them learns faster changes with the seed, and the plot is no measurement of it.
"""

import argparse
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table as TextTable
from torch import nn
from torch.nn import functional as F

import gear_loader as gear

try:
    import gymnasium
    from matplotlib.figure import Figure
except ImportError as error:
    sys.exit(f"{error}. This example needs pip install '.[sources,bench]', in a clone of Gear Loader.")

ENVIRONMENT = "CartPole-v1"  # a reward of 1 for each step that the pole stays up, at most 500
EXPECTED_RETURN = 450  # of the final policy, for the check at the end

MEMORY = 50_000  # steps that the table holds. With half as many, over 50,000 steps, some policies got worse again late.
PIECE = 16  # most steps that are stored at a time, and steps between two rounds of learning
UPDATES = 8  # of the network, in a round of learning
WARMUP = 1_000  # steps before the first update
BATCH = 128
RETURN_STEPS = 3  # rewards that are added up before the network estimates the rest
DISCOUNT = 0.99
LEARNING_RATE = 1e-3  # at the start. It falls to 0 by the end, so that the last policy is not a chance one.
TARGET_RATE = 0.01  # part of the way that the target network follows in each update
EXPLORATION = (1.0, 0.04)  # part of the actions that are random, at the start and from EXPLORATION_END on
EXPLORATION_END = 0.2  # of the run
ALPHA, BETA, PRIORITY_EPS = 0.6, (0.4, 1.0), 1e-6  # what Schaul et al. use where priorities are proportional


def make_network():
    """Observation [B, 4] -> value of each action [B, 2]."""
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


@torch.inference_mode()
def evaluate(network, seed, episodes):
    """Returns of the greedy policy [episodes]. The episodes run side by side: the network sees them as one batch."""
    environments = [gymnasium.make(ENVIRONMENT) for _ in range(episodes)]
    observation = np.stack([each.reset(seed=seed + i)[0] for i, each in enumerate(environments)])
    returns = np.zeros(episodes)
    running = list(range(episodes))
    while running:
        actions = network(torch.as_tensor(observation[running])).argmax(dim=1).tolist()
        for i, action in zip(list(running), actions, strict=True):
            observation[i], reward, terminated, truncated, _ = environments[i].step(action)
            returns[i] += reward
            if terminated or truncated:
                running.remove(i)
    for environment in environments:
        environment.close()
    return returns


def train(replay, options):
    """One run, in a process of its own, with replay "uniform" or "prioritized"; returns its figures."""
    started = time.perf_counter()
    torch.set_num_threads(1)  # the other core is the other run's
    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    environment = gymnasium.make(ENVIRONMENT)
    network, target = make_network(), make_network()
    target.load_state_dict(network.state_dict())
    updates = (options.steps - WARMUP) // PIECE * UPDATES
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=updates)

    # ------------------------------------------------------------------ the replay memory
    # A trajectory of the table is a piece of an episode, so that learning need not wait for the end of one. A piece
    # is never longer than a block. Episodes of a beginner are short and leave pieces shorter than that.
    table = gear.Table.create(
        {
            "observation": gear.Column(torch.float32, (4,)),
            "action": gear.Column(torch.int64),
            "reward": gear.Column(torch.float32),
            "next_observation": gear.Column(torch.float32, (4,)),
            "terminated": gear.Column(torch.bool),
        },
        max_steps=MEMORY,
        max_trajectories=MEMORY // 4,
        block_steps=PIECE,
        on_full="evict_oldest",
    )
    if replay == "prioritized":
        beta = gear.LinearSchedule(*BETA, batches=updates)
        sampler = gear.Prioritized(ALPHA, beta, eps=PRIORITY_EPS, unit="step")
    else:
        sampler = gear.Uniform(unit="step")
    # An item is a step, and its window that step with the next two. Where the piece ends first the mask says so. No
    # prefetch: a batch that is drawn ahead does not know the priorities that come from the batch before it.
    dataset = gear.ReplayDataset(
        table,
        batch_size=BATCH,
        windows=gear.Window(length=RETURN_STEPS),
        sampler=sampler,
        seed=options.seed,
        device="cpu",
        prefetch=0,
    )

    piece = {name: [] for name in table.schema}
    discounts = DISCOUNT ** torch.arange(RETURN_STEPS)
    row = torch.arange(BATCH)
    curve = {"steps": [], "returns": []}
    observation, _ = environment.reset(seed=options.seed)
    for step in range(1, options.steps + 1):
        # -------------------------------------------------------------- act
        randomness = np.interp(step / options.steps, (0, EXPLORATION_END), EXPLORATION)
        if rng.random() < randomness:
            action = int(rng.integers(2))
        else:
            with torch.inference_mode():
                action = int(network(torch.as_tensor(observation)).argmax())
        next_observation, reward, terminated, truncated, _ = environment.step(action)
        values = (observation, action, reward, next_observation, terminated)
        for column, value in zip(piece.values(), values, strict=True):
            column.append(value)
        observation = next_observation
        if terminated or truncated:
            observation, _ = environment.reset()
        round_ends = step % PIECE == 0
        if terminated or truncated or round_ends:
            table.add(
                {
                    name: torch.as_tensor(np.array(column), dtype=table.schema[name].dtype)
                    for name, column in piece.items()
                }
            )
            piece = {name: [] for name in table.schema}

        # -------------------------------------------------------------- learn
        for _ in range(UPDATES if round_ends and step > WARMUP else 0):
            batch = dataset.sample()
            # Up to RETURN_STEPS rewards, then the value of where they led.
            count = batch["mask"].sum(dim=1)  # [B]
            earned = (batch["reward"] * discounts).sum(dim=1)  # steps that do not exist are zeros
            beyond = batch["next_observation"][row, count - 1]
            fallen = batch["terminated"][row, count - 1]
            with torch.no_grad():
                # One network chooses the action and the other says what it is worth (van Hasselt et al. 2016). With
                # one for both, an action is chosen because its value is overestimated.
                best = network(beyond).argmax(dim=1)
                rest = target(beyond)[row, best]
                # Only a fallen pole ends the value: an episode that is cut off at 500 steps could have gone on.
                wanted = earned + DISCOUNT**count * rest * ~fallen
            value = network(batch["observation"][:, 0])[row, batch["action"][:, 0]]
            loss = F.smooth_l1_loss(value, wanted, reduction="none")
            if replay == "prioritized":
                loss = loss * batch["priority_weight"]  # less for what is drawn more often
                # Names the steps as the batch does; what has been evicted since is left out.
                dataset.update_priority(batch, (value.detach() - wanted).abs())
            optimizer.zero_grad()
            loss.mean().backward()
            nn.utils.clip_grad_norm_(network.parameters(), 10.0)
            optimizer.step()
            decay.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
                    slow.lerp_(fast, TARGET_RATE)

        # -------------------------------------------------------------- evaluate
        if step % options.evaluate_every == 0:
            # Always the same starts, which makes the curve smoother, and none of them those of the end.
            returns = evaluate(network, seed=1_000_000 + 1000 * options.seed, episodes=20)
            curve["steps"].append(step)
            curve["returns"].append(returns.tolist())
        if step % (10 * options.evaluate_every) == 0:
            print(f"{replay:>11} {step:7,} steps: return {returns.mean():3.0f}", flush=True)

    final = evaluate(network, seed=2_000_000 + 1000 * options.seed, episodes=options.episodes)
    environment.close()
    table.close()
    return {"final": final.tolist(), "curve": curve, "seconds": time.perf_counter() - started}


def plot(runs, options):
    """Draw mean and range of the middle half of the evaluation episodes of both runs."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for (replay, run), color in zip(runs.items(), ("tab:orange", "tab:blue"), strict=True):
        returns = np.array(run["curve"]["returns"])  # [evaluations, episodes]
        steps = run["curve"]["steps"]
        low, high = np.quantile(returns, (0.25, 0.75), axis=1)
        axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
        axes.plot(steps, returns.mean(axis=1), color=color, label=f"{replay} replay")
    axes.axhline(
        EXPECTED_RETURN, linestyle="--", color="0.6", label=f"{EXPECTED_RETURN}, expected at the end"
    )
    axes.set(xlabel="steps in the environment", ylabel="return of the greedy policy")
    axes.set(xlim=(0, options.steps), ylim=(0, 520))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title(f"DQN on {ENVIRONMENT}, seed {options.seed}: mean and middle half of 20 episodes")
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(options.out / "learning_curve.png", dpi=150)


def main():
    parser = argparse.ArgumentParser(
        description="Train DQN with uniform and with prioritized replay and compare."
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="decides everything that is random (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=40_000, help="steps in the environment (default: %(default)s)"
    )
    parser.add_argument(
        "--episodes", type=int, default=50, help="of the final evaluation (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results/prioritized_dqn"), help="folder for the results"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny run without the check at the end")
    parser.add_argument("--no-check", action="store_true", help="do not check what was learnt")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.episodes, options.no_check = 2_000, 4, True
    if options.steps < 2 * WARMUP or options.episodes < 1:
        parser.error(
            f"--steps {options.steps} --episodes {options.episodes}; expected at least {2 * WARMUP} and 1"
        )
    options.evaluate_every = options.steps // 50

    started = time.perf_counter()
    # Spawned, because a forked copy of a process that has used torch's threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=2, mp_context=context) as pool:
        futures = {replay: pool.submit(train, replay, options) for replay in ("uniform", "prioritized")}
        runs = {replay: future.result() for replay, future in futures.items()}
    seconds = time.perf_counter() - started

    console = Console()
    summary = TextTable("replay", "mean", "least", "most", "seconds", title="Returns of the final policies")
    for replay, run in runs.items():
        final = np.array(run["final"])
        run["mean"] = float(final.mean())
        values = (final.mean(), final.min(), final.max(), run["seconds"])
        summary.add_row(replay, *(f"{value:.0f}" for value in values))
    console.print(summary)

    options.out.mkdir(parents=True, exist_ok=True)
    plot(runs, options)
    figures = {"environment": ENVIRONMENT, "seed": options.seed, "steps": options.steps, "seconds": seconds}
    figures["runs"] = runs
    (options.out / "summary.json").write_text(json.dumps(figures, indent=2) + "\n")
    console.print(f"Plot and figures are in {options.out} ({seconds:.0f} seconds in all).", highlight=False)

    if not options.no_check:
        achieved = runs["prioritized"]["mean"]
        if not achieved >= EXPECTED_RETURN:
            sys.exit(
                f"The check failed: prioritized replay achieved {achieved:.0f}, expected at least {EXPECTED_RETURN}."
            )
        console.print("Checked: the policy that was learnt by priority balances.", style="green")


if __name__ == "__main__":
    main()
