"""``python -m benchmarks memory``: bytes resident for each byte of payload, with trajectories of uneven length.

Payload is the bytes of the steps themselves, float32 columns of random values. Every value is of a process of its own:
it stores a few trajectories and forgets them, then stores all, reads some back and compares them; the growth of its
own resident memory, over the payload, is the figure. What is needed only to draw is not counted.

Ours is a table with as many blocks as these lengths need, of the size (`BLOCKS`, and the length itself where all are
equal) that needs the fewest bytes for them; the same in shared memory ("named"), and with other sizes of blocks. "fixed
rows" is GEAR's way: a row of the longest length for each, touched, as pinned memory is. TorchRL holds single steps for
its `SliceSampler`, or a padded row for each; each column of a trajectory is one chunk in Reverb, or chunks as it
chooses them; cpprb holds single steps.

Those with a row for each take as many of the trajectories as fit into `ROWS_BYTES`, the longest among them; rows say
how much payload that was. Episodes of Hopper-v5 are collected with random actions, and repeated until there are enough.
The parts of what a table takes beyond the payload (ends of blocks, padding of blocks, index) are in the rows' `extras`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch

import gear_loader as gear
from benchmarks.harness import Amount, Session
from benchmarks.options import described, experiment
from benchmarks.peers.catalog import Contender, contenders
from benchmarks.workloads import W1, W2
from gear_loader.storage.layout import Layout
from gear_loader.storage.schema import Schema

SEED = 11
BLOCKS = (8, 16, 32, 64)
AT_MOST = 1.05
ROWS_BYTES = 768 << 20
UNIT = "bytes resident / byte of payload"
PADDED = ("fixed rows", "TorchRL, padded")
HOPPER = "Hopper-v5 episodes"
HOPPER_COLUMNS = {"observation": (11,), "action": (3,), "reward": ()}

Lengths = Callable[[np.random.Generator, int], np.ndarray]


def _log_normal(random: np.random.Generator, count: int) -> np.ndarray:
    return np.clip(random.lognormal(np.log(60), 1.0, count), 1, 1000).astype(np.int64)


DISTRIBUTIONS: dict[str, Lengths] = {
    "even": lambda random, count: np.full(count, 100),
    "uniform 1-512": lambda random, count: random.integers(1, 513, count),
    "uniform 100-1000": lambda random, count: random.integers(100, 1001, count),
    "geometric, mean 100": lambda random, count: random.geometric(0.01, count),
    "log-normal, at most 1000": _log_normal,
}
"""Name -> makes so many lengths. The log-normal one has a median of 60 and a mean of about 100."""


@experiment("memory", repeats=(1, 2))
def command(
    session: Session,
    payload: Annotated[float | None, described("Megabytes of steps: 100 by default.", min=1)] = None,
) -> None:
    """Bytes resident for each byte of payload, with trajectories of uneven length."""
    payload_bytes = int(1e6 * (payload or (8 if session.quick else 100)))
    session.configure(payload_bytes=payload_bytes, seed=SEED)
    for setting in _settings(session, payload_bytes):
        if not session.late(setting.label):
            measured(session, setting, kinds(session, setting))


@dataclasses.dataclass(frozen=True)
class Setting:
    """Columns (name -> shape of a step), and the lengths of the trajectories: int64 [n]."""

    workload: str
    columns_name: str
    columns: Mapping[str, tuple[int, ...]]
    lengths: np.ndarray

    @property
    def step_bytes(self) -> int:
        return 4 * sum(int(np.prod(shape)) for shape in self.columns.values())

    @property
    def label(self) -> str:
        return f"{self.workload}, columns of {self.columns_name}"

    def of_rows(self) -> Setting:
        """As many of them as fit into `ROWS_BYTES` with a row for each; the longest comes first."""
        longest = int(self.lengths.max())
        count = max(1, ROWS_BYTES // (longest * self.step_bytes))
        first = int(np.argmax(self.lengths))
        others = np.delete(self.lengths, first)[: count - 1]
        return dataclasses.replace(self, lengths=np.concatenate(([longest], others)))


def _settings(session: Session, payload: int) -> Iterator[Setting]:
    def made(workload: str, name: str, columns: Mapping[str, Any], make: Lengths) -> Setting:
        found = Setting(workload, name, columns, np.empty(0))
        return dataclasses.replace(found, lengths=_enough(make, payload // found.step_bytes))

    for workload in (W2,) if session.quick else (W2, W1):
        for name in ("uniform 1-512",) if session.quick else DISTRIBUTIONS:
            yield made(name, workload.name, dict(workload.columns), DISTRIBUTIONS[name])
    episodes = None if session.quick else session.attempt(HOPPER, _hopper)
    if episodes is not None:
        yield made(HOPPER, "Hopper-v5", HOPPER_COLUMNS, lambda random, count: np.resize(episodes, count))


def _enough(make: Lengths, steps: int) -> np.ndarray:
    """Lengths of about so many steps together."""
    random = np.random.default_rng(SEED)
    mean = float(make(np.random.default_rng(SEED), 4096).mean())
    return make(random, max(64, int(steps / mean)))


def _hopper(steps: int = 40_000) -> np.ndarray:
    episodes = gear.sources.collect("Hopper-v5", max_steps=steps, seed=SEED, progress=False)
    return np.array([len(episode["reward"]) for episode in episodes])


def best_block(setting: Setting) -> int:
    """The size of blocks that needs the fewest bytes for these lengths."""
    lengths = setting.lengths
    sizes = {*BLOCKS, *([int(lengths[0])] if np.all(lengths == lengths[0]) else [])}
    columns = {name: gear.Column(torch.float32, shape) for name, shape in setting.columns.items()}

    def region_bytes(block: int) -> int:
        blocks = gear.Table.required_blocks(lengths, block)
        sizes = {"max_steps": int(lengths.sum()), "max_trajectories": len(lengths)}
        return Layout(
            Schema(columns), **sizes, block_steps=block, num_blocks=blocks, packed=True
        ).region_bytes

    return min(sorted(sizes), key=region_bytes)


def kinds(session: Session, setting: Setting) -> list[Contender]:
    """The variants of a setting, ours first: with the best size of blocks, the same named, and with other sizes."""
    own = {"ours": "gear", "fixed rows": "plain", "list of tensors": "plain"}
    ours, *others = contenders(session.peers, "memory", own, patience=900.0)
    best, goal = best_block(setting), None if setting.workload == "even" else AT_MOST
    found = [
        dataclasses.replace(ours, options={"block_steps": best}, at_most=goal),
        dataclasses.replace(
            ours, name="ours, named", options={"block_steps": best, "named": True}, at_most=goal
        ),
    ]
    for block in () if session.quick else sorted({*BLOCKS} - {best}):
        found.append(
            dataclasses.replace(ours, name=f"ours, blocks of {block}", options={"block_steps": block})
        )
    slow = ("Reverb, automatic chunks", "TorchRL, padded") if session.quick else ()
    return found + [one for one in others if one.name not in slow]


def measured(session: Session, setting: Setting, kinds: Sequence[Contender]) -> None:
    """Measure and show one setting."""
    amounts = []
    for kind in kinds:
        with session.console.status(f"{setting.label}: {kind.name}"):
            made = functools.partial(_amount, session, setting, kind)
            found = session.attempt(f"{kind.name}, {setting.label}", made, required=kind.required)
            if found is not None:
                amounts.append(session.record(found))
    session.show_amounts(amounts)


def _amount(session: Session, setting: Setting, kind: Contender) -> Amount:
    """A figure of each of several processes, one after another."""
    told = setting.of_rows() if kind.name in PADDED else setting
    spec = {"columns": told.columns, "lengths": told.lengths.tolist(), "seed": SEED}
    values, answer, about = [], {}, {}
    for _ in range(session.repeats):
        with contextlib.closing(kind.launch()) as process:
            about = process.about
            answer = process.ask("measure", spec=spec, options=dict(kind.options))
        values.append(answer["bytes"] / answer["payload"])
    parameters = {
        "columns": setting.columns_name,
        "trajectories": len(told.lengths),
        "payload_bytes": answer["payload"],
        "mean_steps": float(told.lengths.mean()),
        "longest": int(told.lengths.max()),
        **kind.options,
        **({} if kind.required else {"peer": about}),
    }
    names = ("memory", setting.workload, setting.label, kind.name)
    return Amount(*names, values, UNIT, parameters, kind.at_most, extras=answer["extras"])
