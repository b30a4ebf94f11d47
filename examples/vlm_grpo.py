"""A small model of images and text learns to answer questions about handwritten digits, by GRPO.

Each question is answered in a group of eight, whose image and question the table stores once: the image is a column
``per="group"``, and the answers begin with the steps of the first one (``prefix=``). Batches have ``layout="tree"``:
each question and each image of a batch lies there once, and attention lets the answers see theirs. What that saves is
counted and printed.

    python examples/vlm_grpo.py             # about a minute on two cores
    python examples/vlm_grpo.py --quick     # a few seconds, to see that it runs

It needs pip install '.[examples]' and no network: scikit-learn's package has the images, 1,797 of 8 x 8 pixels. A fifth
of them is kept for the check at the end: the exit status is 1 if fewer than EXPECTED of their questions are answered
well.
"""

import argparse
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

import gear_loader as gear

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    sys.exit(f"{error}. This example needs pip install '.[examples]', in a clone of Gear Loader.")

QUESTIONS = ["digit?  ", "above 4?"]  # of PROMPT letters each
ALPHABET = sorted({letter for question in QUESTIONS for letter in question} | set("0123456789yn;"))
PROMPT = len(QUESTIONS[0])
ANSWER = 2  # tokens: a letter, and ;
PATCHES = 4  # of 4 x 4 pixels
GROUP = 8  # answers to a question
FRESH = 32  # groups that are answered between two updates
GROUPS = 32  # of a batch
EXPECTED = 0.6


def tokens_of(text):
    return torch.tensor([ALPHABET.index(letter) for letter in text])


def right_answer(question, digit):
    return [str(digit), "ny"[digit > 4]][question] + ";"


# ---------------------------------------------------------------------- the model
class Block(nn.Module):
    """Attention where a mask allows it, then two layers for each token."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, mask):
        parts = self.into(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.wide(self.after(x))


class Answerer(nn.Module):
    """Patches of images, then tokens -> scores of the next token."""

    def __init__(self, width=64, heads=4, depth=2):
        super().__init__()
        self.patch, self.spot = nn.Linear(16, width), nn.Embedding(PATCHES, width)
        self.token, self.place = nn.Embedding(len(ALPHABET), width), nn.Embedding(PROMPT + ANSWER, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.score = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(ALPHABET)))

    def forward(self, images, tokens, position, mask):
        """Images uint8 [B, n, 8, 8], tokens and positions int64 [B, T] -> scores of the next token, [B, T, letters].

        `mask`: bool [N, N], which of the N = n * PATCHES + T patches and tokens each of them sees.
        """
        pixels = images.float().div(8).sub(1).unfold(2, 4, 4).unfold(3, 4, 4)  # [B, n, 2, 2, 4, 4]
        patches = self.patch(pixels.flatten(4).flatten(1, 3)) + self.spot.weight.repeat(images.shape[1], 1)
        x = torch.cat((patches, self.token(tokens) + self.place(position)), 1)
        for block in self.blocks:
            x = block(x, mask)
        return self.score(x[:, patches.shape[1] :])


@torch.no_grad()
def answer(model, images, prompts, generator=None):
    """Answers, int64 [n, ANSWER], and their log-probabilities; the likeliest ones without random numbers."""
    tokens, logprobs = prompts, []
    for _ in range(ANSWER):
        size = PATCHES + tokens.shape[1]
        mask = torch.ones(size, size, dtype=torch.bool).tril()
        mask[:, :PATCHES] = True
        position = torch.arange(tokens.shape[1]).expand(tokens.shape)
        scores = model(images[:, None], tokens, position, mask)[:, -1].log_softmax(-1)
        chosen = (
            torch.multinomial(scores.exp(), 1, generator=generator) if generator else scores.argmax(-1, True)
        )
        tokens = torch.cat((tokens, chosen), 1)
        logprobs.append(scores.gather(1, chosen))
    return tokens[:, PROMPT:], torch.cat(logprobs, 1)


def tree_mask(batch):
    """What each patch and token of a batch sees: its image, the question its answer begins with, and itself so far.

    Returns:
        bool [all, all], where all are the patches of the batch's images, then its tokens.
    """
    ends, parent, groups = batch["cu_seqlens"].long(), batch["parent"].long(), len(batch["image"])
    segment = torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff())
    above = torch.full((len(ends) - 1,), -1)
    above[: len(parent)] = parent
    group = torch.empty(len(ends) - 1, dtype=torch.int64)  # of a row, and of the question that it begins with
    group[: len(parent)] = batch["group"]
    begins = parent >= 0
    group[parent[begins]] = batch["group"][begins]
    own = (segment[:, None] == segment) & torch.ones(len(segment), len(segment), dtype=torch.bool).tril()
    text = own | (above[segment][:, None] == segment)
    image = torch.repeat_interleave(torch.arange(groups), PATCHES)
    patches, total = len(image), len(image) + len(segment)
    mask = torch.zeros(total, total, dtype=torch.bool)
    mask[:patches, :patches] = image[:, None] == image
    mask[patches:, :patches] = group[segment][:, None] == image
    mask[patches:, patches:] = text
    return mask


# ---------------------------------------------------------------------- answering and learning
def add_answers(table, model, images, digits, generator, first):
    """Answer FRESH questions GROUP times each, and add them with their advantages. Returns the share that is right."""
    chosen = torch.randint(len(images), (FRESH,), generator=generator)
    asked = torch.randint(len(QUESTIONS), (FRESH,), generator=generator)
    prompts = torch.stack([tokens_of(QUESTIONS[question]) for question in asked])
    given, logprobs = answer(
        model, images[chosen].repeat_interleave(GROUP, 0), prompts.repeat_interleave(GROUP, 0), generator
    )
    wanted = torch.stack(
        [tokens_of(right_answer(q, int(digits[i]))) for q, i in zip(asked, chosen, strict=True)]
    )
    right = (given.view(FRESH, GROUP, ANSWER) == wanted[:, None]).float()
    reward = right.mean(-1) * 0.2 + right.prod(-1) * 0.8
    advantage = reward - reward.mean(1, keepdim=True)
    given, logprobs = given.view(FRESH, GROUP, ANSWER), logprobs.view(FRESH, GROUP, ANSWER)
    none = torch.zeros(PROMPT)
    for i in range(FRESH):
        if not advantage[i].any():
            continue  # nothing to learn from
        rows = [
            {
                "token": given[i, j],
                "logprob": logprobs[i, j],
                "advantage": advantage[i, j],
                "number": first + i,
            }
            for j in range(GROUP)
        ]
        rows[0]["token"] = torch.cat((prompts[i], given[i, 0]))
        rows[0]["logprob"] = torch.cat((none, logprobs[i, 0]))
        leader = table.add({**rows[0], "image": images[chosen[i]][None]})
        table.extend(rows[1:], prefix=leader, prefix_steps=PROMPT)
    return float(right.prod(-1).mean())


def loss_of(model, batch, bonus):
    """The loss of a batch, and how many tokens the model has read."""
    token, position, ends = batch["token"], batch["position"].long(), batch["cu_seqlens"].long()
    images = batch["image"].values
    scores = model(images[None], token[None], position[None], tree_mask(batch))[0].log_softmax(-1)
    rows = len(batch["parent"])
    row = torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff())
    here = torch.nonzero((position >= PROMPT) & (row < rows))[:, 0]  # tokens that the model chose
    # The token before the first one of an answer is the last one of its question.
    starts, before = position[here] == PROMPT, here - 1
    parent = batch["parent"].long()[row[here]]
    before = torch.where(starts & (parent >= 0), ends[parent + 1] - 1, before)
    logprob = scores[before].gather(1, token[here, None])[:, 0]
    ratio = (logprob - batch["logprob"][here]).exp()
    advantage = batch["advantage"][row[here]]
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    entropy = -(scores[before].exp() * scores[before]).sum(-1)
    return -(gain + bonus * entropy).mean(), len(token) + len(images) * PATCHES


def accuracy(model, images, digits):
    """The share of all questions about these images that is answered well."""
    right = 0.0
    for question, text in enumerate(QUESTIONS):
        given, _ = answer(model, images, tokens_of(text).expand(len(images), -1))
        wanted = torch.stack([tokens_of(right_answer(question, int(digit))) for digit in digits])
        right += float((given == wanted).all(1).float().mean()) / len(QUESTIONS)
    return right


def main():
    parser = argparse.ArgumentParser(description="Teach a small model of images and text by GRPO.")
    parser.add_argument("--seed", type=int, default=0, help="of weights and questions (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=500, help="of the model (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny run that does not check what was learnt")
    options = parser.parse_args()
    updates = 8 if options.quick else options.updates
    torch.set_num_threads(1)  # the tensors are small
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    data = load_digits()
    images, digits = torch.tensor(data.images, dtype=torch.uint8), torch.tensor(data.target)
    order = torch.randperm(len(images), generator=generator)
    kept, used = order[: len(order) // 5], order[len(order) // 5 :]

    columns = {
        "token": gear.Column(torch.int64),
        "logprob": gear.Column(torch.float32),  # by the weights that it was drawn with; 0 in the question
        "advantage": gear.Column(torch.float32, per="trajectory"),
        "number": gear.Column(torch.int64, per="trajectory"),  # of the group
        "image": gear.Column(torch.uint8, (None, 8, 8), per="group"),
    }
    model, started = Answerer(), time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    with gear.Table.create(
        columns,
        max_steps=40_000,
        max_trajectories=1_024,
        block_steps=2,
        memory=gear.Memory(payload="1MiB", prefixes=True, packed=False),
        on_full="evict_oldest",
    ) as table:
        replay = gear.ReplayDataset(
            table,
            windows=gear.Whole(),
            layout="tree",
            batch_size=GROUPS * GROUP,
            groups=gear.Groups("number", GROUP),
            seed=options.seed,
            device="cpu",
        )
        read = whole = 0
        for update in range(updates):
            right = add_answers(table, model, images[used], digits[used], generator, update * FRESH)
            batch = replay.sample()
            loss, count = loss_of(model, batch, 0.1 * max(0.05, 1 - update / updates))
            read += count
            whole += len(batch["parent"]) * (PATCHES + PROMPT + ANSWER)
            optimizer.param_groups[0]["lr"] = 2e-3 * max(0.1, 1 - update / updates)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if (update + 1) % max(1, updates // 10) == 0:
                print(f"{update + 1:5} updates: {right:4.0%} of new answers right", flush=True)
        stats = table.stats()
    final = accuracy(model, images[kept], digits[kept])
    print(
        f"{final:.0%} of the questions about {len(kept)} new images answered well after "
        f"{time.perf_counter() - started:.0f} s; the model read {whole / read:.1f} times fewer tokens than without the "
        f"tree; {stats.num_steps:,} steps of {stats.num_trajectories:,} answers lie in {stats.blocks_in_use:,} blocks "
        f"of {stats.block_steps}"
    )
    if not options.quick and final < EXPECTED:
        sys.exit(f"expected at least {EXPECTED:.0%}")


if __name__ == "__main__":
    main()
