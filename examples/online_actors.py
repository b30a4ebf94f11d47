"""Train with Lightning while two actor processes collect, with the newest weights, and one of them is killed.

Three processes work on one replay table, which lies in shared memory under a name:

    actor 0, actor 1   balance the pole of CartPole-v1 and write what happens into the table, step by step
    the trainer        draws steps by priority and improves a Q-network (double DQN with returns of 3 steps, as in
                       examples/prioritized_dqn.py, which explains the method); hands its weights to the actors

The table's rate limiter keeps them in step: the trainer draws a fixed number of rows for each piece of an episode that
the actors add, and the side that is ahead waits. Half-way this file kills an actor with SIGKILL while it is writing.
Its unfinished piece is freed, its finished pieces stay, and a new actor takes its place: the end of this file checks
that. gear_loader.ReplayMonitor logs to TensorBoard how full the table is, how fast it is written and read, the age of
the rows drawn, and how long each side waits.

    python examples/online_actors.py             # about a minute on two cores
    python examples/online_actors.py --quick     # about 20 seconds, to see that it runs

It needs pip install '.[lightning,sources]' tensorboard, and no network. The exit status is 1 if the
policy does not balance, or if a finished piece was lost. If the trainer itself is killed, the actors end, and the table
stays: `gear-loader rm` removes it, or a new trainer attaches to it by name and resumes with ckpt_path=; the checkpoint
holds the state_dict of the data, with priorities.
"""

import argparse
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import gear_loader as gear

try:
    import gymnasium
    import lightning
    import tensorboard  # noqa: F401  # for the logger
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import TensorBoardLogger
except ImportError as error:
    sys.exit(
        f"{error}. This example needs pip install '.[lightning,sources]' tensorboard, in a clone of Gear Loader."
    )

ENVIRONMENT = "CartPole-v1"  # a reward of 1 for each step that the pole stays up, at most 500
EXPECTED_RETURN = 400  # of the final policy, for the check at the end

MEMORY = 40_000  # steps that the table holds; then the oldest make room
CHUNK = 16  # steps of a trajectory of the table: a piece of an episode, so that learning need not wait for its end
BATCH = 128
UPDATES_PER_CHUNK = 4  # updates of the network for each piece that is added
WARMUP = 64  # pieces before the first update
AHEAD = 4  # pieces by which the actors may be ahead of the trainer, or the trainer ahead of them
RETURN_STEPS = 3  # rewards that are added up before the network estimates the rest
DISCOUNT = 0.99
LEARNING_RATE = 1e-3  # at the start; it falls to 0
TARGET_RATE = 0.01  # part of the way that the target network follows in each update
# Part of each actor's actions that are random: all at first, this from EXPLORATION_STEPS of its own on. The second
# actor goes on seeing poles that are about to fall, however well the policy balances.
EXPLORATION = (0.05, 0.3)
EXPLORATION_STEPS = 8_000
PUBLISH_EVERY = 20  # updates from one hand-over of the weights to the next
EPOCHS = 12  # the policy is evaluated after each

SCHEMA = {
    "observation": gear.Column(torch.float32, (4,)),
    "action": gear.Column(torch.int64),
    "reward": gear.Column(torch.float32),
    "next_observation": gear.Column(torch.float32, (4,)),
    "terminated": gear.Column(torch.bool),
}


def make_network():
    """Observation [B, 4] -> value of each action [B, 2]."""
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


# ---------------------------------------------------------------------- the weights, from the trainer to the actors
# A renamed file replaces the old one in one step: an actor that opens it reads either all of the new weights or all of
# the old ones. An actor that has just been started finds them there, and at last it is the policy that was learnt.


def publish(network, version, path):
    """Hand the weights over, as version number `version`."""
    aside = path.with_suffix(".new")
    save_file({**network.state_dict(), "version": torch.tensor(version)}, aside)
    aside.replace(path)


def receive(network, path):
    """Load the newest weights; returns their version."""
    weights = load_file(path)
    version = int(weights.pop("version"))
    network.load_state_dict(weights)
    return version


# ---------------------------------------------------------------------- an actor, in a process of its own
class Progress(ctypes.Structure):
    """What an actor tells of itself, in memory that it shares with the trainer and its own successors.

    Without any lock: a process that is killed would keep it.
    """

    _fields_ = (
        ("starts", ctypes.c_int64),  # times that this actor has been started and found the table
        ("steps", ctypes.c_int64),  # in the environment
        ("chunks", ctypes.c_int64),  # that it has added
        ("unfinished", ctypes.c_int64),  # steps that it has written, but not added yet
        ("version", ctypes.c_int64),  # of the weights that it acts with
    )


def act(number, table_name, weights, everyone, ending, trainer, seed):
    """Play episode after episode until `ending` is set, or the process `trainer` is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which ends its actors
    torch.set_num_threads(1)
    mine = everyone[number]
    rng = np.random.default_rng([seed, number, mine.starts])
    environment = gymnasium.make(ENVIRONMENT)
    network = make_network()

    def patiently(call, *arguments):
        """What the call returns; the rate limiter lets the actor wait for the trainer, but not for a dead one."""
        while not ending.value and os.getppid() == trainer:
            try:
                return call(*arguments)
            except gear.errors.RateLimitError:  # nothing has changed: try again
                continue
        sys.exit()

    with gear.Table.attach(table_name, timeout=1.0) as table:
        writer = table.writer(chunk_steps=CHUNK)
        mine.starts, mine.unfinished = mine.starts + 1, 0
        stamp = None
        while True:
            observation, _ = environment.reset(seed=int(rng.integers(2**31)))
            done = False
            while not done:
                if writer.num_steps == 0 and stamp != (now := weights.stat().st_mtime_ns):
                    stamp, mine.version = now, receive(network, weights)
                randomness = np.interp(mine.steps, (0, EXPLORATION_STEPS), (1.0, EXPLORATION[number]))
                if rng.random() < randomness:
                    action = int(rng.integers(2))
                else:
                    with torch.inference_mode():
                        action = int(network(torch.from_numpy(observation)).argmax())
                next_observation, reward, terminated, truncated, _ = environment.step(action)
                done = terminated or truncated
                values = (observation, action, reward, next_observation, terminated)
                # Into shared memory at once; the 16th step adds the chunk, and the end of the episode a shorter one.
                added = len(patiently(writer.append, dict(zip(SCHEMA, values, strict=True))))
                mine.steps, mine.unfinished = mine.steps + 1, writer.num_steps
                if done and writer.num_steps:
                    patiently(writer.commit)
                    added += 1
                mine.chunks, mine.unfinished = mine.chunks + added, writer.num_steps
                observation = next_observation


# ---------------------------------------------------------------------- all actors, and the thread that restarts them
class Actors:
    """The actor processes, while the with-statement lasts. A thread starts a new one wherever one has died."""

    def __init__(self, table_name, weights, seed):
        self.context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        self.progress = self.context.RawArray(Progress, len(EXPLORATION))
        self.ending = self.context.RawValue(ctypes.c_bool, False)
        self.arguments = (table_name, weights, self.progress, self.ending, os.getpid(), seed)
        self.restarts_left = 5  # more deaths than that have a lasting cause
        self.killed = None

    def start(self, number):
        process = self.context.Process(target=act, args=(number, *self.arguments), daemon=True)
        process.start()
        return process

    def __enter__(self):
        self.processes = [self.start(number) for number in range(len(self.progress))]
        self.thread = threading.Thread(target=self.look_after, daemon=True)
        self.thread.start()
        return self

    def look_after(self):
        while not self.ending.value:
            for number, process in enumerate(self.processes):
                if not process.is_alive() and self.restarts_left and not self.ending.value:
                    self.restarts_left -= 1
                    self.processes[number] = self.start(number)
                    print(
                        f"    actor {number}, process {process.pid}, has died (exit code {process.exitcode}); "
                        f"process {self.processes[number].pid} takes its place",
                        flush=True,
                    )
            time.sleep(0.1)

    def __exit__(self, *_):
        self.ending.value = True
        self.thread.join()
        for process in self.processes:
            process.join(timeout=10)
            process.kill()

    def kill(self, number):
        """Kill an actor that has steps in hand; False if it has none at the moment."""
        process, progress = self.processes[number], self.progress[number]
        if not progress.unfinished or not process.is_alive():
            return False
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        self.killed = {"number": number, "chunks": progress.chunks, "starts": progress.starts}
        print(
            f"    actor {number}, process {process.pid}, was killed with {progress.unfinished} steps written but not "
            f"finished, after {progress.chunks:,} chunks",
            flush=True,
        )
        return True

    def successor_came(self, timeout):
        """Whether an actor was killed and its successor has found the table, at the latest after `timeout` seconds."""
        if self.killed is None:
            return False
        deadline = time.monotonic() + timeout
        progress = self.progress[self.killed["number"]]
        while progress.starts == self.killed["starts"] and time.monotonic() < deadline:
            time.sleep(0.1)
        return progress.starts > self.killed["starts"]


class KillAnActor(Callback):
    """Kills the first actor after `step` updates, as soon as it is writing."""

    def __init__(self, actors, step):
        self.actors, self.step = actors, step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step >= self.step and self.actors.killed is None:
            self.actors.kill(0)


# ---------------------------------------------------------------------- the learner
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


class QLearner(lightning.LightningModule):
    """Double deep Q-learning by priority; publishes its weights."""

    def __init__(self, actors, weights, seed):
        super().__init__()
        self.network, self.target = make_network(), make_network()
        self.target.load_state_dict(self.network.state_dict())
        self.register_buffer("discounts", DISCOUNT ** torch.arange(RETURN_STEPS))
        self.actors, self.weights, self.seed = actors, weights, seed

    def training_step(self, batch, _):
        row = torch.arange(len(batch["index"]))
        # Up to RETURN_STEPS rewards, then the value of where they led.
        count = batch["mask"].sum(dim=1)  # [B]
        earned = (batch["reward"] * self.discounts).sum(dim=1)  # steps that do not exist are zeros
        beyond = batch["next_observation"][row, count - 1]
        fallen = batch["terminated"][row, count - 1]
        with torch.no_grad():
            best = self.network(beyond).argmax(dim=1)
            # Only a fallen pole ends the value: an episode that is cut off at 500 steps could have gone on.
            wanted = earned + DISCOUNT**count * self.target(beyond)[row, best] * ~fallen
        value = self.network(batch["observation"][:, 0])[row, batch["action"][:, 0]]
        loss = F.smooth_l1_loss(value, wanted, reduction="none") * batch["priority_weight"]
        # What has been evicted since it was drawn is left out.
        self.trainer.datamodule.train_dataset.update_priority(batch, (value.detach() - wanted).abs())
        self.log("loss", loss.mean())
        return loss.mean()

    @torch.no_grad()
    def on_train_batch_end(self, *_):
        for slow, fast in zip(self.target.parameters(), self.network.parameters(), strict=True):
            slow.lerp_(fast, TARGET_RATE)
        if self.global_step % PUBLISH_EVERY == 0:
            publish(self.network, self.global_step, self.weights)

    def on_train_epoch_end(self):
        # Always the same starts, which makes the curve smoother, and none of them those of the end.
        returns = evaluate(self.network, seed=1_000_000 + 1000 * self.seed, episodes=20)
        steps = sum(each.steps for each in self.actors.progress)
        behind = max(self.global_step - each.version for each in self.actors.progress)
        self.log("return", float(returns.mean()))
        print(
            f"{self.global_step:7,} updates, {steps:6,} steps: return {returns.mean():3.0f}, "
            f"actors at most {behind} updates behind",
            flush=True,
        )

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.network.parameters(), lr=LEARNING_RATE)
        steps = self.trainer.estimated_stepping_batches
        decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": "step"}}


# ---------------------------------------------------------------------- was anything lost?
def complaints(table, actors, limiter):
    """Check the table and print the counts; returns a list of errors."""
    wrong = []
    stats = table.stats()
    chunks = [each.chunks for each in actors.progress]
    print(f"chunks that the actors count: {' + '.join(f'{n:,}' for n in chunks)} = {sum(chunks):,}")
    print(
        f"chunks that the table counts: {stats.num_inserted:,}, of which {stats.num_trajectories:,} are there and "
        f"{stats.num_evicted:,} were evicted"
    )
    # An actor that is killed may just have added a chunk and not counted it yet.
    if not sum(chunks) <= stats.num_inserted <= sum(chunks) + 1:
        wrong.append(f"the actors added {sum(chunks)} chunks and the table counts {stats.num_inserted}")
    if stats.num_trajectories + stats.num_evicted != stats.num_inserted:
        wrong.append("chunks are missing that were not evicted")
    table.check_valid()
    torn = 0
    for index in table.indices():
        chunk = table[index]
        torn += not torch.equal(chunk["next_observation"][:-1], chunk["observation"][1:])
    if torn:
        wrong.append(f"in {torn} chunks a step does not begin where the one before it ended")

    asked = limiter.samples_per_insert
    achieved = stats.num_sampled / (stats.num_inserted - limiter.min_size)
    print(
        f"rows drawn for each chunk after the first {limiter.min_size}: {achieved:.1f}, asked for {asked:g}"
    )
    balance = stats.num_inserted * asked - stats.num_sampled
    if not limiter.min_diff <= balance <= limiter.max_diff:
        wrong.append(f"inserted * {asked:g} - sampled is {balance:g}, beyond the limits of {limiter!r}")
    print(f"waited, all together: actors {stats.insert_wait:.1f} s, trainer {stats.sample_wait:.1f} s")

    if actors.killed is not None:
        number, before = actors.killed["number"], actors.killed["chunks"]
        print(f"the successor of actor {number} has added {chunks[number] - before:,} chunks")
    return wrong


def main():
    parser = argparse.ArgumentParser(
        description="Train DQN while actor processes collect, and kill one of them."
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of networks and environments (default: %(default)s)"
    )
    parser.add_argument("--updates", type=int, default=14_000, help="of the network (default: %(default)s)")
    parser.add_argument(
        "--episodes", type=int, default=50, help="of the final evaluation (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("results/online_actors"), help="folder for the logs")
    parser.add_argument("--quick", action="store_true", help="a tiny run that does not check what was learnt")
    options = parser.parse_args()
    if options.quick:
        options.updates, options.episodes = 600, 4
    if options.updates < 10 * EPOCHS or options.episodes < 1:
        parser.error(
            f"--updates {options.updates} --episodes {options.episodes}; expected at least {10 * EPOCHS} and 1"
        )
    options.updates -= options.updates % EPOCHS

    started = time.perf_counter()
    # Lightning need not say which accelerators there are not.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec", category=FutureWarning)
    warnings.filterwarnings("ignore", message="You passed in a `val_dataloader`")  # there is none
    torch.set_num_threads(1)  # the other core is the actors'
    lightning.seed_everything(options.seed, verbose=False)

    rows = UPDATES_PER_CHUNK * BATCH  # to draw for each chunk
    limiter = gear.SampleToInsertRatio(rows, min_size=WARMUP, error_buffer=AHEAD * rows)
    logger = TensorBoardLogger(options.out, name=None)
    weights = Path(logger.log_dir) / "weights.safetensors"
    weights.parent.mkdir(parents=True)
    name = f"online-actors-{os.getpid()}"
    table = gear.Table.create(
        SCHEMA,
        max_steps=MEMORY,
        max_trajectories=MEMORY // 4,
        block_steps=CHUNK,
        name=name,
        on_full="evict_oldest",
        rate_limiter=limiter,
    )
    try:
        actors = Actors(name, weights, options.seed)
        learner = QLearner(actors, weights, options.seed)
        publish(learner.network, 0, weights)
        # An item is a step, and its window that step with the next two; where the chunk ends first the mask says so.
        # No prefetch: a batch that is drawn ahead does not know the priorities that come from the batch before it.
        # A batch that is larger than the rate limiter's leeway, and would wait for ever, is refused here.
        data = gear.ReplayDataModule(
            name,
            batch_size=BATCH,
            windows=gear.Window(length=RETURN_STEPS),
            sampler=gear.Prioritized(
                0.6, gear.LinearSchedule(0.4, 1.0, batches=options.updates), eps=1e-6, unit="step"
            ),
            draws=gear.Draws(sample_info=True),
            prefetch=0,
            seed=options.seed,
            val_fraction=0,
            batches_per_epoch=options.updates // EPOCHS,
        )
        trainer = lightning.Trainer(
            max_epochs=EPOCHS,
            accelerator="cpu",
            gradient_clip_val=10.0,
            logger=logger,
            callbacks=[gear.ReplayMonitor(every_n_steps=50), KillAnActor(actors, options.updates // 2)],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        with actors:
            trainer.fit(learner, data)
            wrong = (
                [] if actors.successor_came(timeout=60) else ["no new actor took the place of a killed one"]
            )
        final = evaluate(learner.network, seed=2_000_000 + 1000 * options.seed, episodes=options.episodes)
        wrong += complaints(table, actors, limiter)
    finally:
        table.unlink()
        table.close()

    print(f"return of the final policy: {final.mean():.0f}, expected at least {EXPECTED_RETURN}")
    print(f"{time.perf_counter() - started:.0f} seconds; see tensorboard --logdir {logger.log_dir}")
    if not options.quick and not final.mean() >= EXPECTED_RETURN:
        wrong.append(f"the policy achieved {final.mean():.0f}")
    if wrong:
        sys.exit(f"The check failed: {'; '.join(wrong)}.")
    print(
        "Checked: nothing that was finished is lost"
        + ("." if options.quick else ", and the policy balances.")
    )


if __name__ == "__main__":
    main()
