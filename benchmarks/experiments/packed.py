"""``python -m benchmarks packed``: batches of 16,384 tokens, of sequences of uneven length, on the CPU or for a GPU.

Lengths are log-normal, 100 to 8,000 with a median of 600. Plain torch, the yardstick, has every column in one tensor,
sequence after sequence: it draws sequences until the next does not fit, makes one index of all steps, and calls
`index_select` for each column (`cat`: concatenates slices instead). `pad_sequence` pads the same sequences to the
longest of the batch. TransferQueue returns the same as jagged tensors, from its simple storage. Ours is a dataset with
``max_steps``. Every figure is the time of as many tokens that are no padding. For a GPU plain torch gathers into pinned
memory and copies it, and a measurement ends when all batches are there; padding and TransferQueue are left out. Then
steps of the model of `examples/grpo.py`, forward, backward and AdamW, with packed batches of 2,048 tokens and with the
same rows padded to the longest.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import runpy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

import gear_loader as gear
from benchmarks.harness import Incorrect, Session, Variant
from benchmarks.options import experiment, numbers, option
from benchmarks.peers.process import PeerProcess, start

TOKENS = 16_384
COLUMNS = (1, 32)
SEQUENCES, QUICK_SEQUENCES = 4000, 60
MEDIAN, SIGMA, SHORTEST, LONGEST = 600, 1.0, 100, 8000
LOOKAHEAD = 16
SEED = 3
STEP_TOKENS = 2048
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo.py"

Columns = option(str, f"Columns of int32, of one value a step: {','.join(map(str, COLUMNS))} by default.")


@experiment("packed", repeats=(2, 15), pause=0.005)
def command(session: Session, columns: Columns = None) -> None:
    """Packed batches of 16,384 tokens from sequences of 100 to 8,000."""
    counts = numbers(columns, "--columns", 1, 256) or COLUMNS
    total = QUICK_SEQUENCES if session.quick else SEQUENCES
    session.configure(columns=counts, sequences=total, tokens=TOKENS, lookahead=LOOKAHEAD, seed=SEED)
    for count in session.each("packed", counts, lambda count: f"{count} columns"):
        _measured(session, Sequences(count, total), 3 if session.quick else 20)
    for _ in session.each("step", (1,), lambda _: "training steps of the example"):
        _measure_steps(session, 2 if session.quick else 10)


class Sequences:
    """Sequences of log-normal lengths, one after another in each column.

    The value of a step tells its column and its place in `flat`.
    """

    def __init__(self, columns: int, count: int) -> None:
        random = np.random.default_rng(SEED)
        lengths = np.clip(random.lognormal(math.log(MEDIAN), SIGMA, count), SHORTEST, LONGEST)
        self.lengths = lengths.astype(np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.total = int(self.lengths.sum())
        place = torch.arange(self.total, dtype=torch.int32)
        self.flat = {f"column{i}": place + i for i in range(columns)}

    def table(self) -> gear.Table:
        """A table of them, column by column: packed=False."""
        schema = dict.fromkeys(self.flat, gear.Column(torch.int32))
        table = gear.Table.create(
            schema,
            max_steps=self.total,
            max_trajectories=len(self.lengths),
            block_steps=128,
            memory=gear.Memory(packed=False),
        )
        for first, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            table.add({name: values[first : first + length] for name, values in self.flat.items()})
        return table

    def batches(self) -> Iterator[np.ndarray]:
        """Numbers of random sequences that fit into a batch, again and again."""
        random = np.random.default_rng(SEED)
        while True:
            order = random.permutation(len(self.lengths))
            while len(order):
                ends = np.cumsum(self.lengths[order[: TOKENS // SHORTEST]])
                count = int(np.searchsorted(ends, TOKENS, side="right"))
                yield order[:count]
                order = order[count:]


def _measured(session: Session, data: Sequences, count: int) -> None:
    """Compare the ways at one number of columns."""
    with contextlib.ExitStack() as stack, data.table() as table:
        device = torch.device("cuda" if session.cuda else "cpu")
        options: dict[str, Any] = {
            "windows": gear.Whole(), "layout": "packed", "batch_size": gear.Steps(TOKENS, LOOKAHEAD),
            "device": device, "seed": SEED, "sampler": gear.Uniform(replacement=False), "batches_per_epoch": math.inf,
        }  # fmt: skip
        ahead = 2 if session.cuda else 0
        kept = gear.ReplayDataset(table, prefetch=ahead, **options)
        recycled = gear.ReplayDataset(table, prefetch=gear.Prefetch(ahead, copy=False), **options)
        targets = {"plain torch": 0.9}
        on_cpu = [
            _variant("plain torch, cat", _joined(data), data, count),
            _variant("pad_sequence", _padded(data), data, count, check=_check_padded),
        ]
        variants = [
            _variant("plain torch", _selected(data, device), data, count),
            *([] if session.cuda else on_cpu),
            _variant("ours", iter(kept), data, count, targets=targets, fill=lambda: kept.batch_fill),
            _variant("ours, copy=False", iter(recycled), data, count, fill=lambda: recycled.batch_fill),
        ]
        label = f"{len(data.flat)} column{'s' if len(data.flat) > 1 else ''}, {TOKENS:,} tokens"
        made = functools.partial(_transfer_queue, session, data, stack)
        if not session.cuda and (peer := session.attempt(f"TransferQueue, {label}", made)) is not None:
            variants.append(_of_peer(peer, data, max(2, count // 4)))
        told = {"columns": len(data.flat), "sequences": len(data.lengths), "item": "token"}
        session.compare(f"{len(data.flat)} columns", label, variants, "plain torch", told, unit="rows")


def _transfer_queue(session: Session, data: Sequences, stack: contextlib.ExitStack) -> PeerProcess:
    """A process in which TransferQueue holds the sequences."""
    peer = start(session.peers, "sequences", "transferqueue", "TransferQueue", patience=300.0)
    stack.callback(peer.close)
    peer.ask("build", columns=len(data.flat), lengths=data.lengths.tolist())
    return peer


def _of_peer(peer: PeerProcess, data: Sequences, count: int) -> Variant:
    """TransferQueue: the same batches as plain torch, in a process of its own."""
    batches = data.batches()

    def taken(number: int) -> list[list[int]]:
        return [chosen.tolist() for chosen in itertools.islice(batches, number)]

    def measure() -> float:
        told = taken(count)
        tokens = sum(int(data.lengths[chosen].sum()) for chosen in told)
        return float(peer.ask("measure", batches=told)["seconds"]) * count * TOKENS / tokens

    return Variant("TransferQueue", measure, lambda: peer.ask("check", batches=taken(2)), TOKENS, count)


def _variant(
    name: str,
    batches: Iterator[Any],
    data: Sequences,
    count: int,
    *,
    check: Callable[[Any, Sequences], None] | None = None,
    fill: Callable[[], float | None] | None = None,
    targets: dict[str, float] | None = None,
) -> Variant:
    """A way whose batches are timed by the token."""

    def measure() -> float:
        tokens, started = 0, time.perf_counter()
        for batch in itertools.islice(batches, count):
            if "position" in batch:
                tokens += len(batch["position"])
            else:
                tokens += int(batch["cu_seqlens"][-1])
        if batch["cu_seqlens"].is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - started) * count * TOKENS / tokens

    def checked() -> None:
        for batch in itertools.islice(batches, 5):
            there = {
                name: part.cpu() if isinstance(part, torch.Tensor) else part for name, part in batch.items()
            }
            (check or _check_packed)(there, data)

    extras = (lambda: {"fill": fill() or 0.0}) if fill is not None else None
    return Variant(name, measure, checked, TOKENS, count, targets=targets or {}, extras=extras)


def _measure_steps(session: Session, count: int) -> None:
    """Compare training steps of the example's model with packed and with padded batches."""
    try:
        grpo = runpy.run_path(str(EXAMPLE))
    except SystemExit as missing:
        session.console.print(str(missing))
        return
    random = torch.Generator().manual_seed(SEED)
    shortest, longest = grpo["PROMPT"] + 1, grpo["PROMPT"] + grpo["LONGEST"]
    lengths = torch.randint(
        shortest, longest + 1, (4 * STEP_TOKENS // (shortest + longest) * 2,), generator=random
    )
    lengths = lengths[: int((lengths.cumsum(0) <= STEP_TOKENS).sum())]
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    packed = torch.randint(len(grpo["ALPHABET"]), (len(row),), generator=random)
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()))
    position = torch.arange(len(row)) - starts[row]
    padded = packed.new_zeros(len(lengths), longest)
    padded[row, position] = packed
    ends = torch.arange(len(lengths) + 1, dtype=torch.int32) * longest
    there = row * longest + position  # the tokens that are no padding
    inputs = {"padded": (padded.reshape(-1), ends, there), "packed": (packed, starts, torch.arange(len(row)))}
    variants, losses = [], {}
    for name, given in inputs.items():
        torch.manual_seed(SEED)
        model = grpo["Adder"]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses[name] = float(_loss(model, *given).detach())

        def measure(model: Any = model, optimizer: Any = optimizer, given: Any = given) -> float:
            started = time.perf_counter()
            for _ in range(count):
                optimizer.zero_grad()
                _loss(model, *given).backward()
                optimizer.step()
            return time.perf_counter() - started

        def check() -> None:
            if abs(losses["padded"] - losses["packed"]) > 1e-4:
                raise Incorrect(f"the losses differ: {losses}")

        variants.append(Variant(name, measure, check, len(row), count))
    label = f"{len(row):,} tokens in {len(lengths)} rows of {shortest} to {longest}"
    told = {"tokens": len(row), "rows": len(lengths), "longest": longest, "item": "token"}
    session.compare("training step", label, variants, "padded", told, unit="rows")


def _loss(model: Any, token: torch.Tensor, starts: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Mean of the scores' log-sum-exp over the tokens that are no padding."""
    loss: torch.Tensor = model(token, starts)[there].logsumexp(-1).mean()
    return loss


def _cumulative(data: Sequences, chosen: np.ndarray) -> torch.Tensor:
    starts = np.zeros(len(chosen) + 1, dtype=np.int32)
    np.cumsum(data.lengths[chosen], out=starts[1:])
    return torch.from_numpy(starts)


def _selected(data: Sequences, device: torch.device) -> Iterator[dict[str, Any]]:
    """Batches by one index of all steps; for a GPU by way of two sets of pinned memory."""
    cuda = device.type == "cuda"
    memory = itertools.cycle(
        [
            ({name: torch.empty(TOKENS, dtype=torch.int32, pin_memory=cuda) for name in data.flat}, [])
            for _ in range(2)
        ]
    )
    for chosen in data.batches():
        lengths, starts = data.lengths[chosen], _cumulative(data, chosen)
        total = int(starts[-1])
        position = np.arange(total) - np.repeat(starts[:-1].numpy(), lengths)
        index = torch.from_numpy(position + np.repeat(data.starts[chosen], lengths))
        out, copied = next(memory)
        while copied:
            copied.pop().synchronize()
        batch: dict[str, Any] = {
            name: torch.index_select(values, 0, index, out=out[name][:total])
            for name, values in data.flat.items()
        }
        batch |= {"cu_seqlens": starts, "position": torch.from_numpy(position.astype(np.int32))}
        if cuda:
            batch = {name: part.to(device, non_blocking=True) for name, part in batch.items()}
            copied.append(torch.cuda.Event())
            copied[0].record()
        yield batch


def _joined(data: Sequences) -> Iterator[dict[str, Any]]:
    """Batches of slices, one after another."""
    out = {name: torch.empty(TOKENS, dtype=torch.int32) for name in data.flat}
    for chosen in data.batches():
        starts = _cumulative(data, chosen)
        total, lengths = int(starts[-1]), data.lengths[chosen].tolist()
        slices = [slice(a, a + n) for a, n in zip(data.starts[chosen].tolist(), lengths, strict=True)]
        batch: dict[str, Any] = {
            name: torch.cat([values[part] for part in slices], out=out[name][:total])
            for name, values in data.flat.items()
        }
        position = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths])
        yield {**batch, "cu_seqlens": starts, "position": position}


def _padded(data: Sequences) -> Iterator[dict[str, Any]]:
    """Batches [rows, longest], padded."""
    for chosen in data.batches():
        begins, lengths = data.starts[chosen].tolist(), data.lengths[chosen].tolist()
        slices = [slice(a, a + n) for a, n in zip(begins, lengths, strict=True)]
        batch: dict[str, Any] = {
            name: pad_sequence([values[part] for part in slices], batch_first=True)
            for name, values in data.flat.items()
        }
        yield {**batch, "cu_seqlens": _cumulative(data, chosen)}


def _check_packed(batch: Any, data: Sequences) -> None:
    """Raise Incorrect unless every row is a sequence in every column."""
    starts = batch["cu_seqlens"].tolist()
    first = batch["column0"][batch["cu_seqlens"][:-1].long()].numpy()
    chosen = np.searchsorted(data.starts, first)
    if starts[-1] > TOKENS or np.diff(starts).tolist() != data.lengths[chosen].tolist():
        raise Incorrect("rows are not the sequences that they begin with")
    expected = np.concatenate([np.arange(data.lengths[i]) for i in chosen])
    if not np.array_equal(batch["position"].numpy(), expected):
        raise Incorrect("positions do not count the steps of each row")
    place = torch.from_numpy(expected + np.repeat(data.starts[chosen], data.lengths[chosen]))
    for name, values in data.flat.items():
        if not torch.equal(batch[name], values[place]):
            raise Incorrect(f"{name} does not hold the steps of its sequences")


def _check_padded(batch: Any, data: Sequences) -> None:
    """Raise Incorrect unless every row is a sequence, and zeros after it."""
    lengths = batch["cu_seqlens"].diff()
    there = torch.arange(int(lengths.max())) < lengths[:, None]
    _check_packed(
        {
            **{name: batch[name][there] for name in data.flat},
            "cu_seqlens": batch["cu_seqlens"],
            "position": torch.cat([torch.arange(length) for length in lengths.tolist()]),
        },
        data,
    )
    if any((batch[name][~there] != 0).any() for name in data.flat):
        raise Incorrect("padding is not zero")
