"""A small transformer learns to add by GRPO: generators, a scorer and a trainer work on one table of completions.

Group relative policy optimization (Shao et al. 2024, arXiv:2402.03300) lets a model answer each prompt several times
and raises the probability of the answers that are better than the others to the same prompt, here by the difference
from their mean (as Liu et al. 2025, arXiv:2503.20783). A bonus for entropy, which falls, keeps the answers various.
Here a causal transformer of plain torch, with random weights at the start, learns to complete "7+8=" by "15;". These
processes work on it:

    generators   complete prompts in groups, with the newest weights that the trainer has handed over, and add each
                 group to the table: tokens, their log-probabilities, the prompt's number, the version of the weights
    the scorer   finds completions without a reward and fills in reward and advantage, which are late columns
    the trainer  with Lightning: packed batches by a budget of tokens, made of complete groups whose rewards differ,
                 and of no weights more than MAX_LAG versions old; a clipped ratio corrects for their age

After a quarter a generator is killed with SIGKILL, and another one takes its place.

    python examples/grpo.py             # a few minutes on two cores
    python examples/grpo.py --quick     # about 20 seconds, to see that it runs

It needs pip install '.[lightning,bench]' and no network. A plot of the accuracy and the figures are written to
the folder --out. The exit status is 1 if the model completes fewer than 60% of all sums.
"""

import argparse
import ctypes
import json
import logging
import math
import multiprocessing
import os
import signal
import sys
import time
import warnings
from pathlib import Path

# Threads of torch that wait for each other shall sleep: spinning costs a multiple where the cores are shared.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import gear_loader as gear

try:
    import lightning
    from matplotlib.figure import Figure
except ImportError as error:
    sys.exit(f"{error}. This example needs pip install '.[lightning,bench]', in a clone of Gear Loader.")

ALPHABET = "0123456789+=;"  # a completion ends with ;
END = ALPHABET.index(";")
LARGEST = 9  # operands are 0 to 9
PROMPT = 4  # tokens of a prompt, as 7+8=
LONGEST = 4  # tokens of a completion
GROUP = 8  # completions of a prompt
PROMPTS = 32  # that a generator completes at once
ENOUGH = 0.97  # accuracy at which training ends early
EXPECTED_ACCURACY = 0.6  # of the final model, for the check at the end

BUDGET = 2048  # tokens of a batch
CLIP = 0.2
MAX_LAG = 4  # versions
AHEAD = 1024  # completions of one version; then a generator waits for the next, for PATIENCE seconds at most
PATIENCE = 0.3
PUBLISH_EVERY = 4  # updates from one version to the next
LEARNING_RATE = 1e-3  # at the start; it falls to a twentieth
LARGEST_GRADIENT = 0.5  # norm; without it and with a constant rate, one seed lost half at the end
ENTROPY = 0.15  # factor of the bonus at the start; it falls to a twentieth

SCHEMA = {
    "token": gear.Column(torch.int64),
    "logprob": gear.Column(
        torch.float32
    ),  # of the token, by the weights that it was drawn with; 0 in the prompt
    "group": gear.Column(torch.int64, per="trajectory"),
    "policy": gear.Column(torch.int64, per="trajectory"),
    "reward": gear.Column(torch.float32, per="trajectory", late=True),
    "advantage": gear.Column(torch.float32, per="trajectory", late=True),
}


# ---------------------------------------------------------------------- the model
class Block(nn.Module):
    """Attention within each row of a packed batch, then two layers for each token."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, row, position, shape):
        # Only attention sees padding: [rows, longest, 3, heads, width of a head].
        parts = self.into(self.before(x))
        padded = parts.new_zeros(*shape, parts.shape[1]).index_put((row, position), parts)
        query, key, value = padded.view(*shape, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(*shape, -1)[row, position])
        return x + self.wide(self.after(x))


class Adder(nn.Module):
    """Packed tokens int64 [total] -> scores of the next token [total, alphabet]."""

    def __init__(self, width=64, heads=4, depth=1):
        super().__init__()
        self.token = nn.Embedding(len(ALPHABET), width)
        self.place = nn.Embedding(PROMPT + LONGEST, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.score = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(ALPHABET)))

    def forward(self, token, starts):
        """`starts`: int32 [rows + 1], the cu_seqlens of the batch."""
        lengths = starts.diff()
        row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        position = torch.arange(len(token)) - starts[row]
        x = self.token(token) + self.place(position)
        for block in self.blocks:
            x = block(x, row, position, (len(lengths), int(lengths.max())))
        return self.score(x)


@torch.no_grad()
def complete(model, prompts, generator):
    """Complete prompts, int64 [n, PROMPT]; greedily without a generator of random numbers.

    Returns:
        Tokens int64 [n, PROMPT + LONGEST], their log-probabilities, and the lengths [n], with the END.
    """
    tokens, logprobs = prompts, torch.zeros(prompts.shape)
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    lengths = torch.full((len(prompts),), PROMPT)
    for _ in range(LONGEST):
        starts = torch.arange(0, tokens.numel() + 1, tokens.shape[1], dtype=torch.int32)
        scores = model(tokens.reshape(-1), starts).view(*tokens.shape, -1)[:, -1].log_softmax(-1)
        if generator is None:
            chosen = scores.argmax(-1)
        else:
            chosen = torch.multinomial(scores.exp(), 1, generator=generator)[:, 0]
        tokens = torch.cat((tokens, chosen[:, None]), 1)
        logprobs = torch.cat((logprobs, scores.gather(1, chosen[:, None])), 1)
        lengths += ~ended
        ended |= chosen == END
    return tokens, logprobs, lengths


def prompts_of(pairs):
    """int64 [n, PROMPT] of operands, [n, 2]."""
    return torch.tensor([[ALPHABET.index(letter) for letter in f"{a}+{b}="] for a, b in pairs.tolist()])


def reward_of(tokens):
    """0 for what is no number and END; else 0.1, up to 0.5 more for being close, and 1 more for the right sum."""
    text = "".join(ALPHABET[token] for token in tokens.tolist())
    given, wanted = text[PROMPT:-1], int(text[0]) + int(text[2])
    if text[-1] != ALPHABET[END] or not given.isdigit():
        return 0.0
    distance = abs(int(given) - wanted)
    return 0.1 + max(0.0, 0.5 - distance / 20) + (distance == 0)


# ---------------------------------------------------------------------- the weights, from the trainer to the generators
def publish(model, version, path):
    """Hand the weights over. A renamed file replaces the old one in one step."""
    aside = path.with_suffix(".new")
    save_file({**model.state_dict(), "version": torch.tensor(version)}, aside)
    aside.replace(path)


def receive(model, path):
    """Load the newest weights; returns their version."""
    weights = load_file(path)
    version = int(weights.pop("version"))
    model.load_state_dict(weights)
    return version


# ---------------------------------------------------------------------- processes beside the trainer
def generate(number, table_name, path, groups, ending, trainer, seed):
    """Add groups of completions until `ending` is set, or the process `trainer` is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    model, stamp, version, made, waited = Adder(), None, 0, 0, 0.0
    with gear.Table.attach(table_name) as table:
        # No two groups have the same number: a successor goes on after what its predecessor may have added.
        generator = torch.Generator().manual_seed(hash((seed, number, groups[number])))
        while not ending.value and os.getppid() == trainer:
            if stamp != (now := path.stat().st_mtime_ns):
                stamp, version, made, waited = now, receive(model, path), 0, 0.0
            if made >= AHEAD and waited < PATIENCE:
                waited += 0.002
                time.sleep(0.002)
                continue
            pairs = torch.randint(LARGEST + 1, (PROMPTS, 2), generator=generator)
            prompts = prompts_of(pairs).repeat_interleave(GROUP, 0)
            tokens, logprobs, lengths = complete(model, prompts, generator)
            first = groups[number]
            groups[number] = first + PROMPTS
            made += len(prompts)
            table.extend(
                {
                    "token": tokens,
                    "logprob": logprobs,
                    "group": (torch.arange(PROMPTS) + first).repeat_interleave(GROUP),
                    "policy": torch.full((len(tokens),), version),
                },
                lengths=lengths,
            )


def score(table_name, ending, trainer):
    """Fill in rewards and advantages."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with gear.Table.attach(table_name) as table:
        while not ending.value and os.getppid() == trainer:
            # The newest, which last the longest; a whole number of groups, because each is added at once.
            slots, generations = (part[-PROMPTS * GROUP :] for part in table.unfilled("reward"))
            found = {}  # group -> its members
            for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True):
                try:
                    row = table[slot]
                except gear.errors.StaleIndexError:  # evicted meanwhile
                    continue
                found.setdefault(int(row["group"]), []).append((slot, generation, reward_of(row["token"])))
            for members in found.values():
                slots, generations, rewards = zip(*members, strict=True)
                reward = torch.tensor(rewards)
                table.fill(slots, generation=generations, reward=reward, advantage=reward - reward.mean())
            if not found:
                time.sleep(0.002)


class Workers:
    """The processes beside the trainer, while the with-statement lasts."""

    def __init__(self, table_name, path, generators, seed):
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        self.groups = context.RawArray(ctypes.c_int64, [i << 40 for i in range(generators)])
        self.ending = context.RawValue(ctypes.c_bool, False)
        self.make = lambda target, *arguments: context.Process(
            target=target, args=(*arguments, self.ending, os.getpid(), *self.seeds[target]), daemon=True
        )
        self.seeds = {generate: (seed,), score: ()}
        self.arguments = (table_name, path, self.groups)
        self.killed = None

    def start(self, number):
        process = self.make(generate, number, *self.arguments)
        process.start()
        return process

    def __enter__(self):
        self.generators = [self.start(number) for number in range(len(self.groups))]
        self.scorer = self.make(score, self.arguments[0])
        self.scorer.start()
        return self

    def __exit__(self, *_):
        self.ending.value = True
        for process in (*self.generators, self.scorer):
            process.join(timeout=10)
            process.kill()

    def replace(self, number):
        """Kill a generator, and start another one in its place."""
        process = self.generators[number]
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        self.killed = self.groups[number]
        self.generators[number] = self.start(number)
        print(
            f"    generator {number}, process {process.pid}, was killed; process {self.generators[number].pid} takes "
            "its place",
            flush=True,
        )


# ---------------------------------------------------------------------- the trainer
@torch.no_grad()
def accuracy(model):
    """Share of all sums that the model gets right, always taking the likeliest token."""
    pairs = torch.cartesian_prod(torch.arange(LARGEST + 1), torch.arange(LARGEST + 1))
    tokens, _, lengths = complete(model, prompts_of(pairs), None)
    right = [reward_of(row[:length]) > 1.5 for row, length in zip(tokens, lengths.tolist(), strict=True)]
    return sum(right) / len(right)


class Grpo(lightning.LightningModule):
    """Raises the probability of completions with a positive advantage."""

    def __init__(self, table, path, workers, updates):
        super().__init__()
        self.model = Adder()
        self.table, self.path, self.workers, self.updates = table, path, workers, updates
        self.curve = []

    def training_step(self, batch, number):
        token, starts = batch["token"], batch["cu_seqlens"]
        row = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())
        scores = self.model(token, starts).log_softmax(-1)
        here = torch.nonzero(batch["position"] >= PROMPT)[:, 0]  # tokens that the model chose
        logprob = scores[here - 1].gather(1, token[here, None])[:, 0]
        ratio = (logprob - batch["logprob"][here]).exp()
        advantage = batch["advantage"][row[here]]
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        entropy = -(scores[here - 1].exp() * scores[here - 1]).sum(-1)
        bonus = ENTROPY * max(0.05, 1 - number / self.updates)
        return -(gain + bonus * entropy).mean()

    def on_train_batch_end(self, _, batch, number):
        step, lag = number + 1, int(self.table.policy_version - batch["policy"].min())
        if step % PUBLISH_EVERY == 0:
            publish(self.model, self.table.advance_version(), self.path)
        if step == self.updates // 4:
            self.workers.replace(0)
        if step % max(1, self.updates // 20) == 0:
            right = accuracy(self.model)
            self.curve.append((step, right, float(batch["reward"].mean())))
            print(
                f"{step:6,} updates: {right:4.0%} of all sums right, mean reward {self.curve[-1][2]:.2f}, "
                f"{len(batch['reward'])} completions of at most {lag} versions ago in a batch",
                flush=True,
            )
            self.trainer.should_stop = right >= ENOUGH

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0
        )
        falling = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: max(0.05, 1 - step / self.updates)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falling, "interval": "step"}}


def plot(curve, path):
    """Accuracy and mean reward over the updates."""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot(xlabel="updates", ylabel="share of all sums that are right", ylim=(0, 1.02))
    axes.plot([step for step, _, _ in curve], [right for _, right, _ in curve], marker="o")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description="Teach a small transformer to add by GRPO.")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=1_500, help="of the model (default: %(default)s)")
    parser.add_argument("--generators", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/grpo"), help="folder for plot and figures")
    parser.add_argument("--quick", action="store_true", help="a tiny run that does not check what was learnt")
    options = parser.parse_args()
    if options.quick:
        options.updates = 24
    started = time.perf_counter()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message="Your `IterableDataset` has `__len__` defined")
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec", category=FutureWarning)
    torch.set_num_threads(1)
    lightning.seed_everything(options.seed, verbose=False)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "weights.safetensors"

    name = f"grpo.{os.getpid()}"
    with gear.Table.create(
        SCHEMA,
        name=name,
        max_steps=50_000,
        max_trajectories=6_000,
        block_steps=8,
        memory=gear.Memory(packed=False),
        on_full="evict_oldest",
        limits=gear.Limits(version="policy", max_lag=MAX_LAG),
        timeout=60.0,
    ) as table:
        try:
            workers = Workers(name, path, options.generators, options.seed)
            module = Grpo(table, path, workers, options.updates)
            publish(module.model, 0, path)
            replay = gear.ReplayDataset(
                table,
                windows=gear.Whole(),
                layout="packed",
                device="cpu",
                batch_size=gear.Steps(BUDGET, lookahead=8),
                seed=options.seed,
                groups=gear.Groups("group", GROUP, varies="reward", max_age=30.0),
                batches_per_epoch=options.updates,
                prefetch=1,
            )
            trainer = lightning.Trainer(
                max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=LARGEST_GRADIENT,
            )  # fmt: skip
            loader = torch.utils.data.DataLoader(replay, batch_size=None)
            with workers:
                trainer.fit(module, loader)
            stats, seen = table.stats(), replay.stats()
            table.check_valid()
        finally:
            table.unlink()
    final = accuracy(module.model)
    plot(module.curve, options.out / "accuracy.png")
    summary = {
        "accuracy": final,
        "seconds": time.perf_counter() - started,
        "completions": stats.num_inserted,
        "outdated": stats.num_outdated,
        "evicted": stats.num_evicted,
        "fill": seen["fill"],
        "curve": module.curve,
    }
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1))
    print(
        f"{final:.0%} of all sums right after {summary['seconds']:.0f} s; {stats.num_inserted:,} completions, of which "
        f"{stats.num_outdated:,} became too old; batches were {seen['fill']:.1%} full"
    )
    if not options.quick and (final < EXPECTED_ACCURACY or not math.isfinite(final)):
        sys.exit(f"expected at least {EXPECTED_ACCURACY:.0%}")


if __name__ == "__main__":
    main()
